//! Model families: each family reads a Hugging Face `config.json` into a [`DecoderConfig`]. The layers of all families are built from this type. Encoders
//! are families too: their attention has no causal mask, and a norm or a pooler is where decoders have none.
//!
//! ```
//! use ottava_models::{ConfigFile, decoder_config};
//!
//! let values = serde_json::json!({
//!     "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
//!     "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "vocab_size": 96,
//! });
//! let sizes = decoder_config(&ConfigFile::from_values("model", values.as_object().unwrap().clone()))?;
//! assert_eq!((sizes.layers.len(), sizes.vocabulary), (2, 96));
//! # Ok::<(), ottava_common::Error>(())
//! ```
//!
//! `Decoder` owns the `Stage`s of a process, the `ScalingState` of their casts, and the `Description` of the whole model. A `Stage` holds the
//! layers of a `Span`: consecutive blocks, with or without embedding and head. Without a pipeline there is one stage, which has all layers.
//! `Stage::forward` returns a `StageSaved` by value and `Stage::backward` consumes it, so several micro-batches may be in flight. A model
//! divided into stages is bit-identical to a whole model (`tests/promises/step/stages.rs`).
//!
//! The `Builder` carries device, recipe, weights and `Purpose` through the constructors. It collects the `Slots` of all casts and the
//! `Description`: the linears with the recipe's decision, the parameters, and the spec of each attention. `Decoder::describe` builds a model
//! in a dry run, which takes no memory, and returns only its `Description`.
//!
//! A `config.json` that asks for something not implemented is an error. Examples are weights quantized to another format than FP8, dropout, an
//! unknown activation, and an unknown rotary scaling. The only exception is the dropout of GPT-2: all its published files
//! ask for dropout, so it is ignored with a warning (`Description::ignored`).
//!
//! The text model of a vision-language model is read from `text_config` (`wrapper.rs`).
//!
//! Qwen3 is the worked example of a family: `families/qwen3.rs`, its entry in `FAMILIES`, the field `qk_norm` in `layers/attention.rs`, and the norm of
//! heads in `layers/attention/head_norm.rs` with its op `ops/head_norm/`. A norm over all heads of a token (`ops/projection_norm/`) computes
//! its sums in separate ops, so that tensor-parallel ranks can add the sums.
//!
//! Weights in host memory are copied to the device one block ahead, in forward, backward and generation (`prefetch.rs`). FP8
//! codes of such weights are not stored, since an update would have to write back weights and codes. Inputs of blocks (`ResidualBuffers`) are
//! copied to the host while their block runs forward. In backward they are fetched with the weights of the block.
#![forbid(unsafe_code)]

pub mod layers;

mod block;
mod classifier;
mod config;
mod decoder;
mod families;
mod family;
mod inference;
mod kv_cache;
mod layer_keys;
mod layer_set;
mod prefetch;
mod quantization;
mod rope;
mod rope_tables;
mod sizes;
mod spec;
mod stage;
#[cfg(test)]
mod tests;
mod uniform;
mod wrapper;

pub use classifier::Labels;
pub use config::ConfigFile;
pub use decoder::{Adapters, BackwardPass, Decoder, FolderCounts};
pub use inference::{InferenceBatch, MOST_PACKED, PREFILL_MULTIPLE, SequenceTokens, most_blocks, padded_rows};
pub use kv_cache::{CacheSizes, KvCache, KvGroup};
pub use layer_set::LayerSet;
pub use quantization::{Fp4Pack, MODELOPT_FILE, Quantization, WeightScales};
pub use rope::{LongRope, RopeKind, RopeLengths, RopeScaling, Yarn};
pub use rope_tables::RopeTables;
pub use sizes::{DecoderConfig, EmbeddingSpec, FolderNotes, HeadSpec};
pub use spec::{BranchSpec, LayerSpec, RopeSpec, SublayerSpec};
pub use stage::{ComparedSaved, Span, Stage, StageSaved};
pub use uniform::Uniform;
pub use wrapper::TextNames;

use crate::layers::Stream;
use families::{FAMILIES, mistral};
use family::Family;
use ottava_common::error::Result;
use ottava_tensor::ops::NormKind;

/// The types of models whose experts PEFT 0.21 adapts by the names that their linears had before transformers 5: PEFT translates these names, and
/// `all-linear`, to parameters.
const PEFT_BY_NAME: &[&str] = &[
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "hunyuan_v1_moe",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "qwen3_moe",
    "qwen3_next",
];

/// Reads the sizes of a model from its `config.json`. In the file of a vision-language model, these are the sizes of its text model.
///
/// Errors if the architecture is unknown, a key is missing or a setting is not implemented.
pub fn decoder_config(file: &ConfigFile) -> Result<DecoderConfig> {
    let file = &*file.text_model()?;
    let family = family(file)?;
    let complete = family.complete(file);
    let mut config = (family.read)(&complete)?;
    if is_classifier(file)? {
        config = classifier::with_scores(file, config)?;
    }
    let by_name = PEFT_BY_NAME.contains(&family.model_type);
    config.experts_mut().for_each(|experts| experts.adapters_by_name = by_name);
    config.folder.ignored.extend(ignored_architecture(file, family)?);
    config.folder.ignored.extend(layer_keys::ignored(&complete, family));
    check_constants(&config).map_err(|problem| file.error(&problem))?;
    config.check().map_err(|problem| file.error(&problem))?;
    Ok(config)
}

/// Reads the sizes of a language model as [`decoder_config`] does.
///
/// Errors also if `file` is the file of a classifier or a reward model.
pub fn language_model_config(file: &ConfigFile) -> Result<DecoderConfig> {
    let sizes = decoder_config(file)?;
    match sizes.head.labels {
        None if sizes.is_encoder() => Err(file.error(
            "this is an encoder, which writes no text; `ottava serve` answers with its embeddings, and `ottava train` trains it as a classifier or \
             an embedding model",
        )),
        None => Ok(sizes),
        Some(1) => Err(file.error(
            "this is a reward model, whose head computes a score and no tokens; `ottava eval` evaluates it on pairs of preferences",
        )),
        Some(labels) => Err(file.error(&format!(
            "this is a classifier, whose head computes scores of {labels} labels and no tokens; `ottava eval` evaluates it on texts with labels"
        ))),
    }
}

/// Returns whether `file` belongs to a classifier. A reward model is a classifier with one label.
///
/// Errors when `file` names an unknown architecture or model type.
pub fn is_classifier(file: &ConfigFile) -> Result<bool> {
    Ok(Some(architecture(file)?) == family(file)?.reward_model)
}

/// Returns whether `file` belongs to an encoder, with or without the scores of a classifier.
///
/// Errors as [`is_classifier`].
pub fn is_encoder(file: &ConfigFile) -> Result<bool> {
    family(file).map(Family::is_encoder)
}

/// Returns the labels of the classifier of `file`, or `None` if `file` belongs to a language model.
///
/// Errors as [`is_classifier`], and if the labels are not numbered from 0 on.
pub fn labels_of(file: &ConfigFile) -> Result<Option<Labels>> {
    let file = &*file.text_model()?;
    is_classifier(file)?.then(|| Labels::read(file)).transpose()
}

/// Returns the padding token of a classifier, or `None` if the file names no padding token. Without a padding token, the score is read at the last
/// token.
///
/// Errors when the architecture is unknown.
pub fn pad_token(file: &ConfigFile) -> Result<Option<i64>> {
    let file = &*file.text_model()?;
    family(file)?.complete(file).nullable(classifier::PAD)
}

/// Returns `file` changed to describe a reward model with the same decoder. If `file` names no padding token, the new file names `pad`, the
/// padding token of the tokenizer.
///
/// Errors when the architecture is unknown or an encoder, transformers has no reward model with this decoder, or `file` belongs to a classifier with several labels.
pub fn reward_model(file: &ConfigFile, pad: Option<u32>) -> Result<ConfigFile> {
    if is_encoder(file)? {
        return Err(file.error(
            "this is an encoder, and reward models with an encoder are not implemented; train a classifier of pairs with one label \
             (`classification.problem_type`), or start from a language model",
        ));
    }
    match labels_of(file)?.map(|labels| labels.names.len()) {
        None => classifier(file, pad, &Labels::numbered(1)),
        Some(1) => Ok(classifier::with_padding(file, pad)),
        Some(labels) => {
            Err(file.error(&format!("the head has {labels} labels (`id2label`); the head of a reward model has one")))
        }
    }
}

/// Returns `file` changed to describe a classifier with the same decoder or encoder and these `labels`. If the file of a decoder names no padding token,
/// the new file names `pad`, the padding token of the tokenizer.
///
/// Errors when the architecture is unknown, or transformers has no classifier with this decoder.
pub fn classifier(file: &ConfigFile, pad: Option<u32>, labels: &Labels) -> Result<ConfigFile> {
    if file.is_wrapper()? {
        return Err(
            file.error("classifiers and reward models with the decoder of a vision-language model are not implemented")
        );
    }
    let family = family(file)?;
    match family.reward_model {
        // The padding token of an encoder decides the rows of positions, and each family has a default.
        Some(architecture) => {
            let pad = pad.filter(|_| !family.is_encoder());
            Ok(labels.write(&classifier::with_padding(file, pad), architecture))
        }
        None => {
            let name = family.architecture;
            Err(file.error(&format!("transformers has no classifier with the decoder of `{name}`")))
        }
    }
}

/// Returns `file` with the architecture of an encoder without a head, if it belongs to an encoder. Other files do not change.
///
/// Errors as [`is_encoder`].
pub fn without_scores(file: &ConfigFile) -> Result<ConfigFile> {
    if !is_encoder(file)? {
        return Ok(file.clone());
    }
    let mut values = file.values().clone();
    values.insert("architectures".into(), serde_json::json!([family(file)?.architecture]));
    Ok(file.with_values(values))
}

/// Returns the transformers class of the model in `file`: a language model or a classifier. The text model of a larger model has the class that it
/// would have in a folder of its own.
///
/// Errors when the class is unknown.
pub fn architecture(file: &ConfigFile) -> Result<&'static str> {
    let file = &*file.text_model()?;
    let family = family(file)?;
    let Some(name) = file.architecture()? else { return Ok(family.architecture) };
    if family.is_without_scores(&name) {
        return Ok(family.architecture);
    }
    match family.reward_model {
        // As in transformers, `model_type` decides the decoder, even if the name of the class has another decoder.
        Some(own) if FAMILIES.iter().any(|f| f.reward_model == Some(name.as_str())) => Ok(own),
        own => {
            let known: Vec<_> = [Some(family.architecture), own].into_iter().flatten().collect();
            Err(file.error(&format!("the architecture `{name}` is not one of {}", known.join(", "))))
        }
    }
}

/// Returns the family that `model_type` names, as in transformers. If a file has no `model_type`, `architectures` names the family.
fn family(file: &ConfigFile) -> Result<&'static Family> {
    let file = &*file.text_model()?;
    let (found, what, name) = match (file.nullable::<String>("model_type")?, file.architecture()?) {
        (Some(name), _) => {
            // transformers loads a Mistral with `layer_types` as Ministral.
            let has_types = name == "mistral" && file.values().contains_key("layer_types");
            let model_type = if has_types { mistral::MINISTRAL.model_type } else { &name };
            (FAMILIES.iter().find(|f| f.model_type == model_type), "model type", name)
        }
        (None, Some(name)) => {
            let is = |f: &&Family| f.architecture == name || f.reward_model == Some(name.as_str());
            (FAMILIES.iter().find(is), "architecture", name)
        }
        (None, None) => return Err(file.error("the key `model_type` is missing")),
    };
    found.ok_or_else(|| {
        let known = FAMILIES.iter().map(|f| if what == "architecture" { f.architecture } else { f.model_type });
        let known: Vec<_> = known.chain(wrapper::names()).collect();
        file.error(&format!("the {what} `{name}` is not one of {}", known.join(", ")))
    })
}

/// Returns a sentence if `architectures` names another family than `model_type`.
fn ignored_architecture(file: &ConfigFile, family: &Family) -> Result<Option<String>> {
    let Some(name) = file.architecture()? else { return Ok(None) };
    let is = |f: &&Family| f.architecture == name || f.reward_model == Some(name.as_str());
    let mistrals = [mistral::FAMILY.model_type, mistral::MINISTRAL.model_type];
    let is_same = |f: &Family| {
        f.model_type == family.model_type
            || mistrals.iter().all(|name| [f, family].iter().any(|f| f.model_type == *name))
    };
    let other = FAMILIES.iter().find(is).filter(|other| !is_same(other));
    Ok(other.map(|_| {
        let own = family.model_type;
        format!("`architectures` is `{name}` and is ignored: `model_type` is \"{own}\" and decides, as in transformers")
    }))
}

/// Errors if a constant of the norms, the rotary base or `initializer_range` is out of range.
fn check_constants(config: &DecoderConfig) -> Result<(), String> {
    let Stream { norm, std, .. } = config.stream;
    let norm_eps = match (norm.kind, config.embedding.learned_positions) {
        (NormKind::Rms | NormKind::RmsPlusOne, _) => "rms_norm_eps",
        (NormKind::Layer, true) if config.embedding.tail.is_none() => "layer_norm_epsilon",
        (NormKind::Layer, _) => "layer_norm_eps",
    };
    let mut positive = vec![(norm_eps, norm.eps)];
    let bases = ["rope_theta", "rope_local_base_freq"].into_iter().zip(&config.ropes);
    positive.extend(bases.map(|(key, rope)| (key, rope.theta)));
    match positive.into_iter().find(|(_, value)| !(value.is_finite() && *value > 0.0)) {
        Some((key, value)) => Err(format!("`{key}` is {value}; it is a number above 0")),
        None if !(std.is_finite() && std >= 0.0) => {
            Err(format!("`initializer_range` is {std}; it is a number from 0 up"))
        }
        None => Ok(()),
    }
}
