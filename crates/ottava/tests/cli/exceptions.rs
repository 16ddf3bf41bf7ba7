//! Tests linears that an FP8 recipe keeps in high precision: which linears they are on which device, and that every command reports them.

use crate::setup::{Run, json};
use serde_json::json;

/// Runs the program, which must succeed, and returns its standard error.
fn said(run: &Run, args: &[&str]) -> String {
    let output = run.ottava(args);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{args:?} failed: {error}");
    error
}

const EVAL: [&str; 8] = ["eval", "run", "--data", "text.txt", "--max-length", "16", "--device", "cpu"];
const GENERATE: [&str; 8] = ["generate", "run", "--prompt", "l", "--max-new-tokens", "2", "--device", "cpu"];
const FP8: [&str; 2] = ["--set", "recipe=fp8-delayed"];

#[test]
fn a_recipe_runs_as_named_on_a_cpu_whose_speed_was_not_measured() {
    let run = Run::new();
    run.replace("run.toml", "skip_slow_linears = false", "skip_slow_linears = true");
    let train = said(&run, &[&["train", "run.toml"][..], &FP8].concat());
    assert!(!train.contains("stay in bfloat16"), "{train}");
    let casts = std::fs::read_to_string(run.path("run/casts.jsonl")).unwrap();
    assert!(casts.contains("model.layers.0.mlp.down_proj.input"), "{casts}");
    for args in [EVAL, GENERATE] {
        let said = said(&run, &args);
        assert!(!said.contains("stay in bfloat16"), "{said}");
    }
    let reason = |device: &str| {
        let args = [&["plan", "run.toml", "--json", "--device", device][..], &FP8].concat();
        json(&run.succeed(&args))["linears"][0]["reason"].as_str().unwrap().to_string()
    };
    assert!(reason("cpu").starts_with("recipe fp8-delayed: "), "{}", reason("cpu"));
    assert!(reason("cuda").starts_with("skip_slow_linears: at 32 tokens "), "{}", reason("cuda"));
}

#[test]
fn every_command_says_which_linears_stay_in_high_precision() {
    let run = Run::new();
    run.replace("run.toml", "[precision]", "[precision]\nrecipe = \"fp8-delayed\"\nfirst_layers_bf16 = 1");
    for args in [&["plan", "run.toml"][..], &["train", "run.toml"], &EVAL, &GENERATE] {
        let said = said(&run, args);
        assert!(said.contains("4 of 4 linears stay in bfloat16: first_layers_bf16 = 1"), "{args:?}: {said}");
    }
}

/// The run looks like a run on a GPU, where all linears of this model are slower in FP8.
#[test]
fn casts_that_differ_from_those_of_the_run_are_told() {
    let run = Run::new();
    run.replace("run.toml", "[precision]\nskip_slow_linears = false", "[precision]\nrecipe = \"fp8-delayed\"");
    let manifest = run.checkpoint().join("manifest.json");
    let text = std::fs::read(run.path(manifest.to_str().unwrap())).unwrap();
    let mut value: serde_json::Value = serde_json::from_slice(&text).unwrap();
    value.as_object_mut().unwrap().remove("checksum");
    value["extra"]["scaling_slots"] = json!([]);
    run.write(manifest.to_str().unwrap(), ottava_common::hash::seal(&value).as_bytes());
    let told = "the run that saved the checkpoint cast 0 of its 4 linears to FP8; here 4 are";
    let resume = ["train", "run.toml", "--resume", "--set", "max_steps=3"];
    for args in [&EVAL[..], &GENERATE, &resume] {
        let said = said(&run, args);
        assert!(said.contains(told), "{args:?}: {said}");
    }
    let said = said(&run, &[&EVAL[..], &["--recipe", "bf16"]].concat());
    assert!(!said.contains("cast 0 of"), "asked for: {said}");
}
