//! Tests the server with a real model.

use crate::ranks::signal;
use crate::setup::{Run, json};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A server of a run's checkpoint.
pub struct Server {
    child: Child,
    pub address: String,
    /// A thread that reads the server's standard error, because a full pipe would block the server.
    errors: Option<JoinHandle<String>>,
}

impl Server {
    pub fn start(run: &Run, more: &[&str]) -> Server {
        let args = Server::arguments(run, more);
        Server::spawn(run.command(&args.iter().map(String::as_str).collect::<Vec<_>>()))
    }

    /// Starts a server that can open only `files` files.
    fn start_with_files(run: &Run, more: &[&str], files: usize) -> Server {
        let mut command = Command::new("sh");
        let script = format!("ulimit -n {files}; exec \"$0\" \"$@\"");
        command.args(["-c", &script, env!("CARGO_BIN_EXE_ottava")]).args(Server::arguments(run, more));
        command.current_dir(run.path("."));
        Server::spawn(command)
    }

    fn arguments(run: &Run, more: &[&str]) -> Vec<String> {
        let model = run.checkpoint();
        [&["serve", model.to_str().unwrap(), "--port", "0", "--device", "cpu"], more]
            .concat()
            .iter()
            .map(|arg| arg.to_string())
            .collect()
    }

    /// Starts a server, and waits until it prints its address.
    pub fn spawn(mut command: Command) -> Server {
        // The allocator returns freed memory to the system, so that the resident memory is the memory in use.
        command.envs([
            ("MALLOC_ARENA_MAX", "1"),
            ("MALLOC_MMAP_THRESHOLD_", "65536"),
            ("MALLOC_TRIM_THRESHOLD_", "65536"),
        ]);
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut errors = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        let address = loop {
            line.clear();
            assert!(errors.read_line(&mut line).unwrap() > 0, "the server has ended");
            if let Some((_, address)) = line.trim_end().split_once(" at http://") {
                break address.to_string();
            }
        };
        let rest = std::thread::spawn(move || {
            let mut text = String::new();
            errors.read_to_string(&mut text).unwrap();
            text
        });
        Server { child, address, errors: Some(rest) }
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Connects to the server.
    pub fn connect(&self) -> TcpStream {
        let client = TcpStream::connect(&self.address).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        client
    }

    /// Sends a request. Returns the connection, from which the answer can be read.
    pub fn send(&self, path: &str, body: &Value) -> TcpStream {
        let (mut client, body) = (self.connect(), body.to_string());
        client.write_all(&request(path, body.as_bytes())).unwrap();
        client
    }

    pub fn post(&self, path: &str, body: Value) -> Value {
        let mut text = String::new();
        self.send(path, &body).read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200"), "{text}");
        serde_json::from_str(body).unwrap()
    }

    pub fn signal(&self) {
        signal("-TERM", self.id());
    }

    /// Waits for the end of the server after [`Server::signal`]. Returns its exit code, and its standard error since it was ready.
    pub fn wait(mut self) -> (Option<i32>, String) {
        let code = self.child.wait().unwrap().code();
        (code, self.errors.take().unwrap().join().unwrap())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the bytes of a POST request.
pub fn request(path: &str, body: &[u8]) -> Vec<u8> {
    [post_head(path, &format!("Content-Length: {}", body.len())).as_bytes(), body].concat()
}

/// Returns the head of a POST request with the additional header `line`.
pub fn post_head(path: &str, line: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n{line}\r\n\r\n"
    )
}

/// Returns the token of each byte in the model's tokenizer.
fn ids(text: &str) -> Vec<u32> {
    text.bytes().map(|byte| if byte == b'\n' { 96 } else { u32::from(byte) - 31 }).collect()
}

#[test]
fn served_completions_and_losses_are_those_of_the_commands() {
    let run = Run::new();
    let server = Server::start(&run, &["--max-num-seqs", "3", "--max-length", "40"]);
    let model = run.checkpoint();
    let generated = run.succeed(&[
        "generate",
        model.to_str().unwrap(),
        "--prompt",
        "line 4",
        "--max-new-tokens",
        "9",
        "--json",
        "--device",
        "cpu",
    ]);
    let body = json!({"prompt": "line 4", "max_tokens": 9, "temperature": 0});
    let served = server.post("/v1/completions", body);
    assert_eq!(served["choices"][0]["text"], json(&generated)["text"]);
    // The log-probability of each token of a text, as lm-eval requests it.
    let text = "line 7 of the text\n";
    run.write("one.txt", text.as_bytes());
    let evaluated = json(&run.succeed(&[
        "eval",
        model.to_str().unwrap(),
        "--data",
        "one.txt",
        "--max-length",
        "32",
        "--json",
        "--device",
        "cpu",
    ]));
    let mut tokens = vec![0];
    tokens.extend(ids(text));
    tokens.resize(evaluated["tokens"].as_u64().unwrap() as usize + 1, 0);
    let prompts = json!([tokens, tokens[..9], tokens[..4]]);
    let body = json!({"prompt": prompts, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": true});
    let answer = server.post("/v1/completions", body);
    let of_tokens: Vec<f64> = answer["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap()[1..tokens.len()]
        .iter()
        .map(|logprob| logprob.as_f64().unwrap())
        .collect();
    let loss = -of_tokens.iter().sum::<f64>() / of_tokens.len() as f64;
    let expected = evaluated["loss"].as_f64().unwrap();
    // In BF16, sums over keys in another order sometimes change the rounding of an activation. Differences of up to 5e-6 of the loss were observed.
    assert!((loss - expected).abs() <= 1e-5 * expected, "{loss} through the server, {expected} by eval");
}

/// Returns a request for a stream of several MB, which is held until its client reads.
pub fn long_stream() -> Value {
    json!({"prompt": vec!["line"; 8], "n": 128, "max_tokens": 55, "logprobs": 9, "ignore_eos": true, "stream": true})
}

#[test]
fn a_signal_lets_answers_finish_and_waits_for_nothing_else() {
    let run = Run::new();
    let server = Server::start(&run, &["--shutdown-timeout", "100"]);
    // These clients send half a body, half a head, or nothing.
    let whole = request("/v1/completions", b"{\"prompt\": \"line\"}");
    let half: Vec<TcpStream> = [whole.len() - 3, 20, 0]
        .map(|end| {
            let mut client = server.connect();
            client.write_all(&whole[..end]).unwrap();
            client
        })
        .into();
    let mut lines = BufReader::new(server.send("/v1/completions", &long_stream())).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.starts_with("data: {")), "the answer has begun");
    server.signal();
    // A load balancer must notice the stop while answers are still computed.
    let end = Instant::now() + Duration::from_secs(20);
    while !status(&server, "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").contains("503") {
        assert!(Instant::now() < end, "health says that requests are taken");
    }
    assert!(status(&server, &String::from_utf8(whole).unwrap()).contains("503"));
    assert!(lines.any(|line| line == "data: [DONE]"), "it goes on to its end");
    let stopped = Instant::now();
    assert_eq!(server.wait().0, Some(0));
    assert!(stopped.elapsed() < Duration::from_secs(50), "{:?}", stopped.elapsed());
    drop(half);
}

/// Returns the first line of the answer to a request.
fn status(server: &Server, request: &str) -> String {
    let mut client = server.connect();
    client.write_all(request.as_bytes()).unwrap();
    BufReader::new(client).lines().next().unwrap().unwrap()
}

#[test]
fn a_small_kv_cache_is_the_length_that_clients_see() {
    let run = Run::new();
    let server = Server::start(&run, &["--kv-cache-tokens", "32"]);
    let ask = |request: &str| {
        let (mut client, mut text) = (server.connect(), String::new());
        client.write_all(request.as_bytes()).unwrap();
        client.read_to_string(&mut text).unwrap();
        serde_json::from_str::<Value>(text.split_once("\r\n\r\n").unwrap().1).unwrap()
    };
    let models = ask("GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    assert_eq!(models["data"][0]["max_model_len"], 32);
    for (body, param) in [
        (json!({"prompt": "a".repeat(40), "max_tokens": 1}), "prompt"),
        (json!({"prompt": "line", "max_tokens": 40}), "max_tokens"),
    ] {
        let body = body.to_string();
        let answer = ask(&String::from_utf8(request("/v1/completions", body.as_bytes())).unwrap());
        let error = &answer["error"];
        assert_eq!((&error["param"], &error["code"]), (&json!(param), &json!("context_length_exceeded")), "{error}");
        assert!(error["message"].as_str().unwrap().contains("room for 32"), "{error}");
    }
    let whole = json!({"prompt": "line", "max_tokens": 27, "ignore_eos": true});
    assert_eq!(server.post("/v1/completions", whole)["usage"]["completion_tokens"], 27);
}

/// The server can open fewer files than it has connections.
#[test]
fn idle_connections_beyond_the_limit_of_files_make_room() {
    let run = Run::new();
    let server = Server::start_with_files(&run, &[], 64);
    let idle: Vec<TcpStream> = (0..100).map(|_| server.connect()).collect();
    for _ in 0..4 {
        server.post("/v1/completions", json!({"prompt": "line", "max_tokens": 2}));
    }
    drop(idle);
}

#[test]
fn a_server_that_cannot_start_says_why() {
    let run = Run::new();
    let server = Server::start(&run, &[]);
    let (model, port) = (run.checkpoint(), server.address.rsplit_once(':').unwrap().1);
    let model = model.to_str().unwrap();
    run.fail(&["serve", model, "--port", port, "--device", "cpu"], 1, &[&server.address, "in use"]);
    run.fail(
        &["serve", model, "--port", "0", "--max-length", "65", "--device", "cpu"],
        1,
        &["65, and config.json gives the model 64 positions"],
    );
    run.fail(&["serve", "nowhere", "--port", "0"], 1, &["nowhere"]);
}

#[test]
fn adapters_are_served_by_name_with_the_texts_of_generate() {
    let run = Run::new();
    let base = run.checkpoint();
    let base = base.to_str().unwrap();
    let path = format!("model.path={base}");
    for (output, more) in [
        ("sql", &["--set", "lora.r=2"][..]),
        (
            "chat",
            &["--set", "lora.r=3", "--set", "target_modules=[\"v_proj\", \"down_proj\"]", "--set", "use_dora=true"],
        ),
        ("fp8", &["--set", "lora.r=2", "--set", "recipe=fp8-row"]),
    ] {
        let output = format!("output_dir={output}");
        let train = ["train", "run.toml", "--set", &path, "--set", "init=pretrained", "--set", &output];
        run.succeed(&[&train[..], &["--set", "learning_rate=0.1"], more].concat());
    }
    let generate = |more: &[&str]| {
        let args = ["generate", base, "--prompt", "line 4", "--max-new-tokens", "40", "--json", "--device", "cpu"];
        json(&run.succeed(&[&args[..], more].concat()))["text"].clone()
    };
    let texts = [generate(&[]), generate(&["--adapter", "sql"]), generate(&["--adapter", "chat"])];
    assert!(texts[0] != texts[1] && texts[0] != texts[2] && texts[1] != texts[2], "{texts:?}");
    let newest = "chat/checkpoints/checkpoint-2";
    let modules = ["--lora-modules", "sql=sql", &format!("chat={newest}")];
    let server = Server::start(&run, &modules);
    let body = |model: &str| json!({"model": model, "prompt": "line 4", "max_tokens": 40, "temperature": 0});
    // The requests are sent at once, and then again, when their prompts are cached.
    for _ in 0..2 {
        let streams = [base, "sql", "chat"].map(|model| server.send("/v1/completions", &body(model)));
        for (mut stream, expected) in streams.into_iter().zip(&texts) {
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            let answer: Value = serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap();
            assert_eq!(answer["choices"][0]["text"], *expected);
        }
    }
    // The same adapters, loaded while the server runs.
    let server = Server::start(&run, &["--allow-runtime-lora-updating"]);
    let call = |path: &str, body: &Value| {
        let mut answer = String::new();
        server.send(path, body).read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().to_string(), body.to_string())
    };
    let load =
        |name: &str, folder: &str| call("/v1/load_lora_adapter", &json!({"lora_name": name, "lora_path": folder}));
    for (name, folder) in [("sql", "sql"), ("chat", newest)] {
        assert_eq!(load(name, folder).0, "200");
    }
    let text = |model: &str| serde_json::from_str::<Value>(&call("/v1/completions", &body(model)).1).unwrap();
    for (model, expected) in [base, "sql", "chat"].into_iter().zip(&texts) {
        assert_eq!(text(model)["choices"][0]["text"], *expected);
    }
    let (status, error) = load("other", "model");
    assert!(status == "404" && error.contains("there is no adapter_config.json"), "{error}");
    assert_eq!(call("/v1/unload_lora_adapter", &json!({"lora_name": "chat"})).0, "200");
    assert_eq!(call("/v1/completions", &body("chat")).0, "404");
    assert_eq!([base, "sql"].map(|model| text(model)["choices"][0]["text"].clone()), texts[..2]);
    let fails = |modules: &[&str], code: i32, words: &[&str]| {
        let serve = ["serve", base, "--port", "0", "--device", "cpu", "--lora-modules"];
        run.fail(&[&serve[..], modules].concat(), code, words);
    };
    fails(&["sql=sql", "sql=chat"], 1, &["two models `sql`"]);
    fails(&[&format!("{base}=sql")], 1, &["two models", "--served-model-name"]);
    fails(&["sql=sql", "--adapter", "chat"], 1, &["cannot be used with"]);
    fails(&["sql"], 1, &["it is NAME=FOLDER"]);
    fails(&["sql=sql", "fp8=fp8"], 1, &["`sql` and `fp8`", "recipes bf16 and fp8-row", "set --recipe"]);
    fails(&["sql=model"], 1, &["model: there is no adapter_config.json"]);
    run.replace(&format!("{newest}/adapter_config.json"), "\"v_proj\"", "\"w_proj\"");
    fails(&["chat=chat"], 7, &["adapter_config.json"]);
}

#[test]
fn embeddings_are_vectors_of_norm_1_that_do_not_depend_on_other_texts() {
    let run = Run::new();
    let server = Server::start(&run, &["--pooling", "mean"]);
    let embed = |input: Value| -> Vec<Vec<f64>> {
        let answer = server.post("/v1/embeddings", json!({"input": input}));
        let entries = answer["data"].as_array().unwrap().iter();
        entries.map(|entry| serde_json::from_value(entry["embedding"].clone()).unwrap()).collect()
    };
    let both = embed(json!(["line 4 of the text", "line"]));
    assert_eq!(both, [embed(json!("line 4 of the text")), embed(json!(ids("line")))].concat());
    for values in &both {
        let norm = values.iter().map(|x| x * x).sum::<f64>().sqrt();
        // Each of 32 values is rounded to F32, by up to 2⁻²⁴ (6e-8) of its size. The norm is rounded too.
        assert!(values.len() == 32 && (norm - 1.0).abs() < 1e-6, "{} values of norm {norm}", values.len());
    }
    assert_ne!(both[0], both[1]);
    let model = run.checkpoint();
    for (pooling, message) in [
        ("max", "there is no pooling `max`; the kinds are last, mean, cls"),
        ("cls", "the first token of this model sees no other token; choose `--pooling mean`"),
    ] {
        run.fail(
            &["serve", model.to_str().unwrap(), "--port", "0", "--device", "cpu", "--pooling", pooling],
            1,
            &[message],
        );
    }
}
