//! The settings of a run. One run is one TOML file. `configs/reference.toml` shows every key with its default and its meaning.
//!
//! ```
//! use ottava_settings::RunConfig;
//!
//! let config = RunConfig::default();
//! assert_eq!(config.data.max_length, 1024);
//! assert!(config.to_toml().contains("max_length = 1024"));
//! ```
//!
//! No setting is ignored: an unknown key is an error with a suggestion. To add a key, add a field in this crate; its doc comment is the text of the
//! reference. Then run `OTTAVA_GOLDEN=record cargo test -p ottava-settings the_`, which writes `configs/reference.toml` and
//! `configs/run.schema.json`. `old_keys.rs` has the earlier spellings of keys. `words/` translates keys and flags of other trainers.
#![forbid(unsafe_code)]

mod addresses;
mod alarms;
mod auto;
mod batch;
mod best;
mod communication;
mod conflicts;
mod data;
mod datasets;
mod debug;
mod demands;
mod effects;
mod ema;
mod evaluation;
mod flags;
mod import;
mod init_from;
mod interval;
mod keys;
mod load;
mod lora;
mod lr_scheduler;
mod memory;
mod migrate;
mod names;
mod objective;
mod old_keys;
mod optimizer;
mod pairs;
mod parallel;
mod paths;
mod precision;
mod problems;
mod recovery;
mod recovery_runs;
mod reference;
mod resolved;
mod resume;
mod router;
mod run;
mod schema;
mod sentinel;
mod sentinel_runs;
mod starter;
mod steps;
mod streaming;
mod tagged;
#[cfg(test)]
mod tests;
mod tokenizer;
mod tokenizer_files;
mod training;
mod words;

pub use addresses::{SCHEMES, without_queries};
pub use alarms::{AlarmsConfig, Rollbacks, Spikes};
pub use communication::CommunicationConfig;
pub use data::{ChatConfig, DataConfig, DatasetConfig, RecordsConfig};
pub use debug::DebugConfig;
pub use ema::EmaSettings;
pub use evaluation::{CheckpointConfig, EvaluationConfig, LoggingConfig, TrackerKind};
pub use flags::describe_flag;
pub use import::{Imported, import};
pub use interval::Interval;
pub use keys::key_paths;
pub use load::{Loaded, Resolve, parse_recipe};
pub use lora::LoraConfig;
pub use lr_scheduler::{LrSchedulerConfig, Warmup};
pub use memory::MemoryConfig;
pub use migrate::{Migrated, migrate};
pub use objective::{
    AdvantageConfig, AdvantageEstimator, Aggregation, ClassificationConfig, CorrectionConfig, CorrectionMode,
    DistillationConfig, EmbeddingConfig, EmbeddingPooling, EndpointConfig, KlEstimator, LossType, LossTypes,
    ObjectiveKind, ObjectiveProperties, PolicyConfig, PolicyLossType, PreferenceConfig, ProblemType,
    ReinforcementConfig, SamplingConfig, ScaleRewards,
};
pub use optimizer::{Adamw, Algorithm, Lion, Muon, OptimizerConfig};
pub use pairs::{Names, Pairs};
pub use parallel::ParallelConfig;
pub use paths::flatten;
pub use precision::formats;
pub use recovery::{RecoveryConfig, Stragglers};
pub use reference::reference;
pub use resolved::ResolvedConfig;
pub use router::RouterConfig;
pub use run::{DeviceChoice, GenerationConfig, ModelConfig, RunConfig, WeightInit};
pub use schema::schema;
pub use sentinel::SentinelConfig;
pub use starter::{SCHEMA, Starter, StarterOptions, starter};
pub use tokenizer::TokenizerConfig;
pub use training::TrainingConfig;
