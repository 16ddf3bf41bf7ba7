//! What the crate promises, one module per family. Everything runs on the CPU and, where there is a GPU, again on that.

mod accumulation;
mod cast_log;
mod casts;
mod convergence;
mod determinism;
mod documents;
mod families;
mod fp16;
mod golden;
mod golden_settings;
mod gradients;
mod high_precision;
mod memory;
mod model_gradients;
mod products;
mod ranks;
mod real_model;
mod recompute;
mod referee;
mod resume;
mod saves;
mod setup;
mod sft;
mod smooth;
mod stages;
mod steps;
