use std::path::{Path, PathBuf};

use super::{prepare, prepare_sharded};
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
    (0..dataset.len()).map(|i| tokenizer.decode(&dataset.document(i)).unwrap()).collect()
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
        assert_eq!(dataset.ids(0, 1..3).collect::<Vec<_>>(), dataset.document(0)[1..3]);
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
