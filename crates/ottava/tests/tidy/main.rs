//! Tests rules of this project that no compiler checks: floors, `unsafe`, leftovers, the shape of op folders, the length of files.

mod floors;
mod modules;
mod source;
mod words;

use floors::FLOORS;
use modules::without_tests;
use source::{File, code_of, crates, files, is_word, line_of, root, words};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The maximum number of lines of a Rust file. A longer file should be split.
const MAX_LINES: usize = 600;

/// The maximum number of lines of a kernel or a script. A kernel is one unit of compilation.
const MAX_LINES_OF_OTHERS: usize = 700;

/// The number of lines above `unsafe` within which its reason must be. A statement may be that long.
const REASON_WITHIN: usize = 6;

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
            // The type of an unsafe function pointer needs no reason; calling it does.
            if after.starts_with("extern") && !code[line].trim_start().starts_with("unsafe") {
                continue;
            }
            let above = &text[line.saturating_sub(REASON_WITHIN)..=line];
            if !above.iter().any(|line| line.contains("SAFETY:") || line.contains("# Safety")) {
                problems.push(format!("{}: `unsafe` without a SAFETY comment above", file.at(line)));
            }
        }
    }
    for krate in crates().iter().filter(|krate| *krate != "ottava-tensor") {
        let file = format!("crates/{krate}/src/{}.rs", if krate == "ottava" { "main" } else { "lib" });
        let text = fs::read_to_string(root().join(&file)).expect("the crate's root is there");
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
        let files = ["mod.rs", "cpu.rs", "tests.rs", "cuda.rs", &format!("{op}.cu")];
        for file in files {
            if !folder.join(file).is_file() {
                problems.push(format!("ops/{op}: {file} is missing"));
            }
        }
    }
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
}

/// The places where connections may be opened: requests to servers that settings name, and connections of ranks and keepers. The command line only forbids them.
const CONNECTIONS: &[(&str, &[&str])] = &[
    ("ureq", &["ottava-http/src"]),
    (
        "ottava_http",
        &[
            "ottava-http/src",
            "ottava-hub/src",
            "ottava-rewards/src",
            "ottava-store/src",
            "ottava-trackers/src",
            "ottava/src/commands/bench/serve.rs",
            "ottava/src/main.rs",
        ],
    ),
    ("TcpStream::connect", &["ottava-http/src/testing.rs", "ottava-tensor/src/comm", "ottava-elastic/src/process"]),
];

#[test]
fn one_crate_connects_to_servers() {
    let connects = |path: &Path, code: &str| {
        let is_elsewhere =
            |places: &[&str]| !places.iter().any(|place| path.starts_with(Path::new("crates").join(place)));
        CONNECTIONS.iter().any(|(way, places)| is_elsewhere(places) && without_tests(code).0.contains(way))
    };
    let sources = files("crates", &["rs"])
        .into_iter()
        .filter(|file| file.path.components().any(|part| part.as_os_str() == "src"));
    let is_test = |path: &Path| path.file_stem().is_some_and(|name| name.to_string_lossy().ends_with("tests"));
    let found: Vec<_> =
        sources.filter(|file| !is_test(&file.path) && connects(&file.path, &file.code)).map(|file| file.path).collect();
    assert!(
        found.is_empty(),
        "only `ottava-http` connects to servers, for `ottava-hub`, `ottava-rewards`, `ottava-store`, `ottava-trackers` and `bench serve`: {found:?}"
    );
    assert!(connects(Path::new("crates/ottava-data/src/files.rs"), "use ottava_http::Client;"));
    assert!(connects(Path::new("crates/ottava-data/src/hub.rs"), "fn get() { ureq::get(url); }"));
    assert!(!connects(Path::new("crates/ottava-http/src/client.rs"), "fn get() { ureq::get(url); }"));
}

/// The recipe of a run is only read where recipes are created, and not in the layers and models that run them.
#[test]
fn layers_and_models_name_no_recipe() {
    for file in files("crates/ottava-models/src", &["rs"]) {
        let found = words(&file.code, "RecipeName").next().map(|at| file.at(line_of(&file.code, at)));
        assert_eq!(found, None, "RecipeName");
    }
}

/// Clocks of hosts may jump. Only the number of the first hub of a job comes from the wall clock (`hub_link.rs`).
#[test]
fn timeouts_use_a_monotonic_clock() {
    let folders = ["crates/ottava-elastic/src", "crates/ottava-tensor/src/comm", "crates/ottava/src/ranks"];
    for file in folders.into_iter().flat_map(|folder| files(folder, &["rs"])) {
        let found = words(&file.code, "SystemTime").next().map(|at| file.at(line_of(&file.code, at)));
        assert!(found.is_none() || file.path.ends_with("process/hub_link.rs"), "{found:?} reads the wall clock");
    }
}

/// Returns the sources of the crates between `ottava-tensor`, which does not know models, and `ottava-serve`.
fn sources_of_models() -> Vec<File> {
    let names = FLOORS.iter().map(|(krate, _)| *krate);
    let names =
        names.filter(|krate| !["ottava-tensor", "ottava-files", "ottava-jinja", "ottava-serve"].contains(krate));
    names.flat_map(|krate| files(&format!("crates/{krate}/src"), &["rs"])).collect()
}

/// Returns the names of linears in string literals outside tests, each with the files that have it.
fn named_linears<'a>(files: impl Iterator<Item = (&'a Path, &'a str)>) -> BTreeMap<String, BTreeSet<PathBuf>> {
    let mut found: BTreeMap<String, BTreeSet<PathBuf>> = BTreeMap::new();
    for (path, text) in files {
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        for line in code.lines().filter(|line| !line.trim_start().starts_with("//")) {
            for literal in line.split('"').skip(1).step_by(2) {
                for word in literal.split(|c| !is_word(c)).filter(|word| word.ends_with("_proj")) {
                    found.entry(word.to_string()).or_default().insert(path.to_path_buf());
                }
            }
        }
    }
    found
}

/// A model is described only by the code that builds it: a second list of its linears would repeat their names. Returns the files that read several
/// fields of `Names`, the list of the tensors of a block. Such a file describes a model a second time.
fn walks<'a>(files: impl Iterator<Item = (&'a Path, &'a str)>) -> Vec<PathBuf> {
    const FIELDS: [&str; 6] = ["qkv", "output", "gate_up", "down", "attention_norm", "mlp_norm"];
    let reads = |code: &str, field: &str| {
        ["names", "LLAMA"].iter().any(|table| words(code, &format!("{table}.{field}")).next().is_some())
    };
    let is_walk = |(_, code): &(&Path, &str)| FIELDS.iter().filter(|field| reads(code, field)).count() > 2;
    files.filter(is_walk).map(|(path, _)| path.to_path_buf()).collect()
}

#[test]
fn a_model_is_walked_by_its_layers_alone() {
    let sources = sources_of_models();
    let is_layer = |file: &&File| file.path.components().any(|part| part.as_os_str() == "layers");
    let walks_of = |layers: bool| {
        let files = sources.iter().filter(|file| is_layer(file) == layers);
        walks(files.map(|file| (file.path.as_path(), file.code.as_str())))
    };
    assert_eq!(walks_of(false), Vec::<PathBuf>::new(), "`Decoder::folder_tensors` and `Names::role_of` list them");
    let planted = "for name in LLAMA.qkv { add(name) }\nadd(LLAMA.output);\nadd(names.down);";
    assert_eq!(walks([(Path::new("a.rs"), planted)].into_iter()), [Path::new("a.rs")]);
    assert!(walks([(Path::new("a.rs"), "norm(names.attention_norm); norm(names.mlp_norm)")].into_iter()).is_empty());
}

#[test]
fn each_linear_is_named_in_one_file() {
    let sources = sources_of_models();
    let sources = sources.iter().filter(|file| !file.path.ends_with("tests.rs"));
    let named = named_linears(sources.map(|file| (file.path.as_path(), file.text.as_str())));
    assert!(named.contains_key("q_proj"), "the walk sees the attention");
    let twice: Vec<_> = named.iter().filter(|(_, files)| files.len() > 1).collect();
    assert!(twice.is_empty(), "linears with a second description: {twice:?}");
    let planted = [("a.rs", "part(\"q_proj\", n)"), ("b.rs", "// \"k_proj\"\nname: \"self_attn.q_proj\"")];
    let planted = named_linears(planted.iter().map(|(path, text)| (Path::new(path), *text)));
    assert_eq!(planted.iter().map(|(name, files)| (name.as_str(), files.len())).collect::<Vec<_>>(), [("q_proj", 2)]);
}

/// The names of collectives of tensors in calls.
const COLLECTIVES: &[&str] = &["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter"];

/// The only file that may name the group of all ranks, for agreements between hosts.
const OF_ALL_RANKS: &str = "ottava-parallel/src/ranks.rs";

/// Returns uses of the group of all ranks, and collectives of tensors, outside the files that may have them. In other places, a reduction could
/// include ranks that do not share its tensor. `files` are paths below `crates`, each with its code.
fn world_reductions<'a>(files: impl Iterator<Item = (&'a Path, &'a str)>) -> Vec<String> {
    let mut problems = Vec::new();
    for (path, code) in files {
        let (code, path) = (without_tests(code).0, path.display().to_string());
        let called = |word: &str| {
            words(&code, word).any(|at| code[..at].ends_with('.') && code[at + word.len()..].starts_with('('))
        };
        let may_name_world = path == OF_ALL_RANKS;
        if called("world") && !may_name_world {
            problems.push(format!("{path}: names the group of all ranks; ask for the ranks that share the tensor"));
        }
        for collective in COLLECTIVES.iter().filter(|collective| called(collective)) {
            if !path.starts_with("ottava-parallel/") || may_name_world {
                problems.push(format!(
                    "{path}: calls {collective}, which belongs beside the tensors that ranks divide, in ottava-parallel"
                ));
            }
        }
    }
    problems
}

#[test]
fn reductions_take_the_ranks_that_share_a_tensor() {
    let sources = sources_of_models();
    let sources = sources.iter().filter(|file| !file.path.ends_with("tests.rs"));
    let below = |file: &'_ File| file.path.strip_prefix("crates").expect("a file of a crate").to_path_buf();
    let sources: Vec<_> = sources.map(|file| (below(file), file.code.clone())).collect();
    let problems = world_reductions(sources.iter().map(|(path, code)| (path.as_path(), code.as_str())));
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
    let exchange = "let group = ranks.sharing(Shared::Gradients);\ngroup.all_reduce(name, Reduce::Sum, x)?;";
    let planted = [
        ("ottava-parallel/src/exchange.rs", exchange, ""),
        ("ottava-parallel/src/ranks.rs", "self.mesh.world().agree(what, text)", ""),
        (
            "ottava-train/src/trainer/mod.rs",
            "fn f() {}\n#[cfg(test)]\nmod tests {\n    fn f() { mesh.world().barrier(what) }\n}",
            "",
        ),
        (
            "ottava-parallel/src/exchange.rs",
            "let group = mesh.world();",
            "ottava-parallel/src/exchange.rs: names the group of all ranks",
        ),
        (
            "ottava-parallel/src/ranks.rs",
            "self.world().all_reduce(name, Reduce::Max, x)",
            "ottava-parallel/src/ranks.rs: calls all_reduce",
        ),
        (
            "ottava-train/src/step/mod.rs",
            "group.all_gather(name, x)?",
            "ottava-train/src/step/mod.rs: calls all_gather",
        ),
    ];
    for (path, code, expected) in planted {
        let problems = world_reductions([(Path::new(path), code)].into_iter()).join("\n");
        assert!(problems.starts_with(expected) && problems.is_empty() == expected.is_empty(), "{code}: {problems}");
    }
}

/// Returns whether tests in this code run on the GPU, if there is one.
fn runs_on_a_gpu(code: &str) -> bool {
    ["devices()", "devices_of(", "gpu()"].iter().any(|call| {
        let before =
            |at: usize| code[..at].chars().next_back().is_some_and(|c| c.is_alphanumeric() || "_.".contains(c));
        code.match_indices(call).any(|(at, _)| !before(at))
    })
}

#[test]
fn the_gpu_suite_has_each_module_that_runs_on_a_gpu() {
    let folder = Path::new("crates/ottava-train/tests/promises");
    let mut in_sources = BTreeSet::new();
    for file in files(&folder.display().to_string(), &["rs"]) {
        let path = file.path.strip_prefix(folder).expect("below the folder").with_extension("");
        let module = path.display().to_string().replace('/', "::");
        if module.contains("::") && !module.starts_with("setup::") && runs_on_a_gpu(&file.code) {
            in_sources.insert(module);
        }
    }
    let script = fs::read_to_string(root().join("scripts/gpu-tests.sh")).expect("the script is there");
    let list =
        script.split("gpu_promises=(").nth(1).and_then(|rest| rest.split(')').next()).expect("the list is there");
    let in_script: BTreeSet<String> = list.split_whitespace().map(String::from).collect();
    assert_eq!(in_script, in_sources, "change `gpu_promises` in scripts/gpu-tests.sh");
}

#[test]
fn no_file_is_too_long() {
    let files = ["crates", "scripts"].map(|folder| files(folder, &["rs", "cu", "cuh", "py", "sh"]));
    for file in files.iter().flatten() {
        let is_rust = file.path.extension().is_some_and(|extension| extension == "rs");
        let most = if is_rust { MAX_LINES } else { MAX_LINES_OF_OTHERS };
        let lines = file.text.lines().count();
        assert!(lines <= most, "{}: {lines} lines, {most} are the most", file.path.display());
    }
}

#[test]
fn comments_and_strings_are_no_code() {
    let text = "a /* x\n */ b \"c // d\\\"\" e // f\n'\\'' 'g' &'h i r#\"j\"k\"# l br\"m\" '\\n' n";
    assert_eq!(code_of(text), "a \n b \"\" e \n'' '' &'h i \"\" l br\"\" '' n");
}
