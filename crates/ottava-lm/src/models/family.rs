//! Code that model families share.

use super::{ConfigFile, DecoderConfig, LayerSet, Quantization, RopeScaling};
use crate::error::Result;
use ottava_tensor::ops::{Activation, Gelu, RouterScores, Routing};

/// One model family.
pub(super) struct Family {
    /// Its name in `architectures` of `config.json`.
    pub(super) architecture: &'static str,
    /// Its name in `model_type`.
    pub(super) model_type: &'static str,
    /// The architecture of a reward model with its decoder, if transformers has one.
    pub(super) reward_model: Option<&'static str>,
    pub(super) read: fn(&ConfigFile) -> Result<DecoderConfig>,
}

/// Reads the keys that all families share.
pub(super) fn common(file: &ConfigFile) -> Result<DecoderConfig> {
    refuse(file)?;
    let dropout: f64 = file.optional("attention_dropout", 0.0)?;
    if dropout != 0.0 {
        return Err(file.error("`attention_dropout` is not 0; dropout is not implemented"));
    }
    let (channels, heads): (usize, usize) = (file.required("hidden_size")?, file.required("num_attention_heads")?);
    let even = channels.checked_div(heads).unwrap_or(0);
    if !file.has("head_dim") && even * heads != channels {
        return Err(file.error(&format!(
            "`hidden_size` {channels} does not divide into {heads} heads, and there is no `head_dim`"
        )));
    }
    Ok(DecoderConfig {
        vocabulary: file.required("vocab_size")?,
        channels,
        hidden: file.required("intermediate_size")?,
        layers: file.required("num_hidden_layers")?,
        heads,
        kv_heads: file.optional("num_key_value_heads", heads)?,
        head_dim: file.optional("head_dim", even)?,
        max_positions: file.optional("max_position_embeddings", 2048)?,
        norm_eps: file.optional("rms_norm_eps", 1e-6)?,
        tied: file.optional("tie_word_embeddings", false)?,
        init_std: file.optional("initializer_range", 0.02)?,
        rope: RopeScaling::read(file, 10_000.0)?,
        activation: gated(file, "hidden_act", "silu")?,
        ..DecoderConfig::default()
    })
}

/// Errors if a folder has weights or code that are not read.
pub(super) fn refuse(file: &ConfigFile) -> Result<()> {
    if file.has("auto_map") {
        return Err(file.error("`auto_map` is set: code inside a model folder is not run"));
    }
    Quantization::read(file).map(drop)
}

/// The activation of a gated MLP, named by `key`.
pub(super) fn gated(file: &ConfigFile, key: &str, default: &str) -> Result<Activation> {
    let name: String = file.optional(key, default.to_string())?;
    match gelu(&name) {
        Some(gelu) => Ok(Activation::GeGlu(gelu)),
        None if name == "silu" => Ok(Activation::SwiGlu),
        None => Err(file.error(&format!("`{key}` is \"{name}\"; \"silu\" and kinds of \"gelu\" are implemented"))),
    }
}

/// The sliding window of the key `sliding_window`; `default` if the key is missing, and none if it is null.
pub(super) fn sliding_window(file: &ConfigFile, default: Option<usize>) -> Result<Option<usize>> {
    match file.values().contains_key("sliding_window") {
        true => file.optional("sliding_window", None),
        false => Ok(default),
    }
}

/// Window and layers of Qwen2 and Qwen3: `use_sliding_window`, `max_window_layers` and `layer_types`.
pub(super) fn qwen_window(file: &ConfigFile, layers: usize) -> Result<(Option<usize>, LayerSet)> {
    if !file.optional("use_sliding_window", false)? {
        return Ok((None, LayerSet::All));
    }
    let late = LayerSet::From(file.optional("max_window_layers", 28)?);
    Ok((sliding_window(file, Some(4096))?, LayerSet::with_window(file, layers, late)?))
}

/// The softmax router of `num_experts_per_tok` experts, whose weights sum to 1 if they are normalised.
pub(super) fn softmax_routing(file: &ConfigFile, normalised: bool) -> Result<Routing> {
    Ok(Routing {
        chosen: file.required("num_experts_per_tok")?,
        scores: RouterScores::Softmax,
        normalise: normalised.then_some(0.0),
        scale: 1.0,
        groups: None,
    })
}

/// The layers with experts of Qwen: `decoder_sparse_step` and `mlp_only_layers`.
pub(super) fn routed_layers(file: &ConfigFile, layers: usize) -> Result<LayerSet> {
    let step: usize = file.optional("decoder_sparse_step", 1)?;
    let dense: Vec<usize> = file.optional("mlp_only_layers", Vec::new())?;
    if step == 0 {
        return Err(file.error("`decoder_sparse_step` is 0; every such layer has experts, counted from 1"));
    }
    let has_experts = |layer: usize| !dense.contains(&layer) && (layer + 1).is_multiple_of(step);
    Ok(LayerSet::Listed((0..layers).map(has_experts).collect()))
}

/// `sizes`, with a sentence if the file asks for a loss of routers, which a run sets.
pub(super) fn ignore_router_logits(file: &ConfigFile, mut sizes: DecoderConfig) -> Result<DecoderConfig> {
    if file.optional("output_router_logits", false)? {
        let sentence =
            "`output_router_logits` is ignored: `router.balance_loss` of a run sets the loss that balances experts";
        sizes.ignored.push(sentence.into());
    }
    Ok(sizes)
}

/// The GELU of this name in `config.json`.
pub(super) fn gelu(name: &str) -> Option<Gelu> {
    match name {
        "gelu" => Some(Gelu::Exact),
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Some(Gelu::Tanh),
        _ => None,
    }
}
