//! Runs on several data sets: shares, validation of each set, resuming and ranks.

use crate::runs::resume::{self, STEPS, four_rows_on, metrics, state, write_inputs};
use ottava_checkpoint::{Verify, training, verify};
use ottava_data::DataState;
use ottava_recipe::RecipeName;
use ottava_settings::{DataConfig, DatasetConfig, RunConfig};
use ottava_tensor::Device;
use ottava_train::trainer::Start;
use std::fmt::Write;
use std::path::Path;

/// Returns a run in which seven tenths of the tokens are lines of words, and three tenths are lines of numbers.
fn config(inputs: &Path, output: &Path) -> RunConfig {
    let numbers: String = (0..30).fold(String::new(), |mut text, i| {
        writeln!(text, "{} {}", i * 37, i * i).unwrap();
        text
    });
    std::fs::write(inputs.join("numbers.txt"), numbers).unwrap();
    let set = |name: &str, file: &str, weight| DatasetConfig {
        name: name.into(),
        train_files: vec![inputs.join(file)],
        weight: Some(weight),
        ..DatasetConfig::default()
    };
    let run = resume::config(inputs, output, RecipeName::Fp8Delayed);
    let datasets = vec![set("words", "text.txt", 0.7), set("numbers", "numbers.txt", 0.3)];
    RunConfig { data: DataConfig { train_files: Vec::new(), datasets, ..run.data.clone() }, ..run }
}

fn train(config: &RunConfig, start: &Start, stop_after: u64) {
    let outcome = resume::train(config, &Device::Cpu, start, stop_after);
    assert!(outcome.is_ok() == (stop_after > STEPS), "{outcome:?}");
}

#[test]
fn a_mixture_that_stops_and_goes_on_is_the_one_that_never_stopped() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let run = inputs.path().join("unbroken");
    train(&config(inputs.path(), &run), &Start::New, STEPS + 1);
    for stop_after in 1..STEPS {
        let broken = inputs.path().join(format!("stopped-{stop_after}"));
        let config = config(inputs.path(), &broken);
        train(&config, &Start::New, stop_after);
        train(&config, &Start::Resume, STEPS + 1);
        assert_eq!(metrics(&broken), metrics(&run), "stopped after step {stop_after}");
        assert!(state(&broken) == state(&run), "stopped after step {stop_after}");
    }
}

#[test]
fn each_set_has_a_validation_loss_of_its_own() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let run = inputs.path().join("run");
    train(&config(inputs.path(), &run), &Start::New, STEPS + 1);
    let evaluated: Vec<_> = metrics(&run).into_iter().filter(|line| !line["eval_loss"].is_null()).collect();
    assert_eq!(evaluated.len(), 4, "at the start and after steps 2, 4 and 6");
    for line in &evaluated {
        let [all, words, numbers] =
            ["eval_loss", "eval_words_loss", "eval_numbers_loss"].map(|key| line[key].as_f64().unwrap());
        let [least, most] = [words.min(numbers), words.max(numbers)];
        assert!(least < all && all < most, "{line}");
    }
    // The validation loss of a set equals the loss of a run with only this set, from the same weights.
    let mut config = config(inputs.path(), &inputs.path().join("alone"));
    config.data.datasets.remove(0);
    train(&config, &Start::New, STEPS + 1);
    let first = &metrics(&inputs.path().join("alone"))[0];
    assert_eq!(first["eval_loss"], evaluated[0]["eval_numbers_loss"]);
    assert_eq!(first["eval_numbers_loss"], evaluated[0]["eval_numbers_loss"]);
}

#[test]
fn other_weights_from_a_checkpoint_on_are_kept_from_there() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let run = inputs.path().join("run");
    let before = config(inputs.path(), &run);
    train(&before, &Start::New, 3);
    let mut after = before.clone();
    (after.data.datasets[0].weight, after.data.datasets[1].weight) = (Some(1.0), Some(3.0));
    train(&after, &Start::Resume, STEPS + 1);
    let checkpoint = run.join(format!("checkpoints/checkpoint-{STEPS}"));
    let progress = training::progress(&checkpoint, &verify(&checkpoint, Verify::Sizes).unwrap()).unwrap();
    let DataState::Mixture(sets) = progress.rows.loader else { panic!("{:?}", progress.rows.loader) };
    let tokens: Vec<u64> = sets.iter().map(|set| set.tokens).collect();
    // Three steps have 12 rows of 16 tokens: nine rows of one set, and 27 of the other.
    assert_eq!(tokens, [9 * 16, 27 * 16]);
    // With another set, the data differ.
    after.data.datasets.remove(1);
    let error = resume::train(&after, &Device::Cpu, &Start::Resume, STEPS + 1).unwrap_err().to_string();
    assert!(error.contains("the data or the tokenizer have changed"), "{error}");
}

#[test]
fn a_mixture_has_the_same_data_on_any_number_of_ranks() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let on = |ranks: usize| four_rows_on(ranks, config(inputs.path(), &inputs.path().join(format!("ranks-{ranks}"))));
    let (metrics, state) = on(1);
    // Four ranks add the gradients of four rows in the same order as one rank.
    assert!(on(4) == (metrics.clone(), state));
    // Two ranks add two sums of two rows, so only the first loss, before any update, has the same bits.
    let (on_two, _) = on(2);
    assert_eq!(on_two[..2], metrics[..2]);
    for (seen, expected) in on_two.iter().zip(&metrics).skip(2) {
        let [seen_loss, loss] = [seen, expected].map(|line| line["loss"].as_f64().unwrap());
        assert!((seen_loss - loss).abs() < 2e-3 * loss, "{seen} and {expected}");
        assert_eq!(seen["tokens"], expected["tokens"]);
    }
}
