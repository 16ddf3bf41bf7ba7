//! Names of tensors in a model folder.

/// Names of the tensors of a family, without `.weight` and `.bias`.
#[derive(Debug, PartialEq, Eq)]
pub struct Names {
    /// The embedding.
    pub embedding: &'static str,
    /// The embedding of learned positions.
    pub positions: &'static str,
    /// Before the number of a block.
    pub blocks: &'static str,
    /// The norm before attention, or before both sublayers; in a block.
    pub attention_norm: &'static str,
    /// The norm before the MLP; in a block.
    pub mlp_norm: &'static str,
    /// Attention; in a block.
    pub attention: &'static str,
    /// Q, K and V, or all of them in one; in attention.
    pub qkv: &'static [&'static str],
    /// Their stack, in the scaling state.
    pub qkv_stack: &'static str,
    /// The output projection; in attention.
    pub output: &'static str,
    /// The MLP; in a block.
    pub mlp: &'static str,
    /// What the activation reads; in the MLP.
    pub gate_up: &'static [&'static str],
    /// Their stack, in the scaling state.
    pub gate_up_stack: &'static str,
    /// What reads the activation; in the MLP.
    pub down: &'static str,
    /// The norm before the head.
    pub norm: &'static str,
    /// Whether linears have their weights transposed, `[inputs, outputs]`.
    pub transposed: bool,
}

/// Those of Llama, which most families have.
pub const LLAMA: Names = Names {
    embedding: "model.embed_tokens",
    positions: "",
    blocks: "model.layers",
    attention_norm: "input_layernorm",
    mlp_norm: "post_attention_layernorm",
    attention: "self_attn",
    qkv: &["q_proj", "k_proj", "v_proj"],
    qkv_stack: "qkv_proj",
    output: "o_proj",
    mlp: "mlp",
    gate_up: &["gate_proj", "up_proj"],
    gate_up_stack: "gate_up_proj",
    down: "down_proj",
    norm: "model.norm",
    transposed: false,
};
