//! The loss of texts with label smoothing: on ranks that divide the vocabulary or the tokens, in evaluations, and in preference losses.

use crate::objectives::preference::{run_config, write_records};
use crate::parallel::divided::{F32, Setup, apart, llama};
use crate::runs::resume::{config, metrics, train, write_inputs};
use ottava_recipe::RecipeName;
use ottava_settings::RunConfig;
use ottava_tensor::Device;
use ottava_train::trainer::Start;
use serde_json::json;

/// The mean over the vocabulary needs the logits of all ranks. The mean over tokens needs the tokens of all ranks that divide a sequence.
#[test]
fn ranks_that_divide_vocabulary_or_tokens_train_as_one_rank_does() {
    for keys in [json!({}), json!({"tie_word_embeddings": true})] {
        let mut alone = Setup::new(llama(keys), RecipeName::Fp32);
        alone.mesh.sizes.head.label_smoothing = 0.3;
        let mut plain = alone.clone();
        plain.mesh.sizes.head.label_smoothing = 0.0;
        let (smoothed, unsmoothed) = (crate::parallel::divided::train(&alone), crate::parallel::divided::train(&plain));
        assert!(crate::parallel::mesh::distance(&smoothed, &unsmoothed).0 > 100.0 * F32, "smoothing has no effect");
        for mesh in [[1, 1, 1, 2], [1, 1, 2, 2], [1, 2, 1, 1]] {
            let (apart, tensor) = apart(&alone, mesh);
            assert!(apart < F32, "{mesh:?}: {tensor} is {apart:.1e} apart");
        }
    }
}

/// Validation losses are smoothed too, as in the Trainer of transformers. They are then not likelihoods of the text.
#[test]
fn evaluations_have_the_loss_of_training_and_no_bits_per_byte() {
    let (inputs, runs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_inputs(inputs.path());
    let of = |name: &str, factor: f64, sentinel_steps: u64| {
        let mut run = config(inputs.path(), &runs.path().join(name), RecipeName::Fp32);
        (run.training.label_smoothing_factor, run.sentinel.sentinel_steps) = (factor, sentinel_steps);
        run.optimizer.learning_rate = 0.0;
        train(&run, &Device::Cpu, &Start::New, run.training.max_steps.unwrap()).unwrap();
        metrics(&run.output_dir)
    };
    let (plain, smoothed) = (of("plain", 0.0, 0), of("smoothed", 0.25, 0));
    let first = |lines: &[serde_json::Value], key: &str| lines.iter().find_map(|line| line[key].as_f64());
    let [nll, loss] = [&plain, &smoothed].map(|lines| first(lines, "eval_loss").unwrap());
    // The weights are random and small: each logit is near the mean, so the loss is near the logarithm of the vocabulary, with and without smoothing.
    assert!(nll != loss && (nll - loss).abs() < 0.1, "{nll} and {loss}");
    assert!(first(&plain, "eval_bits_per_byte").is_some() && first(&smoothed, "eval_bits_per_byte").is_none());
    assert!(smoothed.iter().all(|line| line.get("eval_bits_per_byte").is_none()));
    let [nll, loss] = [&plain, &smoothed].map(|lines| first(lines, "loss").unwrap());
    assert!(nll != loss && (nll - loss).abs() < 0.1, "{nll} and {loss}");
}

/// The sentinel compares the losses of training, which are smoothed.
#[test]
fn the_sentinel_compares_smoothed_losses() {
    let (inputs, runs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_inputs(inputs.path());
    let mut run = config(inputs.path(), &runs.path().join("run"), RecipeName::Fp8Current);
    (run.training.label_smoothing_factor, run.sentinel.sentinel_steps) = (0.25, 2);
    run.sentinel.sentinel_loss_gap = 0.05;
    train(&run, &Device::Cpu, &Start::New, run.training.max_steps.unwrap()).unwrap();
    let text = std::fs::read_to_string(run.output_dir.join("sentinel.jsonl")).unwrap();
    let gaps: Vec<f64> = text
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .filter_map(|line| line["loss_gap"].as_f64())
        .collect();
    // The bound is the limit at which the run would report a gap. Casts to FP8 change these losses by less than 2e-3.
    assert!(!gaps.is_empty() && gaps.iter().all(|gap| gap.abs() < 0.05), "{gaps:?}");
}

#[test]
fn losses_of_preferences_are_not_smoothed() {
    let (inputs, runs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_records(inputs.path());
    let of = |name: &str, factor: f64| {
        let mut run: RunConfig = run_config(inputs.path(), &runs.path().join(name), RecipeName::Fp32, "pairs.jsonl");
        run.training.label_smoothing_factor = factor;
        train(&run, &Device::Cpu, &Start::New, 8).unwrap();
        metrics(&run.output_dir)
    };
    assert_eq!(of("plain", 0.0), of("smoothed", 0.25));
}
