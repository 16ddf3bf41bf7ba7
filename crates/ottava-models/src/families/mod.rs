//! The families, a file each: it reads the family's `config.json` into a [`DecoderConfig`](crate::DecoderConfig).

mod apertus;
mod arcee;
mod bamba;
mod bert;
mod cohere;
mod cohere2;
mod deepseek_v2;
mod deepseek_v3;
mod deepseek_v32;
mod dots1;
mod ernie4_5;
mod ernie4_5_moe;
mod exaone4;
mod exaone_moe;
mod falcon_h1;
mod gemma2;
mod gemma3;
mod gemma4;
mod glm4;
mod glm4_moe;
mod glm4_moe_lite;
mod gpt2;
mod gpt_neox;
mod gpt_oss;
mod granite;
mod granite_moe;
mod granite_moe_hybrid;
mod hunyuan_v1_dense;
mod hunyuan_v1_moe;
mod llama;
mod llama4;
mod minimax_m2;
pub(super) mod mistral;
mod mixtral;
mod modernbert;
mod nemotron_h;
mod olmo2;
mod olmo3;
mod olmoe;
mod phi3;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_5;
mod qwen3_moe;
mod qwen3_next;
mod qwen_vl;
mod seed_oss;
mod smollm3;
mod stablelm;

use crate::family::Family;

/// All families.
pub(super) const FAMILIES: &[Family] = &[
    llama::FAMILY,
    llama4::FAMILY,
    mistral::FAMILY,
    mistral::MINISTRAL,
    mistral::MINISTRAL_3,
    qwen2::FAMILY,
    qwen3::FAMILY,
    qwen_vl::QWEN_2_5_VL,
    qwen_vl::QWEN_3_VL,
    qwen_vl::QWEN_3_VL_MOE,
    gpt2::FAMILY,
    gpt_neox::FAMILY,
    cohere::FAMILY,
    gemma2::FAMILY,
    gemma3::FAMILY,
    gemma4::FAMILY,
    phi3::FAMILY,
    olmo2::FAMILY,
    granite::FAMILY,
    granite_moe::FAMILY,
    granite_moe::SHARED,
    smollm3::FAMILY,
    mixtral::FAMILY,
    qwen2_moe::FAMILY,
    qwen3_moe::FAMILY,
    olmoe::FAMILY,
    deepseek_v2::FAMILY,
    deepseek_v3::FAMILY,
    deepseek_v32::FAMILY,
    deepseek_v32::GLM_5,
    gpt_oss::FAMILY,
    glm4::FAMILY,
    glm4::GLM,
    glm4_moe::FAMILY,
    glm4_moe_lite::FAMILY,
    olmo3::FAMILY,
    exaone4::FAMILY,
    exaone_moe::FAMILY,
    cohere2::FAMILY,
    seed_oss::FAMILY,
    ernie4_5::FAMILY,
    dots1::FAMILY,
    minimax_m2::FAMILY,
    deepseek_v3::KIMI_K2,
    arcee::FAMILY,
    apertus::FAMILY,
    stablelm::FAMILY,
    ernie4_5_moe::FAMILY,
    hunyuan_v1_dense::FAMILY,
    hunyuan_v1_moe::FAMILY,
    qwen3_next::FAMILY,
    qwen3_5::FAMILY,
    qwen3_5::MOE,
    bamba::FAMILY,
    granite_moe_hybrid::FAMILY,
    falcon_h1::FAMILY,
    nemotron_h::FAMILY,
    bert::BERT,
    bert::ROBERTA,
    bert::XLM_ROBERTA,
    modernbert::FAMILY,
];
