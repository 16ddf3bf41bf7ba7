//! DoRA: gradients of magnitudes and adapters; folders, merged models and runs.

use crate::peft::lora::{adapter_run, base, folder_losses};
use crate::runs::resume::{metrics, train, write_inputs};
use crate::setup::{Seeded, config, double, gradients, losses, losses_and_gradients};
use crate::step::gradients::{expect_gradient, family};
use ottava_checkpoint::{AdapterFolder, merge};
use ottava_models::{Decoder, DecoderConfig};
use ottava_recipe::RecipeName;
use ottava_recipe::lora::{Lora, Targets};
use ottava_recipe::param::{MemoryPolicy, Purpose};
use ottava_settings::{LoraConfig, RunConfig};
use ottava_tensor::Device;
use ottava_tensor::testing::{integers, values};
use ottava_train::trainer::Start;
use safetensors::SafeTensors;
use serde_json::json;
use std::path::Path;

const RANK: usize = 2;
const ALPHA: f64 = 3.0;

/// Returns a model of one block with seeded adapters and magnitudes, in F64.
fn model(targets: &[&str]) -> Decoder {
    let targets = Targets::Names(targets.iter().map(ToString::to_string).collect());
    let mut keys = family("LlamaForCausalLM", false);
    keys["num_hidden_layers"] = json!(1);
    let lora = Some(Lora { r: RANK, alpha: ALPHA, use_rslora: false, use_dora: true, targets, ..Lora::default() });
    let (sizes, purpose) = (DecoderConfig { lora, ..config(keys) }, Purpose::Train(MemoryPolicy::FULL));
    Decoder::new(&sizes, &double(), &Device::Cpu, purpose, 5, &mut Seeded { std: 0.5 }).unwrap()
}

/// Norms do not depend on magnitudes, so differences of the loss are the gradients of magnitudes. The exact gradients of the matrices have another
/// term, which PEFT leaves out: the loss depends on `A` and `B` also through the norms. This term follows from the gradient of the magnitudes.
#[test]
fn backward_is_the_gradient_with_constant_norms() {
    let (rows, scale) = (2, 0.37);
    let (inputs, targets) = (integers("inputs", rows * 5, 11), integers("targets", rows * 5, 11));
    for (linears, vectors) in [(&["o_proj"][..], 1), (&["q_proj", "v_proj", "gate_proj", "down_proj"], 4)] {
        let mut model = model(linears);
        losses_and_gradients(&mut model, &inputs, &targets, rows, scale).unwrap();
        let mut found = gradients(&mut model);
        if let [a, b, magnitude] = &mut found[..] {
            add_term_of_norms(&mut model, a, b, magnitude);
        }
        let mut compared = 0;
        for (i, (name, gradient)) in found.iter().enumerate() {
            if linears.len() > 1 && !name.ends_with("lora_magnitude_vector") {
                continue;
            }
            let start = model.parameters()[i].weights.value().unwrap();
            expect_gradient(name, gradient, &start, |value| {
                model.parameters()[i].weights.set_value(value);
                scale * values(&losses(&mut model, &inputs, &targets, rows).unwrap()).iter().sum::<f64>()
            });
            model.parameters()[i].weights.set_value(start);
            compared += 1;
        }
        assert_eq!(compared, vectors + if linears.len() > 1 { 0 } else { 2 });
    }
}

type Named = (String, Vec<f64>);

/// Adds the contribution of the norms `‖v‖` of the rows `v` of `W + s · B · A` to the gradients of `a` and `b`: `d‖v‖ = v · dv / ‖v‖`, and the
/// derivative by a norm is `-dm · m / ‖v‖`.
fn add_term_of_norms(model: &mut Decoder, a: &mut Named, b: &mut Named, magnitude: &Named) {
    let of = |model: &mut Decoder, name: &str| {
        let param = model.all_parameters().into_iter().find(|param| param.identity.name() == name).unwrap();
        values(&param.weights.value().unwrap())
    };
    let [a_values, b_values, m] = [&a.0, &b.0, &magnitude.0].map(|name| of(model, name));
    let w = of(model, "model.layers.0.self_attn.o_proj.weight");
    let (scale, columns) = (ALPHA / RANK as f64, a_values.len() / RANK);
    for (n, w) in w.chunks_exact(columns).enumerate() {
        let b_row = &b_values[n * RANK..][..RANK];
        let v: Vec<f64> = (0..columns)
            .map(|k| w[k] + scale * (0..RANK).map(|j| b_row[j] * a_values[j * columns + k]).sum::<f64>())
            .collect();
        let square: f64 = v.iter().map(|v| v * v).sum();
        let by_square = -magnitude.1[n] * m[n] / square;
        for j in 0..RANK {
            for k in 0..columns {
                a.1[j * columns + k] += by_square * scale * b_row[j] * v[k];
                b.1[n * RANK + j] += by_square * scale * v[k] * a_values[j * columns + k];
            }
        }
    }
}

fn dora_run(inputs: &Path, base: &Path, output: &Path, recipe: RecipeName) -> RunConfig {
    let mut run = adapter_run(inputs, base, output, recipe);
    run.lora.use_dora = true;
    run
}

#[test]
fn runs_resume_exactly_and_start_from_their_folders() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let base = base(inputs.path());
    for name in [RecipeName::Fp32, RecipeName::Fp8Current] {
        let run = |output: &str| {
            dora_run(inputs.path(), &base, &inputs.path().join(format!("{}-{output}", name.as_str())), name)
        };
        let (straight, split) = (run("straight"), run("split"));
        train(&straight, &Device::Cpu, &Start::New, u64::MAX).unwrap();
        train(&split, &Device::Cpu, &Start::New, 3).unwrap_err();
        train(&split, &Device::Cpu, &Start::Resume, u64::MAX).unwrap();
        assert_eq!(metrics(&straight.output_dir), metrics(&split.output_dir), "{}", name.as_str());
        let folder = straight.output_dir.join("checkpoints/checkpoint-6");
        let bytes = |run: &RunConfig| {
            std::fs::read(run.output_dir.join("checkpoints/checkpoint-6/adapter_model.safetensors")).unwrap()
        };
        assert!(bytes(&straight) == bytes(&split), "{}", name.as_str());
        let bytes = bytes(&straight);
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let magnitude =
            tensors.tensor("base_model.model.model.layers.1.self_attn.k_proj.lora_magnitude_vector").unwrap();
        assert_eq!((tensors.len(), magnitude.shape()), (42, &[16][..]));
        // A run that starts from the folder has its magnitudes.
        let mut other = run("other");
        other.lora = LoraConfig { init_from: folder, ..LoraConfig::default() };
        let other = other.with_adapter().unwrap();
        assert!(other.lora.use_dora);
        train(&other, &Device::Cpu, &Start::New, 1).unwrap_err();
        let last = metrics(&straight.output_dir).last().unwrap()["eval_loss"].clone();
        assert_eq!(metrics(&other.output_dir)[0]["eval_loss"], last, "{}", name.as_str());
    }
}

#[test]
fn merged_rows_have_their_magnitudes() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let base = base(inputs.path());
    let run = dora_run(inputs.path(), &base, &inputs.path().join("run"), RecipeName::Fp32);
    train(&run, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    let (folder, merged) = (run.output_dir.join("checkpoints/checkpoint-6"), inputs.path().join("merged"));
    let adapter = AdapterFolder::open(&folder).unwrap();
    assert_eq!(merge(&base, &adapter, None, &merged).unwrap(), 14);
    let losses = |model, adapter| folder_losses(model, adapter, RecipeName::Fp32);
    let (with, sum) = (losses(&base, Some(&*folder)), losses(&merged, None));
    assert!((with / sum - 1.0).abs() < 1e-6, "base and adapter lose {with}, the merged model {sum}");
    // The same matrices without the magnitudes give another model.
    let plain = inputs.path().join("plain");
    std::fs::create_dir(&plain).unwrap();
    let text = std::fs::read_to_string(folder.join("adapter_config.json")).unwrap();
    std::fs::write(plain.join("adapter_config.json"), text.replace("\"use_dora\": true", "\"use_dora\": false"))
        .unwrap();
    std::fs::copy(folder.join("adapter_model.safetensors"), plain.join("adapter_model.safetensors")).unwrap();
    let error = merge(&base, &AdapterFolder::open(&plain).unwrap(), None, &inputs.path().join("other"))
        .unwrap_err()
        .to_string();
    assert!(error.contains("lora_magnitude_vector"), "{error}");
}
