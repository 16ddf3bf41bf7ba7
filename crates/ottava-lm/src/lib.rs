//! Recipes, layers, models, optimizers, data and checkpoints for training language models in FP8.
#![forbid(unsafe_code)]

pub mod checkpoint;
pub mod data;
pub mod error;
pub mod hash;
pub mod report;

pub use error::{Error, Result};
