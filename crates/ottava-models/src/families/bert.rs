//! BERT and RoBERTa: encoders with learned positions, token types, a norm after each residual connection, biases and GELU. Devlin et al. 2018,
//! arXiv:1810.04805; Liu et al. 2019, arXiv:1907.11692; Conneau et al. 2019, arXiv:1911.02116.
//!
//! A folder has the tensors of the encoder with a prefix. A folder without a head may lack the prefix (`ottava-checkpoint`).

use crate::SublayerSpec::{Heads, Mlp};
use crate::family::{Family, common_with, gelu, ignored_dropout};
use crate::layers::{
    BranchNorms, EmbeddingTailSpec, HeadsSpec, LLAMA, MlpSpec, Names, NormConfig, PoolerSpec, ROBERTA_SCORES, ScoreSpec,
};
use crate::{ConfigFile, DecoderConfig, is_classifier};
use ottava_common::error::Result;
use ottava_tensor::ops::{Activation, NormKind};
use serde_json::{Value, json};

pub(super) const BERT: Family = Family {
    architecture: "BertModel",
    model_type: "bert",
    reward_model: Some("BertForSequenceClassification"),
    defaults: || defaults(0),
    aliases: &[],
    read: bert,
};

pub(super) const ROBERTA: Family = Family {
    architecture: "RobertaModel",
    model_type: "roberta",
    reward_model: Some("RobertaForSequenceClassification"),
    defaults: || defaults(1),
    aliases: &[],
    read: roberta,
};

pub(super) const XLM_ROBERTA: Family = Family {
    architecture: "XLMRobertaModel",
    model_type: "xlm-roberta",
    reward_model: Some("XLMRobertaForSequenceClassification"),
    defaults: || defaults(1),
    aliases: &[],
    read: roberta,
};

fn defaults(pad: i64) -> Value {
    json!({
        "hidden_act": "gelu", "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "pad_token_id": pad, "tie_word_embeddings": true,
        "type_vocab_size": 2,
    })
}

/// Makes the names of an encoder whose tensors begin with a prefix.
macro_rules! names {
    ($prefix:literal) => {
        Names {
            embedding: concat!($prefix, ".embeddings.word_embeddings"),
            positions: concat!($prefix, ".embeddings.position_embeddings"),
            blocks: concat!($prefix, ".encoder.layer"),
            attention_norms: BranchNorms::last("attention.output.LayerNorm"),
            mlp_norms: BranchNorms::last("output.LayerNorm"),
            attention: "attention",
            qkv: &["self.query", "self.key", "self.value"],
            qkv_stack: "self.qkv",
            output: "output.dense",
            mlp: "",
            gate_up: &["intermediate.dense"],
            gate_up_stack: "intermediate.dense",
            down: "output.dense",
            norm: "",
            ..LLAMA
        }
    };
}

/// The names of a family.
struct EncoderNames {
    names: &'static Names,
    /// The token types and the norm of the embedding.
    types: &'static str,
    embedding_norm: &'static str,
    /// The pooler of the encoder, which is read only by the head of BERT.
    pooler: &'static str,
    /// The linear before the scores, and the scores.
    dense: &'static str,
    scores: &'static str,
    /// The beginnings of the names of other tensors: of other heads, of a pooler without a reader, and of the positions that older writers stored.
    others: &'static [&'static str],
}

static OF_BERT: EncoderNames = EncoderNames {
    names: &names!("bert"),
    types: "bert.embeddings.token_type_embeddings",
    embedding_norm: "bert.embeddings.LayerNorm",
    pooler: "bert.pooler.dense",
    dense: "bert.pooler.dense",
    scores: "classifier",
    others: &[
        "cls.",
        "classifier.",
        "bert.pooler.",
        "pooler.",
        "bert.embeddings.position_ids",
        "embeddings.position_ids",
    ],
};

static OF_ROBERTA: EncoderNames = EncoderNames {
    names: &names!("roberta"),
    types: "roberta.embeddings.token_type_embeddings",
    embedding_norm: "roberta.embeddings.LayerNorm",
    pooler: "roberta.pooler.dense",
    dense: "classifier.dense",
    scores: ROBERTA_SCORES,
    others: &[
        "lm_head.",
        "classifier.",
        "roberta.pooler.",
        "pooler.",
        "roberta.embeddings.position_ids",
        "embeddings.position_ids",
    ],
};

fn bert(file: &ConfigFile) -> Result<DecoderConfig> {
    encoder(file, &OF_BERT, 0)
}

/// Positions of RoBERTa begin after the row of the padding token.
fn roberta(file: &ConfigFile) -> Result<DecoderConfig> {
    let pad: usize = file.required("pad_token_id")?;
    encoder(file, &OF_ROBERTA, pad.saturating_add(1))
}

/// Reads an encoder whose first position has the row `first_position` in the table of positions.
fn encoder(file: &ConfigFile, of: &'static EncoderNames, first_position: usize) -> Result<DecoderConfig> {
    for key in ["is_decoder", "add_cross_attention"] {
        if file.optional(key, false)? {
            return Err(file.error(&format!("`{key}` is true, which is not implemented for encoders")));
        }
    }
    let kind: String = file.optional("position_embedding_type", "absolute".to_string())?;
    if kind != "absolute" {
        return Err(file.error(&format!("`position_embedding_type` is \"{kind}\"; only \"absolute\" is implemented")));
    }
    let name: String = file.required("hidden_act")?;
    let Some(gelu) = gelu(&name) else {
        return Err(file.error(&format!("`hidden_act` is \"{name}\"; only kinds of \"gelu\" are implemented")));
    };
    let eps = file.required("layer_norm_eps")?;
    let mut common = common_with(file, Activation::Gelu(gelu), eps)?.named(of.names);
    let rows = common.model.max_positions;
    if rows <= first_position {
        return Err(file.error(&format!(
            "`max_position_embeddings` is {rows}, and the first position has row {first_position} (`pad_token_id` + 1)"
        )));
    }
    let model = &mut common.model;
    model.max_positions = rows - first_position;
    model.stream.norm = NormConfig { kind: NormKind::Layer, bias: true, eps };
    model.ropes = Vec::new();
    model.embedding.learned_positions = true;
    model.embedding.first_position = first_position;
    let types = Some((of.types, file.required("type_vocab_size")?));
    model.embedding.tail = Some(EmbeddingTailSpec { types, norm: of.embedding_norm });
    model.head.scores = ScoreSpec { name: of.scores, bias: true };
    let is_read = is_classifier(file)?;
    // Without scores, activations are pooled by the objective, and the head has no tensor.
    (model.head.tied, model.head.pooled) = (!is_read, !is_read);
    let pooler = if is_read { of.dense } else { of.pooler };
    let activation = Activation::Tanh;
    model.head.pooler = Some(PoolerSpec { mean: false, name: pooler, bias: true, activation, norm: None, is_read });
    model.folder.other_heads = of.others.to_vec();
    model.folder.ignored =
        ignored_dropout(file, &["hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"])?;
    let heads = HeadsSpec { qkv_bias: true, output_bias: true, both_directions: true, ..common.heads };
    let mlp = MlpSpec { bias: true, ..common.mlp };
    Ok(common.sequential(|_| [Heads(heads, None), Mlp(mlp)]))
}
