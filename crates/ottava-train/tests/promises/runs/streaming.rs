//! Runs on files that are fetched and tokenized while the run trains: resuming and ranks.

use crate::runs::resume::{self, STEPS, four_rows_on, metrics, state, write_inputs};
use ottava_data::Packing;
use ottava_recipe::RecipeName;
use ottava_settings::{DataConfig, DatasetConfig, RunConfig};
use ottava_tensor::Device;
use ottava_train::trainer::Start;
use std::path::Path;

/// Returns a run on seven small files, two at a time, that reads more than an epoch.
fn config(inputs: &Path, output: &Path, packing: Packing) -> RunConfig {
    let text = std::fs::read_to_string(inputs.join("text.txt")).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    for (number, lines) in lines[4..].chunks(6).enumerate() {
        std::fs::write(inputs.join(format!("part-{number}.txt")), lines.join("\n")).unwrap();
    }
    std::fs::write(inputs.join("held-out.txt"), lines[..4].join("\n")).unwrap();
    let run = resume::config(inputs, output, RecipeName::Fp8Delayed);
    let data = DataConfig {
        train_files: vec![inputs.join("part-*.txt")],
        val_files: vec![inputs.join("held-out.txt")],
        packing,
        document_mask: Some(packing != Packing::Wrapped),
        streaming: true,
        shuffle_shards: 2,
        cached_shards: 4,
        ..run.data.clone()
    };
    RunConfig { data, ..run }
}

/// Returns a run on two streamed data sets.
fn mixture(inputs: &Path, output: &Path) -> RunConfig {
    let run = config(inputs, output, Packing::Bfd);
    for number in 0..3 {
        let lines: Vec<String> = (0..5).map(|line| format!("{} {}", line * 37, number * line)).collect();
        std::fs::write(inputs.join(format!("numbers-{number}.txt")), lines.join("\n")).unwrap();
    }
    let set = |name: &str, weight| DatasetConfig {
        name: name.into(),
        train_files: vec![inputs.join(format!("{name}-*.txt"))],
        val_files: vec![inputs.join("held-out.txt")],
        weight: Some(weight),
        ..DatasetConfig::default()
    };
    let datasets = vec![set("part", 0.7), set("numbers", 0.3)];
    let data = DataConfig { train_files: Vec::new(), val_files: Vec::new(), datasets, ..run.data.clone() };
    RunConfig { data, ..run }
}

#[test]
fn a_streamed_run_that_stops_and_goes_on_is_the_one_that_never_stopped() {
    type Config = fn(&Path, &Path) -> RunConfig;
    let kinds: [(&str, Config); 3] = [
        ("wrapped", |inputs, output| config(inputs, output, Packing::Wrapped)),
        ("packed", |inputs, output| config(inputs, output, Packing::Bfd)),
        ("a mixture", mixture),
    ];
    for (kind, config) in kinds {
        let inputs = tempfile::tempdir().unwrap();
        write_inputs(inputs.path());
        let run = inputs.path().join("unbroken");
        let train = |output: &Path, start: &Start, stop_after: u64| {
            let config = config(inputs.path(), output);
            let outcome = resume::train(&config, &Device::Cpu, start, stop_after);
            assert!(outcome.is_ok() == (stop_after > STEPS), "{outcome:?}");
        };
        train(&run, &Start::New, STEPS + 1);
        for stop_after in 1..STEPS {
            let broken = inputs.path().join(format!("stopped-{stop_after}"));
            train(&broken, &Start::New, stop_after);
            train(&broken, &Start::Resume, STEPS + 1);
            assert_eq!(metrics(&broken), metrics(&run), "{kind}, stopped after step {stop_after}");
            assert!(state(&broken) == state(&run), "{kind}, stopped after step {stop_after}");
        }
        let mut other = config(inputs.path(), &run);
        other.data.shuffle_shards = 1;
        let error = resume::train(&other, &Device::Cpu, &Start::Resume, STEPS + 1).unwrap_err().to_string();
        assert!(error.contains("`data.shuffle_shards` was 2"), "{error}");
        std::fs::write(inputs.path().join("part-9.txt"), "one more file\n").unwrap();
        let more = config(inputs.path(), &run);
        let error = resume::train(&more, &Device::Cpu, &Start::Resume, STEPS + 1).unwrap_err().to_string();
        assert!(error.contains("the data or the tokenizer have changed"), "{error}");
    }
}

#[test]
fn a_stream_has_the_same_data_on_any_number_of_ranks() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let on = |ranks: usize| {
        four_rows_on(ranks, config(inputs.path(), &inputs.path().join(format!("ranks-{ranks}")), Packing::Bfd))
    };
    // Four ranks add the gradients of four rows in the same order as one rank.
    assert!(on(4) == on(1));
}
