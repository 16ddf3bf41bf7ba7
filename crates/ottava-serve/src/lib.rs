//! An HTTP server for completions and chats, in the form of OpenAI's API (<https://platform.openai.com/docs/api-reference>) with the
//! fields that users of vLLM send.
//!
//! The engine runs on a thread of its own ([`worker`]) and takes requests through a channel, so all requests share its batches. A request
//! becomes one or several completions ([`choice`]), whose events come back through one channel and are answered in one of two forms
//! ([`answer`]); dropping it cancels them.
#![forbid(unsafe_code)]

mod answer;
mod body;
mod chat;
mod choice;
mod completions;
mod error;
mod logprobs;
mod metrics;
mod params;
mod served;
mod server;
mod worker;

#[cfg(test)]
mod tests;

pub use server::{Model, Options, serve};
pub use worker::Backend;
