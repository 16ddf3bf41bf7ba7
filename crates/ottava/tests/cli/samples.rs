//! Completions of the prompts of a run.

use crate::setup::Run;
use serde_json::Value;

/// Returns the step and the completion of each line of `samples.jsonl`.
fn samples(run: &Run) -> Vec<(u64, String)> {
    let text = std::fs::read_to_string(run.path("run/samples.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.map(|line| (line["step"].as_u64().unwrap(), line["completion"].as_str().unwrap().to_string())).collect()
}

const PROMPTS: [&str; 6] = [
    "--set",
    "generation.prompts=[\"line \", \"text\"]",
    "--set",
    "generation.max_new_tokens=4",
    "--set",
    "evaluation.eval_steps=1",
];

/// Samples at evaluations change nothing in the run. A resumed run and an unbroken run have the same lines.
#[test]
fn samples_at_evaluations_are_logged_and_change_nothing() {
    let losses = |run: &Run| -> Vec<Value> {
        let text = std::fs::read_to_string(run.path("run/metrics.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["loss"].clone()).collect()
    };
    let train = |run: &Run, more: &[&str]| run.succeed(&[&["train", "run.toml"], &PROMPTS[..], more].concat());
    let (plain, sampled, resumed) = (Run::new(), Run::new(), Run::new());
    train(&plain, &["--set", "max_steps=3"]);
    assert_eq!(samples(&plain).iter().map(|(step, _)| *step).collect::<Vec<_>>(), [3, 3]);
    let on = ["--set", "generation.at_evaluations=true"];
    train(&sampled, &[&on[..], &["--set", "max_steps=3"]].concat());
    assert_eq!(losses(&plain), losses(&sampled));
    let found = samples(&sampled);
    assert_eq!(found.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [0, 0, 1, 1, 2, 2, 3, 3]);
    assert_eq!(found[6..], samples(&plain));
    train(&resumed, &on);
    train(&resumed, &[&on[..], &["--resume", "--set", "max_steps=3"]].concat());
    assert_eq!(samples(&resumed), found);
}

/// With data-parallel ranks, each sample is logged once. Ranks that divide the model are refused, with what to change.
#[test]
fn ranks_log_the_samples_once() {
    let run = Run::new();
    let on = ["--set", "generation.at_evaluations=true"];
    let train = [&["train", "run.toml"], &PROMPTS[..], &on].concat();
    run.succeed(&[&train[..], &["--ranks", "2", "--set", "parallel.zero=1"]].concat());
    assert_eq!(samples(&run).iter().map(|(step, _)| *step).collect::<Vec<_>>(), [0, 0, 1, 1, 2, 2]);
    let tensors = Run::new();
    tensors.succeed(&[&train[..], &["--ranks", "2", "--set", "parallel.tensor=2"]].concat());
    assert_eq!(samples(&tensors).iter().map(|(step, _)| *step).collect::<Vec<_>>(), [0, 0, 1, 1, 2, 2]);
    let divided = Run::new();
    let words = ["`parallel.context` is 2", "`generation.at_evaluations`", "set it to 1"];
    divided.fail(&[&train[..], &["--ranks", "2", "--set", "parallel.context=2"]].concat(), 1, &words);
}
