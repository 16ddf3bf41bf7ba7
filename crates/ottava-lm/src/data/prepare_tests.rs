use std::path::{Path, PathBuf};

use super::*;
use crate::data::{Documents, SourceOptions, TokenDataset, Tokenizer};

fn tokenizer() -> Tokenizer {
    Tokenizer::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tokenizer")).unwrap()
}

fn lines() -> SourceOptions {
    SourceOptions { text_documents: Documents::Line, ..SourceOptions::default() }
}

fn write(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, text).unwrap();
    path
}

fn texts(dataset: &TokenDataset) -> Vec<String> {
    let tokenizer = tokenizer();
    (0..dataset.len()).map(|i| tokenizer.decode(&dataset.document(i).unwrap()).unwrap()).collect()
}

#[test]
fn documents_come_back_in_order_over_files_and_shards() {
    let folder = tempfile::tempdir().unwrap();
    let many: Vec<String> = (0..300).map(|i| format!("line {i} of the first file, é")).collect();
    let sources = [
        write(folder.path(), "a.txt", &many.join("\n")),
        write(folder.path(), "b.jsonl", "{\"text\": \"one\\ntwo\"}\n{\"text\": \"three\"}\n"),
    ];
    let expected: Vec<String> = many
        .iter()
        .map(String::as_str)
        .chain(["one\ntwo", "three"])
        .map(|text| format!("{text}<|endoftext|>"))
        .collect();
    for (shard_bytes, shards) in [(1 << 30, 1), (1000, 8), (1, 302)] {
        let cache = tempfile::tempdir().unwrap();
        let dataset = prepare_sharded(&sources, &lines(), &tokenizer(), cache.path(), shard_bytes).unwrap();
        assert_eq!(texts(&dataset), expected);
        assert_eq!(dataset.meta().shards.len(), shards);
        assert_eq!(dataset.len(), 302);
        assert_eq!(dataset.total_tokens(), (0..302).map(|i| dataset.document_len(i) as u64).sum::<u64>());
        let bytes: usize = many.iter().map(String::len).sum::<usize>() + "one\ntwo".len() + "three".len();
        assert_eq!(dataset.total_bytes(), bytes as u64);
        assert_eq!(dataset.document_bytes(301), 5);
        assert_eq!(dataset.ids(0, 1..3).unwrap(), dataset.document(0).unwrap()[1..3]);
    }
}

#[test]
fn the_same_inputs_are_found_again_and_others_are_not() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache/deeper");
    let made = || std::fs::read_dir(&cache).unwrap().count();
    let source = write(folder.path(), "a.txt", "one\ntwo\n");
    let run = |options: &SourceOptions| prepare(std::slice::from_ref(&source), options, &tokenizer(), &cache).unwrap();
    run(&lines());
    let entry = std::fs::read_dir(&cache).unwrap().next().unwrap().unwrap().path();
    let modified = || std::fs::metadata(entry.join("meta.json")).unwrap().modified().unwrap();
    let first = modified();
    run(&lines());
    assert_eq!((made(), modified()), (1, first), "used again");
    assert_eq!(run(&SourceOptions::default()).len(), 1);
    assert_eq!(made(), 2, "another option, another folder");
    std::fs::write(&source, "one\ntwo\nthree\n").unwrap();
    assert_eq!(run(&lines()).len(), 3);
    assert_eq!(made(), 3, "other content, another folder");
}

#[test]
fn a_damaged_folder_is_made_again() {
    let folder = tempfile::tempdir().unwrap();
    let source = [write(folder.path(), "a.txt", "one\ntwo\n")];
    let cache = folder.path().join("cache");
    prepare(&source, &lines(), &tokenizer(), &cache).unwrap();
    let entry = std::fs::read_dir(&cache).unwrap().next().unwrap().unwrap().path();
    std::fs::write(entry.join("documents.bin"), "short").unwrap();
    assert_eq!(prepare(&source, &lines(), &tokenizer(), &cache).unwrap().len(), 2);
    assert!(TokenDataset::open(&entry).is_ok());
}

#[test]
fn a_changed_id_is_noticed_and_the_folder_made_again() {
    let folder = tempfile::tempdir().unwrap();
    let source = [write(folder.path(), "a.txt", "one\ntwo\n")];
    let cache = folder.path().join("cache");
    let expected = texts(&prepare(&source, &lines(), &tokenizer(), &cache).unwrap());
    let entry = std::fs::read_dir(&cache).unwrap().next().unwrap().unwrap().path();
    for name in ["tokens-00000.bin", "documents.bin", "bytes.bin", "meta.json"] {
        let mut bytes = std::fs::read(entry.join(name)).unwrap();
        bytes[0] ^= 1;
        std::fs::write(entry.join(name), &bytes).unwrap();
        assert!(TokenDataset::open(&entry).is_err(), "{name}");
        assert_eq!(texts(&prepare(&source, &lines(), &tokenizer(), &cache).unwrap()), expected);
    }
}

#[test]
fn a_file_that_is_cut_while_it_is_open_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let source = [write(folder.path(), "a.txt", "one\ntwo\n")];
    let cache = folder.path().join("cache");
    let dataset = prepare(&source, &lines(), &tokenizer(), &cache).unwrap();
    let entry = std::fs::read_dir(&cache).unwrap().next().unwrap().unwrap().path();
    std::fs::File::options().write(true).open(entry.join("tokens-00000.bin")).unwrap().set_len(1).unwrap();
    let error = dataset.document(1).unwrap_err().to_string();
    assert!(error.contains("tokens-00000.bin: document 1 cannot be read any more"), "{error}");
}

#[test]
fn a_source_that_changes_while_it_is_read_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "a.txt", &"a line of text\n".repeat(200_000));
    // Appends for as long as the file is hashed and tokenized, a line at a time.
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut file = std::fs::File::options().append(true).open(&path).unwrap();
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                std::io::Write::write_all(&mut file, b"more\n").unwrap();
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        });
        let result = prepare(std::slice::from_ref(&path), &lines(), &tokenizer(), &folder.path().join("cache"));
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        let error = result.err().expect("the change to be noticed").to_string();
        assert!(error.contains("was changed while it was read"), "{error}");
    });
}

#[test]
fn folders_of_killed_processes_are_removed_and_those_of_others_are_not() {
    let folder = tempfile::tempdir().unwrap();
    let source = [write(folder.path(), "a.txt", "one\n")];
    let cache = folder.path().join("cache");
    std::fs::create_dir_all(cache.join(".tmp-0123-77/x")).unwrap();
    let living = TemporaryFolder::create(&cache, "key").unwrap();
    let second = TemporaryFolder::create(&cache, "key").unwrap();
    assert_ne!(living.path, second.path, "two containers with equal process ids");
    prepare(&source, &lines(), &tokenizer(), &cache).unwrap();
    assert!(living.path.is_dir() && second.path.is_dir() && !cache.join(".tmp-0123-77").exists());
}

#[test]
fn documents_are_tokenized_together_as_far_as_memory_reaches() {
    let document = |megabytes: usize| Document { text: "x".repeat(megabytes << 20), line: 1 };
    let path = Path::new("a.txt");
    let fitting = |documents: &[Document]| fitting(documents, &tokenizer(), path);
    assert_eq!(fitting(&[document(0), document(0)]).unwrap(), 2);
    let available = limits::available_memory().unwrap() >> 20;
    let large = (available / 270) as usize;
    assert_eq!(fitting(&[document(large / 2), document(large / 2)]).unwrap(), 1);
    let error = fitting(&[document(large * 3 / 2)]).unwrap_err().to_string();
    assert!(error.starts_with("a.txt:1: tokenizing this document of "), "{error}");
}

#[test]
fn a_failure_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache");
    for (name, text, reason) in [
        ("a.jsonl", "{\"text\": \"a\"}\n{\"text\": 1}\n", "a.jsonl:2: "),
        ("a.txt", " \n\n", "hold no document"),
        ("b.jsonl", "", "hold no document"),
    ] {
        let source = [write(folder.path(), name, text)];
        let error = prepare(&source, &lines(), &tokenizer(), &cache).err().unwrap();
        assert!(error.to_string().contains(reason), "{error}");
        assert_eq!(error.exit_code(), 2);
        assert_eq!(std::fs::read_dir(&cache).unwrap().count(), 0);
    }
    assert!(prepare(&[], &lines(), &tokenizer(), &cache).is_err());
}

#[test]
fn the_bundled_corpus_has_the_counts_that_its_readme_states() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/wordnet-glosses.txt.gz");
    let cache = tempfile::tempdir().unwrap();
    let dataset = prepare(&[corpus], &lines(), &tokenizer(), cache.path()).unwrap();
    assert_eq!((dataset.len(), dataset.total_tokens()), (117_657, 3_233_620 + 117_657));
    assert_eq!(dataset.total_bytes(), 11_129_674);
}
