//! Tests completing files of prompts.

use crate::setup::{Run, json};
use serde_json::Value;

fn records(text: &str) -> Vec<Value> {
    text.lines().map(json).collect()
}

#[test]
fn a_file_of_prompts_is_completed_like_each_prompt_alone() {
    let run = Run::new();
    let model = run.checkpoint();
    let model = model.to_str().unwrap();
    let common = ["generate", model, "--device", "cpu", "--max-new-tokens", "6"];
    let generate = |more: &[&str]| run.succeed(&[&common[..], more].concat());
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}";
    std::fs::write(run.path(model).join("chat_template.jinja"), template).unwrap();
    let lines = [
        r#"{"prompt": "line 4", "id": 7}"#,
        "",
        r#"{"messages": [{"role": "user", "content": "line 1"}], "prompt_tokens": "replaced"}"#,
        r#"{"prompt": "a"}"#,
    ];
    run.write("prompts.jsonl", lines.join("\n").as_bytes());
    let printed = generate(&["--input", "prompts.jsonl"]);
    let found = records(&printed);
    assert_eq!(found.len(), 3);
    for (record, prompt) in found.iter().zip(["line 4", "line 1", "a"]) {
        let alone = json(&generate(&["--prompt", prompt, "--json"]));
        for field in ["text", "finish_reason", "prompt_tokens", "completion_tokens"] {
            assert_eq!(record[field], alone[field], "{prompt}");
        }
        assert_eq!(record["prompt_tokens"].as_u64().unwrap() as usize, prompt.len(), "a token per byte");
    }
    assert_eq!((&found[0]["id"], &found[0]["prompt"]), (&7.into(), &"line 4".into()));
    assert_eq!(generate(&["--input", "prompts.jsonl", "--output", "out.jsonl"]), "");
    assert_eq!(std::fs::read_to_string(run.path("out.jsonl")).unwrap(), printed);
    assert!(!run.path("out.jsonl.partial").exists(), "it has its name now");
    run.write("prompts.txt", b"line 4\n\na\n");
    let of_text = records(&generate(&["--input", "prompts.txt", "--kv-cache-dtype", "auto"]));
    assert_eq!([&of_text[0]["text"], &of_text[1]["text"]], [&found[0]["text"], &found[2]["text"]]);
    // The text ends before a stop string. Without the stop string, the model would continue.
    let text = found[0]["text"].as_str().unwrap();
    let stop = &text[2..3];
    let stopped = json(&generate(&["--prompt", "line 4", "--json", "--stop", "never there", "--stop", stop]));
    let expected = &text[..text.find(stop).unwrap()];
    assert_eq!((&stopped["text"], &stopped["finish_reason"]), (&expected.into(), &"stop".into()));
    assert!(generate(&["--prompt", "line 4"]).starts_with(&format!("line 4{text}")), "the same text without --json");
}

#[test]
fn prompts_that_cannot_be_used_are_named() {
    let run = Run::new();
    let model = run.checkpoint();
    let model = model.to_str().unwrap();
    for (line, code, words) in [
        ("{\"prompt\": \"a\"}\n{\"prompt\": 3}", 2, ["prompts.jsonl:2: ", "`prompt` is no string"]),
        ("[]", 2, ["prompts.jsonl:1: ", "this is no object"]),
        ("{\"text\": \"a\"}", 2, ["prompts.jsonl:1: ", "the record has neither `prompt` nor `messages`"]),
        ("{\"messages\": {}}", 2, ["prompts.jsonl:1: ", "`messages` is no list"]),
        ("\n", 2, ["prompts.jsonl: ", "there is no prompt in it"]),
        ("{\"messages\": []}", 1, ["there is no chat template", ""]),
    ] {
        run.write("prompts.jsonl", line.as_bytes());
        run.fail(&["generate", model, "--input", "prompts.jsonl", "--device", "cpu"], code, &words);
    }
    let long = format!("{{\"prompt\": \"a\"}}\n{{\"prompt\": \"{}\"}}", "b".repeat(64));
    run.write("prompts.jsonl", long.as_bytes());
    let words = ["the prompt number 2 has 64 tokens; the model has room for 64"];
    run.fail(&["generate", model, "--input", "prompts.jsonl", "--device", "cpu"], 1, &words);
    run.fail(&["generate", model, "--input", "prompts.csv", "--device", "cpu"], 2, &["name a .jsonl or a .txt file"]);
    run.fail(&["generate", model, "--device", "cpu"], 1, &["--prompt"]);
    let none = ["generate", model, "--prompt", "a", "--max-new-tokens", "0", "--device", "cpu"];
    run.fail(&none, 1, &["--max-new-tokens", "expected a number of at least 1"]);
}

/// Tests prompt lookup, and the model as its own draft model.
#[test]
fn speculation_and_batch_invariance_change_no_text() {
    let run = Run::new();
    let model = run.checkpoint();
    let model = model.to_str().unwrap();
    let prompts = ["line 4 of line 4 of line", "line 1", "a"].map(|text| format!("{{\"prompt\": \"{text}\"}}"));
    run.write("prompts.jsonl", prompts.join("\n").as_bytes());
    let common = ["generate", model, "--device", "cpu", "--max-new-tokens", "30", "--input", "prompts.jsonl"];
    let generate = |more: &[&str]| run.succeed(&[&common[..], more].concat());
    let draft = format!(r#"{{"model": "{model}", "num_speculative_tokens": 3}}"#);
    let ngram = r#"{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}"#;
    for sampling in [&[][..], &["--temperature", "0.8", "--seed", "5", "--stop", "e"]] {
        let expected = generate(sampling);
        for more in [["--speculative-config", ngram], ["--speculative-config", &draft]] {
            assert_eq!(generate(&[sampling, &more, &["--batch-invariant"]].concat()), expected, "{more:?}");
        }
    }
    let unknown = r#"{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup": 4}"#;
    let refused = |config: &str, more: &[&str], words: &[&str]| {
        run.fail(&[&common[..], &["--speculative-config", config], more].concat(), 1, words);
    };
    refused(unknown, &[], &["--speculative-config", "unknown field `prompt_lookup`"]);
    refused(r#"{"method": "ngram", "num_speculative_tokens": 99}"#, &[], &["num_speculative_tokens is 99"]);
    refused(&draft, &["--ranks", "2"], &["a draft model requires one process, but 2 ranks"]);
}

#[test]
fn a_draft_model_has_the_same_tokens() {
    let run = Run::new();
    let model = run.checkpoint();
    let other = run.path("other");
    std::fs::create_dir(&other).unwrap();
    for name in ["config.json", "tokenizer.json"] {
        std::fs::copy(run.path(model.to_str().unwrap()).join(name), other.join(name)).unwrap();
    }
    let tokenizer = std::fs::read_to_string(other.join("tokenizer.json")).unwrap();
    std::fs::write(other.join("tokenizer.json"), tokenizer.replacen("\"a\"", "\"ab\"", 1)).unwrap();
    let draft = format!(r#"{{"model": "{}", "num_speculative_tokens": 3}}"#, other.display());
    let args =
        ["generate", model.to_str().unwrap(), "--device", "cpu", "--prompt", "a", "--speculative-config", &draft];
    run.fail(&args, 1, &["other/tokenizer.json: the vocabulary of the draft model differs from that of"]);
}
