#!/usr/bin/env python3
"""Records what PyTorch and transformers compute for small models, in crates/ottava-train/tests/data/referee*.safetensors.

usage: make_referee.py FILE...    FILE is one of the keys of FILES or OPTIONS below

Development only; the program itself needs no Python. `pip install torch==2.15.0 transformers==5.24.0 safetensors==0.8.0 numpy`.
Runs on the CPU in about a minute; one machine writes the same tensors every time.
"""

import copy
import re
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CohereConfig, CohereForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers import Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, GraniteConfig, GraniteForCausalLM
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Olmo2Config, Olmo2ForCausalLM
from transformers import Phi3Config, Phi3ForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers import SmolLM3Config, SmolLM3ForCausalLM
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM
from transformers import GptOssConfig, GptOssForCausalLM
from transformers import Ministral3Config, Ministral3ForCausalLM
from transformers import ExaoneMoeConfig, ExaoneMoeForCausalLM, GlmConfig, GlmForCausalLM
from transformers import HunYuanDenseV1Config, HunYuanDenseV1ForCausalLM, HunYuanMoEV1Config, HunYuanMoEV1ForCausalLM
from transformers import MixtralConfig, MixtralForCausalLM, OlmoeConfig, OlmoeForCausalLM
from transformers import ArceeConfig, ArceeForCausalLM, Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM, StableLmConfig, StableLmForCausalLM
from transformers import Cohere2Config, Cohere2ForCausalLM, Dots1Config, Dots1ForCausalLM, Ernie4_5Config, Ernie4_5ForCausalLM
from transformers import Exaone4Config, Exaone4ForCausalLM, Glm4Config, Glm4ForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM
from transformers import Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM, MiniMaxM2Config, MiniMaxM2ForCausalLM
from transformers import Olmo3Config, Olmo3ForCausalLM, SeedOssConfig, SeedOssForCausalLM
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma4Config, Gemma4ForCausalLM, Gemma4ForConditionalGeneration
from transformers import Gemma4TextConfig, Mistral3Config, Mistral3ForConditionalGeneration
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers import GraniteMoeConfig, GraniteMoeForCausalLM, GraniteMoeSharedConfig, GraniteMoeSharedForCausalLM
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM, GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers import ApertusConfig, ApertusForCausalLM
from transformers import Llama4Config, Llama4ForCausalLM, Llama4ForConditionalGeneration, Llama4TextConfig
from transformers import BambaConfig, BambaForCausalLM, FalconH1Config, FalconH1ForCausalLM
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, NemotronHConfig, NemotronHForCausalLM
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3NextConfig, Qwen3NextForCausalLM

FOLDER = Path(__file__).resolve().parent.parent / "crates/ottava-train/tests/data"
VOCABULARY, ROWS, TOKENS, STEPS = 96, 8, 32, 50
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=48,
    intermediate_size=112,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rope_theta=10000.0,
    initializer_range=0.08,
    use_cache=False,
)
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(num_hidden_layers=3, tie_word_embeddings=False, **SIZES)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(num_hidden_layers=2, tie_word_embeddings=True, **SIZES)),
    # Heads of 16 where the width over the heads is 12.
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(num_hidden_layers=2, tie_word_embeddings=False, head_dim=16, **SIZES)),
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=48,
            n_inner=112,
            n_layer=2,
            n_head=4,
            n_positions=40,
            initializer_range=0.08,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        ),
    ),
    "cohere": (CohereForCausalLM, CohereConfig(num_hidden_layers=2, logit_scale=0.3, pad_token_id=None, **SIZES)),
    "cohere_qk_norm": (
        CohereForCausalLM,
        CohereConfig(num_hidden_layers=1, logit_scale=0.3, use_qk_norm=True, pad_token_id=None, **SIZES),
    ),
}
FILES = {"referee": ["llama", "qwen2"], "referee_qwen3": ["qwen3"], "referee_gpt2": ["gpt2"], "referee_cohere": ["cohere", "cohere_qk_norm"]}
# Families and options that are compared without training, in a file each.
TINY = dict(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.3,
    tie_word_embeddings=False,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
    use_cache=True,
)
GEMMA = TINY | dict(head_dim=8, query_pre_attn_scalar=6, sliding_window=5, tie_word_embeddings=True)
LONG = dict(rope_type="longrope", rope_theta=100.0, short_factor=[1.0, 1.25, 1.5], long_factor=[2.0, 3.5, 4.0], partial_rotary_factor=0.75)
LONG = TINY | dict(num_attention_heads=2, num_key_value_heads=1, rope_parameters=LONG, max_position_embeddings=120)
YARN = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=16)
LATENT = TINY | dict(num_key_value_heads=4, kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
LATENT |= dict(moe_intermediate_size=12, n_shared_experts=2)
INDEXED = LATENT | dict(q_lora_rank=10, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1, routed_scaling_factor=2.5)
INDEXED |= dict(index_topk=24, index_head_dim=8, index_n_heads=3)
LATENT_YARN = dict(original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=0.8)
GRANITE_MOE = TINY | dict(embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.5, logits_scaling=1.6)
GRANITE_MOE |= dict(num_local_experts=5, num_experts_per_tok=3)
# Vision towers, which texts do not reach.
QWEN_EYES = dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=2, out_hidden_size=16, patch_size=2)
EYES = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4)
# Values are larger than keys, and two value heads share a key head. A quarter of each head of 16 is rotated.
DELTA = TINY | dict(head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=10)
# The second layer has no rotary positions and no experts. Queries grow from position 3 on. Documents have one chunk.
LLAMA4 = TINY | dict(num_hidden_layers=3, head_dim=8, no_rope_layers=[1, 0, 1], attention_chunk_size=24, floor_scale=4, attn_scale=0.7)
LLAMA4 |= dict(intermediate_size=12, intermediate_size_mlp=24, moe_layers=[0, 2], num_local_experts=4, num_experts_per_tok=2)
# Heads of two sizes. Of each large head, three of the eight pairs have angles.
GEMMA4 = TINY | dict(num_hidden_layers=4, head_dim=8, global_head_dim=16, sliding_window=5, tie_word_embeddings=True)
GEMMA4 |= dict(layer_types=["sliding_attention", "full_attention"] * 2, hidden_size_per_layer_input=0, final_logit_softcapping=2.0)
LOCAL = {"rope_type": "default", "rope_theta": 50.0}
GEMMA4["rope_parameters"] = {"full_attention": dict(rope_type="proportional", partial_rotary_factor=0.4, rope_theta=1000.0), "sliding_attention": LOCAL}
# The last three layers read keys and values of layers 1 and 2.
GEMMA4_SHARED = GEMMA4 | dict(num_hidden_layers=6, num_kv_shared_layers=3, use_double_wide_mlp=True, vocab_size_per_layer_input=44)
GEMMA4_SHARED |= dict(hidden_size_per_layer_input=6, num_key_value_heads=1, rms_norm_eps=1e-2)
GEMMA4_SHARED["layer_types"] = [f"{of}_attention" for of in ("full", "full", "sliding", "sliding", "sliding", "full")]
GEMMA4_EXPERTS = dict(enable_moe_block=True, num_experts=5, top_k_experts=3, moe_intermediate_size=12)
# Two groups of two heads, and states that are larger than heads. Chunks are shorter than the documents.
MAMBA = TINY | dict(mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=6, mamba_chunk_size=8)
# transformers limits time steps from below by `time_step_min`, which is a setting of initial weights.
NEMOTRON = {key: value for key, value in TINY.items() if key != "num_hidden_layers"}
NEMOTRON |= dict(head_dim=8, mamba_num_heads=4, mamba_head_dim=8, n_groups=2, ssm_state_size=6, chunk_size=8, time_step_min=1e-30)
LLAMA = (LlamaForCausalLM, LlamaConfig)
PHI3 = (Phi3ForCausalLM, Phi3Config)
OPTIONS = {
    "mistral_window": (MistralForCausalLM, MistralConfig, TINY | dict(head_dim=8, sliding_window=5)),
    "qwen2_window": (
        Qwen2ForCausalLM,
        Qwen2Config,
        TINY | dict(num_hidden_layers=3, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    ),
    "qwen3_window": (
        Qwen3ForCausalLM,
        Qwen3Config,
        TINY | dict(head_dim=8, use_sliding_window=True, sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
    ),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, GEMMA | dict(attn_logit_softcapping=1.5, final_logit_softcapping=2.0)),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        GEMMA
        | dict(num_hidden_layers=3, sliding_window_pattern=3)
        | dict(rope_parameters={"full_attention": dict(rope_type="linear", factor=8.0, rope_theta=1000.0), "sliding_attention": LOCAL}),
    ),
    "phi3": (*PHI3, TINY | dict(sliding_window=5)),
    # The texts are as long as the original context, and longer.
    "phi3_short": (*PHI3, LONG | dict(original_max_position_embeddings=40)),
    "phi3_long": (*PHI3, LONG | dict(original_max_position_embeddings=4)),
    "granite": (
        GraniteForCausalLM,
        GraniteConfig,
        TINY | dict(embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.5, logits_scaling=1.6),
    ),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, TINY),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config, TINY | dict(num_hidden_layers=3, no_rope_layer_interval=2)),
    "mixtral": (MixtralForCausalLM, MixtralConfig, TINY | dict(head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=7)),
    # The first and the last layer have the window.
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig,
        TINY
        | dict(num_hidden_layers=3, head_dim=8, num_local_experts=5, num_experts_per_tok=3, sliding_window=5)
        | dict(rope_parameters=YARN | dict(truncate=False)),
    ),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig, TINY | dict(num_experts=5, num_experts_per_tok=3)),
    # The middle layer has an MLP.
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        TINY
        | dict(num_hidden_layers=3, head_dim=8, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=True)
        | dict(mlp_only_layers=[1]),
    ),
    "qwen2_moe": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig,
        TINY
        | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, shared_expert_intermediate_size=20)
        | dict(use_sliding_window=True, sliding_window=5),
    ),
    # The first layer has an MLP; queries have no latent, as in DeepSeek-V2-Lite.
    "deepseek_v2_lite": (
        DeepseekV2ForCausalLM,
        DeepseekV2Config,
        LATENT | dict(q_lora_rank=None, n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1),
    ),
    "deepseek_v2": (
        DeepseekV2ForCausalLM,
        DeepseekV2Config,
        LATENT
        | dict(q_lora_rank=10, n_routed_experts=6, num_experts_per_tok=2, topk_method="group_limited_greedy", n_group=3, topk_group=2)
        | dict(routed_scaling_factor=2.5, rope_parameters=dict(rope_type="yarn", rope_theta=100.0, factor=4.0) | LATENT_YARN),
    ),
    "deepseek_v3": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        LATENT
        | dict(q_lora_rank=10, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1, n_group=4, topk_group=2)
        | dict(first_k_dense_replace=1, routed_scaling_factor=2.5, norm_topk_prob=True),
    ),
    # Indexers choose all keys. In GLM-5, the second layer has the choice of the first.
    "deepseek_v32": (
        DeepseekV32ForCausalLM,
        DeepseekV32Config,
        INDEXED | dict(n_group=4, topk_group=2, first_k_dense_replace=1, rms_norm_eps=1e-6),
    ),
    "glm_moe_dsa": (
        GlmMoeDsaForCausalLM,
        GlmMoeDsaConfig,
        INDEXED | dict(n_group=1, topk_group=1, mlp_layer_types=["sparse", "dense"], indexer_types=["full", "shared"], v_head_dim=10),
    ),
    # Half of each head of 8 is rotated.
    "glm4": (Glm4ForCausalLM, Glm4Config, TINY | dict(head_dim=8)),
    "glm4_moe": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig,
        TINY
        | dict(head_dim=8, attention_bias=True, use_qk_norm=True, moe_intermediate_size=12, n_routed_experts=8, num_experts_per_tok=3)
        | dict(n_group=4, topk_group=2, first_k_dense_replace=1, routed_scaling_factor=1.7),
    ),
    # The second layer has an MLP.
    "glm4_moe_lite": (
        Glm4MoeLiteForCausalLM,
        Glm4MoeLiteConfig,
        LATENT
        | dict(q_lora_rank=10, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1, n_group=1, topk_group=1)
        | dict(num_hidden_layers=3, mlp_layer_types=["sparse", "dense", "sparse"]),
    ),
    "olmo3": (
        Olmo3ForCausalLM,
        Olmo3Config,
        TINY
        | dict(num_hidden_layers=3, sliding_window=5, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
        | dict(rope_parameters=dict(full_attention=YARN, sliding_attention=dict(rope_type="default", rope_theta=50.0))),
    ),
    "exaone4": (Exaone4ForCausalLM, Exaone4Config, TINY | dict(num_hidden_layers=3, sliding_window=5, sliding_window_pattern=2)),
    "exaone4_full": (Exaone4ForCausalLM, Exaone4Config, TINY | dict(sliding_window=None, layer_types=["full_attention"] * 2)),
    "cohere2": (
        Cohere2ForCausalLM,
        Cohere2Config,
        TINY | dict(num_hidden_layers=3, sliding_window=5, sliding_window_pattern=2, logit_scale=0.3, tie_word_embeddings=True),
    ),
    "seed_oss": (
        SeedOssForCausalLM,
        SeedOssConfig,
        TINY | dict(head_dim=8, attention_out_bias=True, mlp_bias=True, attention_dropout=0.0, residual_dropout=0.0),
    ),
    "ernie4_5": (Ernie4_5ForCausalLM, Ernie4_5Config, TINY | dict(head_dim=8, use_bias=True)),
    "dots1": (
        Dots1ForCausalLM,
        Dots1Config,
        TINY
        | dict(head_dim=8, moe_intermediate_size=12, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2, first_k_dense_replace=1)
        | dict(routed_scaling_factor=2.5, sliding_window=5, max_window_layers=1),
    ),
    "minimax_m2": (
        MiniMaxM2ForCausalLM,
        MiniMaxM2Config,
        TINY | dict(head_dim=8, rotary_dim=6, num_local_experts=6, num_experts_per_tok=3),
    ),
    # Queries grow from position 8 on.
    "ministral3": (
        Ministral3ForCausalLM,
        Ministral3Config,
        TINY
        | dict(head_dim=8)
        | dict(rope_parameters=YARN | dict(original_max_position_embeddings=8, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.7)),
    ),
    "hunyuan": (
        HunYuanDenseV1ForCausalLM,
        HunYuanDenseV1Config,
        TINY | dict(head_dim=8, attention_bias=True, rope_parameters=dict(rope_type="dynamic", rope_theta=100.0, alpha=20.0, factor=1.0)),
    ),
    "hunyuan_moe": (HunYuanMoEV1ForCausalLM, HunYuanMoEV1Config, TINY | dict(head_dim=8, num_experts=5, moe_topk=[2, 3])),
    "exaone_moe": (
        ExaoneMoeForCausalLM,
        ExaoneMoeConfig,
        TINY
        | dict(num_hidden_layers=3, sliding_window=5, sliding_window_pattern=2, mlp_layer_types=["sparse", "dense", "sparse"])
        | dict(moe_intermediate_size=12, num_experts=8, num_experts_per_tok=3, num_shared_experts=2, n_group=4, topk_group=2),
    ),
    "glm": (GlmForCausalLM, GlmConfig, TINY | dict(head_dim=8)),
    # Half of each head of 4 is rotated.
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig, TINY | dict(rotary_pct=0.5, rotary_emb_base=100.0)),
    "gpt_neox_sequential": (
        GPTNeoXForCausalLM,
        GPTNeoXConfig,
        TINY | dict(rotary_pct=1.0, rotary_emb_base=100.0, use_parallel_residual=False, attention_bias=False),
    ),
    "arcee": (ArceeForCausalLM, ArceeConfig, TINY | dict(head_dim=8, attention_bias=True, mlp_bias=True)),
    # Half of each head of 4 is rotated.
    "stablelm": (StableLmForCausalLM, StableLmConfig, TINY | dict(use_qkv_bias=True, partial_rotary_factor=0.5)),
    "stablelm_qk_norm": (
        StableLmForCausalLM,
        StableLmConfig,
        TINY | dict(qk_layernorm=True, use_parallel_residual=True, partial_rotary_factor=0.5),
    ),
    "stablelm_parallel": (StableLmForCausalLM, StableLmConfig, TINY | dict(use_parallel_residual=True, partial_rotary_factor=0.5)),
    # The second and the fourth layer have experts.
    "ernie4_5_moe": (
        Ernie4_5_MoeForCausalLM,
        Ernie4_5_MoeConfig,
        TINY
        | dict(num_hidden_layers=4, moe_intermediate_size=12, moe_num_experts=6, moe_k=2, moe_num_shared_experts=2)
        | dict(moe_layer_start_index=1, moe_layer_end_index=-1, moe_layer_interval=2),
    ),
    "granitemoe": (GraniteMoeForCausalLM, GraniteMoeConfig, GRANITE_MOE),
    "granitemoeshared": (GraniteMoeSharedForCausalLM, GraniteMoeSharedConfig, GRANITE_MOE | dict(shared_intermediate_size=20)),
    # The text models of vision-language models. Whether heads are tied is a key of the whole model.
    "qwen2_5_vl": (
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLConfig,
        dict(
            text_config=TINY | dict(rope_parameters=dict(type="mrope", rope_theta=100.0, mrope_section=[1, 1, 0]), num_hidden_layers=3)
            | dict(use_sliding_window=True, sliding_window=5, max_window_layers=1),
            vision_config=QWEN_EYES | dict(fullatt_block_indexes=[0], window_size=4),
        ),
    ),
    "qwen3_vl": (
        Qwen3VLForConditionalGeneration,
        Qwen3VLConfig,
        dict(
            text_config=TINY | dict(head_dim=8, rope_parameters=dict(rope_type="default", rope_theta=100.0, mrope_section=[2, 1, 1], mrope_interleaved=True)),
            vision_config=QWEN_EYES | dict(deepstack_visual_indexes=[0], num_position_embeddings=16),
            tie_word_embeddings=True,
        ),
    ),
    # The middle layer has an MLP.
    "qwen3_vl_moe": (
        Qwen3VLMoeForConditionalGeneration,
        Qwen3VLMoeConfig,
        dict(
            text_config=TINY
            | dict(num_hidden_layers=3, head_dim=8, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=12, mlp_only_layers=[1])
            | dict(tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=100.0, mrope_section=[2, 1, 1])),
            vision_config=QWEN_EYES | dict(deepstack_visual_indexes=[0], num_position_embeddings=16),
            tie_word_embeddings=False,
        ),
    ),
    "mistral3": (
        Mistral3ForConditionalGeneration,
        Mistral3Config,
        dict(text_config=TINY | dict(model_type="mistral", head_dim=8, sliding_window=5), vision_config=EYES | dict(model_type="pixtral", head_dim=4)),
    ),
    "mistral3_ministral3": (
        Mistral3ForConditionalGeneration,
        Mistral3Config,
        dict(
            text_config=TINY
            | dict(model_type="ministral3", head_dim=8, tie_word_embeddings=True)
            | dict(rope_parameters=YARN | dict(original_max_position_embeddings=8, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.7)),
            vision_config=EYES | dict(model_type="pixtral", head_dim=4),
            tie_word_embeddings=False,
        ),
    ),
    "gemma3_vl": (
        Gemma3ForConditionalGeneration,
        Gemma3Config,
        dict(
            text_config=GEMMA | dict(num_hidden_layers=3, sliding_window_pattern=3),
            vision_config=EYES | dict(model_type="siglip_vision_model"),
            mm_tokens_per_image=4,
        ),
    ),
    # Values are the projected keys in layers without a window, which have one key head.
    "gemma4": (Gemma4ForCausalLM, Gemma4TextConfig, GEMMA4 | dict(attention_k_eq_v=True, num_global_key_value_heads=1)),
    "gemma4_shared": (Gemma4ForCausalLM, Gemma4TextConfig, GEMMA4_SHARED),
    "gemma4_moe": (
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        GEMMA4 | GEMMA4_EXPERTS | dict(attention_k_eq_v=True, final_logit_softcapping=None, tie_word_embeddings=False),
    ),
    "gemma4_vl": (
        Gemma4ForConditionalGeneration,
        Gemma4Config,
        dict(
            text_config=GEMMA4_SHARED | GEMMA4_EXPERTS | dict(attention_k_eq_v=True, pad_token_id=43, vocab_size=44, tie_word_embeddings=False),
            vision_config={key: EYES[key] for key in EYES if key != "image_size"} | dict(num_key_value_heads=2, head_dim=4, position_embedding_size=4),
            audio_config=None,
        ),
    ),
    # The second layer has attention and an MLP; the others have gated delta nets and experts.
    "qwen3_next": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig,
        DELTA
        | dict(num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"], mlp_only_layers=[1])
        | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, shared_expert_intermediate_size=20, norm_topk_prob=True),
    ),
    "qwen3_5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, DELTA | dict(num_hidden_layers=3, full_attention_interval=2, linear_conv_kernel_dim=3)),
    "qwen3_5_vl": (
        Qwen3_5ForConditionalGeneration,
        Qwen3_5Config,
        dict(
            text_config=DELTA | dict(num_hidden_layers=3, full_attention_interval=3, tie_word_embeddings=False),
            vision_config=QWEN_EYES | dict(num_position_embeddings=16),
            tie_word_embeddings=True,
        ),
    ),
    "qwen3_5_moe": (
        Qwen3_5MoeForConditionalGeneration,
        Qwen3_5MoeConfig,
        dict(
            text_config=DELTA
            | dict(num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"])
            | dict(num_experts=5, num_experts_per_tok=3, moe_intermediate_size=12, shared_expert_intermediate_size=20),
            vision_config=QWEN_EYES | dict(num_position_embeddings=16),
        ),
    ),
    "apertus": (ApertusForCausalLM, ApertusConfig, TINY | dict(attention_bias=True, rope_parameters=dict(rope_type="default", rope_theta=100.0))),
    "llama4": (Llama4ForCausalLM, Llama4TextConfig, LLAMA4),
    "llama4_vl": (
        Llama4ForConditionalGeneration,
        Llama4Config,
        dict(
            text_config=LLAMA4 | dict(use_qk_norm=False, no_rope_layers=[], no_rope_layer_interval=2, moe_layers=None, interleave_moe_layer_step=2)
            | dict(attn_temperature_tuning=False, attention_chunk_size=None),
            vision_config=EYES | dict(projector_input_dim=4, projector_output_dim=4, vision_output_dim=4),
        ),
    ),
    "bamba": (BambaForCausalLM, BambaConfig, MAMBA | dict(num_hidden_layers=3, attn_layer_indices=[1])),
    # Attention has no rotary positions.
    "granitemoehybrid": (
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig,
        GRANITE_MOE
        | {key: MAMBA[key] for key in MAMBA if key.startswith("mamba")}
        | dict(num_hidden_layers=3, layer_types=["mamba", "attention", "mamba"], shared_intermediate_size=20),
    ),
    "granitemoehybrid_dense": (
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig,
        GRANITE_MOE
        | {key: MAMBA[key] for key in MAMBA if key.startswith("mamba")}
        | dict(layer_types=["mamba", "attention"], shared_intermediate_size=20, num_local_experts=0, position_embedding_type="rope")
        | dict(mamba_proj_bias=True, mamba_conv_bias=False),
    ),
    # The state space and attention have different factors, and so have all other parts.
    "falcon_h1": (
        FalconH1ForCausalLM,
        FalconH1Config,
        MAMBA
        | dict(mamba_d_ssm=32, ssm_in_multiplier=1.3, ssm_multipliers=[0.7, 1.2, 0.9, 1.4, 0.8], ssm_out_multiplier=0.6)
        | dict(attention_in_multiplier=1.1, attention_out_multiplier=0.75, key_multiplier=0.65, mlp_multipliers=[0.85, 0.55])
        | dict(embedding_multiplier=1.7, lm_head_multiplier=0.45),
    ),
    "falcon_h1_norm": (
        FalconH1ForCausalLM,
        FalconH1Config,
        MAMBA | dict(mamba_d_ssm=None, mamba_rms_norm=True, mamba_norm_before_gate=False, projectors_bias=True, attention_bias=True),
    ),
    "falcon_h1_norm_first": (FalconH1ForCausalLM, FalconH1Config, MAMBA | dict(mamba_d_ssm=32, mamba_rms_norm=True, num_hidden_layers=1)),
    "nemotron_h": (NemotronHForCausalLM, NemotronHConfig, NEMOTRON | dict(hybrid_override_pattern="M*-M", use_bias=True, mlp_bias=True)),
    # Experts read a latent.
    "nemotron_h_moe": (
        NemotronHForCausalLM,
        NemotronHConfig,
        NEMOTRON
        | dict(layers_block_type=["linear_attention", "moe", "full_attention", "moe"], moe_latent_size=8, moe_intermediate_size=12)
        | dict(n_routed_experts=6, num_experts_per_tok=2, n_group=3, topk_group=2, moe_shared_expert_intermediate_size=20)
        | dict(routed_scaling_factor=2.5),
    ),
    "yarn": (*LLAMA, TINY | dict(rope_parameters=YARN)),
    "yarn_mscale": (
        *LLAMA,
        TINY | dict(rope_parameters=YARN | dict(mscale=1.3, mscale_all_dim=0.7, truncate=False, beta_fast=2.0, beta_slow=0.5)),
    ),
    "dynamic_short": (*LLAMA, TINY | dict(rope_parameters=dict(rope_type="dynamic", rope_theta=100.0, factor=3.0))),
    "dynamic_long": (
        *LLAMA,
        TINY | dict(max_position_embeddings=10, rope_parameters=dict(rope_type="dynamic", rope_theta=100.0, factor=3.0)),
    ),
}
# Lengths of the documents; two rows of 24 tokens each. Angles of "dynamic" depend on the length of a document in transformers.
DOCUMENTS = [24, 9, 15]
ONE_LENGTH = [24, 24]
# New tokens of greedy text, in the files of these models.
GREEDY = {"gpt2": 12, "cohere": 12, "cohere_qk_norm": 12}


def batches(steps, generator):
    """Sequences to learn: the next token is a function of the last one, except for one token in eight."""
    ids = torch.randint(VOCABULARY, (steps, ROWS, TOKENS + 1), generator=generator)
    noise = torch.rand(ids.shape, generator=generator) < 1 / 8
    for t in range(TOKENS):
        ids[..., t + 1] = torch.where(noise[..., t], ids[..., t + 1], (5 * ids[..., t] + 7) % VOCABULARY)
    return ids


def loss_of(model, ids):
    """Logits of all tokens but the last, and the mean loss in F32 of all tokens but the first."""
    logits = model(input_ids=ids[:, :-1]).logits
    return logits, torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def train(model, ids, mode):
    """Losses of AdamW steps. `autocast`: F32 weights, products in BF16. `bf16`: everything in BF16 beside F32 masters."""
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    # Norms do not decay, not even those with a row of weights per head.
    decays = [p.dim() >= 2 and not n.endswith("_norm.weight") for n, p in model.named_parameters()]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p, decay in zip(masters, decays) if decay], "weight_decay": 0.1},
            {"params": [p for p, decay in zip(masters, decays) if not decay], "weight_decay": 0.0},
        ],
        lr=1e-3,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    if mode == "bf16":
        model = model.to(torch.bfloat16)
    losses, norms = [], []
    for batch in ids:
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters):
                p.copy_(master)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            _, loss = loss_of(model, batch)
        loss.backward()
        for p, master in zip(model.parameters(), masters):
            master.grad = p.grad.float()
        norms.append(torch.nn.utils.clip_grad_norm_(masters, 1.0))
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).float(), torch.stack(norms).float()


def random_weights(model, generator):
    """Normal weights that are BF16 values, so that files hold them in two bytes; norms lie around their neutral value."""
    with torch.no_grad():
        for n, p in model.named_parameters():
            spread = 0.3 * torch.randn(p.shape, generator=generator)
            if model.config.model_type == "gpt_oss" and n.endswith("gate_up_proj"):  # so that some reach the bounds of the activation
                spread *= 3
            if n.endswith("linear_attn.conv1d.weight"):  # so that no query or key is near zero, where its norm amplifies roundings
                spread *= 3
            # Scores of Gemma 4 have no factor.
            share = 0.3 if "gemma4" in model.config.model_type and n.endswith("q_norm.weight") else 1.0
            p.copy_((share * (p + spread if p.dim() < 2 else spread)).to(torch.bfloat16))
        for n, b in model.named_buffers():
            if n.endswith(("e_score_correction_bias", "layer_scalar")):
                b.copy_((b + 0.3 * torch.randn(b.shape, generator=generator)).to(torch.bfloat16))


def in_folder(model, values):
    """`values` of the parameters of `model`, by the names that a saved folder has: experts are fused in memory."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for (_, p), value in zip(model.named_parameters(), values, strict=True):
            p.copy_(value)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def of_text(named):
    """The tensors of a text model, which a vision-language model has under a prefix, by the names of a text model alone."""
    if any(name.startswith("language_model.") for name in named):
        return {name.removeprefix("language_model."): value for name, value in named.items() if name.startswith("language_model.")}
    if not any(".language_model." in name for name in named):
        return named
    renamed = {name.replace("model.language_model.", "model."): value for name, value in named.items()}
    beginnings = ("model.layers", "model.embed_tokens", "model.per_layer", "model.norm", "lm_head")
    return {name: value for name, value in renamed.items() if name.startswith(beginnings)}


def with_heads(named):
    """`named` with the weights of norms that have a tensor for each head, `norms.{head}`, in one tensor `norms.{}`."""
    joined = {}
    for name, value in named.items():
        head = re.fullmatch(r"(.*\.norms\.)\d+(\..*)", name)
        joined.setdefault(head[1] + "{}" + head[2] if head else name, []).append(value)
    return {name: torch.stack(values) if "{}" in name else values[0] for name, values in joined.items()}


def compare(name):
    """Logits, loss and gradients of documents, and greedy text, of one of OPTIONS."""
    kind, kind_of_config, keys = OPTIONS[name]
    torch.manual_seed(17)
    generator = torch.Generator().manual_seed(18)
    config = kind_of_config(**keys)
    config.architectures = [kind.__name__]
    metadata = {"torch": torch.__version__, "transformers": transformers.__version__}
    metadata[f"{name}/config"] = config.to_json_string(use_diff=False)
    model = kind._from_config(config, dtype=torch.float32, attn_implementation="eager")
    random_weights(model, generator)
    model.eval()
    # Without images, the forward of the whole Llama 4 fails in transformers 5.24.
    text_model = model.language_model if kind is Llama4ForConditionalGeneration else model
    vocabulary = keys.get("text_config", keys)["vocab_size"]
    tensors, logits, losses, inputs, targets = {}, [], [], [], []
    lengths = ONE_LENGTH if name.startswith(("dynamic", "phi3_")) else DOCUMENTS
    for length in lengths:
        ids = torch.randint(vocabulary, (1, length + 1), generator=generator)
        of_document = text_model(input_ids=ids[:, :-1], use_cache=False).logits[0]
        losses.append(torch.nn.functional.cross_entropy(of_document, ids[0, 1:], reduction="sum"))
        logits.append(of_document.detach())
        inputs.append(ids[0, :-1])
        targets.append(ids[0, 1:])
    loss = sum(losses) / sum(lengths)
    loss.backward()
    prompt = inputs[0][None, :12]
    if name != "dynamic_long":  # whose keys in the cache have other angles with each new token
        new = dict(max_new_tokens=12, do_sample=False, use_cache=True)
        tensors[f"{name}/greedy"] = text_model.generate(prompt, attention_mask=torch.ones_like(prompt), **new)[0].to(torch.int32)
    tensors[f"{name}/inputs"], tensors[f"{name}/targets"] = [torch.cat(ids).to(torch.int32) for ids in (inputs, targets)]
    tensors[f"{name}/documents"] = torch.tensor(lengths, dtype=torch.int32)
    tensors[f"{name}/logits"] = torch.cat(logits).contiguous()
    tensors[f"{name}/loss"] = loss.detach().reshape(1)
    weights = {n: p.detach() for n, p in model.named_parameters()}
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    if name.startswith(("gpt_neox", "nemotron_h")) or any(".experts." in n for n in weights):
        weights, gradients = (in_folder(model, of.values()) for of in (weights, gradients))
        gradients |= {n: torch.zeros_like(g) for n, g in gradients.items() if n.endswith(("e_score_correction_bias", "layer_scalar"))}
    else:
        numbers = {n: b for n, b in model.named_buffers() if n.endswith("layer_scalar")}
        weights, gradients = weights | numbers, gradients | {n: torch.zeros_like(b) for n, b in numbers.items()}
    weights, gradients = (with_heads(of_text(of)) for of in (weights, gradients))
    for n in weights:
        if ".indexer." in n:  # their choice has no gradient
            continue
        tensors[f"{name}/weights/{n}"] = weights[n].to(torch.bfloat16)
        tensors[f"{name}/gradients/{n}"] = gradients[n]
    save(name, tensors, metadata)


def save(file, tensors, metadata):
    path = FOLDER / (f"{file}.safetensors" if file.startswith("referee") else f"referee_{file}.safetensors")
    save_file(tensors, path, metadata)
    print(f"{path}: {path.stat().st_size} bytes, torch {torch.__version__}")


def main(file):
    tensors, metadata = {}, {"torch": torch.__version__, "transformers": transformers.__version__}
    for name in FILES[file]:
        kind, config = MODELS[name]
        torch.manual_seed(17)
        generator = torch.Generator().manual_seed(18)
        config.architectures = [kind.__name__]
        metadata[f"{name}/config"] = config.to_json_string(use_diff=False)

        def build():
            return kind._from_config(config, dtype=torch.float32, attn_implementation="sdpa")

        model = build()
        with torch.no_grad():  # ones and zeros would hide a norm or bias that is not read
            for n, p in model.named_parameters():
                if p.dim() < 2 or n.endswith("_norm.weight"):
                    p.add_(0.1 * torch.randn(p.shape, generator=generator))
        start = {n: p.detach().clone() for n, p in model.named_parameters()}
        ids = batches(STEPS, generator)
        logits, loss = loss_of(model, ids[0])
        loss.backward()
        if name in GREEDY:
            text = ids[0][:1, :4]
            for _ in range(GREEDY[name]):
                text = torch.cat([text, model(input_ids=text).logits[:, -1:].argmax(-1)], 1)
            tensors[f"{name}/greedy"] = text[0].to(torch.int32)
        tensors[f"{name}/ids"] = ids.to(torch.int32)
        tensors[f"{name}/logits"] = logits.detach().flatten(0, 1).contiguous()
        tensors[f"{name}/loss"] = loss.detach().reshape(1)
        for n, p in model.named_parameters():
            tensors[f"{name}/weights/{n}"] = start[n]
            tensors[f"{name}/gradients/{n}"] = p.grad.clone()
        for mode in ["f32", "autocast", "bf16"]:
            model = build()
            model.load_state_dict(start, strict=False)
            model.tie_weights()
            losses, norms = train(model, ids, mode)
            tensors[f"{name}/losses/{mode}"] = losses
            print(name, mode, losses[[0, 9, 24, 49]].tolist(), "gradient norms", norms[[0, 9, 49]].tolist())
        reference = tensors[f"{name}/losses/bf16"]
        for mode in ["f32", "autocast"]:
            apart = (tensors[f"{name}/losses/{mode}"] / reference - 1).abs()
            print(f"{name}: {mode} and bf16 losses are at most {apart.max():.2e} apart")
    save(file, tensors, metadata)


if __name__ == "__main__":
    for file in sys.argv[1:] or sys.exit(__doc__):
        compare(file) if file in OPTIONS else main(file)
