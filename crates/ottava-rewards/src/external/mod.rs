//! Rewards by programs and servers outside of Ottava, which may crash, hang and answer anything.
//!
//! All of them speak the protocol of `protocol.rs` and share one course: a batch is sent, and a wrong answer, a crash or a timeout is an attempt. After
//! the attempts, [`OnError`] says what the scores are.

mod child;
mod environment;
mod failure;
mod http;
mod judge;
mod lines;
mod parallel;
mod program;
mod protocol;
mod template;

pub use environment::EnvironmentConfig;
pub use failure::OnError;
pub use http::HttpConfig;
pub use judge::JudgeConfig;
pub use program::CommandConfig;

/// The most bytes of an answer.
const MAX_ANSWER: usize = 8 << 20;
