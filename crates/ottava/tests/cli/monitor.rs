//! Tests `ottava monitor` and `train --monitor`: their answers while runs train and afterwards, and the page in a browser.

use crate::ranks::{children, signal, spawn, train};
use crate::serve::Server;
use crate::setup::{Run, json};
use serde_json::Value;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// The settings of a run whose page shows everything: an FP8 recipe, statistics of casts, comparisons and evaluations.
const WATCHED: [&str; 14] = [
    "--set",
    "recipe=fp8-delayed",
    "--set",
    "cast_statistics_steps=5",
    "--set",
    "sentinel_steps=20",
    "--set",
    "eval_steps=20",
    "--set",
    "optimizer.learning_rate=0.004",
    "--set",
    "skip_slow_linears=false",
    "--set",
    "training.per_device_train_batch_size=8",
];

/// Returns the arguments of a run with the setting `steps`.
fn watched<'a>(steps: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["train", "run.toml", "--set", steps], &WATCHED[..], more].concat()
}

/// Starts a monitor of folders in the folder of `run`.
fn monitor(run: &Run, folders: &[&str]) -> Server {
    Server::spawn(run.command(&[&["monitor", "--port", "0"], folders].concat()))
}

/// Returns the answer for a path.
fn get(server: &Server, path: &str) -> String {
    let (mut client, mut text) = (server.connect(), String::new());
    let request = format!("GET {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", server.address);
    client.write_all(request.as_bytes()).unwrap();
    client.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{text}");
    body.to_string()
}

fn answer(server: &Server) -> Value {
    json(&get(server, "/api/runs?since=0:0"))
}

/// Waits until the first run is in `state`.
fn wait_for(server: &Server, state: &str) -> Value {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let answer = answer(server);
        if answer["runs"][0]["state"] == state {
            return answer;
        }
        assert!(Instant::now() < end, "not {state}: {}", answer["runs"][0]);
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn wait(mut child: Child) -> Option<i32> {
    child.wait().unwrap().code()
}

#[test]
fn a_run_is_shown_from_its_start_to_each_of_its_ends() {
    let run = Run::new();
    let server = monitor(&run, &["run"]);
    assert_eq!(answer(&server)["runs"][0]["state"], "missing");
    let mut child = spawn(&run, &watched("max_steps=100000", &[]));
    let begun = wait_for(&server, "running");
    let record = &begun["runs"][0]["record"];
    assert_eq!(
        (&record["max_steps"], &record["device"], &record["ranks"]),
        (&100_000.into(), &"CPU".into(), &1.into())
    );
    assert!(record["flops_per_token"].as_f64() > Some(0.0), "{record}");
    run.wait_for_steps(&mut child, 25);
    signal("-KILL", child.id());
    wait(child);
    let killed = wait_for(&server, "killed");
    assert!(killed["changes"]["0"]["casts"]["steps"][0] == 5, "{killed}");
    // The run stops after a signal, with a checkpoint.
    std::fs::remove_dir_all(run.path("run")).unwrap();
    wait_for(&server, "missing");
    let mut child = spawn(&run, &watched("max_steps=100000", &[]));
    run.wait_for_steps(&mut child, 5);
    signal("-TERM", child.id());
    assert_eq!(wait(child), Some(75));
    let stopped = wait_for(&server, "stopped");
    assert!(stopped["runs"][0]["detail"].as_str().unwrap().contains("stopped by a signal"), "{}", stopped["runs"][0]);
    let step = stopped["runs"][0]["step"].as_u64().unwrap() + 2;
    run.succeed(&watched(&format!("max_steps={step}"), &["--resume"]));
    assert_eq!(wait_for(&server, "finished")["runs"][0]["step"], step);
    server.signal();
    let (code, said) = server.wait();
    assert!(code == Some(0) && said.contains("ssh -N -L "), "{said}");
}

#[test]
fn a_training_shows_itself_and_its_ranks() {
    let run = Run::new();
    let args = train(&["--ranks", "2", "--set", "max_steps=100000", "--monitor=0"]);
    let server = Server::spawn(run.command(&args));
    let shown = wait_for(&server, "running");
    assert_eq!(shown["runs"][0]["record"]["ranks"], 2);
    assert!(shown["runs"][0]["record"]["mesh"].as_str().unwrap().starts_with("data 2"), "{shown}");
    let logs: Value = serde_json::from_str(&get(&server, "/api/logs?run=0")).unwrap();
    assert_eq!(logs[0]["rank"], 1, "{logs}");
    server.signal();
    assert_eq!(server.wait().0, Some(75), "the page does not keep the training from its end");
    // A port that is in use is an error before training begins.
    let other = Run::new();
    let server = monitor(&other, &["."]);
    let port = format!("--monitor={}", server.address.rsplit_once(':').unwrap().1);
    other.fail(&["train", "run.toml", &port], 1, &["--monitor", "in use", "name another port"]);
    other.fail(&["monitor", "run.toml"], 1, &["run.toml", "this is a file"]);
    other.fail(&["monitor"], 1, &["required"]);
    let port = server.address.rsplit_once(':').unwrap().1;
    other.fail(&["monitor", "nosuch", "--port", port], 1, &["nosuch: there is no such folder yet"]);
}

/// Returns the path of a browser, if one is installed.
fn browser() -> Option<PathBuf> {
    let folders = std::env::var_os("PATH")?;
    let names = ["chromium", "chromium-browser", "google-chrome"];
    std::env::split_paths(&folders).flat_map(|folder| names.map(|name| folder.join(name))).find(|path| path.is_file())
}

/// Returns the elements of a page after its first paint. If `OTTAVA_IMAGES` is set to a folder, also saves an image as `name` in it. An image called
/// `many` has all runs.
fn paint(browser: &Path, server: &Server, name: &str, height: u32, more: &[&str]) -> String {
    let profile = tempfile::tempdir().unwrap();
    let page = |what: &str| {
        let mut command = Command::new(browser);
        command.args([
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--virtual-time-budget=4000",
        ]);
        command
            .arg(format!("--window-size=1200,{height}"))
            .arg(format!("--user-data-dir={}", profile.path().display()));
        let fragment = if name == "many" { "#all" } else { "" };
        let url = format!("http://{}/{fragment}", server.address);
        let output = command.args(more).arg(what).arg(url).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    if let Some(folder) = std::env::var_os("OTTAVA_IMAGES") {
        let path = Path::new(&folder).join(format!("monitor-{name}.png"));
        page(&format!("--screenshot={}", path.display()));
    }
    page("--dump-dom")
}

/// Returns the `metrics.jsonl` of a run of 100,000 steps with a spike of one step.
fn hundred_thousand_steps() -> String {
    let line = |step: u64| {
        let noise = ((step * 2_654_435_761) % 1000) as f64 / 1000.0 - 0.5;
        let spike = if step == 70_001 { 4.0 } else { 0.0 };
        let loss = 2.0 + 2.5 * (-(step as f64) / 9000.0).exp() + 0.2 * noise + spike;
        format!(
            "{{\"step\":{step},\"loss\":{loss},\"grad_norm\":{},\"learning_rate\":{},\"tokens\":{},\"tokens_per_second\":{},\
             \"peak_memory_bytes\":64424509440,\"mfu\":{},\"fp8_saturated\":{},\"fp8_underflowed\":{}}}\n",
            1.0 + noise,
            3e-4 * (1.0 - step as f64 / 1e5),
            step * 4096,
            1e5 + 1e3 * noise,
            0.42 + 0.01 * noise,
            1e-5 * (1.0 + noise),
            1e-4 * (1.0 + noise)
        )
    };
    (1..=100_000).map(line).collect()
}

/// Returns the words of a painted page, without markup.
fn words(page: &str) -> String {
    page.split('<').filter_map(|part| part.split_once('>')).map(|(_, text)| text).collect::<Vec<_>>().join(" ")
}

#[test]
fn browsers_paint_growing_killed_finished_divided_and_long_runs() {
    let Some(browser) = browser() else {
        eprintln!("skipped: there is no chromium, chromium-browser or google-chrome in PATH");
        return;
    };
    let expect = |page: &str, all: &[&str]| {
        let text = words(page);
        for word in all {
            assert!(text.contains(word), "no {word:?} in {text}");
        }
        assert!(page.contains("data-painted=") && page.matches("<canvas").count() > 3, "{page}");
        assert!(!text.contains("does not answer"), "{text}");
    };
    let run = Run::new();
    run.succeed(&watched("max_steps=300", &["--set", "output_dir=finished"]));
    let page = paint(&browser, &monitor(&run, &["finished"]), "finished", 1500, &[]);
    expect(&page, &["finished", "300 of 300", "fp8-delayed, CPU", "evaluation", "layer 0", "cosine"]);
    let mut child = spawn(&run, &watched("max_steps=100000", &["--set", "data.max_length=64"]));
    run.wait_for_steps(&mut child, 150);
    // The page shows two runs side by side on a dark background.
    let dark = ["--blink-settings=preferredColorScheme=0"];
    let page = paint(&browser, &monitor(&run, &["run", "finished"]), "growing", 1500, &dark);
    expect(&page, &["running", "of 100000", "run: training", "finished: training"]);
    signal("-KILL", child.id());
    wait(child);
    let page = paint(&browser, &monitor(&run, &["run"]), "killed", 700, &[]);
    expect(&page, &["killed", "has recorded no end", "of 100000"]);
    let divided = Run::new();
    let mut child = spawn(&divided, &train(&["--ranks", "2", "--set", "max_steps=100000", "--set", "recipe=bf16"]));
    divided.wait_for_steps(&mut child, 60);
    let page = paint(&browser, &monitor(&divided, &["run"]), "two-ranks", 1300, &[]);
    expect(&page, &["running", "2 ranks on CPU: data 2", "Logs of the ranks"]);
    let others = children(&child);
    signal("-KILL", child.id());
    others.iter().for_each(|&pid| signal("-KILL", pid));
    wait(child);
    let record = r#"{"started": 1, "device": "NVIDIA H200", "ranks": 1, "mesh": "data 1, context 1, tensor 1, pipeline 1, expert 1",
        "recipe": "fp8-delayed", "max_steps": 100000, "tokens_per_step": 4096, "planned_memory_bytes": 65498251264,
        "end": {"time": 2, "step": 100000, "outcome": "finished", "message": ""}}"#;
    run.write("long/run.json", record.as_bytes());
    run.write("long/metrics.jsonl", hundred_thousand_steps().as_bytes());
    let page = paint(&browser, &monitor(&run, &["long"]), "long", 1300, &[]);
    expect(&page, &["finished", "100000 of 100000", "at step 100000", "42.0 %", "60 GiB / 61 GiB"]);
    let painted = page.split("data-painted=\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
    eprintln!("a run of 100,000 steps is painted after {painted} ms");
    if std::env::var_os("OTTAVA_IMAGES").is_some() {
        for number in 0..25 {
            let (recipe, device) = (["bf16", "fp8-delayed", "fp8-row"][number % 3], ["H100", "H200"][number % 2]);
            let name = format!("many/{recipe}-{number:02}");
            run.write(
                &format!("{name}/run.json"),
                record.replace("fp8-delayed", recipe).replace("H200", device).as_bytes(),
            );
            run.write(&format!("{name}/metrics.jsonl"), some_steps(number).as_bytes());
            let settings = format!("seed = {}\n[precision]\nrecipe = \"{recipe}\"\n", number % 4);
            run.write(&format!("{name}/config.toml"), settings.as_bytes());
        }
        let server = monitor(&run, &["many"]);
        paint(&browser, &server, "many", 1700, &dark);
        paint(&browser, &server, "eight", 1700, &[]);
        paint(&browser, &server, "narrow", 1700, &["--window-size=480,1700"]);
    }
}

/// Returns the `metrics.jsonl` of a short run, which differs by its `number`.
fn some_steps(number: usize) -> String {
    let line = |step: usize| {
        let noise = ((step * 2_654_435_761 + number * 97) % 1000) as f64 / 1000.0 - 0.5;
        let loss =
            2.0 + 0.01 * number as f64 + 2.5 * (-(step as f64) / (60.0 + 3.0 * number as f64)).exp() + 0.1 * noise;
        format!(
            "{{\"step\":{step},\"loss\":{loss},\"grad_norm\":{},\"learning_rate\":3e-4,\"tokens\":{},\"tokens_per_second\":{},\"peak_memory_bytes\":{}}}\n",
            1.0 + noise,
            step * 4096,
            1e5 + 2e3 * number as f64,
            60_000_000_000 + number * 100_000_000
        )
    };
    (1..=400).map(line).collect()
}
