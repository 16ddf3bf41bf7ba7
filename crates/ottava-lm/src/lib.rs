//! Recipes, layers, models, optimizers, data and checkpoints for training language models in FP8.
#![forbid(unsafe_code)]

pub mod error;

pub use error::{Error, Result};
