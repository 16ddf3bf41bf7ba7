use std::path::{Path, PathBuf};

use super::*;
use std::sync::Arc;

use crate::preview::{Segment, preview};
use crate::{DataSet, Documents, Packing, RowLayout, SourceOptions, Split, TokenDataset, Tokenizer};

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
        let dataset = prepare_sharded(&sources, cache.path(), shard_bytes);
        assert_eq!(texts(&dataset), expected);
        assert_eq!(dataset.meta().shards.len(), shards);
        assert_eq!(dataset.len(), 302);
        assert_eq!(dataset.total_tokens(), (0..302).map(|i| dataset.document_len(i).unwrap() as u64).sum::<u64>());
        let bytes: usize = many.iter().map(String::len).sum::<usize>() + "one\ntwo".len() + "three".len();
        assert_eq!(dataset.total_bytes(), bytes as u64);
        assert_eq!(dataset.document_bytes(301).unwrap(), 5);
        assert_eq!(dataset.ids(0, 1..3).unwrap(), dataset.document(0).unwrap()[1..3]);
    }
}

/// Tokenizes the lines of `sources`, with at most `shard` bytes per file of tokens.
fn prepare_sharded(sources: &[PathBuf], cache: &Path, shard: u64) -> TokenDataset {
    let (options, sizes) = (lines(), Sizes { shard, ..Sizes::DEFAULT });
    Preparation::new(sources, &options, &tokenizer(), cache, sizes).unwrap().dataset().unwrap()
}

/// Returns the folders of a cache, without its file of hashes.
fn folders(cache: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(cache).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.is_dir()).collect()
}

#[test]
fn the_same_inputs_are_found_again_and_others_are_not() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache/deeper");
    let made = || folders(&cache).len();
    let source = write(folder.path(), "a.txt", "one\ntwo\n");
    let run = |options: &SourceOptions| prepare(std::slice::from_ref(&source), options, &tokenizer(), &cache).unwrap();
    run(&lines());
    let entry = folders(&cache).remove(0);
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
    let entry = folders(&cache).remove(0);
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
    let entry = folders(&cache).remove(0);
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
    let entry = folders(&cache).remove(0);
    std::fs::File::options().write(true).open(entry.join("tokens-00000.bin")).unwrap().set_len(1).unwrap();
    let error = dataset.document(1).unwrap_err().to_string();
    assert!(error.contains("tokens-00000.bin: document 1 cannot be read any more"), "{error}");
}

#[test]
fn a_source_that_changes_while_it_is_read_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "a.txt", &"a line of text\n".repeat(200_000));
    // A thread appends one line after another while the file is hashed and tokenized.
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
    // Leftovers are also removed if the tokens exist already.
    std::fs::create_dir_all(cache.join(".tmp-0123-78/x")).unwrap();
    prepare(&source, &lines(), &tokenizer(), &cache).unwrap();
    assert!(living.path.is_dir() && second.path.is_dir() && !cache.join(".tmp-0123-78").exists());
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
        assert_eq!(folders(&cache).len(), 0);
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

/// Returns the bundled tokenizer with a chat template that ends turns with `!`.
fn chat_tokenizer(folder: &Path) -> Tokenizer {
    let bundled = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tokenizer/tokenizer.json");
    std::fs::copy(bundled, folder.join("tokenizer.json")).unwrap();
    let template = "{% for m in messages %}{{ m.role + ': ' + m.content + '!' }}{% endfor %}\
                    {% if add_generation_prompt %}assistant:{% endif %}";
    std::fs::write(folder.join("chat_template.jinja"), template).unwrap();
    Tokenizer::load(folder).unwrap()
}

/// Returns the text of a document, with brackets around the parts that contribute to the loss.
fn learned(dataset: &TokenDataset, tokenizer: &Tokenizer, i: usize) -> String {
    let tokens = dataset.tokens(i, 0..dataset.document_len(i).unwrap()).unwrap();
    let groups = tokens.chunk_by(|a, b| (dataset.target(*a) < 0) == (dataset.target(*b) < 0));
    let told = |group: &[u32]| {
        let text = tokenizer.decode(&group.iter().map(|&token| dataset.id(token)).collect::<Vec<_>>()).unwrap();
        if dataset.target(group[0]) < 0 { text } else { format!("[{text}]") }
    };
    groups.map(told).collect()
}

#[test]
fn the_loss_is_taken_of_answers_and_completions_alone() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = chat_tokenizer(folder.path());
    let cache = folder.path().join("cache");
    let chat =
        r#"{"messages": [{"role": "user", "content": "why é?"}, {"role": "assistant", "content": "  so it  is"}, "#;
    let chat = chat.to_string() + r#"{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}"#;
    let sources = [
        write(folder.path(), "chat.jsonl", &chat),
        write(folder.path(), "pairs.jsonl", r#"{"prompt": "the cat", "completion": " sat"}"#),
        write(folder.path(), "text.jsonl", r#"{"text": "plain"}"#),
    ];
    let options = SourceOptions::default();
    let dataset = prepare(&sources, &options, &tokenizer, &cache).unwrap();
    assert_eq!(learned(&dataset, &tokenizer, 0), "user: why é?!assistant:[   so it  is!]user: x!assistant:[ y!]");
    assert_eq!(learned(&dataset, &tokenizer, 1), "the cat[ sat<|endoftext|>]");
    assert_eq!(learned(&dataset, &tokenizer, 2), "[plain<|endoftext|>]");
    assert_eq!(dataset.document_bytes(0).unwrap(), "   so it  is!".len() as u32 + 3);
    assert!(dataset.meta().target_tokens < dataset.total_tokens() && dataset.meta().loss_mask);
    let all = SourceOptions { train_on_inputs: true, ..options.clone() };
    let whole = prepare(&sources, &all, &tokenizer, &cache).unwrap();
    assert_eq!(learned(&whole, &tokenizer, 1), "[the cat sat<|endoftext|>]");
    assert_eq!((whole.meta().target_tokens, whole.meta().loss_mask), (whole.total_tokens(), false));
    assert_eq!(whole.document(0).unwrap(), dataset.document(0).unwrap());
    // If the template changes, the tokens change.
    std::fs::write(folder.path().join("chat_template.jinja"), "{{ 'no turns' }}").unwrap();
    let error = prepare(&sources, &options, &tokenizer, &cache).err().unwrap().to_string();
    assert!(error.contains("chat.jsonl:1: ") && error.contains("writes nothing for message 2"), "{error}");
    std::fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
    let error = prepare(&sources, &options, &tokenizer, &cache).err().unwrap().to_string();
    assert!(error.contains("chat.jsonl:1: ") && error.contains("has no chat template"), "{error}");
}

#[test]
fn a_preview_shows_rows_as_they_are_trained_on() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = chat_tokenizer(folder.path());
    let pairs =
        "{\"prompt\": \"the cat\", \"completion\": \" sat\"}\n{\"prompt\": \"a dog\", \"completion\": \" ran\"}\n";
    let source = [write(folder.path(), "pairs.jsonl", pairs)];
    let cache = folder.path().join("cache");
    let dataset = Arc::new(prepare(&source, &SourceOptions::default(), &tokenizer, &cache).unwrap());
    let split = Split::new(2, 0.0).unwrap();
    let rows = |packing, seq_len| {
        let layout = RowLayout { seq_len, packing, document_mask: false, max_documents: None };
        let set = DataSet::only(dataset.clone(), split, &layout, 1).unwrap();
        let rows = preview(&[set], layout, 1, &tokenizer, 1).unwrap();
        let told = |part: &Segment| {
            let start = if part.starts { "|" } else { "" };
            if part.learned { format!("{start}[{}]", part.text) } else { format!("{start}{}", part.text) }
        };
        rows[0].iter().map(told).collect::<String>()
    };
    let (cat, dog) = ("|the cat[ sat<|endoftext|>]", "|a dog[ ran<|endoftext|>]");
    let both = rows(Packing::Bfd, 32);
    assert!(both == format!("{cat}{dog}") || both == format!("{dog}{cat}"), "{both}");
    let one = rows(Packing::None, 32);
    assert!(one == cat || one == dog, "{one}");
    let stream = rows(Packing::Wrapped, dataset.total_tokens() as usize);
    assert!(stream == both, "{stream}");
}
