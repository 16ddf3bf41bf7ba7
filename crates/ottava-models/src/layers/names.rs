//! Names of tensors in a model folder.

/// Names of the tensors of a family, without `.weight` and `.bias`.
#[derive(Debug, PartialEq, Eq)]
pub struct Names {
    /// The embedding.
    pub embedding: &'static str,
    /// The embedding of learned positions.
    pub positions: &'static str,
    /// The prefix before the number of a block.
    pub blocks: &'static str,
    /// The norms of the branch with attention, or with both sublayers; in a block.
    pub attention_norms: BranchNorms,
    /// The norms of the branch with the MLP or the experts; in a block.
    pub mlp_norms: BranchNorms,
    /// Attention; in a block.
    pub attention: &'static str,
    /// Q, K and V, or one fused tensor; in attention.
    pub qkv: &'static [&'static str],
    /// The name of their stack in the scaling state.
    pub qkv_stack: &'static str,
    /// The output projection; in attention.
    pub output: &'static str,
    /// The MLP; in a block.
    pub mlp: &'static str,
    /// The linears before the activation, or one tensor with gate and up; in the MLP.
    pub gate_up: &'static [&'static str],
    /// The name of their stack in the scaling state.
    pub gate_up_stack: &'static str,
    /// The linear after the activation; in the MLP.
    pub down: &'static str,
    /// The norm before the head.
    pub norm: &'static str,
    /// Whether linears have their weights transposed, `[inputs, outputs]`.
    pub transposed: bool,
}

/// Names of the norms of a residual branch; `None` if it has no such norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BranchNorms {
    /// The norm of the operand.
    pub before: Option<&'static str>,
    /// The norm of the output, before it is added to the residual stream.
    pub after: Option<&'static str>,
}

impl BranchNorms {
    /// A norm of the operand alone.
    pub const fn before(name: &'static str) -> BranchNorms {
        BranchNorms { before: Some(name), after: None }
    }

    /// A norm of the output alone.
    pub const fn after(name: &'static str) -> BranchNorms {
        BranchNorms { before: None, after: Some(name) }
    }

    /// Both norms.
    pub const fn around(before: &'static str, after: &'static str) -> BranchNorms {
        BranchNorms { before: Some(before), after: Some(after) }
    }
}

/// The role of a tensor in a decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The embedding of tokens.
    Embedding,
    /// The embedding of learned positions.
    Positions,
    /// The norm before attention, or before both sublayers.
    AttentionNorm,
    /// The projections to queries, keys and values.
    Query,
    /// See [`Role::Query`].
    Key,
    /// See [`Role::Query`].
    Value,
    /// All three in one.
    Qkv,
    /// The norm of query heads.
    QueryNorm,
    /// The norm of key heads.
    KeyNorm,
    /// The output projection of attention.
    AttentionOutput,
    /// The norm after attention.
    AttentionPostNorm,
    /// The norm before the MLP.
    MlpNorm,
    /// The norm after the MLP.
    MlpPostNorm,
    /// The gate projection, to whose output a gated MLP applies the activation.
    Gate,
    /// The up projection: its output is multiplied by the activated gate or, without a gate, activated. Also gate and up in one.
    Up,
    /// The linear that reads the activation.
    Down,
    /// The norm before the head.
    FinalNorm,
    /// The head.
    Head,
}

/// A tensor of a model folder, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorRole {
    /// Its role.
    pub role: Role,
    /// Its block; `None` outside of blocks.
    pub block: Option<usize>,
    /// Whether it is a bias, and not a weight.
    pub is_bias: bool,
}

/// The head, in all families.
pub const HEAD: &str = "lm_head";
/// The head of a reward model in every family.
pub const SCORE: &str = "score";
/// The norms of query and key heads; in attention, in all families.
pub const HEAD_NORMS: [&str; 2] = ["q_norm", "k_norm"];

impl Names {
    /// The role of the tensor called `name`; `None` if a decoder has no tensor of that name.
    pub fn role_of(&self, name: &str) -> Option<TensorRole> {
        let (module, ending) = name.rsplit_once('.')?;
        let is_bias = match ending {
            "weight" => false,
            "bias" => true,
            _ => return None,
        };
        let in_block = module.strip_prefix(self.blocks).and_then(|rest| rest.strip_prefix('.')?.split_once('.'));
        let (role, block) = match in_block {
            Some((block, module)) => (self.role_in_block(module)?, Some(block.parse().ok()?)),
            None if module == self.embedding => (Role::Embedding, None),
            None if module == self.positions => (Role::Positions, None),
            None if module == self.norm => (Role::FinalNorm, None),
            None if module == HEAD => (Role::Head, None),
            None => return None,
        };
        Some(TensorRole { role, block, is_bias })
    }

    fn role_in_block(&self, module: &str) -> Option<Role> {
        let within = |parent: &str| module.strip_prefix(parent).and_then(|rest| rest.strip_prefix('.'));
        let number = |names: &[&str], name| names.iter().position(|other| *other == name);
        let norms = [
            (self.attention_norms.before, Role::AttentionNorm),
            (self.attention_norms.after, Role::AttentionPostNorm),
            (self.mlp_norms.before, Role::MlpNorm),
            (self.mlp_norms.after, Role::MlpPostNorm),
        ];
        if let Some((_, role)) = norms.into_iter().find(|(name, _)| *name == Some(module)) {
            return Some(role);
        }
        if let Some(name) = within(self.attention) {
            let qkv: &[Role] = if self.qkv.len() == 1 { &[Role::Qkv] } else { &[Role::Query, Role::Key, Role::Value] };
            let of_norm = || number(&HEAD_NORMS, name).map(|which| [Role::QueryNorm, Role::KeyNorm][which]);
            let of_output = || (name == self.output).then_some(Role::AttentionOutput);
            return number(self.qkv, name).map(|which| qkv[which]).or_else(of_norm).or_else(of_output);
        }
        let name = within(self.mlp)?;
        let gate_up: &[Role] = if self.gate_up.len() == 1 { &[Role::Up] } else { &[Role::Gate, Role::Up] };
        number(self.gate_up, name).map(|which| gate_up[which]).or_else(|| (name == self.down).then_some(Role::Down))
    }
}

/// The stack of all experts of a layer to which the linear `linear` of an expert belongs, by its name in transformers, with the number of the
/// linear among the linears that the stack has of each expert, and their number.
pub fn expert_stack(linear: &str) -> Option<(&'static str, [usize; 2])> {
    match linear {
        "gate_proj" | "w1" => Some((LLAMA.gate_up_stack, [0, 2])),
        "up_proj" | "w3" => Some((LLAMA.gate_up_stack, [1, 2])),
        "down_proj" | "w2" => Some((LLAMA.down, [0, 1])),
        _ => None,
    }
}

/// The names of Llama, which most families use.
pub const LLAMA: Names = Names {
    embedding: "model.embed_tokens",
    positions: "",
    blocks: "model.layers",
    attention_norms: BranchNorms::before("input_layernorm"),
    mlp_norms: BranchNorms::before("post_attention_layernorm"),
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
