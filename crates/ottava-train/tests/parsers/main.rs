//! Whatever a file contains, its parser returns: it does not panic, and does not exceed its bounds of time and memory. This is a separate test
//! binary, since its allocator counts the allocations of the whole process.

mod entries;

use entries::{Parser, parsers};
use ottava_data::Tokenizer;
use ottava_tensor::testing::allocator::CountingAllocator;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use std::cell::Cell;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// The maximum size of an input.
const MAX_BYTES: usize = 1_000_000;

/// A change of a file.
#[derive(Clone, Debug)]
enum Change {
    /// Replace the byte at a position.
    Byte(usize, u8),
    /// Insert one of [`PIECES`] at a position.
    Insert(usize, usize),
    /// Delete some bytes from a position on.
    Delete(usize, usize),
    /// Repeat some bytes at a position many times.
    Repeat(usize, usize, usize),
    /// Cut the file at a position.
    Cut(usize),
}

/// Pieces that often cause faults in parsers.
const PIECES: &[&str] = &[
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\"",
    "\\",
    "null",
    "true",
    "-1",
    "0",
    "1e999",
    "18446744073709551616",
    "9223372036854775807",
    "\u{0}",
    "\u{feff}",
    "\\ud800",
    "é",
    "\n",
    "\r\n",
    "../x",
    "/dev/zero",
    "{\"a\":",
    "[[[[[[[[",
    "=",
    "[a.b]",
    "'''",
    "#",
    "NaN",
    "1.5",
];

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let at = 0..1_000_000_usize;
    let change = prop_oneof![
        4 => (at.clone(), any::<u8>()).prop_map(|(at, byte)| Change::Byte(at, byte)),
        4 => (at.clone(), 0..PIECES.len()).prop_map(|(at, piece)| Change::Insert(at, piece)),
        2 => (at.clone(), 1..40_usize).prop_map(|(at, count)| Change::Delete(at, count)),
        2 => (at.clone(), 1..60_usize, 1..100_000_usize).prop_map(|(at, count, times)| Change::Repeat(at, count, times)),
        1 => at.prop_map(Change::Cut),
    ];
    prop::collection::vec(change, 1..5)
}

/// Inserts a piece. Without optimization, `Vec::splice` moves one byte at a time.
fn insert(bytes: &mut Vec<u8>, at: usize, piece: &[u8]) {
    let rest = bytes.split_off(at);
    bytes.extend_from_slice(piece);
    bytes.extend_from_slice(&rest);
}

fn changed(good: &[u8], changes: &[Change]) -> Vec<u8> {
    let mut bytes = good.to_vec();
    for change in changes {
        let place = |at: usize, bytes: &[u8]| at % (bytes.len() + 1);
        match *change {
            Change::Byte(at, byte) => {
                let at = place(at, &bytes).min(bytes.len().saturating_sub(1));
                bytes.iter_mut().skip(at).take(1).for_each(|old| *old = byte);
            }
            Change::Insert(at, piece) => {
                let at = place(at, &bytes);
                insert(&mut bytes, at, PIECES[piece].as_bytes());
            }
            Change::Delete(at, count) => {
                let at = place(at, &bytes);
                let end = (at + count).min(bytes.len());
                bytes.drain(at..end);
            }
            Change::Repeat(at, count, times) => {
                let at = place(at, &bytes);
                let piece = bytes[at..(at + count).min(bytes.len())].to_vec();
                let times = times.min((MAX_BYTES.saturating_sub(bytes.len())) / piece.len().max(1));
                insert(&mut bytes, at, &piece.repeat(times));
            }
            Change::Cut(at) => bytes.truncate(place(at, &bytes)),
        }
    }
    bytes.truncate(MAX_BYTES);
    bytes
}

/// Returns inputs of a megabyte: nested values, one long key, and many short keys, in JSON and in TOML. The `good` file follows these inputs, or
/// contains them.
fn extremes(good: &[u8]) -> Vec<Vec<u8>> {
    let free = MAX_BYTES - good.len() - 16;
    let many = |entry: &dyn Fn(usize) -> String| {
        let (mut text, mut i) = (String::new(), 0);
        while text.len() + 32 < free {
            text += &entry(i);
            i += 1;
        }
        text
    };
    let texts = [
        "[".repeat(free),
        "{\"a\":".repeat(free / 5),
        format!("{} = 1\n", "k".repeat(free)),
        format!("\"{}\":1,", "k".repeat(free)),
        many(&|i| format!("max_step_{i} = 1\n")),
        many(&|i| format!("\"key_{i}\":{i},")),
    ];
    let within = good.iter().position(|&byte| byte == b'{').map_or(0, |at| at + 1);
    let insert = |at: usize, text: &String| [&good[..at], text.as_bytes(), &good[at..]].concat();
    texts.iter().flat_map(|text| [insert(0, text), insert(within, text)]).collect()
}

/// Returns the CPU time of this process, in steps of 10 ms. Unlike the time of a clock, it does not depend on other work of the machine.
fn processor_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("this test runs on Linux");
    // `proc_pid_stat(5)`: the second field is a name in parentheses. Fields 14 and 15 are the user and system time in ticks, 100 per second.
    let fields = stat.rsplit_once(')').expect("a name in parentheses").1.split_whitespace();
    let ticks: u64 = fields.skip(11).take(2).map(|field| field.parse::<u64>().expect("a number")).sum();
    Duration::from_millis(10 * ticks)
}

/// Runs a parser on many changed versions of a good file at `path`. Results do not matter. Returns the number of versions.
fn holds(Parser { name, good, repair, parse, bounds, .. }: &Parser, path: &Path) -> usize {
    std::fs::write(path, good).unwrap();
    parse(path);
    let (worst, count) = (Cell::new((Duration::ZERO, 0)), Cell::new(0));
    let check = |bytes: Vec<u8>| {
        let bytes = repair(bytes);
        std::fs::write(path, &bytes).unwrap();
        let limit = 4 * bytes.len() + bounds.memory;
        drop(bytes);
        let before = CountingAllocator::live();
        CountingAllocator::reset_peak();
        count.set(count.get() + 1);
        let begin = processor_time();
        parse(path);
        let (time, memory) = (processor_time() - begin, CountingAllocator::peak().saturating_sub(before));
        worst.set((time.max(worst.get().0), memory.max(worst.get().1)));
        // The bound is for a build without optimization, on a machine that does other work.
        prop_assert!(time <= bounds.time, "{time:?}");
        prop_assert!(memory <= limit, "{memory} bytes, at most {limit}");
        Ok(())
    };
    for (i, bytes) in extremes(good).into_iter().enumerate() {
        check(bytes).unwrap_or_else(|error| panic!("{name}, extreme {i}: {error}"));
    }
    // Each run has the same cases. PROPTEST_CASES sets a larger number.
    let cases = std::env::var("PROPTEST_CASES").map_or(50, |cases| cases.parse().unwrap());
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let result = runner.run(&changes(), |changes| check(changed(good, &changes)));
    let (slowest, largest) = worst.get();
    eprintln!("{name}: at most {slowest:?} and {:.1} MiB", largest as f64 / f64::from(1 << 20));
    result.unwrap_or_else(|error| panic!("{name}: {error}"));
    count.get()
}

/// The lock that each test holds, since the allocator counts for all of them.
static ALONE: Mutex<()> = Mutex::new(());

/// The variable that is set in the second process.
const SECOND: &str = "OTTAVA_SECOND_PARSERS";

#[test]
fn a_long_document_is_tokenized_in_words() {
    let _alone = ALONE.lock().unwrap();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tokenizer");
    let tokenizer = Tokenizer::load(&folder).unwrap();
    let text = "Some words, 1234 of them, of a (rather) long text's lines.\n".repeat(70_000);
    let before = CountingAllocator::live();
    CountingAllocator::reset_peak();
    let ids = tokenizer.encode_document(&text).unwrap();
    let peak = (CountingAllocator::peak() - before) as u64;
    eprintln!("{} bytes in {} tokens: at most {} bytes", text.len(), ids.len(), peak);
    assert!(peak < tokenizer.memory_to_encode(&text), "{peak} bytes");
    assert!(peak < 24 * text.len() as u64, "{peak} bytes for {}", text.len());
}

#[test]
fn no_file_panics_hangs_or_eats_memory() {
    let _alone = ALONE.lock().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let parsers = parsers(folder.path());
    // The limits are for a whole process, so a second process runs every other parser at the same time.
    let is_second = std::env::var_os(SECOND).is_some();
    let second = (!is_second).then(|| {
        let name = "no_file_panics_hangs_or_eats_memory";
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([name, "--exact", "--nocapture"]).env(SECOND, "1").stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    });
    let own = parsers.iter().skip(usize::from(is_second)).step_by(2);
    let count: usize = own.map(|parser| holds(parser, &folder.path().join(parser.file))).sum();
    eprintln!("{count} changed files of every second of {} parsers", parsers.len());
    if let Some(second) = second {
        let output = second.wait_with_output().unwrap();
        let text = [&output.stdout[..], &output.stderr[..]].concat();
        assert!(output.status.success(), "the second process: {}", String::from_utf8_lossy(&text));
        eprintln!("{}", String::from_utf8_lossy(&output.stderr));
    }
    // The names in `fuzz/` are strings, so the compiler does not check them.
    for target in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/fuzz_targets")).unwrap() {
        let text = std::fs::read_to_string(target.unwrap().path()).unwrap();
        assert!(parsers.iter().any(|parser| text.contains(&format!("parse({:?}, bytes)", parser.name))), "{text}");
    }
}
