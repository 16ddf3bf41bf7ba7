//! The sizes of a decoder, common to all families.

use super::RopeScaling;

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
    /// Positions the model was made for.
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
    /// Tokens that attention looks back, if limited; sequences must not be longer.
    pub window: Option<usize>,
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
        if !self.head_dim.is_multiple_of(2) {
            return Err(format!("`head_dim` {} is odd; rotary positions pair its halves", self.head_dim));
        }
        Ok(())
    }
}
