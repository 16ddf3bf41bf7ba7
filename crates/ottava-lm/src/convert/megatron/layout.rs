//! Maps the weights of a Hugging Face folder to those of Megatron's `GPTModel`, and to the shares of tensor parallel ranks.

use crate::error::{Error, Result};
use crate::layers::{HeadsSpec, LLAMA, Role, TensorRole};
use crate::models::{Decoder, DecoderConfig, RopeKind, Uniform};
use crate::param::FolderTensor;
use crate::recipe::Precision;

/// A weight of a folder.
#[derive(Clone, Debug)]
pub struct Weight {
    /// Its name in a folder.
    pub name: String,
    /// Its shape there.
    pub shape: Vec<usize>,
    /// Its possible names in Megatron's model; a checkpoint has one of them. In a block, without `decoder.layers.N.`
    pub stored: &'static [&'static str],
    /// Its block.
    pub block: Option<usize>,
    /// Its part of the stored tensor.
    pub part: Division,
    /// The number of heads, where rotary positions turn its rows.
    pub rotary_heads: Option<usize>,
}

/// The division of a weight among ranks, and its rows in their tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Division {
    /// All ranks have the whole.
    Whole,
    /// Each rank has some rows: an embedding, padded to a multiple.
    Rows,
    /// Each rank has some columns.
    Columns,
    /// Each rank has, one after another for each of its groups of heads, the queries of a group, its key and its value.
    Qkv(Head),
    /// Each rank has the rows of its share of `gate`, then those of `up`.
    Gate(usize),
}

/// A part of a group of heads: the rows before it, and its rows, both in heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    /// Queries, which share a key.
    Query,
    /// The key.
    Key,
    /// The value.
    Value,
}

/// A name without those of the modules that wrap the model, as NeMo saves it.
pub fn without_wrappers(name: &str) -> &str {
    name.trim_start_matches("module.")
}

/// The table of tokens.
pub const EMBEDDING: &[&str] = &["embedding.word_embeddings.weight"];
/// The head, where it is not the table of tokens.
pub const OUTPUT: &[&str] = &["output_layer.weight"];
/// The norm before the head.
const FINAL_NORM: &[&str] = &["decoder.final_layernorm.weight"];

/// Names with the norm fused into the linear, as layers of Transformer Engine have them, come first.
const ATTENTION_NORM: &[&str] = &["self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"];
const MLP_NORM: &[&str] = &["mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"];

impl Division {
    /// Rows of a rank's tensor, of `ranks`, that belong to the weight: their starts and numbers. The weight has `heads`, and keys `kv_heads`.
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

    /// The heads whose rows rotary positions turn: those of queries and keys.
    fn rotary_heads(self, sizes: &DecoderConfig) -> Option<usize> {
        match self {
            Division::Qkv(Head::Query) => Some(heads_of(sizes).heads),
            Division::Qkv(Head::Key) => Some(heads_of(sizes).kv_heads),
            _ => None,
        }
    }

    /// Rows of the tensor of each rank, which contains rows of the weight; at least this many for a padded table.
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

/// The heads of a model that has no [`problem`].
fn heads_of(sizes: &DecoderConfig) -> &HeadsSpec {
    sizes.heads().expect("models without heads of their own are refused")
}

/// Why a model of these sizes has no place in Megatron's `GPTModel` as it is read and written here.
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

/// The names in Megatron's model of a tensor, and its division among ranks.
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

/// All weights of a model of these sizes.
///
/// Errors when it has tensors that Megatron's `GPTModel` does not; [`problem`] says so before.
pub fn weights(sizes: &DecoderConfig) -> Result<Vec<Weight>> {
    let tensors = Decoder::folder_tensors(sizes, &Precision::default().recipe())?;
    let weight = |FolderTensor { name, shape, .. }: FolderTensor| {
        let place = sizes.stream.names.role_of(&name);
        let Some((place, (stored, part))) = place.and_then(|place| Some((place, stored_as(place)?))) else {
            return Err(Error::Model(format!("`{name}` has no place in Megatron's `GPTModel`")));
        };
        // Norms of queries and keys are those of a head.
        let of_head = matches!(place.role, Role::QueryNorm | Role::KeyNorm);
        let rotary_heads = part.rotary_heads(sizes).or(of_head.then_some(1));
        Ok(Weight { name, shape, stored, block: place.block, part, rotary_heads })
    };
    tensors.into_iter().map(weight).collect()
}
