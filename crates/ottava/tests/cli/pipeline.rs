//! Tests ranks that divide the layers of a run, as processes on the CPU.

use crate::ranks::{expect_ends_of_all_ranks, losses, train};
use crate::setup::{Run, steps};
use std::fs;

/// The settings of a model of four blocks in FP8, with samples at the end.
const COMMON: [&str; 8] = [
    "--set",
    "recipe=fp8-delayed",
    "--set",
    "lr_scheduler.type=constant",
    "--set",
    "async_save=false",
    "--set",
    "generation.prompts=[\"line 4\"]",
];

fn inputs() -> Run {
    let run = Run::new();
    run.replace("model/config.json", "\"num_hidden_layers\": 1", "\"num_hidden_layers\": 4");
    run
}

/// Returns the settings as arguments.
fn set<'a>(settings: &[&'a str]) -> Vec<&'a str> {
    settings.iter().flat_map(|setting| ["--set", setting]).collect()
}

fn go(run: &Run, settings: &[&str], more: &[&str]) -> String {
    run.succeed(&train(&[&COMMON[..], &set(settings), more].concat()))
}

/// Returns the metrics of each step and the log of casts, without times.
fn metrics(run: &Run) -> Vec<serde_json::Value> {
    let lines = |name: &str| fs::read_to_string(run.path(name)).unwrap_or_default();
    let text = lines("run/metrics.jsonl") + &lines("run/casts.jsonl");
    let read = |line: &str| {
        let mut values: serde_json::Value = serde_json::from_str(line).unwrap();
        let object = values.as_object_mut().unwrap();
        object.retain(|key, _| !["tokens_per_second", "peak_memory_bytes"].contains(&key.as_str()));
        values
    };
    text.lines().map(read).collect()
}

#[test]
fn a_pipeline_leaves_what_one_process_leaves() {
    let alone = inputs();
    let samples = go(&alone, &["max_steps=3"], &[]);
    let weights = |run: &Run| fs::read(run.path("run/checkpoints/checkpoint-3/model.safetensors")).unwrap();
    for (ranks, settings) in [
        ("2", &["parallel.pipeline=2"][..]),
        ("2", &["parallel.pipeline=2", "pipeline_schedule=interleaved", "pipeline_stages=2", "async_save=true"]),
        ("4", &["parallel.pipeline=4", "pipeline_schedule=zero-bubble"]),
        ("2", &["parallel.pipeline=2", "pipeline_schedule=gpipe", "recompute=full"]),
    ] {
        let run = inputs();
        let said = go(&run, &[&["max_steps=3"], settings].concat(), &["--ranks", ranks]);
        assert_eq!(metrics(&run), metrics(&alone), "{settings:?}");
        assert!(weights(&run) == weights(&alone), "{settings:?}: one folder with the same weights");
        assert_eq!(said.lines().last(), samples.lines().last(), "{settings:?}: samples of the whole model");
    }
}

/// The results are bit-identical, even if the loss scale is halved after skipped steps.
#[test]
fn optimizers_levels_and_loss_scales_have_the_bits_of_one_process() {
    for settings in [
        &["optimizer.name=muon"][..],
        &["storage=msamp-o2", "high_precision_steps=2..3"],
        &["recipe=fp16", "initial_loss_scale=16777216"],
        &["packing=bfd"],
    ] {
        let (alone, run) = (inputs(), inputs());
        let settings = [&["max_steps=3"], settings].concat();
        go(&alone, &settings, &[]);
        let pipeline = ["parallel.pipeline=2", "pipeline_schedule=zero-bubble"];
        go(&run, &[&settings[..], &pipeline].concat(), &["--ranks", "2"]);
        assert_eq!(metrics(&run), metrics(&alone), "{settings:?}");
    }
}

/// All ranks end with an error that names the gradient, whichever rank has it.
#[test]
fn a_gradient_that_is_not_finite_ends_all_ranks() {
    let run = inputs();
    let settings = ["max_steps=9", "learning_rate=1e30", "warmup_steps=0", "parallel.pipeline=2", "recipe=bf16"];
    let args = [&COMMON[2..], &set(&settings), &["--ranks", "2"]].concat();
    run.fail(&train(&args), 4, &["the first gradient that is not finite is that of `"]);
    let log = fs::read_to_string(run.path("run/rank-1.log")).unwrap();
    assert!(log.contains("the first gradient that is not finite"), "{log}");
}

#[test]
fn a_run_resumes_with_another_pipeline() {
    let unbroken = inputs();
    go(&unbroken, &["max_steps=6"], &[]);
    let run = inputs();
    go(&run, &["max_steps=2", "parallel.pipeline=2"], &["--ranks", "2"]);
    let zero_bubble = ["max_steps=4", "parallel.pipeline=4", "pipeline_schedule=zero-bubble"];
    go(&run, &zero_bubble, &["--ranks", "4", "--resume"]);
    go(&run, &["max_steps=6"], &["--resume"]);
    assert_eq!(losses(&run), losses(&unbroken));
    // Ranks that also share the rows add in another order, so their losses are only near.
    let both = ["max_steps=8", "parallel.pipeline=2", "parallel.zero=1"];
    go(&run, &both, &["--ranks", "4", "--resume"]);
    go(&run, &["max_steps=9", "parallel.pipeline=2"], &["--ranks", "2", "--resume"]);
    assert_eq!(steps(&run.path("run/metrics.jsonl")), (0..=9).collect::<Vec<_>>());
}

#[test]
fn pipelines_that_share_rows_leave_what_data_parallel_ranks_leave() {
    for zero in ["parallel.zero=0", "parallel.zero=1"] {
        let shared = inputs();
        go(&shared, &["max_steps=3", zero], &["--ranks", "2"]);
        let run = inputs();
        go(&run, &["max_steps=3", zero, "parallel.pipeline=2"], &["--ranks", "4"]);
        assert_eq!(metrics(&run), metrics(&shared), "{zero}");
    }
}

#[test]
fn adapters_train_in_a_pipeline() {
    let base = inputs();
    go(&base, &["max_steps=1"], &[]);
    let adapted = ["model.path=run/checkpoints/checkpoint-1", "model.init=pretrained", "lora.r=2", "max_steps=2"];
    let train = |folder: &str, more: &[&str], ranks: &[&str]| {
        go(&base, &[&adapted[..], &[&format!("output_dir={folder}")], more].concat(), ranks);
        fs::read(base.path(&format!("{folder}/checkpoints/checkpoint-2/adapter_model.safetensors"))).unwrap()
    };
    let alone = train("alone", &[], &[]);
    let divided = train("divided", &["parallel.pipeline=2"], &["--ranks", "2"]);
    assert!(alone == divided, "one file with the same adapters");
}

#[test]
fn a_signal_or_a_dead_rank_ends_all_ranks_of_a_pipeline() {
    let settings = ["max_steps=100000", "save_steps=5", "parallel.pipeline=4", "pipeline_schedule=zero-bubble"];
    let args = [&COMMON[..], &set(&settings), &["--ranks", "4"]].concat();
    expect_ends_of_all_ranks(inputs, &train(&args), &COMMON);
}

#[test]
fn pipelines_that_do_not_fit_are_errors() {
    let run = inputs();
    let fails = |settings: &[&str], words: &str| {
        run.fail(&train(&[&COMMON[..], &set(settings), &["--ranks", "2"]].concat()), 1, &[words]);
    };
    fails(&["parallel.pipeline=2", "parallel.zero=2"], "`parallel.zero` is 2, which reduces gradients in every");
    fails(&["parallel.pipeline=2", "pipeline_stages=2"], "schedule 1f1b has one stage per rank");
    fails(&["parallel.pipeline=2", "pipeline_stages=3", "pipeline_schedule=interleaved"], "the model has 4 blocks");
    fails(&["parallel.pipeline=3"], "take 3 ranks, and 2 were started; start a multiple of 3");
    assert!(!run.path("run/metrics.jsonl").exists(), "nothing was trained");
}

#[test]
fn a_plan_lists_stages_schedule_and_the_memory_of_each_rank() {
    let run = inputs();
    let settings = ["parallel.pipeline=2", "pipeline_schedule=zero-bubble", "gradient_accumulation_steps=6"];
    let plan = |more: &[&str]| {
        run.succeed(&[&["plan", "run.toml", "--details", "--program"], &set(&settings)[..], more].concat())
    };
    let text = plan(&[]);
    for line in [
        "Pipeline, schedule zero-bubble, 6 micro-batches in a step",
        "  rank 0: embedding, blocks 0 to 1; ",
        "  rank 1: blocks 2 to 3, head; ",
        "  idle for 5.6 % of the compute time if stages take equal time",
        "Program of a step, rank 1 of the pipeline",
        "  receive the activation for stage 0, micro-batch 0",
        "  dgrad of stage 0, micro-batch 0",
        "  wgrad of stage 0, micro-batch 5",
    ] {
        assert!(text.contains(line), "no {line:?} in: {text}");
    }
    let plan: serde_json::Value = serde_json::from_str(&plan(&["--json"])).unwrap();
    let bytes = |rank: usize| plan["pipeline"]["ranks"][rank]["peak_bytes"].as_u64().unwrap();
    assert_eq!(plan["memory"]["peak_bytes"].as_u64(), Some(bytes(0).max(bytes(1))));
    assert!(bytes(0) != bytes(1), "they have different layers");
    let alone: serde_json::Value = serde_json::from_str(&run.succeed(&["plan", "run.toml", "--json"])).unwrap();
    assert_eq!(plan["parameters"], alone["parameters"], "counts are those of the whole model");
    assert_eq!(plan["tensors"], alone["tensors"]);
}
