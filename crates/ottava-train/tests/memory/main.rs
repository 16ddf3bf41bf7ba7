//! On a CPU, a run allocates as much memory as its plan says. This is a separate test binary, since its allocator counts the allocations of the whole
//! process. The same test on a GPU, where the pool counts, is in `promises`. Also, an engine allocates only the memory that its log-probabilities
//! need.

mod logprobs;
mod settings;

use ottava_models::{ConfigFile, DecoderConfig, decoder_config};
use ottava_settings::ResolvedConfig;
use ottava_tensor::Device;
use ottava_tensor::testing::allocator::CountingAllocator;
use ottava_train::plan::MemoryPlan;
use serde_json::{Value, json};
use settings::{expect_close, settings, steps};
use std::sync::Mutex;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// The lock of a test that counts allocations.
static COUNTED: Mutex<()> = Mutex::new(());

/// Returns a model of these sizes, by default a Llama.
fn sizes(mut keys: Value) -> DecoderConfig {
    if keys.get("model_type").is_none() {
        keys["model_type"] = json!("llama");
    }
    let Value::Object(keys) = keys else { panic!("config.json is an object") };
    decoder_config(&ConfigFile::from_values("config.json", keys)).unwrap()
}

/// The bound is 2 %: names, shapes and lists of scales are not tensors, and not all threads work at once.
#[test]
fn a_run_on_the_cpu_holds_what_was_planned() {
    let _alone = COUNTED.lock().unwrap();
    let llama = sizes(json!({
        "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }));
    // A gated delta net and attention with a gated output.
    let recurrent = sizes(json!({
        "model_type": "qwen3_5_text", "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "full_attention_interval": 2, "linear_num_key_heads": 4,
        "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    }));
    let of_llama = settings(4, 128).into_iter().map(|(name, config)| (name, config, &llama));
    // A Mamba-2 layer beside attention.
    let mamba = sizes(json!({
        "model_type": "falcon_h1", "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "mamba_d_ssm": 512, "mamba_n_heads": 16, "mamba_n_groups": 2,
        "mamba_d_state": 32, "mamba_rms_norm": true, "mlp_multipliers": [0.9, 1.5],
    }));
    let of_recurrent =
        settings(4, 128).into_iter().take(4).map(|(name, config)| (format!("Qwen3.5, {name}"), config, &recurrent));
    let of_mamba =
        settings(4, 128).into_iter().take(4).map(|(name, config)| (format!("Falcon-H1, {name}"), config, &mamba));
    for (name, config, sizes) in of_llama.chain(of_recurrent).chain(of_mamba) {
        let planned = MemoryPlan::new(&ResolvedConfig::fastest(&config), sizes, &Device::Cpu).unwrap();
        let before = CountingAllocator::live();
        CountingAllocator::reset_peak();
        steps(&config, sizes, &Device::Cpu).unwrap();
        expect_close(&name, planned.peak_bytes, CountingAllocator::peak() - before);
    }
}
