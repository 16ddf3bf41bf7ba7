//! Tests that documents and module headers name existing code. If a file, type, function or test is renamed, its documents must follow.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// The extensions of files that documents name.
const EXTENSIONS: &[&str] = &["rs", "cuh", "md", "toml", "sh", "gz"];

/// Placeholders for a file or folder that does not exist yet. The folder before the placeholder must exist.
const PLACEHOLDERS: &[&str] = &["NAME", "<op>"];

/// The pages whose names of files and of code are checked.
const MAPS: &[&str] = &["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/glossary.md", "docs/life-of-a-step.md"];

/// The keywords of items whose names documents use.
const ITEMS: &[&str] = &["fn", "struct", "enum", "trait", "type", "const", "static", "mod"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace is there")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Returns the names of all crates. Documents give paths below their `src`.
fn crates() -> Vec<String> {
    let entries = fs::read_dir(root().join("crates")).expect("the crates are there");
    entries.map(|entry| entry.expect("a readable entry").file_name().into_string().expect("a name in UTF-8")).collect()
}

/// Returns all Rust files at or below `path`.
fn sources(path: &Path) -> Vec<PathBuf> {
    if path.is_file() {
        return vec![path.to_path_buf()];
    }
    let entries = fs::read_dir(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let inner = entries.flat_map(|entry| sources(&entry.expect("a readable entry").path()));
    inner.filter(|file| file.extension().is_some_and(|e| e == "rs")).collect()
}

/// Returns the texts between backticks in one line, each with its end in the line.
fn quoted(line: &str) -> Vec<(&str, usize)> {
    let mut at = 0;
    let mut found = Vec::new();
    for (i, part) in line.split('`').enumerate() {
        if i % 2 == 1 {
            found.push((part, at + part.len()));
        }
        at += part.len() + 1;
    }
    found
}

fn is_name(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_alphanumeric() || c == '_')
}

fn is_path(text: &str) -> bool {
    let known = Path::new(text).extension().is_some_and(|e| EXTENSIONS.iter().any(|known| e == *known));
    let clean = !text.contains(|c: char| c.is_whitespace() || "*$=(…".contains(c));
    clean && (known && !text.starts_with('.') || text.ends_with('/'))
}

/// Returns the location of a document's `path`. It may be relative to `from` (the folder of the document), to the root, to a crate, or to the `src`
/// or `tests` of a crate. Its first folder may also be the name of a crate (`data/files.rs` in `ottava-data`). For a path with a placeholder, returns
/// the folder before it.
fn located(path: &str, from: &Path) -> Option<PathBuf> {
    let path = match PLACEHOLDERS.iter().filter_map(|name| path.find(name)).min() {
        Some(at) => &path[..at],
        None => path,
    };
    let root = root();
    let names = crates();
    let folders = names.iter().flat_map(|name| ["src", "tests", ""].map(|folder| format!("crates/{name}/{folder}")));
    let below = folders.map(|folder| root.join(folder));
    let named = path.split_once('/').map(|(name, rest)| root.join(format!("crates/ottava-{name}/src")).join(rest));
    let mut places =
        [from.to_path_buf(), root.clone()].into_iter().chain(below).map(|folder| folder.join(path)).chain(named);
    places.find(|path| path.exists())
}

/// Whether a file named `name` exists anywhere below `folder`.
fn holds(folder: &Path, name: &str) -> bool {
    let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    entries.map(|entry| entry.expect("a readable entry").path()).any(|path| match path.is_dir() {
        true => holds(&path, name),
        false => path.file_name().is_some_and(|file| file == name),
    })
}

/// Returns the names that `text` defines as an item, a field, a variant, or a key in quotation marks.
fn definitions(text: &str) -> HashSet<&str> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut found = HashSet::new();
    for line in text.lines() {
        let mut end = 0;
        while let Some(start) = line[end..].find(is_word).map(|at| end + at) {
            end = line[start..].find(|c| !is_word(c)).map_or(line.len(), |at| start + at);
            let (before, after) = (&line[..start], &line[end..]);
            let begins = before.trim_start();
            let item = before.strip_suffix(' ').is_some_and(|words| ITEMS.iter().any(|item| words.ends_with(item)));
            let member = (begins.is_empty() || begins.starts_with("pub")) && after.starts_with([':', ',', '(', ' ']);
            if item || member || before.ends_with('"') && after.starts_with('"') {
                found.insert(&line[start..end]);
            }
        }
    }
    found
}

/// Returns the names in one line of a document that do not exist. In prose, only files and `Type::name` are checked, because other words in backticks
/// may be anything. In the table, a bare name must be in the path that follows it in its clause, if there is such a path.
fn problems(line: &str, in_table: bool, from: &Path, all: &[Source]) -> Vec<String> {
    let mut problems = Vec::new();
    let tokens = quoted(line);
    for (i, &(token, end)) in tokens.iter().enumerate() {
        if is_path(token) {
            let prose = !in_table
                && (token.ends_with('/')
                    || ["crates", "configs", "scripts"].iter().any(|f| holds(&root().join(f), token)));
            if !prose && located(token, from).is_none() {
                problems.push(format!("there is no `{token}`"));
            }
            continue;
        }
        let (owner, name) = token.split_once("::").map_or((None, token), |(owner, name)| (Some(owner), name));
        if !is_name(name) || owner.is_some_and(|owner| !owner.starts_with(char::is_uppercase)) {
            continue;
        }
        let clause = end + line[end..].find([';', '|']).unwrap_or(line.len() - end);
        let following = tokens[i + 1..].iter().find(|(path, at)| *at < clause && is_path(path)).map(|(path, _)| *path);
        let found = match (owner, following.filter(|_| in_table).and_then(|path| located(path, from))) {
            (None, _) if !in_table => true,
            (None, Some(place)) => sources(&place).iter().any(|file| definitions(&read(file)).contains(name)),
            (None, None) => all.iter().any(|source| source.defines(name)),
            // A method may be in another file than its type.
            (Some(owner), _) => all.iter().any(|source| {
                source.defines(name)
                    && source.text.contains(owner)
                    && (source.defines(owner) || source.text.contains("impl"))
            }),
        };
        if !found {
            let place =
                following.filter(|_| in_table && owner.is_none()).map_or(String::new(), |path| format!(" in `{path}`"));
            problems.push(format!("nothing is called `{token}`{place}"));
        }
    }
    problems
}

/// A source file of a crate.
struct Source {
    path: PathBuf,
    text: &'static str,
    defined: HashSet<&'static str>,
}

impl Source {
    fn defines(&self, name: &str) -> bool {
        self.defined.contains(name)
    }
}

/// Returns the source files of all crates, which are read once for all tests.
fn all_sources() -> &'static [Source] {
    static ALL: LazyLock<Vec<Source>> = LazyLock::new(|| {
        let paths = crates().into_iter().flat_map(|name| sources(&root().join("crates").join(name).join("src")));
        let source = |path: PathBuf| {
            let text: &'static str = read(&path).leak();
            Source { path, text, defined: definitions(text) }
        };
        paths.map(source).collect()
    });
    &ALL
}

#[test]
fn the_maps_name_code_that_exists() {
    let (root, all) = (root(), all_sources());
    let mut found = Vec::new();
    for map in MAPS {
        let (mut in_table, mut rows) = (false, 0);
        for (number, line) in read(&root.join(map)).lines().enumerate() {
            if let Some(heading) = line.strip_prefix("## ") {
                in_table = heading == "To change X, touch Y";
            }
            let row = in_table && line.starts_with('|');
            rows += usize::from(row);
            found.extend(problems(line, row, &root, all).iter().map(|p| format!("{map}:{}: {p}", number + 1)));
        }
        assert!(rows > 10 || map.starts_with("docs/"), "{map}: the table \"To change X, touch Y\" is there");
    }
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

#[test]
fn module_headers_name_code_that_exists() {
    let (all, mut found) = (all_sources(), Vec::new());
    for Source { path, text, .. } in all {
        let from = path.parent().expect("a file has a folder");
        for line in text.lines().filter_map(|line| line.strip_prefix("//!")) {
            found.extend(problems(line, false, from, all).iter().map(|p| format!("{}: {p}", path.display())));
        }
    }
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

#[test]
fn renamed_code_is_noticed() {
    let all = all_sources();
    let right =
        "| `Mlp` in `layers/mlp.rs`; `Stage::new`; `models/NAME.rs` (new); `hidden_act` in `models/family.rs` |";
    assert_eq!(problems(right, true, &root(), all), Vec::<String>::new());
    for (wrong, problem) in [
        ("`layers/perceptron.rs`", "there is no `layers/perceptron.rs`"),
        ("`perceptrons/NAME.rs`", "there is no `perceptrons/NAME.rs`"),
        ("`Stage::newly`", "nothing is called `Stage::newly`"),
        ("`Perceptron`", "nothing is called `Perceptron`"),
        ("`Mlp` in `layers/norm.rs`", "nothing is called `Mlp` in `layers/norm.rs`"),
    ] {
        assert_eq!(problems(wrong, true, &root(), all), [problem]);
    }
}

/// Checks the last part of each path in the column "test". A `…` at the end replaces the rest of a name.
#[test]
fn each_promise_names_tests_that_exist() {
    let tests = crates().into_iter().flat_map(|name| sources(&root().join("crates").join(name)));
    let texts: Vec<(PathBuf, String)> = tests.map(|file| (file.clone(), read(&file))).collect();
    let mut named = 0;
    for line in read(&root().join("docs/reliability.md")).lines().filter(|line| line.starts_with("| ")) {
        let column = line.trim_end_matches([' ', '|']).rsplit('|').next().unwrap_or_default();
        for (path, _) in quoted(column).into_iter().filter(|(path, _)| path.contains("::") || path.contains("_is_")) {
            let name = path.rsplit("::").next().unwrap_or_default();
            let function = match name.strip_suffix('…') {
                Some(start) => format!("fn {start}"),
                None => format!("fn {name}()"),
            };
            let of_module = |(file, text): &(PathBuf, String)| {
                file.file_stem().is_some_and(|stem| stem == name) || text.contains(&format!("mod {name};"))
            };
            let exists = texts.iter().any(|(_, text)| text.contains(&function)) || texts.iter().any(of_module);
            assert!(exists, "docs/reliability.md: there is no test `{path}`");
            named += 1;
        }
    }
    assert!(named > 10, "the tables name tests");
}
