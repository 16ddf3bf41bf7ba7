//! Writes what the crate includes from `OUT_DIR`: the list of the ops that declare kernels, and the kernels that `OTTAVA_KERNELS` names, a file that
//! the example `pack_kernels` of ottava-train writes; without it, none.

use std::path::{Path, PathBuf};

fn main() {
    println!("cargo::rerun-if-env-changed=OTTAVA_KERNELS");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it"));
    let write = |name: &str, bytes: &[u8]| {
        std::fs::write(out.join(name), bytes).unwrap_or_else(|error| panic!("{name} in {}: {error}", out.display()));
    };
    let pack = match std::env::var_os("OTTAVA_KERNELS").filter(|file| !file.is_empty()) {
        Some(file) => {
            let file = PathBuf::from(file);
            println!("cargo::rerun-if-changed={}", file.display());
            std::fs::read(&file).unwrap_or_else(|error| panic!("OTTAVA_KERNELS, {}: {error}", file.display()))
        }
        None => Vec::new(),
    };
    write("kernels.pack", &pack);
    let ops = Path::new("src/ops");
    println!("cargo::rerun-if-changed={}", ops.display());
    let calls: String = declarations(ops).iter().map(|module| format!("    super::{module}::modules(),\n")).collect();
    write("declared.rs", format!("[\n{calls}]\n.concat()\n").as_bytes());
}

/// The modules of `ops` that declare kernels, such as `gemm::cuda`.
fn declarations(ops: &Path) -> Vec<String> {
    let list = |folder: &Path| {
        let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        let mut paths: Vec<_> = entries.map(|entry| entry.expect("a folder is listed").path()).collect();
        paths.sort();
        paths
    };
    let stem = |path: &Path| path.file_stem().and_then(|stem| stem.to_str()).expect("a name in UTF-8").to_string();
    let mut declarations = Vec::new();
    for folder in list(ops).iter().filter(|path| path.is_dir()) {
        for file in list(folder).iter().filter(|path| path.extension().is_some_and(|end| end == "rs")) {
            let text = std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
            if text.lines().any(|line| line == "kernels! {") {
                declarations.push(format!("{}::{}", stem(folder), stem(file)));
            }
        }
    }
    declarations
}
