//! The tables `[evaluation]`, `[checkpoint]` and `[logging]`: what a run does between its steps.

use crate::auto;
use crate::interval::Interval;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// The `[evaluation]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EvaluationConfig {
    /// Steps between evaluations; "end" evaluates only at the start and the end.
    pub eval_steps: Interval,
    /// Sequences per batch of an evaluation, on each rank that has batches of its own; without the key, training.per_device_train_batch_size. The size
    /// changes losses by rounding only, or, in recipes with one scale per tensor, by the scales of the batches.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(example = 8)]
    pub per_device_eval_batch_size: Option<usize>,
    /// Files of tasks that each evaluation computes besides the validation loss, such as ["tasks/words.toml"] (docs/tasks.md). metrics.jsonl gets
    /// eval_TASK_METRIC for each task and metric.
    pub tasks: Vec<PathBuf>,
    /// Whether each evaluation that is better than all earlier evaluations saves a checkpoint, whatever save_steps is. The best checkpoint
    /// is then kept, whatever save_total_limit is, and samples after the run are generated with it.
    pub load_best_model_at_end: bool,
    /// The metric that decides which checkpoint is the best: eval_loss or eval_bits_per_byte, for the data set NAME eval_NAME_loss or
    /// eval_NAME_bits_per_byte, for a task eval_TASK_METRIC, or for a classifier eval_accuracy, eval_f1, eval_mse or eval_pearson. Lower values are
    /// better, except of accuracy, f1 and pearson, and of acc, acc_norm, acc_bytes and exact_match of tasks.
    pub metric_for_best_model: String,
    /// The run ends after this many evaluations in a row without improvement; 0 turns early stopping off.
    pub early_stopping_patience: u64,
    /// An evaluation is an improvement if its metric is better than the best earlier value by more than this amount.
    pub early_stopping_threshold: f64,
    /// Completions that reinforcement learning draws of each held-out prompt, besides the most likely completion; with n completions, the
    /// evaluation reports eval_pass@k for each power of two k up to n. 0 draws only the most likely completion.
    pub num_generations: usize,
    /// Smallest reward of a completion that passes: it counts in eval_accuracy and eval_pass@k.
    pub pass_reward: f64,
}

/// The `[checkpoint]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointConfig {
    /// Steps between checkpoints; "end" saves only at the end and when a signal stops the run.
    pub save_steps: Interval,
    /// Minutes after which a checkpoint is saved although save_steps is not reached, for long steps; 0 saves by steps alone. With
    /// save_steps = "end", it has no effect.
    pub save_minutes: f64,
    /// Number of newest checkpoints to keep; 0 keeps all checkpoints.
    pub save_total_limit: usize,
    /// Whether checkpoints hold the model alone, without the states of the optimizer. No run can resume from such a checkpoint. A
    /// checkpoint that a signal or the sentinel causes holds all, so that this run resumes.
    pub save_only_model: bool,
    /// Whether training continues while a checkpoint is written from a copy in host memory (pinned memory for a GPU): true, false, or
    /// "auto" (true if the host has memory for the copy). `ottava plan` prints the size of the copy.
    #[serde(with = "auto")]
    #[schemars(with = "auto::Auto<bool>")]
    pub async_save: Option<bool>,
    /// A store that gets a copy of each checkpoint, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX; "" makes no copies. A run with
    /// --resume starts from the newest copy if its folder has no newer checkpoint.
    pub upload_to: String,
}

/// The `[logging]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LoggingConfig {
    /// Steps between lines on the terminal. metrics.jsonl has every step.
    pub logging_steps: u64,
    /// Steps between lines of casts.jsonl, the statistics of each FP8 cast that `ottava inspect` reads; 0 writes none.
    pub cast_statistics_steps: u64,
    /// Completions of each generation of reinforcement learning whose texts and rewards are written to completions.jsonl; 0 writes none.
    pub completions: usize,
    /// Trackers that get metrics and settings while the run trains: "mlflow", "trackio", "wandb" (a file for `wandb sync`). "tensorboard" is always on.
    /// Data are never sent, and texts only in files of report_files.
    pub report_to: Vec<TrackerKind>,
    /// The project of the run in trackers; the experiment in MLflow.
    pub project: String,
    /// The name of the run in trackers; "" is the name of the folder output_dir.
    pub run_name: String,
    /// Files in output_dir that MLflow gets at the end of the run. Example: ["loss.svg", "completions.jsonl"].
    pub report_files: Vec<String>,
}

/// A program that shows the metrics of runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum TrackerKind {
    /// A server of MLflow.
    Mlflow,
    /// A server of Trackio.
    Trackio,
    /// Weights & Biases, by a file that `wandb sync` sends.
    Wandb,
    /// TensorBoard, whose files every run writes.
    Tensorboard,
}

impl Default for EvaluationConfig {
    fn default() -> EvaluationConfig {
        EvaluationConfig {
            eval_steps: Interval::End,
            per_device_eval_batch_size: None,
            tasks: Vec::new(),
            load_best_model_at_end: false,
            metric_for_best_model: "eval_loss".into(),
            early_stopping_patience: 0,
            early_stopping_threshold: 0.0,
            num_generations: 0,
            pass_reward: 1.0,
        }
    }
}

impl Default for CheckpointConfig {
    fn default() -> CheckpointConfig {
        let upload_to = String::new();
        CheckpointConfig {
            save_steps: Interval::Every(500),
            save_minutes: 60.0,
            save_total_limit: 3,
            save_only_model: false,
            async_save: None,
            upload_to,
        }
    }
}

impl Default for LoggingConfig {
    fn default() -> LoggingConfig {
        LoggingConfig {
            logging_steps: 10,
            cast_statistics_steps: 100,
            completions: 4,
            report_to: Vec::new(),
            project: "ottava".into(),
            run_name: String::new(),
            report_files: Vec::new(),
        }
    }
}

impl CheckpointConfig {
    /// Whether a checkpoint is due when the newest one is this old.
    pub fn is_due_after(&self, age: Duration) -> bool {
        let is_on = self.save_minutes > 0.0 && self.save_steps != Interval::End;
        is_on && age.as_secs_f64() >= self.save_minutes * 60.0
    }
}

impl EvaluationConfig {
    /// Whether evaluations are compared with each other.
    pub fn compares(&self) -> bool {
        self.load_best_model_at_end || self.early_stopping_patience > 0
    }
}

impl LoggingConfig {
    /// Whether `step` is due for a line of casts.jsonl.
    pub fn logs_casts(&self, step: u64) -> bool {
        self.cast_statistics_steps > 0 && step.is_multiple_of(self.cast_statistics_steps)
    }
}
