//! One run is one TOML file. Every key has a default, shown with its meaning in `configs/reference.toml`; unknown keys are errors.

use crate::data::source::{Documents, SourceOptions};
use crate::error::{Error, Result};
use crate::optim::{AdamWConfig, Schedule, SchedulerType};
use crate::param::{Kept, Purpose};
use crate::recipe::Precision;
use crate::recompute::Recompute;
use ottava_tensor::DType;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use toml::{Table, Value};

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
    /// What is trained.
    pub model: ModelConfig,
    /// What it is trained on.
    pub data: DataConfig,
    /// How long and how fast.
    pub training: TrainingConfig,
    /// What is computed in which format.
    pub precision: Precision,
    /// What the optimizer keeps in which format.
    pub optimizer: OptimizerConfig,
    /// What is kept, and what is made again.
    pub memory: MemoryConfig,
    /// Samples shown at the end.
    pub generation: GenerationConfig,
}

/// Where to run.
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

/// How the weights start.
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
    /// A Hugging Face model folder; a `config.json` alone is enough for random weights.
    pub path: PathBuf,
    /// `pretrained` or `random`.
    pub init: WeightInit,
    /// A `tokenizer.json` or a folder with one; empty means that of the model folder.
    pub tokenizer: PathBuf,
}

impl ModelConfig {
    /// Where the tokenizer is.
    pub fn tokenizer_path(&self) -> &Path {
        if self.tokenizer.as_os_str().is_empty() { &self.path } else { &self.tokenizer }
    }
}

/// The `[data]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DataConfig {
    /// Text (`.txt`, `.md`) and JSON lines (`.jsonl`), each also gzipped (`.gz`).
    pub train_files: Vec<PathBuf>,
    /// Whether a document of a text file is a `line` or the whole `file`.
    pub text_documents: Documents,
    /// The field of a JSON line that holds the text.
    pub text_field: String,
    /// Documents kept for validation: a share below 1, or a number.
    pub val_set_size: f64,
    /// Tokens per sequence.
    pub max_length: usize,
    /// Where prepared tokens are kept; empty means `tokens` beside the run's folder.
    pub cache_dir: PathBuf,
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
    /// Forward and backward passes per optimizer step.
    pub gradient_accumulation_steps: usize,
    /// Highest learning rate.
    pub learning_rate: f64,
    /// Lowest learning rate, where the schedule ends.
    pub min_learning_rate: f64,
    /// `cosine`, `linear`, `constant` or `warmup_stable_decay`.
    pub lr_scheduler_type: SchedulerType,
    /// Steps in which the learning rate rises to its peak.
    pub warmup_steps: u64,
    /// Steps of the final decay of `warmup_stable_decay`.
    pub decay_steps: u64,
    /// Share of matrices removed per unit of learning rate; norms and biases are left alone.
    pub weight_decay: f64,
    /// Decay of the first moment.
    pub adam_beta1: f64,
    /// Decay of the second moment.
    pub adam_beta2: f64,
    /// Added to the root of the second moment.
    pub adam_epsilon: f64,
    /// Gradients are scaled down to this norm; 0 turns clipping off.
    pub max_grad_norm: f64,
    /// Steps between lines of the log; `metrics.jsonl` has every step.
    pub logging_steps: u64,
    /// Steps between evaluations; 0 evaluates at the start and the end alone.
    pub eval_steps: u64,
    /// Steps between checkpoints; 0 saves at the end alone.
    pub save_steps: u64,
    /// Checkpoints kept, the newest; 0 keeps all.
    pub save_total_limit: usize,
}

/// The `[optimizer]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerConfig {
    /// Type of the moments of AdamW: `float32` or `bfloat16`.
    pub state_dtype: StateDType,
    /// Type of the gradients of the blocks' matrices, where the model computes in bfloat16: `float32` or `bfloat16`.
    pub gradient_dtype: StateDType,
    /// Whether weights are kept in float32 beside those of the compute type. Without, updates round the weights by chance.
    pub master_weights: bool,
}

/// Types of gradients and optimizer states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StateDType {
    /// 4 bytes each.
    Float32,
    /// 2 bytes each.
    Bfloat16,
}

impl Default for OptimizerConfig {
    fn default() -> OptimizerConfig {
        OptimizerConfig { state_dtype: StateDType::Float32, gradient_dtype: StateDType::Float32, master_weights: true }
    }
}

/// The `[memory]` table: what is kept, and what is made again when it is needed. Results are the same bits either way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MemoryConfig {
    /// What backward computes again: `none`, `norm-swiglu`, `attention` or `full`.
    pub recompute: Recompute,
    /// Whether FP8 codes of weights are kept for the whole step. Without, each product casts the weight that it reads.
    pub weight_codes: bool,
}

impl Default for MemoryConfig {
    fn default() -> MemoryConfig {
        MemoryConfig { recompute: Recompute::None, weight_codes: true }
    }
}

impl RunConfig {
    /// What a model that is trained so is built for.
    pub fn purpose(&self) -> Purpose {
        Purpose::Train(Kept {
            masters: self.optimizer.master_weights,
            gradients: self.optimizer.gradient_dtype.dtype(),
            weight_codes: self.memory.weight_codes,
            recompute: self.memory.recompute,
        })
    }
}

impl StateDType {
    /// The type of tensors.
    pub fn dtype(self) -> DType {
        match self {
            StateDType::Float32 => DType::F32,
            StateDType::Bfloat16 => DType::BF16,
        }
    }
}

/// The `[generation]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GenerationConfig {
    /// Beginnings of texts that the trained model completes at the end of the run.
    pub prompts: Vec<String>,
    /// Tokens at most, per completion.
    pub max_new_tokens: usize,
    /// 0 always takes the likeliest token.
    pub temperature: f64,
    /// Tokens are drawn from the likeliest ones that together have this probability.
    pub top_p: f64,
}

impl Default for RunConfig {
    fn default() -> RunConfig {
        RunConfig {
            output_dir: "runs/run".into(),
            device: DeviceChoice::Auto,
            seed: 42,
            model: ModelConfig::default(),
            data: DataConfig::default(),
            training: TrainingConfig::default(),
            precision: Precision::default(),
            optimizer: OptimizerConfig::default(),
            memory: MemoryConfig::default(),
            generation: GenerationConfig::default(),
        }
    }
}

impl Default for DataConfig {
    fn default() -> DataConfig {
        DataConfig {
            train_files: Vec::new(),
            text_documents: Documents::default(),
            text_field: "text".into(),
            val_set_size: 0.01,
            max_length: 1024,
            cache_dir: PathBuf::new(),
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
            learning_rate: 3e-4,
            min_learning_rate: 0.0,
            lr_scheduler_type: SchedulerType::Cosine,
            warmup_steps: 100,
            decay_steps: 0,
            weight_decay: 0.1,
            adam_beta1: 0.9,
            adam_beta2: 0.95,
            adam_epsilon: 1e-8,
            max_grad_norm: 1.0,
            logging_steps: 10,
            eval_steps: 0,
            save_steps: 0,
            save_total_limit: 3,
        }
    }
}

impl Default for GenerationConfig {
    fn default() -> GenerationConfig {
        GenerationConfig { prompts: Vec::new(), max_new_tokens: 64, temperature: 0.0, top_p: 1.0 }
    }
}

/// Spellings of other trainers that are understood: `(theirs, ours)`.
const ALIASES: &[(&str, &str)] = &[
    ("micro_batch_size", "per_device_train_batch_size"),
    ("local_batch_size", "per_device_train_batch_size"),
    ("seq_len", "max_length"),
    ("seq_length", "max_length"),
    ("sequence_len", "max_length"),
    ("cutoff_len", "max_length"),
    ("max_seq_length", "max_length"),
    ("block_size", "max_length"),
    ("lr", "learning_rate"),
    ("min_lr", "min_learning_rate"),
    ("lr_warmup_steps", "warmup_steps"),
    ("train_iters", "max_steps"),
    ("max_norm", "max_grad_norm"),
    ("clip_grad", "max_grad_norm"),
    ("grad_clip", "max_grad_norm"),
    ("keep_latest_k", "save_total_limit"),
    ("model_name_or_path", "path"),
    ("base_model", "path"),
    ("fp8_margin", "margin"),
    ("fp8_amax_history_len", "amax_history_len"),
    ("fp8_amax_compute_algo", "amax_compute_algo"),
];

impl RunConfig {
    /// Reads `path` and applies `settings` (`key=value`; the key a dotted path, or a bare one that is unique) on top.
    pub fn load(path: &Path, settings: &[String]) -> Result<RunConfig> {
        let text = std::fs::read_to_string(path).map_err(|e| Error::Config(format!("{}: {e}", path.display())))?;
        let mut table: Table =
            text.parse().map_err(|e| Error::Config(format!("{}: this is not valid TOML: {e}", path.display())))?;
        let known = Known::new();
        let mut problems = Vec::new();
        known.canonical(&mut table, "", &mut problems);
        for setting in settings {
            if let Err(problem) = known.set(&mut table, setting) {
                problems.push(format!("--set {setting}: {problem}"));
            }
        }
        if problems.is_empty() {
            match table.try_into::<RunConfig>() {
                Ok(config) => {
                    problems = config.problems();
                    if problems.is_empty() {
                        return Ok(config);
                    }
                }
                Err(error) => problems.push(error.to_string().trim_end().replace('\n', " ")),
            }
        }
        Err(Error::Config(problems.iter().map(|p| format!("{}: {p}", path.display())).collect::<Vec<_>>().join("\n")))
    }

    /// The resolved configuration as TOML.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a configuration is written without fail")
    }

    /// Everything that is wrong with the values, a sentence each.
    fn problems(&self) -> Vec<String> {
        let mut problems = self.precision.problems();
        let mut demand = |holds: bool, text: &str| {
            if !holds {
                problems.push(text.to_string());
            }
        };
        let t = &self.training;
        demand(
            !self.model.path.as_os_str().is_empty(),
            "`model.path` is not set: name a model folder, or a config.json for random weights",
        );
        demand(!self.data.train_files.is_empty(), "`data.train_files` is empty: name at least one .txt or .jsonl file");
        demand(self.data.max_length > 0, "`data.max_length` is 0; a sequence has at least one token");
        demand(t.per_device_train_batch_size > 0, "`training.per_device_train_batch_size` is 0");
        demand(t.gradient_accumulation_steps > 0, "`training.gradient_accumulation_steps` is 0");
        demand(
            t.max_steps > 0 || t.num_train_epochs > 0.0,
            "set `training.max_steps` or `training.num_train_epochs` above 0",
        );
        demand(t.learning_rate.is_finite() && t.learning_rate > 0.0, "`training.learning_rate` must be above 0");
        demand(
            (0.0..=t.learning_rate).contains(&t.min_learning_rate),
            "`training.min_learning_rate` lies outside 0 to `learning_rate`",
        );
        demand(
            (0.0..1.0).contains(&t.adam_beta1) && (0.0..1.0).contains(&t.adam_beta2),
            "`training.adam_beta1` and `adam_beta2` lie in [0, 1)",
        );
        demand(t.adam_epsilon > 0.0, "`training.adam_epsilon` must be above 0");
        demand(t.weight_decay >= 0.0, "`training.weight_decay` must not be negative");
        demand(t.max_grad_norm >= 0.0, "`training.max_grad_norm` must not be negative; 0 turns clipping off");
        demand(t.logging_steps > 0, "`training.logging_steps` is 0");
        demand(self.generation.temperature >= 0.0, "`generation.temperature` must not be negative");
        demand(self.generation.top_p > 0.0 && self.generation.top_p <= 1.0, "`generation.top_p` lies outside (0, 1]");
        problems
    }

    /// How text is read.
    pub fn source_options(&self) -> SourceOptions {
        SourceOptions { text_documents: self.data.text_documents, text_field: self.data.text_field.clone() }
    }

    /// Where prepared tokens are kept.
    pub fn cache_dir(&self) -> PathBuf {
        match self.data.cache_dir.as_os_str().is_empty() {
            true => self.output_dir.parent().unwrap_or(Path::new(".")).join("tokens"),
            false => self.data.cache_dir.clone(),
        }
    }

    /// Tokens per optimizer step.
    pub fn tokens_per_step(&self) -> u64 {
        let t = &self.training;
        (t.per_device_train_batch_size * t.gradient_accumulation_steps * self.data.max_length) as u64
    }

    /// The learning rates of a run of `max_steps`.
    pub fn schedule(&self, max_steps: u64) -> Schedule {
        let t = &self.training;
        Schedule {
            kind: t.lr_scheduler_type,
            peak: t.learning_rate,
            minimum: t.min_learning_rate,
            warmup_steps: t.warmup_steps,
            decay_steps: t.decay_steps,
            max_steps,
        }
    }

    /// The constants of the optimizer.
    pub fn adamw(&self) -> AdamWConfig {
        let t = &self.training;
        AdamWConfig {
            beta1: t.adam_beta1,
            beta2: t.adam_beta2,
            epsilon: t.adam_epsilon,
            weight_decay: t.weight_decay,
            max_grad_norm: t.max_grad_norm,
            state_dtype: self.optimizer.state_dtype.dtype(),
        }
    }

    /// Checks that a run saved with `saved` may go on as `self`. What shapes the run must be the same; what steers it may change,
    /// and is returned as `(key, before, now)` for the log.
    pub fn check_resume(&self, saved: &RunConfig) -> Result<Vec<(String, String, String)>> {
        const FREE: &[&str] = &["output_dir", "device", "generation", "data.cache_dir"];
        const STEERS: &[&str] = &["training", "precision"];
        const SHAPES: &[&str] = &["training.per_device_train_batch_size", "training.gradient_accumulation_steps"];
        let flat = |config: &RunConfig| {
            let mut keys = Vec::new();
            flatten("", &Table::try_from(config).expect("a configuration is a table"), &mut keys);
            keys
        };
        let within = |list: &[&str], key: &str| list.iter().any(|l| key == *l || key.starts_with(&format!("{l}.")));
        let (before, now) = (saved.precision.recipe, self.precision.recipe);
        if saved.precision.recipe().compute != self.precision.recipe().compute {
            return Err(Error::Config(format!(
                "the checkpoint is of recipe `{}` and cannot go on as `{}`, whose weights have another type. Start a new run with `model.path` set to the checkpoint instead",
                before.as_str(),
                now.as_str()
            )));
        }
        let mut changes = Vec::new();
        for ((key, now), (_, before)) in flat(self).into_iter().zip(flat(saved)) {
            if now == before || within(FREE, &key) {
                continue;
            }
            if within(SHAPES, &key) || !within(STEERS, &key) {
                return Err(Error::Config(format!(
                    "`{key}` was {before} when the checkpoint was saved and is {now} now; it must not change within a run. Start a new run with `model.path` set to the checkpoint instead"
                )));
            }
            changes.push((key, before.to_string(), now.to_string()));
        }
        Ok(changes)
    }
}

fn flatten(prefix: &str, table: &Table, out: &mut Vec<(String, Value)>) {
    for (key, value) in table {
        match value {
            Value::Table(inner) => flatten(&format!("{prefix}{key}."), inner, out),
            value => out.push((format!("{prefix}{key}"), value.clone())),
        }
    }
}

/// All keys there are, as dotted paths.
struct Known(Vec<String>);

impl Known {
    fn new() -> Known {
        let mut keys = Vec::new();
        flatten("", &Table::try_from(RunConfig::default()).expect("a configuration is a table"), &mut keys);
        Known(keys.into_iter().map(|(key, _)| key).collect())
    }

    fn is_table(&self, path: &str) -> bool {
        self.0.iter().any(|key| key.starts_with(&format!("{path}.")))
    }

    /// Replaces aliases and reports keys that do not exist.
    fn canonical(&self, table: &mut Table, prefix: &str, problems: &mut Vec<String>) {
        let keys: Vec<String> = table.keys().cloned().collect();
        for key in keys {
            let path = format!("{prefix}{key}");
            if self.is_table(&path) {
                match table.get_mut(&key) {
                    Some(Value::Table(inner)) => self.canonical(inner, &format!("{path}."), problems),
                    _ => problems.push(format!("`{path}` is a table: write its settings under [{path}]")),
                }
            } else if !self.0.contains(&path) {
                let ours =
                    ALIASES.iter().find(|(theirs, ours)| *theirs == key && self.0.contains(&format!("{prefix}{ours}")));
                match ours {
                    Some((_, ours)) if table.contains_key(*ours) => {
                        problems.push(format!("`{path}` and `{prefix}{ours}` mean the same; keep one"));
                    }
                    Some((_, ours)) => {
                        let value = table.remove(&key).expect("the key was just listed");
                        table.insert((*ours).to_string(), value);
                    }
                    None => problems.push(self.unknown(&path)),
                }
            }
        }
    }

    fn unknown(&self, path: &str) -> String {
        let last = |path: &str| path.rsplit('.').next().unwrap_or_default().to_string();
        let similarity = |key: &String| {
            let whole = strsim::jaro_winkler(path, key);
            whole.max(strsim::jaro_winkler(&last(path), &last(key)))
        };
        let best = self.0.iter().max_by(|a, b| similarity(a).total_cmp(&similarity(b)));
        match best.filter(|key| similarity(key) > 0.8) {
            Some(key) => format!("`{path}` is not a setting; did you mean `{key}`?"),
            None => format!("`{path}` is not a setting; configs/reference.toml lists all of them"),
        }
    }

    /// Applies `key=value`.
    fn set(&self, table: &mut Table, setting: &str) -> Result<(), String> {
        let (key, text) = setting.split_once('=').ok_or("expected key=value")?;
        let key = key.trim();
        let path = self.resolve(key)?;
        // What is no TOML value is a string: `--set recipe=bf16` needs no quotes.
        let value = format!("value = {text}").parse::<Table>().ok().and_then(|mut t| t.remove("value"));
        let value = value.unwrap_or_else(|| Value::String(text.trim().to_string()));
        let mut inner = table;
        let mut names: Vec<&str> = path.split('.').collect();
        let name = names.pop().expect("a path has a last part");
        for section in names {
            let entry = inner.entry(section).or_insert_with(|| Value::Table(Table::new()));
            inner = entry.as_table_mut().ok_or_else(|| format!("`{section}` is not a table in the file"))?;
        }
        inner.insert(name.to_string(), value);
        Ok(())
    }

    fn resolve(&self, key: &str) -> Result<String, String> {
        if self.0.iter().any(|known| known == key) {
            return Ok(key.to_string());
        }
        let (section, name) = key.rsplit_once('.').map_or((None, key), |(s, n)| (Some(s), n));
        let name = ALIASES.iter().find(|(theirs, _)| *theirs == name).map_or(name, |(_, ours)| ours);
        let matches = |known: &&String| match section {
            Some(section) => **known == format!("{section}.{name}"),
            None => known.rsplit('.').next() == Some(name),
        };
        let found: Vec<&String> = self.0.iter().filter(matches).collect();
        match found.as_slice() {
            [] => Err(self.unknown(key)),
            [one] => Ok((*one).clone()),
            many => Err(format!(
                "`{key}` could be {}; write the whole path",
                many.iter().map(|k| format!("`{k}`")).collect::<Vec<_>>().join(" or ")
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(text: &str, settings: &[&str]) -> Result<RunConfig> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.toml");
        std::fs::write(&path, text).unwrap();
        RunConfig::load(&path, &settings.iter().map(|s| s.to_string()).collect::<Vec<_>>())
    }

    const SMALL: &str = "[model]\npath = \"m\"\n[data]\ntrain_files = [\"a.txt\"]\n";

    #[test]
    fn the_reference_shows_every_key_at_its_default() {
        let text =
            std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/reference.toml")).unwrap();
        let shown: Table = text.parse().unwrap();
        let mut keys = Vec::new();
        flatten("", &shown, &mut keys);
        let mut shown_keys: Vec<_> = keys.iter().map(|(k, _)| k.clone()).collect();
        let mut known = Known::new().0;
        shown_keys.sort();
        known.sort();
        assert_eq!(shown_keys, known);
        assert_eq!(shown.try_into::<RunConfig>().unwrap(), RunConfig::default());
    }

    #[test]
    fn misspelt_keys_are_errors_with_a_suggestion() {
        let error = load(&format!("{SMALL}[training]\nlearning_rte = 1e-3\n"), &[]).unwrap_err().to_string();
        assert!(
            error.ends_with("`training.learning_rte` is not a setting; did you mean `training.learning_rate`?"),
            "{error}"
        );
        let error = load(&format!("{SMALL}[trainig]\nmax_steps = 3\n"), &[]).unwrap_err().to_string();
        assert!(error.contains("`trainig` is not a setting"), "{error}");
    }

    #[test]
    fn every_problem_is_reported_at_once() {
        let error = load("[training]\nlogging_steps = 0\n", &["adam_beta1=1.5", "nonsense"]).unwrap_err().to_string();
        assert!(error.contains("--set nonsense: expected key=value"), "{error}");
        let error = load("[training]\nlogging_steps = 0\n", &["adam_beta1=1.5"]).unwrap_err().to_string();
        for part in ["model.path", "train_files", "logging_steps", "adam_beta1"] {
            assert!(error.contains(part), "{part} in {error}");
        }
    }

    #[test]
    fn settings_take_bare_keys_dotted_paths_and_words() {
        let config =
            load(SMALL, &["recipe=fp8-delayed", "training.max_steps=7", "lr=0.5", "prompts=[\"a\", \"b\"]"]).unwrap();
        assert_eq!(config.precision.recipe, crate::recipe::RecipeName::Fp8Delayed);
        assert_eq!((config.training.max_steps, config.training.learning_rate), (7, 0.5));
        assert_eq!(config.generation.prompts, ["a", "b"]);
    }

    #[test]
    fn other_trainers_spellings_are_understood_once() {
        let config = load(&format!("{SMALL}seq_len = 77\n[training]\nmicro_batch_size = 3\n"), &[]).unwrap();
        assert_eq!((config.data.max_length, config.training.per_device_train_batch_size), (77, 3));
        let error = load(&format!("{SMALL}seq_len = 77\nmax_length = 5\n"), &[]).unwrap_err().to_string();
        assert!(error.contains("mean the same"), "{error}");
    }

    #[test]
    fn the_resolved_configuration_reads_back() {
        let config = load(SMALL, &["max_steps=3"]).unwrap();
        assert_eq!(load(&config.to_toml(), &[]).unwrap(), config);
    }

    #[test]
    fn a_resumed_run_keeps_its_shape() {
        let saved = load(SMALL, &["max_steps=3"]).unwrap();
        let longer = load(SMALL, &["max_steps=9", "output_dir=elsewhere"]).unwrap();
        let wider = load(SMALL, &["max_steps=3", "recipe=fp32"]).unwrap();
        assert!(
            wider.check_resume(&saved).unwrap_err().to_string().contains("recipe `bf16` and cannot go on as `fp32`")
        );
        assert_eq!(
            longer.check_resume(&saved).unwrap(),
            [("training.max_steps".to_string(), "3".to_string(), "9".to_string())]
        );
        let other = load(SMALL, &["max_length=9"]).unwrap();
        assert!(other.check_resume(&saved).unwrap_err().to_string().contains("`data.max_length` was 1024"));
    }
}
