//! Names of tensors in a model folder.

use ottava_recipe::param::{FolderLayout, StackOrder};

/// Names of the tensors of a family, without `.weight` and `.bias`.
#[derive(Debug, PartialEq, Eq)]
pub struct Names {
    /// The embedding.
    pub embedding: &'static str,
    /// The embedding of learned positions.
    pub positions: &'static str,
    /// The prefix before the number of a block.
    pub blocks: &'static str,
    /// The norms of the branch with attention, or of the branch with both sublayers. Names are relative to the block.
    pub attention_norms: BranchNorms,
    /// The norms of the branch with the MLP or the experts. Names are relative to the block.
    pub mlp_norms: BranchNorms,
    /// The name of attention in a block.
    pub attention: &'static str,
    /// The names of Q, K and V in attention, or of one fused tensor.
    pub qkv: &'static [&'static str],
    /// The name of the stack of Q, K and V in the scaling state.
    pub qkv_stack: &'static str,
    /// The names of the norms of query and key heads, in attention. `{}` stands for the number of a head if each head has a tensor.
    pub head_norms: [&'static str; 2],
    /// The name of the output projection in attention.
    pub output: &'static str,
    /// The name of a recurrent sublayer in a block.
    pub recurrent: &'static str,
    /// The name of the MLP in a block.
    pub mlp: &'static str,
    /// The names of the linears before the activation, in the MLP, or of one tensor with gate and up.
    pub gate_up: &'static [&'static str],
    /// The name of the stack of gate and up in the scaling state.
    pub gate_up_stack: &'static str,
    /// The name of the linear after the activation, in the MLP.
    pub down: &'static str,
    /// The norm before the head. Empty without this norm.
    pub norm: &'static str,
    /// The head.
    pub head: &'static str,
    /// Whether folders store the weights of linears transposed, `[inputs, outputs]`.
    pub transposed: bool,
    /// Whether the fused tensor of Q, K and V has the rows of Q, K and V of one head after another, as in GPT-NeoX.
    pub qkv_by_head: bool,
}

/// The names of the norms of a residual branch. `None` means that the branch lacks the norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BranchNorms {
    /// The norm of the operand.
    pub before: Option<&'static str>,
    /// The norm of the output, before it is added to the residual stream.
    pub after: Option<&'static str>,
    /// The norm of the residual stream, after the output is added to it.
    pub last: Option<&'static str>,
}

impl BranchNorms {
    /// The names of a branch without norms.
    pub const NONE: BranchNorms = BranchNorms { before: None, after: None, last: None };

    /// Returns the names of a branch with only a norm of the operand.
    pub const fn before(name: &'static str) -> BranchNorms {
        BranchNorms { before: Some(name), ..BranchNorms::NONE }
    }

    /// Returns the names of a branch with only a norm of the output.
    pub const fn after(name: &'static str) -> BranchNorms {
        BranchNorms { after: Some(name), ..BranchNorms::NONE }
    }

    /// Returns the names of a branch with both norms.
    pub const fn around(before: &'static str, after: &'static str) -> BranchNorms {
        BranchNorms { before: Some(before), after: Some(after), ..BranchNorms::NONE }
    }

    /// Returns the names of a branch with only a norm of the residual stream.
    pub const fn last(name: &'static str) -> BranchNorms {
        BranchNorms { last: Some(name), ..BranchNorms::NONE }
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
    /// The projection to queries.
    Query,
    /// The projection to keys.
    Key,
    /// The projection to values.
    Value,
    /// The fused projection to queries, keys and values.
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
    /// The gate projection. A gated MLP applies the activation to its output.
    Gate,
    /// The up projection. Its output is multiplied by the activated gate or, without a gate, activated. A fused gate and up projection has this role
    /// too.
    Up,
    /// The linear that reads the activation.
    Down,
    /// The norm before the head.
    FinalNorm,
    /// The head.
    Head,
}

/// The meaning of the name of a tensor in a model folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorRole {
    /// The role of the tensor.
    pub role: Role,
    /// The index of the block. `None` outside of blocks.
    pub block: Option<usize>,
    /// Whether the tensor is a bias instead of a weight.
    pub is_bias: bool,
}

/// The name of the output projection of a recurrent sublayer, in all families.
pub(crate) const RECURRENT_OUTPUT: &str = "out_proj";
/// The name of the scores of a classifier with RoBERTa.
pub(crate) const ROBERTA_SCORES: &str = "classifier.out_proj";
/// The name of the head of a reward model in all families of decoders.
pub const SCORE: &str = "score";
/// The name of the weight of a value head in all families. A model folder does not have it.
pub const VALUE: &str = "value_head.weight";

impl Names {
    /// Returns the layout of weights of linears in a folder, unless they are fused.
    pub fn layout(&self) -> FolderLayout {
        if self.transposed { FolderLayout::Transposed } else { FolderLayout::Same }
    }

    /// Returns the role of the tensor called `name`, or `None` if a decoder has no tensor of that name.
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
            None if module == self.head => (Role::Head, None),
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
            let of_norm = || number(&self.head_norms, name).map(|which| [Role::QueryNorm, Role::KeyNorm][which]);
            let of_output = || (name == self.output).then_some(Role::AttentionOutput);
            return number(self.qkv, name).map(|which| qkv[which]).or_else(of_norm).or_else(of_output);
        }
        let name = within(self.mlp)?;
        let gate_up: &[Role] = if self.gate_up.len() == 1 { &[Role::Up] } else { &[Role::Gate, Role::Up] };
        number(self.gate_up, name).map(|which| gate_up[which]).or_else(|| (name == self.down).then_some(Role::Down))
    }
}

/// Returns the name of `module` in `block`, or the name of the block if `module` is empty.
pub(crate) fn within(block: &str, module: &str) -> String {
    if module.is_empty() { block.to_string() } else { format!("{block}.{module}") }
}

/// Returns the name in the mixture of the tensor in which the memory of transformers stacks the linear called `linear` of all experts. Also returns the
/// index of the linear within an expert's part of the stack, and the number of linears in this part.
pub fn expert_stack(linear: &str) -> Option<(&'static str, [usize; 2])> {
    let [before, after] = ExpertStacks::NAMES;
    match linear {
        "gate_proj" | "w1" => Some((before, [0, 2])),
        "up_proj" | "w3" => Some((before, [1, 2])),
        "down_proj" | "w2" => Some((after, [0, 1])),
        _ => None,
    }
}

/// The parameters of all experts in the memory of transformers: before the activation, with a gate and without one, and after the activation.
pub const EXPERT_PARAMETERS: [&str; 3] = ["gate_up_proj", "up_proj", "down_proj"];

/// The tensors that stack the matrices of all experts of a layer in a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertStacks {
    /// The names in the mixture: of the linears before the activation, and of the linear after it.
    pub names: [&'static str; 2],
    /// The order of the elements.
    pub order: StackOrder,
}

impl ExpertStacks {
    /// The names of most families, and of the memory of transformers.
    pub const NAMES: [&'static str; 2] = ["experts.gate_up_proj", "experts.down_proj"];

    /// Returns stacks with the names of most families.
    pub const fn new(order: StackOrder) -> ExpertStacks {
        ExpertStacks { names: ExpertStacks::NAMES, order }
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
    head_norms: ["q_norm", "k_norm"],
    output: "o_proj",
    recurrent: "linear_attn",
    mlp: "mlp",
    gate_up: &["gate_proj", "up_proj"],
    gate_up_stack: "gate_up_proj",
    down: "down_proj",
    norm: "model.norm",
    head: "lm_head",
    transposed: false,
    qkv_by_head: false,
};
