//! Training of language models in FP8.
//!
//! ```
//! use ottava_settings::RunConfig;
//! use ottava_tensor::Device;
//! use ottava_train::trainer::{Start, Trainer};
//! use std::sync::atomic::AtomicBool;
//!
//! let folder = tempfile::tempdir()?;
//! let write = |name: &str, text: &str| {
//!     let path = folder.path().join(name);
//!     std::fs::write(&path, text).map(|()| path)
//! };
//! let model = write(
//!     "model.json",
//!     r#"{"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
//!         "num_key_value_heads": 2, "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "vocab_size": 4096}"#,
//! )?;
//! let text = write("text.txt", &"The otter swims in the river.\n".repeat(40))?;
//! let settings = write("run.toml", "[model]\ninit = \"random\"\n[precision]\nrecipe = \"fp8-delayed\"")?;
//! let tokenizer = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/tokenizer");
//! let set = [
//!     format!("output_dir={:?}", folder.path().join("run")),
//!     format!("model.path={model:?}"),
//!     format!("model.tokenizer={tokenizer:?}"),
//!     format!("data.train_files=[{text:?}]"),
//!     "data.max_length=32".into(),
//!     "data.val_set_size=0".into(),
//!     "training.max_steps=2".into(),
//! ];
//! let mut losses = Vec::new();
//! let mut trainer = Trainer::new(RunConfig::load(&settings, &set)?.config, &Device::Cpu, &Start::New)?;
//! trainer.run(&AtomicBool::new(false), &mut |report| losses.push(report.result.loss))?;
//! assert_eq!(losses.len(), 2);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod batch_invariance;
pub mod bench;
pub mod calibrate;
pub mod evaluate;
pub mod monitor;
pub mod objective;
pub mod phase;
pub mod plan;
pub mod report;
pub mod run;
pub mod step;
pub mod tasks;
pub mod trainer;
