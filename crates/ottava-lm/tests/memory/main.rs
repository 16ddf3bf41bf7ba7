//! On a CPU a run allocates what was planned for it. A test binary of its own, since its allocator counts what the whole process
//! allocates; the same on a GPU, whose pool counts, is among the promises. An engine holds what its log-probabilities take.

mod logprobs;
mod settings;

use ottava_lm::config::ResolvedConfig;
use ottava_lm::models::{ConfigFile, DecoderConfig, decoder_config};
use ottava_lm::plan::MemoryPlan;
use ottava_tensor::Device;
use ottava_tensor::testing::allocator::CountingAllocator;
use serde_json::{Value, json};
use settings::{expect_close, settings, steps};
use std::sync::Mutex;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Held by a test that counts.
static COUNTED: Mutex<()> = Mutex::new(());

/// A Llama of these sizes.
fn sizes(mut keys: Value) -> DecoderConfig {
    keys["model_type"] = json!("llama");
    let Value::Object(keys) = keys else { panic!("config.json is an object") };
    decoder_config(&ConfigFile::from_values("config.json", keys)).unwrap()
}

/// Within 2 %: names, shapes and lists of scales are no tensors, and threads do not always all work at once.
#[test]
fn a_run_on_the_cpu_holds_what_was_planned() {
    let _alone = COUNTED.lock().unwrap();
    let sizes = sizes(json!({
        "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }));
    for (name, config) in settings(4, 128) {
        let planned = MemoryPlan::new(&ResolvedConfig::fastest(&config), &sizes, &Device::Cpu).unwrap();
        let before = CountingAllocator::live();
        CountingAllocator::reset_peak();
        steps(&config, &sizes, &Device::Cpu).unwrap();
        expect_close(&name, planned.peak_bytes, CountingAllocator::peak() - before);
    }
}
