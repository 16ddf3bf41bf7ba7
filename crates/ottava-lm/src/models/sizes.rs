//! The sizes of a decoder, common to all families.

use super::RopeScaling;
use crate::layers::{LLAMA, Names};
use crate::lora::Lora;
use ottava_tensor::ops::{Activation, NormKind, RopePairs};

/// How a model knows the positions of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Positions {
    /// It rotates queries and keys.
    Rotary(RopePairs),
    /// It adds a learned row per position to the embedding.
    Learned,
}

/// Sizes of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Tokens `V`.
    pub vocabulary: usize,
    /// Width `C` of the residual stream.
    pub channels: usize,
    /// Width `F` of the feed-forward layers.
    pub hidden: usize,
    /// Blocks.
    pub layers: usize,
    /// Query heads `H`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Size `D` of a head.
    pub head_dim: usize,
    /// The maximum number of positions.
    pub max_positions: usize,
    /// Epsilon of the norms.
    pub norm_eps: f64,
    /// Whether the head shares the embedding's table.
    pub tied: bool,
    /// Standard deviation of initial weights.
    pub init_std: f32,
    /// Rotary positions.
    pub rope: RopeScaling,
    /// Whether each query and key head is normalised before rotary positions.
    pub qk_norm: bool,
    /// Biases on queries, keys and values.
    pub qkv_bias: bool,
    /// Bias on the attention's output.
    pub output_bias: bool,
    /// Biases in the MLP.
    pub mlp_bias: bool,
    /// The sliding window of attention, if any; sequences must not be longer.
    pub window: Option<usize>,
    /// The norms.
    pub norm: NormKind,
    /// Whether norms have biases.
    pub norm_bias: bool,
    /// What the MLP computes between its linears.
    pub activation: Activation,
    /// Positions.
    pub positions: Positions,
    /// Whether attention and MLP are parallel and read one norm.
    pub parallel: bool,
    /// The factor of logits.
    pub logit_scale: f32,
    /// Names of tensors.
    pub names: &'static Names,
    /// A sentence for each key of `config.json` that is ignored.
    pub ignored: Vec<String>,
    /// Adapters of the blocks' linears, which are trained instead of the model; not part of `config.json`.
    pub lora: Option<Lora>,
}

impl Default for DecoderConfig {
    /// Llama's blocks, without sizes.
    fn default() -> DecoderConfig {
        DecoderConfig {
            vocabulary: 0,
            channels: 0,
            hidden: 0,
            layers: 0,
            heads: 0,
            kv_heads: 0,
            head_dim: 0,
            max_positions: 2048,
            norm_eps: 1e-5,
            tied: false,
            init_std: 0.02,
            rope: RopeScaling::default(),
            qk_norm: false,
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            window: None,
            norm: NormKind::Rms,
            norm_bias: false,
            activation: Activation::SwiGlu,
            positions: Positions::Rotary(RopePairs::Halves),
            parallel: false,
            logit_scale: 1.0,
            names: &LLAMA,
            ignored: Vec::new(),
            lora: None,
        }
    }
}

impl DecoderConfig {
    /// Problems of these sizes, a sentence each.
    pub fn check(&self) -> Result<(), String> {
        let sizes = [
            ("vocab_size", self.vocabulary),
            ("hidden_size", self.channels),
            ("intermediate_size", self.hidden),
            ("num_hidden_layers", self.layers),
            ("num_attention_heads", self.heads),
            ("num_key_value_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("max_position_embeddings", self.max_positions),
        ];
        for (key, value) in sizes {
            if value == 0 || value > 1 << 24 {
                return Err(format!("`{key}` is {value}"));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(format!(
                "`num_attention_heads` {} is not a multiple of `num_key_value_heads` {}",
                self.heads, self.kv_heads
            ));
        }
        if !(self.logit_scale.is_finite() && self.logit_scale > 0.0) {
            return Err(format!("`logit_scale` is {}; it is a number above 0", self.logit_scale));
        }
        if self.positions != Positions::Learned && !self.head_dim.is_multiple_of(2) {
            return Err(format!("`head_dim` {} is odd; rotary positions pair its halves", self.head_dim));
        }
        Ok(())
    }
}
