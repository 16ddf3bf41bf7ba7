//! Runs the commands of `docs/tutorial-chat.md` in order, with a tiny model on the CPU.

use crate::chat::chats;
use crate::serve::Server;
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// Returns the lines of the shell blocks of a document.
fn commands(document: &str) -> Vec<&str> {
    let blocks = document.split("```").skip(1).step_by(2).filter_map(|block| block.strip_prefix("sh\n"));
    blocks.flat_map(str::lines).collect()
}

#[test]
fn the_tutorial_of_chats_works_as_it_is_written() {
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/tutorial-chat.md");
    let document = std::fs::read_to_string(document).unwrap();
    let run = chats();
    let chat = |i: usize| {
        format!(
            r#"{{"messages": [{{"role": "user", "content": "q{i}"}}, {{"role": "assistant", "content": "{}"}}]}}"#,
            "r".repeat(1 + i % 9)
        ) + "\n"
    };
    run.write("chats.jsonl", (0..40).map(chat).collect::<String>().as_bytes());
    let program = Path::new(env!("CARGO_BIN_EXE_ottava")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    let shell = |line: &str| {
        let mut command = Command::new("bash");
        command.args(["-o", "pipefail", "-c", line]).current_dir(run.path(".")).env("PATH", &path);
        // The commands run as on a machine without a GPU. The tutorial is the same there.
        command.env("CUDA_VISIBLE_DEVICES", "").env("OTTAVA_CACHE_DIR", run.path("cache"));
        command
    };
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
