//! Tests that the same records in different formats give the same tokens.

use std::path::{Path, PathBuf};

use super::{BadRecord, SourceOptions, TokenDataset, Tokenizer, TrainOnEos, prepare, write_megatron};

const CHATML: &str = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}\
                      {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

fn formats() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/formats")
}

fn tokenizer() -> Tokenizer {
    Tokenizer::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tokenizer")).unwrap()
}

fn tokens(sources: &[PathBuf], options: &SourceOptions, cache: &Path) -> ottava_common::Result<TokenDataset> {
    let template = cache.join("template.jinja");
    std::fs::write(&template, CHATML).unwrap();
    prepare(sources, &SourceOptions { chat_template_path: template, ..options.clone() }, &tokenizer(), cache)
}

#[test]
fn the_same_records_give_the_same_tokens_in_every_format() {
    let formats = formats();
    let cache = tempfile::tempdir().unwrap();
    for (name, documents) in [("texts", 3), ("chats", 2), ("pairs", 2), ("tokens", 2)] {
        let options = SourceOptions::default();
        let of = |file: &str| tokens(&[formats.join(format!("{name}{file}"))], &options, cache.path()).unwrap();
        let expected = of(".jsonl");
        assert_eq!(
            (expected.len(), expected.meta().sha256.len()),
            (documents, 3 + usize::from(expected.meta().loss_mask)),
            "{name}"
        );
        let mut compared = 0;
        for file in [
            ".jsonl.gz",
            ".jsonl.zst",
            ".json",
            ".csv",
            ".tsv",
            "-none.parquet",
            "-snappy.parquet",
            "-gzip.parquet",
            "-lz4.parquet",
            "-zstd.parquet",
            "-zstd-2.parquet",
            "-polars.parquet",
            "-stream.arrow",
            "-file.arrow",
        ] {
            assert_eq!(of(file).meta().sha256, expected.meta().sha256, "{name}{file}");
            compared += 1;
        }
        assert_eq!(compared, 14);
    }
}

#[test]
fn frames_of_zstandard_without_text_are_skipped() {
    let folder = tempfile::tempdir().unwrap();
    let options = SourceOptions::default();
    let packed = std::fs::read(formats().join("texts.jsonl.zst")).unwrap();
    let skipped = |length: u32, bytes: usize| {
        [&0x184D_2A57_u32.to_le_bytes()[..], &length.to_le_bytes(), &vec![1; bytes]].concat()
    };
    let of = |bytes: Vec<u8>| {
        let path = folder.path().join("a.jsonl.zst");
        std::fs::write(&path, bytes).unwrap();
        tokens(&[path], &options, folder.path())
    };
    let expected = of(packed.clone()).unwrap().meta().sha256.clone();
    let around = of([skipped(3, 3), packed.clone(), skipped(0, 0)].concat()).unwrap();
    assert_eq!(around.meta().sha256, expected);
    for cut in [skipped(30, 3), packed[..packed.len() - 5].to_vec(), packed[..3].to_vec(), b"text".to_vec()] {
        let error = of([packed.clone(), cut].concat()).err().expect("a file that is cut off").to_string();
        assert!(error.contains("this is not a readable Zstandard file: "), "{error}");
    }
}

#[test]
fn tokens_of_megatron_and_rows_of_ids_are_taken_as_they_are() {
    let cache = tempfile::tempdir().unwrap();
    let options = SourceOptions::default();
    let ids = tokens(&[formats().join("ids.idx")], &options, cache.path()).unwrap();
    let documents: Vec<_> = (0..ids.len()).map(|i| ids.document(i).unwrap()).collect();
    assert_eq!(documents, [vec![5, 6, 7, 8], vec![9, 300], vec![11]]);
    assert!(!ids.meta().loss_mask);
    // Tokens that are exported and read again are the same.
    let prefix = cache.path().join("out_text_document");
    write_megatron(&ids, &prefix).unwrap();
    for extension in ["bin", "idx"] {
        let written = std::fs::read(prefix.with_extension(extension)).unwrap();
        assert_eq!(written, std::fs::read(formats().join("ids").with_extension(extension)).unwrap(), "{extension}");
    }
    assert!(write_megatron(&ids, &prefix).is_err(), "files are not overwritten");
    let labeled = tokens(&[formats().join("tokens.jsonl")], &options, cache.path()).unwrap();
    assert_eq!((labeled.meta().loss_mask, labeled.meta().tokens, labeled.meta().target_tokens), (true, 6, 4));
    assert!(write_megatron(&labeled, &cache.path().join("labeled")).unwrap_err().to_string().contains("loss mask"));
    let write = |text: &str| {
        let path = cache.path().join("rows.jsonl");
        std::fs::write(&path, text).unwrap();
        tokens(&[path], &options, cache.path()).map(|dataset| (dataset.meta().tokens, dataset.meta().target_tokens))
    };
    assert_eq!(
        write("{\"input_ids\": [1, 2, 3], \"attention_mask\": [1, 1, 0], \"loss_mask\": [0, 1, 1]}").unwrap(),
        (2, 1)
    );
    for (text, says) in [
        ("{\"input_ids\": [1, 99999]}", "99999 is no token of this tokenizer"),
        ("{\"input_ids\": [1, -2]}", "-2 is no token"),
        ("{\"input_ids\": [1], \"labels\": [3]}", "entry 1 of `labels` is 3; it is the token, 1, or -100"),
        ("{\"input_ids\": [1], \"labels\": [1, 1]}", "`input_ids` has 1 entries and `labels` has 2"),
        ("{\"input_ids\": [1.5]}", "something else than whole numbers"),
    ] {
        let error = write(text).unwrap_err().to_string();
        assert!(error.contains(says), "{text}: {error}");
    }
}

#[test]
fn bad_records_are_left_out_up_to_a_limit() {
    let cache = tempfile::tempdir().unwrap();
    let path = cache.path().join("a.jsonl");
    let chat = |role: &str| {
        format!(
            "{{\"messages\": [{{\"role\": \"user\", \"content\": \"a\"}}, {{\"role\": \"{role}\", \"content\": \"b\"}}]}}"
        )
    };
    let lines = ["{broken".to_string(), chat("assistant"), "{\"messages\": 3}".into(), chat("user"), chat("assistant")];
    std::fs::write(&path, lines.join("\n")).unwrap();
    let with = |on_bad_record, max_bad_records| {
        let options = SourceOptions { on_bad_record, max_bad_records, ..SourceOptions::default() };
        tokens(std::slice::from_ref(&path), &options, cache.path())
            .map(|dataset| dataset.len())
            .map_err(|error| error.to_string())
    };
    assert!(with(BadRecord::Error, 100).unwrap_err().contains("a.jsonl:1: not a usable record"));
    assert_eq!(with(BadRecord::Skip, 3), Ok(2), "broken JSON, no list, and no turn of the assistant");
    let error = with(BadRecord::Skip, 2).unwrap_err();
    assert!(error.contains("one bad record more than the 2 that `data.records.max_bad_records` allows"), "{error}");
}

#[test]
fn fields_and_roles_of_other_names_are_read() {
    let cache = tempfile::tempdir().unwrap();
    let path = cache.path().join("named.jsonl");
    std::fs::write(&path, "{\"chat\": [{\"who\": \"me\", \"says\": \"What is an otter?\"}, {\"who\": \"bot\", \"says\": \"A small animal,\\nin rivers.\"}]}").unwrap();
    let list = |entries: &[&str]| entries.iter().map(|entry| entry.to_string()).collect::<Vec<_>>();
    let options = SourceOptions {
        fields: list(&["messages=chat", "role=who", "content=says"]),
        roles: list(&["user=me", "assistant=bot"]),
        ..SourceOptions::default()
    };
    let renamed = tokens(&[path], &options, cache.path()).unwrap();
    let expected = tokens(&[formats().join("chats.jsonl")], &SourceOptions::default(), cache.path()).unwrap();
    assert_eq!(renamed.document(0).unwrap(), expected.document(0).unwrap());
    assert_eq!(
        renamed.meta().target_tokens,
        expected.meta().target_tokens - {
            let rest = expected.tokens(1, 0..expected.document_len(1).unwrap()).unwrap();
            rest.iter().filter(|token| *token & super::shards::MASKED == 0).count() as u64
        }
    );
}

#[test]
fn the_documents_of_each_file_are_counted() {
    let cache = tempfile::tempdir().unwrap();
    let sources = ["texts.csv", "ids.bin", "texts-file.arrow"].map(|name| formats().join(name));
    let dataset = tokens(&sources, &SourceOptions::default(), cache.path()).unwrap();
    let counts: Vec<u64> = dataset.meta().sources.iter().map(|source| source.documents).collect();
    assert_eq!((counts, dataset.len()), (vec![3, 3, 3], 9));
}

#[test]
fn ends_of_turns_are_targets_as_chosen() {
    let cache = tempfile::tempdir().unwrap();
    // The bundled tokenizer ends texts with this token, and has no token that ends turns.
    let template = cache.path().join("ends.jinja");
    let source = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|endoftext|>\n{% endgeneration %}\
                  {% else %}{{ m.content }}<|endoftext|>{% endif %}{% endfor %}";
    std::fs::write(&template, source).unwrap();
    let tokenizer = tokenizer();
    let learned = |train_on_eos| {
        let options = SourceOptions { chat_template_path: template.clone(), train_on_eos, ..SourceOptions::default() };
        let dataset = prepare(&[formats().join("chats.jsonl")], &options, &tokenizer, cache.path()).unwrap();
        let tokens = dataset.tokens(1, 0..dataset.document_len(1).unwrap()).unwrap();
        let ids: Vec<u32> = tokens.into_iter().filter(|token| token & super::shards::MASKED == 0).collect();
        (tokenizer.decode(&ids).unwrap(), dataset.document_bytes(1).unwrap() as usize)
    };
    for (choice, expected) in [
        (TrainOnEos::Turn, "\"É\".<|endoftext|>\nNo.<|endoftext|>\n"),
        (TrainOnEos::All, "<|endoftext|><|endoftext|>\"É\".<|endoftext|>\n<|endoftext|>No.<|endoftext|>\n"),
        (TrainOnEos::Last, "\"É\".No.<|endoftext|>\n"),
        (TrainOnEos::None, "\"É\".No."),
    ] {
        assert_eq!(learned(choice), (expected.to_string(), expected.len()), "{choice:?}");
    }
}

#[test]
fn fields_of_messages_that_nothing_reads_are_errors() {
    let cache = tempfile::tempdir().unwrap();
    let source = cache.path().join("chats.jsonl");
    let chat = r#"{"messages": [{"role": "user", "content": "a", "id": 3, "name": "Ann"}, {"role": "assistant", "content": "b", "loss": 0}]}"#;
    std::fs::write(&source, format!("{chat}\n")).unwrap();
    let of = |ignored: &[&str]| {
        let ignored_fields = ignored.iter().map(|field| field.to_string()).collect();
        tokens(
            std::slice::from_ref(&source),
            &SourceOptions { ignored_fields, ..SourceOptions::default() },
            cache.path(),
        )
    };
    let error = of(&[]).err().unwrap().to_string();
    for part in [
        "chats.jsonl:1: ",
        "the fields `id`, `loss`, which are unknown",
        "whether a message is trained on is the field `train`",
        "`data.records.ignored_fields = [\"id\", \"loss\"]`",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
    let error = of(&["loss"]).err().unwrap().to_string();
    assert!(error.contains("the fields `id`, which") && !error.contains("`train`"), "{error}");
    // A known field that this template does not read is left out with a warning.
    assert_eq!(of(&["id", "loss"]).unwrap().len(), 1);
}
