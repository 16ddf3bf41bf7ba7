//! Problems of a configuration: values outside of their ranges, and settings that do not go together.

use crate::run::MAX_SEQUENCES;
use crate::{OptimizerName, RunConfig};
use ottava_common::error::{Error, Result};
use ottava_recipe::recompute::Recompute;
use ottava_tensor::QuantizedTensor;

/// The most tokens of a micro-batch, whose positions are counted in 32 bits.
const MAX_TOKENS: usize = i32::MAX as usize;

/// Sentences about what does not hold.
#[derive(Default)]
pub(super) struct Problems(pub(super) Vec<String>);

impl Problems {
    /// Adds `text` unless it `holds`.
    pub(super) fn demand(&mut self, holds: bool, text: impl Into<String>) {
        if !holds {
            self.0.push(text.into());
        }
    }
}

impl RunConfig {
    /// Checks that formats of precision and optimizer go together.
    pub fn expect_formats(&self) -> Result<()> {
        let problems = self.format_problems();
        if problems.is_empty() { Ok(()) } else { Err(Error::Config(problems.join("\n"))) }
    }

    /// Errors with the problems that `other` does not have.
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

    /// All problems of the values, a sentence each.
    pub(super) fn problems(&self) -> Vec<String> {
        let mut problems = Problems(self.format_problems());
        problems.0.extend(self.lora_problems());
        problems.0.extend(super::objective::problems(&self.preference));
        self.check_paths(&mut problems);
        self.check_counts(&mut problems);
        self.check_batch(&mut problems);
        self.check_layer_axes(&mut problems);
        self.check_training(&mut problems);
        self.check_memory(&mut problems);
        self.check_sentinel(&mut problems);
        problems.0.extend(self.alarms.problems());
        problems.0.extend(self.router.problems());
        self.check_generation(&mut problems);
        problems.0
    }

    /// Checks what ranks that divide tensors or sequences need: even parts; codes are gathered in multiples of 16 tokens, and Muon transforms whole matrices.
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
        for (key, ranks) in [("tensor", tensor), ("expert", self.parallel.expert)] {
            problems.demand(
                ranks < 2 || self.optimizer.name != OptimizerName::Muon,
                format!(
                    "`optimizer.name` is muon, which transforms whole matrices, and `parallel.{key}` is {ranks}, which divides them; set it to 1, or use adamw or lion"
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
        problems.demand(!self.output_dir.as_os_str().is_empty(), "`output_dir` is empty: name a folder for the run");
    }

    fn check_counts(&self, problems: &mut Problems) {
        let t = &self.training;
        let counts = [
            ("data.max_length", self.data.max_length as u64),
            ("training.per_device_train_batch_size", t.per_device_train_batch_size as u64),
            ("training.gradient_accumulation_steps", t.gradient_accumulation_steps as u64),
            ("training.logging_steps", t.logging_steps),
            ("training.lr_num_cycles", t.lr_num_cycles),
            ("precision.amax_history_len", self.precision.amax_history_len as u64),
        ];
        for (key, count) in counts {
            problems.demand(
                (1..=1 << 24).contains(&count),
                format!("`{key}` is {count}; it is a number from 1 to 16777216"),
            );
        }
        problems.demand(
            t.lr_power.is_finite() && t.lr_power > 0.0,
            format!("`training.lr_power` is {}; it is a number above 0", t.lr_power),
        );
        let steps = [
            ("training.max_steps", t.max_steps),
            ("training.warmup_steps", t.warmup_steps),
            ("training.decay_steps", t.decay_steps),
            ("generation.max_new_tokens", self.generation.max_new_tokens as u64),
            ("precision.first_layers_bf16", self.precision.first_layers_bf16 as u64),
            ("precision.last_layers_bf16", self.precision.last_layers_bf16 as u64),
            ("precision.loss_scale_window", self.precision.loss_scale_window),
        ];
        for (key, count) in steps {
            problems.demand(count <= 1 << 40, format!("`{key}` is {count}; it is at most 2^40"));
        }
    }

    fn check_batch(&self, problems: &mut Problems) {
        let t = &self.training;
        problems.demand(
            t.global_batch_size <= MAX_SEQUENCES,
            format!(
                "`training.global_batch_size` is {}; a step has at most {MAX_SEQUENCES} sequences",
                t.global_batch_size
            ),
        );
        let sequences = t.per_device_train_batch_size.saturating_mul(t.gradient_accumulation_steps);
        problems.demand(
            sequences <= MAX_SEQUENCES,
            format!(
                "`per_device_train_batch_size` times `gradient_accumulation_steps` is {sequences}; \
                 a step has at most {MAX_SEQUENCES} sequences"
            ),
        );
        let tokens = t.per_device_train_batch_size.saturating_mul(self.data.max_length);
        problems.demand(
            tokens <= MAX_TOKENS,
            format!(
                "`per_device_train_batch_size` times `max_length` is {tokens}; a micro-batch has at most {MAX_TOKENS} tokens"
            ),
        );
    }

    fn check_training(&self, problems: &mut Problems) {
        let t = &self.training;
        problems.demand(
            t.max_steps > 0 || (t.num_train_epochs > 0.0 && t.num_train_epochs.is_finite()),
            "set `training.max_steps` or `training.num_train_epochs` above 0",
        );
        problems
            .demand(t.learning_rate.is_finite() && t.learning_rate > 0.0, "`training.learning_rate` must be above 0");
        problems.demand(
            (0.0..=t.learning_rate).contains(&t.min_learning_rate),
            "`training.min_learning_rate` lies outside 0 to `learning_rate`",
        );
        problems.demand(
            (0.0..1.0).contains(&t.adam_beta1) && (0.0..1.0).contains(&t.adam_beta2),
            "`training.adam_beta1` and `adam_beta2` lie in [0, 1)",
        );
        problems.demand(
            (0.0..=1.0).contains(&t.warmup_ratio),
            "`training.warmup_ratio` is a share of the run's steps, from 0 to 1; a number of steps is `warmup_steps`",
        );
        problems.demand((0.0..1.0).contains(&t.muon_momentum), "`training.muon_momentum` lies in [0, 1)");
        problems.demand(
            (0.0..1.0).contains(&t.lion_beta1) && (0.0..1.0).contains(&t.lion_beta2),
            "`training.lion_beta1` and `lion_beta2` lie in [0, 1)",
        );
        self.check_best(problems);
        problems.demand(from_zero(t.adam_epsilon) && t.adam_epsilon > 0.0, "`training.adam_epsilon` must be above 0");
        self.check_singles(problems);
        problems.demand(from_zero(t.weight_decay), "`training.weight_decay` must not be negative or infinite");
        problems.demand(
            (0.0..1.0).contains(&t.label_smoothing_factor),
            "`training.label_smoothing_factor` is a share from 0 to less than 1",
        );
        problems.demand(
            from_zero(t.max_grad_norm),
            "`training.max_grad_norm` must not be negative or infinite; 0 turns clipping off",
        );
    }

    /// Updates compute in F32: what F32 rounds to 0, to infinity or to a share of 1 would act as another setting.
    fn check_singles(&self, problems: &mut Problems) {
        let t = &self.training;
        let sizes = [
            ("learning_rate", t.learning_rate),
            ("min_learning_rate", t.min_learning_rate),
            ("adam_epsilon", t.adam_epsilon),
            ("weight_decay", t.weight_decay),
            ("max_grad_norm", t.max_grad_norm),
        ];
        for (key, value) in sizes {
            let single = value as f32;
            problems.demand(
                value == 0.0 || single.is_normal() || !value.is_finite(),
                format!(
                    "`training.{key}` is {value:e}; steps compute in F32, whose numbers are 0 or lie between {:e} and {:e}",
                    f32::MIN_POSITIVE,
                    f32::MAX
                ),
            );
        }
        let shares = [
            ("adam_beta1", t.adam_beta1),
            ("adam_beta2", t.adam_beta2),
            ("lion_beta1", t.lion_beta1),
            ("lion_beta2", t.lion_beta2),
            ("muon_momentum", t.muon_momentum),
        ];
        for (key, value) in shares {
            problems.demand(
                !(0.0..1.0).contains(&value) || (value as f32) < 1.0,
                format!("`training.{key}` is {value}, which F32 rounds to 1; the moments would never change"),
            );
        }
    }

    fn check_best(&self, problems: &mut Problems) {
        let t = &self.training;
        if !t.compares_evaluations() {
            return;
        }
        let key = if t.load_best_model_at_end { "load_best_model_at_end" } else { "early_stopping_patience" };
        problems.demand(
            t.eval_steps > 0,
            format!("`training.{key}` is set and `training.eval_steps` is 0, which evaluates only at the start and the end; set it to the steps between evaluations"),
        );
        problems.demand(
            self.validates(),
            format!("`training.{key}` is set, and the run has no validation documents; set `data.val_files` or `data.val_set_size`"),
        );
        let validated = self
            .datasets()
            .into_iter()
            .filter(|set| !set.name.is_empty() && (self.data.val_set_size > 0.0 || !set.val_files.is_empty()));
        let prefixes = [String::new()].into_iter().chain(validated.map(|set| format!("{}_", set.name)));
        // With label smoothing, the loss is no likelihood of the text.
        let of_text = &["loss", "bits_per_byte"][..if t.label_smoothing_factor > 0.0 { 1 } else { 2 }];
        let metrics: Vec<String> =
            prefixes.flat_map(|of| of_text.iter().map(move |metric| format!("eval_{of}{metric}"))).collect();
        problems.demand(
            metrics.contains(&t.metric_for_best_model),
            format!(
                "`training.metric_for_best_model` is {:?}; an evaluation of this run has {}",
                t.metric_for_best_model,
                metrics.join(", ")
            ),
        );
        problems.demand(
            from_zero(t.early_stopping_threshold),
            "`training.early_stopping_threshold` must not be negative or infinite",
        );
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

/// Whether a number is finite and not negative.
fn from_zero(value: f64) -> bool {
    value.is_finite() && value >= 0.0
}
