//! Gives bytes from libFuzzer to the parsers that the property test `parsers` of `ottava-train` covers too.

#[path = "../../crates/ottava-train/tests/parsers/entries.rs"]
mod entries;

use entries::{Parser, parsers};
use std::path::Path;
use tempfile::TempDir;

thread_local! {
    static ALL: (TempDir, Vec<Parser>) = {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let parsers = parsers(folder.path());
        (folder, parsers)
    };
}

/// Writes a good file of the kind `name` into the corpus of its target, whose name has `_` where that of the parser has other signs.
pub fn seed(name: &str) {
    let target = name.replace(['.', ' '], "_");
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    with(name, |parser, _| {
        std::fs::create_dir_all(&corpus).expect("the corpus can be made");
        std::fs::write(corpus.join("good"), &parser.good).expect("the file can be written");
    });
}

/// Writes `bytes` to a file and parses it as a file of the kind `name`.
pub fn parse(name: &str, bytes: &[u8]) {
    with(name, |parser, folder| {
        let path = folder.join(parser.file);
        std::fs::write(&path, (parser.repair)(bytes.to_vec())).expect("the file can be written");
        (parser.parse)(&path);
    });
}

fn with(name: &str, work: impl FnOnce(&Parser, &Path)) {
    ALL.with(|(folder, parsers)| {
        work(parsers.iter().find(|parser| parser.name == name).expect("a parser has this name"), folder.path());
    });
}
