//! Tasks of a run.

use crate::runs::resume::{config, metrics, train, write_inputs};
use crate::setup::on_ranks;
use ottava_parallel::Zero;
use ottava_recipe::RecipeName;
use ottava_settings::{Interval, ParallelConfig, RunConfig};
use ottava_tensor::Device;
use ottava_train::trainer::{Start, Trainer};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// Writes a task of each type, and returns their files.
fn write_tasks(folder: &Path) -> Vec<PathBuf> {
    let line =
        |i: u32| format!(r#"{{"number": {i}, "words": ["word {i}", "and {}", "no"], "label": {}}}"#, i * 7 % 10, i % 3);
    std::fs::write(folder.join("items.jsonl"), (0..11).map(|i| line(i) + "\n").collect::<String>()).unwrap();
    let write = |name: &str, settings: &str| {
        let path = folder.join(format!("{name}.toml"));
        std::fs::write(&path, format!("name = \"{name}\"\ndata = \"items.jsonl\"\n{settings}")).unwrap();
        path
    };
    let prompt = "prompt = \"line {{ number }} says\"";
    vec![
        write("choice", &format!("type = \"multiple_choice\"\n{prompt}\nchoices = \"words\"\nanswer = \"label\"")),
        write(
            "text",
            "type = \"loglikelihood_rolling\"\nanswer = \"line {{ number }} says {{ words[0] }} {{ words[1] }} {{ number }}\"",
        ),
        write(
            "draw",
            &format!(
                "type = \"generate_until\"\n{prompt}\nanswer = \"{{{{ 'w' }}}}\"\n[generation]\nmax_gen_toks = 3\n[filter]\nregex_pattern = \"[a-z]\""
            ),
        ),
    ]
}

/// Returns a run that evaluates tasks after every step.
pub fn run(inputs: &Path, name: &str, recipe: RecipeName) -> RunConfig {
    let mut config = config(inputs, &inputs.join(name), recipe);
    config.data.max_length = 32;
    config.evaluation.tasks = write_tasks(inputs);
    config.evaluation.eval_steps = Interval::Every(1);
    (config.training.per_device_train_batch_size, config.training.gradient_accumulation_steps) = (2, 4);
    config
}

/// Returns the metrics of tasks before the first step, which the initial weights determine.
fn first_scores(run: &Path) -> BTreeMap<String, f64> {
    let line = metrics(run).swap_remove(0);
    let of_tasks = |name: &str| ["eval_choice_", "eval_text_", "eval_draw_"].iter().any(|task| name.starts_with(task));
    let numbers = line.as_object().unwrap().iter().filter(|(name, _)| of_tasks(name));
    numbers.map(|(name, value)| (name.clone(), value.as_f64().unwrap())).collect()
}

/// Trains `steps` steps on `ranks` ranks of a mesh, which have the same sequences per step as one rank, and returns [`first_scores`].
fn scores_on(
    inputs: &Path,
    name: &str,
    recipe: RecipeName,
    ranks: usize,
    parallel: ParallelConfig,
) -> BTreeMap<String, f64> {
    let mut config = run(inputs, name, recipe);
    config.training.max_steps = Some(1);
    config.training.gradient_accumulation_steps = 4 * parallel.tensor * parallel.pipeline * parallel.context / ranks;
    if parallel.pipeline * parallel.context > 1 {
        // Ranks that divide layers or tokens draw no texts.
        config.evaluation.tasks.pop();
    }
    config.parallel = parallel;
    let output = config.output_dir.clone();
    for result in on_ranks(ranks, move |group| {
        let mut trainer = Trainer::shared(config.clone(), &Device::Cpu, &Start::New, group, None)?;
        trainer.run(&AtomicBool::new(false), &mut |_| {})
    }) {
        result.unwrap();
    }
    first_scores(&output)
}

#[test]
fn tasks_have_the_same_scores_on_any_number_of_ranks() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    for recipe in [RecipeName::Bf16, RecipeName::Fp8Current, RecipeName::Fp8Block] {
        let parallel = || ParallelConfig { zero: Zero::Weights, ..ParallelConfig::default() };
        let on =
            |ranks: usize| scores_on(inputs.path(), &format!("{}-{ranks}", recipe.as_str()), recipe, ranks, parallel());
        let alone = on(1);
        // Two metrics with standard errors, three perplexities, and the exact match with its standard error.
        assert_eq!(alone.len(), 2 * 2 + 3 + 2, "{alone:?}");
        for ranks in [2, 4] {
            assert_eq!(on(ranks), alone, "{recipe:?} on {ranks} ranks");
        }
    }
}

#[test]
fn tasks_have_the_same_scores_if_ranks_divide_the_model() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let alone = scores_on(inputs.path(), "alone", RecipeName::Fp32, 1, ParallelConfig::default());
    let tensor = || ParallelConfig { tensor: 2, ..ParallelConfig::default() };
    for (name, ranks, draws, parallel) in [
        ("tensor", 2, 2, tensor()),
        ("tensor and data", 4, 2, ParallelConfig { zero: Zero::Weights, ..tensor() }),
        ("pipeline", 2, 0, ParallelConfig { pipeline: 2, ..ParallelConfig::default() }),
        ("context", 2, 0, ParallelConfig { context: 2, ..ParallelConfig::default() }),
    ] {
        let divided = scores_on(inputs.path(), name, RecipeName::Fp32, ranks, parallel);
        assert_eq!(divided.len(), 2 * 2 + 3 + draws, "{name}: {divided:?}");
        for (metric, value) in &divided {
            // Sums in F32 have another order.
            assert!(
                (value / alone[metric] - 1.0).abs() < 1e-5 || *value == alone[metric],
                "{name}: {metric} is {value}, not {}",
                alone[metric]
            );
        }
    }
}

#[test]
fn a_resumed_run_has_the_same_scores_and_the_best_checkpoint_by_a_task() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let of = |name: &str| {
        let mut config = run(inputs.path(), name, RecipeName::Fp8Current);
        config.optimizer.learning_rate = 0.1;
        config.evaluation.load_best_model_at_end = true;
        config.evaluation.metric_for_best_model = "eval_choice_acc_norm".into();
        config
    };
    let unbroken = of("unbroken");
    let mut trainer = Trainer::new(unbroken.clone(), &Device::Cpu, &Start::New).unwrap();
    trainer.run(&AtomicBool::new(false), &mut |_| {}).unwrap();
    let lines = metrics(&unbroken.output_dir);
    let values: Vec<f64> = lines[1..].iter().map(|line| line["eval_choice_acc_norm"].as_f64().unwrap()).collect();
    let highest = values.iter().copied().fold(0.0, f64::max);
    assert!(values.iter().any(|value| *value != highest), "the scores of {values:?} differ");
    let (best, _) = trainer.best().unwrap();
    assert_eq!(
        (best.value, best.step),
        (highest, values.iter().position(|value| *value == highest).unwrap() as u64 + 1)
    );
    let broken = of("broken");
    for stop_after in [2, 4] {
        let start = if stop_after == 2 { Start::New } else { Start::Resume };
        assert!(train(&broken, &Device::Cpu, &start, stop_after).is_err());
    }
    train(&broken, &Device::Cpu, &Start::Resume, 100).unwrap();
    assert_eq!(metrics(&broken.output_dir), lines);
}

#[test]
fn a_run_without_held_out_rows_has_only_the_scores_of_tasks() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let mut config = run(inputs.path(), "run", RecipeName::Bf16);
    (config.data.val_set_size, config.training.max_steps) = (0.0, Some(1));
    train(&config, &Device::Cpu, &Start::New, 100).unwrap();
    let lines = metrics(&config.output_dir);
    for line in &lines {
        assert_eq!((&line["eval_loss"], line["eval_choice_acc"].is_f64()), (&Value::Null, true), "{line}");
    }
    assert_eq!(lines.len(), 2);
}

#[test]
fn tasks_that_a_run_cannot_evaluate_are_errors_before_its_files_change() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let fails = |change: &dyn Fn(&mut RunConfig), part: &str| {
        let mut config = run(inputs.path(), "run", RecipeName::Bf16);
        change(&mut config);
        let results = on_ranks(config.parallel.context, move |group| {
            Trainer::shared(config.clone(), &Device::Cpu, &Start::New, group, None).map(drop)
        });
        let error = results.into_iter().next().unwrap().unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    };
    fails(
        &|config| config.parallel.context = 2,
        "`parallel.context` is 2, and the ranks that draw the texts of the task draw have all layers",
    );
    let twice = |config: &mut RunConfig| config.evaluation.tasks.push(config.evaluation.tasks[0].clone());
    fails(&twice, "has the name choice, which another task or data set has");
    fails(&|config| config.evaluation.tasks.push("missing.toml".into()), "missing.toml");
    fails(&|config| config.data.max_length = 4, "the choice has");
    let unknown = |config: &mut RunConfig| {
        config.evaluation.load_best_model_at_end = true;
        config.evaluation.metric_for_best_model = "eval_choice_acc_stderr".into();
    };
    fails(
        &unknown,
        "is \"eval_choice_acc_stderr\"; an evaluation of this run has eval_loss, eval_bits_per_byte, eval_choice_acc",
    );
    assert!(!inputs.path().join("run/metrics.jsonl").exists());
}
