//! Recipes: what is cast, with which scales, and what FP8 does to losses.

pub mod calibrate;
pub mod cast_log;
pub mod casts;
pub mod convergence;
pub mod fp16;
pub mod golden;
pub mod golden_settings;
pub mod high_precision;
pub mod products;
pub mod smooth;
