//! Training text: from files to tokens on disk, and from there to batches in a computed order.

pub mod tokenizer;

pub use tokenizer::Tokenizer;
