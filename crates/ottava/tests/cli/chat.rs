//! Fine-tuning on chats, and talking to the model.

use crate::setup::{Run, json};
use std::io::Write;
use std::process::Stdio;

/// A run on four chats, whose turns end with `~`.
fn chats() -> Run {
    let run = Run::new();
    let template = "{% for m in messages %}{{ m.role[0] + ':' + m.content + '~' }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}";
    run.write("model/chat_template.jinja", template.as_bytes());
    run.write("model/tokenizer_config.json", br#"{"eos_token": "~"}"#);
    let chat = |i: usize| {
        format!(
            r#"{{"messages": [{{"role": "user", "content": "q{i}"}}, {{"role": "assistant", "content": "{}"}}]}}"#,
            "r".repeat(1 + i)
        ) + "\n"
    };
    run.write("text.jsonl", (0..4).map(chat).collect::<String>().as_bytes());
    run.replace("run.toml", "text.txt", "text.jsonl");
    run.replace("run.toml", "val_set_size = 2", "val_set_size = 1");
    run
}

#[test]
fn chats_are_planned_trained_on_and_continued() {
    let run = chats();
    let plan = run.succeed(&["plan", "run.toml", "--show-data", "2"]);
    for part in [
        "text.jsonl: messages",
        "begin with no token of their own and end with ~ (95); generation stops at ~ (95)",
        "\nu : q",
        "~ a :[r",
    ] {
        assert!(plan.contains(part), "no {part:?} in: {plan}");
    }
    assert!(plan.contains("packing = \"bfd\"") && plan.contains("document_mask = true"), "{plan}");
    let plan = json(&run.succeed(&["plan", "run.toml", "--show-data", "--json"]));
    assert_eq!((&plan["formattings"][0], &plan["data"]["documents"]), (&"messages".into(), &4.into()));
    assert_eq!(plan["data"]["shown"].as_array().unwrap().len(), 3);
    let trained = json(&run.succeed(&["train", "run.toml", "--json"]));
    assert!(trained["eval_loss"].as_f64().unwrap() < trained["initial_eval_loss"].as_f64().unwrap());
    let model = trained["checkpoint"].as_str().unwrap();
    let mut child = run.command(&["chat", model, "--max-new-tokens", "4"]);
    let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"q1\n\nq2\n").unwrap();
    let talk = child.wait_with_output().unwrap();
    assert!(talk.status.success());
    let answers = String::from_utf8(talk.stdout).unwrap();
    assert_eq!(answers.matches('\n').count(), 2, "an answer for each message that is not empty: {answers:?}");
    let answer = run.succeed(&["generate", model, "--chat", "--prompt", "q1", "--max-new-tokens", "4"]);
    assert!(answers.starts_with(answer.as_str()), "{answers:?} and {answer:?}");
    std::fs::remove_file(run.path("model/chat_template.jinja")).unwrap();
    run.fail(&["train", "run.toml", "--set", "output_dir=other"], 2, &["text.jsonl:1: ", "has no chat template"]);
    std::fs::remove_file(run.path(model).join("chat_template.jinja")).unwrap();
    run.fail(&["chat", model], 1, &["there is no chat template"]);
}
