//! Plans of jobs on many hosts.

use crate::setup::{Run, json};

/// The arguments of a plan for 1,024 GPUs on 128 hosts. `extra` are further arguments.
fn plan<'a>(extra: &[&'a str]) -> Vec<&'a str> {
    let job = ["plan", "run.toml", "--gpu", "H200", "--gpus", "1024", "--hosts", "128", "--seeds", "1"];
    [&job[..], &["--set", "parallel.tensor=2", "--set", "parallel.zero=1"], extra].concat()
}

#[test]
fn a_plan_of_a_thousand_gpus_gives_links_failures_and_days() {
    let run = Run::new();
    let found = json(&run.succeed(&plan(&["--mtbf", "8", "--spares", "40", "--tokens", "1e12", "--json"])));
    let hosts = &found["hosts"];
    let number = |key: &str| hosts[key].as_f64().unwrap_or_else(|| panic!("no {key} in {hosts}"));
    assert_eq!(hosts["groups"][0], serde_json::json!({"axis": "data", "ranks": 512, "hosts": 128}), "{hosts}");
    assert_eq!(hosts["groups"][1], serde_json::json!({"axis": "tensor", "ranks": 2, "hosts": 1}), "{hosts}");
    assert!((number("mtbf_hours") - 8.0).abs() < 1e-9 && number("spares") == 40.0, "{hosts}");
    assert!(number("network_bytes") > 0.0 && number("host_link_bytes") > number("network_bytes"), "{hosts}");
    let [disk, memory] = ["disk", "memory"].map(|key| hosts[key]["goodput"]["mean"].as_f64().unwrap());
    assert!(disk > 0.5 && memory > disk && memory < 1.0, "{hosts}");
    let steps = 1e12 / found["tokens_per_step"].as_f64().unwrap();
    assert!((number("days") / (steps * number("step_seconds") / 86_400.0) - 1.0).abs() < 1e-9, "{hosts}");
    // Losses in pairs need checkpoints, and slow hosts cost time.
    let worse = ["--mtbf", "8", "--spares", "40", "--paired-losses", "0.5", "--slow-hosts", "20", "--json"];
    let worse = json(&run.succeed(&plan(&worse)))["hosts"]["memory"].clone();
    assert!(worse["copies_lost"].as_f64() > Some(0.0) && worse["goodput"]["mean"].as_f64() < Some(memory), "{worse}");
    let text = run.succeed(&plan(&["--mtbf", "8"]));
    assert!(text.contains("by the formula"), "{text}");
    let text = [text, run.succeed(&plan(&["--mtbf", "1"]))].concat();
    assert_eq!(text.matches("by the formula").count(), 1, "restarts of 10 min are not short: {text}");
    for part in ["tensor: groups of 2 ranks, each within a host", "a failure every 8.0 h", "`[recovery]`: "] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
}

#[test]
fn impossible_hosts_are_named() {
    let run = Run::new();
    let failing = |arguments: &[&str], part: &str| run.fail(&[&["plan", "run.toml"], arguments].concat(), 1, &[part]);
    failing(&["--gpu", "H200", "--gpus", "8", "--hosts", "3"], "8 GPUs cannot be divided evenly among 3 hosts");
    failing(
        &["--gpus", "8", "--hosts", "2", "--mtbf", "0"],
        "--mtbf is 0; set the hours between failures of the job, a number from 0.1 to 100000",
    );
    failing(&["--gpus", "8", "--hosts", "2", "--paired-losses", "2"], "--paired-losses is 2; set the share");
    failing(&["--gpus", "8", "--hosts", "2", "--slow-hosts", "-1"], "--slow-hosts is -1; set the hosts");
    for mtbf in ["1e-12", "0.05", "1e12", "-1", "nan"] {
        failing(&["--gpus", "8", "--hosts", "2", "--mtbf", mtbf], "a number from 0.1 to 100000");
    }
    failing(&["--gpus", "8", "--hosts", "2", "--spares", "4000000000"], "a number from 0 to 10000");
    failing(&["--device", "cpu", "--failures", "--mtbf", "8"], "set --gpus to the GPUs of the job");
    for option in ["--mtbf", "--spares", "--restart", "--paired-losses", "--slow-hosts", "--seeds"] {
        run.fail(&["plan", "run.toml", option, "1"], 1, &["--hosts"]);
    }
    failing(&["--device", "cpu", "--gpus", "8", "--hosts", "2"], "--step-ms with a measured time");
}
