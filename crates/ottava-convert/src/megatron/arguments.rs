//! The arguments of Megatron-LM that affect a model's computation, as data: the required value of each, or the equivalent key of `config.json`.
//!
//! Names and defaults are from `megatron/training/arguments.py` and from the fields of `TransformerConfig`, which newer versions accept as arguments.
//! If a name has changed, both names are listed.

use ottava_models::{DecoderConfig, LayerSpec, RopeKind};
use ottava_tensor::ops::Activation;
use serde_json::{Value, json};

/// A requirement on an argument of a checkpoint.
pub struct Rule {
    /// The name of the argument, and its names in other versions.
    pub names: &'static [&'static str],
    /// The condition under which the argument has an effect.
    pub when: When,
    /// The required value.
    pub must: Must,
}

/// The condition under which an argument has an effect.
pub enum When {
    Always,
    /// If this flag is set.
    With(&'static str),
    /// If this flag is not set.
    Without(&'static str),
}

/// The required value of an argument.
pub enum Must {
    /// One of these JSON values. A checkpoint without the argument is accepted.
    Be(&'static [&'static str]),
    /// This JSON value. A checkpoint without the argument is refused.
    State(&'static str),
    /// The value that this key of `config.json` implies.
    Equal(&'static str, fn(&DecoderConfig) -> Value),
    /// At most the value that this key of `config.json` implies.
    AtMost(&'static str, fn(&DecoderConfig) -> Value),
}

use Must::{AtMost, Be, Equal, State};
use When::{Always, With, Without};

const OFF: &[&str] = &["null", "false"];
const NONE: &[&str] = &["null"];

const fn rule(names: &'static [&'static str], must: Must) -> Rule {
    Rule { names, when: Always, must }
}

const fn off(names: &'static [&'static str]) -> Rule {
    rule(names, Be(OFF))
}

/// All arguments that are compared.
pub const RULES: &[Rule] = &[
    // Sizes.
    rule(&["num_layers"], Equal("num_hidden_layers", |sizes| json!(sizes.layers.len()))),
    rule(&["hidden_size"], Equal("hidden_size", |sizes| json!(sizes.stream.channels))),
    rule(&["ffn_hidden_size"], Equal("intermediate_size", |sizes| json!(sizes.mlp().map(|mlp| mlp.hidden)))),
    rule(&["num_attention_heads"], Equal("num_attention_heads", |sizes| json!(sizes.heads().map(|heads| heads.heads)))),
    Rule {
        names: &["num_query_groups"],
        when: With("group_query_attention"),
        must: Equal("num_key_value_heads", |sizes| json!(sizes.heads().map(|heads| heads.kv_heads))),
    },
    Rule {
        names: &["num_attention_heads"],
        when: Without("group_query_attention"),
        must: Equal("num_key_value_heads", |sizes| json!(sizes.heads().map(|heads| heads.kv_heads))),
    },
    rule(&["kv_channels"], Equal("head_dim", |sizes| json!(sizes.heads().map(|heads| heads.head_dim)))),
    rule(&["vocab_size"], AtMost("vocab_size", |sizes| json!(sizes.vocabulary))),
    rule(
        &["untie_embeddings_and_output_weights"],
        Equal("tie_word_embeddings (negated)", |sizes| json!(!sizes.head.tied)),
    ),
    // Norms and biases.
    rule(&["normalization"], State("\"RMSNorm\"")),
    rule(&["norm_epsilon", "layernorm_epsilon"], Equal("rms_norm_eps", |sizes| json!(sizes.stream.norm.eps))),
    off(&["apply_layernorm_1p", "layernorm_zero_centered_gamma"]),
    off(&["apply_residual_connection_post_layernorm"]),
    rule(
        &["qk_layernorm"],
        Equal("architectures (QK-norm)", |sizes| json!(sizes.heads().is_some_and(|heads| heads.qk_norm.is_some()))),
    ),
    off(&["qk_l2_norm"]),
    off(&["add_bias_linear"]),
    rule(
        &["add_qkv_bias"],
        Equal("architectures or attention_bias", |sizes| json!(sizes.heads().is_some_and(|heads| heads.qkv_bias))),
    ),
    // The MLP.
    rule(&["swiglu"], State("true")),
    rule(
        &["swiglu"],
        Equal("hidden_act (silu)", |sizes| json!(sizes.mlp().map(|mlp| mlp.activation) == Some(Activation::SwiGlu))),
    ),
    off(&["squared_relu"]),
    off(&["quick_geglu"]),
    off(&["openai_gelu"]),
    rule(&["glu_linear_offset"], Be(&["null", "0.0", "0"])),
    rule(&["activation_func_clamp_value"], Be(NONE)),
    rule(&["num_experts", "num_moe_experts"], Be(&["null", "0"])),
    // Positions.
    rule(&["position_embedding_type"], State("\"rope\"")),
    rule(&["rope_type"], Be(&["null", "\"rope\""])),
    rule(&["rotary_base"], Equal("rope_theta", |sizes| json!(sizes.rope().map(|rope| rope.theta)))),
    rule(&["rotary_percent"], Be(&["null", "1.0", "1"])),
    rule(
        &["rotary_seq_len_interpolation_factor"],
        Equal("rope_scaling (linear)", |sizes| match sizes.rope().map(|rope| &rope.kind) {
            Some(RopeKind::Linear { factor }) => json!(factor),
            _ => Value::Null,
        }),
    ),
    rule(
        &["use_rope_scaling"],
        Equal("rope_scaling (llama3, factors 1 and 4, 8192 positions)", |sizes| {
            json!(
                matches!(sizes.rope().map(|rope| &rope.kind), Some(RopeKind::Llama3 { low_freq_factor, high_freq_factor, original_max_positions, .. })
            if [*low_freq_factor, *high_freq_factor, *original_max_positions] == [1.0, 4.0, 8192.0])
            )
        }),
    ),
    Rule {
        names: &["rope_scaling_factor"],
        when: With("use_rope_scaling"),
        must: Equal("rope_scaling.factor", |sizes| match sizes.rope().map(|rope| &rope.kind) {
            Some(RopeKind::Llama3 { factor, .. }) => json!(factor),
            _ => Value::Null,
        }),
    },
    rule(&["no_rope_freq"], Be(NONE)),
    rule(&["mrope_section"], Be(NONE)),
    // Attention.
    rule(
        &["window_size"],
        Equal("sliding_window (one more than the left side)", |sizes| {
            match sizes.layers.first().and_then(LayerSpec::window) {
                Some(window) => json!([window.saturating_sub(1), 0]),
                None => Value::Null,
            }
        }),
    ),
    rule(&["window_attn_skip_freq"], Be(NONE)),
    rule(&["softmax_scale"], Be(NONE)),
    rule(&["softmax_type"], Be(&["null", "\"vanilla\""])),
    off(&["multi_latent_attention"]),
    off(&["attention_output_gate"]),
    rule(&["experimental_attention_variant"], Be(NONE)),
    rule(&["linear_attention_freq", "linear_attention_type"], Be(NONE)),
    // Other models.
    rule(&["mtp_num_layers"], Be(&["null", "0"])),
    off(&["use_mup"]),
    off(&["enable_mhc_connections", "enable_hyper_connections"]),
    off(&["is_hybrid_model"]),
    rule(&["hybrid_layer_pattern"], Be(NONE)),
    rule(&["hybrid_override_pattern"], Be(NONE)),
    rule(&["hybrid_attention_ratio", "hybrid_mlp_ratio"], Be(&["null", "0.0", "0"])),
    rule(&["heterogeneous_layers_config_path"], Be(NONE)),
    rule(&["heterogeneous_layers_config_encoded_json"], Be(NONE)),
    rule(&["spec"], Be(&["null", "[\"local\"]", "\"local\""])),
    off(&["retro_add_retriever"]),
    off(&["use_legacy_models"]),
];

/// Arguments that are taken into account when weights are read.
pub const FOLLOWED: &[&str] = &["rotary_interleaved", "group_query_attention"];

/// Words in the names of arguments that may affect the model's computation. Arguments without such words, such as arguments of data and optimizers,
/// are ignored.
pub const MODEL_WORDS: &[&str] = &[
    "rope",
    "rotary",
    "yarn",
    "position",
    "attention",
    "attn",
    "head",
    "qk",
    "query",
    "softcap",
    "kv",
    "norm",
    "layers",
    "mlp",
    "ffn",
    "glu",
    "gelu",
    "relu",
    "silu",
    "activation",
    "embed",
    "logit",
    "softmax",
    "window",
    "bias",
    "expert",
    "moe",
    "mla",
    "lora",
    "mtp",
    "mamba",
    "hybrid",
    "residual",
    "multiplier",
    "scale",
    "scaling",
    "hidden",
    "share",
    "tie_",
    "variant",
    "sink",
    "linear",
    "_gate",
];

/// Arguments with such words that affect how a model is trained, run or stored, but not what it computes; and arguments that have no effect because
/// of one of [`RULES`].
pub const OTHER: &[&str] = &[
    "account_for_embedding_in_pipeline_split",
    "activation_func_fp8_input_store",
    "activation_offload_fraction",
    "add_position_embedding",
    "apply_query_key_layer_scaling",
    "apply_rope_fusion",
    "apply_wd_to_qk_layernorm",
    "attention_backend",
    "attention_dropout",
    "attention_softmax_in_fp32",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "bias_gelu_fusion",
    "bias_swiglu_fusion",
    "checkpoint_activations",
    "clone_scatter_output_in_embedding",
    "create_attention_mask_in_dataloader",
    "decoder_num_layers",
    "defer_embedding_wgrad_compute",
    "distribute_saved_activations",
    "embedding_init_method_std",
    "embedding_path",
    "encoder_num_layers",
    "fine_grained_activation_offloading",
    "first_last_layers_bf16",
    "fp32_residual_connection",
    "freeze_all_layers",
    "fused_residual_rmsnorm",
    "fused_single_qkv_rope",
    "gated_linear_unit",
    "head_lr_mult",
    "hidden_dropout",
    "hybrid_context_parallel",
    "initial_loss_scale",
    "log_loss_scale_to_tensorboard",
    "log_max_attention_logit",
    "loss_scale",
    "loss_scale_window",
    "masked_softmax_fusion",
    "max_position_embeddings",
    "memory_efficient_layer_norm",
    "min_loss_scale",
    "mscale",
    "num_microbatches_with_partial_activation_checkpoints",
    "original_max_position_embeddings",
    "output_bert_embeddings",
    "persist_layer_norm",
    "relative_attention_max_distance",
    "relative_attention_num_buckets",
    "reset_attention_mask",
    "reset_position_ids",
    "retriever_score_scaling",
    "rotary_scaling_factor",
    "scaled_init_method_std",
    "tp_comm_overlap_disable_qkv",
    "use_flash_attn",
    "use_fused_weighted_squared_relu",
    "use_rotary_position_embeddings",
    "v_head_dim",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
];

/// The beginnings of names of such arguments: arguments of experts, latent attention, state spaces and other models that [`RULES`] refuse, of other
/// programs of the repository, and of running a model.
pub const OTHER_BEGINNINGS: &[&str] = &[
    "batch_",
    "bert_",
    "biencoder_",
    "cp_",
    "cpu_offloading",
    "cuda_graph_",
    "dino_",
    "dsa_",
    "ep_",
    "expert_",
    "flash_",
    "fp8_",
    "fp4_",
    "gtp_",
    "ict_",
    "inference_",
    "kitchen_",
    "kv_lora",
    "linear_conv_",
    "linear_key_",
    "linear_num_",
    "linear_value_",
    "logits_load_",
    "logits_save_",
    "logit_dtype",
    "mamba_",
    "mhc_",
    "mla_",
    "mlp_chunks_",
    "moe_",
    "mscale_",
    "mtp_",
    "mup_",
    "muon_",
    "no_",
    "num_layers_",
    "overlap_",
    "q_lora",
    "qk_clip",
    "qk_head",
    "qk_pos",
    "query_in_",
    "retro_",
    "rl_",
    "use_grouped_",
    "use_inference_",
    "use_kitchen",
    "use_mamba_",
    "use_te_",
    "vision_",
    "yarn_",
    "offload_",
    "recompute_",
    "heterogeneous_block_specs",
    "cache_mla",
];
