//! Recipes, layers, models, optimizers, data and checkpoints for training language models in FP8.
//!
//! Modules stand on floors, and a file imports from its own floor or from lower floors. Read upwards:
//!
//! - 3: errors, files, the values that describe a run (`recipe`, `level`, `lora`, `recompute`, `mode`), scales (`scaling`), operands of products
//!   (`operand`) and parameters (`param`)
//! - 4: `layers`
//! - 5: `models`
//! - 6: `parallel`, `optim`, `data`, `checkpoint`, `convert`, `engine`, `report`, `sentinel`
//! - 7: `config`, `step`, `evaluate`, `objective`, `plan`, `run`, `trainer`, `monitor`, `export`, `bench`
//!
//! Entry points: `Trainer` trains a run, `ResolvedRun` resolves and plans it, `Run` is one step of it without data, and `Engine` generates text.
//! There is no network access at run time.
#![forbid(unsafe_code)]

pub mod background;
pub mod bench;
pub mod calibrate;
pub mod capture;
pub mod checkpoint;
pub mod config;
pub mod context;
pub mod convert;
pub mod data;
pub mod engine;
pub mod error;
pub mod evaluate;
pub mod export;
pub mod fs;
pub mod hash;
pub mod input;
pub mod interrupt;
pub mod launch;
pub mod layer_ranks;
pub mod layers;
pub mod level;
pub mod limits;
pub mod lora;
pub mod mode;
pub mod models;
pub mod monitor;
pub mod objective;
pub mod operand;
pub mod optim;
pub mod parallel;
pub mod param;
pub mod plan;
pub mod recipe;
pub mod recompute;
pub mod report;
pub mod run;
pub mod scaling;
pub mod sentinel;
pub mod step;
pub mod trainer;

pub use error::{Error, Result};
