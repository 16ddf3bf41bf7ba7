//! The step: gradients, precision of products, recomputation, capture, and division into micro-batches.

pub mod accumulation;
pub mod determinism;
pub mod documents;
pub mod gradients;
pub mod memory;
pub mod model_gradients;
pub mod muon;
pub mod optimizers;
pub mod recompute;
pub mod stages;
pub mod steps;
