//! HTTP servers: a server of a model, and a server of the page that shows runs (`monitor`).
//!
//! The server of a model answers requests for completions and chats in the form of OpenAI's API (<https://platform.openai.com/docs/api-reference>),
//! with further fields that users of vLLM send.
//!
//! ```
//! use ottava_serve::{Origin, ToolCallParser};
//!
//! let parser: ToolCallParser = "hermes".parse().unwrap();
//! assert_eq!(parser.name(), "hermes");
//! assert!("https://chat.example.org:8443".parse::<Origin>().is_ok());
//! assert!("chat.example.org/page".parse::<Origin>().is_err());
//! ```
//!
//! The engine runs on its own thread (`worker`). All requests reach it through one channel, so they share batches (`schedule`). A request becomes one
//! or several completions (`choice`). The events of its completions return through one channel and are answered in one of three forms (`answer`).
//! Dropping the answer cancels the completions.
//!
//! The endpoint of a training run (`endpoint`) is a server without a thread of its own for the engine: between steps, the thread of the run lends its
//! engine to the `Schedule` until clients have returned the completions that the run waits for (`rollouts`).
//!
//! Clients are not trusted. `connections` limits the number of connections and the time of clients, `intake` limits the memory of bodies, and `body`
//! and `params` limit the lists in bodies. These limits are checked before work is done for a request.
//!
//! To add a field of the API, add it to `READ` or `NOT_IMPLEMENTED` and to `Params::read` in `params`. A field of a single endpoint belongs to `OWN`
//! in `completions` or
//! `chat`, or to `FIELDS` in `generate`. To add a format of tool calls, extend `ToolCallParser` and `CallStream` in `tool_calls`; a `Choice` passes text to a `CallStream`. To
//! add a constraint, extend `Constraint` in `constraint`, and `Grammars` of the engine. `docs/serving.md` lists all fields, formats and constraints.
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
mod endpoint;
mod error;
mod finish;
mod generate;
mod intake;
mod json;
mod logprobs;
mod metrics;
mod monitor;
mod origin;
mod params;
mod preparing;
mod rollouts;
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
pub use endpoint::Endpoint;
pub use monitor::monitor;
pub use origin::Origin;
pub use server::{Model, NamedAdapter, Options, serve};
pub use tool_calls::ToolCallParser;
