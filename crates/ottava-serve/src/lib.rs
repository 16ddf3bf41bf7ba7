//! HTTP servers: a server of a model, and a server of the page that shows runs (`monitor`).
//!
//! The server of a model answers requests for completions and chats in the form of OpenAI's API (<https://platform.openai.com/docs/api-reference>),
//! with further fields that users of vLLM send, and requests for messages in the form of Anthropic's API.
//!
//! ```
//! use ottava_serve::{Origin, ReasoningParser, ToolCallParser};
//!
//! let parser: ToolCallParser = "hermes".parse().unwrap();
//! assert_eq!(parser.name(), "hermes");
//! assert_eq!("qwen3".parse::<ReasoningParser>().unwrap().name(), "think");
//! assert!("https://chat.example.org:8443".parse::<Origin>().is_ok());
//! assert!("chat.example.org/page".parse::<Origin>().is_err());
//! ```
//!
//! The engine runs on its own thread (`worker`). All requests reach it through one channel, so they share batches (`schedule`). A request becomes one
//! or several completions (`choice`), whose text a `reader` divides into reasoning, content and calls. The events of its completions return through one
//! channel and are answered in the form of the API (`answer`): lists of `choices`, `responses`, or messages (`anthropic`). Responses and messages are
//! chats in other words: their requests are translated to the fields of a chat (`chat_request`). Dropping the answer cancels the completions.
//!
//! The endpoint of a training run (`endpoint`) is a server without a thread of its own for the engine: between steps, the thread of the run lends its
//! engine to the `Schedule` until clients have returned the completions that the run waits for (`rollouts`).
//!
//! Clients are not trusted. `connections` limits the number of connections and the time of clients, `intake` limits the memory of bodies, and `body`
//! and `params` limit the lists in bodies. These limits are checked before work is done for a request.
//!
//! To add a field of the API, add it to `READ`, `HARMLESS` or `NOT_IMPLEMENTED` and to `Params::read` in `params`. A field of a single endpoint belongs to
//! `OWN` in `completions`, `chat_request`, `responses` or `anthropic`, or to `FIELDS` in `generate`. To add a format of tool calls, implement
//! `Format` in `tool_calls` and add a row to its table; marks of reasoning are a table in `reasoning`. To add a constraint, extend `Constraint` in
//! `constraint`, and `Grammars` of the engine. `docs/serving.md` lists all fields, formats and constraints.
#![forbid(unsafe_code)]

mod annotations;
mod answer;
mod anthropic;
mod backend;
mod blocks;
mod body;
mod channels;
mod chat;
mod chat_request;
mod choice;
mod choices;
mod classifier;
mod classify;
mod closed;
mod completions;
mod connections;
mod constraint;
mod described;
mod embeddings;
mod endpoint;
mod error;
mod finish;
mod format;
mod generate;
mod intake;
mod invocations;
mod json;
mod logprobs;
mod lora_updates;
mod metrics;
mod models;
mod monitor;
mod origin;
mod page;
mod params;
mod preparing;
mod ranking;
mod reader;
mod reasoning;
mod response_store;
mod responses;
mod rollouts;
mod routes;
mod schedule;
mod schemas;
mod served;
mod server;
mod stranger;
mod token_ids;
mod tokens;
mod tolerance;
mod tool_calls;
mod tool_choice;
mod truncation;
mod worker;

#[cfg(test)]
mod tests;

pub use backend::Backend;
pub use classifier::{Activation, Classifier};
pub use endpoint::Endpoint;
pub use models::OpenAdapters;
pub use monitor::monitor;
pub use origin::Origin;
pub use reasoning::ReasoningParser;
pub use server::{Model, NamedAdapter, Options, serve};
pub use tool_calls::ToolCallParser;
