//! `ottava doctor`.

use crate::setup::json;
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// Returns what `doctor` reports about NVRTC when `program` is called with an empty environment.
fn nvrtc(program: &Path) -> Value {
    let output = Command::new(program).args(["doctor", "--json"]).env_clear().output().unwrap();
    let report = json(&String::from_utf8(output.stdout).unwrap());
    report["libraries"].as_array().unwrap().iter().find(|library| library["name"] == "NVRTC").unwrap().clone()
}

#[test]
fn a_wrong_library_path_and_the_limits_of_the_host_are_shown_once() {
    let doctor = |path: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ottava"));
        let output = command.arg("doctor").env("OTTAVA_LIBRARY_PATH", path).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let said = doctor("/nonexistent");
    assert!(said.contains("OTTAVA_LIBRARY_PATH names /nonexistent, which is no folder"), "{said}");
    assert_eq!(said.matches("folders of Python packages").count(), 1, "{said}");
    for part in ["available; checkpoints", "free in this folder", "open files", "of locked memory"] {
        assert!(said.contains(part), "no {part} in {said}");
    }
    assert!(!doctor("/").contains("which is no folder"));
}

/// Tests the layout of `uv tool install` and `pipx install`: the program has its own environment, and `PATH` has a link to the program.
#[test]
fn libraries_are_found_in_the_environment_of_the_program() {
    let folder = tempfile::tempdir().unwrap();
    let env = folder.path().join("share/uv/tools/ottava");
    let (program, link) = (env.join("bin/ottava"), folder.path().join("bin/ottava"));
    let libraries = env.join("lib/python3.12/site-packages/nvidia/cu13/lib");
    for path in [&program, &link] {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    }
    std::fs::create_dir_all(&libraries).unwrap();
    let built = Path::new(env!("CARGO_BIN_EXE_ottava"));
    std::fs::hard_link(built, &program).or_else(|_| std::fs::copy(built, &program).map(drop)).unwrap();
    std::os::unix::fs::symlink(&program, &link).unwrap();
    if !nvrtc(&program)["path"].is_null() {
        eprintln!("skipped: NVRTC is in a folder of the system");
        return;
    }
    // This file is not a library, so the message names it as the file that was tried.
    std::fs::write(libraries.join("libnvrtc.so.13"), "not a library").unwrap();
    for program in [&program, &link] {
        let problem = nvrtc(program)["problem"].as_str().unwrap().to_string();
        let file = libraries.canonicalize().unwrap().join("libnvrtc.so.13");
        assert!(problem.contains(&format!("{} is not an ELF library", file.display())), "{problem}");
    }
}
