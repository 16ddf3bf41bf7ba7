//! Whole runs: data, resuming, interruptions and the best checkpoint.

pub mod best;
pub mod ema;
pub mod evaluation_batch;
pub mod interruptions;
pub mod mixture;
pub mod resume;
pub mod streaming;
pub mod tasks;
pub mod tokens;
