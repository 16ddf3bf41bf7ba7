//! Rules of this project that no compiler checks: floors, `unsafe`, leftovers, the shape of op folders, the length of files.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The floor of each module at the top of a library crate. A file imports from its own floor or from lower ones.
const FLOORS: &[(&str, &[(&str, u8)])] = &[
    (
        "ottava-tensor",
        &[
            ("dtype", 0),
            ("element", 0),
            ("error", 0),
            ("fp8", 0),
            ("mapped", 0),
            ("cuda", 1),
            ("crossing", 1),
            ("device", 1),
            ("ledger", 1),
            ("quantized", 1),
            ("stored", 1),
            ("tensor", 1),
            ("bench", 2),
            ("ops", 2),
            ("testing", 2),
        ],
    ),
    (
        "ottava-lm",
        &[
            ("error", 3),
            ("hash", 3),
            ("layer", 3),
            ("param", 3),
            ("recipe", 3),
            ("level", 3),
            ("recompute", 3),
            ("scaling", 3),
            ("layers", 4),
            ("models", 5),
            ("checkpoint", 6),
            ("data", 6),
            ("evaluate", 6),
            ("generate", 6),
            ("optim", 6),
            ("report", 6),
            ("config", 7),
            ("bench", 7),
            ("plan", 7),
            ("step", 7),
            ("trainer", 7),
        ],
    ),
];

/// The most lines a file may have; a longer one wants to be two.
const MAX_LINES: usize = 700;

/// Lines above `unsafe` in which its reason must stand: a statement may be that long.
const REASON_WITHIN: usize = 6;

/// A source file, as it is and without comments and the contents of strings. Both have the same lines.
struct File {
    path: PathBuf,
    text: String,
    code: String,
}

impl File {
    fn at(&self, line: usize) -> String {
        format!("{}:{}", self.path.display(), line + 1)
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace is there")
}

/// All files below `folder` of the workspace whose names end in one of `endings`, in order, with paths from the workspace's root.
fn files(folder: &str, endings: &[&str]) -> Vec<File> {
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

/// Rust without comments and the contents of strings; line ends stay.
fn code_of(text: &str) -> String {
    let (chars, mut code, mut i) = (text.chars().collect::<Vec<_>>(), String::new(), 0);
    let starts = |i: usize, what: &str| what.chars().enumerate().all(|(j, c)| chars.get(i + j) == Some(&c));
    // Copies the line ends of what is left out, up to `end`.
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
            // A character; a lifetime has no second quote there. After a backslash, `'` may itself be the character.
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

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Byte positions at which `word` stands by itself in `text`.
fn words<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let alone = move |&at: &usize| !text[..at].ends_with(is_word) && !text[at + word.len()..].starts_with(is_word);
    text.match_indices(word).map(|(at, _)| at).filter(alone)
}

fn line_of(text: &str, at: usize) -> usize {
    text[..at].matches('\n').count()
}

/// The first names of a path or of a group of paths: `a` of `a::b`, `a` and `c` of `{a::b, c::{d, e}}`.
fn first_names(path: &str) -> Vec<String> {
    let name = |text: &str| text.trim_start().chars().take_while(|&c| is_word(c)).collect::<String>();
    let Some(group) = path.trim_start().strip_prefix('{') else { return vec![name(path)] };
    let (mut depth, mut names, mut start) = (0, Vec::new(), 0);
    for (i, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            ',' | '}' if depth == 0 => {
                names.push(name(&group[start..i]));
                start = i + 1;
                if c == '}' {
                    break;
                }
            }
            '}' => depth -= 1,
            _ => {}
        }
    }
    names.retain(|name| !name.is_empty() && name != "self");
    names
}

/// Where the names at the root of a crate come from: modules themselves, and what `lib.rs` exports from them.
fn origins(krate: &str, modules: &[(&'static str, u8)]) -> HashMap<String, &'static str> {
    let mut origins: HashMap<String, &'static str> =
        modules.iter().map(|&(module, _)| (module.to_string(), module)).collect();
    let path = root().join("crates").join(krate).join("src/lib.rs");
    let code = code_of(&fs::read_to_string(path).expect("lib.rs is there"));
    for export in code.split("pub use ").skip(1) {
        let export = export.split(';').next().unwrap_or_default();
        let (module, names) = export.split_once("::").expect("an export has a path");
        let &(module, _) =
            modules.iter().find(|(name, _)| *name == module).expect("lib.rs exports from modules of the table");
        origins.extend(first_names(names).into_iter().map(|name| (name, module)));
    }
    origins
}

/// How deep in its crate the module of a file lies; 0 is the root. Test files that another file includes lie one deeper.
fn depth(in_src: &Path) -> usize {
    let stem = in_src.file_stem().and_then(|s| s.to_str()).unwrap_or_default();
    let own = match stem {
        "mod" | "lib" | "main" => 0,
        stem if stem.ends_with("_tests") => 2,
        _ => 1,
    };
    in_src.components().count() - 1 + own
}

#[test]
fn files_import_from_their_floor_or_below() {
    let mut problems = Vec::new();
    for (position, (krate, modules)) in FLOORS.iter().enumerate() {
        let src = format!("crates/{krate}/src");
        // A crate sees itself and those listed before it.
        let visible: Vec<_> = FLOORS[..=position]
            .iter()
            .map(|(name, modules)| {
                let prefix = if name == krate { "crate".to_string() } else { name.replace('-', "_") };
                (prefix, origins(name, modules), *modules)
            })
            .collect();
        for file in files(&src, &["rs"]) {
            let in_src = file.path.strip_prefix(&src).expect("a file of src").to_path_buf();
            let top = in_src.iter().next().and_then(|c| c.to_str()).unwrap_or_default();
            let top = top.trim_end_matches(".rs");
            if top == "lib" {
                continue;
            }
            let Some(&(_, own)) = modules.iter().find(|(module, _)| *module == top) else {
                problems.push(format!("{}: `{top}` has no floor in the table of this test", file.path.display()));
                continue;
            };
            for (prefix, origins, modules) in &visible {
                for at in words(&file.code, prefix).filter(|at| file.code[at + prefix.len()..].starts_with("::")) {
                    let path = &file.code[at + prefix.len() + 2..];
                    for name in first_names(path) {
                        let place = file.at(line_of(&file.code, at));
                        let floor = origins.get(&name).and_then(|origin| modules.iter().find(|(m, _)| m == origin));
                        match floor {
                            None => {
                                problems.push(format!("{place}: {prefix}::{name} comes from no module of the table"))
                            }
                            Some((_, floor)) if *floor > own => problems
                                .push(format!("{place}: floor {own} imports {prefix}::{name} from floor {floor}")),
                            Some(_) => {}
                        }
                    }
                }
            }
            for (number, line) in file.code.lines().enumerate() {
                let import = line.strip_prefix("pub(crate) ").or(line.strip_prefix("pub ")).unwrap_or(line);
                let steps = import.strip_prefix("use ").map_or(0, |path| path.matches("super::").count());
                if steps >= depth(&in_src) {
                    problems.push(format!("{}: reaches the crate's root by `super`; write `crate`", file.at(number)));
                }
            }
        }
    }
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
}

#[test]
fn unsafe_stays_in_ottava_tensor_and_gives_its_reason() {
    let mut problems = Vec::new();
    for file in files("crates", &["rs"]) {
        let (code, text): (Vec<_>, Vec<_>) = (file.code.lines().collect(), file.text.lines().collect());
        for at in words(&file.code, "unsafe") {
            let line = line_of(&file.code, at);
            if !file.path.starts_with("crates/ottava-tensor/src") {
                problems.push(format!("{}: `unsafe` outside ottava-tensor", file.at(line)));
                continue;
            }
            let after = file.code[at..].trim_start_matches("unsafe").trim_start();
            // The type of a function pointer is no promise; whoever calls it makes one.
            if after.starts_with("extern") && !code[line].trim_start().starts_with("unsafe") {
                continue;
            }
            let above = &text[line.saturating_sub(REASON_WITHIN)..=line];
            if !above.iter().any(|line| line.contains("SAFETY:") || line.contains("# Safety")) {
                problems.push(format!("{}: `unsafe` without a SAFETY comment above", file.at(line)));
            }
        }
    }
    for file in ["crates/ottava-lm/src/lib.rs", "crates/ottava/src/main.rs"] {
        let text = fs::read_to_string(root().join(file)).expect("the crate's root is there");
        if !text.contains("#![forbid(unsafe_code)]") {
            problems.push(format!("{file}: does not forbid unsafe code"));
        }
    }
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
}

#[test]
fn nothing_unfinished_is_left() {
    let mut problems = Vec::new();
    for file in files("crates", &["rs"]) {
        for (number, line) in file.code.lines().enumerate() {
            for leftover in ["todo!", "unimplemented!", "dbg!", "#[ignore]"] {
                if line.contains(leftover) {
                    problems.push(format!("{}: `{leftover}`", file.at(number)));
                }
            }
        }
    }
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
}

#[test]
fn every_op_is_a_folder_with_all_its_files() {
    let mut problems = Vec::new();
    for entry in fs::read_dir(root().join("crates/ottava-tensor/src/ops")).expect("the ops are there") {
        let folder = entry.expect("a readable entry").path();
        if !folder.is_dir() {
            continue;
        }
        let op = folder.file_name().and_then(|name| name.to_str()).expect("a name in UTF-8").to_string();
        for file in ["mod.rs", "cpu.rs", "cuda.rs", "tests.rs", &format!("{op}.cu")] {
            if !folder.join(file).is_file() {
                problems.push(format!("ops/{op}: {file} is missing"));
            }
        }
    }
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
}

/// Which recipe a run has is asked where recipes are made, and nowhere among the layers and models that carry them out.
#[test]
fn layers_and_models_name_no_recipe() {
    for folder in ["crates/ottava-lm/src/layers", "crates/ottava-lm/src/models"] {
        for file in files(folder, &["rs"]) {
            let found = words(&file.code, "RecipeName").next().map(|at| file.at(line_of(&file.code, at)));
            assert_eq!(found, None, "RecipeName");
        }
    }
}

#[test]
fn no_file_is_too_long() {
    let mut problems = Vec::new();
    for folder in ["crates", "scripts"] {
        for file in files(folder, &["rs", "cu", "cuh", "py", "sh"]) {
            let lines = file.text.lines().count();
            if lines > MAX_LINES {
                problems.push(format!("{}: {lines} lines, {MAX_LINES} are the most", file.path.display()));
            }
        }
    }
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
}

#[test]
fn comments_and_strings_are_no_code() {
    let text = "a /* x\n */ b \"c // d\\\"\" e // f\n'\\'' 'g' &'h i r#\"j\"k\"# l br\"m\" '\\n' n";
    assert_eq!(code_of(text), "a \n b \"\" e \n'' '' &'h i \"\" l br\"\" '' n");
    assert_eq!(first_names("{a::b, c::{d, e}, self}; f"), ["a", "c"]);
    assert_eq!(first_names("a::b"), ["a"]);
    assert_eq!(depth(Path::new("a/b.rs")), 2);
}
