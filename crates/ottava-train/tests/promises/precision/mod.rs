//! Recipes: their casts, their scales, and the effect of FP8 on losses.

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
