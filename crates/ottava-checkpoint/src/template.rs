//! The files of a model folder beside its weights.

use crate::model::as_json;
use crate::{Carried, CheckpointWriter, Texts, WeightFiles, adapter};
use ottava_common::error::{Error, Result};
use ottava_common::input;
use ottava_data::tokenizer_changes::COMPANIONS;
use ottava_data::{ChatTemplate, Clock};
use ottava_hub::RepoId;
use ottava_models::layers::SCORE;
use ottava_models::{ConfigFile, Decoder};
use ottava_recipe::lora::{Exceptions, ExpertRank, Lora, RouterParameter, Targets, last_name, parameter_names};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The maximum size of a file of [`COMPANIONS`]. Files in common use have up to about 35 MB.
const MAX_COMPANION_BYTES: u64 = 256 << 20;

/// The files of [`COMPANIONS`] that belong to the model and not to its tokenizer.
const OF_MODEL: [&str; 3] = ["preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"];

/// The file of sentence-transformers that says how activations become an embedding.
pub const POOLING_FILE: &str = "1_Pooling/config.json";

/// The files with which sentence-transformers loads an embedding model.
const POOLING_FILES: [&str; 4] =
    ["modules.json", POOLING_FILE, "config_sentence_transformers.json", "sentence_bert_config.json"];

/// The file of the chat template.
const TEMPLATE: &str = "chat_template.jinja";

/// The file with the settings of generation.
const GENERATION: &str = "generation_config.json";

/// The key of the tokens that end a text, in `config.json` and `generation_config.json`.
const EOS: &str = "eos_token_id";

/// The keys of other special tokens in these files.
const SPECIAL: [&str; 2] = ["bos_token_id", "pad_token_id"];

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
    /// The files with which sentence-transformers loads an embedding model, by name.
    pooling: Vec<(&'static str, Value)>,
}

impl FolderTemplate {
    /// Reads the files of `model` (a folder, or a `config.json`) and of `tokenizer` (a folder, or a `tokenizer.json`).
    pub fn read(model: &Path, tokenizer: &Path, eos_ids: &[u32]) -> Result<FolderTemplate> {
        let config = ConfigFile::read(model)?;
        let generation = model.join(GENERATION).is_file().then(|| generation(model)).transpose()?;
        let folder = if tokenizer.is_dir() { tokenizer } else { tokenizer.parent().unwrap_or(Path::new(".")) };
        let mut companions = Vec::new();
        for name in COMPANIONS {
            let path = folder.join(name);
            if path.exists() {
                companions.push((*name, input::read(&path, MAX_COMPANION_BYTES).map_err(Error::io(&path))?.into()));
            }
        }
        let (base, carried) = (model.to_path_buf(), WeightFiles::open_carried(model, &config)?);
        Ok(FolderTemplate {
            config,
            companions,
            generation,
            eos_ids: eos_ids.to_vec(),
            base,
            carried,
            pooling: Vec::new(),
        })
    }

    /// Replaces the chat template of the folder by the template in the file `path`. Does nothing if `path` is empty.
    pub fn with_chat_template(mut self, path: &Path) -> Result<FolderTemplate> {
        if !path.as_os_str().is_empty() {
            let text = input::read(path, MAX_COMPANION_BYTES).map_err(Error::io(path))?;
            self.companions.retain(|(name, _)| *name != TEMPLATE);
            self.companions.push((TEMPLATE, text.into()));
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

    /// Adds the files with which sentence-transformers loads an embedding model whose embeddings have `channels` values. `mode` is the key of
    /// sentence-transformers that names how activations are pooled. Pooled activations are divided by their norm. Longer texts are truncated to
    /// `max_length` tokens.
    pub fn with_pooling(self, mode: &str, channels: usize, max_length: usize) -> FolderTemplate {
        let module = |idx: usize, path: &str, kind: &str| json!({"idx": idx, "name": idx.to_string(), "path": path, "type": format!("sentence_transformers.models.{kind}")});
        let modules =
            [module(0, "", "Transformer"), module(1, "1_Pooling", "Pooling"), module(2, "2_Normalize", "Normalize")];
        let pooling = json!({
            "word_embedding_dimension": channels,
            "pooling_mode_cls_token": mode == "pooling_mode_cls_token",
            "pooling_mode_mean_tokens": mode == "pooling_mode_mean_tokens",
            "pooling_mode_max_tokens": false,
            "pooling_mode_mean_sqrt_len_tokens": false,
            "pooling_mode_weightedmean_tokens": false,
            "pooling_mode_lasttoken": mode == "pooling_mode_lasttoken",
            "include_prompt": true,
        });
        let of_all = json!({"prompts": {}, "default_prompt_name": null, "similarity_fn_name": "cosine"});
        let of_text = json!({"max_seq_length": max_length, "do_lower_case": false});
        let values = [json!(modules), pooling, of_all, of_text];
        FolderTemplate { pooling: POOLING_FILES.into_iter().zip(values).collect(), ..self }
    }

    /// Returns the parts of a larger model beside its text model.
    pub fn carried(&self) -> &Carried {
        &self.carried
    }

    fn eos(&self) -> Value {
        value_of_ids(&self.eos_ids)
    }

    /// Returns the files, by name, that `transformers` needs to load `model` from a folder, except the weights. If `model` has adapters, returns the
    /// files that PEFT needs.
    pub fn files(&self, model: &Decoder) -> Vec<(&'static str, Arc<[u8]>)> {
        let companions = self.companions.iter().map(|(name, bytes)| (*name, bytes.clone()));
        if let Some(lora) = &model.config().lora {
            let config = (adapter::CONFIG_FILE, adapter_config(lora, model, &self.base, &self.carried));
            let pooling = self.pooling.iter().map(|(name, value)| (*name, as_json(value.clone())));
            // The folder of the adapter has its own tokenizer, whose texts end as the texts of the run.
            let mut generation = self.generation.clone().unwrap_or_default();
            generation.insert(EOS.into(), self.eos());
            return companions.chain([config, (GENERATION, as_json(generation.into()))]).chain(pooling).collect();
        }
        let dtype = model.recipe().compute;
        let mut config = self.config.values().clone();
        // Weights are written in the compute type, even if the source folder is quantized.
        config.shift_remove("quantization_config");
        config.insert("dtype".into(), json!(dtype.name()));
        config.insert("torch_dtype".into(), json!(dtype.name()));
        // A classifier does not have a head that could be tied.
        if model.config().head.labels.is_none() {
            config.insert("tie_word_embeddings".into(), json!(model.config().head.tied));
        }
        // `text_config` of a larger model is written as it was read.
        if !self.carried.is_wrapper() {
            if let [rope, local @ ..] = model.config().ropes.as_slice() {
                rope.write(local.first(), &mut config);
            }
            if !config.contains_key(EOS) && !model.config().is_encoder() {
                config.insert(EOS.into(), self.eos());
            }
        }
        let own = || Map::from_iter([(EOS.to_string(), self.eos())]);
        let generation = self.generation.clone().unwrap_or_else(own);
        let mut files = vec![("config.json", as_json(config.into())), (GENERATION, as_json(generation.into()))];
        files.extend(companions);
        files.extend(self.pooling.iter().map(|(name, value)| (*name, as_json(value.clone()))));
        files
    }
}

/// Returns the value of `eos_token_id`.
fn value_of_ids(ids: &[u32]) -> Value {
    match ids {
        [] => Value::Null,
        [one] => json!(one),
        many => json!(many),
    }
}

/// Writes the files of a model folder except the weights: `config` as `config.json`, and the other files unchanged from the folder `base`.
pub fn write_settings(writer: &mut CheckpointWriter, config: Map<String, Value>, base: &Path) -> Result<()> {
    write_text_files(writer, config, base)?;
    write_pooling(writer, &[base])
}

/// Writes the files as [`write_settings`], except the files of sentence-transformers.
pub(super) fn write_text_files(writer: &mut CheckpointWriter, config: Map<String, Value>, base: &Path) -> Result<()> {
    writer.file("config.json", |file| file.write(&as_json(config.into())))?;
    [GENERATION].iter().chain(COMPANIONS).try_for_each(|name| copy(writer, base, name))
}

/// Copies the files of sentence-transformers from the first of `folders` that has a pooling, if there is one.
pub(super) fn write_pooling(writer: &mut CheckpointWriter, folders: &[&Path]) -> Result<()> {
    match folders.iter().find(|folder| folder.join(POOLING_FILE).is_file()) {
        Some(folder) => POOLING_FILES.iter().try_for_each(|name| copy(writer, folder, name)),
        None => Ok(()),
    }
}

/// Copies the file `name` of `folder`, if there is one.
fn copy(writer: &mut CheckpointWriter, folder: &Path, name: &'static str) -> Result<()> {
    let path = folder.join(name);
    if path.exists() {
        let bytes = input::read(&path, MAX_COMPANION_BYTES).map_err(Error::io(&path))?;
        writer.file(name, |file| file.write(&bytes))?;
    }
    Ok(())
}

/// Writes the files of a merged model folder except the weights, if the folder `adapter` has a tokenizer that fits: `texts`. The files of the tokenizer
/// come from `adapter`, the chat template from the folder that `texts` name, and other files from `base`. The ids of special tokens that are new in the
/// adapter are added to `config` and to `generation_config.json`.
pub(super) fn write_merged(
    writer: &mut CheckpointWriter,
    mut config: Map<String, Value>,
    base: &Path,
    (adapter, texts): (&Path, &Texts),
) -> Result<()> {
    let (mut generation, of_adapter) = (generation(base)?, generation(adapter)?);
    let is_wrapper = ConfigFile::read(base)?.is_wrapper()?;
    let known: Vec<Value> =
        [&config, &generation].into_iter().filter_map(|file| file.get(EOS)).flat_map(list).collect();
    let ends = texts.tokenizer.eos_ids();
    let mut ids: Vec<(&str, Value)> = SPECIAL
        .into_iter()
        .filter_map(|key| Some((key, of_adapter.get(key).filter(|id| generation.get(key) != Some(id))?.clone())))
        .collect();
    if ends.iter().any(|id| !known.contains(&json!(id))) {
        ids.push((EOS, value_of_ids(ends)));
    }
    for (key, id) in ids {
        generation.insert(key.into(), id.clone());
        // The keys of the text model of a larger model are in a table of their own, which stays as it is.
        if !is_wrapper {
            config.insert(key.into(), id);
        }
    }
    writer.file("config.json", |file| file.write(&as_json(config.into())))?;
    if !generation.is_empty() {
        writer.file(GENERATION, |file| file.write(&as_json(generation.into())))?;
    }
    let keeps_template = texts.template == base;
    for name in COMPANIONS {
        let is_of_base = OF_MODEL.contains(name) || keeps_template && name.starts_with("chat_template");
        copy(writer, if is_of_base { base } else { adapter }, name)?;
    }
    // The base may have its template in `tokenizer_config.json`, which comes from the adapter.
    if keeps_template
        && !base.join(TEMPLATE).exists()
        && let Some(template) = ChatTemplate::load(base, None, Clock::Fixed)?
    {
        writer.file(TEMPLATE, |file| file.write(template.source().as_bytes()))?;
    }
    Ok(())
}

/// Returns `generation_config.json` of `folder`; empty if there is none.
fn generation(folder: &Path) -> Result<Map<String, Value>> {
    let path = folder.join(GENERATION);
    match path.is_file() {
        true => Ok(ConfigFile::read(&path)?.values().clone()),
        false => Ok(Map::new()),
    }
}

/// Returns the entries of a list, or the value itself.
fn list(value: &Value) -> Vec<Value> {
    value.as_array().cloned().unwrap_or_else(|| vec![value.clone()])
}

/// The targets of adapters in `adapter_config.json`.
struct AdapterTargets {
    /// The linears: `target_modules`.
    modules: Value,
    /// The stacked matrices of experts, and the weights of routers: `target_parameters`.
    parameters: BTreeSet<String>,
    /// The ranks of linears and parameters, by patterns.
    ranks: BTreeMap<String, usize>,
    /// The values of `alpha`, by patterns.
    alphas: BTreeMap<String, f64>,
}

impl AdapterTargets {
    /// Returns the targets of the adapters of `model`. Experts and routers are always named as parameters, as PEFT with transformers 5 does.
    fn of(lora: &Lora, model: &Decoder, carried: &Carried) -> AdapterTargets {
        let description = model.description();
        let linears: Vec<&String> = description.adaptable().collect();
        let adapted: Vec<&String> = linears.iter().filter(|name| lora.has(name)).copied().collect();
        let experts = description.experts.iter().filter_map(|parameter| {
            let found = lora.of_experts(parameter).ok().flatten()?;
            Some((module_name(&parameter.name, parameter.by_name), found))
        });
        let experts: Vec<(String, ExpertRank)> = experts.collect();
        let own: Vec<String> = experts.iter().map(|(name, _)| name.clone()).collect();
        let all = description.experts.iter().map(|parameter| module_name(&parameter.name, parameter.by_name));
        let weight = |router: &RouterParameter| format!("{}.weight", module_name(&router.name, router.by_name));
        let routers = description.routers.iter().filter(|router| lora.has_router(router)).map(weight);
        let mut parameters = ends_of(&own, &all.collect::<Vec<_>>(), carried);
        let all_routers: Vec<String> = description.routers.iter().map(weight).collect();
        parameters.extend(ends_of(&routers.collect::<Vec<_>>(), &all_routers, carried));
        let has_parameters = !parameters.is_empty();
        let whole = || json!(adapted.iter().map(|name| carried.module(name)).collect::<BTreeSet<_>>());
        let modules = match &lora.targets {
            // Short names would also name linears of the other parts of a larger model.
            _ if carried.is_wrapper() => whole(),
            Targets::AllLinear => json!(adapted.iter().map(|name| last_name(name)).collect::<BTreeSet<_>>()),
            Targets::Names(names) => {
                // Some names only select experts and routers.
                let is_module = |name: &&String| {
                    let target = Targets::Names(vec![name.to_string()]);
                    !has_parameters || linears.iter().any(|linear| target.names(linear))
                };
                json!(names.iter().filter(is_module).collect::<BTreeSet<_>>())
            }
            // PEFT would read the expression as another selection of experts.
            Targets::Pattern(_) if has_parameters => whole(),
            Targets::Pattern(pattern) => json!(pattern.text()),
        };
        let Exceptions { mut ranks, mut alphas, .. } = lora.exceptions.clone();
        for (name, found) in &experts {
            // PEFT's name of the parameter follows from the names of its linears, so patterns of these names do not match it.
            let of_parameter = Lora { parameters: vec![name.to_string()], ..lora.clone() };
            let (rank, alpha) = (of_parameter.rank(name), of_parameter.alpha(name));
            let pattern =
                match own.iter().all(|other| last_name(other) != last_name(name) || same(&experts, other, found)) {
                    true => format!("experts[.]{}", last_name(name)),
                    false => carried.module(name).replace('.', "[.]"),
                };
            if rank != found.rank {
                ranks.insert(pattern.clone(), found.rank);
            }
            if alpha != found.alpha {
                alphas.insert(pattern, found.alpha);
            }
        }
        AdapterTargets { modules, parameters, ranks, alphas }
    }
}

/// Returns the name in transformers of a module or parameter of a mixture. Transformers 5 has another name for the mixture if PEFT translates names.
fn module_name(name: &str, by_name: bool) -> String {
    let [own, other] = parameter_names(name);
    if by_name { other } else { own }
}

/// Returns whether the parameter `name` has the same rank and factor as `found`.
fn same(experts: &[(String, ExpertRank)], name: &str, found: &ExpertRank) -> bool {
    experts.iter().any(|(other, rank)| other == name && rank == found)
}

/// Returns the ends of the names of parameters, such as `experts.gate_up_proj`, if all parameters with this end are among `own`. Other names are whole.
fn ends_of(own: &[String], all: &[String], carried: &Carried) -> BTreeSet<String> {
    let end =
        |name: &str| name.rmatch_indices('.').nth(1).map_or(name.to_string(), |(at, _)| name[at + 1..].to_string());
    let is_complete = |name: &str| all.iter().filter(|other| end(other) == end(name)).all(|other| own.contains(other));
    let named = own.iter().map(|name| match is_complete(name) && !carried.is_wrapper() {
        true => end(name),
        false => carried.module(name),
    });
    named.collect()
}

/// Returns `adapter_config.json` for the adapters of `model`, whose base model is in the folder `base`.
fn adapter_config(lora: &Lora, model: &Decoder, base: &Path, carried: &Carried) -> Arc<[u8]> {
    let targets = AdapterTargets::of(lora, model, carried);
    let none = Exceptions::default();
    // The whole names of a larger model follow from the exceptions, so only ranks and factors remain.
    let Exceptions { exclude, layers, layers_pattern, .. } =
        if carried.is_wrapper() { &none } else { &lora.exceptions };
    let AdapterTargets { modules, parameters, ranks, alphas } = targets;
    // PEFT loads adapters of parameters only without dropout, which has no effect on trained adapters.
    let dropout = if parameters.is_empty() { lora.dropout } else { 0.0 };
    let or_null = |is_set: bool, value: Value| if is_set { value } else { Value::Null };
    let base = base.canonicalize().unwrap_or(base.to_path_buf());
    // PEFT finds a model of the Hub by its name; its folder in the cache exists on this machine only.
    let (base, revision) = match RepoId::of_snapshot(&base) {
        Some((id, commit)) => (json!(id.name), json!(commit)),
        None => (json!(base), Value::Null),
    };
    let mut saved: BTreeSet<String> = match carried.is_wrapper() {
        true => {
            let modules = model.description().modules.trainable().into_iter();
            modules.filter(|module| lora.saves(module)).map(|module| carried.module(module)).collect()
        }
        false => lora.modules_to_save.iter().cloned().collect(),
    };
    let head = &model.config().head;
    let task = match (head.labels, head.pooled) {
        (Some(_), _) => "SEQ_CLS",
        (None, true) => "FEATURE_EXTRACTION",
        (None, false) => "CAUSAL_LM",
    };
    saved.extend(model.config().head.labels.map(|_| SCORE.to_string()));
    as_json(json!({
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base,
        "revision": revision,
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "lora_dropout": dropout,
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
        "target_modules": modules,
        "target_parameters": or_null(!parameters.is_empty(), json!(parameters)),
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
