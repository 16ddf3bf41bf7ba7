use std::io::Write;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;

use super::{Content, Document, Documents, Formatting, HashedFile, SourceOptions, documents, formatting};

fn text(document: Document) -> String {
    match document.content {
        Content::Text(text) => text,
        other => panic!("{other:?} is no text"),
    }
}

fn lines() -> SourceOptions {
    SourceOptions { text_documents: Documents::Line, ..SourceOptions::default() }
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Returns all documents of a file with this name and content, or the first error without the folder.
fn read(name: &str, bytes: &[u8], options: &SourceOptions) -> Result<Vec<(u64, String)>, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    let all = documents(&path, options).and_then(|reader| reader.collect::<Result<Vec<_>, _>>());
    let all = all.map_err(|e| e.to_string().replace(&format!("{}/", folder.path().display()), ""))?;
    Ok(all.into_iter().map(|document| (document.line, text(document))).collect())
}

fn owned(documents: &[(u64, &str)]) -> Result<Vec<(u64, String)>, String> {
    Ok(documents.iter().map(|&(line, text)| (line, text.to_string())).collect())
}

#[test]
fn lines_are_documents_whatever_their_ends() {
    let expected = owned(&[(1, "one"), (4, "  two "), (5, "three")]);
    for text in ["one\n\n  \n  two \nthree\n", "one\r\n\r\n\r\n  two \r\nthree", "\u{feff}one\n\n\n  two \nthree"] {
        assert_eq!(read("a.txt", text.as_bytes(), &lines()), expected, "{text:?}");
        assert_eq!(read("a.txt.gz", &gzip(text.as_bytes()), &lines()), expected, "{text:?}, compressed");
    }
}

#[test]
fn a_file_is_one_document_by_default() {
    let options = SourceOptions::default();
    assert_eq!(read("a.md", "\u{feff}# A\r\n\r\ntext\r\n".as_bytes(), &options), owned(&[(1, "# A\n\ntext\n")]));
    assert_eq!(read("a.txt", b" \n\n", &options), owned(&[]));
    assert_eq!(read("A.TXT", b"x", &options), owned(&[(1, "x")]));
}

#[test]
fn records_give_their_text_field() {
    let text = "\u{feff}{\"text\": \"a\\nb\", \"meta\": {\"text\": [1]}}\r\n\n{\"n\": 1.5, \"text\": \"\"}\n{\"text\":\"\\u00e9\"}";
    let expected = owned(&[(1, "a\nb"), (4, "é")]);
    assert_eq!(read("a.jsonl", text.as_bytes(), &SourceOptions::default()), expected);
    let renamed = SourceOptions { text_field: "body".into(), ..SourceOptions::default() };
    assert_eq!(read("a.jsonl", text.replace("\"text\":", "\"body\":").as_bytes(), &renamed), expected);
}

#[test]
fn several_gzip_members_are_one_text() {
    let joined = [gzip(b"one\n"), gzip(b"two\n")].concat();
    assert_eq!(read("a.txt.gz", &joined, &lines()), owned(&[(1, "one"), (2, "two")]));
}

#[test]
fn bad_records_are_named_by_file_and_line() {
    let good = "{\"text\": \"a\"}\n";
    let deep = format!("{{\"text\": {}", "[".repeat(100_000));
    let ignored_deep = format!("{{\"x\": {}", "[".repeat(1_000_000));
    for (record, reason) in [
        ("{\"text\": \"a\"", "EOF while parsing an object at column 12"),
        ("{\"text\": 3}", "invalid type: integer `3`, expected a string at column 10"),
        ("{\"text\": null}", "field `text` is null, and not a text"),
        ("{\"txet\": \"a\"}", "field `text` is missing (set data.records.text_field to another"),
        ("{\"text\": \"a\", \"text\": \"b\"}", "field `text` appears twice"),
        ("[\"text\"]", "expected an object with the text in its field `text`"),
        ("{\"text\": \"a\"} {\"text\": \"b\"}", "trailing characters"),
        (
            "{\"text\": \"\\ud800\"}",
            "field `text` is a text with a lone surrogate (\\ud800), which is half of a character, and not a text",
        ),
        ("{\"text\": \"a\"}\0", "a zero byte"),
        ("NaN", "not a usable record"),
        (&deep, "not a usable record"),
        (&ignored_deep, "not a usable record"),
    ] {
        let message = read("a.jsonl", format!("{good}\n{record}").as_bytes(), &SourceOptions::default()).unwrap_err();
        assert!(message.starts_with("a.jsonl:3: ") && message.contains(reason), "{message:.300}");
    }
}

#[test]
fn broken_utf8_is_named_by_line_and_byte() {
    let text = b"fine\nalso fine\nab\xffc\n";
    for options in [lines(), SourceOptions::default()] {
        let message = read("a.txt", text, &options).unwrap_err();
        assert_eq!(message, "a.txt:3: byte 3 of the line (0xff) is not UTF-8");
    }
    assert!(read("a.txt", b"\xff\xfea\0", &lines()).unwrap_err().starts_with("a.txt:1: byte 1"), "UTF-16");
    assert!(read("a.txt", b"x\ny\0", &SourceOptions::default()).unwrap_err().starts_with("a.txt:2: a zero byte"));
}

#[test]
fn damaged_and_dangerous_gzip_is_refused() {
    let good = gzip("a line of text\n".repeat(1000).as_bytes());
    let mut flipped = good.clone();
    *flipped.last_mut().unwrap() ^= 1;
    for bytes in [&good[..good.len() / 2], &flipped, b"plain text", &[good.as_slice(), b"rest"].concat()] {
        let message = read("a.txt.gz", bytes, &lines()).unwrap_err();
        assert!(message.starts_with("a.txt.gz:") && message.contains("cannot be read further"), "{message}");
    }
    let bomb = gzip(&[vec![b'a'; 1 << 20], vec![b'\n']].concat().repeat(20));
    let message = read("a.txt.gz", &bomb, &lines()).unwrap_err();
    assert!(message.contains("more than 200 times its size"), "{message}");
}

#[test]
fn too_long_documents_are_refused_with_advice() {
    let long = vec![b'a'; (64 << 20) + 1];
    let message = read("a.txt", &long, &SourceOptions::default()).unwrap_err();
    assert!(message.contains("more than 64 MiB; set text_documents"), "{message}");
    assert!(read("a.txt", &long, &lines()).unwrap_err().ends_with("more than 64 MiB"));
}

#[test]
fn other_kinds_of_paths_are_errors() {
    for name in ["a.pdf", "txt", "a.gz", "a.docx"] {
        assert!(read(name, b"x", &lines()).unwrap_err().contains("unknown kind of data"), "{name}");
    }
    let folder = tempfile::tempdir().unwrap();
    let inner = folder.path().join("b.txt");
    std::fs::create_dir(&inner).unwrap();
    assert!(documents(&inner, &lines()).err().unwrap().to_string().contains("this is a folder"));
    assert!(documents(Path::new("/nowhere/a.txt"), &lines()).is_err());
}

#[test]
fn mutated_records_never_panic() {
    let good = b"{\"text\": \"a \\u00e9 \xc3\xa9\", \"n\": [1, {\"k\": null}]}\r\n\n{\"text\": \"b\"}\n";
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let file = HashedFile::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml")).unwrap();
    for _ in 0..20_000 {
        let mut bytes = good.to_vec();
        for _ in 0..3 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let at = (state >> 33) as usize % bytes.len();
            bytes[at] = (state >> 24) as u8;
        }
        let reader = super::DocumentReader {
            path: "a.jsonl".into(),
            input: super::Input::Text(Box::new(std::io::Cursor::new(bytes))),
            file: file.clone(),
            form: super::Form::Records { field: "text".into(), formatting: Formatting::Text },
            mapping: super::Mapping::default(),
            units: super::Units::all(),
            line: 0,
            finished: false,
        };
        for document in reader {
            assert!(document.map_or_else(|e| e.to_string().starts_with("a.jsonl:"), |d| !text(d).is_empty()));
        }
    }
}

#[test]
fn the_first_record_decides_how_the_others_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.jsonl");
    let chat = r#"{"messages": [{"role": "user", "content": "a"}]}"#;
    let read = |text: &str, options: &SourceOptions| {
        std::fs::write(&path, text).unwrap();
        let all: Result<Vec<_>, _> = documents(&path, options).unwrap().collect();
        (formatting(&path, options).map_err(|e| e.to_string()), all.map_err(|e| e.to_string()))
    };
    let auto = SourceOptions::default();
    let (form, all) = read(&format!("\n{chat}\n{chat}"), &auto);
    assert_eq!((form, all.unwrap().len()), (Ok(Formatting::Messages), 2));
    let other = |text: &str, options: &SourceOptions| read(text, options).1.unwrap_err();
    let reason = other(&format!("{chat}\n{{\"text\": \"b\"}}"), &auto);
    assert!(
        reason.ends_with("a.jsonl:2: not a usable record of formatting `messages`: field `messages` is missing"),
        "{reason}"
    );
    let reason = other(&format!("{{\"text\": \"b\"}}\n{chat}"), &auto);
    assert!(reason.contains("a.jsonl:2: ") && reason.contains("`text` is missing"), "{reason}");
    let sharegpt = SourceOptions { formatting: Formatting::Sharegpt, ..SourceOptions::default() };
    assert!(other(chat, &sharegpt).contains("formatting `sharegpt`: field `conversations` is missing"));
    let body = SourceOptions { text_field: "body".into(), ..SourceOptions::default() };
    let (form, all) = read(r#"{"messages": 1, "body": "x"}"#, &body);
    assert_eq!((form, text(all.unwrap().remove(0))), (Ok(Formatting::Text), "x".into()));
    assert_eq!(read("", &auto).0, Ok(Formatting::Text));
}
