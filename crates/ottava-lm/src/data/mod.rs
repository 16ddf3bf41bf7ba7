//! Training data: files of text and records, cached tokens, and batches in a computed order.

pub mod chat;
mod clock;
mod compression;
mod edges;
mod encode;
mod eval_loader;
mod fields;
mod files;
#[cfg(test)]
mod formats_tests;
mod guard;
mod json_values;
mod left_out;
pub mod loader;
mod mapping;
mod marked;
mod megatron;
pub mod order;
mod packing;
mod pieces;
pub mod preference;
pub mod prepare;
pub mod preview;
mod python;
mod reads;
pub mod records;
pub mod shards;
pub mod source;
mod token_writer;
pub mod tokenizer;
mod tokenizer_parts;
pub mod turns;

pub use chat::{Chat, ChatTemplate, PromptForm};
pub use clock::Clock;
pub use eval_loader::{EvalLoader, Windows};
pub use files::expand;
pub use loader::{Batch, BatchLoader, LoaderState, RowShare};
pub use megatron::write_megatron;
pub use order::Split;
pub use packing::{ExcessLength, Fit, Packing, RowLayout};
pub use preference::{PreferenceBatch, PreferenceLoader, Records};
pub use prepare::prepare;
pub use records::{Content, Formatting};
pub use shards::{PreferenceKind, TokenDataset};
pub use source::{BadRecord, Documents, SourceOptions, TrainOnEos};
pub use tokenizer::Tokenizer;
