//! Code that model families share.

use crate::layer_set::Window;
use crate::layers::{HeadsSpec, LLAMA, MlpSpec, Names, NormConfig, Stream};
use crate::spec::MAX_SIZE;
use crate::{ConfigFile, DecoderConfig, LayerSet, LayerSpec, Quantization, RopeScaling, RopeSpec, SublayerSpec};
use ottava_common::error::Result;
use ottava_tensor::ops::{Activation, Gelu, RopePairs, RouterScores, Routing};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// One model family.
pub(super) struct Family {
    /// The name in `architectures` of `config.json`.
    pub(super) architecture: &'static str,
    /// The name in `model_type`.
    pub(super) model_type: &'static str,
    /// The architecture of a reward model with this decoder, if transformers has one.
    pub(super) reward_model: Option<&'static str>,
    /// The default values of keys that a file may lack, from the configuration class of transformers 5. The list has only keys that
    /// [`llama_defaults`] lacks or has with another value.
    pub(super) defaults: fn() -> Value,
    /// Other names of keys, as pairs of the other name and the key. If a file has both, the other name wins.
    pub(super) aliases: &'static [(&'static str, &'static str)],
    pub(super) read: fn(&ConfigFile) -> Result<DecoderConfig>,
}

impl Family {
    /// Returns whether the models of the family are encoders.
    pub(super) fn is_encoder(&self) -> bool {
        self.architecture.ends_with("Model") && !self.architecture.ends_with("LMHeadModel")
    }

    /// Returns whether `name` in `architectures` is this family without the scores of a classifier. A language model may have any name that ends as
    /// such names do, and an encoder may have a head that predicts masked tokens, which is not read.
    pub(super) fn is_without_scores(&self, name: &str) -> bool {
        match self.is_encoder() {
            true => {
                name == self.architecture || ["ForMaskedLM", "ForPreTraining"].iter().any(|end| name.ends_with(end))
            }
            false => name.ends_with("ForCausalLM") || name.ends_with("LMHeadModel"),
        }
    }

    /// Returns `file` with aliases replaced by the keys of this family, and with default values for missing keys.
    pub(super) fn complete(&self, file: &ConfigFile) -> ConfigFile {
        let mut values = file.values().clone();
        for (other, key) in self.aliases {
            if let Some(value) = values.get(*other).filter(|value| !value.is_null()).cloned() {
                values.insert((*key).into(), value);
            }
        }
        let object = |value: Value| value.as_object().cloned().unwrap_or_default();
        let mut defaults: Map<_, _> = object(llama_defaults());
        defaults.extend(object((self.defaults)()));
        file.with_values(values).with_defaults(defaults)
    }
}

/// Returns default values of keys that most families share. Sizes of tensors have no defaults: a file that lacks them is damaged.
fn llama_defaults() -> Value {
    json!({
        "head_dim": null, "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 2048, "num_key_value_heads": null,
        "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": false,
    })
}

/// Gemma's name for the key `hidden_act`.
const GEMMA_ACTIVATION: &str = "hidden_activation";

/// The parts that most families share: a model without layers, and the sublayers of Llama's layers, without biases.
pub(super) struct Common {
    pub(super) model: DecoderConfig,
    /// The number of layers.
    pub(super) layers: usize,
    pub(super) heads: HeadsSpec,
    pub(super) rope: RopeSpec,
    pub(super) mlp: MlpSpec,
}

impl Common {
    /// Sets the names of tensors.
    pub(super) fn named(mut self, names: &'static Names) -> Common {
        self.model.stream.names = names;
        self
    }

    /// Returns the model whose layer `index` runs the two sublayers `layer(index)` one after the other.
    pub(super) fn sequential(self, layer: impl Fn(usize) -> [SublayerSpec; 2]) -> DecoderConfig {
        let Common { model, layers, .. } = self;
        let layers = (0..layers).map(|index| LayerSpec::sequential(model.stream.names, layer(index))).collect();
        DecoderConfig { layers, ..model }
    }
}

/// Reads the keys that most families share.
pub(super) fn common(file: &ConfigFile) -> Result<Common> {
    let key = if file.has_default(GEMMA_ACTIVATION) { GEMMA_ACTIVATION } else { "hidden_act" };
    common_with(file, gated(file, key)?, file.required("rms_norm_eps")?)
}

/// Reads the keys of [`common`] except the activation and the constant of norms.
pub(super) fn common_with(file: &ConfigFile, activation: Activation, norm_eps: f64) -> Result<Common> {
    refuse(file)?;
    let (channels, heads): (usize, usize) = (file.required("hidden_size")?, file.required("num_attention_heads")?);
    let even = channels.checked_div(heads).unwrap_or(0);
    let head_dim: Option<usize> = file.nullable("head_dim")?;
    if head_dim.is_none() && even * heads != channels {
        return Err(file.error(&format!(
            "`hidden_size` {channels} does not divide into {heads} heads, and there is no `head_dim`"
        )));
    }
    let stream = Stream {
        channels,
        residual_scale: 1.0,
        norm: NormConfig::rms(norm_eps),
        names: &LLAMA,
        std: file.required("initializer_range")?,
    };
    let mut model = DecoderConfig::new(file.required("vocab_size")?, file.required("max_position_embeddings")?, stream);
    model.head.tied = file.required("tie_word_embeddings")?;
    model.ropes = vec![RopeScaling::read(file)?];
    model.folder.untrainable = untrainable(file, &["attention_dropout"])?;
    Ok(Common {
        model,
        layers: layers(file, "num_hidden_layers")?,
        heads: HeadsSpec::new(heads, kv_heads(file, heads)?, head_dim.unwrap_or(even)),
        rope: RopeSpec { rope: 0, pairs: RopePairs::Halves },
        mlp: MlpSpec::new(size(file, "intermediate_size")?, activation),
    })
}

/// The maximum number of layers: more than any model has, but few enough to plan within a second.
const MAX_LAYERS: usize = 10_000;

/// Returns the number of layers under `key`. It is checked before anything is computed per layer.
pub(super) fn layers(file: &ConfigFile, key: &str) -> Result<usize> {
    match file.required(key)? {
        layers if layers > MAX_LAYERS => {
            Err(file.error(&format!("`{key}` is {layers}; at most {MAX_LAYERS} are possible")))
        }
        layers => Ok(layers),
    }
}

/// Returns the size under `key`, which is at most [`MAX_SIZE`], so that sums of sizes do not overflow.
pub(super) fn size(file: &ConfigFile, key: &str) -> Result<usize> {
    match file.required(key)? {
        size if size > MAX_SIZE => Err(file.error(&format!("`{key}` is {size}; at most {MAX_SIZE} are possible"))),
        size => Ok(size),
    }
}

/// Returns the number of key and value heads. It is the number of query heads if the key is null. If the key is missing and the family's default
/// does not divide the query heads, it is the number of query heads too.
fn kv_heads(file: &ConfigFile, heads: usize) -> Result<usize> {
    let found = file.nullable("num_key_value_heads")?.unwrap_or(heads);
    let is_default = !file.has("num_key_value_heads");
    Ok(if is_default && found > 0 && !heads.is_multiple_of(found) { heads } else { found })
}

/// Returns a sentence for each of `keys` that is not 0. The keys set dropout or noise that transformers applies only in training.
pub(super) fn untrainable(file: &ConfigFile, keys: &[&str]) -> Result<Vec<String>> {
    let mut sentences = Vec::new();
    for key in keys {
        if file.optional(key, 0.0)? != 0.0 {
            sentences.push(format!(
                "`{key}` is not 0; dropout and noise are not implemented in training: set it to 0 in config.json"
            ));
        }
    }
    Ok(sentences)
}

/// Returns a sentence for each of `keys` that is not 0. The keys set dropout that all published folders of a family ask for.
pub(super) fn ignored_dropout(file: &ConfigFile, keys: &[&str]) -> Result<Vec<String>> {
    let mut sentences = Vec::new();
    for key in keys {
        let dropout: f64 = file.optional(key, 0.0)?;
        if dropout != 0.0 {
            sentences.push(format!("`{key}` is {dropout} in config.json and is ignored: training has no dropout"));
        }
    }
    Ok(sentences)
}

/// Errors if a file asks for non-causal attention, layers of different sizes, or weights quantized in an unknown format.
pub(super) fn refuse(file: &ConfigFile) -> Result<()> {
    if !file.optional("is_causal", true)? {
        return Err(file.error("`is_causal` is false; attention to later tokens is not implemented"));
    }
    if file.has("per_layer_config") {
        return Err(file.error("`per_layer_config` is set; layers of different sizes are not implemented"));
    }
    Quantization::read(file).map(drop)
}

/// Returns the activation of a gated MLP that `key` names.
pub(super) fn gated(file: &ConfigFile, key: &str) -> Result<Activation> {
    let name: String = file.required(key)?;
    match (gelu(&name), name.as_str()) {
        (Some(gelu), _) => Ok(Activation::GeGlu(gelu)),
        (None, "silu" | "swish") => Ok(Activation::SwiGlu),
        (None, _) => Err(file.error(&format!("`{key}` is \"{name}\"; \"silu\" and kinds of \"gelu\" are implemented"))),
    }
}

/// Returns the size under the key `sliding_window`, or `None` if the key is null.
fn window_size(file: &ConfigFile) -> Result<Option<usize>> {
    match file.nullable("sliding_window")? {
        Some(0) => Err(file.error("`sliding_window` is 0; a token sees itself with 1")),
        // A larger window changes nothing, since no sequence is longer than `MAX_SIZE`.
        size => Ok(size.map(|size: usize| size.min(MAX_SIZE))),
    }
}

/// Returns the sliding window of the key `sliding_window`, which all layers have.
pub(super) fn window(file: &ConfigFile) -> Result<Window> {
    Ok(Window { size: window_size(file)?, layers: LayerSet::All })
}

/// Returns the sliding window with the layers that `layer_types` lists. If the key is missing, the layers of `default` have the window.
pub(super) fn window_in(file: &ConfigFile, layers: usize, default: LayerSet) -> Result<Window> {
    let (size, local) = (window_size(file)?, LayerSet::with_window(file, layers, default)?);
    let has_types = file.has("layer_types") && (0..layers).any(|layer| local.contains(layer));
    match size {
        None if has_types => Err(file.error(
            "`layer_types` has \"sliding_attention\", and `sliding_window` is null; set it, or the types to \"full_attention\"",
        )),
        _ => Ok(Window { size, layers: local }),
    }
}

/// Returns all layers except the last of each group of `count` layers, for the key `sliding_window_pattern`.
pub(super) fn local_layers(file: &ConfigFile, count: usize) -> Result<LayerSet> {
    match count {
        0 => Err(file.error("`sliding_window_pattern` is 0; it is a number of layers")),
        count => Ok(LayerSet::AllButEvery(count)),
    }
}

/// Returns the window of Qwen2 and Qwen3, from `use_sliding_window`, `max_window_layers` and `layer_types`.
pub(super) fn qwen_window(file: &ConfigFile, layers: usize) -> Result<Window> {
    if file.required("use_sliding_window")? {
        return window_in(file, layers, LayerSet::From(file.required("max_window_layers")?));
    }
    let local = LayerSet::with_window(file, layers, LayerSet::None)?;
    match (0..layers).any(|layer| local.contains(layer)) {
        true => Err(file.error(
            "`layer_types` has \"sliding_attention\", and `use_sliding_window` is false; set it to true, or the types to \"full_attention\"",
        )),
        false => Ok(Window { size: None, layers: LayerSet::None }),
    }
}

/// Returns the softmax router of `num_experts_per_tok` experts. If `normalised`, the weights of the chosen experts sum to 1.
pub(super) fn softmax_routing(file: &ConfigFile, normalised: bool) -> Result<Routing> {
    Ok(Routing {
        chosen: file.required("num_experts_per_tok")?,
        scores: RouterScores::Softmax,
        normalise: normalised.then_some(0.0),
        scale: 1.0,
        groups: None,
    })
}

/// Returns the layers of a Qwen model that have experts, from `decoder_sparse_step` and `mlp_only_layers`.
pub(super) fn routed_layers(file: &ConfigFile, layers: usize) -> Result<LayerSet> {
    let step: usize = file.required("decoder_sparse_step")?;
    let dense: BTreeSet<usize> = file.required("mlp_only_layers")?;
    if step == 0 {
        return Err(file.error("`decoder_sparse_step` is 0; every such layer has experts, counted from 1"));
    }
    let has_experts = |layer: usize| !dense.contains(&layer) && (layer + 1).is_multiple_of(step);
    Ok(LayerSet::Listed((0..layers).map(has_experts).collect()))
}

/// Adds a sentence to `sizes` if the file asks for a loss of routers. A run sets this loss instead.
pub(super) fn ignore_router_logits(file: &ConfigFile, mut sizes: DecoderConfig) -> Result<DecoderConfig> {
    if file.optional("output_router_logits", false)? {
        let sentence =
            "`output_router_logits` is ignored: `router.balance_loss` of a run sets the loss that balances experts";
        sizes.folder.ignored.push(sentence.into());
    }
    Ok(sizes)
}

/// Returns the GELU that `config.json` calls `name`.
pub(super) fn gelu(name: &str) -> Option<Gelu> {
    match name {
        "gelu" | "gelu_python" => Some(Gelu::Exact),
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_python_tanh" | "gelu_fast" | "gelu_accurate" => Some(Gelu::Tanh),
        _ => None,
    }
}
