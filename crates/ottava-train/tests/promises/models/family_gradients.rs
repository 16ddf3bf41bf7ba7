//! Compares the backward of whole decoders with central differences, for families with windows, soft caps, factors, or norms at other places.

use crate::step::gradients::{decoder, decoder_grad_check};
use serde_json::{Value, json};

/// Checks two small blocks of a family with `keys`.
fn check(model_type: &str, keys: Value) {
    let mut all = json!({
        "model_type": model_type, "vocab_size": 11, "hidden_size": 10, "intermediate_size": 13, "head_dim": 6,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 100.0, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8,
    });
    all.as_object_mut().expect("an object").extend(keys.as_object().expect("an object").clone());
    decoder_grad_check(model_type, || decoder(all));
}

/// The model has norms on both sides of sublayers with weights of one plus the stored weight, a scaled embedding tied to the head, both soft caps,
/// and a window shorter than the text.
#[test]
fn gemma2_backward_is_the_gradient() {
    let caps = json!({"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0});
    let mut keys = json!({"sliding_window": 3, "query_pre_attn_scalar": 5});
    keys.as_object_mut().unwrap().extend(caps.as_object().unwrap().clone());
    check("gemma2", keys);
}

#[test]
fn gemma3_backward_is_the_gradient() {
    check("gemma3_text", json!({"sliding_window": 3, "sliding_window_pattern": 2, "rope_local_base_freq": 10.0}));
}

/// Queries, keys and values are one tensor, and gate and up are one tensor. A part of each head is rotated, with scaled cosines.
#[test]
fn phi3_backward_is_the_gradient() {
    let scaling = json!({"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]});
    check(
        "phi3",
        json!({"rope_scaling": scaling, "original_max_position_embeddings": 4, "partial_rotary_factor": 0.7}),
    );
}

/// There are norms only after sublayers, and norms over all queries and over all keys.
#[test]
fn olmo2_backward_is_the_gradient() {
    check("olmo2", json!({}));
}

#[test]
fn granite_backward_is_the_gradient() {
    let factors = json!({
        "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.7, "logits_scaling": 1.7,
    });
    check("granite", factors);
}

/// Both blocks have experts, and a shared expert with a factor per token.
#[test]
fn qwen2_moe_backward_is_the_gradient() {
    let shared = json!({"moe_intermediate_size": 5, "shared_expert_intermediate_size": 7});
    let mut keys = json!({"num_experts": 4, "num_experts_per_tok": 3});
    keys.as_object_mut().unwrap().extend(shared.as_object().unwrap().clone());
    check("qwen2_moe", keys);
}

/// The weights of the chosen experts sum to one. The other block has an MLP.
#[test]
fn qwen3_moe_backward_is_the_gradient() {
    let mut keys =
        json!({"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 5, "norm_topk_prob": true});
    keys.as_object_mut().unwrap().extend(json!({"decoder_sparse_step": 2}).as_object().unwrap().clone());
    check("qwen3_moe", keys);
}

/// The model has attention sinks with a window, a bias of the router, biases of experts, and clamps that some gates and ups reach.
#[test]
fn gpt_oss_backward_is_the_gradient() {
    let keys = json!({
        "num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    });
    check("gpt_oss", keys);
}

/// Heads have two parts. Queries, and keys and values, come from latents. Experts are shared.
#[test]
fn deepseek_v2_backward_is_the_gradient() {
    let latent = json!({
        "q_lora_rank": 7, "kv_lora_rank": 9, "qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "v_head_dim": 3, "num_key_value_heads": 4,
    });
    let mut keys = json!({
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 5, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.7,
    });
    keys.as_object_mut().unwrap().extend(latent.as_object().unwrap().clone());
    check("deepseek_v2", keys);
}

/// Scores are sigmoids with a bias, in groups of experts.
#[test]
fn deepseek_v3_backward_is_the_gradient() {
    let latent = json!({
        "q_lora_rank": null, "kv_lora_rank": 9, "qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "v_head_dim": 3, "num_key_value_heads": 4,
    });
    let mut keys = json!({
        "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 5, "n_shared_experts": 1, "n_group": 3,
        "topk_group": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 0,
    });
    keys.as_object_mut().unwrap().extend(latent.as_object().unwrap().clone());
    check("deepseek_v3", keys);
}

/// Queries and keys are rotated before their norm.
#[test]
fn hunyuan_backward_is_the_gradient() {
    check("hunyuan_v1_dense", json!({}));
}

/// Queries grow with their position.
#[test]
fn ministral3_backward_is_the_gradient() {
    let growth = json!({"rope_theta": 100.0, "original_max_position_embeddings": 2, "llama_4_scaling_beta": 0.7});
    check("ministral3", json!({"rope_parameters": growth}));
}

/// Weights of choices multiply the inputs of experts. Queries and keys are rotated, then normalised without weights; in the other block they are not
/// rotated, and queries grow.
#[test]
fn llama4_backward_is_the_gradient() {
    let layers = json!({"moe_layers": [0], "no_rope_layers": [1, 0], "floor_scale": 2, "attn_scale": 0.7});
    let mut keys =
        json!({"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 5, "intermediate_size_mlp": 7});
    keys.as_object_mut().unwrap().extend(layers.as_object().unwrap().clone());
    check("llama4_text", keys);
}

/// The activation has no gate.
#[test]
fn arcee_backward_is_the_gradient() {
    check("arcee", json!({}));
}

/// The activation has no gate, and its factors are learned.
#[test]
fn apertus_backward_is_the_gradient() {
    let rope = json!({"rope_type": "default", "rope_theta": 100.0});
    check("apertus", json!({"rope_parameters": rope, "attention_bias": true}));
}

/// Attention and MLP read the same LayerNorm, which has a bias. Half of each head is rotated.
#[test]
fn stablelm_backward_is_the_gradient() {
    check(
        "stablelm",
        json!({"hidden_size": 16, "head_dim": 4, "partial_rotary_factor": 0.5, "use_parallel_residual": true}),
    );
}

/// Norms are on both sides of sublayers, and half of each head is rotated.
#[test]
fn glm4_backward_is_the_gradient() {
    check("glm4", json!({"head_dim": 8, "hidden_size": 12}));
}

/// Both blocks have experts and a shared expert. Heads are normalised, and half of each head is rotated.
#[test]
fn glm4_moe_backward_is_the_gradient() {
    let keys = json!({
        "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 5, "first_k_dense_replace": 0,
        "use_qk_norm": true, "attention_bias": true,
    });
    check("glm4_moe", keys);
}

/// The blocks have rotary positions with different bases, and one block has a window.
#[test]
fn olmo3_backward_is_the_gradient() {
    let types = json!(["sliding_attention", "full_attention"]);
    let ropes = json!({"full_attention": {"rope_theta": 50.0}, "sliding_attention": {"rope_theta": 10.0}});
    check("olmo3", json!({"sliding_window": 3, "layer_types": types, "rope_parameters": ropes}));
}

/// A gated delta net with an MLP, then attention with a gated output and experts. Two value heads share a key head, and values are larger than keys.
#[test]
fn qwen3_next_backward_is_the_gradient() {
    let delta = json!({
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 11,
        "layer_types": ["linear_attention", "full_attention"],
    });
    let mut keys = json!({
        "head_dim": 8, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 5, "shared_expert_intermediate_size": 7,
        "mlp_only_layers": [0], "attention_bias": true,
    });
    keys.as_object_mut().unwrap().extend(delta.as_object().unwrap().clone());
    check("qwen3_next", keys);
}

/// Attention, then a gated delta net with flat projections and a short convolution.
#[test]
fn qwen3_5_backward_is_the_gradient() {
    let keys = json!({
        "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 9,
        "linear_value_head_dim": 6, "linear_conv_kernel_dim": 2, "layer_types": ["full_attention", "linear_attention"],
    });
    check("qwen3_5_text", keys);
}

/// A gated delta net, then attention, each with experts and a shared expert.
#[test]
fn qwen3_5_moe_backward_is_the_gradient() {
    let delta = json!({
        "head_dim": 8, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 9,
        "linear_value_head_dim": 6, "full_attention_interval": 2,
    });
    let mut keys = json!({
        "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 5, "shared_expert_intermediate_size": 7,
    });
    keys.as_object_mut().unwrap().extend(delta.as_object().unwrap().clone());
    check("qwen3_5_moe_text", keys);
}

/// Scores are sigmoids, and the vector for the choice is in the mixture.
#[test]
fn minimax_m2_backward_is_the_gradient() {
    check("minimax_m2", json!({"rotary_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2}));
}

#[test]
fn smollm3_backward_is_the_gradient() {
    check("smollm3", json!({"no_rope_layer_interval": 2}));
}

/// Attention and MLP read the input of their block, each through its own norm.
#[test]
fn gpt_neox_backward_is_the_gradient() {
    check("gpt_neox", json!({"hidden_size": 16, "rotary_pct": 0.5}));
}

/// An MLP beside the experts has a tensor for gate and up, and so have the experts.
#[test]
fn granite_moe_backward_is_the_gradient() {
    let keys = json!({
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 7, "residual_multiplier": 0.3,
    });
    check("granitemoeshared", keys);
}

/// Each head has a norm of its own, and attention and MLP read one norm.
#[test]
fn stablelm_with_norms_of_heads_backward_is_the_gradient() {
    let keys = json!({
        "hidden_size": 16, "head_dim": 4, "partial_rotary_factor": 0.5, "use_parallel_residual": true, "qk_layernorm": true,
    });
    check("stablelm", keys);
}

/// Returns the keys of Mamba-2 layers with two groups of two heads, and with limits that some time steps reach. The norm after a short state would
/// amplify the errors of differences without a larger `eps`.
fn mamba_keys() -> Value {
    json!({
        "rms_norm_eps": 0.01,
        "mamba_n_heads": 4, "mamba_d_head": 5, "mamba_n_groups": 2, "mamba_d_state": 3, "mamba_d_conv": 3, "mamba_expand": 2,
        "time_step_limit": [0.5, 2.0],
    })
}

fn with(mut keys: Value, more: Value) -> Value {
    keys.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    keys
}

#[test]
fn bamba_backward_is_the_gradient() {
    let keys = json!({"head_dim": 8, "attn_layer_indices": [1], "mamba_proj_bias": true});
    check("bamba", with(mamba_keys(), keys));
}

#[test]
fn granite_moe_hybrid_backward_is_the_gradient() {
    let keys = json!({
        "layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 7,
        "residual_multiplier": 0.3, "mamba_conv_bias": false,
    });
    check("granitemoehybrid", with(mamba_keys(), keys));
}

/// A state space and attention read one norm, and all parts have factors. The gate of the state space has a norm before it, after it, or none.
#[test]
fn falcon_h1_backward_is_the_gradient() {
    let factors = json!({
        "attention_in_multiplier": 1.1, "attention_out_multiplier": 0.7, "embedding_multiplier": 3.0, "key_multiplier": 0.6,
        "lm_head_multiplier": 0.5, "mlp_multipliers": [0.8, 1.3], "ssm_in_multiplier": 1.2, "ssm_multipliers": [0.7, 1.2, 0.9, 1.4, 0.8],
        "ssm_out_multiplier": 0.6, "mamba_d_ssm": 20,
    });
    for norm in [
        json!({"mamba_rms_norm": false}),
        json!({"mamba_rms_norm": true, "mamba_norm_before_gate": true, "num_hidden_layers": 1}),
        json!({"mamba_rms_norm": true, "mamba_norm_before_gate": false, "num_hidden_layers": 1}),
    ] {
        check("falcon_h1", with(with(mamba_keys(), factors.clone()), norm));
    }
}

/// Experts of one layer read a latent.
#[test]
fn nemotron_h_backward_is_the_gradient() {
    let mamba = json!({
        "rms_norm_eps": 0.01, "mamba_num_heads": 4, "mamba_head_dim": 5, "n_groups": 2, "ssm_state_size": 3, "hybrid_override_pattern": "ME*-", "num_hidden_layers": 4,
    });
    let experts = json!({
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 5, "moe_latent_size": 6,
        "moe_shared_expert_intermediate_size": 7, "routed_scaling_factor": 2.5,
    });
    check("nemotron_h", with(mamba, experts));
}

/// Heads have two sizes. Values are the projected keys, or the last layer reads the keys and values of the first layer; two layers have experts beside
/// an MLP. All layers have an embedding for each token. The norm after a small product with this embedding would amplify the errors of differences
/// without a larger `eps`, and so would the large scores of large heads, which have no factor.
#[test]
fn gemma4_backward_is_the_gradient() {
    let rope = json!({
        "full_attention": {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
    });
    let keys = json!({
        "rms_norm_eps": 1.0, "head_dim": 2, "global_head_dim": 4, "rope_parameters": rope, "sliding_window": 3, "hidden_size_per_layer_input": 3, "vocab_size_per_layer_input": 12, "final_logit_softcapping": 2.0,
    });
    let experts = json!({
        "enable_moe_block": true, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 5, "attention_k_eq_v": true,
        "layer_types": ["sliding_attention", "full_attention"], "num_global_key_value_heads": 1,
    });
    let shared = json!({
        "num_hidden_layers": 3, "num_kv_shared_layers": 1, "use_double_wide_mlp": true,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    });
    check("gemma4_text", with(keys.clone(), experts));
    check("gemma4_text", with(keys, shared));
}
