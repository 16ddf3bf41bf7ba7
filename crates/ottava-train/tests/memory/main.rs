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

/// Returns a Llama of these sizes.
fn sizes(mut keys: Value) -> DecoderConfig {
    keys["model_type"] = json!("llama");
    let Value::Object(keys) = keys else { panic!("config.json is an object") };
    decoder_config(&ConfigFile::from_values("config.json", keys)).unwrap()
}

/// The bound is 2 %: names, shapes and lists of scales are not tensors, and not all threads work at once.
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
