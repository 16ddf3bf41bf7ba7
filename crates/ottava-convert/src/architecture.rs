//! Architectures of llama.cpp: `config.json` from the metadata of a file, the names of tensors, and the order of their rows.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use crate::gemma::{GEMMA2, GEMMA3, Gemma};
use crate::gguf::Gguf;
use crate::source::Weight;
use crate::tokenizer;
use ottava_common::{Error, Result};
use ottava_models::layers::{Role, TensorRole};
use ottava_models::{ConfigFile, Decoder, DecoderConfig, RopeKind, RopeLengths, RopeScaling, Yarn, decoder_config};
use ottava_recipe::Precision;
use ottava_recipe::param::FolderTensor;

/// The name of the tensor with the factors of rotary frequencies, in files of Llama 3.1 and later.
pub const ROPE_FACTORS: &str = "rope_freqs.weight";

/// An architecture of llama.cpp.
#[derive(Debug)]
pub struct Architecture {
    /// The name in `general.architecture`, which is also the prefix of the keys of sizes.
    pub name: &'static str,
    /// The model families of this architecture, by their names in `architectures` of `config.json`. A converted folder gets the first family.
    pub families: &'static [&'static str],
    /// The `model_type` of the first family.
    model_type: &'static str,
    /// Whether rotary positions rotate neighbouring rows of a head. Otherwise, they rotate rows of the two halves of a head.
    rotates_neighbours: bool,
    /// Whether `attention_bias` and `mlp_bias` of `config.json` determine if linears have biases.
    pub optional_biases: bool,
    /// The differences of Gemma; `None` for other architectures.
    pub gemma: Option<&'static Gemma>,
}

/// The architectures that can be read and written. Sources: `convert_hf_to_gguf.py` and `llama-model.cpp` of llama.cpp.
const ARCHITECTURES: &[Architecture] = &[
    Architecture {
        name: "llama",
        families: &["LlamaForCausalLM", "MistralForCausalLM"],
        model_type: "llama",
        rotates_neighbours: true,
        optional_biases: true,
        gemma: None,
    },
    Architecture {
        name: "qwen2",
        families: &["Qwen2ForCausalLM"],
        model_type: "qwen2",
        rotates_neighbours: false,
        optional_biases: false,
        gemma: None,
    },
    Architecture {
        name: "qwen3",
        families: &["Qwen3ForCausalLM"],
        model_type: "qwen3",
        rotates_neighbours: false,
        optional_biases: false,
        gemma: None,
    },
    Architecture {
        name: "gemma2",
        families: &["Gemma2ForCausalLM"],
        model_type: "gemma2",
        rotates_neighbours: false,
        optional_biases: false,
        gemma: Some(&GEMMA2),
    },
    Architecture {
        name: "gemma3",
        families: &["Gemma3ForCausalLM"],
        model_type: "gemma3_text",
        rotates_neighbours: false,
        optional_biases: false,
        gemma: Some(&GEMMA3),
    },
];

impl Architecture {
    /// Returns the architecture of a file.
    ///
    /// Errors if the architecture is not supported.
    pub fn of(gguf: &Gguf) -> Result<&'static Architecture> {
        let name = gguf.text("general.architecture")?.unwrap_or("none");
        ARCHITECTURES.iter().find(|architecture| architecture.name == name).ok_or_else(|| {
            let known: Vec<_> = ARCHITECTURES.iter().map(|architecture| architecture.name).collect();
            gguf.error(&format!(
                "models of the architecture `{name}` are not converted; those of {} are",
                known.join(", ")
            ))
        })
    }

    /// Returns the architecture of a model whose `config.json` names `family`. If there is no such architecture, returns all supported families.
    pub fn of_family(family: &str) -> Result<&'static Architecture, Vec<&'static str>> {
        let found = ARCHITECTURES.iter().find(|architecture| architecture.families.contains(&family));
        found.ok_or_else(|| ARCHITECTURES.iter().flat_map(|architecture| architecture.families).copied().collect())
    }

    /// Returns the weights of a model of these sizes, each with the tensor of a file that stores it.
    ///
    /// Errors for sizes that models of this architecture cannot have.
    pub fn weights(&self, sizes: &DecoderConfig) -> Result<Vec<Weight>> {
        let mut weights = Vec::new();
        for FolderTensor { name, shape, .. } in Decoder::folder_tensors(sizes, &Precision::default().recipe())? {
            let place = sizes.stream.names.role_of(&name).and_then(|tensor| self.place(tensor, sizes));
            let (stored, rotary_heads) = place.ok_or_else(|| {
                Error::Model(format!("the model has a tensor `{name}`, which no `{}` of llama.cpp has", self.name))
            })?;
            weights.push(Weight { name, stored, shape, rotary_heads });
        }
        Ok(weights)
    }

    /// Returns the name of the tensor of a file that stores a tensor of a model. If the rows of its heads are stored in another order, also returns
    /// the number of these heads. Returns `None` if models of llama.cpp have no such tensor.
    fn place(&self, tensor: TensorRole, sizes: &DecoderConfig) -> Option<(String, Option<usize>)> {
        let (module, heads) = module_of(tensor.role, sizes)?;
        let ending = if tensor.is_bias { "bias" } else { "weight" };
        let name = match tensor.block {
            Some(block) => format!("blk.{block}.{module}.{ending}"),
            None => format!("{module}.{ending}"),
        };
        Some((name, heads.filter(|_| self.rotates_neighbours)))
    }

    /// Returns the number that files add to the values of a weight.
    pub fn offset(&self, weight: &Weight) -> f32 {
        if self.gemma.is_some() { Gemma::offset(weight) } else { 0.0 }
    }

    /// Returns the `config.json` of a file, and its sizes.
    ///
    /// Errors if a key is missing, or has a value that is not implemented.
    pub fn config(&self, gguf: &Gguf) -> Result<(Map<String, Value>, DecoderConfig)> {
        let key = |name: &str| format!("{}.{name}", self.name);
        let missing = |name: &str| gguf.error(&format!("the key `{}` is missing", key(name)));
        let needed = |name: &str| gguf.count(&key(name))?.ok_or_else(|| missing(name));
        let has = |tensor: &str| gguf.tensors().contains_key(tensor);
        if gguf.count(&key("expert_count"))?.unwrap_or(0) > 0 {
            let text = format!("the model has experts (`{}`), which are not implemented", key("expert_count"));
            return Err(gguf.error(&text));
        }
        let (channels, heads) = (needed("embedding_length")?, needed("attention.head_count")?);
        let head_dim = gguf.count(&key("attention.key_length"))?.unwrap_or(channels.checked_div(heads).unwrap_or(0));
        let of_values = gguf.count(&key("attention.value_length"))?.unwrap_or(head_dim);
        if of_values != head_dim {
            let text = format!("heads of {head_dim} channels in keys and {of_values} in values are not implemented");
            return Err(gguf.error(&text));
        }
        let rotated = gguf.count(&key("rope.dimension_count"))?.unwrap_or(head_dim);
        if rotated != head_dim {
            let text =
                format!("rotary positions of {rotated} of the {head_dim} channels of a head are not implemented");
            return Err(gguf.error(&text));
        }
        let embedding = gguf.tensors().get("token_embd.weight").and_then(|tensor| tensor.shape.first());
        let epsilon = "attention.layer_norm_rms_epsilon";
        let mut values = json!({
            "architectures": [self.families[0]],
            "model_type": self.model_type,
            "vocab_size": embedding.ok_or_else(|| gguf.error("the tensor \"token_embd.weight\" is missing"))?,
            "hidden_size": channels,
            "intermediate_size": needed("feed_forward_length")?,
            "num_hidden_layers": needed("block_count")?,
            "num_attention_heads": heads,
            "num_key_value_heads": gguf.count(&key("attention.head_count_kv"))?.unwrap_or(heads),
            "head_dim": head_dim,
            "max_position_embeddings": needed("context_length")?,
            "hidden_act": "silu",
            "rms_norm_eps": gguf.float(&key(epsilon))?.ok_or_else(|| missing(epsilon))?,
            "attention_bias": self.optional_biases && has("blk.0.attn_output.bias"),
            "mlp_bias": self.optional_biases && has("blk.0.ffn_down.bias"),
            "tie_word_embeddings": !has("output.weight"),
        });
        let values = values.as_object_mut().expect("an object was made above");
        values.insert("bos_token_id".into(), json!(gguf.count("tokenizer.ggml.bos_token_id")?));
        values.insert("eos_token_id".into(), tokenizer::ends(gguf)?);
        let theta = gguf.float(&key("rope.freq_base"))?.unwrap_or(10_000.0);
        values.insert("rope_theta".into(), json!(theta));
        let kind = self.rope_kind(gguf, theta, head_dim)?;
        let local = self.gemma.map(|gemma| gemma.complete(gguf, &key, values)).transpose()?.flatten();
        RopeScaling { kind, ..RopeScaling::plain(theta) }.write(local.as_ref(), values);
        let sizes = decoder_config(&ConfigFile::from_values("the metadata of the GGUF file", values.clone()))?;
        Ok((values.clone(), sizes))
    }

    /// Returns the scaling of rotary positions: by its name, or derived from the factors that files of Llama 3.1 and later have instead.
    fn rope_kind(&self, gguf: &Gguf, theta: f64, head_dim: usize) -> Result<RopeKind> {
        let by_name = self.rope_scaling(gguf)?;
        if let Some(tensor) = gguf.tensors().get(ROPE_FACTORS) {
            if by_name != RopeKind::Default {
                return Err(gguf.error(&format!(
                    "`{}.rope.scaling` stretches the frequencies that {ROPE_FACTORS:?} divides, which is not implemented",
                    self.name
                )));
            }
            let factors = gguf.values(tensor)?;
            let matches = |kind: &RopeKind| {
                let expected = rope_factors(kind, theta, head_dim);
                factors.len() == expected.len()
                    && factors
                        .iter()
                        .zip(expected)
                        .all(|(found, expected)| (f64::from(*found) / expected - 1.0).abs() < 1e-5)
            };
            return KNOWN_FACTORS.map(llama3).into_iter().find(matches).ok_or_else(|| {
                gguf.error(&format!("the factors in {ROPE_FACTORS:?} are not those of Llama 3.1, 3.2 or 3.3"))
            });
        }
        Ok(by_name)
    }

    /// Returns the scaling of rotary positions that keys name.
    pub(super) fn rope_scaling(&self, gguf: &Gguf) -> Result<RopeKind> {
        let key = |name: &str| format!("{}.rope.{name}", self.name);
        // In files without a type, scaling is linear. Older files have the factor in another key. A factor of 0 means no scaling.
        let factor = match gguf.float(&key("scaling.factor"))? {
            Some(factor) => factor,
            None => gguf.float(&key("scale_linear"))?.unwrap_or(0.0),
        };
        let factor = if factor == 0.0 { 1.0 } else { factor };
        match gguf.text(&key("scaling.type"))? {
            Some("none") => Ok(RopeKind::Default),
            None | Some("linear") if factor == 1.0 => Ok(RopeKind::Default),
            None | Some("linear") => Ok(RopeKind::Linear { factor }),
            Some("yarn") => {
                let original = gguf.count(&key("scaling.original_context_length"))?;
                let context = gguf.count(&format!("{}.context_length", self.name))?;
                Ok(RopeKind::Yarn(Yarn {
                    factor,
                    original_max_positions: original.or(context).unwrap_or(0) as f64,
                    attention_factor: None,
                    mscale: None,
                    mscale_all_dim: None,
                    beta_fast: gguf.float(&key("scaling.yarn_beta_fast"))?.unwrap_or(32.0),
                    beta_slow: gguf.float(&key("scaling.yarn_beta_slow"))?.unwrap_or(1.0),
                    truncate: true,
                }))
            }
            Some(other) => Err(gguf.error(&format!(
                "the rope scaling `{other}` (`{}`) is not implemented; linear and yarn are",
                key("scaling.type")
            ))),
        }
    }
}

/// The scaling factors of Llama 3.1 and 3.3, and of Llama 3.2.
const KNOWN_FACTORS: [f64; 2] = [8.0, 32.0];

fn llama3(factor: f64) -> RopeKind {
    RopeKind::Llama3 { factor, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_positions: 8192.0 }
}

/// Whether files can describe this scaling of rotary positions so that it is recognized when they are read.
pub fn has_rope_kind(kind: &RopeKind) -> bool {
    matches!(kind, RopeKind::Default | RopeKind::Linear { .. }) || KNOWN_FACTORS.map(llama3).contains(kind)
}

/// Returns the divisors of the frequencies of a head for this scaling.
pub fn rope_factors(kind: &RopeKind, theta: f64, head_dim: usize) -> Vec<f64> {
    // The scalings that files can describe do not depend on lengths.
    let lengths = RopeLengths { max_positions: 1, seq_len: 1 };
    let plain = RopeScaling::plain(theta).inverse_frequencies(head_dim, lengths);
    let stretched =
        RopeScaling { kind: kind.clone(), ..RopeScaling::plain(theta) }.inverse_frequencies(head_dim, lengths);
    plain.iter().zip(&stretched).map(|(plain, stretched)| plain / stretched).collect()
}

/// Returns the name of the file's module that stores a tensor. If rotary positions rotate its rows, also returns the number of its heads.
fn module_of(role: Role, sizes: &DecoderConfig) -> Option<(&'static str, Option<usize>)> {
    Some(match role {
        Role::Embedding => ("token_embd", None),
        Role::AttentionNorm => ("attn_norm", None),
        Role::Query => ("attn_q", sizes.heads().map(|heads| heads.heads)),
        Role::Key => ("attn_k", sizes.heads().map(|heads| heads.kv_heads)),
        Role::Value => ("attn_v", None),
        Role::AttentionOutput => ("attn_output", None),
        Role::MlpNorm => ("ffn_norm", None),
        Role::Gate => ("ffn_gate", None),
        Role::Up => ("ffn_up", None),
        Role::Down => ("ffn_down", None),
        Role::FinalNorm => ("output_norm", None),
        Role::Head => ("output", None),
        Role::QueryNorm => ("attn_q_norm", None),
        Role::KeyNorm => ("attn_k_norm", None),
        Role::AttentionPostNorm => ("post_attention_norm", None),
        Role::MlpPostNorm => ("post_ffw_norm", None),
        Role::Positions | Role::Qkv => return None,
    })
}

/// Returns the weights of the model of a file, each with the tensor that stores it.
///
/// Errors if a weight is missing or has another shape, and if the file has other weights.
pub fn weights(gguf: &Gguf, architecture: &Architecture, sizes: &DecoderConfig) -> Result<Vec<Weight>> {
    let weights = architecture.weights(sizes)?;
    for Weight { stored, shape, .. } in &weights {
        let Some(tensor) = gguf.tensors().get(stored) else {
            return Err(gguf.error(&format!("the tensor {stored:?} is missing")));
        };
        if tensor.shape != *shape {
            let found = &tensor.shape;
            return Err(gguf.error(&format!("tensor {stored:?} has shape {found:?}, the metadata make it {shape:?}")));
        }
    }
    let read: BTreeSet<_> = weights.iter().map(|weight| weight.stored.as_str()).chain([ROPE_FACTORS]).collect();
    match gguf.tensors().keys().find(|name| !read.contains(name.as_str())) {
        Some(name) => Err(gguf.error(&format!("the tensor {name:?} has no place in a model of these sizes"))),
        None => Ok(weights),
    }
}
