//! Tests `ottava inspect` on the output of `ottava train`.

use crate::setup::{Run, json};

fn train(run: &Run, settings: &[&str]) {
    let settings: Vec<&str> = settings.iter().flat_map(|setting| ["--set", setting]).collect();
    run.succeed(&[&["train", "run.toml"][..], &settings].concat());
}

#[test]
fn a_run_is_summed_up_and_drawn() {
    let run = Run::new();
    train(&run, &["recipe=fp8-delayed", "cast_statistics_steps=1", "max_steps=4"]);
    let report = json(&run.succeed(&["inspect", "run", "--top", "3", "--json"]));
    assert_eq!((&report["recipe"], &report["summary"]["step"]), (&"fp8-delayed".into(), &4.into()));
    assert_eq!(report["cast_lines"], 4);
    assert_eq!(report["checkpoint"], "run/checkpoints/checkpoint-4");
    let saturated = report["worst"]["saturated"].as_array().unwrap();
    assert!((1..=3).contains(&saturated.len()), "{report}");
    let share = |i: usize| saturated[i]["value"].as_f64().unwrap();
    assert!(share(0) > 0.0 && (1..saturated.len()).all(|i| share(i) <= share(i - 1)), "{report}");
    assert!(share(0) >= report["summary"]["casts"]["saturated"]["mean"].as_f64().unwrap(), "{report}");
    let page = std::fs::read_to_string(run.path("run/casts.html")).unwrap();
    for part in ["<!DOCTYPE html>", "<h2>Saturated", "<h2>Underflowed", "<h2>Headroom", "0.mlp.down_proj.grad_output"] {
        assert!(page.contains(part), "{part}");
    }
    assert!(!page.contains("<script") && !page.contains("http"), "the page loads nothing");

    let text = run.succeed(&["inspect", "run", "--output", "elsewhere.html"]);
    for part in ["recipe fp8-delayed, 4 steps", "infinities       in no step", "Saturated most", "elsewhere.html"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(run.path("elsewhere.html").is_file());
}

#[test]
fn a_run_without_statistics_says_how_to_get_them() {
    let run = Run::new();
    train(&run, &["recipe=fp8-current", "cast_statistics_steps=0"]);
    let text = run.succeed(&["inspect", "run"]);
    assert!(text.contains("set `logging.cast_statistics_steps`") && text.contains("underflowed"), "{text}");
    assert!(!run.path("run/casts.html").exists());
    train(&run, &["output_dir=plain"]);
    let report = json(&run.succeed(&["inspect", "plain", "--json"]));
    assert_eq!(report["no_statistics"], "recipe bf16 casts nothing to FP8");
    train(&run, &["output_dir=high", "recipe=fp8-delayed", "first_layers_bf16=1"]);
    let text = run.succeed(&["inspect", "high"]);
    let reason = "recipe fp8-delayed casts nothing to FP8 here: 4 of 4 linears stay in bfloat16: first_layers_bf16 = 1";
    assert!(text.contains(reason), "{text}");
    run.fail(&["inspect", "model"], 1, &["this is not the folder of a run", "output_dir"]);
    run.write("plain/metrics.jsonl", b"{}\n");
    run.fail(&["inspect", "plain"], 2, &["metrics.jsonl:1: not a line of metrics"]);
}

/// The recommendation is a table that can be added to the run's file. `plan` then prints it beside the linears.
#[test]
fn comparisons_are_drawn_and_recommend_linears() {
    let run = Run::new();
    train(&run, &["recipe=fp8-delayed", "max_steps=4", "sentinel_steps=2"]);
    let report = json(&run.succeed(&["inspect", "run", "--recommend", "overrides.toml", "--share", "0.4", "--json"]));
    assert_eq!(report["sentinel"]["steps"].as_array().unwrap().len(), 2, "{report}");
    let costs = report["sentinel"]["loss_costs"].as_array().unwrap();
    assert!(costs.len() == 4 && costs[0][1].as_f64().unwrap() > 0.0, "{report}");
    let recommended = &report["recommendation"]["linears"];
    let first = recommended[0]["linear"].as_str().unwrap();
    assert!(first.starts_with("model.layers.0.") && recommended.as_array().unwrap().len() < 4, "{report}");
    let page = std::fs::read_to_string(run.path("run/sentinel.html")).unwrap();
    for part in ["Loss by the recipe minus loss in BF16", "<h2>Loss cost", "<h2>Output", "0.mlp.down_proj"] {
        assert!(page.contains(part), "{part}");
    }
    let text = run.succeed(&["inspect", "run", "--recommend", "overrides.toml"]);
    for part in ["2 comparisons with BF16", "loss gap", "all 4 linears", "sentinel.html", "nats: overrides.toml"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let overrides = std::fs::read_to_string(run.path("overrides.toml")).unwrap();
    let config = std::fs::read_to_string(run.path("run.toml")).unwrap();
    run.write("with.toml", (config + &overrides).as_bytes());
    let plan = run.succeed(&["plan", "with.toml", "--details", "--set", "recipe=fp8-delayed"]);
    assert!(plan.contains(&format!("because: `{first}`")), "{plan}");
    run.fail(&["inspect", "run", "--recommend", "x.toml", "--share", "2"], 1, &["--share is 2", "between 0 and 1"]);
    train(&run, &["recipe=fp8-delayed", "output_dir=alone"]);
    run.fail(&["inspect", "alone", "--recommend", "x.toml"], 1, &["no comparisons with BF16", "sentinel_steps"]);
}

#[test]
fn tensors_are_recorded_and_other_formats_tried() {
    let run = Run::new();
    train(
        &run,
        &["recipe=fp8-delayed", "debug_steps=[1, 2]", "debug_tensors=[\"*.down_proj.*\"]", "dump_tensors=true"],
    );
    let report = json(&run.succeed(&["inspect", "run", "--what-if", "--json"]));
    let tensors = report["what_if"]["tensors"].as_object().unwrap();
    let names: Vec<_> = tensors.keys().map(|name| name.rsplit('.').next().unwrap()).collect();
    assert_eq!(names, ["grad_output", "input", "weight"], "{report}");
    assert_eq!(report["what_if"]["file"], "run/dumps/step-2.safetensors");
    assert!(tensors.values().all(|all| all.as_array().unwrap().len() > 10), "{report}");
    let text = run.succeed(&["inspect", "run", "--what-if"]);
    assert!(text.contains("128x128") && text.contains("0.mlp.down_proj.weight"), "{text}");
    train(&run, &["recipe=fp8-delayed", "output_dir=alone"]);
    run.fail(&["inspect", "alone", "--what-if"], 1, &["the run wrote no tensors", "debug.dump_tensors"]);
}

#[test]
fn two_runs_are_compared() {
    let run = Run::new();
    train(&run, &["recipe=fp8-delayed", "sentinel_steps=1", "output_dir=a"]);
    train(&run, &["recipe=fp8-delayed", "sentinel_steps=1", "output_dir=same"]);
    train(&run, &["recipe=fp8-block", "sentinel_steps=1", "output_dir=b"]);
    let text = run.succeed(&["compare", "a", "same"]);
    for part in ["both runs have metrics of steps 0 to 2", "no record differs", "checkpoint 2: the weights are equal"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let text = run.succeed(&["compare", "a", "b", "--top", "2"]);
    // The first loss is the loss of an evaluation.
    for part in ["step 0 is the first that differs:", "metrics.jsonl    eval_loss: 4.", "all 4 linears"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let report = json(&run.succeed(&["compare", "a", "b", "--json"]));
    assert_eq!(
        (&report["parting"]["step"], report["loss_costs"].as_array().unwrap().len()),
        (&0.into(), 4),
        "{report}"
    );
    run.fail(&["compare", "a", "model"], 1, &["this is not the folder of a run", "output_dir"]);
}
