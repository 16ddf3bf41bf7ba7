//! The option `--task` of `ottava eval`. `tests/data/tasks` has a small model, tasks, and the numbers of lm-evaluation-harness, which `scripts/check_tasks.py` records.

use crate::setup::{Run, json};
use serde_json::Value;
use std::path::Path;

/// The tasks of `tests/data/tasks`.
const TASKS: [&str; 5] = ["words", "shots", "spaces", "sums", "texts"];

fn recorded(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tasks").join(name).display().to_string()
}

/// Evaluates all recorded tasks. Returns the results, and the samples by task.
fn evaluate(run: &Run, more: &[&str]) -> (Value, Vec<Value>) {
    let (model, files) = (recorded("model"), TASKS.map(|task| recorded(&format!("{task}.toml"))));
    let tasks = files.iter().flat_map(|file| ["--task", file.as_str()]);
    let args: Vec<&str> =
        ["eval", &model, "--device", "cpu", "--json", "--output", "samples.jsonl"].into_iter().chain(tasks).collect();
    let printed = json(&run.succeed(&[&args[..], more].concat()));
    let samples = std::fs::read_to_string(run.path("samples.jsonl")).unwrap();
    (printed["results"].clone(), samples.lines().map(|line| serde_json::from_str(line).unwrap()).collect())
}

/// Asserts that `found` has the recorded numbers of lm-evaluation-harness within `tolerance`.
fn expect_recorded((results, samples): &(Value, Vec<Value>), tolerance: f64) {
    let expected: Value = serde_json::from_str(&std::fs::read_to_string(recorded("expected.json")).unwrap()).unwrap();
    for task in TASKS {
        for (metric, value) in expected[task]["metrics"].as_object().unwrap() {
            let (found, value) = (results[task][metric].as_f64().unwrap_or(f64::NAN), value.as_f64().unwrap());
            assert!(
                (found - value).abs() <= tolerance * value.abs().max(1.0),
                "{task}: {metric} is {found}, not {value}"
            );
        }
        let samples: Vec<_> = samples.iter().filter(|sample| sample["task"] == task).collect();
        let responses = expected[task]["responses"].as_array().unwrap();
        assert_eq!(samples.len(), responses.len(), "{task}");
        for (sample, response) in samples.iter().zip(responses) {
            if task == "sums" {
                assert_eq!(serde_json::json!([sample["resps"][0], sample["filtered_resps"][0]]), *response, "{sample}");
                continue;
            }
            let numbers =
                |value: &Value| value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect::<Vec<_>>();
            let (found, response) = (numbers(&sample["resps"]), numbers(response));
            assert_eq!(found.len(), response.len(), "{sample}");
            for (found, value) in found.iter().zip(&response) {
                assert!((found - value).abs() <= tolerance * value.abs(), "{task}: {found}, not {value}");
            }
        }
    }
}

#[test]
fn tasks_have_the_numbers_of_lm_evaluation_harness() {
    let run = Run::new();
    // Sums in F32 have another order than in torch: log-likelihoods differ by up to 2e-7 of their size.
    let alone = evaluate(&run, &["--recipe", "fp32"]);
    expect_recorded(&alone, 1e-6);
    // The size of batches changes no number of a recipe without scales of tensors.
    assert_eq!(evaluate(&run, &["--recipe", "fp32", "--batch-size", "3"]), alone);
    expect_recorded(&evaluate(&run, &["--recipe", "fp32", "--ranks", "2"]), 1e-6);
}

#[test]
fn every_recipe_scores_tasks() {
    let run = Run::new();
    let exact = evaluate(&run, &["--recipe", "fp32"]).0;
    for recipe in ["bf16", "fp8-current", "fp8-delayed", "fp8-row", "fp8-block"] {
        let found = evaluate(&run, &["--recipe", recipe, "--set", "skip_slow_linears=false"]).0;
        let bits = |results: &Value| results["texts"]["bits_per_byte"].as_f64().unwrap();
        let off = (bits(&found) / bits(&exact) - 1.0).abs();
        // Three significant bits of FP8 in each of two blocks.
        assert!(off > 0.0 && off < 0.1, "{recipe}: {off}");
    }
}

#[test]
fn results_are_a_table_and_mistakes_name_the_remedy() {
    let run = Run::new();
    let (model, words, sums) = (recorded("model"), recorded("words.toml"), recorded("sums.toml"));
    fn eval<'a>(model: &'a str, more: &[&'a str]) -> Vec<&'a str> {
        [&["eval", model, "--device", "cpu"][..], more].concat()
    }
    let text = run.succeed(&eval(&model, &["--task", &words, "--task", &sums, "--recipe", "fp32"]));
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["task", "items", "metric", "value", "stderr"]);
    assert_eq!(lines[1][..3], ["words", "12", "acc"]);
    assert_eq!(lines[4], ["sums", "12", "exact_match", "0.2500", "0.1306"], "{text}");
    let refused = |code, more: &[&str], words: &[&str]| run.fail(&eval(&model, more), code, words);
    refused(1, &["--task", &words, "--data", "text.txt"], &["'--task <FILE>' cannot be used with"]);
    refused(1, &["--task", &words, "--stride", "2"], &["cannot be used with"]);
    refused(1, &["--data", "text.txt", "--output", "a"], &["--output is for tasks and for texts with labels"]);
    refused(1, &[], &["--data"]);
    refused(1, &["--task", "missing.toml"], &["missing.toml: "]);
    refused(1, &["--task", &words, "--task", &words], &["two tasks have the name words"]);
    refused(1, &["--task", &words, "--max-length", "1000"], &["--max-length is 1000"]);
    refused(2, &["--task", &words, "--max-length", "20"], &["task words: item 0, choice", "sequences have at most 20"]);
    // The file of samples is checked before the model is read.
    for (output, words_of_error) in
        [("model", "this is a folder; name a file"), ("missing/a.jsonl", "no folder missing")]
    {
        let error = format!("--output {output}: ");
        run.fail(&["eval", "no-model", "--task", &words, "--output", output], 1, &[&error, words_of_error]);
    }
}

/// lm-evaluation-harness decodes new tokens without the prompt. A decoder that drops a first character, as SentencePiece's drops a space, then drops the
/// first character of a completion.
#[test]
fn completions_are_decoded_without_their_prompts() {
    let run = Run::new();
    for entry in std::fs::read_dir(recorded("model")).unwrap() {
        let path = entry.unwrap().path();
        let name = format!("strips/{}", path.file_name().unwrap().to_str().unwrap());
        run.write(&name, &std::fs::read(&path).unwrap());
    }
    let mut tokenizer: Value =
        serde_json::from_slice(&std::fs::read(run.path("strips/tokenizer.json")).unwrap()).unwrap();
    let strip = serde_json::json!({"type": "Strip", "content": "_", "start": 1, "stop": 0});
    tokenizer["decoder"] = serde_json::json!({"type": "Sequence", "decoders": [{"type": "Fuse"}, strip]});
    run.write("strips/tokenizer.json", tokenizer.to_string().as_bytes());
    let sums = recorded("sums.toml");
    let args = ["--task", &sums, "--device", "cpu", "--recipe", "fp32", "--output", "samples.jsonl"];
    run.succeed(&[&["eval", "strips"][..], &args].concat());
    let expected: Value = serde_json::from_str(&std::fs::read_to_string(recorded("expected.json")).unwrap()).unwrap();
    let samples = std::fs::read_to_string(run.path("samples.jsonl")).unwrap();
    let mut dropped = 0;
    for (line, recorded) in samples.lines().zip(expected["sums"]["responses"].as_array().unwrap()) {
        let sample: Value = serde_json::from_str(line).unwrap();
        let text = recorded[0].as_str().unwrap();
        let alone = text.strip_prefix('_').unwrap_or(text);
        assert_eq!(sample["resps"][0], alone, "{text}");
        dropped += usize::from(alone != text);
    }
    assert_eq!(dropped, 3, "completions that begin with the dropped character");
}

#[test]
fn a_run_scores_tasks_and_a_resumed_run_goes_on() {
    let run = Run::new();
    run.write(
        "items.jsonl",
        b"{\"a\": \"line 1\", \"b\": \"ot\", \"label\": 1}\n{\"a\": \"text\", \"b\": \"of\", \"label\": 0}\n",
    );
    let task = "name = \"ends\"\ndata = \"items.jsonl\"\ntype = \"multiple_choice\"\nprompt = \"a\"\nchoices = [\"x\", \"{{ b }}\"]\nanswer = \"label\"\n";
    run.write("tasks/ends.toml", task.replace("items", "../items").as_bytes());
    let tasks = ["--set", "tasks=[\"tasks/ends.toml\"]", "--set", "eval_steps=1"];
    let missing = ["--set", "tasks=[\"tasks/missing.toml\"]"];
    for command in ["plan", "train"] {
        run.fail(&[&[command, "run.toml"][..], &missing].concat(), 1, &["tasks/missing.toml: "]);
        let best = ["--set", "load_best_model_at_end=true", "--set", "metric_for_best_model=eval_ends_f1"];
        let known = "is \"eval_ends_f1\"; an evaluation of this run has eval_loss, eval_bits_per_byte, eval_ends_acc";
        run.fail(&[&[command, "run.toml"][..], &tasks, &best].concat(), 1, &[known]);
    }
    let said = run.ottava(&[&["train", "run.toml", "--set", "max_steps=2"][..], &tasks].concat());
    let said = String::from_utf8(said.stderr).unwrap();
    assert!(said.contains("ends: acc 0."), "{said}");
    let scores = || -> Vec<f64> {
        let text = std::fs::read_to_string(run.path("run/metrics.jsonl")).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.map(|line| line["eval_ends_acc_norm"].as_f64().unwrap()).collect()
    };
    assert_eq!(scores().len(), 3);
    run.succeed(&[&["train", "run.toml", "--resume", "--set", "max_steps=3"][..], &tasks].concat());
    assert_eq!(scores().len(), 4);
    // The task of the run, evaluated on its checkpoint, has the score of the run.
    let printed = json(&run.succeed(&[
        "eval",
        "run",
        "--task",
        "tasks/ends.toml",
        "--max-length",
        "16",
        "--device",
        "cpu",
        "--json",
    ]));
    assert_eq!(printed["results"]["ends"]["acc_norm"].as_f64(), scores().last().copied());
}
