//! Gemma 2 and 3 in llama.cpp: the keys that only their files have, and the constants that llama.cpp has for them.

use serde_json::{Map, Value, json};

use crate::gguf::Gguf;
use crate::source::Weight;
use ottava_common::Result;
use ottava_models::{DecoderConfig, LayerSet, RopeScaling, Uniform};
use ottava_tensor::ops::{Activation, Gelu};

/// The key of the window's length; the name of the architecture precedes it.
pub const WINDOW: &str = "attention.sliding_window";
/// The key of the soft cap of attention scores.
pub const SCORE_CAP: &str = "attn_logit_softcapping";
/// The key of the soft cap of logits.
pub const LOGIT_CAP: &str = "final_logit_softcapping";

/// The key of the number of layers in a group. All layers of a group except the last have the window.
pub const WINDOW_PATTERN: &str = "attention.sliding_window_pattern";
/// The key of the base of rotary positions in layers with the window.
pub const LOCAL_THETA: &str = "rope.freq_base_swa";

/// The constants of a generation of Gemma, from `llama-model.cpp`.
#[derive(Debug)]
pub struct Gemma {
    /// The number of layers in a group. All layers of a group except the last have the window.
    group: usize,
    /// The soft caps of attention scores and logits for files without these keys; `None` for a generation without soft caps.
    caps: Option<[f64; 2]>,
    /// The number of layers of the 27B model. Its attention scores are scaled by the channels per head instead of the head size.
    layers_of_27b: usize,
    /// The base of rotary positions in layers with the window; `None` if it is the same in all layers.
    local_theta: Option<f64>,
}

/// Gemma 2.
pub static GEMMA2: Gemma = Gemma { group: 2, caps: Some([50.0, 30.0]), layers_of_27b: 46, local_theta: None };
/// The text model of Gemma 3.
pub static GEMMA3: Gemma = Gemma { group: 6, caps: None, layers_of_27b: 62, local_theta: Some(10_000.0) };

impl Gemma {
    /// Returns the number whose root divides attention scores.
    fn score_divisor(&self, layers: usize, channels: usize, heads: usize, head_dim: usize) -> usize {
        if layers == self.layers_of_27b { channels.checked_div(heads).unwrap_or(0) } else { head_dim }
    }

    fn local_rope(&self) -> Option<RopeScaling> {
        self.local_theta.map(RopeScaling::plain)
    }

    /// Returns why files cannot represent a model of these sizes; `None` if they can.
    pub fn problem(&self, sizes: &DecoderConfig, Uniform { heads, mlp, .. }: Uniform) -> Option<&'static str> {
        let (layers, channels) = (&sizes.layers, sizes.stream.channels);
        let local = LayerSet::AllButEvery(self.group);
        let divisor = self.score_divisor(layers.len(), channels, heads.heads, heads.head_dim);
        let scale = (divisor as f64).powf(-0.5);
        let caps = [heads.soft_cap.is_some(), sizes.head.cap.is_some()];
        let problems = [
            (layers.iter().all(|layer| layer.window().is_none()), "the model has no sliding window"),
            (
                layers.iter().enumerate().any(|(i, layer)| layer.window().is_some() != local.contains(i)),
                "the layers with a sliding window are not those of the published models",
            ),
            (mlp.activation != Activation::GeGlu(Gelu::Tanh), "the activation is not tanh-approximated GELU"),
            (!sizes.head.tied, "the output head is not tied to the embedding"),
            (heads.qkv_bias, "attention has biases"),
            (
                heads.scale.is_none_or(|found| (found / scale - 1.0).abs() > 1e-9),
                "`query_pre_attn_scalar` is not that of the published models",
            ),
            (
                caps != [self.caps.is_some(); 2],
                "`attn_logit_softcapping` and `final_logit_softcapping` must both be set for gemma2, and neither for gemma3",
            ),
            (
                sizes.ropes.get(1) != self.local_rope().as_ref(),
                "RoPE of the sliding-window layers is not that of the published models",
            ),
        ];
        problems.into_iter().find(|(has, _)| *has).map(|(_, what)| what)
    }

    /// Changes the `values` of a Llama's `config.json` to the values of the model in `gguf`. Returns the rotary positions of layers with the window
    /// if they differ from the other layers.
    pub fn complete(
        &self,
        gguf: &Gguf,
        key: &dyn Fn(&str) -> String,
        values: &mut Map<String, Value>,
    ) -> Result<Option<RopeScaling>> {
        let count = |name: &str| values[name].as_u64().unwrap_or(0) as usize;
        let sizes = ["num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim"].map(count);
        let [layers, channels, heads, head_dim] = sizes;
        let window = gguf.count(&key(WINDOW))?;
        let window = window.ok_or_else(|| gguf.error(&format!("the key `{}` is missing", key(WINDOW))))?;
        values.remove("hidden_act");
        values.insert("hidden_activation".into(), json!("gelu_pytorch_tanh"));
        values.insert("query_pre_attn_scalar".into(), json!(self.score_divisor(layers, channels, heads, head_dim)));
        values.insert("sliding_window".into(), json!(window));
        values.insert("sliding_window_pattern".into(), json!(self.group_of(gguf, key)?));
        for (at, name) in [SCORE_CAP, LOGIT_CAP].into_iter().enumerate() {
            let cap = gguf.float(&key(name))?;
            if let (Some(cap), SCORE_CAP, None) = (cap.filter(|cap| *cap != 0.0), name, self.caps) {
                return Err(gguf.error(&format!("`{}` is {cap}, and scores of Gemma 3 have no bound", key(name))));
            }
            values.insert(name.into(), json!(cap.filter(|cap| *cap != 0.0).or(self.caps.map(|caps| caps[at]))));
        }
        let local_theta = gguf.float(&key(LOCAL_THETA))?;
        match self.local_theta {
            Some(theta) => Ok(Some(RopeScaling::plain(local_theta.unwrap_or(theta)))),
            None if local_theta.is_none_or(|theta| values.get("rope_theta").and_then(Value::as_f64) == Some(theta)) => {
                Ok(None)
            }
            None => Err(gguf.error(&format!("`{}` is set, and layers of Gemma 2 have one base", key(LOCAL_THETA)))),
        }
    }

    /// Returns the number of layers in a group of the model in `gguf`.
    fn group_of(&self, gguf: &Gguf, key: &dyn Fn(&str) -> String) -> Result<usize> {
        let key = key(WINDOW_PATTERN);
        match gguf.count(&key)? {
            Some(group) if group != self.group && (group == 0 || self.local_theta.is_none()) => Err(gguf.error(
                &format!("`{key}` is {group}; it is {} for Gemma 2, and a number of layers for Gemma 3", GEMMA2.group),
            )),
            found => Ok(found.unwrap_or(self.group)),
        }
    }

    /// Returns the number that files add to the values of a weight. Norms multiply by `1 + weight` here, but by the stored weight in llama.cpp.
    pub fn offset(weight: &Weight) -> f32 {
        if weight.shape.len() == 1 { 1.0 } else { 0.0 }
    }
}
