//! Includes the kernels that `OTTAVA_KERNELS` names, a file that the example `pack_kernels` of ottava-train writes; without it, none.

use std::path::PathBuf;

fn main() {
    println!("cargo::rerun-if-env-changed=OTTAVA_KERNELS");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it")).join("kernels.pack");
    let pack = match std::env::var_os("OTTAVA_KERNELS").filter(|file| !file.is_empty()) {
        Some(file) => {
            let file = PathBuf::from(file);
            println!("cargo::rerun-if-changed={}", file.display());
            std::fs::read(&file).unwrap_or_else(|error| panic!("OTTAVA_KERNELS, {}: {error}", file.display()))
        }
        None => Vec::new(),
    };
    std::fs::write(&out, pack).unwrap_or_else(|error| panic!("{}: {error}", out.display()));
}
