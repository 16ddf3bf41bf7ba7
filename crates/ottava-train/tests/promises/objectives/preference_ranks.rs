//! Runs on preferences whose ranks divide tensors, sequences or experts: losses, metrics and evaluations are the same on one rank.

use super::preference::{run_config, write_records};
use crate::runs::resume::{metrics, train};
use crate::setup::on_ranks;
use ottava_parallel::Zero;
use ottava_recipe::RecipeName;
use ottava_settings::{LoraConfig, LossType, ParallelConfig, PreferenceConfig, RunConfig};
use ottava_tensor::Device;
use ottava_train::trainer::{Start, Trainer};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// Writes a mixture of four experts per block, with the tokenizer of `inputs`. `vocabulary` has the keys of its `config.json` that belong to the tokenizer.
pub fn write_experts(inputs: &Path, experts: &Path, vocabulary: Value) {
    std::fs::create_dir(experts).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"].into_iter().filter(|name| inputs.join(name).exists()) {
        std::fs::copy(inputs.join(name), experts.join(name)).unwrap();
    }
    let config = r#"{"architectures":["Qwen3MoeForCausalLM"],"model_type":"qwen3_moe","hidden_size":32,"intermediate_size":48,
        "moe_intermediate_size":32,"num_experts":4,"num_experts_per_tok":2,"norm_topk_prob":true,"decoder_sparse_step":1,"mlp_only_layers":[],
        "num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":8,"max_position_embeddings":64,
        "rms_norm_eps":1e-6,"rope_theta":10000.0,"tie_word_embeddings":false,"router_aux_loss_coef":0.0}"#;
    let mut config: serde_json::Map<String, Value> = serde_json::from_str(config).unwrap();
    config.extend(vocabulary.as_object().unwrap().clone());
    std::fs::write(experts.join("config.json"), Value::from(config).to_string()).unwrap();
}

/// Returns the metrics of `config` on one rank, or on the ranks of `parallel`.
fn run(config: &RunConfig, name: &str, parallel: ParallelConfig, ranks: usize) -> Vec<Value> {
    let config = RunConfig { output_dir: config.output_dir.join(name), parallel, ..config.clone() };
    let output = config.output_dir.clone();
    if ranks == 1 {
        train(&config, &Device::Cpu, &Start::New, u64::MAX).unwrap();
        return metrics(&output);
    }
    on_ranks(ranks, move |group| {
        let mut trainer = Trainer::shared(config.clone(), &Device::Cpu, &Start::New, group, None).unwrap();
        trainer.run(&AtomicBool::new(false), &mut |_| {}).unwrap();
    });
    metrics(&output)
}

/// Compares the numbers of all lines.
pub fn expect_equal(what: &str, expected: &[Value], got: &[Value]) {
    assert_eq!(expected.len(), got.len(), "{what}");
    let mut compared = 0;
    for (expected_line, got_line) in expected.iter().zip(got) {
        for (key, value) in expected_line.as_object().unwrap() {
            // How much padding experts have depends on the tokens of each rank.
            let Some(expected) = value.as_f64().filter(|_| key != "router_padding") else { continue };
            let got = got_line[key].as_f64().unwrap_or_else(|| panic!("{what}: {key} is missing in {got_line}"));
            // Sums in F32 in another order.
            assert!(
                (expected - got).abs() <= 2e-4 * expected.abs().max(0.05),
                "{what}: {key} is {expected} and {got}\n{expected_line}\n{got_line}"
            );
            compared += usize::from(key.contains("reward"));
        }
    }
    assert!(compared > 4, "{what}: rewards are compared");
}

#[test]
fn ranks_of_every_axis_train_preferences_as_one_rank() {
    let inputs = tempfile::tempdir().unwrap();
    write_records(inputs.path());
    let experts = inputs.path().join("experts");
    write_experts(inputs.path(), &experts, json!({"vocab_size": 100}));
    let runs = tempfile::tempdir().unwrap();
    let of = |name: &str, records: &str| {
        let mut config = run_config(inputs.path(), &runs.path().join(name), RecipeName::Fp32, records);
        (config.training.max_steps, config.training.per_device_train_batch_size) = (Some(2), 4);
        config.training.gradient_accumulation_steps = 1;
        config
    };
    let lora = LoraConfig { r: 4, ..LoraConfig::default() };
    let reward = PreferenceConfig { loss_type: Some(LossType::BradleyTerry.into()), ..PreferenceConfig::default() };
    let with_experts = |config: RunConfig| {
        let mut config = config;
        config.model.path = experts.clone();
        config
    };
    let configs = [
        ("dpo", of("dpo", "pairs.jsonl")),
        ("adapters", RunConfig { lora, ..of("adapters", "pairs.jsonl") }),
        ("kto", of("kto", "labels.jsonl")),
        ("reward", RunConfig { preference: reward, ..of("reward", "pairs.jsonl") }),
        ("experts", with_experts(of("experts", "pairs.jsonl"))),
    ];
    let parallel = |tensor, context, expert| ParallelConfig { tensor, context, expert, ..ParallelConfig::default() };
    for (name, config) in configs {
        let expected = run(&config, "alone", ParallelConfig::default(), 1);
        let has_experts = name == "experts";
        let meshes = [
            ("tensor", parallel(2, 1, 1), 2, true),
            ("context", parallel(1, 2, 1), 2, true),
            ("tensor and context", parallel(2, 2, 1), 4, name == "dpo"),
            ("expert", parallel(1, 1, 2), 2, has_experts),
            ("tensor, ZeRO", ParallelConfig { zero: Zero::Weights, ..parallel(2, 1, 1) }, 4, name == "kto"),
        ];
        for (mesh, parallel, ranks, _) in meshes.into_iter().filter(|(.., wanted)| *wanted) {
            let data = ranks / (parallel.tensor * parallel.context);
            let mut config = config.clone();
            config.training.per_device_train_batch_size /= data;
            expect_equal(&format!("{name}, {mesh}"), &expected, &run(&config, mesh, parallel, ranks));
        }
    }
}
