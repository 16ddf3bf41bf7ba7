//! The keys of `config.json` that shape layers, in all families. If a family ignores such a key, the user is told.

use crate::ConfigFile;
use crate::family::Family;
use serde_json::Value;

/// The keys that add parts to layers or change the computation of layers.
pub(super) const KEYS: &[&str] = &[
    "attention_bias",
    "attention_multiplier",
    "attn_logit_softcapping",
    "clip_qkv",
    "embedding_multiplier",
    "final_logit_softcapping",
    "kv_lora_rank",
    "layer_types",
    "logit_scale",
    "logits_scaling",
    "mlp_bias",
    "n_routed_experts",
    "n_shared_experts",
    "no_rope_layers",
    "num_experts",
    "num_local_experts",
    "q_lora_rank",
    "qkv_bias",
    "query_pre_attn_scalar",
    "residual_multiplier",
    "rope_local_base_freq",
    "shared_expert_intermediate_size",
    "sliding_window",
    "use_qk_norm",
];

/// Returns a sentence for each of [`KEYS`] that `file` sets and `family` does not know. `file` must have the defaults of the family.
pub(super) fn ignored(file: &ConfigFile, family: &Family) -> Vec<String> {
    let is_known =
        |key: &str| file.has_default(key) || family.aliases.iter().any(|(other, name)| *other == key || *name == key);
    let changes = |key: &str| file.values().get(key).is_some_and(|value| !changes_nothing(value));
    let unknown = KEYS.iter().filter(|key| !is_known(key) && changes(key));
    let sentence = |key: &&str| {
        let family = family.model_type;
        format!("`{key}` is ignored, as in transformers: models of the type `{family}` have no such key")
    };
    unknown.map(sentence).collect()
}

/// Returns whether a value turns off the part that its key adds.
fn changes_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        // 0 means no experts, and 1 is a neutral factor.
        Value::Number(number) => number.as_f64().is_some_and(|number| number == 0.0 || number == 1.0),
        Value::Array(types) => types.iter().all(|of_layer| of_layer == "full_attention"),
        _ => false,
    }
}
