"""Generated `config.json` files of tiny models: what the suite of transformers varies, by family."""

import random

MISSING = object()  # the key is left out

# Each case of `ROPE`, `KEYS` or `OWN` is a set of keys that replaces those of the family.
TINY = dict(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rope_theta=100.0,
    tie_word_embeddings=False,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
LATENT = TINY | dict(num_key_value_heads=4, kv_lora_rank=12, q_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
LATENT |= dict(
    routed_scaling_factor=1.5, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=12, n_shared_experts=1, first_k_dense_replace=1
)
GEMMA = TINY | dict(head_dim=8, query_pre_attn_scalar=6, sliding_window=5, tie_word_embeddings=True)
EXPERTS = TINY | dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=12)
GPT2 = dict(vocab_size=40, n_embd=16, n_inner=24, n_layer=2, n_head=4, n_positions=40, bos_token_id=None, eos_token_id=None)

# By `model_type`: the architecture, and the keys that a case starts with.
FAMILIES = {
    "llama": ("LlamaForCausalLM", TINY),
    "mistral": ("MistralForCausalLM", TINY | dict(sliding_window=5)),
    "qwen2": ("Qwen2ForCausalLM", TINY),
    "qwen3": ("Qwen3ForCausalLM", TINY | dict(head_dim=8)),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "cohere": ("CohereForCausalLM", TINY | dict(logit_scale=0.3, tie_word_embeddings=True)),
    "gemma2": ("Gemma2ForCausalLM", GEMMA | dict(attn_logit_softcapping=1.5, final_logit_softcapping=2.0)),
    "gemma3_text": ("Gemma3ForCausalLM", GEMMA | dict(num_hidden_layers=3, sliding_window_pattern=3)),
    "phi3": ("Phi3ForCausalLM", TINY),
    "olmo2": ("Olmo2ForCausalLM", TINY),
    "granite": ("GraniteForCausalLM", TINY | dict(attention_multiplier=0.5, residual_multiplier=0.4)),
    "smollm3": ("SmolLM3ForCausalLM", TINY | dict(num_hidden_layers=3, no_rope_layer_interval=2)),
    "mixtral": ("MixtralForCausalLM", TINY | dict(num_local_experts=4, num_experts_per_tok=2)),
    "qwen2_moe": ("Qwen2MoeForCausalLM", EXPERTS | dict(shared_expert_intermediate_size=20)),
    "qwen3_moe": ("Qwen3MoeForCausalLM", EXPERTS | dict(head_dim=8)),
    "olmoe": ("OlmoeForCausalLM", EXPERTS),
    "deepseek_v2": ("DeepseekV2ForCausalLM", LATENT | dict(n_group=4, topk_group=2)),
    "deepseek_v3": ("DeepseekV3ForCausalLM", LATENT | dict(n_group=4, topk_group=2)),
    "gpt_oss": ("GptOssForCausalLM", TINY | dict(head_dim=8, num_local_experts=5, num_experts_per_tok=3, sliding_window=5)),
}

YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)


def long_rope(half):
    """LongRoPE of heads of `2 * half` rotated elements."""
    short, long = [1.0 + 0.25 * i for i in range(half)], [2.0 + 0.75 * i for i in range(half)]
    return dict(rope_type="longrope", short_factor=short, long_factor=long, original_max_position_embeddings=16)


def scalings(half):
    """Objects that `rope_scaling` and `rope_parameters` may be, with heads of `2 * half` rotated elements."""
    long = long_rope(half)
    scalings = [
        dict(rope_type="default"),
        dict(type="default"),
        dict(rope_type="linear", factor=4.0),
        dict(type="linear", factor=2),
        dict(rope_type="linear", factor=0.5),
        dict(rope_type="linear", factor=1.0),
        dict(rope_type="linear", type="dynamic", factor=2.0),
        dict(type="linear", rope_type="default", factor=2.0),
        dict(rope_type="dynamic", factor=3.0),
        dict(type="dynamic", factor=2.0, original_max_position_embeddings=8),
        dict(rope_type="dynamic", factor=2.0, alpha=1000.0),
        YARN,
        dict(YARN, type="yarn", rope_type=MISSING),
        dict(YARN, original_max_position_embeddings=MISSING),
        dict(YARN, factor=1.0),
        dict(YARN, factor=MISSING),
        dict(YARN, factor=8),
        dict(YARN, attention_factor=1.3),
        dict(YARN, attention_factor=0.0),
        dict(YARN, attention_factor=None),
        dict(YARN, mscale=1.3, mscale_all_dim=0.7),
        dict(YARN, mscale=0.7),
        dict(YARN, mscale_all_dim=0.7),
        dict(YARN, mscale=0, mscale_all_dim=0),
        dict(YARN, mscale=0.7, mscale_all_dim=0),
        dict(YARN, mscale=1.0, mscale_all_dim=1.0),
        dict(YARN, truncate=False),
        dict(YARN, beta_fast=4, beta_slow=2),
        dict(YARN, beta_fast=None, beta_slow=None),
        dict(YARN, beta_fast=0, beta_slow=0),
        dict(YARN, finetuned=True),
        LLAMA3,
        dict(LLAMA3, original_max_position_embeddings=MISSING),
        dict(LLAMA3, low_freq_factor=2.0, high_freq_factor=2.5),
        dict(LLAMA3, high_freq_factor=MISSING),
        dict(LLAMA3, factor=1),
        long,
        dict(long, type="longrope", rope_type=MISSING),
        dict(long, type="su", rope_type=MISSING),
        dict(long, original_max_position_embeddings=32),
        dict(long, original_max_position_embeddings=MISSING),
        dict(long, attention_factor=1.4),
        dict(long, factor=3.0),
        dict(long, factor=3.0, original_max_position_embeddings=MISSING),
        dict(long, short_mscale=1.2, long_mscale=1.3),
        dict(long, short_factor=[1.0]),
        dict(rope_type="proportional"),
        dict(rope_type="ntk", factor=2.0),
        dict(type="mrope", mrope_section=[1, 1]),
        dict(factor=2.0),
        {},
    ]
    return [{k: v for k, v in scaling.items() if v is not MISSING} for scaling in scalings]


def ropes(half):
    """Sets of keys for rotary positions, in both spellings."""
    cases = [dict(rope_theta=theta) for theta in (MISSING, None, 1000, 50.5)]
    cases += [dict(rope_parameters=None), dict(rope_scaling=None), dict(rope_scaling=None, rope_parameters=None)]
    for scaling in scalings(half):
        cases.append(dict(rope_scaling=scaling))
        cases.append(dict(rope_parameters=scaling | dict(rope_theta=200.0), rope_theta=MISSING))
        cases.append(dict(rope_parameters=scaling | dict(rope_theta=200.0)))
        cases.append(dict(rope_parameters=scaling))
    plain, linear = dict(rope_type="default", rope_theta=30.0), dict(rope_type="linear", factor=4.0)
    cases += [dict(rope_parameters=a, rope_scaling=b) for a, b in [(plain, YARN), (plain, linear), (YARN, linear), (linear, None), (plain, {})]]
    cases += [dict(rope_parameters=linear | dict(rope_theta=30.0), rope_scaling=linear), dict(rope_parameters={}, rope_scaling=linear)]
    cases += [dict(rope_scaling=linear | dict(rope_theta=30.0)), dict(rope_scaling=linear | dict(partial_rotary_factor=0.5))]
    cases += [dict(rope_parameters=plain | dict(partial_rotary_factor=0.5))]
    cases += [dict(partial_rotary_factor=0.5), dict(partial_rotary_factor=1.0), dict(partial_rotary_factor=0.5, rope_scaling=linear)]
    for scaling in (YARN, LLAMA3, long_rope(half)):
        inside = {k: v for k, v in scaling.items() if k != "original_max_position_embeddings"}
        cases += [dict(original_max_position_embeddings=32, rope_scaling=s) for s in (scaling, inside)]
        cases += [dict(original_max_position_embeddings=8, rope_parameters=s) for s in (scaling, inside)]
        cases += [dict(rope_scaling=scaling, max_position_embeddings=n) for n in (MISSING, 24, 128)]
    layers = dict(full_attention=linear | dict(rope_theta=300.0), sliding_attention=plain)
    cases += [dict(rope_parameters=layers), dict(rope_parameters=dict(full_attention=plain)), dict(rope_parameters=dict(layers, rope_theta=9.0))]
    cases += [
        dict(rope_parameters=layers, rope_scaling=linear),
        dict(rope_local_base_freq=20.0),
        dict(rope_local_base_freq=20.0, rope_scaling=linear),
    ]
    return cases


# Keys of any family, many of them without effect there.
KEYS = [
    dict(head_dim=None),
    dict(head_dim=6),
    dict(head_dim=MISSING),
    dict(num_key_value_heads=None),
    dict(num_key_value_heads=MISSING),
    dict(num_key_value_heads=1),
    dict(num_key_value_heads=4),
    dict(tie_word_embeddings=True),
    dict(tie_word_embeddings=False),
    dict(tie_word_embeddings=None),
    dict(tie_word_embeddings=MISSING),
    dict(rms_norm_eps=0.1),
    dict(rms_norm_eps=MISSING),
    dict(rms_norm_eps=None),
    dict(layer_norm_eps=0.1),
    dict(layer_norm_epsilon=0.1),
    dict(norm_epsilon=0.1),
    dict(attention_bias=True),
    dict(attention_bias=False),
    dict(attention_bias=None),
    dict(mlp_bias=True),
    dict(mlp_bias=False),
    dict(use_bias=True),
    dict(bias=True),
    dict(qkv_bias=True),
    dict(qkv_bias=False),
    dict(hidden_act="gelu"),
    dict(hidden_act="gelu_pytorch_tanh"),
    dict(hidden_act="gelu_new"),
    dict(hidden_act="gelu_fast"),
    dict(hidden_act="silu"),
    dict(hidden_act="swish"),
    dict(hidden_act="relu"),
    dict(hidden_act="quick_gelu"),
    dict(hidden_act=None),
    dict(hidden_activation="gelu"),
    dict(hidden_activation=None),
    dict(activation_function="relu"),
    dict(attention_dropout=0.1),
    dict(resid_pdrop=0.1),
    dict(embd_pdrop=0.1),
    dict(hidden_dropout=0.1),
    dict(residual_dropout=0.1),
    dict(dropout=0.1),
    dict(sliding_window=3),
    dict(sliding_window=None),
    dict(sliding_window=MISSING),
    dict(sliding_window=0),
    dict(use_sliding_window=True),
    dict(use_sliding_window=True, sliding_window=4, max_window_layers=1),
    dict(use_sliding_window=True, sliding_window=4, max_window_layers=0),
    dict(use_sliding_window=False, sliding_window=4),
    dict(sliding_window=4, layer_types="first"),
    dict(sliding_window=4, layer_types="last"),
    dict(sliding_window=4, layer_types="all"),
    dict(sliding_window=4, layer_types="none"),
    dict(sliding_window=4, layer_types="chunked"),
    dict(layer_types=None),
    dict(layer_types="short"),
    dict(use_sliding_window=True, sliding_window=4, layer_types="first"),
    dict(attention_chunk_size=4),
    dict(max_window_layers=1),
    dict(max_position_embeddings=MISSING),
    dict(max_position_embeddings=24),
    dict(attn_logit_softcapping=1.0),
    dict(final_logit_softcapping=1.0),
    dict(attn_logit_softcapping=None),
    dict(query_pre_attn_scalar=2),
    dict(logit_scale=0.5),
    dict(logits_scaling=2.0),
    dict(attention_multiplier=0.3),
    dict(embedding_multiplier=3.0),
    dict(residual_multiplier=0.3),
    dict(use_qk_norm=True),
    dict(qk_norm=True),
    dict(qk_layernorm=True),
    dict(no_rope_layers=[1, 0, 1]),
    dict(no_rope_layers=[0, 0, 1]),
    dict(no_rope_layer_interval=2),
    dict(norm_topk_prob=True),
    dict(norm_topk_prob=False),
    dict(router_jitter_noise=0.1),
    dict(output_router_logits=True),
    dict(router_aux_loss_coef=0.5),
    dict(num_experts=3),
    dict(num_local_experts=3),
    dict(clip_qkv=0.3),
    dict(clip_qkv=None),
    dict(rope_interleave=False),
    dict(use_bidirectional_attention=True),
    dict(swiglu_limit=1.0),
    dict(routed_scaling_factor=1.7),
    dict(scoring_func="softmax"),
    dict(topk_method="greedy"),
    dict(n_group=2, topk_group=1),
    dict(first_k_dense_replace=0),
    dict(decoder_sparse_step=2),
    dict(mlp_only_layers=[0]),
    dict(pretraining_tp=2),
    dict(torch_dtype="bfloat16"),
    dict(dtype="float16"),
    dict(use_cache=False),
    dict(initializer_range=0.5),
    dict(transformers_version="4.31.0"),
    dict(_name_or_path="x/y"),
    dict(unknown_key={"a": [1]}),
    dict(_attn_implementation="eager"),
    dict(attn_implementation="sdpa"),
    dict(is_decoder=True),
    dict(id2label={"0": "a", "1": "b"}, label2id={"a": 0, "b": 1}),
    dict(output_attentions=True),
    dict(output_hidden_states=True),
    dict(return_dict=False),
    dict(chunk_size_feed_forward=4),
    dict(quantization_config=None),
    dict(torchscript=True),
    dict(vocab_size=48),
    dict(bos_token_id=1, eos_token_id=[0, 2], pad_token_id=3),
    dict(eos_token_id=7),
    dict(task_specific_params={}),
    dict(architectures=MISSING),
    dict(architectures=None),
    dict(architectures=[]),
    dict(architectures=["LlamaForCausalLM"]),
    dict(architectures=["Qwen2ForCausalLM"]),
    dict(architectures=["MistralForCausalLM"]),
    dict(architectures=["MyForCausalLM"]),
    dict(model_type=MISSING),
    dict(num_nextn_predict_layers=0),
    dict(multi_query=True),
    dict(parallel_attn=True),
    dict(alibi=True),
    dict(new_decoder_architecture=True),
    dict(scale_attn_weights=False),
    dict(scale_attn_by_inverse_layer_idx=True),
    dict(reorder_and_upcast_attn=True),
    dict(add_cross_attention=True),
    dict(use_mrope=True),
    dict(shared_kv_layers=1),
    dict(partial_rotary_factor=0.25),
    dict(head_dim=8, num_key_value_heads=1),
    dict(num_hidden_layers=3),
]

# Keys that matter to one family, in `OWN`.
WINDOWS = [dict(sliding_window_pattern=p) for p in (1, 2, MISSING, None)] + [
    dict(layer_types="first"),
    dict(layer_types="last"),
    dict(sliding_window=MISSING),
]
ROUTED = [dict(norm_topk_prob=n) for n in (True, False, MISSING, None)] + [
    dict(decoder_sparse_step=2, num_hidden_layers=4),
    dict(mlp_only_layers=[1]),
    dict(num_experts_per_tok=1),
]
ROUTED += [
    dict(num_experts_per_tok=MISSING),
    dict(num_experts=MISSING, num_local_experts=4),
    dict(num_experts=4, num_local_experts=4),
    dict(mlp_only_layers=None),
]
DEEPSEEK = [
    dict(q_lora_rank=None),
    dict(q_lora_rank=MISSING),
    dict(norm_topk_prob=True),
    dict(norm_topk_prob=False),
    dict(n_shared_experts=2),
    dict(n_shared_experts=MISSING),
]
DEEPSEEK += (
    [dict(first_k_dense_replace=n) for n in (0, 2, MISSING)]
    + [dict(routed_scaling_factor=s) for s in (0.5, 2, MISSING)]
    + [dict(attention_bias=True)]
)
DEEPSEEK += [dict(topk_method=m) for m in ("greedy", "group_limited_greedy", "noaux_tc")] + [
    dict(n_group=MISSING, topk_group=MISSING),
    dict(n_group=1, topk_group=1),
]
DEEPSEEK += [
    dict(scoring_func="softmax"),
    dict(scoring_func="sigmoid"),
    dict(rope_interleave=True),
    dict(rope_interleave=False),
    dict(n_group=2, topk_group=1),
]
DEEPSEEK += [
    dict(moe_layer_freq=2),
    dict(seq_aux=True),
    dict(ep_size=2),
    dict(aux_loss_alpha=0.1),
    dict(num_nextn_predict_layers=1),
    dict(mlp_bias=True),
]
DEEPSEEK += [
    dict(num_key_value_heads=2),
    dict(qk_rope_head_dim=MISSING),
    dict(v_head_dim=8),
    dict(head_dim=4),
    dict(head_dim=10),
    dict(n_routed_experts=MISSING, num_experts=8),
]
DEEPSEEK += [dict(rope_scaling=dict(YARN, mscale=a, mscale_all_dim=b)) for a, b in ((0.7, 0.8), (1.0, 1.0), (0, 0), (0.7, 0))]
DEEPSEEK += [
    dict(rope_scaling=dict(rope_type="linear", factor=4.0, mscale_all_dim=0.8)),
    dict(rope_scaling=dict(YARN, mscale_all_dim=0.8)),
    dict(rope_scaling=dict(YARN, mscale=0.8)),
]
DEEPSEEK += [
    dict(rope_parameters=dict(YARN, rope_theta=100.0, mscale=0.7, mscale_all_dim=0.8)),
    dict(rope_scaling=dict(rope_type="default", mscale_all_dim=0.8, factor=4.0)),
]
OWN = {
    "mistral": [dict(sliding_window=w) for w in (None, MISSING, 3, 100)] + [dict(layer_types="first"), dict(layer_types="all"), dict(head_dim=8)],
    "gpt2": [
        dict(n_inner=None),
        dict(n_inner=MISSING),
        dict(activation_function="gelu"),
        dict(activation_function="gelu_new"),
        dict(activation_function="relu"),
    ]
    + [
        dict(activation_function="gelu_pytorch_tanh"),
        dict(activation_function="gelu_fast"),
        dict(activation_function="silu"),
        dict(activation_function=MISSING),
        dict(layer_norm_epsilon=0.01),
    ]
    + [
        dict(attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1),
        dict(scale_attn_weights=False),
        dict(scale_attn_by_inverse_layer_idx=True),
        dict(reorder_and_upcast_attn=True),
    ]
    + [dict(tie_word_embeddings=t) for t in (True, False, None)]
    + [dict(n_positions=MISSING), dict(n_ctx=24), dict(n_positions=MISSING, max_position_embeddings=40), dict(n_head=MISSING, num_attention_heads=2)]
    + [
        dict(n_embd=MISSING, hidden_size=16),
        dict(n_layer=MISSING, num_hidden_layers=1),
        dict(summary_type="cls_index"),
        dict(hidden_size=32),
        dict(num_attention_heads=8),
    ],
    "cohere": [dict(logit_scale=s) for s in (MISSING, 2, 0.0625)]
    + [dict(use_qk_norm=True), dict(layer_norm_eps=0.1), dict(layer_norm_eps=MISSING), dict(rope_theta=MISSING), dict(tie_word_embeddings=MISSING)],
    "gemma2": WINDOWS
    + [dict(attn_logit_softcapping=c) for c in (None, MISSING, 3)]
    + [dict(final_logit_softcapping=c) for c in (None, MISSING)]
    + [dict(query_pre_attn_scalar=MISSING), dict(query_pre_attn_scalar=4), dict(head_dim=MISSING)]
    + [
        dict(hidden_act="silu"),
        dict(hidden_activation="silu"),
        dict(hidden_act="gelu", hidden_activation=MISSING),
        dict(hidden_act="gelu", hidden_activation=None),
        dict(cache_implementation="hybrid"),
    ],
    "gemma3_text": WINDOWS
    + [
        dict(attn_logit_softcapping=3.0),
        dict(final_logit_softcapping=3.0),
        dict(query_pre_attn_scalar=4),
        dict(_sliding_window_pattern=2, sliding_window_pattern=MISSING),
        dict(hidden_act="silu"),
    ]
    + [
        dict(rope_theta=MISSING),
        dict(rope_theta=MISSING, rope_local_base_freq=MISSING),
        dict(rope_local_base_freq=30),
        dict(use_bidirectional_attention=True),
        dict(head_dim=MISSING),
        dict(hidden_activation="gelu"),
    ],
    "phi3": [
        dict(partial_rotary_factor=0.5),
        dict(original_max_position_embeddings=16, rope_scaling=long_rope(2)),
        dict(original_max_position_embeddings=48, rope_scaling=long_rope(2)),
        dict(sliding_window=4),
    ]
    + [
        dict(partial_rotary_factor=0.5, rope_scaling=long_rope(1)),
        dict(attention_bias=True),
        dict(resid_pdrop=0.1),
        dict(embd_pdrop=0.1),
        dict(original_max_position_embeddings=16),
        dict(rope_scaling={k: v for k, v in long_rope(2).items() if k != "original_max_position_embeddings"}),
    ],
    "granite": [
        dict(embedding_multiplier=12),
        dict(residual_multiplier=0.22),
        dict(attention_multiplier=MISSING),
        dict(logits_scaling=8.0),
        dict(logits_scaling=MISSING),
        dict(mlp_bias=True),
        dict(attention_bias=True),
        dict(attention_multiplier=1),
    ],
    "smollm3": [dict(no_rope_layers=n) for n in ([1, 0, 1], [1, 1, 1], [0, 0, 0], None, [1, 0], [1, 0, 1, 0])]
    + [dict(no_rope_layer_interval=n) for n in (1, 3, MISSING, None)]
    + [dict(no_rope_layer_interval=0), dict(use_sliding_window=True, sliding_window=4)]
    + [
        dict(use_sliding_window=True, sliding_window=4, layer_types="first"),
        dict(sliding_window=4, layer_types="all"),
        dict(rope_theta=MISSING),
        dict(mlp_bias=True),
        dict(attention_bias=True),
        dict(tie_word_embeddings=MISSING),
    ],
    "mixtral": [
        dict(num_local_experts=MISSING),
        dict(num_experts_per_tok=MISSING),
        dict(num_experts_per_tok=1),
        dict(sliding_window=4),
        dict(head_dim=8),
        dict(rope_theta=MISSING),
        dict(router_jitter_noise=0.1),
        dict(num_local_experts=MISSING, num_experts=4),
    ],
    "qwen2_moe": ROUTED
    + [
        dict(qkv_bias=False),
        dict(use_sliding_window=True, sliding_window=4, max_window_layers=2),
        dict(shared_expert_intermediate_size=8),
        dict(use_sliding_window=True, sliding_window=4, layer_types="last"),
        dict(use_sliding_window=True, sliding_window=4, max_window_layers=1),
    ],
    "qwen3_moe": ROUTED
    + [
        dict(use_sliding_window=True, sliding_window=4),
        dict(use_sliding_window=True, sliding_window=4, layer_types="last"),
        dict(attention_bias=True),
        dict(head_dim=MISSING),
        dict(sliding_window=4),
    ],
    "olmoe": ROUTED + [dict(clip_qkv=0.5), dict(attention_bias=True), dict(moe_intermediate_size=MISSING)],
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "gpt_oss": [
        dict(sliding_window=MISSING),
        dict(layer_types="first"),
        dict(layer_types="last"),
        dict(layer_types="none"),
        dict(attention_bias=False),
        dict(swiglu_limit=7.0),
        dict(swiglu_limit=3.0),
        dict(swiglu_alpha=1.5),
        dict(head_dim=MISSING),
    ]
    + [
        dict(rope_theta=MISSING),
        dict(rope_scaling=None),
        dict(experts_per_token=2),
        dict(num_experts_per_tok=MISSING),
        dict(num_experts_per_tok=1),
        dict(initial_context_length=16),
        dict(rope_scaling=dict(YARN, truncate=False)),
        dict(num_local_experts=MISSING),
    ],
    "qwen2": [dict(use_sliding_window=True, sliding_window=4, max_window_layers=n) for n in (0, 1, 2, MISSING)]
    + [dict(use_sliding_window=True, sliding_window=4, layer_types="first"), dict(use_sliding_window=True), dict(attention_bias=False)],
    "qwen3": [dict(use_sliding_window=True, sliding_window=4, max_window_layers=n) for n in (0, 1, MISSING)]
    + [dict(attention_bias=True), dict(head_dim=MISSING), dict(use_sliding_window=True, sliding_window=4, layer_types="last")],
    "llama": [
        dict(attention_bias=True),
        dict(mlp_bias=True),
        dict(head_dim=8),
        dict(rope_interleaved=True),
        dict(num_attention_heads=3, hidden_size=16),
        dict(num_attention_heads=3, hidden_size=16, head_dim=4, num_key_value_heads=3),
    ],
    "olmo2": [
        dict(attention_bias=True),
        dict(rms_norm_eps=MISSING),
        dict(sliding_window=4, layer_types="first"),
        dict(rope_theta=MISSING),
        dict(clip_qkv=0.3),
    ],
}


def applied(config, keys):
    """`config` with `keys`; words for lists of `layer_types` become lists of the length of the model."""
    config = config | keys
    layers = config.get("num_hidden_layers", 2)
    full, window = "full_attention", "sliding_attention"
    lists = dict(first=[window] + [full] * (layers - 1), last=[full] * (layers - 1) + [window], all=[window] * layers, none=[full] * layers)
    lists |= dict(short=[full] * (layers - 1), chunked=["chunked_attention"] * layers)
    if config.get("layer_types") in lists:
        config["layer_types"] = lists[config["layer_types"]]
    return config


def rotated_pairs(config):
    """The rotated pairs of a head, for lists of factors."""
    head_dim = config.get("qk_rope_head_dim") or config.get("head_dim") or 4
    return head_dim // 2


def generated(family, count):
    """Configurations of a family, with names: each key that matters to it alone, then `count` random sets of keys."""
    architecture, base = FAMILIES[family]
    base = dict(model_type=family, architectures=[architecture]) | base
    rng = random.Random(f"configurations of {family}")
    rope = [] if family == "gpt2" else ropes(rotated_pairs(base))
    cases = [{}] + OWN[family]
    for _ in range(count):
        keys = rng.choice(rope) if rope and rng.random() < 0.7 else {}
        for _ in range(rng.choice((0, 1, 1, 2, 3) if keys else (1, 1, 2, 3))):
            keys = keys | rng.choice(rng.choice((KEYS, KEYS, OWN[family])))
        cases.append(keys)
    for number, keys in enumerate(cases):
        config = {k: v for k, v in applied(base, keys).items() if v is not MISSING}
        changes = {k: "missing" if v is MISSING else v for k, v in applied(base, keys).items() if k in keys}
        yield f"{family} {number}", changes, config
