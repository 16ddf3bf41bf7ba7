//! The settings of a run, and values derived from them.

use super::alarms::AlarmsConfig;
use super::auto;
use super::data::DataConfig;
use super::debug::DebugConfig;
use super::keys::flatten;
use super::lora::LoraConfig;
use super::memory::{MemoryConfig, OptimizerConfig, OptimizerName};
use super::objective::PreferenceConfig;
use super::parallel::ParallelConfig;
use super::router::RouterConfig;
use super::sentinel::SentinelConfig;
use crate::error::{Error, Result};
use crate::layers::ExpertsSpec;
use crate::models::{ConfigFile, DecoderConfig, decoder_config};
use crate::optim::{
    AdamWConfig, AdamWOptimizer, AdjustLr, LionOptimizer, MomentumConfig, MuonOptimizer, Optimizer, Schedule,
    SchedulerType,
};
use crate::parallel::expect_blocks;
use crate::param::Param;
use crate::recipe::{Precision, Recipe};
use ottava_tensor::Device;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// The most sequences of a step. The time of a plan grows with their number, since it proposes other divisions into micro-batches.
pub(super) const MAX_SEQUENCES: usize = 1 << 18;

/// A training run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RunConfig {
    /// Folder of the run: metrics, plot, checkpoints.
    pub output_dir: PathBuf,
    /// `auto` (a GPU if there is one), `cuda` or `cpu`.
    pub device: DeviceChoice,
    /// Decides initial weights and the order of the data.
    pub seed: u64,
    /// The model.
    pub model: ModelConfig,
    /// Adapters that are trained instead of the model.
    pub lora: LoraConfig,
    /// The training data.
    pub data: DataConfig,
    /// The loss of preferences.
    pub preference: PreferenceConfig,
    /// Steps, batches and learning rate.
    pub training: TrainingConfig,
    /// Balance of mixtures of experts.
    pub router: RouterConfig,
    /// Formats of computation.
    pub precision: Precision,
    /// Comparisons of the recipe with BF16.
    pub sentinel: SentinelConfig,
    /// Alarms about losses, gradients and casts.
    pub alarms: AlarmsConfig,
    /// Tensors that are recorded.
    pub debug: DebugConfig,
    /// Formats of master weights, gradients and optimizer states.
    pub optimizer: OptimizerConfig,
    /// Recomputation and offloading.
    pub memory: MemoryConfig,
    /// Data parallelism and ZeRO.
    pub parallel: ParallelConfig,
    /// Samples shown at the end.
    pub generation: GenerationConfig,
}

/// The device to run on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceChoice {
    /// A GPU if there is one, else the CPU.
    #[default]
    Auto,
    /// The first GPU.
    Cuda,
    /// The CPU.
    Cpu,
}

/// Initial weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightInit {
    /// From the model folder.
    #[default]
    Pretrained,
    /// At random, from the seed.
    Random,
}

/// The `[model]` table.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelConfig {
    /// A Hugging Face model folder; for random weights, a `config.json` is enough.
    pub path: PathBuf,
    /// `pretrained` or `random`.
    pub init: WeightInit,
    /// A `tokenizer.json` or a folder with one; empty means that of the model folder.
    pub tokenizer: PathBuf,
}

impl ModelConfig {
    /// The path of the tokenizer.
    pub fn tokenizer_path(&self) -> &Path {
        if self.tokenizer.as_os_str().is_empty() { &self.path } else { &self.tokenizer }
    }
}

/// The `[training]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainingConfig {
    /// Optimizer steps; 0 means as many as `num_train_epochs` takes.
    pub max_steps: u64,
    /// Passes over the training documents, where `max_steps` is 0.
    pub num_train_epochs: f64,
    /// Sequences per forward and backward.
    pub per_device_train_batch_size: usize,
    /// Micro-batches per optimizer step, each with a forward and a backward.
    pub gradient_accumulation_steps: usize,
    /// Sequences per optimizer step, of all ranks; 0 is `per_device_train_batch_size` times `gradient_accumulation_steps` times ranks.
    pub global_batch_size: usize,
    /// Highest learning rate.
    pub learning_rate: f64,
    /// Lowest learning rate, one step after the end of the schedule.
    pub min_learning_rate: f64,
    /// `cosine`, `linear`, `constant`, `warmup_stable_decay`, `cosine_with_restarts`, `polynomial` or `inverse_sqrt`.
    pub lr_scheduler_type: SchedulerType,
    /// Steps in which the learning rate rises to its peak.
    pub warmup_steps: u64,
    /// The same as a share of the run's steps, rounded up, in place of `warmup_steps`; 0 takes those.
    pub warmup_ratio: f64,
    /// Steps of the final decay of `warmup_stable_decay`.
    pub decay_steps: u64,
    /// Half cosines of `cosine_with_restarts`, each from the peak to `min_learning_rate`.
    pub lr_num_cycles: u64,
    /// Exponent of `polynomial`; 1 is a straight line.
    pub lr_power: f64,
    /// Weight decay of matrices per unit of learning rate; norms and biases have none.
    pub weight_decay: f64,
    /// Share of the target distribution that the loss of texts spreads evenly over the vocabulary.
    pub label_smoothing_factor: f64,
    /// Decay of the first moment.
    pub adam_beta1: f64,
    /// Decay of the second moment.
    pub adam_beta2: f64,
    /// Added to the root of the second moment.
    pub adam_epsilon: f64,
    /// Decay of Muon's momentum.
    pub muon_momentum: f64,
    /// Muon's factor of the learning rate: `match_rms_adamw` or `original`.
    pub muon_adjust_lr_fn: AdjustLr,
    /// Share of Lion's momentum in the direction of an update.
    pub lion_beta1: f64,
    /// Decay of Lion's momentum.
    pub lion_beta2: f64,
    /// Gradients are scaled down to this norm; 0 turns clipping off.
    pub max_grad_norm: f64,
    /// Steps between lines of the log; `metrics.jsonl` has every step.
    pub logging_steps: u64,
    /// Steps between lines of `casts.jsonl`, the statistics of each FP8 cast; 0 writes none.
    pub cast_statistics_steps: u64,
    /// Steps between evaluations; 0 evaluates only at the start and the end.
    pub eval_steps: u64,
    /// Steps between checkpoints; 0 saves only at the end.
    pub save_steps: u64,
    /// Checkpoints kept, the newest; 0 keeps all.
    pub save_total_limit: usize,
    /// Whether the checkpoint of the best evaluation is saved, kept, and the run's model at the end.
    pub load_best_model_at_end: bool,
    /// The metric of an evaluation whose lowest value is the best.
    pub metric_for_best_model: String,
    /// Evaluations in a row without improvement after which the run ends; 0 does not end it.
    pub early_stopping_patience: u64,
    /// The metric has to be lower by more than this to count as an improvement.
    pub early_stopping_threshold: f64,
    /// Whether checkpoints are copied to host memory and written from there while training continues; `None`, written `auto`, does so if
    /// that memory is available.
    #[serde(with = "auto")]
    pub async_save: Option<bool>,
}

/// The `[generation]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GenerationConfig {
    /// Beginnings of texts that the trained model completes at the end of the run.
    pub prompts: Vec<String>,
    /// Tokens at most, per completion.
    pub max_new_tokens: usize,
    /// 0 always takes the most likely token.
    pub temperature: f64,
    /// Tokens are drawn from the likeliest ones that together have this probability.
    pub top_p: f64,
}

impl TrainingConfig {
    /// Sequences per optimizer step, of all ranks once [`TrainingConfig::share_batch`] has divided them.
    pub fn sequences(&self) -> usize {
        match self.global_batch_size {
            0 => self.per_device_train_batch_size * self.gradient_accumulation_steps,
            sequences => sequences,
        }
    }

    /// Whether evaluations are compared with each other.
    pub fn compares_evaluations(&self) -> bool {
        self.load_best_model_at_end || self.early_stopping_patience > 0
    }

    /// Divides the sequences of a step among `ranks`: finds the micro-batches of each, or the sequences of all.
    ///
    /// Errors with [`Error::Config`] where they cannot be divided evenly, where both numbers are given and differ, or where a step would
    /// have too many.
    pub fn share_batch(&mut self, ranks: usize) -> Result<()> {
        let (rows, micro_batches) = (self.per_device_train_batch_size, self.gradient_accumulation_steps);
        if self.global_batch_size == 0 {
            let sequences = rows.saturating_mul(micro_batches).saturating_mul(ranks);
            if sequences > MAX_SEQUENCES {
                return Err(Error::Config(format!(
                    "`per_device_train_batch_size` times `gradient_accumulation_steps` on {ranks} ranks is {sequences}; \
                     a step has at most {MAX_SEQUENCES} sequences"
                )));
            }
            self.global_batch_size = sequences;
            return Ok(());
        }
        let global = self.global_batch_size;
        if !global.is_multiple_of(rows * ranks) {
            return Err(Error::Config(format!(
                "`training.global_batch_size` is {global}, which is no multiple of {rows} sequences \
                 (`per_device_train_batch_size`) on {ranks} ranks; change one of them"
            )));
        }
        let needed = global / (rows * ranks);
        if micro_batches != 1 && micro_batches != needed {
            return Err(Error::Config(format!(
                "`training.global_batch_size` = {global} takes {needed} micro-batches of {rows} sequences on {ranks} ranks, \
                 and `gradient_accumulation_steps` is {micro_batches}; leave one of them out"
            )));
        }
        self.gradient_accumulation_steps = needed;
        Ok(())
    }
}

impl RunConfig {
    /// Keeps the sequences of a step in a run that goes on with other ranks than in `saved`, where neither file nor command line set their
    /// number: by micro-batches per step. Returns what was changed, in words.
    pub fn keep_batch(&mut self, saved: &RunConfig, ranks: usize) -> Option<String> {
        let (before, rows) = (saved.training.sequences(), self.training.per_device_train_batch_size * ranks);
        let open = self.training.global_batch_size == 0 && saved.parallel.data.max(1) != ranks;
        if !open || rows * self.training.gradient_accumulation_steps == before || !before.is_multiple_of(rows) {
            return None;
        }
        self.training.gradient_accumulation_steps = before / rows;
        let (micro_batches, was) = (self.training.gradient_accumulation_steps, saved.parallel.data.max(1));
        Some(format!(
            "`training.gradient_accumulation_steps` is {micro_batches} on {ranks} ranks, so that a step keeps the {before} sequences it had on {was}"
        ))
    }

    /// Divides a step among `ranks`, as [`TrainingConfig::share_batch`].
    ///
    /// Errors with [`Error::Config`] also as [`ParallelConfig::mesh`].
    pub fn share(&mut self, ranks: usize) -> Result<()> {
        self.parallel.data = self.parallel.mesh(ranks)?.data;
        self.training.share_batch(self.parallel.data)
    }
}

impl Default for RunConfig {
    fn default() -> RunConfig {
        RunConfig {
            output_dir: "runs/run".into(),
            device: DeviceChoice::Auto,
            seed: 42,
            model: ModelConfig::default(),
            lora: LoraConfig::default(),
            data: DataConfig::default(),
            preference: PreferenceConfig::default(),
            training: TrainingConfig::default(),
            router: RouterConfig::default(),
            precision: Precision::default(),
            sentinel: SentinelConfig::default(),
            alarms: AlarmsConfig::default(),
            debug: DebugConfig::default(),
            optimizer: OptimizerConfig::default(),
            memory: MemoryConfig::default(),
            parallel: ParallelConfig::default(),
            generation: GenerationConfig::default(),
        }
    }
}

impl Default for TrainingConfig {
    fn default() -> TrainingConfig {
        TrainingConfig {
            max_steps: 0,
            num_train_epochs: 1.0,
            per_device_train_batch_size: 8,
            gradient_accumulation_steps: 1,
            global_batch_size: 0,
            learning_rate: 3e-4,
            min_learning_rate: 0.0,
            lr_scheduler_type: SchedulerType::Cosine,
            warmup_steps: 100,
            warmup_ratio: 0.0,
            decay_steps: 0,
            lr_num_cycles: 1,
            lr_power: 1.0,
            weight_decay: 0.1,
            label_smoothing_factor: 0.0,
            adam_beta1: 0.9,
            adam_beta2: 0.95,
            adam_epsilon: 1e-8,
            muon_momentum: 0.95,
            muon_adjust_lr_fn: AdjustLr::default(),
            lion_beta1: 0.9,
            lion_beta2: 0.99,
            max_grad_norm: 1.0,
            logging_steps: 10,
            cast_statistics_steps: 100,
            eval_steps: 0,
            save_steps: 0,
            save_total_limit: 3,
            load_best_model_at_end: false,
            metric_for_best_model: "eval_loss".into(),
            early_stopping_patience: 0,
            early_stopping_threshold: 0.0,
            async_save: None,
        }
    }
}

impl Default for GenerationConfig {
    fn default() -> GenerationConfig {
        GenerationConfig { prompts: Vec::new(), max_new_tokens: 64, temperature: 0.0, top_p: 1.0 }
    }
}

impl RunConfig {
    /// The resolved configuration as TOML.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a configuration is written without fail")
    }

    /// The sizes of the model that is trained, with its adapters, once [`RunConfig::resolve_data`] has decided its loss.
    pub fn decoder_config(&self) -> Result<DecoderConfig> {
        self.trained_sizes(&self.model_config(None)?)
    }

    /// The sizes of the model of `file`, with the adapters and the losses that the run trains it with.
    ///
    /// Errors also if it sets what the model's routers do not have, or ranks that divide experts of a model without any.
    pub fn trained_sizes(&self, file: &ConfigFile) -> Result<DecoderConfig> {
        let mut sizes = decoder_config(file)?;
        if let Some(problem) = sizes.folder.untrainable.first() {
            return Err(file.error(problem));
        }
        match sizes.experts() {
            Some(ExpertsSpec { bias: None, .. }) if self.router.bias_update_rate > 0.0 => {
                return Err(Error::Config(format!(
                    "`router.bias_update_rate` is {}, and the routers of the model of {} have no bias; `router.balance_loss` spreads their tokens",
                    self.router.bias_update_rate,
                    self.model.path.display()
                )));
            }
            Some(_) => {}
            None if self.router != RouterConfig::default() => {
                return Err(Error::Config(format!(
                    "`router` is set, and the model of {} has no experts; remove the table",
                    self.model.path.display()
                )));
            }
            None if self.parallel.expert > 1 => {
                return Err(Error::Config(format!(
                    "`parallel.expert` is {}, and the model of {} has no experts; set it to 1",
                    self.parallel.expert,
                    self.model.path.display()
                )));
            }
            None => {}
        }
        sizes.experts_mut().for_each(|experts| experts.losses = self.router.losses());
        // Before anything is made for each rank.
        if self.parallel.pipeline > 1 {
            expect_blocks(sizes.layers.len(), self.parallel.pipeline.saturating_mul(self.parallel.pipeline_stages))?;
        }
        // Other objectives read log-probabilities.
        let is_smoothed = self.objective().properties().smooths_labels;
        sizes.head.label_smoothing = if is_smoothed { self.training.label_smoothing_factor } else { 0.0 };
        sizes.lora = self.lora.adapters();
        Ok(sizes.with_adapters_beside_experts())
    }

    /// Errors with [`Error::Config`] when sequences are longer than a model of these `sizes` has positions.
    pub fn expect_positions(&self, sizes: &DecoderConfig) -> Result<()> {
        if self.data.max_length <= sizes.context() {
            return Ok(());
        }
        Err(Error::Config(format!(
            "`data.max_length` is {}, and config.json gives the model {} positions \
             (`max_position_embeddings`); set max_length to at most that",
            self.data.max_length,
            sizes.context()
        )))
    }

    /// Whether passes in the compute type may run, so that weights are also kept or gathered in it.
    pub fn needs_values(&self) -> bool {
        !self.precision.high_precision_steps.is_empty() || self.compares_precisions()
    }

    /// Whether passes of two precisions run side by side.
    pub fn compares_precisions(&self) -> bool {
        self.sentinel.sentinel_steps > 0 || !self.debug.debug_steps.is_empty()
    }

    /// The recipe of the run on `device`.
    pub fn recipe_on(&self, device: &Device) -> Recipe {
        self.precision.recipe_on(device, self.micro_batch_rows() * self.data.max_length)
    }

    /// Tokens per optimizer step, of all ranks.
    pub fn tokens_per_step(&self) -> u64 {
        let rows = self.micro_batch_rows() / self.training.per_device_train_batch_size;
        (self.training.sequences() * rows * self.data.max_length) as u64
    }

    /// All settings, as `(key, value)`.
    pub fn settings(&self) -> Vec<(String, String)> {
        self.flat().into_iter().map(|(key, value)| (key, value.to_string())).collect()
    }

    /// All settings by dotted path, in the order of the file.
    pub(super) fn flat(&self) -> Vec<(String, Value)> {
        let mut keys = Vec::new();
        flatten("", &Table::try_from(self).expect("a configuration is a table"), &mut keys);
        keys
    }

    /// The learning rates of a run of `max_steps`.
    pub fn schedule(&self, max_steps: u64) -> Schedule {
        let t = &self.training;
        Schedule {
            kind: t.lr_scheduler_type,
            peak: t.learning_rate,
            minimum: t.min_learning_rate,
            warmup_steps: match t.warmup_ratio > 0.0 {
                true => (t.warmup_ratio * max_steps as f64).ceil() as u64,
                false => t.warmup_steps,
            },
            decay_steps: t.decay_steps,
            cycles: t.lr_num_cycles,
            power: t.lr_power,
            max_steps,
        }
    }

    /// The optimizer of the run, before its first step.
    pub fn new_optimizer(&self, params: &[&mut Param]) -> Result<Box<dyn Optimizer>> {
        let t = &self.training;
        let (weight_decay, max_grad_norm) = (t.weight_decay, t.max_grad_norm);
        let (beta1, beta2, epsilon) = (t.adam_beta1, t.adam_beta2, t.adam_epsilon);
        let adamw = AdamWConfig { beta1, beta2, epsilon, weight_decay, max_grad_norm };
        Ok(match self.optimizer.name {
            OptimizerName::Adamw => Box::new(AdamWOptimizer::new(adamw, params)?),
            OptimizerName::Muon => Box::new(MuonOptimizer::new(t.muon_momentum, t.muon_adjust_lr_fn, adamw, params)?),
            OptimizerName::Lion => {
                let (beta1, beta2) = (t.lion_beta1, t.lion_beta2);
                Box::new(LionOptimizer::new(MomentumConfig { beta1, beta2, weight_decay, max_grad_norm }, params)?)
            }
        })
    }

    /// Checks that a run saved with `saved` may resume as `self`. Settings that define the run must be equal; others may change and
    /// are returned as `(key, before, now)` for the log.
    pub fn check_resume(&self, saved: &RunConfig) -> Result<Vec<(String, String, String)>> {
        const FREE: &[&str] =
            &["output_dir", "device", "generation", "data.cache_dir", "training.async_save", "lora.init_from"];
        // The content at these paths is compared when the run resumes.
        const STEERS: &[&str] = &[
            "model.path",
            "model.tokenizer",
            "data.train_files",
            "data.val_files",
            "data.datasets",
            "training",
            "precision",
            "sentinel",
            "router",
            "alarms",
            "debug",
            "optimizer.level",
            "optimizer.master_weights",
            "optimizer.gradient_dtype",
            "optimizer.state_dtype",
            "memory.recompute",
            "memory.weight_codes",
            "memory.offload_optimizer",
            "memory.offload_parameters",
            "memory.offload_residuals",
            "parallel",
        ];
        const BATCH: &str = "training.global_batch_size";
        let within = |list: &[&str], key: &str| list.iter().any(|l| key == *l || key.starts_with(&format!("{l}.")));
        let (before, now) = (saved.precision.recipe, self.precision.recipe);
        if saved.precision.recipe().compute != self.precision.recipe().compute {
            return Err(Error::Config(format!(
                "the checkpoint is of recipe `{}` and cannot resume as `{}`, whose weights have another type. \
                 Start a new run with `model.path` set to the checkpoint instead",
                before.as_str(),
                now.as_str()
            )));
        }
        let mut changes = Vec::new();
        for ((key, now), (_, before)) in self.flat().into_iter().zip(saved.flat()) {
            let (now, before) = match key == BATCH {
                true => [self, saved].map(|config| Value::from(config.training.sequences() as i64)).into(),
                false => (now, before),
            };
            if now == before || within(FREE, &key) {
                continue;
            }
            if key == BATCH || !within(STEERS, &key) {
                return Err(Error::Config(format!(
                    "`{key}` was {before} when the checkpoint was saved and is {now} now; it must not change within a run. Start a new run with `model.path` set to the checkpoint instead"
                )));
            }
            changes.push((key, before.to_string(), now.to_string()));
        }
        Ok(changes)
    }
}

impl RunConfig {
    /// Whether FP8 codes of weights are stored for the whole step. Those of frozen weights take less memory than values.
    pub fn weight_codes(&self) -> bool {
        self.memory.weight_codes.unwrap_or(self.lora.r > 0 || self.optimizer.level.weight_codes())
    }
}
