//! Whole runs: data, resuming, interruptions and the best checkpoint.

pub mod best;
pub mod ema;
pub mod interruptions;
pub mod mixture;
pub mod resume;
pub mod tasks;
pub mod tokens;
