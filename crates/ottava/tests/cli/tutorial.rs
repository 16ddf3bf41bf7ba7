//! Runs the commands of the tutorials in order, with tiny models on the CPU.

use crate::chat::chats;
use crate::serve::Server;
use crate::setup::Run;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the lines of the shell blocks of a document.
fn commands(document: &str) -> Vec<&str> {
    let blocks = document.split("```").skip(1).step_by(2).filter_map(|block| block.strip_prefix("sh\n"));
    blocks.flat_map(str::lines).collect()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// A command of a tutorial, in the folder of `run`.
fn shell(run: &Run, line: &str) -> Command {
    let program = Path::new(env!("CARGO_BIN_EXE_ottava")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    let mut command = Command::new("bash");
    command.args(["-o", "pipefail", "-c", line]).current_dir(run.path(".")).env("PATH", &path);
    // As on a machine without a GPU, on which the tutorial is the same.
    command.env("CUDA_VISIBLE_DEVICES", "").env("OTTAVA_CACHE_DIR", run.path("cache"));
    command
}

/// With fewer steps and in BF16, which a CPU computes faster; the model learns as well.
#[test]
fn the_tutorial_of_rewards_raises_the_accuracy() {
    let document = std::fs::read_to_string(root().join("docs/tutorial-reasoning.md")).unwrap();
    let run = Run::new();
    for folder in ["scripts", "configs"] {
        std::os::unix::fs::symlink(root().join(folder), run.path(folder)).unwrap();
    }
    let (mut outputs, mut count) = (String::new(), 0);
    for line in commands(&document) {
        let line = match line.strip_prefix("ottava train configs/reasoning.toml") {
            Some(rest) => format!("ottava train configs/reasoning.toml{rest} --set recipe=bf16 --set max_steps=80"),
            None => line.replace("reasoning-start.toml", "reasoning-start.toml --set recipe=bf16"),
        };
        let output = shell(&run, &line).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{line}: {error}");
        outputs += &format!("{line}: {}\n{error}", String::from_utf8_lossy(&output.stdout));
        count += 1;
    }
    assert_eq!(count, 6, "commands");
    let metrics = std::fs::read_to_string(run.path("runs/reasoning/metrics.jsonl")).unwrap();
    let lines = metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let accuracy: Vec<f64> = lines.filter_map(|line| line["eval_reward"].as_f64()).collect();
    // 0.17 and 0.72 were measured; other machines add in the same order.
    assert!(accuracy[0] < 0.3 && accuracy.last().is_some_and(|last| *last > 0.6), "{accuracy:?}\n{outputs}");
}

#[test]
fn the_tutorial_of_chats_works_as_it_is_written() {
    let document = std::fs::read_to_string(root().join("docs/tutorial-chat.md")).unwrap();
    let run = chats();
    let chat = |i: usize| {
        format!(
            r#"{{"messages": [{{"role": "user", "content": "q{i}"}}, {{"role": "assistant", "content": "{}"}}]}}"#,
            "r".repeat(1 + i % 9)
        ) + "\n"
    };
    run.write("chats.jsonl", (0..40).map(chat).collect::<String>().as_bytes());
    let shell = |line: &str| shell(&run, line);
    let (mut server, mut count) = (None, 0);
    for line in commands(&document) {
        count += 1;
        if line.starts_with("ottava serve") {
            server = Some(Server::spawn(shell(&format!("exec {}", line.replace("--port 8000", "--port 0")))));
        } else if line.starts_with("curl localhost:8000/v1/chat/completions ") {
            let body = line.split_once("-d '").unwrap().1.trim_end_matches('\'');
            let body: Value = serde_json::from_str(body).unwrap();
            let answer = server.as_ref().expect("it is served before").post("/v1/chat/completions", body);
            assert_eq!(answer["choices"][0]["message"]["role"], "assistant", "{answer}");
        } else {
            // Port 0 chooses a port that no other test uses.
            let output = shell(&line.replace("--monitor", "--monitor=0")).output().unwrap();
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{line}: {error}");
            assert!(!output.stdout.is_empty() || line.starts_with("ottava train"), "{line} prints nothing: {error}");
        }
    }
    assert!(server.is_some() && count == 11, "{count} commands");
    let config = std::fs::read_to_string(run.path("model-fp8/config.json")).unwrap();
    assert!(config.contains("compressed-tensors"), "{config}");
}
