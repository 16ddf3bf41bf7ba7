//! Recipes, layers, models, optimizers, data and checkpoints for training language models in FP8.
#![forbid(unsafe_code)]

pub mod checkpoint;
pub mod data;
pub mod error;
pub mod layer;
pub mod layers;
pub mod models;
pub mod param;
pub mod recipe;
pub mod scaling;
pub mod hash;
pub mod report;

pub use error::{Error, Result};
