//! The settings of a run, and values derived from them.

use crate::alarms::AlarmsConfig;
use crate::data::DataConfig;
use crate::debug::DebugConfig;
use crate::ema::EmaSettings;
use crate::evaluation::{CheckpointConfig, EvaluationConfig, LoggingConfig};
use crate::lora::LoraConfig;
use crate::lr_scheduler::LrSchedulerConfig;
use crate::memory::MemoryConfig;
use crate::objective::{
    ClassificationConfig, DistillationConfig, EmbeddingConfig, PreferenceConfig, ReinforcementConfig,
};
use crate::optimizer::OptimizerConfig;
use crate::parallel::ParallelConfig;
use crate::paths::flatten;
use crate::recovery::RecoveryConfig;
use crate::router::RouterConfig;
use crate::sentinel::SentinelConfig;
use crate::tokenizer::TokenizerConfig;
use crate::training::TrainingConfig;
use ottava_checkpoint::with_experts_of;
use ottava_common::error::{Error, Result};
use ottava_models::layers::ExpertsSpec;
use ottava_models::{ConfigFile, DecoderConfig, decoder_config};
use ottava_parallel::expect_blocks;
use ottava_parallel::optim::{EmaOptimizer, Optimizer, Schedule};
use ottava_recipe::param::Param;
use ottava_recipe::{KvCacheDtype, Precision, Recipe};
use ottava_tensor::Device;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// The settings of a training run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RunConfig {
    /// Folder of the run: resolved configuration, metrics, plot and checkpoints.
    pub output_dir: PathBuf,
    /// The device to run on: "auto" (a GPU if there is one), "cuda" or "cpu".
    pub device: DeviceChoice,
    /// Seed of random initial weights, of the order of the data, and of samples after the run.
    pub seed: u64,
    /// The model.
    pub model: ModelConfig,
    /// Changes to the tokenizer of the model.
    pub tokenizer: TokenizerConfig,
    /// Adapters that are trained instead of the model.
    pub lora: LoraConfig,
    /// The data to train on and to validate with.
    pub data: DataConfig,
    /// The loss of preference data.
    pub preference: PreferenceConfig,
    /// Reinforcement learning.
    pub reinforcement: ReinforcementConfig,
    /// Distillation.
    pub distillation: DistillationConfig,
    /// Classification of texts.
    pub classification: ClassificationConfig,
    /// Embeddings of texts.
    pub embedding: EmbeddingConfig,
    /// Steps and batches.
    pub training: TrainingConfig,
    /// The algorithm that updates weights, and the formats in which it stores them.
    #[serde(deserialize_with = "OptimizerConfig::read")]
    pub optimizer: OptimizerConfig,
    /// The learning rate of each step.
    #[serde(deserialize_with = "LrSchedulerConfig::read")]
    pub lr_scheduler: LrSchedulerConfig,
    /// The average of the weights.
    pub ema: EmaSettings,
    /// Evaluations, the best checkpoint, and early stopping.
    pub evaluation: EvaluationConfig,
    /// Checkpoints.
    pub checkpoint: CheckpointConfig,
    /// What is logged, and how often.
    pub logging: LoggingConfig,
    /// Load balance of mixtures of experts.
    pub router: RouterConfig,
    /// The formats of computation.
    pub precision: Precision,
    /// Comparisons of the recipe with BF16.
    pub sentinel: SentinelConfig,
    /// Alarms about losses, gradients and casts.
    pub alarms: AlarmsConfig,
    /// The tensors whose statistics are recorded.
    pub debug: DebugConfig,
    /// Recomputation and offloading.
    pub memory: MemoryConfig,
    /// The division of work and memory among ranks.
    pub parallel: ParallelConfig,
    /// Snapshots in the memory of hosts, from which a job goes on after it has lost a rank or a host.
    pub recovery: RecoveryConfig,
    /// Samples that are generated at the end of the run.
    pub generation: GenerationConfig,
}

/// The device to run on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DeviceChoice {
    /// A GPU if the machine has one, else the CPU.
    #[default]
    Auto,
    /// The first GPU, or the GPU of the rank.
    Cuda,
    /// The CPU.
    Cpu,
}

/// How weights are initialized.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum WeightInit {
    /// With the weights in the model folder.
    #[default]
    Pretrained,
    /// With random weights, from the seed.
    Random,
}

/// The `[model]` table.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ModelConfig {
    /// A Hugging Face model folder, or a name of the Hub, such as "Qwen/Qwen3-0.6B" or "OWNER/NAME@REVISION", which is downloaded. With init =
    /// "random", a folder with config.json alone is enough.
    pub path: PathBuf,
    /// Initial weights: "pretrained" (the weights in the folder) or "random".
    pub init: WeightInit,
    /// A tokenizer.json, or a folder with a tokenizer.json; "" uses the tokenizer in the model folder.
    pub tokenizer: PathBuf,
}

impl ModelConfig {
    /// Returns the path of the tokenizer.
    pub fn tokenizer_path(&self) -> &Path {
        if self.tokenizer.as_os_str().is_empty() { &self.path } else { &self.tokenizer }
    }
}

/// The `[generation]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct GenerationConfig {
    /// Prompts that the trained model completes at the end of the run, for samples.jsonl.
    pub prompts: Vec<String>,
    /// Complete the prompts at each evaluation of the run too.
    pub at_evaluations: bool,
    /// Maximum number of new tokens per completion.
    pub max_new_tokens: usize,
    /// Sampling temperature; 0 always takes the most likely token.
    pub temperature: f64,
    /// Samples only from the most likely tokens that together have this probability; above 0, at most 1.
    pub top_p: f64,
}

impl Default for RunConfig {
    fn default() -> RunConfig {
        RunConfig {
            output_dir: "runs/run".into(),
            device: DeviceChoice::Auto,
            seed: 42,
            model: ModelConfig::default(),
            tokenizer: TokenizerConfig::default(),
            lora: LoraConfig::default(),
            data: DataConfig::default(),
            preference: PreferenceConfig::default(),
            reinforcement: ReinforcementConfig::default(),
            distillation: DistillationConfig::default(),
            classification: ClassificationConfig::default(),
            embedding: EmbeddingConfig::default(),
            training: TrainingConfig::default(),
            optimizer: OptimizerConfig::default(),
            lr_scheduler: LrSchedulerConfig::default(),
            ema: EmaSettings::default(),
            evaluation: EvaluationConfig::default(),
            checkpoint: CheckpointConfig::default(),
            logging: LoggingConfig::default(),
            router: RouterConfig::default(),
            precision: Precision::default(),
            sentinel: SentinelConfig::default(),
            alarms: AlarmsConfig::default(),
            debug: DebugConfig::default(),
            memory: MemoryConfig::default(),
            parallel: ParallelConfig::default(),
            recovery: RecoveryConfig::default(),
            generation: GenerationConfig::default(),
        }
    }
}

impl Default for GenerationConfig {
    fn default() -> GenerationConfig {
        GenerationConfig {
            prompts: Vec::new(),
            at_evaluations: false,
            max_new_tokens: 64,
            temperature: 0.0,
            top_p: 1.0,
        }
    }
}

impl RunConfig {
    /// Returns the configuration as TOML.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a configuration is written without fail")
    }

    /// Returns the sizes of the trained model, with its adapters. Call [`RunConfig::resolve_data`] first, because it resolves the loss.
    pub fn decoder_config(&self) -> Result<DecoderConfig> {
        self.trained_sizes(&self.model_config(None)?)
    }

    /// Returns the sizes of the model of `file`, with the adapters and the losses of this run, and with the layout of experts of the run's model folder.
    ///
    /// Also errors if the run sets an option that the model's routers do not support, or expert parallelism for a model without experts.
    pub fn trained_sizes(&self, file: &ConfigFile) -> Result<DecoderConfig> {
        let mut sizes = decoder_config(file)?;
        self.expect_encoder_fits(&sizes, file)?;
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
        // Checked here, before anything is allocated for each rank.
        if self.parallel.pipeline > 1 {
            expect_blocks(sizes.layers.len(), self.parallel.pipeline.saturating_mul(self.parallel.pipeline_stages))?;
        }
        // Objectives without label smoothing read log-probabilities.
        let is_smoothed = self.objective().properties().smooths_labels;
        sizes.head.label_smoothing = if is_smoothed { self.training.label_smoothing_factor } else { 0.0 };
        self.shape_policy(&mut sizes, file)?;
        self.shape_student(&mut sizes, file)?;
        self.shape_embedding(&mut sizes);
        sizes.lora = self.lora.adapters();
        if sizes.lora.is_some() {
            self.tokenizer.expect_trained_rows(&sizes, &decoder_config(&ConfigFile::read(&self.model.path)?)?)?;
        }
        sizes.embedding.noise = self.training.neftune_noise_alpha;
        Ok(with_experts_of(sizes, &self.model.path).with_adapters_beside_experts())
    }

    /// Errors with [`Error::Config`] if sequences are longer than the number of positions of a model with these `sizes`.
    pub fn expect_positions(&self, sizes: &DecoderConfig) -> Result<()> {
        if self.data.max_length <= sizes.context() {
            return Ok(());
        }
        Err(Error::Config(format!(
            "`data.max_length` is {}, and {}; set max_length to at most that",
            self.data.max_length,
            sizes.context_reason()
        )))
    }

    /// Whether the run may compute passes in the compute type (`high_precision_steps`, sentinel, debug steps). If so, weights are stored or gathered
    /// in the compute type as well as in FP8.
    pub fn needs_values(&self) -> bool {
        let has_high_steps = !self.precision.exceptions.high_precision_steps.is_empty();
        has_high_steps || self.compares_precisions() || self.sentinel.compares_metric()
    }

    /// Whether layers draw random numbers in training.
    pub fn draws(&self) -> bool {
        (self.lora.r > 0 && self.lora.lora_dropout > 0.0) || self.training.neftune_noise_alpha > 0.0
    }

    /// Whether the run compares passes in two precisions.
    pub fn compares_precisions(&self) -> bool {
        self.sentinel.sentinel_steps > 0 || !self.debug.debug_steps.is_empty()
    }

    /// Returns the recipe of the run on `device`.
    pub fn recipe_on(&self, device: &Device) -> Recipe {
        let recipe = self.precision.recipe_on(device, self.micro_batch_rows() * self.data.max_length);
        // Steps read keys and values as draws do, if they must compute the log-probabilities of draws.
        let follows_draws = self.precision.batch_invariant && self.reinforcement.is_on();
        let kv_cache_dtype =
            if follows_draws { self.reinforcement.sampling.kv_cache_dtype } else { KvCacheDtype::Auto };
        Recipe { kv_cache_dtype, ..recipe }
    }

    /// Returns the number of tokens per optimizer step, over all ranks.
    pub fn tokens_per_step(&self) -> u64 {
        let rows = self.micro_batch_rows() / self.training.per_device_train_batch_size;
        (self.training.sequences() * rows * self.data.max_length) as u64
    }

    /// Returns all settings as `(key, value)`.
    pub fn settings(&self) -> Vec<(String, String)> {
        self.flat().into_iter().map(|(key, value)| (key, value.to_string())).collect()
    }

    /// Returns all settings with their dotted paths, in the order of the file.
    pub(super) fn flat(&self) -> Vec<(String, Value)> {
        let mut keys = Vec::new();
        flatten("", &Table::try_from(self).expect("a configuration is a table"), &mut keys);
        keys
    }

    /// Returns the learning rates of a run of `max_steps` steps.
    pub fn schedule(&self, max_steps: u64) -> Schedule {
        self.lr_scheduler.schedule(self.optimizer.learning_rate, max_steps)
    }

    /// Creates the optimizer of the run, before its first step.
    pub fn new_optimizer(&self, params: &[&mut Param]) -> Result<Box<dyn Optimizer>> {
        let optimizer = self.optimizer.build(self.training.max_grad_norm, params)?;
        match self.ema.config() {
            Some(config) => Ok(Box::new(EmaOptimizer::new(optimizer, config, params)?)),
            None => Ok(optimizer),
        }
    }

    /// Whether FP8 codes of weights are stored for the whole step. Codes of frozen weights are always stored by default: they take less memory than
    /// frozen weights in the compute type.
    pub fn weight_codes(&self) -> bool {
        self.memory.weight_codes.unwrap_or(self.lora.r > 0 || self.optimizer.storage.weight_codes())
    }
}
