//! Tests damaged, endless and absurd input: the program must return an error in time, and never panic or hang.

use crate::setup::{Run, json};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The maximum time for refusing bad input.
const SOON: Duration = Duration::from_secs(5);

fn mkfifo(path: &std::path::Path) {
    let _ = std::fs::remove_file(path);
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// Runs the program, which must end within [`SOON`].
fn end_soon(run: &Run, args: &[&str]) -> Output {
    let begin = Instant::now();
    let mut child = run.command(args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    while child.try_wait().unwrap().is_none() {
        if begin.elapsed() > SOON {
            child.kill().unwrap();
            panic!("{args:?} takes longer than {SOON:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

/// Runs the program, which must end within [`SOON`] with `code` and an error that includes all of `words`.
fn fail_soon(run: &Run, args: &[&str], code: i32, words: &[&str]) {
    let output = end_soon(run, args);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {error}");
    assert!(
        words.iter().all(|word| error.contains(word)) && !error.contains("panicked"),
        "{args:?} {words:?}: {error}"
    );
}

#[test]
fn changed_weights_are_not_used() {
    let run = Run::new();
    let model = run.checkpoint();
    let model = model.to_str().unwrap();
    let weights = format!("{model}/model.safetensors");
    let mut bytes = std::fs::read(run.path(&weights)).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    run.write(&weights, &bytes);
    let words = ["model.safetensors", "SHA-256"];
    run.fail(&["eval", model, "--data", "text.txt", "--max-length", "8", "--device", "cpu"], 7, &words);
    run.fail(&["generate", model, "--prompt", "a", "--device", "cpu"], 7, &words);
    let path = format!("model.path={model}");
    let train = ["train", "run.toml", "--set", "output_dir=b", "--set", &path, "--set", "init=pretrained"];
    run.fail(&train, 7, &words);
    // These commands do not read optimizer states, which may be missing.
    *bytes.last_mut().unwrap() ^= 1;
    run.write(&weights, &bytes);
    std::fs::remove_dir_all(run.path(model).join("training")).unwrap();
    run.succeed(&["eval", model, "--data", "text.txt", "--max-length", "8", "--device", "cpu"]);
}

#[test]
fn sampling_settings_that_mean_nothing_are_refused() {
    let run = Run::new();
    let model = run.checkpoint();
    let generate = ["generate", model.to_str().unwrap(), "--prompt", "a", "--device", "cpu"];
    for (more, word) in [
        (["--temperature=1", "--top-p=0"], "`top_p` is 0"),
        (["--temperature=1", "--top-p=-1"], "`top_p` is -1"),
        (["--temperature=1", "--top-p=nan"], "`top_p` is NaN"),
        (["--temperature=nan", "--top-p=1"], "`temperature` is NaN"),
        (["--temperature=inf", "--top-p=1"], "`temperature` is inf"),
    ] {
        fail_soon(&run, &[&generate[..], &more].concat(), 1, &[word]);
    }
    run.succeed(&[&generate[..], &["--max-new-tokens", "18446744073709551615"]].concat());
}

#[test]
fn numbers_near_the_limits_of_integers_are_refused() {
    let run = Run::new();
    let model = run.checkpoint();
    let huge = ["9223372036854775807", "18446744073709551615", "4611686018427387904"];
    for number in huge {
        for option in ["--max-length", "--batch-size"] {
            let eval = ["eval", model.to_str().unwrap(), "--data", "text.txt", "--device", "cpu", option, number];
            fail_soon(&run, &eval, 1, &[option, "at most"]);
        }
        fail_soon(&run, &["bench", "gemm", "--device", "cpu", "--tokens", number], 1, &["--tokens", "at most"]);
    }
    for key in [
        "max_length",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "global_batch_size",
        "amax_history_len",
        "max_new_tokens",
        "warmup_steps",
        "max_steps",
        "first_layers_bf16",
    ] {
        for number in ["9223372036854775807", "4611686018427387904"] {
            fail_soon(&run, &["plan", "run.toml", "--set", &format!("{key}={number}")], 1, &[key, "is", number]);
        }
    }
    let many = ["plan", "run.toml", "--set", "per_device_train_batch_size=262144", "--set", "max_length=16777216"];
    fail_soon(&run, &many, 1, &["a batch has at most"]);
    for (rows, passes) in [("262144", "2"), ("1", "16777216"), ("16777216", "1")] {
        let (rows, passes) =
            (format!("per_device_train_batch_size={rows}"), format!("gradient_accumulation_steps={passes}"));
        fail_soon(&run, &["plan", "run.toml", "--set", &rows, "--set", &passes], 1, &["a step has at most 262144"]);
    }
    let long = ["max_length=65", "max_length=16777216"];
    for setting in long {
        fail_soon(&run, &["plan", "run.toml", "--set", setting], 1, &["the model 64 positions"]);
        fail_soon(
            &run,
            &["train", "run.toml", "--set", "output_dir=b", "--set", setting],
            1,
            &["the model 64 positions"],
        );
    }
    let eval = ["eval", model.to_str().unwrap(), "--data", "text.txt", "--device", "cpu", "--max-length", "65"];
    fail_soon(&run, &eval, 1, &["the model 64 positions"]);
}

#[test]
fn constants_of_a_model_that_cannot_be_are_refused() {
    for (from, to, word) in [
        ("\"num_hidden_layers\": 1", "\"num_hidden_layers\": 1000000", "`num_hidden_layers` is 1000000"),
        ("1e-5}", "-1e-5}", "`rms_norm_eps` is -0.00001"),
        ("1e-5}", "0}", "`rms_norm_eps` is 0"),
        ("1e-5}", "1e-5, \"rope_theta\": -1.0}", "`rope_theta` is -1"),
        ("1e-5}", "1e-5, \"rope_scaling\": {\"type\": \"linear\", \"factor\": 0.0}}", "`factor` is 0"),
        ("1e-5}", "1e-5, \"initializer_range\": -0.1}", "`initializer_range` is -0.1"),
    ] {
        let run = Run::new();
        run.replace("model/config.json", from, to);
        fail_soon(&run, &["plan", "run.toml"], 1, &["config.json", word]);
    }
    let run = Run::new();
    for setting in [
        "eps=inf",
        "eps=-1e-8",
        "weight_decay=inf",
        "weight_decay=-0.1",
        "max_grad_norm=inf",
        "num_train_epochs=nan",
        "learning_rate=inf",
        "output_dir=",
    ] {
        let key = setting.split('=').next().unwrap();
        let settings = ["plan", "run.toml", "--set", "max_steps=0", "--set", setting];
        fail_soon(&run, &settings, 1, &[key]);
    }
}

/// Tests sizes for which no machine has enough memory, and sizes that other weights would fit.
#[test]
fn sizes_of_a_model_are_checked_before_anything_is_allocated() {
    let run = Run::new();
    let checkpoint = run.checkpoint();
    let model = checkpoint.to_str().unwrap();
    // Without its manifest, a folder is checked while it is read.
    std::fs::remove_file(run.path(&format!("{model}/manifest.json"))).unwrap();
    let name = format!("{model}/config.json");
    let good = std::fs::read_to_string(run.path(&name)).unwrap();
    let set = |key: &str, value: usize| {
        let mut config: serde_json::Value = serde_json::from_str(&good).unwrap();
        config[key] = value.into();
        run.write(&name, config.to_string().as_bytes());
    };
    let data = ["--data", "text.txt", "--max-length", "16", "--device", "cpu"];
    let eval = [&["eval", model][..], &data].concat();
    let compare = [&["eval", model, "--compare"][..], &data].concat();
    let calibrate = [&["calibrate", model, "scales.json"][..], &data].concat();
    let generate = ["generate", model, "--prompt", "a", "--device", "cpu"];
    let serve = ["serve", model, "--port", "0", "--device", "cpu"];
    let many = [("hidden_size", 1 << 21), ("intermediate_size", 1 << 21), ("head_dim", 1 << 21)];
    for (key, value) in many.into_iter().chain([("num_attention_heads", 1 << 20)]) {
        set(key, value);
        for args in [&eval[..], &compare, &calibrate, &generate, &serve] {
            let output = end_soon(&run, args);
            let error = String::from_utf8_lossy(&output.stderr);
            let refused = match output.status.code() {
                Some(3) => error.contains("the model does not fit: by its config.json it takes"),
                Some(1) => error.contains("has shape") || error.contains("config.json"),
                _ => false,
            };
            assert!(refused && !error.contains("panicked"), "{key} {args:?}: {:?} {error}", output.status);
            assert!(key != "hidden_size" || output.status.code() == Some(3), "{args:?}: {error}");
        }
        fail_soon(&run, &["export", model, "exported", "--format", "bf16"], 1, &[]);
    }
}

#[test]
fn pipes_and_devices_are_refused_as_any_input() {
    let run = Run::new();
    let model = run.checkpoint();
    let checkpoint = model.to_str().unwrap();
    let train = ["train", "run.toml", "--set", "output_dir=b"];
    let eval = ["eval", checkpoint, "--data", "text.txt", "--max-length", "8", "--device", "cpu"];
    let path = |name: &str| run.path(name);
    for (name, args) in [
        ("text.txt", &train[..]),
        ("model/tokenizer.json", &train),
        ("model/config.json", &train),
        ("run.toml", &train),
        (&format!("{checkpoint}/model.safetensors"), &eval),
        (&format!("{checkpoint}/config.json"), &eval),
        (&format!("{checkpoint}/manifest.json"), &eval),
    ] {
        let good = std::fs::read(path(name)).unwrap();
        let last = name.rsplit('/').next().unwrap();
        let code = |args: &[&str]| match (last, args[0]) {
            ("text.txt", _) => 2,
            ("model.safetensors" | "manifest.json" | "config.json", "eval") => 7,
            _ => 1,
        };
        // Without its manifest, a folder is checked while it is read.
        let code = if name == format!("{checkpoint}/config.json") { 1 } else { code(args) };
        mkfifo(&path(name));
        fail_soon(&run, args, code, &[last]);
        std::fs::remove_file(path(name)).unwrap();
        std::os::unix::fs::symlink("/dev/zero", path(name)).unwrap();
        fail_soon(&run, args, code, &[last]);
        std::fs::remove_file(path(name)).unwrap();
        std::fs::write(path(name), good).unwrap();
    }
}

#[test]
fn pipes_among_the_files_of_a_run_are_refused_by_name() {
    for name in [".lock", "metrics.jsonl", "casts.jsonl"] {
        let run = Run::new();
        std::fs::create_dir(run.path("b")).unwrap();
        mkfifo(&run.path("b").join(name));
        let train = ["train", "run.toml", "--set", "output_dir=b", "--set", "recipe=fp8-current"];
        fail_soon(&run, &train, 1, &[name, "this is a pipe or a device"]);
    }
    let run = Run::new();
    run.checkpoint();
    mkfifo(&run.path("run/metrics.jsonl"));
    let words = ["metrics.jsonl", "this is a pipe or a device"];
    fail_soon(&run, &["train", "run.toml", "--resume", "--set", "max_steps=3"], 1, &words);
    fail_soon(&run, &["inspect", "run"], 1, &["this is not the folder of a run", "metrics.jsonl"]);
}

#[test]
fn a_megabyte_of_unknown_keys_is_refused_soon() {
    let run = Run::new();
    let keys: String = (0..60_000).map(|i| format!("max_step_{i} = 1\n")).collect();
    run.write("many.toml", keys.as_bytes());
    fail_soon(&run, &["plan", "many.toml"], 1, &["`max_step_0` is not a setting", "more problems"]);
    run.write("long.toml", format!("{} = 1\n", "k".repeat(1_000_000)).as_bytes());
    fail_soon(&run, &["plan", "long.toml"], 1, &["1000000 bytes long, is not a setting"]);
}

#[test]
fn settings_without_effect_are_told() {
    let run = Run::new();
    let told = |args: &[&str]| String::from_utf8(run.ottava(args).stderr).unwrap();
    let plan = told(&["plan", "run.toml", "--set", "top_p=0.5", "--set", "margin=2"]);
    assert!(plan.contains("`generation.top_p = 0.5` has no effect without `generation.prompts`"), "{plan}");
    assert!(
        plan.contains("`precision.delayed.margin = 2` has no effect unless a linear has recipe fp8-delayed"),
        "{plan}"
    );
    let old = told(&["plan", "run.toml", "--set", "training.adam_beta2=0.9", "--set", "training.lion_beta1=0.5"]);
    let words =
        ["`training.adam_beta2` is `optimizer.beta2`", "`training.lion_beta1 = 0.5` has no effect", "config migrate"];
    assert!(words.iter().all(|words| old.contains(words)), "{old}");
    let train = told(&["train", "run.toml", "--set", "first_layers_bf16=1"]);
    assert!(
        train.contains("`precision.exceptions.first_layers_bf16 = 1` has no effect unless a linear has an FP8 recipe"),
        "{train}"
    );
}

#[test]
fn a_plan_looks_for_the_data() {
    let run = Run::new();
    for (files, word) in [("absent.txt", "absent.txt: No such file"), ("run.toml", "unknown kind of data")] {
        fail_soon(&run, &["plan", "run.toml", "--set", &format!("train_files=[\"{files}\"]")], 2, &[word]);
    }
}

#[test]
fn a_panic_of_the_tokenizer_is_one_line() {
    // The tokenizers crate reads tables of normalizers without checks, and panics when it loads or uses these tables. The second table is a trie
    // whose only unit points beyond its end.
    for (table, code, words) in [
        ("AA==", 1, ["`normalizer`: `precompiled_charsmap` of a `Precompiled`: ", "no four bytes"]),
        ("BAAAAAD8//8=", 2, ["cannot encode a text", "the parser gave up"]),
        ("/////w==", 1, ["`normalizer`: `precompiled_charsmap` of a `Precompiled`: ", "trie has 4294967295 bytes"]),
    ] {
        let run = Run::new();
        let normalizer = format!(
            "\"version\":\"1.0\",\"normalizer\":{{\"type\":\"Precompiled\",\"precompiled_charsmap\":\"{table}\"}}"
        );
        run.replace("model/tokenizer.json", "\"version\":\"1.0\"", &normalizer);
        fail_soon(&run, &["prepare", "run.toml"], code, &["model/tokenizer.json: ", words[0], words[1]]);
    }
    let run = Run::new();
    let normalizer = r#""version":"1.0","normalizer":{"type":"Replace","pattern":{"String":""},"content":"x"}"#;
    run.replace("model/tokenizer.json", "\"version\":\"1.0\"", normalizer);
    let words = ["model/tokenizer.json: ", "`normalizer`: the pattern of a `Replace` is empty"];
    fail_soon(&run, &["prepare", "run.toml"], 1, &words);
}

#[test]
fn a_document_too_large_for_the_memory_is_refused() {
    let run = Run::new();
    run.write("text.txt", "some words of text, ".repeat(1_500_000).as_bytes());
    let program = env!("CARGO_BIN_EXE_ottava");
    let script = format!("ulimit -v 3000000; exec {program} prepare run.toml --set text_documents=file");
    let output = Command::new("sh").args(["-c", &script]).current_dir(run.path(".")).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("text.txt:1: tokenizing this document of 28.6 MiB takes about"), "{error}");
}

#[test]
fn a_model_is_evaluated_beside_the_run_that_trains_it() {
    let run = Run::new();
    run.checkpoint();
    let train = ["train", "run.toml", "--resume", "--set", "max_steps=100000", "--set", "save_steps=1"];
    let train = [&train[..], &["--set", "save_total_limit=1"]].concat();
    let mut child = run.command(&train).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(2) {
        json(&run.succeed(&["generate", "run", "--prompt", "a", "--max-new-tokens", "1", "--device", "cpu", "--json"]));
    }
    child.kill().unwrap();
    child.wait().unwrap();
}
