//! One run is one TOML file. Every key has a default, shown with its meaning in `configs/reference.toml`; unknown keys are errors.
//!
//! No setting is ignored: an unknown key is an error with a suggestion. To add a key: its field in this folder, a line with a comment in
//! `configs/reference.toml`, and `ottava schema > configs/run.schema.json`. `schema` (`schema.rs`) finds kinds and names by trying values. `words/`
//! answers keys and flags of other trainers, and earlier spellings.
#![forbid(unsafe_code)]

mod alarms;
mod auto;
mod conflicts;
mod data;
mod datasets;
mod debug;
mod effects;
mod flags;
mod import;
mod init_from;
mod keys;
mod load;
mod lora;
mod memory;
mod names;
mod objective;
mod parallel;
mod precision;
mod problems;
mod resolved;
mod router;
mod run;
mod schema;
mod sentinel;
mod sentinel_runs;
mod starter;
#[cfg(test)]
mod tests;
mod words;
mod yaml;

pub use alarms::AlarmsConfig;
pub use data::{DataConfig, DatasetConfig};
pub use debug::DebugConfig;
pub use flags::describe_flag;
pub use import::{Imported, import};
pub use lora::LoraConfig;
pub use memory::{MemoryConfig, OptimizerConfig, OptimizerName};
pub use objective::{LossType, LossTypes, ObjectiveKind, ObjectiveProperties, PreferenceConfig};
pub use parallel::ParallelConfig;
pub use precision::formats;
pub use resolved::ResolvedConfig;
pub use router::RouterConfig;
pub use run::{DeviceChoice, GenerationConfig, ModelConfig, RunConfig, TrainingConfig, WeightInit};
pub use schema::schema;
pub use sentinel::SentinelConfig;
pub use starter::{SCHEMA, Starter, starter};
