//! Maps the weights of a Hugging Face folder to the weights of Megatron's `GPTModel`, and to the parts of tensor parallel ranks.

use ottava_common::error::{Error, Result};
use ottava_models::layers::{HeadsSpec, LLAMA, Role, TensorRole};
use ottava_models::{Decoder, DecoderConfig, RopeKind, Uniform};
use ottava_recipe::Precision;
use ottava_recipe::param::FolderTensor;

/// A weight of a Hugging Face folder.
#[derive(Clone, Debug)]
pub struct Weight {
    /// The name of the weight in the folder.
    pub name: String,
    /// The shape of the weight in the folder.
    pub shape: Vec<usize>,
    /// The possible names of the weight in Megatron's model. A checkpoint has one of them. For blocks, the prefix `decoder.layers.N.` is omitted.
    pub stored: &'static [&'static str],
    /// The block of the weight.
    pub block: Option<usize>,
    /// The part of the stored tensor that is this weight.
    pub part: Division,
    /// The number of heads, if rotary positions rotate the rows of the weight.
    pub rotary_heads: Option<usize>,
}

/// The division of a weight among ranks, and the rows of the weight in the tensors of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Division {
    /// Each rank has the whole weight.
    Whole,
    /// Each rank has some rows of an embedding, which is padded.
    Rows,
    /// Each rank has some columns.
    Columns,
    /// Each rank has, for each of its groups of heads, first the queries, then the key and then the value.
    Qkv(Head),
    /// Each rank has its share of the rows of `gate`, then its share of the rows of `up`.
    Gate(usize),
}

/// A part of a group of heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    /// The queries, which share a key.
    Query,
    /// The key.
    Key,
    /// The value.
    Value,
}

/// Removes the names of the modules that wrap the model, which NeMo saves.
pub fn without_wrappers(name: &str) -> &str {
    name.trim_start_matches("module.")
}

/// The names of the embedding.
pub const EMBEDDING: &[&str] = &["embedding.word_embeddings.weight"];
/// The names of the head, if it is not tied to the embedding.
pub const OUTPUT: &[&str] = &["output_layer.weight"];
/// The names of the norm before the head.
const FINAL_NORM: &[&str] = &["decoder.final_layernorm.weight"];

/// The names of norms. The first name is for a norm that is fused into the linear, as in layers of Transformer Engine.
const ATTENTION_NORM: &[&str] = &["self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"];
const MLP_NORM: &[&str] = &["mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"];

impl Division {
    /// Returns the rows of a rank's tensor that belong to the weight, as starts and counts. `stored` is the number of rows of the tensor.
    pub fn rows(self, stored: usize, sizes: &DecoderConfig, ranks: usize) -> Vec<(usize, usize)> {
        match self {
            Division::Whole | Division::Rows | Division::Columns => vec![(0, stored)],
            Division::Gate(which) => vec![(which * stored / 2, stored / 2)],
            Division::Qkv(head) => {
                let HeadsSpec { heads, kv_heads, head_dim, .. } = *heads_of(sizes);
                let (queries, groups) = (heads / kv_heads, kv_heads / ranks);
                let (before, count) = match head {
                    Head::Query => (0, queries),
                    Head::Key => (queries, 1),
                    Head::Value => (queries + 1, 1),
                };
                let start = |group: usize| (group * (queries + 2) + before) * head_dim;
                (0..groups).map(|group| (start(group), count * head_dim)).collect()
            }
        }
    }

    /// Returns the number of heads whose rows are rotated by rotary positions. Only queries and keys have such heads.
    fn rotary_heads(self, sizes: &DecoderConfig) -> Option<usize> {
        match self {
            Division::Qkv(Head::Query) => Some(heads_of(sizes).heads),
            Division::Qkv(Head::Key) => Some(heads_of(sizes).kv_heads),
            _ => None,
        }
    }

    /// Returns the number of rows of each rank's tensor that contains `rows` rows of the weight. If the tensor is padded, this is the minimum.
    pub fn stored_rows(self, rows: usize, sizes: &DecoderConfig, ranks: usize) -> usize {
        match self {
            Division::Whole | Division::Columns => rows,
            Division::Rows => rows.div_ceil(ranks),
            Division::Gate(_) => 2 * rows / ranks,
            Division::Qkv(_) => {
                let HeadsSpec { heads, kv_heads, head_dim, .. } = *heads_of(sizes);
                (heads + 2 * kv_heads) * head_dim / ranks
            }
        }
    }
}

/// Returns the heads of a model that has no [`problem`].
fn heads_of(sizes: &DecoderConfig) -> &HeadsSpec {
    sizes.heads().expect("models without heads of their own are refused")
}

/// Returns why a model of these sizes cannot be converted to or from Megatron's `GPTModel`; `None` if it can.
pub fn problem(sizes: &DecoderConfig) -> Option<String> {
    let differs = |what: &str| Some(format!("{what}, which Megatron checkpoints are not converted with"));
    let layers = Uniform::of(sizes).filter(|_| sizes.stream.names == &LLAMA && !sizes.stream.norm.bias);
    let Some(Uniform { mlp, rope, .. }) = layers else {
        return differs("the model is of another family than Llama, Mistral, Qwen2 and Qwen3");
    };
    match () {
        () if mlp.bias => differs("its MLPs have biases"),
        () if sizes.has_factors() => {
            differs("it has factors of embedding, residual branches, attention scores or logits")
        }
        () if sizes.layers.iter().any(|layer| layer.rope().is_none()) => {
            differs("some of its layers have no rotary positions")
        }
        () if sizes.layers.iter().any(|layer| layer.window() != sizes.layers[0].window()) => {
            differs("only some of its layers have a window")
        }
        () if !matches!(rope.kind, RopeKind::Default | RopeKind::Linear { .. } | RopeKind::Llama3 { .. }) => {
            differs("its rotary positions are scaled by YaRN, LongRoPE or the length of sequences")
        }
        () if rope.partial != 1.0 => differs("only a part of each head has rotary positions"),
        () => None,
    }
}

/// Returns the names of a tensor in Megatron's model, and its division among ranks.
fn stored_as(place: TensorRole) -> Option<(&'static [&'static str], Division)> {
    const QKV: [&[&str]; 2] = [&["self_attention.linear_qkv.weight"], &["self_attention.linear_qkv.bias"]];
    const PROJ: [&[&str]; 2] = [&["self_attention.linear_proj.weight"], &["self_attention.linear_proj.bias"]];
    const FC1: &[&str] = &["mlp.linear_fc1.weight"];
    let which = usize::from(place.is_bias);
    Some(match place.role {
        Role::Query => (QKV[which], Division::Qkv(Head::Query)),
        Role::Key => (QKV[which], Division::Qkv(Head::Key)),
        Role::Value => (QKV[which], Division::Qkv(Head::Value)),
        Role::AttentionOutput if place.is_bias => (PROJ[1], Division::Whole),
        Role::AttentionOutput => (PROJ[0], Division::Columns),
        _ if place.is_bias => return None,
        Role::Embedding => (EMBEDDING, Division::Rows),
        Role::AttentionNorm => (ATTENTION_NORM, Division::Whole),
        Role::QueryNorm => (&["self_attention.q_layernorm.weight"], Division::Whole),
        Role::KeyNorm => (&["self_attention.k_layernorm.weight"], Division::Whole),
        Role::MlpNorm => (MLP_NORM, Division::Whole),
        Role::Gate => (FC1, Division::Gate(0)),
        Role::Up => (FC1, Division::Gate(1)),
        Role::Down => (&["mlp.linear_fc2.weight"], Division::Columns),
        Role::FinalNorm => (FINAL_NORM, Division::Whole),
        Role::Head => (OUTPUT, Division::Rows),
        Role::Positions | Role::Qkv | Role::AttentionPostNorm | Role::MlpPostNorm => return None,
    })
}

/// Returns all weights of a model of these sizes.
///
/// Errors if the model has tensors that Megatron's `GPTModel` does not have. [`problem`] reports such models before.
pub fn weights(sizes: &DecoderConfig) -> Result<Vec<Weight>> {
    let tensors = Decoder::folder_tensors(sizes, &Precision::default().recipe())?;
    let weight = |FolderTensor { name, shape, .. }: FolderTensor| {
        let place = sizes.stream.names.role_of(&name);
        let Some((place, (stored, part))) = place.and_then(|place| Some((place, stored_as(place)?))) else {
            return Err(Error::Model(format!("`{name}` has no place in Megatron's `GPTModel`")));
        };
        // The norms of queries and keys have the size of a head.
        let of_head = matches!(place.role, Role::QueryNorm | Role::KeyNorm);
        let rotary_heads = part.rotary_heads(sizes).or(of_head.then_some(1));
        Ok(Weight { name, shape, stored, block: place.block, part, rotary_heads })
    };
    tensors.into_iter().map(weight).collect()
}
