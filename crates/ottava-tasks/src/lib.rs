//! Evaluation tasks: questions in a file, the prompts that are made of them, and the scores of the answers of a language model.
//!
//! ```
//! use ottava_tasks::{Answers, Task};
//!
//! let folder = tempfile::tempdir()?;
//! std::fs::write(folder.path().join("items.jsonl"), r#"{"animal": "otter", "places": ["the river", "the moon"], "label": 0}"#)?;
//! let path = folder.path().join("task.toml");
//! let text = r#"
//!     name = "places"
//!     data = "items.jsonl"
//!     type = "multiple_choice"
//!     prompt = "The {{ animal }} lives in"
//!     choices = "places"
//!     answer = "label"
//! "#;
//! std::fs::write(&path, text)?;
//! let task = Task::load(&path)?;
//! // The log-likelihoods of the two choices, computed by a model.
//! let scores = task.score(&[2], &Answers::LogLikelihoods(vec![-3.0, -9.0]))?;
//! assert_eq!((scores.metrics[0].name, scores.metrics[0].value), ("acc", 1.0));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The numbers equal the numbers of lm-evaluation-harness (EleutherAI). Metrics and most keys have the names of lm-evaluation-harness.
//! `scripts/check_tasks.py` compares both programs.
//!
//! - `config.rs`, `kind.rs`: the TOML file of a task
//! - `template.rs`: texts of an item, by Jinja templates or by the names of fields
//! - `item.rs`: items with their prompts, choices and answers
//! - `encode.rs`: the tokens that a model reads, and which of them are scored
//! - `metric.rs`, `exact_match.rs`, `filter.rs`: scores
//!
//! This crate computes nothing with a model: `ottava-train` computes the [`Requests`] (`tasks/` there).
//!
//! To add a metric, add a variant of [`MetricName`] with its row in `MetricName::properties`, and its value in `score_choices`,
//! `score_completion` or `score_text` (`task.rs`).
#![forbid(unsafe_code)]

mod config;
mod encode;
mod exact_match;
mod filter;
mod item;
mod kind;
mod literal;
mod metric;
mod space;
mod task;
mod template;

pub use config::TaskConfig;
pub use encode::{Requests, Row, Texts};
pub use kind::TaskType;
pub use metric::{Measured, MetricName};
pub use task::{Answers, Scores, Task};
