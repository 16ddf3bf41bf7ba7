//! Tests runs on preferences, and commands with the models of such runs and with such data.

use crate::setup::{Run, json};
use serde_json::json;

/// Creates a run of a reward model on pairs. Some pairs have margins.
fn reward_run() -> Run {
    let run = Run::new();
    let pair = |i: usize| json!({"prompt": format!("say {i}:"), "chosen": "yes", "rejected": "NO", "margin": i % 2});
    let pairs: String = (10..30).map(|i| format!("{}\n", pair(i))).collect();
    run.write("pairs.jsonl", pairs.as_bytes());
    run.write(
        "long.jsonl",
        format!("{}\n", json!({"prompt": "", "chosen": "a".repeat(90), "rejected": "b"})).as_bytes(),
    );
    run.replace("run.toml", "text.txt", "pairs.jsonl");
    run.replace(
        "run.toml",
        "[training]",
        "[preference]\nloss_type = \"bradley_terry\"\n[optimizer]\nlearning_rate = 1e-2\n[training]",
    );
    run
}

#[test]
fn eval_gives_the_accuracy_of_a_reward_model() {
    let run = reward_run();
    run.succeed(&["train", "run.toml", "--set", "max_steps=6"]);
    let text = std::fs::read_to_string(run.path("run/metrics.jsonl")).unwrap();
    let last: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    for key in ["loss", "accuracy", "margin", "mean_reward", "min_reward", "max_reward", "eval_accuracy"] {
        assert!(last[key].is_number(), "{key} in {last}");
    }
    let result =
        json(&run.succeed(&["eval", "run", "--data", "pairs.jsonl", "long.jsonl", "--json", "--recipe", "fp32"]));
    assert_eq!((&result["pairs"], &result["left_out"], &result["max_length"]), (&json!(20), &json!(1), &json!(64)));
    assert_eq!(result["accuracy"], 1.0, "{result}");
    let text = run.succeed(&["eval", "run", "--data", "pairs.jsonl", "long.jsonl"]);
    assert!(
        text.contains("accuracy 1.00000") && text.contains("over 20 pairs; 1 more have a sequence of more"),
        "{text}"
    );
    run.fail(&["eval", "run", "--data", "text.txt"], 2, &["the model is a reward model", "pairs of preferences"]);
    run.fail(&["eval", "run", "--data", "pairs.jsonl", "--stride", "4"], 1, &["--stride is for texts"]);
}

#[test]
fn commands_that_need_tokens_refuse_a_reward_model() {
    let run = reward_run();
    run.succeed(&["train", "run.toml"]);
    let refusal = ["this is a reward model, whose head computes a score and no tokens"];
    for args in [
        &["generate", "run", "--prompt", "a"][..],
        &["export", "run", "exported"],
        &["calibrate", "run", "scales.json", "--data", "text.txt"],
        &["eval", "run", "--data", "pairs.jsonl", "--compare"],
    ] {
        run.fail(args, 1, &refusal);
    }
}

#[test]
fn eval_of_a_language_model_refuses_preferences() {
    let run = Run::new();
    let checkpoint = run.checkpoint().display().to_string();
    run.write("pairs.jsonl", b"{\"prompt\": \"p\", \"chosen\": \"a\", \"rejected\": \"b\"}\n");
    let words = ["the data are preferences", "by a reward model", "`data.val_set_size`"];
    run.fail(&["eval", &checkpoint, "--data", "pairs.jsonl"], 2, &words);
    run.fail(&["eval", &checkpoint, "--data", "pairs.jsonl", "--compare"], 2, &words);
}

/// The log names losses by their names in settings. The last line says the direction of the change instead of a sign.
#[test]
fn the_log_names_the_loss_and_the_direction_of_its_change() {
    let run = Run::new();
    let pair = |i: usize| json!({"prompt": format!("say {i}:"), "chosen": "yes", "rejected": "NO"});
    let pairs: String = (10..30).map(|i| format!("{}\n", pair(i))).collect();
    run.write("pairs.jsonl", pairs.as_bytes());
    run.replace("run.toml", "text.txt", "pairs.jsonl");
    let log = |settings: &[&str]| {
        let settings = settings.iter().flat_map(|setting| ["--set", setting]);
        let args: Vec<&str> =
            ["train", "run.toml", "--set", "data.val_set_size=4"].into_iter().chain(settings).collect();
        let output = run.ottava(&args);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{error}");
        error
    };
    let sum = ["loss_type=[\"aot\", \"sft\"]", "loss_weights=[1.0, 0.5]", "preference.label_smoothing=0.1"];
    let text = log(&[&sum[..], &["output_dir=lower"]].concat());
    let named = "with loss_type 1 × aot + 0.5 × sft, beta 0.1, label_smoothing 0.1; the reference is the model that the run starts from";
    assert!(text.contains(named) && !text.contains("Aot {"), "{text}");
    assert!(text.contains(" lower") && !text.contains("nats less"), "{text}");
    // These pairs prefer the other completion.
    run.write(
        "other.jsonl",
        pairs.replace("chosen", "x").replace("rejected", "chosen").replace("\"x\"", "\"rejected\"").as_bytes(),
    );
    let other = ["reference_free=true", "learning_rate=1e-2", "val_files=[\"other.jsonl\"]", "output_dir=higher"];
    let text = log(&other);
    assert!(text.contains("loss_type sigmoid, beta 0.1; there is no reference model"), "{text}");
    let last = text.lines().find(|line| line.contains("validation loss") && line.contains("at the start"));
    assert!(last.is_some_and(|line| line.ends_with(" higher") && !line.contains('-')), "{text}");
}
