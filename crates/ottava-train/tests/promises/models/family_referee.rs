//! Compares families and options of small models with `transformers`: logits, loss and gradients of packed documents in F32, and greedy text.
//! `scripts/make_referee.py` records the files.

use crate::models::recorded::Recorded;
use crate::setup::{
    devices, gradients, greedy_text, largest_error, logits, losses_and_gradients_of, recipe, relative_error,
};
use ottava_models::Decoder;
use ottava_recipe::context::Sequences;
use ottava_recipe::param::{MemoryPolicy, Purpose, Shard};
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_tensor::testing::values;
use ottava_tensor::{Device, Tensor};
use std::collections::BTreeMap;

/// Windows are shorter than the texts. Some models change the angles of rotary positions at a certain length. `phi3_short` and one model of "dynamic"
/// stay below this length. `phi3_long` and the other model of "dynamic" exceed it.
const MODELS: [&str; 75] = [
    "mistral_window",
    "qwen2_window",
    "qwen3_window",
    "gemma2",
    "gemma3",
    "phi3",
    "phi3_short",
    "phi3_long",
    "granite",
    "olmo2",
    "smollm3",
    "yarn",
    "yarn_mscale",
    "dynamic_short",
    "dynamic_long",
    "deepseek_v2",
    "deepseek_v2_lite",
    "deepseek_v3",
    "gpt_oss",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "olmo3",
    "exaone4",
    "exaone4_full",
    "cohere2",
    "seed_oss",
    "ernie4_5",
    "dots1",
    "minimax_m2",
    "ministral3",
    "arcee",
    "ernie4_5_moe",
    "hunyuan",
    "hunyuan_moe",
    "exaone_moe",
    "glm",
    "stablelm",
    "stablelm_parallel",
    "stablelm_qk_norm",
    "gpt_neox",
    "gpt_neox_sequential",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "granitemoe",
    "granitemoeshared",
    "mistral3",
    "mistral3_ministral3",
    "gemma3_vl",
    "gemma4",
    "gemma4_shared",
    "gemma4_moe",
    "gemma4_vl",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_vl",
    "qwen3_5_moe",
    "deepseek_v32",
    "glm_moe_dsa",
    "apertus",
    "llama4",
    "llama4_vl",
    "bamba",
    "granitemoehybrid",
    "granitemoehybrid_dense",
    "falcon_h1",
    "falcon_h1_norm",
    "falcon_h1_norm_first",
    "nemotron_h",
    "nemotron_h_moe",
];
/// The number of tokens of a row.
const TOKENS: usize = 24;
/// The tolerance of logits and gradients. Sums in F32 have another order than in transformers. Measured on the CPU, logits differ by up to 2.6e-6 of
/// the largest logit, and gradients by up to 4.8e-6 of their norm. Swapped linears change logits by more than 1e-3 (`experts.rs`).
const SUMS: f64 = 1e-5;
/// The tolerance of logits and gradients of models with gated delta nets, which transformers computes in chunks. Where a query is nearly orthogonal to
/// the keys of a short state, the norm after the state amplifies roundings. Measured, gradients differ by up to 2.5e-5 of their norm on the CPU, and
/// by 1.0e-4 on an H200 (`A_log`, whose gradient sums products of both signs over all tokens).
const STATES: f64 = 2e-4;
/// The tolerance of logits and gradients of models with Mamba-2 layers, which transformers computes in chunks. The gradients by the parameters of time
/// steps are sums over tokens that nearly cancel. Measured on the CPU, logits of Bamba differ by up to 1.2e-5 of the largest logit, and its gradients by
/// up to 6.3e-5 of their norm. Logits and gradients of the other families differ by up to 7.2e-6.
const STEPS: f64 = 1e-4;
/// The tolerance of logits and gradients of models whose scores are products of normalised queries and keys without a factor. Such scores are large, and
/// their softmax amplifies roundings: gradients of transformers in F32 differ from gradients of transformers in F64 by up to 2.6e-5 of their norm.
const SHARP: f64 = 1e-4;
/// The tolerance of losses. A loss is a mean over targets, in which roundings in both directions cancel: differences of up to 1.4e-7 are seen.
const LOSS: f64 = 1e-6;

fn open(name: &'static str) -> Recorded {
    Recorded::open(&format!("referee_{name}"), name)
}

/// Makes the model, for sequences of one row.
fn decoder(recorded: &Recorded, device: &Device) -> Decoder {
    let (recipe, purpose) = (recipe(RecipeName::Fp32, Fp8Format::Hybrid), Purpose::Train(MemoryPolicy::FULL));
    let mut weights = recorded.clone();
    let mut decoder =
        Decoder::new(&recorded.sizes(), &recipe, device, purpose, TOKENS, &mut weights).expect("it is built");
    decoder.quantize_weights().expect("nothing to cast");
    decoder
}

#[test]
fn packed_documents_have_the_logits_and_gradients_of_transformers() {
    for name in MODELS {
        let recorded = open(name);
        let layers = recorded.sizes().layers;
        let is_sharp = layers.iter().any(|of| of.heads().is_some_and(|heads| heads.scale == Some(1.0)));
        let sums = match (layers.iter().find_map(|of| of.delta()), layers.iter().find_map(|of| of.mamba())) {
            (Some(_), _) => STATES,
            (_, Some(_)) => STEPS,
            _ if is_sharp => SHARP,
            _ => SUMS,
        };
        let lengths: Vec<usize> = recorded.ids("documents").into_iter().map(|len| len as usize).collect();
        for device in devices() {
            let mut decoder = decoder(&recorded, &device);
            let place = |ids: Vec<i32>| Tensor::from_slice(&device, &[ids.len()], &ids).unwrap();
            let (inputs, targets) = (place(recorded.ids("inputs")), place(recorded.ids("targets")));
            let mut seen_logits = Vec::new();
            let mut start = 0;
            for length in &lengths {
                seen_logits.extend(values(&logits(&decoder, &inputs.rows(start, start + length).unwrap())));
                start += length;
            }
            let logits_error = largest_error(&seen_logits, &recorded.values("logits"));

            let mut sequences = Sequences::packed(&device, inputs.len() / TOKENS, TOKENS, lengths.len()).unwrap();
            sequences.set_documents(&lengths).unwrap();
            let scale = 1.0 / targets.len() as f64;
            let losses = losses_and_gradients_of(&mut decoder, &inputs, &targets, sequences, scale).unwrap();
            let loss = values(&losses).iter().sum::<f64>() * scale;
            let loss_error = (loss / recorded.values("loss")[0] - 1.0).abs();

            let shards: Vec<Vec<Shard>> = decoder.parameters().iter().map(|p| p.identity.shards.clone()).collect();
            let mut compared = BTreeMap::<String, [Vec<f64>; 2]>::new();
            for ((_, gradient), of_param) in gradients(&mut decoder).into_iter().zip(shards) {
                let mut rest = &gradient[..];
                for shard in of_param {
                    let (own, after) = rest.split_at(shard.elements());
                    rest = after;
                    // All experts may be in one tensor.
                    let [seen, expected] = compared.entry(shard.tensor.stored_name()).or_default();
                    seen.extend(own);
                    expected.extend(values(&recorded.of_tensor("gradients", &shard.tensor)));
                }
            }
            let mut largest = 0f64;
            for (tensor, [seen, expected]) in &compared {
                let error = relative_error(seen, expected);
                assert!(error < sums, "{name} on {device}, gradient of `{tensor}`: {error:.1e}");
                largest = largest.max(error);
            }
            let compared = compared.len();
            assert_eq!(compared, recorded.count("gradients"), "{name}: no gradient is left over");
            eprintln!(
                "{name} on {device}: logits {logits_error:.1e}, loss {loss_error:.1e}, {compared} gradients {largest:.1e} apart"
            );
            assert!(logits_error < sums, "{name} on {device}: logits are {logits_error:e} apart");
            assert!(loss_error < LOSS, "{name} on {device}: the loss is {loss_error:e} apart");
        }
    }
}

/// The text comes from the paged cache: the prompt is read in one pass, then token by token.
#[test]
fn greedy_text_is_that_of_generate() {
    for name in MODELS {
        let recorded = open(name);
        let Some(expected) = recorded.find("greedy") else { continue };
        let expected: Vec<u32> = expected.to_vec::<i32>().unwrap().into_iter().map(|id| id as u32).collect();
        for device in devices() {
            let decoder = decoder(&recorded, &device);
            assert_eq!(greedy_text(&decoder, &expected[..12], expected.len()), expected, "{name} on {device}");
        }
    }
}

/// The table of families in the documentation names each compared model, and no other.
#[test]
fn the_table_of_families_names_all_compared_models() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/models.md");
    let page = std::fs::read_to_string(path).unwrap();
    let columns = page
        .lines()
        .filter(|line| line.starts_with("| `") && !line.starts_with("| `model_type`"))
        .filter_map(|line| line.split('|').nth(3));
    let names = columns.flat_map(|column| column.split('`').skip(1).step_by(2).map(str::to_string));
    let mut named: Vec<String> = names.collect();
    let mut compared: Vec<String> = MODELS.iter().chain(&super::referee::MODELS).map(ToString::to_string).collect();
    named.sort();
    compared.sort();
    assert_eq!(named, compared);
}
