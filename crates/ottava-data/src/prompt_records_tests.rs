use serde_json::json;

use super::*;
use crate::fields::json_content;
use crate::mapping::Mapping;
use crate::records::Formatting;

/// Reads the content of a line with this formatting and other names of fields.
fn read(line: &str, mut formatting: Formatting, fields: &[&str]) -> Result<Content, String> {
    let fields: Vec<String> = fields.iter().map(|entry| entry.to_string()).collect();
    json_content(line, "text", &mut formatting, &Mapping::parse(&fields, &[]).unwrap())
}

fn prompt(record: &Value, fields: &[&str]) -> PromptRecord {
    match read(&record.to_string(), Formatting::Prompts, fields).unwrap() {
        Content::Prompt(record) => *record,
        other => panic!("{other:?}"),
    }
}

#[test]
fn texts_and_messages_are_read_with_all_columns() {
    // The records have the forms of TRL, verl and OpenRLHF.
    let text = json!({"solution": "4", "prompt": "2 + 2", "level": 3});
    let PromptRecord { prompt: content, kwargs, columns } = prompt(&text, &[]);
    assert_eq!((content, kwargs.len(), &columns), (Content::Text("2 + 2".into()), 0, &text));
    let verl = json!({
        "data_source": "gsm8k", "prompt": [{"role": "user", "content": "2 + 2"}], "reward_model": {"ground_truth": "4"},
        "extra_info": {"index": 7, "split": null}, "tools": [{"name": "f"}], "system": "s", "chat_template_kwargs": {"a": 1, "b": null},
    });
    let PromptRecord { prompt: content, kwargs, columns } = prompt(&verl, &[]);
    let Content::Chat(chat) = content else { panic!("{content:?}") };
    assert_eq!(chat.messages, [Chat::message("system", "s"), Chat::message("user", "2 + 2")]);
    assert_eq!((chat.tools, Value::Object(kwargs), &columns), (json!([{"name": "f"}]), json!({"a": 1}), &verl));
    let PromptRecord { columns, .. } = prompt(&json!({"query": "2 + 2", "label": "4"}), &["prompt=query"]);
    assert_eq!(columns, json!({"label": "4", "prompt": "2 + 2"}));
    assert_eq!(json!(Formatting::Prompts), Formatting::Prompts.as_str());
}

#[test]
fn prompts_are_never_detected_and_the_error_names_their_formatting() {
    let error = |line: &str| read(line, Formatting::Auto, &[]).unwrap_err();
    let text = error(r#"{"prompt": "a", "answer": "b"}"#);
    assert!(text.contains("if `answer` answers `prompt`, set data.records.fields = "), "{text}");
    for line in
        [r#"{"prompt": "a", "answer": "b"}"#, r#"{"prompt": [{"role": "user", "content": "a"}], "source": "x"}"#]
    {
        assert!(
            error(line).contains("for prompts of reinforcement learning, set data.records.formatting = \"prompts\"")
        );
    }
    assert!(!error(r#"{"question": "a"}"#).contains("prompts"));
}

#[test]
fn unusable_prompts_are_errors() {
    let user = r#"[{"role": "user", "content": "a"}]"#;
    for (line, says) in [
        (r#"{"answer": "b"}"#.to_string(), "field `prompt` is missing"),
        (r#"{"prompt": null}"#.into(), "field `prompt` is null"),
        (r#"{"prompt": ""}"#.into(), "field `prompt` is empty"),
        (r#"{"prompt": []}"#.into(), "field `prompt` is an empty list"),
        (r#"{"prompt": {"role": "user"}}"#.into(), "field `prompt` is not a text or a list of messages"),
        (r#"{"prompt": NaN}"#.into(), "field `prompt` is NaN, and not a text or a list of messages"),
        (r#"{"prompt": [7]}"#.into(), "message 1 of `prompt` is not an object"),
        (r#"{"prompt": [{"role": "user", "contnet": "a"}]}"#.into(), "did you mean `content`?"),
        (r#"{"prompt": "a\u0000"}"#.into(), "a text has a zero byte"),
        (r#"{"prompt": [{"role": "user", "content": "a\u0000"}]}"#.into(), "a text has a zero byte"),
        (r#"{"prompt": "a", "b": {"c": ["\ud83d"]}}"#.into(), "field `b` has a text with a lone surrogate (\\ud83d)"),
        (r#"{"prompt": "a\ud83d"}"#.into(), "field `prompt` is a text with a lone surrogate"),
        (r#"{"prompt": "a", "system": "s"}"#.into(), "put its text into `prompt`"),
        (format!(r#"{{"prompt": {user}, "tools": "x"}}"#), "field `tools` is not a list"),
        (
            format!(r#"{{"prompt": {user}, "chat_template_kwargs": [1]}}"#),
            "field `chat_template_kwargs` is not an object",
        ),
        (
            format!(r#"{{"prompt": {user}, "chat_template_kwargs": "x"}}"#),
            "field `chat_template_kwargs` is not an object",
        ),
        (format!(r#"{{"prompt": "a", "b": {}1"#, "[".repeat(100_000)), "not a usable record"),
        (r#"["prompt"]"#.into(), "a record is an object"),
    ] {
        let error = read(&line, Formatting::Prompts, &[]).unwrap_err();
        assert!(error.contains(says), "{line:.60}: {error}");
    }
}
