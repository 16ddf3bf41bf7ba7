//! The tasks of `ottava-tasks`, computed by a model.
//!
//! - `likelihood.rs`: log-likelihoods, by passes of [`Pass::Evaluation`](ottava_recipe::mode::Pass::Evaluation). Ranks divide the batches of a task.
//! - `texts.rs`: texts, by an engine.
//! - `run.rs`: the tasks of a run (`evaluation.tasks`), which are evaluated with its held-out rows.
//! - `samples.rs`: completions of the prompts of a run (`[generation]`), at its evaluations and at its end.
//!
//! `commands/eval_tasks.rs` of `ottava` is the option `--task` of `ottava eval`.

mod likelihood;
mod run;
mod samples;
mod texts;

pub use likelihood::{BatchSizes, log_likelihoods};
pub use run::RunTasks;
pub use samples::{RunSamples, sample_requests};
pub use texts::{complete_all, complete_texts};
