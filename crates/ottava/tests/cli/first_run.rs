//! Tests the first hour of a new user: a starter file for any data, runs that are too short, and how a run goes on.

use crate::setup::{Run, json};
use std::process::Output;

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs the program, which must succeed, and returns its messages.
fn messages(run: &Run, args: &[&str]) -> String {
    let output = run.ottava(args);
    assert!(output.status.success(), "{args:?}: {}", said(&output));
    said(&output)
}

fn file(run: &Run, name: &str) -> String {
    std::fs::read_to_string(run.path(name)).unwrap()
}

#[test]
fn a_starter_of_small_data_has_enough_steps() {
    let run = Run::new();
    let record = |i: usize| format!("{{\"prompt\": \"q{i}\", \"completion\": \"{}\"}}\n", "r".repeat(9 + i % 9));
    run.write("small.jsonl", (0..60).map(record).collect::<String>().as_bytes());
    let told = messages(&run, &["init", "model", "small.jsonl", "--output", "small.toml"]);
    assert!(told.contains("60 documents"), "{told}");
    let text = file(&run, "small.toml");
    assert!(text.contains("# Smaller than usual") && text.contains("gradient_accumulation_steps = 1"), "{text}");
    assert!(text.contains("`ottava config reference`") && text.contains("val_set_size = 0.01"), "{text}");
    let plan = run.ottava(&["plan", "small.toml", "--device", "cpu", "--json"]);
    assert!(!said(&plan).contains("teaches almost nothing"), "{}", said(&plan));
    let steps = json(&String::from_utf8_lossy(&plan.stdout))["verdict"]["steps"].as_u64().unwrap();
    assert!((25..=60).contains(&steps), "{steps} steps");
    // A single document is not divided.
    messages(&run, &["init", "model", "text.txt", "--output", "one.toml"]);
    assert!(file(&run, "one.toml").contains("val_set_size = 0\n"));
    let steps = ["--set", "max_steps=1", "--device", "cpu"];
    run.succeed(&[&["train", "one.toml"], &steps[..]].concat());
}

#[test]
fn a_starter_of_records_with_other_fields_has_a_guess() {
    let run = Run::new();
    run.write("model/chat_template.jinja", b"{% for m in messages %}{{ m.role[0] + ':' + m.content + '~' }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}");
    run.write("model/tokenizer_config.json", br#"{"eos_token": "~"}"#);
    for (name, record, fields) in [
        (
            "pairs",
            r#"{"question": "q", "answer": "an answer"}"#,
            "fields = { prompt = \"question\", completion = \"answer\" }",
        ),
        ("texts", r#"{"id": 7, "body": "a text of some words"}"#, "fields = { text = \"body\" }"),
        (
            "talks",
            r#"{"dialogue": [{"speaker": "human", "text": "q"}, {"speaker": "bot", "text": "an answer"}]}"#,
            "fields = { messages = \"dialogue\", role = \"speaker\", content = \"text\" }\nroles = { user = \"human\", assistant = \"bot\" }",
        ),
    ] {
        let (data, config) = (format!("{name}.jsonl"), format!("{name}.toml"));
        run.write(&data, format!("{record}\n").repeat(8).as_bytes());
        let told = messages(&run, &["init", "model", &data, "--output", &config]);
        assert!(told.contains("a guess under [data.records]"), "{told}");
        assert!(file(&run, &config).contains(fields), "{}", file(&run, &config));
        let output_dir = format!("output_dir=runs/{name}");
        run.succeed(&["train", &config, "--device", "cpu", "--set", "max_steps=1", "--set", &output_dir]);
    }
    let text = "a text of some words, ".repeat(9);
    run.write("other.jsonl", format!("{{\"left\": \"{text}\", \"right\": \"y\", \"a\\nseed = 5\": 1}}\n").as_bytes());
    let told = messages(&run, &["init", "model", "other.jsonl", "--output", "other.toml"]);
    assert!(told.contains("before you train") && told.contains("data.records.text_field"), "{told}");
    assert!(file(&run, "other.toml").contains("# The records have the fields `left`, `right`, `a\\nseed = 5`."));
    run.fail(&["train", "other.toml"], 2, &["field `text` is missing"]);
    run.replace(
        "other.toml",
        "# [data.records]\n# fields = { text = \"FIELD\" }",
        "[data.records]\nfields = { text = \"left\" }",
    );
    run.replace("other.toml", "val_set_size = 0.01", "val_set_size = 0");
    run.succeed(&["plan", "other.toml", "--device", "cpu"]);
}

#[test]
fn a_run_of_few_steps_is_told_the_settings_for_more() {
    let run = Run::new();
    run.replace("run.toml", "max_steps = 2\nper_device_train_batch_size = 2", "per_device_train_batch_size = 16");
    let words = "the run has 2 steps, which teaches almost nothing";
    let told = [messages(&run, &["plan", "run.toml"]), messages(&run, &["train", "run.toml"])];
    for told in &told {
        assert!(told.contains(words) && told.contains("--set per_device_train_batch_size=1 --set grad"), "{told}");
    }
    let settings = told[0].split("add ").nth(1).unwrap().split(", or").next().unwrap();
    let args: Vec<&str> = ["plan", "run.toml"].into_iter().chain(settings.split(' ')).collect();
    assert!(!messages(&run, &args).contains("almost nothing"), "the settings of the message are enough: {settings}");
}

#[test]
fn a_run_with_settings_of_its_command_line_says_how_it_resumes() {
    let run = Run::new();
    let settings = ["--set", "max_length=8", "--set", "max_steps=1"];
    run.succeed(&[&["train", "run.toml"], &settings[..]].concat());
    let ways = ["repeat each `--set` of the first command", "`ottava train run/config.toml --resume`"];
    run.fail(&["train", "run.toml", "--resume"], 1, &[&["`data.max_length` was 8"], &ways[..]].concat());
    run.fail(&["train", "run.toml"], 1, &[&["already holds a run"], &ways[..]].concat());
    run.succeed(&[&["train", "run.toml", "--resume", "--set", "max_steps=2"], &settings[..2]].concat());
    run.succeed(&["train", "run/config.toml", "--resume", "--set", "max_steps=3"]);
    // The folder above the folder of a run is no model.
    run.succeed(&["train", "run.toml", "--set", "output_dir=all/one"]);
    run.fail(&["generate", "all", "--prompt", "x"], 1, &["this folder holds runs; name one of them: all/one"]);
}

#[test]
fn wrong_arguments_of_init_name_the_right_ones() {
    let run = Run::new();
    let init = |more: &[&'static str]| [&["init", "model", "text.txt"], more].concat();
    run.fail(&init(&["--force"]), 1, &["overwrites no file", "--output"]);
    run.fail(&init(&["--split", "test"]), 1, &["OWNER/NAME?split=NAME"]);
    run.fail(&init(&["--recipe", "fp8-rows"]), 1, &["did you mean \"fp8-row\"?"]);
    let output = run.ottava(&init(&["--split", "test"]));
    assert!(!said(&output).contains("-- --split"), "{}", said(&output));
    // The file is checked before a model is looked up.
    run.fail(&["init", "otter/absent", "text.txt", "--output", "run.toml"], 1, &["not overwritten"]);
    run.fail(&["init", "otter/absent", "text.txt", "--output", "no/x.toml"], 1, &["no/x.toml", "name another file"]);
    run.fail(
        &["init", "https://huggingface.co/otter/tiny", "text.txt", "--output", "x.toml"],
        1,
        &["write its name, otter/tiny"],
    );
    run.fail(&["init", "model", "otter/chats:test", "--output", "x.toml"], 2, &["OWNER/NAME?split=NAME"]);
    run.fail(&["train", "otter/tiny"], 1, &["`ottava init otter/tiny DATA.jsonl`"]);
    run.fail(&["plan", "run.toml", "--set", "data.split=test"], 1, &["OWNER/NAME?split=NAME"]);
    run.fail(&["plan", "run.toml", "--set", "lora.rank=8"], 1, &["`lora.r` is set"]);
    // The tips of the parser would contradict the remedy.
    let output = run.ottava(&["train", "run.toml", "--epochs", "1"]);
    assert!(
        said(&output).contains("training.num_train_epochs=1") && !said(&output).contains("-- --epochs"),
        "{output:?}"
    );
}

#[test]
fn ranks_of_one_machine_fit_its_memory_together() {
    let run = Run::new();
    run.replace("model/config.json", "\"hidden_size\": 32", "\"hidden_size\": 1024");
    run.succeed(&["plan", "run.toml"]);
    let ranks = ["plan", "run.toml", "--ranks", "16384"];
    run.fail(&ranks, 3, &["do not fit its memory together", "--gpu NAME"]);
}

#[test]
fn an_adapter_on_another_model_than_its_base_is_told() {
    let run = Run::new();
    run.succeed(&["train", "run.toml"]);
    let settings = ["lora.r=2", "model.path=run", "init=pretrained", "output_dir=lora"];
    let settings: Vec<&str> = settings.into_iter().flat_map(|setting| ["--set", setting]).collect();
    run.succeed(&[&["train", "run.toml"], &settings[..]].concat());
    run.succeed(&["merge", "run", "lora", "merged"]);
    let generate = |model: &str| {
        let args =
            ["generate", model, "--adapter", "lora", "--prompt", "x", "--max-new-tokens", "1", "--device", "cpu"];
        messages(&run, &args)
    };
    assert!(generate("merged").contains("this adapter was trained on"));
    let told = generate("run");
    assert!(!told.contains("was trained on"), "its own base: {told}");
    // The command reads several parts of the adapter.
    assert_eq!(told.matches("model: lora/checkpoints/checkpoint-2").count(), 1, "{told}");
}
