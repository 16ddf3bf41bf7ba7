//! GGUF files of Llama models, which Mistral and SmolLM are too: `config.json`, names of tensors, order of their rows.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::gguf::Gguf;
use super::source::Weight;
use crate::Result;
use crate::layers::Role;
use crate::models::{ConfigFile, Decoder, DecoderConfig, RopeKind, RopeLengths, RopeScaling, decoder_config};
use crate::param::FolderTensor;
use crate::recipe::Precision;

/// The factors of rotary frequencies, in files of Llama 3.1 and later.
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// The `config.json` of a file, and its sizes.
pub fn config(gguf: &Gguf) -> Result<(Map<String, Value>, DecoderConfig)> {
    let key = |name: &str| format!("llama.{name}");
    let needed = |name: &str| {
        let missing = || gguf.error(&format!("the key `llama.{name}` is missing"));
        gguf.count(&key(name))?.ok_or_else(missing)
    };
    if gguf.count(&key("expert_count"))?.unwrap_or(0) > 0 {
        return Err(gguf.error("the model has experts (`llama.expert_count`), which are not implemented"));
    }
    let (channels, heads) = (needed("embedding_length")?, needed("attention.head_count")?);
    let head_dim = gguf.count(&key("attention.key_length"))?.unwrap_or(channels.checked_div(heads).unwrap_or(0));
    let rotated = gguf.count(&key("rope.dimension_count"))?.unwrap_or(head_dim);
    if rotated != head_dim {
        let text = format!("rotary positions of {rotated} of the {head_dim} channels of a head are not implemented");
        return Err(gguf.error(&text));
    }
    let embedding = gguf.tensors().get("token_embd.weight").and_then(|tensor| tensor.shape.first());
    let epsilon = gguf.float(&key("attention.layer_norm_rms_epsilon"))?;
    let mut values = json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": embedding.ok_or_else(|| gguf.error("the tensor \"token_embd.weight\" is missing"))?,
        "hidden_size": channels,
        "intermediate_size": needed("feed_forward_length")?,
        "num_hidden_layers": needed("block_count")?,
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.count(&key("attention.head_count_kv"))?.unwrap_or(heads),
        "head_dim": head_dim,
        "max_position_embeddings": needed("context_length")?,
        "hidden_act": "silu",
        "rms_norm_eps": epsilon.ok_or_else(|| gguf.error("the key `llama.attention.layer_norm_rms_epsilon` is missing"))?,
        "attention_bias": false,
        "mlp_bias": false,
        "tie_word_embeddings": !gguf.tensors().contains_key("output.weight"),
    });
    let values = values.as_object_mut().expect("an object was made above");
    for id in ["bos", "eos"] {
        values.insert(format!("{id}_token_id"), json!(gguf.count(&format!("tokenizer.ggml.{id}_token_id"))?));
    }
    let theta = gguf.float(&key("rope.freq_base"))?.unwrap_or(10_000.0);
    RopeScaling { kind: rope_kind(gguf, theta, head_dim)?, ..RopeScaling::plain(theta) }.write(None, values);
    let sizes = decoder_config(&ConfigFile::from_values("the metadata of the GGUF file", values.clone()))?;
    Ok((values.clone(), sizes))
}

/// The stretch of rotary positions: by name, or by the factors that files of Llama 3.1 and later hold instead.
fn rope_kind(gguf: &Gguf, theta: f64, head_dim: usize) -> Result<RopeKind> {
    if let Some(tensor) = gguf.tensors().get(ROPE_FACTORS) {
        let factors = gguf.values(tensor)?;
        // Lengths do not matter to these kinds.
        let lengths = RopeLengths { max_positions: 1, seq_len: 1 };
        let plain = RopeScaling::plain(theta).inverse_frequencies(head_dim, lengths);
        let matches = |kind: &RopeKind| {
            let stretched = RopeScaling { kind: kind.clone(), ..RopeScaling::plain(theta) };
            let stretched = stretched.inverse_frequencies(head_dim, lengths);
            let expected = plain.iter().zip(&stretched).map(|(plain, stretched)| plain / stretched);
            factors.len() == plain.len()
                && factors
                    .iter()
                    .zip(expected)
                    .all(|(found, expected)| (f64::from(*found) / expected - 1.0).abs() < 1e-5)
        };
        // Llama 3.1 and 3.3, and Llama 3.2.
        let known = [8.0, 32.0].map(|factor| RopeKind::Llama3 {
            factor,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_positions: 8192.0,
        });
        return known.into_iter().find(matches).ok_or_else(|| {
            gguf.error(&format!("the factors in {ROPE_FACTORS:?} are not those of Llama 3.1, 3.2 or 3.3"))
        });
    }
    match gguf.text("llama.rope.scaling.type")? {
        None | Some("none") => Ok(RopeKind::Default),
        Some("linear") => match gguf.float("llama.rope.scaling.factor")? {
            Some(factor) => Ok(RopeKind::Linear { factor }),
            None => Err(gguf.error("the key `llama.rope.scaling.factor` is missing")),
        },
        Some(other) => Err(gguf.error(&format!("the rope scaling `{other}` is not implemented; linear is"))),
    }
}

/// The module of a file that a tensor of a Llama is stored in, and the number of heads whose rows rotary positions turn.
fn module_of(role: Role, sizes: &DecoderConfig) -> Option<(&'static str, Option<usize>)> {
    Some(match role {
        Role::Embedding => ("token_embd", None),
        Role::AttentionNorm => ("attn_norm", None),
        Role::Query => ("attn_q", Some(sizes.heads)),
        Role::Key => ("attn_k", Some(sizes.kv_heads)),
        Role::Value => ("attn_v", None),
        Role::AttentionOutput => ("attn_output", None),
        Role::MlpNorm => ("ffn_norm", None),
        Role::Gate => ("ffn_gate", None),
        Role::Up => ("ffn_up", None),
        Role::Down => ("ffn_down", None),
        Role::FinalNorm => ("output_norm", None),
        Role::Head => ("output", None),
        Role::Positions | Role::Qkv | Role::QueryNorm | Role::KeyNorm | Role::AttentionPostNorm | Role::MlpPostNorm => {
            return None;
        }
    })
}

/// The weights of a model of these sizes, each with the tensor that holds it.
///
/// Errors when one is missing or of another shape, and when the file has others.
pub fn weights(gguf: &Gguf, sizes: &DecoderConfig) -> Result<Vec<Weight>> {
    let mut weights = Vec::new();
    for FolderTensor { name, shape, .. } in Decoder::folder_tensors(sizes, &Precision::default().recipe())? {
        let place = sizes.names.role_of(&name).filter(|place| !place.is_bias);
        let unknown = || gguf.error(&format!("the model has a tensor {name:?}, which no Llama model has"));
        let (module, rotary_heads) = place.and_then(|place| module_of(place.role, sizes)).ok_or_else(unknown)?;
        let stored = match place.and_then(|place| place.block) {
            Some(block) => format!("blk.{block}.{module}.weight"),
            None => format!("{module}.weight"),
        };
        let Some(tensor) = gguf.tensors().get(&stored) else {
            return Err(gguf.error(&format!("the tensor {stored:?} is missing")));
        };
        if tensor.shape != shape {
            let found = &tensor.shape;
            return Err(gguf.error(&format!("tensor {stored:?} has shape {found:?}, the metadata make it {shape:?}")));
        }
        weights.push(Weight { name, stored, shape, rotary_heads });
    }
    let read: BTreeSet<_> = weights.iter().map(|weight| weight.stored.as_str()).chain([ROPE_FACTORS]).collect();
    match gguf.tensors().keys().find(|name| !read.contains(name.as_str())) {
        Some(name) => Err(gguf.error(&format!("the tensor {name:?} has no place in a Llama model"))),
        None => Ok(weights),
    }
}
