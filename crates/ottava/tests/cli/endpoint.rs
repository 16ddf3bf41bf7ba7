//! The endpoint of a training run: a client draws completions, returns them with rewards, and the model learns from them.

use crate::serve::Server;
use crate::setup::Run;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::thread::sleep;
use std::time::Duration;

/// A run of `steps` steps, each of four groups of eight completions of at most four tokens.
fn run(steps: usize) -> Run {
    let run = Run::new();
    run.write_problems();
    let text = format!(
        r#"output_dir = "run"
device = "cpu"
[model]
path = "problems/model"
init = "random"
[data]
train_files = ["problems/problems.jsonl"]
val_set_size = 4
max_length = 20
[reinforcement]
num_generations = 8
max_completion_length = 4
[reinforcement.endpoint]
address = "127.0.0.1:0"
[[reinforcement.rewards]]
type = "number"
[training]
max_steps = {steps}
per_device_train_batch_size = 32
[optimizer]
learning_rate = 1e-2
weight_decay = 0.0
[lr_scheduler]
warmup_steps = 0
[checkpoint]
save_steps = "end"
[precision]
recipe = "fp32"
"#
    );
    run.write("run.toml", text.as_bytes());
    run
}

/// Sends a request. Returns the status and the answer.
fn ask(server: &Server, head: &str, body: &str) -> (u16, Value) {
    let mut client = server.connect();
    let length = body.len();
    let lines = "Host: localhost\r\nConnection: close\r\nContent-Type: application/json";
    client
        .write_all(format!("{head} HTTP/1.1\r\n{lines}\r\nContent-Length: {length}\r\n\r\n{body}").as_bytes())
        .unwrap();
    let mut text = String::new();
    client.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head[9..12].parse().unwrap(), serde_json::from_str(body).unwrap())
}

/// Waits until the run waits for completions, and returns the version of its weights.
fn wait(server: &Server) -> u64 {
    loop {
        let (_, state) = ask(server, "GET /v1/training", "");
        if state["state"] == "waiting" {
            assert_eq!((&state["groups"], &state["num_generations"]), (&json!(4), &json!(8)));
            return state["weight_version"].as_u64().unwrap();
        }
        sleep(Duration::from_millis(5));
    }
}

/// Draws a group of completions of one prompt. The reward of a completion is the share of its tokens with an even number.
fn draw(server: &Server, group: u64, seed: u64) -> Vec<Value> {
    let sampling = json!({"n": 8, "max_tokens": 4, "logprobs": 1, "temperature": 1.0, "seed": seed});
    let answer = server.post("/inference/v1/generate", json!({"token_ids": [30, 2, 15], "sampling_params": sampling}));
    let sample = |choice: &Value| {
        let ids: Vec<u64> = choice["token_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
        let content = choice["logprobs"]["content"].as_array().unwrap();
        let logprobs: Vec<f64> = content.iter().map(|token| token["logprob"].as_f64().unwrap()).collect();
        let even = ids.iter().filter(|id| *id % 2 == 0).count() as f64 / ids.len() as f64;
        json!({
            "prompt_ids": [30, 2, 15], "completion_ids": ids, "completion_mask": vec![1; ids.len()], "completion_logprobs": logprobs,
            "reward": even, "group": group, "truncated": choice["finish_reason"] == "length",
        })
    };
    answer["choices"].as_array().unwrap().iter().map(sample).collect()
}

/// Draws and returns the completions of a generation, in two requests.
fn step(server: &Server) -> u64 {
    let version = wait(server);
    let samples: Vec<Value> = (0..4).flat_map(|group| draw(server, group, version * 100 + group * 8)).collect();
    for part in samples.chunks(24) {
        let (status, answer) =
            ask(server, "POST /v1/rollouts", &json!({"weight_version": version, "samples": part}).to_string());
        assert_eq!(status, 200, "{answer}");
    }
    version
}

fn values_of(run: &Run, name: &str) -> Vec<f64> {
    let text = std::fs::read_to_string(run.path("run/metrics.jsonl")).unwrap();
    text.lines().filter_map(|line| serde_json::from_str::<Value>(line).unwrap()[name].as_f64()).collect()
}

#[test]
fn a_model_learns_from_the_rewards_of_a_client() {
    const STEPS: usize = 10;
    let run = run(STEPS);
    let server = Server::spawn(run.command(&["train", "run.toml"]));
    for expected in 0..STEPS as u64 {
        assert_eq!(step(&server), expected);
    }
    let (code, errors) = server.wait();
    assert_eq!(code, Some(0), "{errors}");
    let rewards = values_of(&run, "reward");
    assert!(rewards.len() == STEPS && rewards[STEPS - 1] > rewards[0] + 0.2, "{rewards:?}");
    // Draws of clients have the bits of steps: JSON keeps F32.
    assert_eq!(values_of(&run, "sampling/sampling_logp_difference/max"), [0.0; STEPS]);
}

/// No request ends the run, and a refused request changes nothing.
#[test]
fn wrong_rollouts_are_refused() {
    let run = run(1);
    let server = Server::spawn(run.command(&["train", "run.toml"]));
    assert_eq!(wait(&server), 0);
    let good = json!({"prompt_ids": [2], "completion_ids": [3, 4], "completion_mask": [1, 0], "completion_logprobs": [-0.5, 0.0], "reward": 1.0, "group": 7});
    let with = |key: &str, value: Value| {
        let mut sample = good.clone();
        sample[key] = value;
        json!({"weight_version": 0, "samples": [sample]}).to_string()
    };
    let of = |count: usize, groups: u64| {
        let sample = |i: usize| {
            let mut sample = good.clone();
            sample["group"] = json!(i as u64 % groups);
            sample
        };
        json!({"weight_version": 0, "samples": (0..count).map(sample).collect::<Vec<_>>()}).to_string()
    };
    let nan = with("reward", json!(1.0)).replace("-0.5", "NaN");
    for (body, words) in [
        ("{".to_string(), "no JSON object with rollouts"),
        (nan, "no JSON object with rollouts"),
        (json!({"samples": []}).to_string(), "missing field `weight_version`"),
        (json!({"weight_version": 0, "samples": []}).to_string(), "`samples` is empty"),
        (json!({"weight_version": 1, "samples": [good]}).to_string(), "the weights of today have the version 0"),
        (with("colour", json!("red")), "unknown field `colour`"),
        (
            with("completion_mask", json!([1])),
            "`samples[0]`: `completion_mask` has 1 entries, and `completion_ids` has 2",
        ),
        (with("completion_logprobs", json!([-0.5, 0.0, 0.0])), "`completion_logprobs` has 3 entries"),
        (with("completion_logprobs", json!([0.5, 0.0])), "is finite and at most 0"),
        (with("completion_logprobs", json!([-1e300, 0.0])), "is finite and at most 0"),
        (with("completion_mask", json!([0, 0])), "marks no token"),
        (with("completion_mask", json!([2, 0])), "entries are 0 or 1"),
        (with("completion_ids", json!([3, 44])), "there is no token 44; the vocabulary ends at 44"),
        (with("prompt_ids", json!([-1])), "no JSON object with rollouts"),
        (with("prompt_ids", json!([])), "at least one token"),
        (with("prompt_ids", json!(vec![2; 19])), "it has 21 tokens; `data.max_length` of the run is 20"),
        (with("reward", json!("high")), "no JSON object with rollouts"),
        (of(9, 1), "group 0 would have 9 completions"),
        (of(5, 5), "there would be 5 groups, and the run waits for 4"),
    ] {
        let (status, answer) = ask(&server, "POST /v1/rollouts", &body);
        assert_eq!(status, 400, "{body}: {answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains(words), "{body}: {message}");
    }
    assert_eq!(ask(&server, "GET /v1/training", "").1["missing"], 32, "a refused request changes nothing");
    let (status, models) = ask(&server, "GET /v1/models", "");
    assert_eq!((status, &models["data"][0]["max_model_len"]), (200, &json!(20)));
    assert_eq!(step(&server), 0);
    assert_eq!(server.wait().0, Some(0));
}

/// A run that waits for completions is stopped by a signal, saves its last step, and resumes.
#[test]
fn a_run_that_waits_stops_and_resumes() {
    let run = run(3);
    let server = Server::spawn(run.command(&["train", "run.toml"]));
    assert_eq!((step(&server), step(&server)), (0, 1));
    assert_eq!(wait(&server), 2);
    let stale = json!({"weight_version": 1, "samples": draw(&server, 0, 1)}).to_string();
    let (status, answer) = ask(&server, "POST /v1/rollouts", &stale);
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(status == 400 && message.contains("`reinforcement.endpoint.max_staleness` allows 0 steps"), "{answer}");
    server.signal();
    let (code, errors) = server.wait();
    assert!(code == Some(75) && errors.contains("stopped by a signal after step 2"), "{code:?}: {errors}");
    let server = Server::spawn(run.command(&["train", "run.toml", "--resume"]));
    assert_eq!(step(&server), 2);
    assert_eq!(server.wait().0, Some(0));
    assert_eq!(values_of(&run, "reward").len(), 3);
}
