//! HTTP servers: of a model, and of the page that shows runs (`monitor`).
//!
//! The first is an HTTP server for completions and chats, in the form of OpenAI's API (<https://platform.openai.com/docs/api-reference>) with the
//! fields that users of vLLM send.
//!
//! The engine runs on a thread of its own (`worker`) and takes requests through a channel, so all requests share its batches
//! (`schedule`). A request becomes one or several completions (`choice`), whose events come back through one channel and are answered
//! in one of three forms (`answer`); dropping it cancels them.
//!
//! Clients are not trusted. `connections` bounds their number and the time that they take, `intake` the memory of bodies, `body` and
//! `params` the lists in them, all before work is done for them.
//!
//! To add a field of the API: `READ` or `NOT_IMPLEMENTED` and `Params::read` in `params`; a field of one endpoint only is in `OWN` of `completions`
//! or `chat`, or in `FIELDS` of `generate`. To add a format of tool calls: `ToolCallParser` and `CallStream` in `tool_calls`, which a `Choice` feeds. To add a constraint:
//! `Constraint` in `constraint`, and `Grammars` of the engine. `docs/serving.md` lists all of them.
#![forbid(unsafe_code)]

mod answer;
mod backend;
mod body;
mod chat;
mod choice;
mod completions;
mod connections;
mod constraint;
mod embeddings;
mod error;
mod generate;
mod intake;
mod json;
mod logprobs;
mod metrics;
mod monitor;
mod origin;
mod params;
mod preparing;
mod schedule;
mod served;
mod server;
mod stranger;
mod token_ids;
mod tokens;
mod tool_calls;
mod worker;

#[cfg(test)]
mod tests;

pub use backend::Backend;
pub use monitor::monitor;
pub use origin::Origin;
pub use server::{Model, NamedAdapter, Options, serve};
pub use tool_calls::ToolCallParser;
