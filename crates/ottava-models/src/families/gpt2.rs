//! GPT-2: LayerNorm, biases, GELU without a gate, learned positions and a tied head. Radford et al. 2019, "Language models are
//! unsupervised multitask learners".

use crate::SublayerSpec::{Heads, Mlp};
use crate::family::{Family, gelu, ignored_dropout, layers, refuse};
use crate::layers::{BranchNorms, HeadsSpec, LLAMA, MlpSpec, Names, NormConfig, Stream};
use crate::{ConfigFile, DecoderConfig, LayerSpec};
use ottava_common::error::Result;
use ottava_tensor::ops::{Activation, NormKind};
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "GPT2LMHeadModel",
    model_type: "gpt2",
    reward_model: Some("GPT2ForSequenceClassification"),
    defaults,
    aliases: &[
        ("hidden_size", "n_embd"),
        ("max_position_embeddings", "n_positions"),
        ("num_attention_heads", "n_head"),
        ("num_hidden_layers", "n_layer"),
    ],
    read,
};

fn defaults() -> Value {
    json!({
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_inner": null, "n_positions": 1024,
        "tie_word_embeddings": true,
    })
}

/// The names of GPT-2. Its linears are `Conv1D`, which stores the weight transposed.
static NAMES: Names = Names {
    embedding: "transformer.wte",
    positions: "transformer.wpe",
    blocks: "transformer.h",
    attention_norms: BranchNorms::before("ln_1"),
    mlp_norms: BranchNorms::before("ln_2"),
    attention: "attn",
    qkv: &["c_attn"],
    qkv_stack: "c_attn",
    head_norms: LLAMA.head_norms,
    output: "c_proj",
    recurrent: "",
    mlp: "mlp",
    gate_up: &["c_fc"],
    gate_up_stack: "c_fc",
    down: "c_proj",
    norm: "transformer.ln_f",
    head: LLAMA.head,
    transposed: true,
    qkv_by_head: false,
};

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    refuse(file)?;
    for (key, expected) in [("scale_attn_by_inverse_layer_idx", false), ("add_cross_attention", false)] {
        if file.optional(key, expected)? != expected {
            return Err(file.error(&format!("`{key}` is {}, which is not implemented", !expected)));
        }
    }
    let ignored = ignored_dropout(file, &["resid_pdrop", "embd_pdrop", "attn_pdrop"])?;
    let name: String = file.required("activation_function")?;
    let Some(gelu) = gelu(&name) else {
        return Err(file.error(&format!("`activation_function` is \"{name}\"; only kinds of \"gelu\" are implemented")));
    };
    let (channels, heads): (usize, usize) = (file.required("n_embd")?, file.required("n_head")?);
    let head_dim = channels.checked_div(heads).unwrap_or(0);
    if head_dim * heads != channels {
        return Err(file.error(&format!("`n_embd` {channels} does not divide into {heads} heads")));
    }
    let stream = Stream {
        channels,
        residual_scale: 1.0,
        norm: NormConfig { kind: NormKind::Layer, bias: true, eps: file.required("layer_norm_epsilon")? },
        names: &NAMES,
        std: file.required("initializer_range")?,
    };
    let mut model = DecoderConfig::new(file.required("vocab_size")?, file.required("n_positions")?, stream);
    model.embedding.learned_positions = true;
    model.head.tied = file.required("tie_word_embeddings")?;
    model.folder.ignored = ignored;
    let scale = (!file.optional("scale_attn_weights", true)?).then_some(1.0);
    let heads = HeadsSpec { qkv_bias: true, output_bias: true, scale, ..HeadsSpec::new(heads, heads, head_dim) };
    let hidden = file.nullable("n_inner")?.unwrap_or(channels.saturating_mul(4));
    let mlp = MlpSpec { bias: true, ..MlpSpec::new(hidden, Activation::Gelu(gelu)) };
    let layer = LayerSpec::sequential(&NAMES, [Heads(heads, None), Mlp(mlp)]);
    Ok(DecoderConfig { layers: vec![layer; layers(file, "n_layer")?], ..model })
}
