//! The files of a model folder beside its weights.

use crate::model::as_json;
use crate::{Carried, CheckpointWriter, WeightFiles, adapter};
use ottava_common::error::{Error, Result};
use ottava_common::input;
use ottava_hub::RepoId;
use ottava_models::layers::SCORE;
use ottava_models::{ConfigFile, Decoder};
use ottava_recipe::lora::{Exceptions, Lora, Targets, last_name};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The maximum size of a file of [`COMPANIONS`]. Files in common use have up to about 35 MB.
const MAX_COMPANION_BYTES: u64 = 256 << 20;

/// The files of a model folder that are copied unchanged.
const COMPANIONS: &[&str] = &[
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tiktoken.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
];

/// The names of the files of the tokenizer and of the settings of generation.
const TOKENIZER: &str = "tokenizer.json";
const GENERATION: &str = "generation_config.json";

/// The key of the tokens that end a text, in `config.json` and `generation_config.json`.
const EOS: &str = "eos_token_id";

/// The files of a model folder except the weights.
pub struct FolderTemplate {
    /// `config.json` with all its keys, also unknown keys.
    pub config: ConfigFile,
    /// The files of [`COMPANIONS`], such as the tokenizer's files, by name. They are kept in memory, since their folder may be gone when a checkpoint
    /// is saved.
    companions: Vec<(&'static str, Arc<[u8]>)>,
    /// `generation_config.json` of the source; `None` if the source does not have it.
    pub generation: Option<Map<String, Value>>,
    /// The token ids that end a text.
    pub eos_ids: Vec<u32>,
    /// The folder from which the files were read.
    base: PathBuf,
    /// The parts of a larger model beside its text model.
    carried: Carried,
}

impl FolderTemplate {
    /// Reads the files of `model` (a folder, or a `config.json`) and of `tokenizer` (a folder, or a `tokenizer.json`).
    pub fn read(model: &Path, tokenizer: &Path, eos_ids: &[u32]) -> Result<FolderTemplate> {
        let config = ConfigFile::read(model)?;
        let generation = model.join(GENERATION);
        let generation = match generation.is_file() {
            true => Some(ConfigFile::read(&generation)?.values().clone()),
            false => None,
        };
        let folder = if tokenizer.is_dir() { tokenizer } else { tokenizer.parent().unwrap_or(Path::new(".")) };
        let mut companions = Vec::new();
        for name in COMPANIONS {
            let path = folder.join(name);
            if path.exists() {
                companions.push((*name, input::read(&path, MAX_COMPANION_BYTES).map_err(Error::io(&path))?.into()));
            }
        }
        let (base, carried) = (model.to_path_buf(), WeightFiles::open_carried(model, &config)?);
        Ok(FolderTemplate { config, companions, generation, eos_ids: eos_ids.to_vec(), base, carried })
    }

    /// Replaces the chat template of the folder by the template in the file `path`. Does nothing if `path` is empty.
    pub fn with_chat_template(mut self, path: &Path) -> Result<FolderTemplate> {
        const NAME: &str = "chat_template.jinja";
        if !path.as_os_str().is_empty() {
            let text = input::read(path, MAX_COMPANION_BYTES).map_err(Error::io(path))?;
            self.companions.retain(|(name, _)| *name != NAME);
            self.companions.push((NAME, text.into()));
        }
        Ok(self)
    }

    /// Replaces the `ids` of special tokens, by their keys in `generation_config.json`. A generated text ends with all ids that end a text.
    pub fn with_special_ids(mut self, ids: &[(&'static str, u32)]) -> FolderTemplate {
        if ids.is_empty() {
            return self;
        }
        let (mut generation, eos) = (self.generation.take().unwrap_or_default(), self.eos());
        for (key, id) in ids {
            generation.insert(key.to_string(), if *key == EOS { eos.clone() } else { json!(id) });
        }
        FolderTemplate { generation: Some(generation), ..self }
    }

    /// Returns the parts of a larger model beside its text model.
    pub fn carried(&self) -> &Carried {
        &self.carried
    }

    fn eos(&self) -> Value {
        match self.eos_ids.as_slice() {
            [] => Value::Null,
            [one] => json!(one),
            many => json!(many),
        }
    }

    /// Returns the files, by name, that `transformers` needs to load `model` from a folder, except the weights. If `model` has adapters, returns the
    /// files that PEFT needs.
    pub fn files(&self, model: &Decoder) -> Vec<(&'static str, Arc<[u8]>)> {
        let companions = self.companions.iter().map(|(name, bytes)| (*name, bytes.clone()));
        if let Some(lora) = &model.config().lora {
            let config = (adapter::CONFIG_FILE, adapter_config(lora, model, &self.base, &self.carried));
            return companions.chain([config]).collect();
        }
        let dtype = model.recipe().compute;
        let mut config = self.config.values().clone();
        // Weights are written in the compute type, even if the source folder is quantized.
        config.shift_remove("quantization_config");
        config.insert("dtype".into(), json!(dtype.name()));
        config.insert("torch_dtype".into(), json!(dtype.name()));
        // A reward model does not have a head that could be tied.
        if !model.config().head.score {
            config.insert("tie_word_embeddings".into(), json!(model.config().head.tied));
        }
        // `text_config` of a larger model is written as it was read.
        if !self.carried.is_wrapper() {
            if let [rope, local @ ..] = model.config().ropes.as_slice() {
                rope.write(local.first(), &mut config);
            }
            if !config.contains_key(EOS) {
                config.insert(EOS.into(), self.eos());
            }
        }
        let own = || Map::from_iter([(EOS.to_string(), self.eos())]);
        let generation = self.generation.clone().unwrap_or_else(own);
        let mut files = vec![("config.json", as_json(config.into())), (GENERATION, as_json(generation.into()))];
        files.extend(companions);
        files
    }
}

/// Writes the files of a model folder except the weights: `config` as `config.json`, and the other files unchanged from the folder `base`. The files of the
/// tokenizer come from the folder `texts`, if it has a tokenizer.
pub fn write_settings(
    writer: &mut CheckpointWriter,
    config: Map<String, Value>,
    base: &Path,
    texts: &Path,
) -> Result<()> {
    writer.file("config.json", |file| file.write(&as_json(config.into())))?;
    let texts = if texts.join(TOKENIZER).is_file() { texts } else { base };
    let of_base = [(base, GENERATION)].into_iter();
    for (folder, name) in of_base.chain(COMPANIONS.iter().map(|name| (texts, *name))) {
        let path = folder.join(name);
        if path.exists() {
            let bytes = input::read(&path, MAX_COMPANION_BYTES).map_err(Error::io(&path))?;
            writer.file(name, |file| file.write(&bytes))?;
        }
    }
    Ok(())
}

/// Returns `adapter_config.json` for the adapters of `model`, whose base model is in the folder `base`.
fn adapter_config(lora: &Lora, model: &Decoder, base: &Path, carried: &Carried) -> Arc<[u8]> {
    let adapted = model.description().adaptable().filter(|name| lora.has(name));
    let targets = match &lora.targets {
        // Short names would also name linears of the other parts of a larger model.
        _ if carried.is_wrapper() => json!(adapted.map(|name| carried.module(name)).collect::<BTreeSet<_>>()),
        Targets::AllLinear => json!(adapted.map(|name| last_name(name)).collect::<BTreeSet<_>>()),
        Targets::Names(names) => json!(names.iter().collect::<BTreeSet<_>>()),
        Targets::Pattern(pattern) => json!(pattern.text()),
    };
    let none = Exceptions::default();
    // The whole names of a larger model follow from the exceptions, so only ranks and factors remain.
    let Exceptions { exclude, layers, layers_pattern, .. } =
        if carried.is_wrapper() { &none } else { &lora.exceptions };
    let Exceptions { ranks, alphas, .. } = &lora.exceptions;
    let or_null = |is_set: bool, value: Value| if is_set { value } else { Value::Null };
    let base = base.canonicalize().unwrap_or(base.to_path_buf());
    // PEFT finds a model of the Hub by its name; its folder in the cache exists on this machine only.
    let (base, revision) = match RepoId::of_snapshot(&base) {
        Some((id, commit)) => (json!(id.name), json!(commit)),
        None => (json!(base), Value::Null),
    };
    let mut saved: BTreeSet<&str> = lora.modules_to_save.iter().map(String::as_str).collect();
    let task = if model.config().head.score { "SEQ_CLS" } else { "CAUSAL_LM" };
    saved.extend(model.config().head.score.then_some(SCORE));
    as_json(json!({
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base,
        "revision": revision,
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
        "target_modules": targets,
        "fan_in_fan_out": model.config().stream.names.transposed,
        "bias": "none",
        "init_lora_weights": true,
        "inference_mode": true,
        "modules_to_save": or_null(!saved.is_empty(), json!(saved)),
        "exclude_modules": or_null(*exclude != Targets::NONE, json!(exclude)),
        "layers_to_transform": or_null(!layers.is_empty(), json!(layers)),
        "layers_pattern": or_null(!layers_pattern.is_empty(), json!(layers_pattern)),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
    }))
}
