//! Tests that the joined parts of a preparation have the same bytes as the tokens of a single process.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use super::join::PartFolder;
use super::prepare::{Preparation, PreparedPart, Sizes};
use super::{BadRecord, Documents, Part, SourceOptions, TokenDataset, Tokenizer};
use ottava_common::{Error, Result};

/// Sizes so small that each source has several units and several files of tokens.
const SIZES: Sizes = Sizes { shard: 1000, unit: 400 };

fn tokenizer(folder: &Path) -> Tokenizer {
    let bundled = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tokenizer/tokenizer.json");
    fs::copy(bundled, folder.join("tokenizer.json")).unwrap();
    let template = "{% for m in messages %}{{ m.role + ': ' + m.content + '!' }}{% endfor %}\
                    {% if add_generation_prompt %}assistant:{% endif %}";
    fs::write(folder.join("chat_template.jinja"), template).unwrap();
    Tokenizer::load(folder).unwrap()
}

/// The sources, options, tokenizer and cache folders of a test.
struct Inputs {
    sources: Vec<PathBuf>,
    options: SourceOptions,
    tokenizer: Tokenizer,
    folder: tempfile::TempDir,
}

impl Inputs {
    fn new(files: &[(&str, String)]) -> Inputs {
        let folder = tempfile::tempdir().unwrap();
        let write = |(name, text): &(&str, String)| {
            let path = folder.path().join(name);
            fs::write(&path, text).unwrap();
            path
        };
        let sources = files.iter().map(write).collect();
        let options = SourceOptions { text_documents: Documents::Line, ..SourceOptions::default() };
        Inputs { sources, options, tokenizer: tokenizer(folder.path()), folder }
    }

    fn lines(lines: usize) -> Inputs {
        Inputs::new(&[("a.txt", (0..lines).map(|i| format!("line {i} of a file\n")).collect())])
    }

    fn cache(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn with<T>(&self, cache: &str, run: impl FnOnce(&Preparation) -> Result<T>) -> Result<T> {
        let cache = self.cache(cache);
        run(&Preparation::new(&self.sources, &self.options, &self.tokenizer, &cache, SIZES)?)
    }

    fn part(&self, cache: &str, number: usize, of: usize) -> Result<PreparedPart> {
        self.with(cache, |preparation| preparation.part(Part { number, of }))
    }

    fn dataset(&self, cache: &str) -> Result<TokenDataset> {
        self.with(cache, |preparation| preparation.dataset())
    }
}

/// Returns the files of the only folder in a cache, without the stamps of checked files.
fn files(cache: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = |folder: &Path| fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
    let folders: Vec<PathBuf> = entries(cache).into_iter().filter(|path| path.is_dir()).collect();
    assert_eq!(folders.len(), 1, "{folders:?}");
    let name = |path: &Path| path.file_name().unwrap().to_string_lossy().into_owned();
    let files = entries(&folders[0]).into_iter().filter(|path| name(path) != "checked.json");
    files.map(|path| (name(&path), fs::read(path).unwrap())).collect()
}

/// Prepares `inputs` by one process and by each of these numbers of parts, last part first, and compares the bytes.
fn expect_same_bytes(inputs: &Inputs, numbers: &[usize]) {
    inputs.dataset("alone").unwrap();
    let alone = files(&inputs.cache("alone"));
    let total: u64 = inputs.dataset("alone").unwrap().total_tokens();
    for &of in numbers {
        let cache = format!("{of} parts");
        let (mut tokens, mut largest) = (0, 0);
        for number in (1..=of).rev() {
            let part = inputs.part(&cache, number, of).unwrap();
            assert_eq!(part.missing, (1..number).collect::<Vec<_>>());
            assert!(part.outdated.is_empty());
            tokens += part.counts[1];
            largest = part.counts[1].max(largest);
        }
        assert_eq!(tokens, total);
        assert!(of == 1 || largest < total * 3 / 4, "a part of {of} has {largest} of {total} tokens");
        assert!(files(&inputs.cache(&cache)) == alone, "{of} parts");
        assert_eq!(inputs.dataset(&cache).unwrap().total_tokens(), total);
    }
}

#[test]
fn parts_of_every_number_leave_the_bytes_of_one_process() {
    let text = |i: usize| format!("text number {i} with ünïcode and {} more", "word ".repeat(i % 7));
    let inputs = Inputs::new(&[
        ("a.txt", (0..40).map(|i| text(i) + if i % 3 == 0 { "\n\n  \n" } else { "\n" }).collect()),
        ("b.jsonl", (0..50).map(|i| serde_json::json!({"id": i, "text": text(i)}).to_string() + "\n").collect()),
        ("c.csv", String::from("text\n") + &(0..30).map(|i| text(i) + "\n").collect::<String>()),
        ("d.json", serde_json::json!([{"text": "one"}, {"text": ""}, {"text": "two"}]).to_string()),
        ("empty.txt", String::new()),
        ("e.txt", "the last line".into()),
    ]);
    let packed = inputs.folder.path().join("b.jsonl.gz");
    let mut gzip = flate2::write::GzEncoder::new(fs::File::create(&packed).unwrap(), flate2::Compression::fast());
    gzip.write_all(&fs::read(&inputs.sources[1]).unwrap()).unwrap();
    gzip.finish().unwrap();
    let sources = [inputs.sources.clone(), vec![packed]].concat();
    expect_same_bytes(&Inputs { sources, ..inputs }, &[1, 2, 3, 5]);
}

#[test]
fn more_parts_than_records_leave_the_bytes_of_one_process() {
    expect_same_bytes(&Inputs::lines(20), &[30]);
}

#[test]
fn masks_labels_and_columns_are_joined() {
    let chat = |i: usize| {
        let turns = [("user", "why?"), ("assistant", "so it is"), ("user", "x"), ("assistant", &"y ".repeat(i % 9))];
        let turns = turns.map(|(role, content)| serde_json::json!({"role": role, "content": content}));
        serde_json::json!({"messages": turns}).to_string() + "\n"
    };
    expect_same_bytes(&Inputs::new(&[("chat.jsonl", (0..60).map(chat).collect())]), &[3]);
    let labeled = |i: usize| {
        let record =
            serde_json::json!({"prompt": format!("{i} is"), "completion": " even", "label": i.is_multiple_of(2)});
        record.to_string() + "\n"
    };
    expect_same_bytes(&Inputs::new(&[("labeled.jsonl", (0..60).map(labeled).collect())]), &[3]);
    let pair = |i: usize| {
        serde_json::json!({"prompt": "a", "chosen": format!(" {i}"), "rejected": " c", "margin": if i % 7 == 5 { 0.5 } else { 0.0 }}).to_string() + "\n"
    };
    expect_same_bytes(&Inputs::new(&[("pairs.jsonl", (0..60).map(pair).collect())]), &[3]);
    let prompt =
        |i: usize| serde_json::json!({"prompt": format!("{i} is"), "even": i.is_multiple_of(2)}).to_string() + "\n";
    let inputs = Inputs::new(&[("prompts.jsonl", (0..60).map(prompt).collect())]);
    let options = SourceOptions { formatting: crate::Formatting::Prompts, ..inputs.options };
    expect_same_bytes(&Inputs { options, ..inputs }, &[3]);
}

#[test]
fn a_missing_part_is_named_and_a_damaged_one_is_prepared_again() {
    let inputs = Inputs::lines(200);
    inputs.dataset("alone").unwrap();
    for number in [1, 3] {
        inputs.part("cache", number, 3).unwrap();
    }
    let error = inputs.dataset("cache").err().unwrap();
    assert_eq!(error.exit_code(), 2);
    let error = error.to_string();
    assert!(error.contains("part 2 of 3 missing; prepare each with `ottava prepare RUN.toml --part 2/3`"), "{error}");
    // The cache has a folder of a killed process, and a damaged part.
    fs::create_dir_all(inputs.cache("cache/.tmp-0123-77")).unwrap();
    let folder = fs::read_dir(inputs.cache("cache")).unwrap().map(|entry| entry.unwrap().path());
    let folder = folder.filter(|path| path.to_string_lossy().contains("parts-")).collect::<Vec<_>>().remove(0);
    let path = folder.join("part-00003/bytes.bin");
    let mut bytes = fs::read(&path).unwrap();
    bytes[0] ^= 1;
    fs::write(&path, bytes).unwrap();
    // All parts exist, so they are joined. Joining finds the damage.
    let error = inputs.part("cache", 2, 3).err().unwrap().to_string();
    assert!(error.contains("part-00003"), "{error}");
    let part = inputs.part("cache", 2, 3).unwrap();
    assert_eq!(part.missing, [3], "the second part is there still");
    assert_eq!(inputs.part("cache", 3, 3).unwrap().missing, [0; 0]);
    assert!(files(&inputs.cache("cache")) == files(&inputs.cache("alone")));
}

#[test]
fn processes_may_prepare_the_same_part() {
    let inputs = Inputs::lines(3000);
    inputs.dataset("alone").unwrap();
    let barrier = std::sync::Barrier::new(6);
    std::thread::scope(|scope| {
        for worker in 0..6 {
            let (inputs, barrier) = (&inputs, &barrier);
            scope.spawn(move || {
                barrier.wait();
                inputs.part("cache", worker % 2 + 1, 2).unwrap();
            });
        }
    });
    assert!(files(&inputs.cache("cache")) == files(&inputs.cache("alone")));
}

#[test]
fn a_source_that_changed_between_parts_is_named() {
    let inputs = Inputs::lines(200);
    inputs.part("cache", 1, 2).unwrap();
    let text = fs::read_to_string(&inputs.sources[0]).unwrap().replace("line", "row");
    fs::write(&inputs.sources[0], text).unwrap();
    let part = inputs.part("cache", 2, 2).unwrap();
    assert_eq!(part.missing, [1]);
    assert_eq!(part.outdated.len(), 1);
    assert!(part.outdated[0].contains("a.txt has changed since part 1/2 was prepared"), "{:?}", part.outdated);
    assert_eq!(inputs.part("cache", 1, 2).unwrap().missing, [0; 0]);
    let dataset = inputs.dataset("cache").unwrap();
    assert!(inputs.tokenizer.decode(&dataset.document(7).unwrap()).unwrap().contains("row 7"));
}

#[test]
fn bad_records_count_over_all_parts() {
    // Some records have no text, and some are not UTF-8.
    let record = |i: usize| match i % 40 {
        7 => "{}\n".to_string(),
        27 => "\u{ff}\n".to_string(),
        _ => format!("{{\"text\": \"number {i}\"}}\n"),
    };
    let mut inputs = Inputs::new(&[("a.jsonl", (0..200).map(record).collect())]);
    let latin1 = fs::read_to_string(&inputs.sources[0]).unwrap().chars().map(|c| c as u8).collect::<Vec<_>>();
    fs::write(&inputs.sources[0], latin1).unwrap();
    // Only the part that has the bad record fails.
    let failures = (1..=4).filter(|&number| inputs.part("strict", number, 4).is_err()).count();
    assert!((1..=4).contains(&failures));
    inputs.options = SourceOptions { on_bad_record: BadRecord::Skip, max_bad_records: 10, ..inputs.options };
    expect_same_bytes(&inputs, &[4]);
    inputs.options.max_bad_records = 9;
    for number in 1..4 {
        inputs.part("few", number, 4).unwrap();
    }
    let error = inputs.part("few", 4, 4).err().unwrap();
    assert!(matches!(error, Error::Data(_)), "{error}");
    assert!(
        error.to_string().contains("10 records cannot be used, and `data.records.max_bad_records` allows 9"),
        "{error}"
    );
}

#[test]
fn a_part_that_was_changed_is_named_and_can_be_prepared_again() {
    let inputs = Inputs::lines(50);
    inputs.part("cache", 1, 2).unwrap();
    let mut entries = fs::read_dir(inputs.cache("cache")).unwrap().map(|entry| entry.unwrap().path());
    let folder = entries.find(|path| path.is_dir()).unwrap();
    fs::write(folder.join("part-00001/documents.bin"), b"short").unwrap();
    let error = inputs.part("cache", 2, 2).err().unwrap().to_string();
    assert!(error.contains("this part was changed or damaged, and is removed; prepare it again with"), "{error}");
    assert!(error.contains("--part 1/2"), "{error}");
    inputs.part("cache", 1, 2).unwrap();
    assert_eq!(inputs.dataset("cache").unwrap().len(), 50);
}

#[test]
fn parts_without_any_text_are_an_error_once_joined() {
    let inputs = Inputs::new(&[("a.txt", "\n \n".into())]);
    assert_eq!(inputs.part("cache", 1, 2).unwrap().counts, [0; 3]);
    let error = inputs.part("cache", 2, 2).err().unwrap().to_string();
    assert!(error.contains("hold no document"), "{error}");
}

#[test]
fn started_parts_of_another_number_are_no_obstacle() {
    let inputs = Inputs::lines(50);
    inputs.part("cache", 1, 3).unwrap();
    for number in 1..=2 {
        inputs.part("cache", number, 2).unwrap();
    }
    assert_eq!(inputs.dataset("cache").unwrap().len(), 50);
    let folders = PartFolder::all(&inputs.cache("cache"), &inputs.dataset("cache").unwrap().meta().key);
    assert!(folders.is_empty(), "they are removed");
}
