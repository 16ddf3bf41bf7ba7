//! Training text: from files to tokens on disk, and from there to batches in a computed order.

pub mod source;
pub mod tokenizer;

pub use source::{Documents, SourceOptions};
pub use tokenizer::Tokenizer;
