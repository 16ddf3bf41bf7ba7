//! One run is one TOML file. Every key has a default, shown with its meaning in `configs/reference.toml`; unknown keys are errors.

mod aliases;
mod auto;
mod conflicts;
mod effects;
mod init_from;
mod keys;
mod load;
mod lora;
mod memory;
mod names;
mod parallel;
mod precision;
mod problems;
mod resolved;
mod run;
#[cfg(test)]
mod tests;

pub use lora::LoraConfig;
pub use memory::{MemoryConfig, OptimizerConfig, OptimizerName};
pub use parallel::ParallelConfig;
pub use precision::formats;
pub use resolved::ResolvedConfig;
pub use run::{DataConfig, DeviceChoice, GenerationConfig, ModelConfig, RunConfig, TrainingConfig, WeightInit};
