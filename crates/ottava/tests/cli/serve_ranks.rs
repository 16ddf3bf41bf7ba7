//! Tests a server whose model is divided between two ranks, as processes on the CPU.

use crate::layer_axes::inputs;
use crate::ranks::{children_of, lives, signal};
use crate::serve::Server;
use crate::setup::Run;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::time::{Duration, Instant};

const TWO: [&str; 4] = ["--recipe", "fp32", "--ranks", "2"];

/// The maximum time for which a server may run after the loss of a rank. The documents promise 10 s.
const SOON: Duration = Duration::from_secs(10);

/// Returns requests of all kinds.
fn requests() -> Vec<(&'static str, Value)> {
    let greedy = json!({"prompt": ["line 4", "line 16 of", "l"], "max_tokens": 20, "temperature": 0, "logprobs": 2});
    let drawn = json!({"prompt": "line 4", "max_tokens": 20, "temperature": 1, "seed": 3, "n": 3, "best_of": 5});
    let regex =
        json!({"prompt": "line", "max_tokens": 30, "temperature": 1, "seed": 1, "guided_regex": "[0-9]{4} (ab|cd)+e"});
    let echo = json!({"prompt": "line 9 of the text", "max_tokens": 2, "temperature": 0, "logprobs": 1, "echo": true});
    let stopped = json!({"prompt": "line 4", "max_tokens": 40, "temperature": 0.7, "seed": 8, "stop": ["e", "1"]});
    let adapted = json!({"model": "sql", "prompt": "line 4 of the text", "max_tokens": 20, "temperature": 0});
    let embedding = json!({"input": ["line 4 of the text", "line"]});
    let texts = [greedy, drawn, regex, echo, stopped, adapted].map(|body| ("/v1/completions", body));
    texts.into_iter().chain([("/v1/embeddings", embedding)]).collect()
}

/// Sends all requests at once, and returns their answers.
fn answers(server: &Server) -> Vec<Value> {
    let open: Vec<_> = requests().iter().map(|(path, body)| server.send(path, body)).collect();
    let read = |mut answer: std::net::TcpStream| {
        let mut text = String::new();
        answer.read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200"), "{text}");
        let answer: Value = serde_json::from_str(body).unwrap();
        if answer["choices"].is_null() { answer["data"].clone() } else { answer["choices"].clone() }
    };
    open.into_iter().map(read).collect()
}

/// Expects equal answers. The last bits of numbers may differ, because sums over ranks have another order.
fn expect_alike(found: &Value, expected: &Value) {
    match (found, expected) {
        (Value::Array(found), Value::Array(expected)) if found.len() == expected.len() => {
            found.iter().zip(expected).for_each(|(found, expected)| expect_alike(found, expected));
        }
        (Value::Object(found), Value::Object(expected)) => {
            assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
            found.values().zip(expected.values()).for_each(|(found, expected)| expect_alike(found, expected));
        }
        (Value::Number(a), Value::Number(b)) => {
            let [a, b] = [a, b].map(|number| number.as_f64().unwrap());
            // In F32, a sum over ranks in each branch is rounded by 2⁻²⁴. Differences of up to 7e-8 were observed. If a part were missing,
            // log-probabilities would change by as much as their own size.
            assert!((a - b).abs() < 1e-4 * b.abs().max(1.0), "{a}, {b} alone");
        }
        _ => assert_eq!(found, expected),
    }
}

/// Gives a checkpoint of `run` the bundled tokenizer, which decodes bytes, and an adapter in the folder `sql`.
fn with_adapter(run: Run) -> Run {
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tokenizer/tokenizer.json");
    run.write("model/tokenizer.json", &std::fs::read(tokenizer).unwrap());
    run.replace("model/config.json", "\"vocab_size\": 100", "\"vocab_size\": 4096");
    let path = format!("model.path={}", run.checkpoint().display());
    let adapter = ["--set", "init=pretrained", "--set", "output_dir=sql", "--set", "lora.r=2"];
    let train = ["train", "run.toml", "--set", &path, "--set", "learning_rate=0.1"];
    run.succeed(&[&train[..], &adapter].concat());
    run
}

/// The requests are sent twice, so that prompts are cached the second time. A small cache makes the server preempt completions.
#[test]
fn answers_of_two_ranks_are_those_of_one() {
    let modules = ["--lora-modules", "sql=sql"];
    let few_tokens = &["--kv-cache-tokens", "96", "--max-num-batched-tokens", "7"][..];
    // One model has two key and value heads, and the other has one head that both ranks compute.
    for (run, options) in [(inputs(), &[&[][..], few_tokens][..]), (Run::new(), &[&[]])] {
        let run = with_adapter(run);
        let alone = Server::start(&run, &[&TWO[..2], &modules].concat());
        let expected = answers(&alone);
        for more in options {
            let server = Server::start(&run, &[&TWO[..], &modules, more].concat());
            for _ in 0..2 {
                answers(&server).iter().zip(&expected).for_each(|(found, expected)| expect_alike(found, expected));
            }
            server.signal();
            let (code, errors) = server.wait();
            assert_eq!(code, Some(0), "{errors}");
            assert!(!errors.contains("error"), "{errors}");
        }
    }
}

#[test]
fn ranks_that_cannot_serve_a_model_say_why() {
    let run = Run::new();
    let model = run.checkpoint();
    let serve = ["serve", model.to_str().unwrap(), "--port", "0", "--device", "cpu"];
    run.fail(&[&serve[..], &["--gpus", "2"]].concat(), 1, &["the device is the CPU", "use --ranks 2"]);
    run.fail(&[&serve[..], &["--ranks", "3"]].concat(), 1, &["cannot be divided evenly among 3 tensor-parallel ranks"]);
}

/// Returns the text of a greedy completion.
fn text(server: &Server) -> Value {
    let body = json!({"prompt": "line 4", "max_tokens": 20, "temperature": 0});
    server.post("/v1/completions", body)["choices"][0]["text"].clone()
}

/// Starts an answer of some hundred steps, and reads its beginning.
fn begin(server: &Server) -> impl Iterator<Item = String> + use<> {
    let stream = json!({"prompt": "line", "n": 64, "max_tokens": 55, "ignore_eos": true, "stream": true});
    let mut lines = BufReader::new(server.send("/v1/completions", &stream)).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.starts_with("data: {")), "the answer has begun");
    lines
}

#[test]
fn a_client_that_leaves_is_forgotten_on_all_ranks() {
    let run = inputs();
    let server = Server::start(&run, &TWO);
    let before = text(&server);
    for _ in 0..3 {
        drop(begin(&server));
        assert_eq!(text(&server), before);
    }
    server.signal();
    assert_eq!(server.wait().0, Some(0));
}

/// Tests a signal to either rank.
#[test]
fn a_signal_lets_answers_finish_and_ends_all_ranks() {
    for rank in [0, 1] {
        let run = inputs();
        let server = Server::start(&run, &[&TWO[..], &["--shutdown-timeout", "100"]].concat());
        let others = children_of(server.id());
        let mut lines = begin(&server);
        signal("-TERM", [server.id(), others[0]][rank]);
        assert!(lines.any(|line| line == "data: [DONE]"), "it goes on to its end");
        let (code, errors) = server.wait();
        assert_eq!(code, Some(0), "{errors}");
        assert!(!errors.contains("error") && !lives(others[0]), "{errors}");
    }
}

/// Tests the loss of a rank while the server computes and while it is idle.
#[test]
fn a_rank_that_is_killed_ends_the_server_with_its_name() {
    for is_busy in [true, false] {
        let run = inputs();
        let server = Server::start(&run, &TWO);
        let others = children_of(server.id());
        let open = is_busy.then(|| begin(&server));
        let killed = Instant::now();
        signal("-KILL", others[0]);
        let (code, errors) = server.wait();
        assert!(killed.elapsed() < SOON, "{:?}", killed.elapsed());
        assert_eq!(code, Some(5), "{errors}");
        for words in ["error: rank 1 (pid ", " ended during ", "killed by signal 9"] {
            assert!(errors.contains(words), "no {words:?} in: {errors}");
        }
        drop(open);
    }
}

#[test]
fn a_server_that_is_killed_leaves_no_rank() {
    let run = inputs();
    let server = Server::start(&run, &TWO);
    let others = children_of(server.id());
    assert_eq!(others.len(), 1);
    drop(server);
    let begin = Instant::now();
    while lives(others[0]) {
        assert!(begin.elapsed() < SOON, "a rank is left");
        std::thread::sleep(Duration::from_millis(20));
    }
}
