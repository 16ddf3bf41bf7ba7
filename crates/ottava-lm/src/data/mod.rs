//! Training data: text files, cached tokens, and batches in a computed order.

mod eval_loader;
pub mod loader;
pub mod order;
mod pieces;
pub mod prepare;
pub mod shards;
pub mod source;
pub mod tokenizer;

pub use eval_loader::{EvalLoader, Windows};
pub use loader::{Batch, BatchLoader, LoaderState, Shard};
pub use order::Split;
pub use prepare::prepare;
pub use shards::TokenDataset;
pub use source::{Documents, SourceOptions};
pub use tokenizer::Tokenizer;
