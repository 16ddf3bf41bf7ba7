//! Training data: text files, cached tokens, and batches in a computed order.

pub mod chat;
mod clock;
mod edges;
mod encode;
mod eval_loader;
mod guard;
pub mod loader;
pub mod order;
mod packing;
mod pieces;
pub mod prepare;
pub mod preview;
mod python;
pub mod records;
pub mod shards;
pub mod source;
pub mod tokenizer;
mod tokenizer_parts;

pub use chat::{Chat, ChatTemplate, PromptForm};
pub use clock::Clock;
pub use eval_loader::{EvalLoader, Windows};
pub use loader::{Batch, BatchLoader, LoaderState, RowShare};
pub use order::Split;
pub use packing::{ExcessLength, Fit, Packing, RowLayout};
pub use prepare::prepare;
pub use records::{Content, Formatting};
pub use shards::TokenDataset;
pub use source::{Documents, SourceOptions};
pub use tokenizer::Tokenizer;
