use std::collections::BTreeSet;
use std::path::Path;

use serde_json::json;

use super::*;
use crate::{
    BadRecord, Chat, ChatTemplate, Clock, Formatting, PromptForm, RecordKind, SourceOptions, Tokenizer, parse_json,
    prepare,
};
use ottava_common::hash::{seal, sha256_file};

const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}\
                        {% if add_generation_prompt %}<assistant>{% if thinks is false %}no{% endif %}{% endif %}";

/// A folder for data and tokens, a tokenizer that adds a token before texts, and a chat template.
struct Inputs {
    folder: tempfile::TempDir,
    tokenizer: Tokenizer,
}

impl Inputs {
    fn new() -> Inputs {
        let folder = tempfile::tempdir().unwrap();
        let bundled = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tokenizer/tokenizer.json");
        std::fs::copy(bundled, folder.path().join("tokenizer.json")).unwrap();
        std::fs::write(folder.path().join("chat_template.jinja"), TEMPLATE).unwrap();
        let config = r#"{"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "add_bos_token": true}"#;
        std::fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
        let tokenizer = Tokenizer::load(folder.path()).unwrap();
        Inputs { folder, tokenizer }
    }

    fn prepare_with(&self, lines: &[String], options: SourceOptions) -> Result<TokenDataset> {
        let path = self.folder.path().join("prompts.jsonl");
        std::fs::write(&path, lines.join("\n")).unwrap();
        prepare(&[path], &options, &self.tokenizer, self.folder.path())
    }

    fn prepare(&self, lines: &[String]) -> Result<TokenDataset> {
        self.prepare_with(lines, SourceOptions { formatting: Formatting::Prompts, ..SourceOptions::default() })
    }
}

/// Returns prompts of 1 to `count` words. The answer of each prompt is its number.
fn numbered(inputs: &Inputs, count: usize) -> Arc<TokenDataset> {
    let line = |i| json!({"prompt": "word".to_string() + &" word".repeat(i), "answer": i}).to_string();
    Arc::new(inputs.prepare(&(0..count).map(line).collect::<Vec<_>>()).unwrap())
}

fn set(name: &str, dataset: &Arc<TokenDataset>, share: u64) -> PromptSet {
    let split = Split::new(dataset.len(), 4.0).unwrap();
    PromptSet { share, ..PromptSet::new(name, dataset.clone(), &split, 1000).unwrap() }
}

#[test]
fn prompts_have_the_tokens_that_inference_gives_them() {
    let inputs = Inputs::new();
    let (user, begun) = (Chat::message("user", "why?"), Chat::message("assistant", "Well, "));
    let tools = json!([{"name": "f"}]);
    let records = [
        json!({"prompt": "An otter is"}),
        json!({"prompt": [user]}),
        json!({"prompt": [user, begun]}),
        json!({"prompt": [user], "tools": tools, "chat_template_kwargs": {"thinks": false}}),
        json!({"prompt": [user], "chat_template_kwargs": "{\"thinks\": false}"}),
    ];
    let dataset = inputs.prepare(&records.map(|record| record.to_string())).unwrap();
    let template = ChatTemplate::load(inputs.folder.path(), None, Clock::Fixed).unwrap().unwrap();
    let chat = |messages: &[&Value], tools: &Value| {
        let messages = messages.iter().map(|message| (*message).clone()).collect();
        Chat { messages, tools: tools.clone(), ..Chat::default() }
    };
    let (asked, with_tools) = (chat(&[&user], &Value::Null), chat(&[&user], &tools));
    let encoded =
        |chat: &Chat, form: &PromptForm| inputs.tokenizer.encode(&template.prompt_text(chat, form).unwrap()).unwrap();
    let form = PromptForm { kwargs: json!({"thinks": false}).as_object().unwrap().clone(), ..PromptForm::default() };
    let expected = [
        inputs.tokenizer.encode_prompt("An otter is").unwrap(),
        template.prompt(&inputs.tokenizer, &asked).unwrap(),
        inputs.tokenizer.encode("<user>why?</><assistant>Well, ").unwrap(),
        encoded(&with_tools, &form),
        encoded(&asked, &form),
    ];
    for (i, expected) in expected.iter().enumerate() {
        assert_eq!(dataset.document(i).unwrap(), *expected, "record {i}");
        assert!(!dataset.has_target(i, expected.len()).unwrap(), "nothing of a prompt is learned");
    }
    assert_eq!(expected[0][0], inputs.tokenizer.eos_id().unwrap(), "a text begins as a document does");
    assert_eq!(inputs.tokenizer.decode(&expected[3]).unwrap(), "<user>why?</>[{\"name\": \"f\"}]<assistant>no");
    assert_eq!((dataset.meta().kind, dataset.meta().target_tokens, dataset.records()), (RecordKind::Prompts, 0, 5));
}

#[test]
fn columns_come_back_as_they_were_read() {
    let inputs = Inputs::new();
    let lines = [
        r#"{"z":"\u0000 \"é😀\n","prompt":"a","a":[1,[],{}],"extra_info":{"index":0,"y":{"x":null}}}"#,
        r#"{"big":123456789012345678901234567890,"small":-9223372036854775808,"u":18446744073709551615,"prompt":"b"}"#,
        r#"{"prompt":"c","floats":[0.1,-0.0,1e-7,5e-324,1.7976931348623157e308],"odd":[NaN,-Infinity,1e400],"b":true}"#,
        "{\"prompt\":\"d\",\"\u{fdd2}\":{\"\u{fdd2}\":\"7\"}}",
        r#"{"prompt":[{"role":"user","content":"e","name":null}],"tests":"long "}"#,
    ];
    let lines = lines.map(String::from);
    let dataset = inputs.prepare(&lines).unwrap();
    for (i, line) in lines.iter().enumerate() {
        let columns = dataset.columns(i).unwrap();
        let Value::Object(expected) = parse_json(line).unwrap() else { panic!("{line}") };
        assert!(columns.keys().eq(expected.keys()), "{line}");
        assert_eq!(columns, expected);
    }
    let stored = std::fs::read_to_string(dataset.folder().join("columns.bin")).unwrap();
    assert!(stored.contains(r#""big":123456789012345678901234567890,"small":-9223372036854775808"#), "{stored}");
    assert!(stored.contains(r#""odd":[NaN,-Infinity,1e400]"#), "{stored}");
}

#[test]
fn damaged_columns_are_errors() {
    let inputs = Inputs::new();
    let dataset = numbered(&inputs, 9);
    let folder = dataset.folder();
    for name in ["columns.bin", "column_starts.bin"] {
        let path = folder.join(name);
        let good = std::fs::read(&path).unwrap();
        // The cases are another size, another content, and offsets that decrease.
        let mut shorter = good.clone();
        shorter.truncate(good.len() - 8);
        let mut other = good.clone();
        other[8] ^= 0x40;
        for bad in [shorter, other] {
            std::fs::write(&path, bad).unwrap();
            let error = TokenDataset::open(folder).err().expect("the damage to be noticed").to_string();
            assert!(error.contains("column"), "{error}");
        }
        std::fs::write(&path, good).unwrap();
    }
    // The offsets decrease, but the hashes of the folder are right.
    let (path, meta) = (folder.join("column_starts.bin"), dataset.meta().clone());
    let good = std::fs::read(&path).unwrap();
    let bad = [&good[..8], &good[16..24], &good[8..16], &good[24..]].concat();
    for (starts, says) in [(&bad, Some("document 1 has the bytes")), (&good, None)] {
        std::fs::write(&path, starts).unwrap();
        let mut meta = meta.clone();
        meta.sha256.insert("column_starts.bin".into(), sha256_file(&path).unwrap().1);
        std::fs::write(folder.join("meta.json"), seal(&meta)).unwrap();
        let error = TokenDataset::open(folder).err().map(|error| error.to_string());
        assert_eq!(
            error.as_ref().is_some_and(|error| error.contains(says.unwrap_or("no error"))),
            says.is_some(),
            "{error:?}"
        );
    }
    // The files change while they are open.
    let path = folder.join("columns.bin");
    let mut bytes = std::fs::read(&path).unwrap();
    assert_eq!(dataset.columns(0).unwrap()["answer"], 0);
    bytes[0] = b'[';
    std::fs::write(&path, &bytes).unwrap();
    let error = dataset.columns(0).unwrap_err().to_string();
    assert!(error.contains("columns.bin: the columns of document 0 are no JSON"), "{error}");
    bytes[1] = 0xff;
    std::fs::write(&path, &bytes).unwrap();
    assert!(dataset.columns(0).unwrap_err().to_string().contains("were changed while they are in use"));
    std::fs::write(&path, &bytes[..3]).unwrap();
    assert!(dataset.columns(8).unwrap_err().to_string().contains("document 8 cannot be read any more"));
}

#[test]
fn records_that_no_prompt_can_be_encoded_from_are_errors() {
    let user = json!({"role": "user", "content": "a"});
    let inputs = Inputs::new();
    let error = |record: Value| inputs.prepare(&[record.to_string()]).err().unwrap().to_string();
    for (record, says) in [
        (json!({"prompt": [user], "chat_template_kwargs": {"other": 1}}), "has `other`, which the chat template"),
        (
            json!({"prompt": [user], "chat_template_kwargs": {"messages": 1}}),
            "has `messages`, which the conversation gives",
        ),
        (
            json!({"prompt": [{"role": "user", "content": "a", "train": true}]}),
            "nothing of a prompt is trained on: remove the field",
        ),
        (json!({"prompt": [{"role": "user", "content": "a", "colour": 1}]}), "messages have the fields `colour`"),
        (json!({"prompt": [{"role": "assistant", "content": " "}]}), "the last message has no text to continue"),
    ] {
        assert!(error(record).contains(says), "{says}");
    }
    // A record of control characters is within the limit of a line, but its JSON with escapes exceeds the limit.
    let csv = inputs.folder.path().join("large.csv");
    std::fs::write(&csv, format!("prompt,answer\na,{}\nb,c\n", "\u{1}".repeat(11 << 20))).unwrap();
    let options = SourceOptions { formatting: Formatting::Prompts, ..SourceOptions::default() };
    let read =
        |options: &SourceOptions| prepare(std::slice::from_ref(&csv), options, &inputs.tokenizer, inputs.folder.path());
    let error = read(&options).err().unwrap().to_string();
    assert!(error.contains("large.csv:2: the fields of this record have more than 64 MiB as JSON"), "{error}");
    let skips = SourceOptions { on_bad_record: BadRecord::Skip, max_bad_records: 1, ..options.clone() };
    assert_eq!(read(&skips).unwrap().len(), 1);
    let learned = SourceOptions { train_on_inputs: true, ..options };
    let error = inputs.prepare_with(&[json!({"prompt": "a"}).to_string()], learned).err().unwrap().to_string();
    assert!(error.contains("`data.train_on_inputs` is true, and the data are prompts, of which nothing is learned"));
}

#[test]
fn an_epoch_has_each_prompt_once_and_ranks_share_it() {
    let dataset = numbered(&Inputs::new(), 40);
    let loader = |rank, world| {
        let sets = vec![set("", &dataset, 1)];
        let start = DataState::start(&sets, 3);
        PromptLoader::new(sets, &start, RowShare { rank, world }).unwrap()
    };
    let mut all = loader(0, 1);
    let held_out: BTreeSet<usize> = (0..all.validation_len()).map(|i| all.validation(i).unwrap().document).collect();
    let documents = |prompts: &[Prompt]| prompts.iter().map(|prompt| prompt.document).collect::<Vec<_>>();
    let epochs: Vec<Vec<usize>> = (0..2).map(|_| documents(&all.next(36).unwrap())).collect();
    assert_ne!(epochs[0], epochs[1], "another order");
    for epoch in &epochs {
        let seen: BTreeSet<usize> = epoch.iter().chain(&held_out).copied().collect();
        assert_eq!((epoch.len(), held_out.len(), seen), (36, 4, (0..40).collect()));
    }
    let mut ranks = [loader(0, 2), loader(1, 2)];
    for step in 0..6 {
        let [first, second] = ranks.each_mut().map(|rank| documents(&rank.next(6).unwrap()));
        let turns: Vec<usize> = first.into_iter().zip(second).flat_map(|(a, b)| [a, b]).collect();
        assert_eq!(turns, epochs.concat()[step * 12..][..12], "step {step}");
    }
    assert_eq!(ranks[0].state(), ranks[1].state());
    let Prompt { set, document, tokens, columns } = all.next(1).unwrap().remove(0);
    assert_eq!((set.as_str(), &columns["answer"]), ("", &json!(document)));
    assert_eq!(tokens, dataset.document(document).unwrap());
}

#[test]
fn a_resumed_run_has_the_same_prompts() {
    let inputs = [Inputs::new(), Inputs::new()];
    let datasets = [numbered(&inputs[0], 12), numbered(&inputs[1], 9)];
    for count in [1, 2] {
        let sets = || {
            let named = datasets.iter().zip([("a", 2), ("b", 1)]);
            named.map(|(dataset, (name, share))| set(name, dataset, share)).take(count).collect::<Vec<_>>()
        };
        let mut whole = PromptLoader::new(sets(), &DataState::start(&sets(), 5), RowShare::ALL).unwrap();
        for step in 0..20 {
            let saved = serde_json::from_str(&serde_json::to_string(&whole.state()).unwrap()).unwrap();
            let mut resumed = PromptLoader::new(sets(), &saved, RowShare::ALL).unwrap();
            assert_eq!(resumed.next(4).unwrap(), whole.next(4).unwrap(), "step {step}");
        }
        let error = |state: &DataState| PromptLoader::new(sets(), state, RowShare::ALL).err().unwrap();
        let elsewhere = LoaderState { document: 8, ..LoaderState::start(5) };
        let states = (0..count).map(|_| SetState { rows: elsewhere, tokens: 0 }).collect();
        let text = error(&DataState::of(states));
        assert!(matches!(&text, Error::Checkpoint(text) if text.contains("does not exist among 8 prompts")), "{text}");
        let text = error(&DataState::start(&[(); 3], 5)).to_string();
        assert!(text.contains(&format!("a place in 3 data sets, and the run has {count}")), "{text}");
    }
}

#[test]
fn mixtures_have_their_shares_of_the_prompts() {
    let inputs = [Inputs::new(), Inputs::new(), Inputs::new()];
    let datasets = [numbered(&inputs[0], 30), numbered(&inputs[1], 7), numbered(&inputs[2], 15)];
    let sets: Vec<PromptSet> = datasets
        .iter()
        .zip([("a", 7), ("b", 2), ("c", 1)])
        .map(|(data, (name, share))| set(name, data, share))
        .collect();
    let start = DataState::start(&sets, 3);
    let mut loader = PromptLoader::new(sets, &start, RowShare::ALL).unwrap();
    for step in 1..=20 {
        let prompts = loader.next(10).unwrap();
        let of = |name: &str| prompts.iter().filter(|prompt| prompt.set == name).count();
        assert_eq!([of("a"), of("b"), of("c")], [7, 2, 1], "step {step}");
    }
    let validation: Vec<Prompt> = (0..loader.validation_len()).map(|i| loader.validation(i).unwrap()).collect();
    let names: String = validation.iter().map(|prompt| prompt.set.as_str()).collect();
    assert_eq!(names, "aaaabbbbcccc");
    let of_last: BTreeSet<usize> = validation[8..].iter().map(|prompt| prompt.document).collect();
    assert_eq!(of_last.len(), 4);
}

#[test]
fn prompts_that_are_too_long_are_left_out_and_counted() {
    let dataset = numbered(&Inputs::new(), 20);
    let split = Split::leading(20, 5).unwrap();
    let of = |max_length| PromptSet::new("s", dataset.clone(), &split, max_length);
    let len = |i| dataset.document_len(i).unwrap();
    let set = of(len(14)).unwrap();
    assert_eq!((set.train_len(), set.validation_len(), set.left_out()), (10, 5, 5));
    let says = format!(
        "data set `s`: 5 of 20 prompts have more than {} tokens and are left out; the longest has {}",
        len(14),
        len(19)
    );
    assert_eq!(set.describe_left_out(), Some(says));
    assert_eq!(of(len(19)).unwrap().describe_left_out(), None);
    let set = of(len(5)).unwrap();
    assert_eq!((set.train, set.validation.len(), set.excess.left_out), (vec![5], 5, 14));
    let error = of(len(4)).err().unwrap();
    let says = format!(
        "data set `s`: all 15 prompts to train on have more than the {} tokens that `data.max_length` leaves",
        len(4)
    );
    assert!(matches!(&error, Error::Data(text) if text.starts_with(&says)), "{error}");
}

#[test]
fn prompts_are_not_mixed_with_other_records() {
    let inputs = Inputs::new();
    let paths = ["a.txt", "b.jsonl"].map(|name| inputs.folder.path().join(name));
    std::fs::write(&paths[0], "text").unwrap();
    std::fs::write(&paths[1], r#"{"prompt": "a"}"#).unwrap();
    let options = SourceOptions { formatting: Formatting::Prompts, ..SourceOptions::default() };
    let error = prepare(&paths, &options, &inputs.tokenizer, inputs.folder.path()).err().unwrap().to_string();
    assert!(error.contains("of formatting `text`, and"), "{error}");
    assert!(error.contains("preferences and prompts are trained without other data"), "{error}");
}
