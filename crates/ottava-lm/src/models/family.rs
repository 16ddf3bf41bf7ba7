//! Code that model families share.

use super::{ConfigFile, DecoderConfig, Quantization, RopeScaling};
use crate::error::Result;
use ottava_tensor::ops::{Activation, Gelu};

/// One model family.
pub(super) struct Family {
    /// Its name in `architectures` of `config.json`.
    pub(super) architecture: &'static str,
    /// Its name in `model_type`.
    pub(super) model_type: &'static str,
    pub(super) read: fn(&ConfigFile) -> Result<DecoderConfig>,
}

/// Reads the keys that all families share.
pub(super) fn common(file: &ConfigFile) -> Result<DecoderConfig> {
    refuse(file)?;
    let name: String = file.optional("hidden_act", "silu".to_string())?;
    let activation = match gelu(&name) {
        Some(gelu) => Activation::GeGlu(gelu),
        None if name == "silu" => Activation::SwiGlu,
        None => {
            return Err(
                file.error(&format!("`hidden_act` is \"{name}\"; \"silu\" and kinds of \"gelu\" are implemented"))
            );
        }
    };
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
        rope: RopeScaling::read(file)?,
        activation,
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

/// The GELU of this name in `config.json`.
pub(super) fn gelu(name: &str) -> Option<Gelu> {
    match name {
        "gelu" => Some(Gelu::Exact),
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Some(Gelu::Tanh),
        _ => None,
    }
}
