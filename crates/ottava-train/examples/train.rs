//! Trains a small model on a few sentences, from settings in TOML, and prints its losses.
//!
//! usage: cargo run --release --example train

use ottava_common::Result;
use ottava_settings::RunConfig;
use ottava_tensor::Device;
use ottava_train::trainer::{Start, Trainer};
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// A model of two layers, as the `config.json` of a model folder.
const MODEL: &str = r#"{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "vocab_size": 4096, "tie_word_embeddings": true}"#;

const SETTINGS: &str = r#"
[model]
init = "random"

[data]
val_set_size = 32
max_length = 64

[data.records]
text_documents = "line"

[training]
max_steps = 20
per_device_train_batch_size = 4

[optimizer]
learning_rate = 3e-3

[precision]
recipe = "fp8-delayed"

[precision.exceptions]
skip_slow_linears = false
"#;

fn main() -> Result<()> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tokenizer");
    let [model, settings, text] = ["model.json", "run.toml", "text.txt"].map(|name| folder.path().join(name));
    let animals = ["otter", "seal", "heron", "salmon"];
    let sentences: String = (0..200).map(|i| format!("The {} swims in river number {i}.\n", animals[i % 4])).collect();
    for (path, text) in [(&model, MODEL), (&settings, SETTINGS), (&text, &sentences)] {
        std::fs::write(path, text).expect("the folder is writable");
    }

    // These are settings of the command line, as after `--set`. A key is a dotted path, or the last part of it.
    let set = |key: &str, path: &Path| format!("{key}={path:?}");
    let paths = [
        set("output_dir", &folder.path().join("run")),
        set("model.path", &model),
        set("model.tokenizer", &tokenizer),
        format!("data.train_files=[{text:?}]"),
    ];
    let config = RunConfig::load(&settings, &paths)?.config;

    let mut trainer = Trainer::new(config, &Device::Cpu, &Start::New)?;
    let mut losses = Vec::new();
    trainer.run(&AtomicBool::new(false), &mut |report| {
        println!(
            "step {:2}: loss {:.3}, gradient norm {:.2}",
            report.step, report.result.loss, report.result.grad_norm
        );
        losses.push(report.result.loss);
    })?;
    assert!(losses[19] < losses[0] - 0.5, "the model learns");
    Ok(())
}

#[test]
fn the_example_runs() {
    main().expect("it runs to its end");
}
