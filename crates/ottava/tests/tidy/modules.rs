//! Tests the imports of files: floors and cycles.

use super::floors::{FLOORS, Floors};
use super::source::{files, is_word, words};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The crates in which folders and files at the root may import each other, because they treat a single subject.
const ONE_ROOM: &[&str] = &["ottava-settings"];

/// The folders in which each subfolder counts as one node in the search for import cycles. For example, contract, reference and launch of an op
/// import each other.
const UNITS: &[&str] = &["ops"];

/// Returns the depth of a file's module in its crate; the root has depth 0. The module of a test file that another file includes is one level deeper.
fn depth(in_src: &Path) -> usize {
    let own = match in_src.file_stem().and_then(|s| s.to_str()).unwrap_or_default() {
        "mod" | "lib" | "main" => 0,
        stem if stem.ends_with("_tests") => 2,
        _ => 1,
    };
    in_src.components().count() - 1 + own
}

/// The segments of a path.
type Names = Vec<String>;

/// A `use` declaration: `use a::b as c` has the path `[a, b]` and the name `c`.
struct Import {
    public: bool,
    path: Names,
    name: String,
}

/// The imports of a source file.
struct Module {
    file: PathBuf,
    /// The `use` declarations, with groups expanded.
    imports: Vec<Import>,
    /// The other paths with at least two segments.
    paths: Vec<Names>,
    /// Whether the file has only `mod`, `use` and attributes.
    only_exports: bool,
}

/// The source files of a crate, by module path. Code under `#[cfg(test)]` is excluded, because it may import anything.
struct Modules(BTreeMap<Names, Module>);

impl Modules {
    /// Parses the modules. `files` are paths below `src`, each with its code.
    fn new<'a>(files: impl IntoIterator<Item = (&'a Path, &'a str)>) -> Modules {
        let (mut modules, mut tests) = (BTreeMap::new(), Vec::new());
        for (file, code) in files {
            let mut path: Names =
                file.with_extension("").iter().map(|part| part.to_string_lossy().into_owned()).collect();
            path.pop_if(|last| ["mod", "lib", "main"].contains(&last.as_str()));
            let (code, test_modules) = without_tests(code);
            tests.extend(test_modules.into_iter().map(|name| [path.clone(), vec![name]].concat()));
            let (imports, rest) = take_imports(&code);
            let only_exports = rest.lines().all(|line| {
                let line = line.trim();
                line.is_empty() || line.starts_with('#') || line.ends_with(';') && words(line, "mod").next().is_some()
            });
            modules.insert(path, Module { file: file.into(), imports, paths: paths_of(&rest), only_exports });
        }
        modules.retain(|path, _| !tests.iter().any(|test| path.starts_with(test)));
        Modules(modules)
    }

    /// Returns the absolute path of `path` in `module`; `None` for names of other crates.
    fn resolve_from_root(&self, module: &[String], path: &[String]) -> Option<Names> {
        self.by_name(module, path).or_else(|| {
            let imports = &self.0.get(module)?.imports;
            imports.iter().filter(|import| import.name == "*").find_map(|import| {
                let all = self.by_name(module, &import.path[..import.path.len() - 1])?;
                let first = [all.as_slice(), &path[..1]].concat();
                self.0.contains_key(&first).then(|| [all.as_slice(), path].concat())
            })
        })
    }

    /// Like [`Modules::resolve_from_root`], but without glob imports.
    fn by_name(&self, module: &[String], path: &[String]) -> Option<Names> {
        let (first, rest) = path.split_first()?;
        let from = |base: &[String], rest: &[String]| Some([base, rest].concat());
        match first.as_str() {
            "crate" => from(&[], rest),
            "self" => from(module, rest),
            "super" => {
                let supers = path.iter().take_while(|name| *name == "super").count();
                from(&module[..module.len().checked_sub(supers)?], &path[supers..])
            }
            _ if self.0.contains_key(&[module, &path[..1]].concat()) => from(module, path),
            _ => {
                let imports = &self.0.get(module)?.imports;
                let import = imports.iter().find(|import| import.name == *first && import.path[0] != *first)?;
                from(&self.by_name(module, &import.path)?, rest)
            }
        }
    }

    /// Returns the module that defines the item at the absolute `path`, and whether `path` is the module itself.
    fn definition(&self, path: &[String], steps: usize) -> (Names, bool) {
        let mut module = Names::new();
        for (i, name) in path.iter().enumerate() {
            let inner = [module.as_slice(), std::slice::from_ref(name)].concat();
            if self.0.contains_key(&inner) {
                module = inner;
                continue;
            }
            let import = self.0.get(&module).and_then(|m| m.imports.iter().find(|import| import.name == *name));
            let target = import.filter(|_| steps < 16).and_then(|import| self.resolve_from_root(&module, &import.path));
            return match target {
                Some(target) => self.definition(&[&target, &path[i + 1..]].concat(), steps + 1),
                None => (module, false),
            };
        }
        (module, true)
    }

    /// Returns the modules that `module` imports, each with the importing path. Re-exports do not count as imports, and files with only re-exports
    /// are skipped.
    fn imported_by(&self, module: &[String]) -> BTreeMap<Names, String> {
        let of = &self.0[module];
        let imports = of.imports.iter().filter(|import| !import.public).map(|import| &import.path);
        let found = imports.chain(&of.paths).filter_map(|path| {
            let (target, is_module) = self.definition(&self.resolve_from_root(module, path)?, 0);
            let counts = target != module && !target.is_empty() && !(is_module && self.0[&target].only_exports);
            counts.then(|| (target, path.join("::")))
        });
        found.collect()
    }

    /// Finds an import cycle, and formats it as `a.rs -> b.rs (crate::b::B) -> a.rs (crate::a::A)`.
    fn cycle(&self, node: impl Fn(&Names) -> Names) -> Option<String> {
        let mut edges: BTreeMap<Names, BTreeMap<Names, String>> = BTreeMap::new();
        for module in self.0.keys() {
            let from = node(module);
            let targets = self.imported_by(module).into_iter().map(|(target, path)| (node(&target), path));
            let targets: Vec<_> = targets.filter(|(target, _)| *target != from).collect();
            edges.entry(from).or_default().extend(targets);
        }
        let file = |module: &Names| self.0[module].file.display().to_string();
        let mut done = BTreeSet::new();
        edges.keys().find_map(|start| {
            let mut trail = vec![start.clone()];
            let cycle = cycle_from(&edges, &mut trail, &mut done)?;
            let steps = cycle.windows(2).map(|pair| format!(" -> {} ({})", file(&pair[1]), edges[&pair[0]][&pair[1]]));
            Some(file(&cycle[0]) + &steps.collect::<String>())
        })
    }

    /// Returns the imports from a higher floor. `visible` are this crate (`crate`) and the lower crates, by the names that this crate's files use.
    fn upward_imports(&self, floors: Floors, visible: &[(String, &Modules, Floors)]) -> Vec<String> {
        let mut problems = Vec::new();
        for (module, of) in self.0.iter().filter(|(module, _)| !module.is_empty()) {
            let file = of.file.display();
            let Some(own) = floor(floors, module) else {
                problems.push(format!("{file}: `{}` has no floor in the table of this test", module[0]));
                continue;
            };
            let imports = of.imports.iter().filter(|import| !import.public).map(|import| &import.path).chain(&of.paths);
            for path in imports {
                let other = visible.iter().find(|(prefix, ..)| *prefix == path[0]);
                let (modules, floors, resolve_from_root) = match other {
                    Some((prefix, modules, floors)) if prefix != "crate" => {
                        (*modules, *floors, Some(path[1..].to_vec()))
                    }
                    _ => (self, floors, self.resolve_from_root(module, path)),
                };
                let Some(resolve_from_root) = resolve_from_root else { continue };
                let (target, _) = modules.definition(&resolve_from_root, 0);
                match floor(floors, &target) {
                    Some(floor) if floor > own => {
                        problems.push(format!("{file}: floor {own} imports {} from floor {floor}", path.join("::")))
                    }
                    _ => {}
                }
            }
        }
        problems
    }
}

/// Returns the floor of a module, from the longest matching entry.
fn floor(floors: Floors, module: &[String]) -> Option<u8> {
    let within = |entry: &str| {
        entry.is_empty() || entry.split('/').zip(module).filter(|(a, b)| a == b).count() == entry.split('/').count()
    };
    floors.iter().filter(|(entry, _)| within(entry)).max_by_key(|(entry, _)| entry.len()).map(|&(_, floor)| floor)
}

/// Finds a cycle that is reachable from the end of `trail`, with its first module repeated at the end. `done` are modules that reach no cycle.
fn cycle_from(
    edges: &BTreeMap<Names, BTreeMap<Names, String>>,
    trail: &mut Vec<Names>,
    done: &mut BTreeSet<Names>,
) -> Option<Vec<Names>> {
    let last = trail.last().expect("a trail has a start").clone();
    if done.contains(&last) {
        return None;
    }
    for next in edges.get(&last).into_iter().flat_map(BTreeMap::keys) {
        if let Some(at) = trail.iter().position(|module| module == next) {
            return Some([&trail[at..], std::slice::from_ref(next)].concat());
        }
        trail.push(next.clone());
        if let Some(cycle) = cycle_from(edges, trail, done) {
            return Some(cycle);
        }
        trail.pop();
    }
    done.insert(last);
    None
}

/// Returns `code` without items under `#[cfg(test)]`, and the names of its test modules in other files.
pub fn without_tests(code: &str) -> (String, Names) {
    let (mut kept, mut modules, mut rest) = (String::new(), Vec::new(), code);
    while let Some((before, item)) = rest.split_once("#[cfg(test)]") {
        kept += before;
        let end = item.find([';', '{']).unwrap_or(item.len());
        if item[end..].starts_with(';') {
            let name = words(&item[..end], "mod").next().map(|at| item[at + 3..end].trim().to_string());
            modules.extend(name);
        }
        let mut depth = 0;
        let length = item.char_indices().skip_while(|&(i, _)| i < end).find_map(|(i, c)| {
            depth += i32::from(c == '{') - i32::from(c == '}');
            (depth == 0).then_some(i + 1)
        });
        rest = &item[length.unwrap_or(item.len())..];
    }
    (kept + rest, modules)
}

/// Returns the `use` declarations of `code`, and the code without them.
fn take_imports(code: &str) -> (Vec<Import>, String) {
    let (mut imports, mut rest, mut end) = (Vec::new(), String::new(), 0);
    for at in words(code, "use").filter(|&at| code[at + 3..].starts_with(' ')) {
        let Some(length) = code[at..].find(';').filter(|_| at >= end) else { continue };
        let line = code[..at].rfind(['\n', ';', '{', '}']).map_or(0, |i| i + 1);
        rest += &code[end..line.max(end)];
        let public = code[line..at].trim_start().starts_with("pub");
        for (path, name) in expand(&code[at + 4..at + length]) {
            imports.push(Import { public, path, name });
        }
        end = at + length + 1;
    }
    (imports, rest + &code[end..])
}

/// Expands a `use` to paths and names: `a::{self, b as c}` becomes `a` with the name `a`, and `a::b` with the name `c`.
fn expand(tree: &str) -> Vec<(Names, String)> {
    let names =
        |path: &str| path.split("::").map(str::trim).filter(|name| !name.is_empty()).map(String::from).collect();
    let Some((before, group)) = tree.split_once('{') else {
        let (path, alias) = tree.split_once(" as ").unwrap_or((tree, ""));
        let path: Names = names(path);
        let name = if alias.is_empty() { path.last().cloned() } else { Some(alias.trim().to_string()) };
        return name.map(|name| (path, name)).into_iter().collect();
    };
    let (before, mut depth, mut start, mut all): (Names, _, _, _) = (names(before), 0, 0, Vec::new());
    for (i, c) in group.char_indices() {
        depth += i32::from(c == '{') - i32::from(c == '}');
        if depth < 0 || depth == 0 && c == ',' {
            all.extend(expand(&group[start..i]).into_iter().map(|(path, name)| match path.as_slice() {
                [own] if own == "self" => (before.clone(), before.last().cloned().unwrap_or_default()),
                _ => ([before.as_slice(), &path].concat(), name),
            }));
            start = i + 1;
        }
    }
    all
}

/// Returns the paths in `code` with at least two segments, except in `pub(in …)`.
fn paths_of(code: &str) -> Vec<Names> {
    let (mut paths, mut end) = (Vec::new(), 0);
    while let Some(at) = code[end..].find(is_word).map(|at| end + at) {
        let mut names = Vec::new();
        end = at;
        loop {
            let length = code[end..].find(|c| !is_word(c)).unwrap_or(code.len() - end);
            names.push(code[end..end + length].to_string());
            end += length;
            if !code[end..].strip_prefix("::").is_some_and(|after| after.starts_with(is_word)) {
                break;
            }
            end += 2;
        }
        if names.len() > 1 && !code[..at].ends_with([':', '.']) && !code[..at].ends_with("(in ") {
            paths.push(names);
        }
    }
    paths
}

/// Returns the modules of a library crate.
fn modules_of(krate: &str) -> Modules {
    let src = format!("crates/{krate}/src");
    let files = files(&src, &["rs"]);
    Modules::new(files.iter().map(|file| (file.path.strip_prefix(&src).expect("a file of src"), file.code.as_str())))
}

#[test]
fn floors_name_modules_that_exist() {
    for (krate, floors) in FLOORS {
        let modules = modules_of(krate);
        let exists = |entry: &str| entry.is_empty() || modules.0.keys().any(|module| module.join("/") == entry);
        let stale: Vec<_> = floors.iter().map(|(entry, _)| *entry).filter(|entry| !exists(entry)).collect();
        assert!(stale.is_empty(), "{krate} has no {stale:?}");
    }
}

#[test]
fn files_import_from_their_floor_or_below() {
    let crates: Vec<_> = FLOORS.iter().map(|(krate, floors)| (*krate, modules_of(krate), *floors)).collect();
    let mut problems = Vec::new();
    for (position, (krate, modules, floors)) in crates.iter().enumerate() {
        // A crate can use itself and the crates that are listed before it.
        let prefix = |name: &str| if name == *krate { "crate".to_string() } else { name.replace('-', "_") };
        let visible: Vec<_> = crates[..=position].iter().map(|(name, m, floors)| (prefix(name), m, *floors)).collect();
        problems.extend(modules.upward_imports(floors, &visible));
    }
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
}

#[test]
fn the_crate_root_is_named_crate() {
    let mut problems = Vec::new();
    for (krate, _) in FLOORS {
        let src = format!("crates/{krate}/src");
        for file in files(&src, &["rs"]) {
            let in_src = file.path.strip_prefix(&src).expect("a file of src");
            for (number, line) in file.code.lines().enumerate().filter(|_| in_src != Path::new("lib.rs")) {
                let import = line.strip_prefix("pub(crate) ").or(line.strip_prefix("pub ")).unwrap_or(line);
                let steps = import.strip_prefix("use ").map_or(0, |path| path.matches("super::").count());
                if steps >= depth(in_src) {
                    problems.push(format!("{}: reaches the crate's root by `super`; write `crate`", file.at(number)));
                }
            }
        }
    }
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
}

#[test]
fn files_have_no_import_cycle() {
    for krate in FLOORS.iter().map(|(krate, _)| *krate).chain(["ottava"]) {
        assert_eq!(modules_of(krate).cycle(file_or_unit), None, "{krate}");
        if !ONE_ROOM.contains(&krate) {
            assert_eq!(modules_of(krate).cycle(folder), None, "folders of {krate}");
        }
    }
}

/// Returns the file of a module, or the folder of an op.
fn file_or_unit(module: &Names) -> Names {
    match module.as_slice() {
        [folder, inner, ..] if UNITS.contains(&folder.as_str()) => vec![folder.clone(), inner.clone()],
        _ => module.clone(),
    }
}

/// Returns the folder of a file below `src`. Returns the file itself if it is in no folder, or if it has tests, which may import anything.
fn folder(module: &Names) -> Names {
    let is_test = module.last().is_some_and(|name| name.ends_with("_tests"));
    module.iter().take(if is_test { module.len() } else { 1 }).cloned().collect()
}

#[test]
fn a_planted_cycle_of_folders_is_named() {
    let plant = |low: &str| {
        let files = [
            ("lib.rs", "mod a;\nmod b;"),
            ("a/mod.rs", "mod x;\nmod y;"),
            ("a/x.rs", "pub struct X;"),
            ("a/y.rs", low),
        ];
        planted(&[&files[..], &[("b/mod.rs", "mod z;"), ("b/z.rs", "use crate::a::x::X;\npub struct Z(X);")]].concat())
    };
    assert_eq!(plant("").cycle(folder), None);
    // No file imports itself, but the folders import each other.
    let cyclic = plant("use crate::b::z::Z;");
    assert_eq!(cyclic.cycle(file_or_unit), None);
    let expected = "a/mod.rs -> b/mod.rs (crate::b::z::Z) -> a/mod.rs (crate::a::x::X)";
    assert_eq!(cyclic.cycle(folder).as_deref(), Some(expected));
}

/// Returns the modules of made-up sources.
fn planted(files: &[(&str, &str)]) -> Modules {
    Modules::new(files.iter().map(|(file, code)| (Path::new(file), *code)))
}

#[test]
fn a_planted_cycle_is_named() {
    let exports = "mod low;\nmod high;\npub use high::{High, other as Renamed};";
    let high = "use super::low::Low;\npub struct High(Low);";
    let cases = [
        ("", None),
        ("use super::high::High;", Some("super::high::High")),
        ("use crate::a::{High as H};", Some("crate::a::High")),
        ("use crate::a;\nfn f() { a::Renamed::new(); }", Some("a::Renamed::new")),
        ("use super::*;\nfn f() { high::f(); }", Some("high::f")),
        ("fn f(x: &super::High) {}", Some("super::High")),
        ("pub use super::high::High;\npub(in crate::a::high) struct Low;", None),
        ("#[cfg(test)]\nmod tests {\n    use crate::a::High;\n}", None),
    ];
    for (low, path) in cases {
        let modules =
            planted(&[("lib.rs", "pub mod a;"), ("a/mod.rs", exports), ("a/low.rs", low), ("a/high.rs", high)]);
        let expected = path.map(|path| format!("a/high.rs -> a/low.rs (super::low::Low) -> a/high.rs ({path})"));
        assert_eq!(modules.cycle(Names::clone), expected, "{low}");
    }
}

#[test]
fn modules_with_code_count_and_op_folders_are_one_node() {
    let files = [
        ("lib.rs", "mod ops;"),
        ("ops/mod.rs", "mod add;\nmod cast;\npub use add::add;"),
        ("ops/add/mod.rs", "mod cpu;\npub fn add() { cpu::add() }\npub struct Kind;"),
        ("ops/add/cpu.rs", "use super::Kind;\npub fn add() {}"),
        ("ops/cast.rs", "use super::add;"),
    ];
    assert!(
        planted(&files).cycle(Names::clone).is_some_and(|cycle| cycle.starts_with("ops/add/mod.rs -> ops/add/cpu.rs"))
    );
    assert_eq!(planted(&files).cycle(file_or_unit), None);
    let mut files = files;
    files[3].1 = "use crate::ops::cast::Cast;";
    let cycle = planted(&files).cycle(file_or_unit).expect("a cycle of two ops");
    assert!(cycle.contains("ops/cast.rs"), "{cycle}");
}

#[test]
fn a_planted_upward_import_is_named() {
    const LOWER: Floors = &[("base", 0), ("base/top", 1)];
    const UPPER: Floors = &[("layer", 2), ("model", 3)];
    let lower = planted(&[
        ("lib.rs", "pub mod base;\npub use base::top::Top;"),
        ("base/mod.rs", "pub mod low;\npub mod top;"),
        ("base/low.rs", "use super::top;"),
        ("base/top.rs", "use super::low::Low;"),
    ]);
    let problems = lower.upward_imports(LOWER, &[("crate".into(), &lower, LOWER)]);
    assert_eq!(problems, ["base/low.rs: floor 0 imports super::top from floor 1"]);
    let upper = planted(&[
        ("lib.rs", "pub use model::Model;"),
        ("layer.rs", "use lower::Top;\nfn f() { crate::Model::new(); }"),
        ("model.rs", "use crate::layer::Layer;"),
        ("odd.rs", ""),
    ]);
    let problems = upper.upward_imports(UPPER, &[("lower".into(), &lower, LOWER), ("crate".into(), &upper, UPPER)]);
    let expected = [
        "layer.rs: floor 2 imports crate::Model::new from floor 3",
        "odd.rs: `odd` has no floor in the table of this test",
    ];
    assert_eq!(problems, expected);
}

#[test]
fn groups_of_imports_are_expanded() {
    let paths: Vec<_> = expand("a::{b, c::{self, d as e}}").into_iter().map(|(p, n)| (p.join("::"), n)).collect();
    let expected = [("a::b", "b"), ("a::c", "c"), ("a::c::d", "e")];
    assert_eq!(paths, expected.map(|(path, name)| (path.to_string(), name.to_string())));
    assert_eq!(depth(Path::new("a/b.rs")), 2);
}
