//! Problems of a configuration: values outside their ranges, and settings that conflict.

use crate::demands::{Problems, from_zero};
use crate::{RunConfig, TrackerKind};
use ottava_common::error::{Error, Result};
use ottava_recipe::recompute::Recompute;
use ottava_tensor::QuantizedTensor;
use std::path::{Component, Path};

impl RunConfig {
    /// Checks that the formats of precision and optimizer are compatible.
    pub fn expect_formats(&self) -> Result<()> {
        let problems = self.format_problems();
        if problems.is_empty() { Ok(()) } else { Err(Error::Config(problems.join("\n"))) }
    }

    /// Errors with the problems that this configuration has and `other` does not have.
    pub fn expect_no_more_problems_than(&self, other: &RunConfig) -> Result<()> {
        let known = other.problems();
        let problems: Vec<_> = self.problems().into_iter().filter(|problem| !known.contains(problem)).collect();
        if problems.is_empty() { Ok(()) } else { Err(Error::Config(problems.join("\n"))) }
    }

    fn format_problems(&self) -> Vec<String> {
        let mut problems = self.precision.problems();
        problems.extend(self.optimizer.formats().problem(self.precision.recipe().compute));
        problems
            .extend(self.parallel.problem(self.optimizer.formats().gradients, self.precision.loss_scaling().is_some()));
        problems
    }

    /// Lists all problems of the values, one sentence each.
    pub(super) fn problems(&self) -> Vec<String> {
        let mut problems = Problems(self.format_problems());
        problems.0.extend(self.lora_problems());
        problems.0.extend(self.tokenizer.problems());
        problems.demand(
            self.tokenizer.chat_template.is_empty() || self.data.chat.chat_template_path.as_os_str().is_empty(),
            "`tokenizer.chat_template` and `data.chat.chat_template_path` are both set, and a run has one chat template; remove one of them",
        );
        problems.0.extend(self.objective_problems());
        self.check_paths(&mut problems);
        self.check_counts(&mut problems);
        self.check_batch(&mut problems);
        self.check_layer_axes(&mut problems);
        self.check_batch_invariance(&mut problems);
        self.check_training(&mut problems);
        problems.0.extend(self.optimizer.problems());
        problems.0.extend(self.ema.problems());
        problems.0.extend(self.lr_scheduler.problems(self.optimizer.learning_rate));
        self.check_tasks(&mut problems);
        self.check_best(&mut problems);
        self.check_metrics(&mut problems);
        self.check_memory(&mut problems);
        self.check_sentinel(&mut problems);
        problems.0.extend(self.alarms.problems());
        problems.0.extend(self.router.problems());
        self.check_generation(&mut problems);
        self.check_checkpoints(&mut problems);
        self.check_logging(&mut problems);
        problems.0.extend(self.recovery_problems());
        problems.0
    }

    /// Checks settings of ranks that divide tensors or sequences: parts must have equal sizes, and codes are gathered in multiples of 16 tokens.
    fn check_layer_axes(&self, problems: &mut Problems) {
        let (tensor, rows) = (self.parallel.tensor, self.training.per_device_train_batch_size);
        let ranks = tensor.saturating_mul(self.parallel.context);
        let (tokens, multiple) =
            (rows.saturating_mul(self.data.max_length), ranks.saturating_mul(QuantizedTensor::PAD));
        problems.demand(
            tensor < 2 || tokens.is_multiple_of(multiple),
            format!(
                "a micro-batch has {tokens} tokens, and the {ranks} ranks of `parallel.tensor` and `parallel.context` divide multiples of {multiple}; change `data.max_length` or `training.per_device_train_batch_size`"
            ),
        );
        problems.0.extend(self.parallel.context_problem(self.data.max_length));
    }

    /// Checks that no sums over ranks depend on the batch, if results must not depend on it.
    fn check_batch_invariance(&self, problems: &mut Problems) {
        let of = &self.parallel;
        for (key, ranks) in [("tensor", of.tensor), ("context", of.context), ("expert", of.expert)] {
            problems.demand(
                ranks < 2 || !self.precision.batch_invariant,
                format!(
                    "`precision.batch_invariant` is true, and the sums of the {ranks} ranks of `parallel.{key}` depend on the batch; set `parallel.{key}` to 1, or leave `precision.batch_invariant` out"
                ),
            );
        }
    }

    fn check_paths(&self, problems: &mut Problems) {
        problems.demand(
            !self.model.path.as_os_str().is_empty(),
            "`model.path` is not set: name a model folder, or a config.json for random weights",
        );
        self.check_datasets(problems);
        self.check_streaming(problems);
        problems.demand(!self.output_dir.as_os_str().is_empty(), "`output_dir` is empty: name a folder for the run");
    }

    fn check_counts(&self, problems: &mut Problems) {
        let t = &self.training;
        let counts = [
            ("data.max_length", self.data.max_length as u64),
            ("training.per_device_train_batch_size", t.per_device_train_batch_size as u64),
            ("training.gradient_accumulation_steps", t.gradient_accumulation_steps as u64),
            ("logging.logging_steps", self.logging.logging_steps),
            ("precision.delayed.amax_history_len", self.precision.delayed.amax_history_len as u64),
        ];
        counts.into_iter().for_each(|(key, count)| problems.demand_count(key, count));
        let steps = [
            ("training.max_steps", t.max_steps.unwrap_or(1)),
            ("generation.max_new_tokens", self.generation.max_new_tokens as u64),
            ("precision.exceptions.first_layers_bf16", self.precision.exceptions.first_layers_bf16 as u64),
            ("precision.exceptions.last_layers_bf16", self.precision.exceptions.last_layers_bf16 as u64),
            ("precision.fp16.loss_scale_window", self.precision.fp16.loss_scale_window),
        ];
        steps.into_iter().for_each(|(key, count)| problems.demand_steps(key, count));
    }

    fn check_memory(&self, problems: &mut Problems) {
        let shares = [
            ("offload_optimizer", self.memory.offload_optimizer),
            ("offload_parameters", self.memory.offload_parameters),
        ];
        for (key, share) in shares {
            let words = format!("`memory.{key}` is a share: from 0 to 1, or \"auto\"");
            problems.demand(share.is_none_or(|share| (0.0..=1.0).contains(&share)), words);
        }
        problems.demand(
            !self.memory.offload_residuals || self.memory.recompute == Some(Recompute::Full),
            "`memory.offload_residuals` is for `memory.recompute = \"full\"`, which saves only the inputs of blocks",
        );
    }

    fn check_checkpoints(&self, problems: &mut Problems) {
        let checkpoint = &self.checkpoint;
        problems.demand(
            from_zero(checkpoint.save_minutes),
            format!("`checkpoint.save_minutes` is {}; it is a number from 0 up", checkpoint.save_minutes),
        );
        problems.demand(
            !(checkpoint.save_only_model && self.alarms.rolls_back()),
            "`checkpoint.save_only_model` saves no states, and an alarm with \"rollback\" under [alarms] returns to a checkpoint with them; change one of the two settings",
        );
    }

    fn check_logging(&self, problems: &mut Problems) {
        let store = &self.checkpoint.upload_to;
        problems.demand(
            store.is_empty() || ["s3://", "gs://", "az://"].iter().any(|scheme| store.starts_with(scheme)),
            format!("`checkpoint.upload_to` is \"{store}\"; write s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX"),
        );
        let inside = |name: &String| {
            let mut parts = Path::new(name).components();
            !name.is_empty() && parts.all(|part| matches!(part, Component::Normal(_)))
        };
        for name in &self.logging.report_files {
            let words = format!("`logging.report_files` has \"{name}\"; name files by their paths below `output_dir`");
            problems.demand(inside(name), words);
        }
        problems.demand(
            self.logging.report_files.is_empty() || self.logging.report_to.contains(&TrackerKind::Mlflow),
            "`logging.report_files` is for MLflow; add \"mlflow\" to `logging.report_to`, or remove the files",
        );
        problems.demand(!self.logging.project.is_empty(), "`logging.project` is empty; name a project");
    }

    fn check_generation(&self, problems: &mut Problems) {
        problems.demand(
            from_zero(self.generation.temperature),
            "`generation.temperature` must not be negative or infinite",
        );
        problems.demand(
            self.generation.top_p > 0.0 && self.generation.top_p <= 1.0,
            "`generation.top_p` lies outside (0, 1]",
        );
    }
}
