//! Scores of completions for reinforcement learning.
//!
//! A [`Reward`] scores a batch of [`Sample`]s, and [`Rewards`] adds several by weight, as the settings [`RewardSpec`] say. `docs/rewards.md` describes
//! every reward for users.
//!
//! - `rules/`: rewards that compute their score here. They are total: any completion is scored in time and memory linear in its length. A rule
//!   has no opinion only about right answers that it cannot read, so that no policy can choose to be not scored.
//! - `math/`: exact equality of mathematical answers.
//! - `external/`: a command, an HTTP server or a judge, with deadlines, attempts and [`OnError`]. A command is also the environment of several turns.
//!
//! To add a rule: a file in `rules/` with its settings and its `Rule`, a variant of `RewardKind` in `spec.rs`, and a section of `docs/rewards.md`.
#![forbid(unsafe_code)]

mod deadline;
mod environment;
mod external;
mod math;
mod reward;
mod rules;
mod sample;
mod spec;
mod weighted;

pub use deadline::Deadline;
pub use environment::{Environment, Episode, Step};
pub use external::{CommandConfig, HttpConfig, JudgeConfig, OnError};
pub use reward::{Reward, Scores};
pub use rules::{
    ExactConfig, Extract, FormatConfig, LengthConfig, MathConfig, NumberConfig, OverlongConfig, RegexConfig, RegexMatch,
};
pub use sample::{Prompt, Sample};
pub use spec::{RewardKind, RewardSpec};
pub use weighted::{Rewards, Scored};
