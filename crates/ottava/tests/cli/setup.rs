//! A folder with a small model, its tokenizer, text and a run's configuration, and functions that run the program in it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};

/// The inputs of a run, in a folder that is removed on drop.
pub struct Run {
    folder: tempfile::TempDir,
}

const CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
  "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 100, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}"#;

const RUN: &str = r#"output_dir = "run"
device = "cpu"
[model]
path = "model"
init = "random"
[data]
train_files = ["text.txt"]
val_set_size = 2
max_length = 16

[data.records]
text_documents = "line"
[training]
max_steps = 2
per_device_train_batch_size = 2
[lr_scheduler]
warmup_steps = 1
[precision]
skip_slow_linears = false
"#;

impl Run {
    /// Creates new inputs.
    pub fn new() -> Run {
        let run = Run { folder: tempfile::tempdir().unwrap() };
        let characters = (32..127u8).chain([b'\n']).map(|c| serde_json::to_string(&(c as char).to_string()).unwrap());
        let entries: Vec<String> = characters.enumerate().map(|(i, c)| format!("{c}:{}", i + 1)).collect();
        let tokenizer = format!(
            r#"{{"version":"1.0","added_tokens":[{{"id":0,"content":"<|endoftext|>","single_word":false,"lstrip":false,"rstrip":false,
               "normalized":false,"special":true}}],"model":{{"type":"BPE","vocab":{{"<|endoftext|>":0,{}}},"merges":[]}}}}"#,
            entries.join(",")
        );
        run.write("model/tokenizer.json", tokenizer.as_bytes());
        run.write("model/config.json", CONFIG.as_bytes());
        let text: String = (0..30).map(|i| format!("line {} of the text\n", i * i)).collect();
        run.write("text.txt", text.as_bytes());
        run.write("run.toml", RUN.as_bytes());
        run
    }

    /// Returns the path of a file or folder in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes a file in the folder.
    pub fn write(&self, name: &str, bytes: &[u8]) {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }

    /// Writes the word problems of `scripts/make-problems.sh` into the folder `problems`: prompts with answers, a model and its tokenizer.
    pub fn write_problems(&self) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/make-problems.sh");
        assert!(Command::new("sh").arg(script).arg(self.path("problems")).status().unwrap().success());
    }

    /// Replaces text in a file of the folder. The file must have this text.
    pub fn replace(&self, name: &str, from: &str, to: &str) {
        let text = std::fs::read_to_string(self.path(name)).unwrap();
        assert!(text.contains(from), "{name} has no {from}");
        self.write(name, text.replace(from, to).as_bytes());
    }

    /// Returns a command that runs the program in the folder with these arguments.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ottava"));
        command.args(args).current_dir(self.folder.path());
        // Tests of downloads set these to a server of their own.
        command.env("HF_HUB_OFFLINE", "1").env("HF_HOME", self.path("huggingface")).env_remove("HF_TOKEN");
        command
    }

    /// Runs the program in the folder.
    pub fn ottava(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// Waits until a running training has recorded `count` lines of metrics.
    pub fn wait_for_steps(&self, child: &mut Child, count: usize) {
        while std::fs::read_to_string(self.path("run/metrics.jsonl")).unwrap_or_default().lines().count() < count {
            assert!(child.try_wait().unwrap().is_none(), "the run goes on until it is told to stop");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    /// Runs the program, which must succeed, and returns its standard output.
    pub fn succeed(&self, args: &[&str]) -> String {
        let output = self.ottava(args);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args:?} failed: {error}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs the program, which must end with `code` and an error that includes all of `words`.
    pub fn fail(&self, args: &[&str], code: i32, words: &[&str]) {
        let output = self.ottava(args);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {error}");
        for word in words {
            assert!(error.contains(word), "{args:?}: no {word:?} in: {error}");
        }
        assert!(!error.contains("panicked"), "{error}");
    }

    /// Trains two steps, and returns the folder of the checkpoint.
    pub fn checkpoint(&self) -> PathBuf {
        let folder = Path::new("run/checkpoints/checkpoint-2");
        if !self.path("run").exists() {
            self.succeed(&["train", "run.toml"]);
        }
        folder.to_path_buf()
    }
}

/// Returns the step of each line of a `metrics.jsonl`.
pub fn steps(metrics: &Path) -> Vec<u64> {
    let text = std::fs::read_to_string(metrics).unwrap();
    text.lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["step"].as_u64().unwrap())
        .collect()
}

/// Returns the number of folders in a folder; 0 if it does not exist.
pub fn folders(path: &Path) -> usize {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    entries.filter(|entry| entry.path().is_dir()).count()
}

/// Parses the single JSON object that the program prints with `--json`.
pub fn json(text: &str) -> serde_json::Value {
    assert_eq!(text.trim_end().lines().count(), 1, "one object on standard output: {text}");
    serde_json::from_str(text).unwrap()
}
