//! Reads source files with and without comments and strings.

use std::fs;
use std::path::{Path, PathBuf};

/// A source file: its text, and its code without comments and without the contents of strings. Both have the same lines.
pub struct File {
    pub path: PathBuf,
    pub text: String,
    pub code: String,
}

impl File {
    pub fn at(&self, line: usize) -> String {
        format!("{}:{}", self.path.display(), line + 1)
    }
}

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace is there")
}

/// Returns the names of all crates in alphabetical order.
pub fn crates() -> Vec<String> {
    let entries = fs::read_dir(root().join("crates")).expect("the crates are there");
    let name = |entry: fs::DirEntry| entry.file_name().into_string().expect("a name in UTF-8");
    let mut names: Vec<_> = entries.map(|entry| name(entry.expect("a readable entry"))).collect();
    names.sort();
    names
}

/// Returns all files below `folder` of the workspace whose names end with one of `endings`, sorted, with paths relative to the workspace.
pub fn files(folder: &str, endings: &[&str]) -> Vec<File> {
    let (root, mut found) = (root(), Vec::new());
    let mut folders = vec![root.join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
            let path = entry.expect("a readable entry").path();
            let ending = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
            if path.is_dir() {
                folders.push(path);
            } else if endings.contains(&ending) {
                let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
                let code = if ending == "rs" { code_of(&text) } else { text.clone() };
                let path = path.strip_prefix(&root).expect("below the root").to_path_buf();
                found.push(File { path, text, code });
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    assert!(!found.is_empty(), "{folder} holds files");
    found
}

/// Removes comments and the contents of strings from Rust code. Line ends are kept.
pub fn code_of(text: &str) -> String {
    let (chars, mut code, mut i) = (text.chars().collect::<Vec<_>>(), String::new(), 0);
    let starts = |i: usize, what: &str| what.chars().enumerate().all(|(j, c)| chars.get(i + j) == Some(&c));
    // Copies only the line ends of the skipped text up to `end`.
    let skip = |from: usize, to: usize, code: &mut String| {
        code.extend(chars[from..to.min(chars.len())].iter().filter(|&&c| c == '\n'));
        to
    };
    while i < chars.len() {
        let hashes = chars[i + 1..].iter().take_while(|&&c| c == '#').count();
        if starts(i, "//") {
            let end = (i..chars.len()).find(|&j| chars[j] == '\n').unwrap_or(chars.len());
            i = skip(i, end, &mut code);
        } else if starts(i, "/*") {
            let end = (i + 2..chars.len()).find(|&j| starts(j, "*/")).map_or(chars.len(), |j| j + 2);
            i = skip(i, end, &mut code);
        } else if chars[i] == 'r' && chars.get(i + 1 + hashes) == Some(&'"') && !code.ends_with(is_word) {
            let close = format!("\"{}", "#".repeat(hashes));
            let start = i + hashes + 2;
            let end = (start..chars.len()).find(|&j| starts(j, &close)).map_or(chars.len(), |j| j + 1 + hashes);
            code.push_str("\"\"");
            i = skip(i, end, &mut code);
        } else if chars[i] == '"' {
            let mut end = i + 1;
            while end < chars.len() && chars[end] != '"' {
                end += if chars[end] == '\\' { 2 } else { 1 };
            }
            code.push_str("\"\"");
            i = skip(i, end + 1, &mut code);
        } else if chars[i] == '\'' && (starts(i + 1, "\\") || chars.get(i + 2) == Some(&'\'')) {
            // This is a character literal; a lifetime has no second quote. After a backslash, `'` may itself be the character.
            let first = if starts(i + 1, "\\") { i + 3 } else { i + 2 };
            let end = (first..chars.len()).find(|&j| chars[j] == '\'').map_or(chars.len(), |j| j + 1);
            code.push_str("''");
            i = skip(i, end, &mut code);
        } else {
            code.push(chars[i]);
            i += 1;
        }
    }
    code
}

pub fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Returns the byte positions at which `word` is a whole word in `text`.
pub fn words<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let alone = move |&at: &usize| !text[..at].ends_with(is_word) && !text[at + word.len()..].starts_with(is_word);
    text.match_indices(word).map(|(at, _)| at).filter(alone)
}

pub fn line_of(text: &str, at: usize) -> usize {
    text[..at].matches('\n').count()
}
