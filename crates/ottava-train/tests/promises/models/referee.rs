//! Compares small models with PyTorch: logits, loss and gradients in F32, and fifty AdamW steps in F32 and BF16. `tests/data/README.md` says where
//! the numbers come from.

use crate::models::recorded::Recorded;
use crate::setup::{
    Training, devices, gradients, greedy_text, largest_error, logits, losses_and_gradients, recipe, relative_error,
};
use ottava_models::Decoder;
use ottava_recipe::param::{MemoryPolicy, Purpose, Shard};
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_tensor::testing::values;
use ottava_tensor::{DType, Device, Tensor};

pub const MODELS: [&str; 6] = ["llama", "qwen2", "qwen3", "gpt2", "cohere", "cohere_qk_norm"];

/// The tolerance of logits and gradients. Sums in F32 have another order than in PyTorch. Measured on the CPU, logits differ by up to 8.7e-7 of the
/// largest logit, and gradients by up to 1.7e-6 of their norm and of their largest element. Models with longer texts reach 4.8e-6
/// (`family_referee.rs`).
const SUMS: f64 = 1e-5;
/// The tolerance of losses. A loss is a mean over targets, in which roundings in both directions cancel: differences of up to 1.6e-7 are seen.
const LOSS: f64 = 1e-6;
fn open(model: &'static str) -> Recorded {
    let file = match model {
        "qwen3" => "referee_qwen3",
        "gpt2" => "referee_gpt2",
        "cohere" | "cohere_qk_norm" => "referee_cohere",
        _ => "referee",
    };
    Recorded::open(file, model)
}

fn decoder(model: &'static str, name: RecipeName, device: &Device) -> Decoder {
    let mut recorded = open(model);
    let recipe = recipe(name, Fp8Format::Hybrid);
    let purpose = Purpose::Train(MemoryPolicy::FULL);
    let mut decoder =
        Decoder::new(&recorded.sizes(), &recipe, device, purpose, 32, &mut recorded).expect("it is built");
    decoder.quantize_weights().expect("nothing to cast");
    decoder
}

/// Returns inputs and targets of step `step`, and the number of rows.
fn batch(model: &'static str, step: usize) -> ([Tensor; 2], usize) {
    let ids = open(model).tensor("ids");
    let [_, rows, length] = ids.dims("ids").unwrap();
    let ids = ids.rows(step, step + 1).unwrap().to_vec::<i32>().unwrap();
    let without = |skip: usize| -> Vec<i32> {
        ids.chunks_exact(length).flat_map(|row| row[skip..skip + length - 1].iter().copied()).collect()
    };
    ([0, 1].map(|skip| Tensor::from_slice(&Device::Cpu, &[rows * (length - 1)], &without(skip)).unwrap()), rows)
}

#[test]
fn logits_loss_and_gradients_are_those_of_pytorch() {
    for model in MODELS {
        let (recorded, (batch, rows)) = (open(model), batch(model, 0));
        for device in devices() {
            let [inputs, targets] = batch.each_ref().map(|ids| ids.to_device(&device).unwrap());
            let mut decoder = decoder(model, RecipeName::Fp32, &device);
            let tokens = inputs.len() / rows;
            let mut seen_logits = Vec::new();
            for row in 0..rows {
                seen_logits.extend(values(&logits(&decoder, &inputs.rows(row * tokens, (row + 1) * tokens).unwrap())));
            }
            let logits_error = largest_error(&seen_logits, &recorded.values("logits"));

            let losses =
                losses_and_gradients(&mut decoder, &inputs, &targets, rows, 1.0 / targets.len() as f64).unwrap();
            let loss = values(&losses).iter().sum::<f64>() / losses.len() as f64;
            let recorded_loss = recorded.values("loss")[0];
            let loss_error = (loss / recorded_loss - 1.0).abs();

            let shards: Vec<Vec<Shard>> = decoder.parameters().iter().map(|p| p.identity.shards.clone()).collect();
            let (mut error, mut largest, mut compared) = (0f64, 0f64, 0);
            for ((_, gradient), of_param) in gradients(&mut decoder).into_iter().zip(shards) {
                let mut rest = &gradient[..];
                for shard in of_param {
                    let (own, after) = rest.split_at(shard.elements());
                    rest = after;
                    let expected = values(&recorded.of_tensor("gradients", &shard.tensor));
                    let errors = [relative_error(own, &expected), largest_error(own, &expected)];
                    assert!(
                        errors.iter().all(|&e| e < SUMS),
                        "{model} on {device}, gradient of `{}`: {errors:?}",
                        shard.tensor.name
                    );
                    (error, largest, compared) = (error.max(errors[0]), largest.max(errors[1]), compared + 1);
                }
            }
            assert_eq!(compared, recorded.count("gradients"), "no gradient is left over");
            eprintln!(
                "{model} on {device}: logits {logits_error:.1e}, loss {loss_error:.1e}, {compared} gradients {error:.1e} and {largest:.1e} apart"
            );
            assert!(logits_error < SUMS, "{model} on {device}: logits are {logits_error:e} apart");
            assert!(loss_error < LOSS, "{model} on {device}: the loss is {loss}, PyTorch's is {recorded_loss}");
        }
    }
}

#[test]
fn greedy_text_is_that_of_pytorch() {
    for model in ["gpt2", "cohere", "cohere_qk_norm"] {
        let expected = open(model).ids("greedy");
        let expected: Vec<u32> = expected.into_iter().map(|id| id as u32).collect();
        for device in devices() {
            let decoder = decoder(model, RecipeName::Fp32, &device);
            assert_eq!(greedy_text(&decoder, &expected[..4], expected.len()), expected, "{model} on {device}");
        }
    }
}

/// Greedy text takes the first of equal logits, and in BF16 likely tokens often have equal logits.
#[test]
fn logits_of_generation_are_not_rounded_to_the_compute_type() {
    for device in devices() {
        for name in [RecipeName::Bf16, RecipeName::Fp8Current] {
            let decoder = decoder("llama", name, &device);
            let ids = Tensor::from_slice(&device, &[5], &[1, 2, 3, 4, 5]).unwrap();
            let logits = logits(&decoder, &ids);
            assert_eq!(logits.dtype(), DType::F32, "{} on {device}", name.as_str());
            let rounded = values(&logits).into_iter().filter(|v| f64::from(half::bf16::from_f64(*v)) == *v).count();
            assert!(rounded * 10 < logits.len(), "{rounded} of {} are BF16 values", logits.len());
        }
    }
}

/// Returns the losses of fifty steps from the recorded weights, on the recorded batches.
fn train(model: &'static str, name: RecipeName, device: &Device) -> Vec<f64> {
    let mut training = Training::new(decoder(model, name, device));
    (0..50)
        .map(|step| {
            let (batch, rows) = batch(model, step);
            training.step(&batch, rows)
        })
        .collect()
}

/// Returns the largest relative difference of losses, and the step that has it.
fn apart(losses: &[f64], expected: &[f64]) -> (f64, usize) {
    let apart = losses.iter().zip(expected).enumerate().map(|(step, (a, b))| ((a / b - 1.0).abs(), step));
    apart.max_by(|a, b| a.0.total_cmp(&b.0)).expect("steps")
}

/// PyTorch's two ways to train in BF16 round at different places: autocast keeps the residual stream in F32, and `bf16` also rounds inside norms,
/// rotations and softmax. Their losses differ by up to 6.7e-4 from each other and by up to 9.7e-4 from the losses in F32. Ottava's losses lie among
/// them.
#[test]
fn fifty_steps_lose_what_they_lose_in_pytorch() {
    let comparisons =
        [(RecipeName::Fp32, vec![("f32", 1e-5)]), (RecipeName::Bf16, vec![("bf16", 1e-3), ("autocast", 1e-3)])];
    for model in MODELS {
        for (name, modes) in &comparisons {
            for device in devices() {
                let losses = train(model, *name, &device);
                for (mode, allowed) in modes {
                    let (error, step) = apart(&losses, &open(model).values(&format!("losses/{mode}")));
                    let what = format!("{model} on {device}: losses of {} and PyTorch's {mode}", name.as_str());
                    eprintln!("{what} are at most {error:.1e} apart, in step {step}");
                    assert!(error < *allowed, "{what} are {error:e} apart in step {step}");
                }
            }
        }
    }
}
