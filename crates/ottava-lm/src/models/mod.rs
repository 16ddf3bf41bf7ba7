//! Model families: each reads a Hugging Face `config.json` into the one [`DecoderConfig`] that all blocks are built from.

mod cohere;
mod config;
mod decoder;
mod deepseek_v2;
mod deepseek_v3;
mod family;
mod gemma2;
mod gemma3;
mod gpt2;
mod gpt_oss;
mod granite;
mod inference;
mod kv_cache;
mod layer_set;
mod llama;
mod mistral;
mod mixtral;
mod olmo2;
mod olmoe;
mod phi3;
mod prefetch;
mod quantization;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_moe;
mod reward;
mod rope;
mod rope_tables;
mod sizes;
mod smollm3;
mod stage;

pub use cohere::cohere;
pub use config::ConfigFile;
pub use decoder::{Adapters, BackwardPass, Decoder, FolderCounts};
pub use gemma2::gemma2;
pub use gpt2::gpt2;
pub use inference::{InferenceBatch, PREFILL_MULTIPLE, SequenceTokens, most_blocks, padded_rows};
pub use kv_cache::{KvCache, KvGroup};
pub use layer_set::LayerSet;
pub use mixtral::mixtral;
pub use phi3::phi3;
pub use quantization::{MODELOPT_FILE, Quantization, WeightScales};
pub use reward::pad_token;
pub use rope::{LongRope, RopeKind, RopeLengths, RopeScaling, Yarn};
pub use rope_tables::RopeTables;
pub use sizes::{DecoderConfig, Positions};
pub use stage::{ComparedSaved, Span, Stage, StageSaved};

use crate::error::Result;
use family::Family;
use ottava_tensor::ops::NormKind;

const FAMILIES: &[Family] = &[
    llama::FAMILY,
    mistral::FAMILY,
    qwen2::FAMILY,
    qwen3::FAMILY,
    gpt2::FAMILY,
    cohere::FAMILY,
    gemma2::FAMILY,
    gemma3::FAMILY,
    phi3::FAMILY,
    olmo2::FAMILY,
    granite::FAMILY,
    smollm3::FAMILY,
    mixtral::FAMILY,
    qwen2_moe::FAMILY,
    qwen3_moe::FAMILY,
    olmoe::FAMILY,
    deepseek_v2::FAMILY,
    deepseek_v3::FAMILY,
    gpt_oss::FAMILY,
];

/// Reads the sizes of a model from its `config.json`.
///
/// Errors if the architecture is unknown, a key is missing or a setting is not implemented.
pub fn decoder_config(file: &ConfigFile) -> Result<DecoderConfig> {
    let mut config = (family(file)?.read)(file)?;
    if is_reward_model(file)? {
        config = reward::with_score(file, config)?;
    }
    check_constants(&config).map_err(|problem| file.error(&problem))?;
    config.check().map_err(|problem| file.error(&problem))?;
    Ok(config)
}

/// [`decoder_config`] of a model that writes tokens.
///
/// Errors also for a reward model.
pub fn language_model_config(file: &ConfigFile) -> Result<DecoderConfig> {
    let sizes = decoder_config(file)?;
    match sizes.score {
        false => Ok(sizes),
        true => Err(file.error(
            "this is a reward model, whose head computes a score and no tokens; `ottava eval` evaluates it on pairs of preferences",
        )),
    }
}

/// Whether `file` is of a reward model.
///
/// Errors when it names no architecture.
pub fn is_reward_model(file: &ConfigFile) -> Result<bool> {
    let name = file.architecture()?;
    Ok(FAMILIES.iter().any(|family| family.reward_model == Some(name.as_str())))
}

/// `file` as that of a reward model, with the decoder of the model that it is of. `pad` is the padding token of its tokenizer, which counts
/// if the file names none.
///
/// Errors when the architecture is unknown, or transformers has no reward model with this decoder.
pub fn reward_model(file: &ConfigFile, pad: Option<u32>) -> Result<ConfigFile> {
    let padded = reward::with_padding(file, pad);
    match family(file)?.reward_model {
        Some(_) if is_reward_model(file)? => Ok(padded),
        Some(architecture) => Ok(reward::with_architecture(&padded, architecture)),
        None => {
            let name = file.architecture()?;
            Err(file.error(&format!("transformers has no reward model with the decoder of `{name}`")))
        }
    }
}

/// The family of a model.
fn family(file: &ConfigFile) -> Result<&'static Family> {
    let name = file.architecture()?;
    let is = |f: &&Family| f.architecture == name || f.model_type == name || f.reward_model == Some(name.as_str());
    FAMILIES.iter().find(is).ok_or_else(|| {
        let known: Vec<_> = FAMILIES.iter().map(|f| f.architecture).collect();
        file.error(&format!("the architecture `{name}` is not one of {}", known.join(", ")))
    })
}

/// More blocks than any model has, but few enough to be planned within a second.
const MAX_LAYERS: usize = 10_000;

/// Problems of sizes in `config.json`.
fn check_constants(config: &DecoderConfig) -> Result<(), String> {
    if config.layers > MAX_LAYERS {
        return Err(format!("`num_hidden_layers` is {}; at most {MAX_LAYERS} are possible", config.layers));
    }
    let norm_eps = match (config.norm, config.positions) {
        (NormKind::Rms | NormKind::RmsPlusOne, _) => "rms_norm_eps",
        (NormKind::Layer, Positions::Learned) => "layer_norm_epsilon",
        (NormKind::Layer, Positions::Rotary(_)) => "layer_norm_eps",
    };
    let mut positive = vec![(norm_eps, config.norm_eps), ("rope_theta", config.rope.theta)];
    positive.extend(config.local_rope.as_ref().map(|rope| ("rope_local_base_freq", rope.theta)));
    match positive.into_iter().find(|(_, value)| !(value.is_finite() && *value > 0.0)) {
        Some((key, value)) => Err(format!("`{key}` is {value}; it is a number above 0")),
        None if !(config.init_std.is_finite() && config.init_std >= 0.0) => {
            Err(format!("`initializer_range` is {}; it is a number from 0 up", config.init_std))
        }
        None => Ok(()),
    }
}
