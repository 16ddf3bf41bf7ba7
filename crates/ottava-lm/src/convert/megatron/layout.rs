//! Maps the weights of a Hugging Face folder to those of Megatron's `GPTModel`, and to the shares of tensor parallel ranks.

use crate::layers::LLAMA;
use crate::models::DecoderConfig;

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
                let (queries, groups) = (sizes.heads / sizes.kv_heads, sizes.kv_heads / ranks);
                let (before, count) = match head {
                    Head::Query => (0, queries),
                    Head::Key => (queries, 1),
                    Head::Value => (queries + 1, 1),
                };
                let start = |group: usize| (group * (queries + 2) + before) * sizes.head_dim;
                (0..groups).map(|group| (start(group), count * sizes.head_dim)).collect()
            }
        }
    }

    /// The heads whose rows rotary positions turn: those of queries and keys.
    fn rotary_heads(self, sizes: &DecoderConfig) -> Option<usize> {
        match self {
            Division::Qkv(Head::Query) => Some(sizes.heads),
            Division::Qkv(Head::Key) => Some(sizes.kv_heads),
            _ => None,
        }
    }

    /// Rows of the tensor of each rank, which contains rows of the weight; at least this many for a padded table.
    pub fn stored_rows(self, rows: usize, sizes: &DecoderConfig, ranks: usize) -> usize {
        match self {
            Division::Whole | Division::Columns => rows,
            Division::Rows => rows.div_ceil(ranks),
            Division::Gate(_) => 2 * rows / ranks,
            Division::Qkv(_) => (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim / ranks,
        }
    }
}

/// Why a model of these sizes has no place in Megatron's `GPTModel` as it is read and written here.
pub fn problem(sizes: &DecoderConfig) -> Option<String> {
    let differs = |what: &str| Some(format!("{what}, which Megatron checkpoints are not converted with"));
    match () {
        () if sizes.names != &LLAMA || sizes.parallel || sizes.norm_bias => {
            differs("the model is of another family than Llama, Mistral, Qwen2 and Qwen3")
        }
        () if sizes.mlp_bias => differs("its MLPs have biases"),
        () => None,
    }
}

/// All weights of a model of these sizes.
pub fn weights(sizes: &DecoderConfig) -> Vec<Weight> {
    let (c, f, v) = (sizes.channels, sizes.hidden, sizes.vocabulary);
    let (q, kv) = (sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim);
    let heads = [(q, Head::Query), (kv, Head::Key), (kv, Head::Value)];
    let mut all = Vec::new();
    let mut add = |name: String, shape: &[usize], stored: &'static [&'static str], block, part: Division| {
        // Norms of queries and keys are those of a head.
        let of_head =
            stored.iter().any(|name| name.ends_with("q_layernorm.weight") || name.ends_with("k_layernorm.weight"));
        let rotary_heads = part.rotary_heads(sizes).or(of_head.then_some(1));
        all.push(Weight { name: format!("{name}.weight"), shape: shape.to_vec(), stored, block, part, rotary_heads });
    };
    add(LLAMA.embedding.into(), &[v, c], EMBEDDING, None, Division::Rows);
    for block in 0..sizes.layers {
        let at = Some(block);
        let name = |module: &str| format!("{}.{block}.{module}", LLAMA.blocks);
        let attention = |module: &str| name(&format!("{}.{module}", LLAMA.attention));
        let mlp = |module: &str| name(&format!("{}.{module}", LLAMA.mlp));
        add(name(LLAMA.attention_norm), &[c], ATTENTION_NORM, at, Division::Whole);
        for (module, (rows, head)) in LLAMA.qkv.iter().zip(heads) {
            add(attention(module), &[rows, c], &["self_attention.linear_qkv.weight"], at, Division::Qkv(head));
        }
        if sizes.qk_norm {
            add(attention("q_norm"), &[sizes.head_dim], &["self_attention.q_layernorm.weight"], at, Division::Whole);
            add(attention("k_norm"), &[sizes.head_dim], &["self_attention.k_layernorm.weight"], at, Division::Whole);
        }
        add(attention(LLAMA.output), &[c, q], &["self_attention.linear_proj.weight"], at, Division::Columns);
        add(name(LLAMA.mlp_norm), &[c], MLP_NORM, at, Division::Whole);
        for (which, module) in LLAMA.gate_up.iter().enumerate() {
            add(mlp(module), &[f, c], &["mlp.linear_fc1.weight"], at, Division::Gate(which));
        }
        add(mlp(LLAMA.down), &[c, f], &["mlp.linear_fc2.weight"], at, Division::Columns);
    }
    add(LLAMA.norm.into(), &[c], FINAL_NORM, None, Division::Whole);
    if !sizes.tied {
        add("lm_head".into(), &[v, c], OUTPUT, None, Division::Rows);
    }
    for block in (0..sizes.layers).filter(|_| sizes.qkv_bias) {
        for (module, (rows, head)) in LLAMA.qkv.iter().zip(heads) {
            let name = format!("{}.{block}.{}.{module}.bias", LLAMA.blocks, LLAMA.attention);
            let stored: &[_] = &["self_attention.linear_qkv.bias"];
            let (part, block) = (Division::Qkv(head), Some(block));
            let rotary_heads = part.rotary_heads(sizes);
            all.push(Weight { name, shape: vec![rows], stored, block, part, rotary_heads });
        }
    }
    for block in (0..sizes.layers).filter(|_| sizes.output_bias) {
        let name = format!("{}.{block}.{}.{}.bias", LLAMA.blocks, LLAMA.attention, LLAMA.output);
        let stored: &[_] = &["self_attention.linear_proj.bias"];
        let (block, part) = (Some(block), Division::Whole);
        all.push(Weight { name, shape: vec![sizes.channels], stored, block, part, rotary_heads: None });
    }
    all
}
