//! Tests that starting, resuming and saving never lose or mix up the content of a run's folder.

use crate::setup::{Run, json, steps};
use std::process::Stdio;

/// Returns the arguments of `train` with these settings.
fn train<'a>(resume: &[&'a str], settings: &[&'a str]) -> Vec<&'a str> {
    let settings = settings.iter().flat_map(|setting| ["--set", setting]);
    ["train", "run.toml"].into_iter().chain(resume.iter().copied()).chain(settings).collect()
}

/// Returns the sorted names in `run/checkpoints`.
fn checkpoints(run: &Run) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(run.path("run/checkpoints"))
        .map(|entries| entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect())
        .unwrap_or_default();
    names.sort();
    names
}

fn metrics(run: &Run) -> Vec<u64> {
    steps(&run.path("run/metrics.jsonl"))
}

#[test]
fn resuming_an_older_checkpoint_leaves_the_newer_ones_behind_for_good() {
    let run = Run::new();
    let keep = ["max_steps=6", "save_steps=2", "save_total_limit=0"];
    run.succeed(&train(&[], &keep));
    assert_eq!(checkpoints(&run), ["checkpoint-2", "checkpoint-4", "checkpoint-6"]);
    let first = std::fs::read(run.path("run/metrics.jsonl")).unwrap();
    let older = ["--resume", "run/checkpoints/checkpoint-2"];
    // The run is killed before its first save. It still resumes from step 2, and not from the abandoned steps.
    let endless = train(&older, &["max_steps=100000", "save_total_limit=1"]);
    let mut child = run.command(&endless).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    run.wait_for_steps(&mut child, 12);
    child.kill().unwrap();
    child.wait().unwrap();
    let out = run.ottava(&train(&["--resume"], &["max_steps=3", "save_total_limit=1", "learning_rate=1e-3"]));
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    assert_eq!(metrics(&run), [0, 1, 2, 3]);
    assert_eq!(checkpoints(&run), ["abandoned-checkpoint-4", "abandoned-checkpoint-6", "checkpoint-3"]);
    // The abandoned checkpoint can be resumed with its own metrics.
    run.succeed(&train(&["--resume", "run/checkpoints/abandoned-checkpoint-6"], &["max_steps=6", "save_steps=2"]));
    assert_eq!(std::fs::read(run.path("run/metrics.jsonl")).unwrap(), first);
    run.succeed(&train(&["--resume"], &["max_steps=7", "save_total_limit=0"]));
    assert_eq!(metrics(&run), [0, 1, 2, 3, 4, 5, 6, 7]);
}

#[test]
fn the_folder_of_a_run_is_a_model_folder() {
    let run = Run::new();
    run.succeed(&train(&[], &["max_steps=2", "save_steps=1", "save_total_limit=1"]));
    let same = |name: &str, step: u64| {
        let inside = format!("run/checkpoints/checkpoint-{step}/{name}");
        assert_eq!(std::fs::read(run.path("run").join(name)).unwrap(), std::fs::read(run.path(&inside)).unwrap());
    };
    ["config.json", "model.safetensors", "tokenizer.json"].into_iter().for_each(|name| same(name, 2));
    assert!(!run.path("run/manifest.json").exists());
    run.succeed(&train(&["--resume"], &["max_steps=3", "save_total_limit=1"]));
    same("model.safetensors", 3);
    // Commands read the checkpoint with its manifest, and a second run starts from the folder of the first.
    let said = run.ottava(&["generate", "run", "--prompt", "line", "--max-new-tokens", "2", "--device", "cpu"]);
    assert!(String::from_utf8_lossy(&said.stderr).contains("checkpoint-3"), "{said:?}");
    run.succeed(&train(&[], &["max_steps=1", "model.path=run", "init=pretrained", "output_dir=second"]));
}

#[test]
fn a_checkpoint_of_the_model_alone_is_small_and_cannot_be_resumed() {
    let run = Run::new();
    let only = ["max_steps=2", "save_steps=1", "save_total_limit=0", "save_only_model=true"];
    run.succeed(&train(&[], &only));
    assert_eq!(checkpoints(&run), ["checkpoint-1", "checkpoint-2"]);
    let states = |step: u64| run.path(&format!("run/checkpoints/checkpoint-{step}/training/optimizer.safetensors"));
    assert!(!states(1).exists() && !states(2).exists());
    run.fail(&train(&["--resume"], &["max_steps=3"]), 7, &["holds the model alone", "init=pretrained"]);
    run.succeed(&["generate", "run", "--prompt", "line", "--max-new-tokens", "2", "--device", "cpu"]);
    run.succeed(&train(
        &[],
        &["max_steps=1", "model.path=run/checkpoints/checkpoint-2", "init=pretrained", "output_dir=second"],
    ));
    // After a signal, the run resumes as if its checkpoints held all.
    std::fs::remove_dir_all(run.path("run")).unwrap();
    let mut child = run.command(&train(&[], &["max_steps=100000", "save_only_model=true"])).spawn().unwrap();
    run.wait_for_steps(&mut child, 5);
    crate::ranks::signal("-TERM", child.id());
    assert_eq!(child.wait().unwrap().code(), Some(75));
    let step = metrics(&run).last().unwrap() + 1;
    run.succeed(&train(&["--resume"], &[&format!("max_steps={step}"), "save_only_model=true"]));
    assert!(!states(step).exists(), "the end of the run");
    let refused = ["save_only_model=true", "alarms.loss_spike=rollback", "output_dir=other"];
    run.fail(&train(&[], &refused), 1, &["`checkpoint.save_only_model`", "rollback"]);
}

#[test]
fn long_steps_are_saved_by_time() {
    let run = Run::new();
    let saved = |settings: &[&str]| {
        run.succeed(&train(&[], &[&["max_steps=3", "save_total_limit=0"], settings].concat()));
        let names = checkpoints(&run);
        std::fs::remove_dir_all(run.path("run")).unwrap();
        names
    };
    // Each step takes longer than 6 microseconds.
    assert_eq!(saved(&["save_minutes=1e-7"]), ["checkpoint-1", "checkpoint-2", "checkpoint-3"]);
    assert_eq!(saved(&["save_minutes=0"]), ["checkpoint-3"]);
    assert_eq!(saved(&["save_minutes=1e-7", "save_steps=end"]), ["checkpoint-3"]);
    run.fail(&train(&[], &["save_minutes=-1"]), 1, &["`checkpoint.save_minutes` is -1; it is a number from 0 up"]);
}

#[test]
fn a_changed_model_configuration_is_not_resumed() {
    let run = Run::new();
    run.checkpoint();
    let more = train(&["--resume"], &["max_steps=3"]);
    for (from, to, word) in [
        ("\"rms_norm_eps\": 1e-5", "\"rms_norm_eps\": 1e-6", "`rms_norm_eps` was 0.00001 and is 1e-6 now. Put"),
        ("1e-5}", "1e-5, \"rope_theta\": 500000.0}", "`rope_theta` was 10000.0 and is 500000.0 now"),
        (
            "1e-5}",
            "1e-5, \"rope_scaling\": {\"type\": \"linear\", \"factor\": 2.0}}",
            "`rope_scaling` was not set and is {\"type\":\"linear\",\"factor\":2.0} now",
        ),
        ("\"num_key_value_heads\": 1", "\"num_key_value_heads\": 2", "`num_key_value_heads` was 1 and is 2 now. Put"),
        ("1e-5}", "1e-5, \"tie_word_embeddings\": true}", "is true now"),
    ] {
        run.replace("model/config.json", from, to);
        run.fail(&more, 1, &["config.json of `model.path` has changed", word]);
        run.replace("model/config.json", to, from);
    }
    assert_eq!(checkpoints(&run), ["checkpoint-2"]);
    // The same content at another path counts as the same model.
    std::fs::rename(run.path("model"), run.path("moved")).unwrap();
    run.succeed(&train(&["--resume"], &["max_steps=3", "model.path=moved"]));
    run.succeed(&train(&["--resume"], &["max_steps=4", "model.path=run/checkpoints/checkpoint-3"]));
}

#[test]
fn a_run_killed_in_its_first_save_starts_again() {
    let run = Run::new();
    run.write("run/checkpoints/.tmp-checkpoint-1/model.safetensors", b"half");
    run.write("run/metrics.jsonl", b"{\"step\":0,\"eval_loss\":4.6}\n{\"step\":1,\"loss\":4.5}\n{\"st");
    run.fail(&train(&["--resume"], &[]), 7, &["no complete checkpoint", "without --resume"]);
    run.succeed(&train(&[], &[]));
    assert_eq!(checkpoints(&run), ["checkpoint-2"]);
    assert_eq!(metrics(&run), [0, 1, 2], "each step once");
    let before = std::fs::read_to_string(run.path("run/abandoned-metrics.jsonl")).unwrap();
    assert!(before.contains("4.5"), "what was measured before is kept: {before}");
}

#[test]
fn a_run_leaves_nothing_of_killed_ones_and_follows_no_link() {
    let run = Run::new();
    run.succeed(&train(&[], &[]));
    run.write("run/checkpoints/.trash-checkpoint-1/model.safetensors", b"half");
    run.write("run/checkpoints/.tmp-checkpoint-3/model.safetensors", b"half");
    // A run with no steps left also removes them.
    run.succeed(&train(&["--resume"], &[]));
    assert_eq!(checkpoints(&run), ["checkpoint-2"]);
    std::fs::create_dir(run.path("other")).unwrap();
    std::fs::rename(run.path("run/checkpoints"), run.path("elsewhere")).unwrap();
    std::os::unix::fs::symlink(run.path("elsewhere"), run.path("run/checkpoints")).unwrap();
    run.fail(&train(&["--resume"], &["max_steps=3"]), 1, &["run/checkpoints: this is a link", "set `output_dir` to"]);
}

#[test]
fn metrics_are_whole_wherever_a_checkpoint_was_moved_to() {
    let run = Run::new();
    run.succeed(&train(&[], &["max_steps=4", "save_steps=2"]));
    std::fs::rename(run.path("run/checkpoints"), run.path("elsewhere")).unwrap();
    std::fs::remove_file(run.path("run/metrics.jsonl")).unwrap();
    run.succeed(&train(&["--resume", "elsewhere/checkpoint-2"], &["max_steps=3"]));
    assert_eq!(metrics(&run), [0, 1, 2, 3]);
    // Checkpoints of different runs are not mixed.
    run.fail(&train(&["--resume", "elsewhere/checkpoint-4"], &["max_steps=5"]), 1, &["already holds a run"]);
}

#[test]
fn the_cast_log_is_whole_wherever_a_checkpoint_was_moved_to() {
    let run = Run::new();
    let casts = ["recipe=fp8-delayed", "cast_statistics_steps=1"];
    run.succeed(&train(&[], &casts));
    let log = || std::fs::read_to_string(run.path("run/casts.jsonl")).unwrap();
    let two = log();
    let read = |folder: &str| steps(&run.path(folder).join("casts.jsonl"));
    // In another folder, the log begins with the lines of the checkpoint, even if the run adds no lines.
    let resume = ["--resume", "run/checkpoints/checkpoint-2"];
    let silent = ["recipe=fp8-delayed", "cast_statistics_steps=0"];
    run.succeed(&train(&resume, &[&casts[..], &["output_dir=moved", "max_steps=3"]].concat()));
    assert_eq!(read("moved"), [1, 2, 3]);
    run.succeed(&train(&resume, &[&silent[..], &["output_dir=silent", "max_steps=3"]].concat()));
    assert_eq!(read("silent"), [1, 2]);
    let resume = ["--resume", "silent/checkpoints/checkpoint-3"];
    run.succeed(&train(&resume, &[&casts[..], &["output_dir=again", "max_steps=4"]].concat()));
    assert_eq!(read("again"), [1, 2, 4]);
    // Lines that do not belong to the resumed checkpoint are set aside.
    run.write("run/casts.jsonl", two.replace("\"since\":0", "\"since\":7").as_bytes());
    run.succeed(&train(&["--resume"], &[&casts[..], &["max_steps=3"]].concat()));
    assert!(log().starts_with(&two), "{}", log());
    assert_eq!((read("run"), run.path("run/abandoned-casts.jsonl").is_file()), (vec![1, 2, 3], true));
}

#[test]
fn stray_names_are_not_taken_for_checkpoints() {
    let run = Run::new();
    run.write("run/checkpoints/checkpoint-7", b"a file");
    run.write("run/checkpoints/.trash-checkpoint-3", b"a file");
    run.write("run/checkpoints/.tmp-checkpoint-x", b"a file");
    run.write("run/checkpoints/checkpoint-2", b"a file of a name that will be needed");
    run.succeed(&train(&[], &["max_steps=3", "save_steps=1", "save_total_limit=1"]));
    assert_eq!(checkpoints(&run), ["abandoned-checkpoint-2", "checkpoint-3", "checkpoint-7"]);
}

#[test]
fn a_result_that_is_not_finite_is_an_error_and_no_checkpoint() {
    let run = Run::new();
    // No step follows the last update, so only the check before saving can find the infinite values.
    let last = ["learning_rate=1e38", "lr_scheduler.type=constant", "warmup_steps=0", "max_steps=1"];
    run.fail(&train(&[], &last), 4, &["not finite"]);
    run.fail(&train(&[], &[&last[..], &["val_set_size=0"]].concat()), 4, &["not finite"]);
    assert_eq!(checkpoints(&run), [""; 0]);
    let run = Run::new();
    let model = run.checkpoint();
    let weights = model.join("model.safetensors");
    let mut bytes = std::fs::read(run.path(weights.to_str().unwrap())).unwrap();
    let end = bytes.len();
    bytes[end - 200..].fill(0xff);
    run.write(weights.to_str().unwrap(), &bytes);
    std::fs::remove_file(run.path(model.join("manifest.json").to_str().unwrap())).unwrap();
    let model = model.to_str().unwrap();
    run.fail(
        &["eval", model, "--data", "text.txt", "--max-length", "8", "--device", "cpu"],
        4,
        &["loss of the text is NaN"],
    );
    let generate = ["generate", model, "--prompt", "a", "--device", "cpu", "--temperature"];
    for temperature in ["0", "1"] {
        run.fail(&[&generate[..], &[temperature]].concat(), 4, &["not finite"]);
    }
}

/// Starts an endless run, and waits for its first steps.
fn started(run: &Run) -> std::process::Child {
    let endless = train(&[], &["max_steps=100000"]);
    let mut child = run.command(&endless).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    run.wait_for_steps(&mut child, 3);
    child
}

fn terminate(child: &std::process::Child) {
    let kill = std::process::Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
}

#[test]
fn a_run_whose_folder_was_moved_does_not_write_into_the_next_one() {
    let run = Run::new();
    let child = started(&run);
    std::fs::rename(run.path("run"), run.path("moved")).unwrap();
    std::fs::create_dir(run.path("run")).unwrap();
    terminate(&child);
    let output = child.wait_with_output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{error}");
    assert!(error.contains("run was moved or removed"), "{error}");
    assert_eq!(std::fs::read_dir(run.path("run")).unwrap().count(), 0);
}

#[test]
fn a_checkpoint_is_whole_when_the_model_folder_is_gone() {
    let run = Run::new();
    let mut child = started(&run);
    std::fs::rename(run.path("model"), run.path("moved")).unwrap();
    terminate(&child);
    assert_eq!(child.wait().unwrap().code(), Some(75));
    let folder = run.path("run/checkpoints").join(&checkpoints(&run)[0]);
    let saved = std::fs::read(folder.join("tokenizer.json")).unwrap();
    assert_eq!(saved, std::fs::read(run.path("moved/tokenizer.json")).unwrap());
}

#[test]
fn a_run_does_not_write_through_links() {
    for name in ["metrics.jsonl", "casts.jsonl", ".lock"] {
        let run = Run::new();
        run.write("precious", b"{\"step\":0}\n");
        run.write("run/x", b"");
        std::os::unix::fs::symlink("../precious", run.path("run").join(name)).unwrap();
        run.fail(&train(&[], &["recipe=fp8-delayed"]), 1, &[name, "this is a link"]);
        assert_eq!(std::fs::read(run.path("precious")).unwrap(), b"{\"step\":0}\n", "{name}");
    }
    let run = Run::new();
    run.write("precious", b"precious");
    run.write("run/x", b"");
    std::os::unix::fs::symlink("../precious", run.path("run/rank-1.log")).unwrap();
    run.fail(&train(&["--ranks", "2"], &[]), 1, &["rank-1.log", "this is a link"]);
    assert_eq!(std::fs::read(run.path("precious")).unwrap(), b"precious");
    let run = Run::new();
    for name in ["config.toml", "loss.svg"] {
        run.write("precious", b"precious");
        run.write("run/x", b"");
        std::os::unix::fs::symlink("../precious", run.path("run").join(name)).unwrap();
    }
    run.succeed(&train(&[], &[]));
    assert_eq!(std::fs::read(run.path("precious")).unwrap(), b"precious");
}

#[test]
fn validation_documents_come_from_files_of_their_own() {
    let run = Run::new();
    run.write("held/validation.jsonl", b"{\"text\": \"line 1 of the text\"}\n{\"text\": \"other words\"}\n");
    let train = |set: &[&str]| {
        let args: Vec<&str> =
            ["train", "run.toml", "--json"].into_iter().chain(set.iter().flat_map(|set| ["--set", set])).collect();
        json(&run.succeed(&args))["initial_eval_loss"].as_f64().unwrap()
    };
    let own = train(&["val_files=[\"held\"]", "output_dir=a"]);
    assert_eq!(own, train(&["val_files=[\"held/*.jsonl\"]", "output_dir=b", "seed=42"]), "a folder and a pattern");
    assert_ne!(own, train(&["output_dir=c"]));
    run.fail(&["train", "run.toml", "--set", "val_files=[\"absent.jsonl\"]"], 2, &["absent.jsonl"]);
    let said = run.ottava(&["plan", "run.toml", "--set", "val_files=[\"held\"]", "--set", "val_set_size=3"]);
    assert!(
        String::from_utf8_lossy(&said.stderr)
            .contains("`data.val_set_size = 3.0` has no effect where `val_files` are set")
    );
}
