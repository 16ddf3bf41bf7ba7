//! The server over HTTP, with a stand-in for the engine that repeats its prompts.

use crate::server::{Model, Options, serve};
use crate::worker::Backend;
use ottava_lm::data::{ChatTemplate, Clock, Tokenizer};
use ottava_lm::engine::{EngineStats, Event, FinishReason, Request, RequestId, TokenLogprob};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};

const MODEL_LEN: usize = 200;

/// Draws the tokens of the prompt again and again, one per step, with log-probabilities that follow from place and token.
#[derive(Default)]
struct Parrot {
    running: BTreeMap<RequestId, (Request, usize)>,
    log: Log,
    /// Waits so long in each step.
    pause: Duration,
    fails: bool,
}

/// What the stand-in was asked for.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<(Vec<Request>, Vec<RequestId>)>>);

fn logprob(place: usize, token: u32, top: usize) -> TokenLogprob {
    let value = -0.25 * (place + 1) as f32;
    let top = [(token, value), (7, value - 1.0), (8, f32::NEG_INFINITY)].into_iter().take(top).collect();
    TokenLogprob { token, logprob: value, top }
}

impl Backend for Parrot {
    fn add(&mut self, request: Request) -> ottava_lm::Result<RequestId> {
        let mut log = self.log.0.lock().unwrap();
        let id = RequestId(log.0.len() as u64);
        log.0.push(request.clone());
        self.running.insert(id, (request, 0));
        Ok(id)
    }

    fn cancel(&mut self, id: RequestId) {
        if self.running.remove(&id).is_some() {
            self.log.0.lock().unwrap().1.push(id);
        }
    }

    fn step(&mut self) -> ottava_lm::Result<Vec<Event>> {
        if self.fails {
            return Err(ottava_lm::Error::NonFinite("a logit is NaN".into()));
        }
        sleep(self.pause);
        let mut events = Vec::new();
        let mut done = Vec::new();
        for (&id, (request, drawn)) in &mut self.running {
            let prompt = &request.prompt;
            if let (0, Some(top)) = (*drawn, request.prompt_logprobs) {
                let of_token = |(i, &token): (usize, &u32)| (i > 0).then(|| logprob(i, token, top));
                events.push(Event::Prompt { id, logprobs: prompt.iter().enumerate().map(of_token).collect() });
            }
            let token = prompt[*drawn % prompt.len()];
            let place = prompt.len() + *drawn;
            events.push(Event::Token { id, token, logprob: request.logprobs.map(|top| logprob(place, token, top)) });
            *drawn += 1;
            let stops = request.stop_ids.contains(&token);
            if stops || *drawn == request.max_new_tokens {
                let reason = if stops { FinishReason::Stop } else { FinishReason::Length };
                events.push(Event::Finished { id, reason });
                done.push(id);
            }
        }
        done.iter().for_each(|id| drop(self.running.remove(id)));
        Ok(events)
    }

    fn is_idle(&self) -> bool {
        self.running.is_empty()
    }

    fn stats(&self) -> EngineStats {
        EngineStats { running: self.running.len(), kv_blocks: 4, used_kv_blocks: 1, ..EngineStats::default() }
    }
}

/// A server that runs as long as the tests do.
struct Server {
    address: SocketAddr,
    log: Log,
    thread: JoinHandle<ottava_lm::Result<()>>,
}

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tokenizer")
}

fn tokenizer() -> Tokenizer {
    Tokenizer::load(&data()).unwrap()
}

fn template() -> ChatTemplate {
    let file = std::env::temp_dir().join(format!("ottava-serve-{}.jinja", std::process::id()));
    std::fs::write(&file, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:").unwrap();
    ChatTemplate::load(&data(), Some(&file), Clock::Now).unwrap().unwrap()
}

fn start(change: impl FnOnce(&mut Options, &mut Parrot)) -> Server {
    let mut options = Options {
        address: "127.0.0.1:0".parse().unwrap(),
        name: "parrot".into(),
        max_requests: 8,
        api_key: None,
        shutdown_timeout: Duration::from_secs(5),
    };
    let mut parrot = Parrot::default();
    change(&mut options, &mut parrot);
    let (log, (sender, receiver), template) = (parrot.log.clone(), channel(), Some(template()));
    let load = || Ok((parrot, Model { tokenizer: tokenizer(), template, vocabulary: 4096, max_model_len: MODEL_LEN }));
    let thread = std::thread::spawn(move || serve(&options, load, |address| sender.send(address).unwrap()));
    Server { address: receiver.recv().unwrap(), log, thread }
}

impl Server {
    /// Status and body of a request.
    fn call(&self, path: &str, body: Option<&Value>, key: Option<&str>) -> (u16, String) {
        let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
        let url = format!("http://{}{path}", self.address);
        let with_key = key.map_or_else(String::new, |key| format!("Bearer {key}"));
        let mut response = match body {
            Some(body) => agent.post(url).header("Authorization", with_key).send(body.to_string()).unwrap(),
            None => agent.get(url).header("Authorization", with_key).call().unwrap(),
        };
        (response.status().as_u16(), response.body_mut().read_to_string().unwrap())
    }

    fn post(&self, path: &str, body: Value) -> Value {
        let (status, text) = self.call(path, Some(&body), None);
        assert_eq!(status, 200, "{text}");
        serde_json::from_str(&text).unwrap()
    }

    /// The events of a streamed answer, and whether it ended with `[DONE]`.
    fn stream(&self, path: &str, body: Value) -> (Vec<Value>, bool) {
        let (status, text) = self.call(path, Some(&body), None);
        assert_eq!(status, 200, "{text}");
        let lines: Vec<&str> = text.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
        let done = lines.last() == Some(&"[DONE]");
        let events = &lines[..lines.len() - usize::from(done)];
        (events.iter().map(|event| serde_json::from_str(event).unwrap()).collect(), done)
    }

    fn refused(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, text) = self.call(path, Some(body), None);
        (status, serde_json::from_str::<Value>(&text).unwrap()["error"].clone())
    }
}

const TEXT: &str = "a bird of the sea";

#[test]
fn completions_have_the_shape_of_openai() {
    let server = start(|_, _| {});
    let ids = tokenizer().encode_prompt(TEXT).unwrap();
    let answer = server
        .post("/v1/completions", json!({"model": "parrot", "prompt": TEXT, "max_tokens": ids.len(), "unknown": 1}));
    assert_eq!((answer["object"].as_str(), answer["model"].as_str()), (Some("text_completion"), Some("parrot")));
    assert!(answer["id"].as_str().unwrap().starts_with("cmpl-") && answer["created"].as_u64().unwrap() > 1_700_000_000);
    let choice =
        json!({"index": 0, "text": tokenizer().decode(&ids).unwrap(), "logprobs": null, "finish_reason": "length"});
    assert_eq!(answer["choices"], json!([choice]));
    let usage = json!({"prompt_tokens": ids.len(), "completion_tokens": ids.len(), "total_tokens": 2 * ids.len()});
    assert_eq!(answer["usage"], usage);
    let models = server.call("/v1/models", None, None);
    assert!(models.0 == 200 && models.1.contains("\"parrot\""), "{models:?}");
    assert_eq!(server.call("/health", None, None).0, 200);
}

/// What lm-eval's `local-completions` sends and reads.
#[test]
fn echoed_prompts_have_log_probabilities() {
    let server = start(|_, _| {});
    let prompts: Vec<Vec<u32>> = ["a bird of the sea", "a stone"].map(|text| tokenizer().encode(text).unwrap()).into();
    let body = json!({"prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": true, "seed": 1234});
    let answer = server.post("/v1/completions", body.clone());
    for (index, prompt) in prompts.iter().enumerate() {
        let choice = &answer["choices"][index];
        assert_eq!(choice["index"], index);
        let lists = &choice["logprobs"];
        let list = |name: &str| lists[name].as_array().unwrap().clone();
        for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            assert_eq!(list(name).len(), prompt.len() + 1, "{name} has all tokens of the prompt and the new one");
        }
        assert!(list("token_logprobs")[0].is_null() && list("top_logprobs")[0].is_null(), "the first follows nothing");
        for (i, value) in list("token_logprobs").iter().enumerate().skip(1) {
            assert_eq!(value.as_f64(), Some(-0.25 * (i + 1) as f64));
            let top = list("top_logprobs")[i].as_object().unwrap().clone();
            assert_eq!(
                top.values().map(|value| value.as_f64().unwrap()).fold(f64::MIN, f64::max),
                value.as_f64().unwrap()
            );
        }
        let text = choice["text"].as_str().unwrap();
        assert_eq!(list("tokens").iter().map(|token| token.as_str().unwrap()).collect::<String>(), text);
        let offsets: Vec<usize> = list("text_offset").iter().map(|at| at.as_u64().unwrap() as usize).collect();
        for (at, token) in offsets.iter().zip(list("tokens")) {
            assert!(text.chars().skip(*at).collect::<String>().starts_with(token.as_str().unwrap()));
        }
    }
    // Without new tokens.
    let mut none = body;
    none["max_tokens"] = 0.into();
    let answer = server.post("/v1/completions", none);
    let tokens = answer["choices"][1]["logprobs"]["tokens"].as_array().unwrap();
    assert_eq!((tokens.len(), answer["usage"]["completion_tokens"].as_u64()), (prompts[1].len(), Some(0)));
}

#[test]
fn streams_are_the_whole_answer_in_pieces() {
    let server = start(|_, _| {});
    let body = json!({"prompt": [TEXT, "two words"], "n": 2, "max_tokens": 9, "logprobs": 2, "echo": true, "seed": 3});
    let whole = server.post("/v1/completions", body.clone());
    let mut streamed = body;
    streamed["stream"] = true.into();
    streamed["stream_options"] = json!({"include_usage": true});
    let (events, done) = server.stream("/v1/completions", streamed);
    assert!(done && events.len() > 12, "it comes in pieces");
    for (index, choice) in whole["choices"].as_array().unwrap().iter().enumerate() {
        let pieces = || events.iter().flat_map(|e| e["choices"].as_array().unwrap()).filter(|c| c["index"] == index);
        let text: String = pieces().map(|piece| piece["text"].as_str().unwrap()).collect();
        assert_eq!(choice["text"], text);
        for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            let list: Vec<Value> =
                pieces().flat_map(|piece| piece["logprobs"][name].as_array().unwrap().clone()).collect();
            assert_eq!(choice["logprobs"][name], json!(list), "{name}");
        }
        let reasons: Vec<&Value> =
            pieces().map(|piece| &piece["finish_reason"]).filter(|reason| !reason.is_null()).collect();
        assert_eq!(reasons, [&choice["finish_reason"]]);
    }
    assert_eq!(events.last().unwrap()["usage"], whole["usage"]);
    assert_eq!(whole["choices"].as_array().unwrap().len(), 4);
    let seeds: Vec<u64> = server.log.0.lock().unwrap().0[..4].iter().map(|request| request.sampling.seed).collect();
    assert_eq!(seeds, [3, 4, 3, 4], "completions of a prompt have seeds of their own");
}

#[test]
fn chats_are_rendered_by_the_template() {
    let server = start(|_, _| {});
    let parts = json!([{"type": "text", "text": "a stone"}, {"type": "text", "text": "a sea"}]);
    let body = json!({"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}],
        "max_completion_tokens": 6, "logprobs": true, "top_logprobs": 2});
    let answer = server.post("/v1/chat/completions", body.clone());
    let prompt = tokenizer().encode("system: be brief\nuser: a stone\na sea\nassistant:").unwrap();
    assert_eq!(server.log.0.lock().unwrap().0[0].prompt, prompt);
    let choice = &answer["choices"][0];
    assert_eq!(
        (choice["message"]["role"].as_str(), choice["finish_reason"].as_str()),
        (Some("assistant"), Some("length"))
    );
    let text = choice["message"]["content"].as_str().unwrap();
    assert_eq!(text, tokenizer().decode(&prompt[..6]).unwrap());
    let content = choice["logprobs"]["content"].as_array().unwrap();
    assert_eq!((content.len(), content[0]["top_logprobs"].as_array().unwrap().len()), (6, 2));
    let mut streamed = body;
    streamed["stream"] = true.into();
    let (events, done) = server.stream("/v1/chat/completions", streamed);
    assert_eq!((done, &events[0]["choices"][0]["delta"]), (true, &json!({"role": "assistant", "content": ""})));
    assert_eq!(events[0]["object"], "chat.completion.chunk");
    let pieces = events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str());
    assert_eq!(pieces.collect::<String>(), text);
}

#[test]
fn a_stop_string_ends_text_and_work() {
    let server = start(|_, parrot| parrot.pause = Duration::from_millis(2));
    let body = json!({"prompt": TEXT, "max_tokens": 100, "stop": [" of"]});
    let answer = server.post("/v1/completions", body);
    assert_eq!(
        (&answer["choices"][0]["text"], &answer["choices"][0]["finish_reason"]),
        (&json!("a bird"), &json!("stop"))
    );
    let end = Instant::now() + Duration::from_secs(5);
    while server.log.0.lock().unwrap().1.is_empty() {
        assert!(Instant::now() < end, "the engine goes on after the stop string");
        sleep(Duration::from_millis(5));
    }
    // A stop token is no text.
    let sea = *tokenizer().encode(TEXT).unwrap().last().unwrap();
    let answer = server.post("/v1/completions", json!({"prompt": TEXT, "max_tokens": 100, "stop_token_ids": [sea]}));
    let choice = &answer["choices"][0];
    assert!(choice["finish_reason"] == "stop" && !choice["text"].as_str().unwrap().contains("sea"), "{choice}");
}

#[test]
fn wrong_requests_name_the_field() {
    let server = start(|_, _| {});
    let long = vec![5; MODEL_LEN];
    for (body, status, param) in [
        (json!({}), 400, "prompt"),
        (json!({"prompt": []}), 400, "prompt"),
        (json!({"prompt": [1, "a"]}), 400, "prompt"),
        (json!({"prompt": [[]]}), 400, "prompt"),
        (json!({"prompt": [9999]}), 400, "prompt"),
        (json!({"prompt": long}), 400, "prompt"),
        (json!({"prompt": "a", "max_tokens": MODEL_LEN}), 400, "max_tokens"),
        (json!({"prompt": "a", "max_tokens": 0}), 400, "max_tokens"),
        (json!({"prompt": "a", "max_tokens": "many"}), 400, "max_tokens"),
        (json!({"prompt": "a", "n": 0}), 400, "n"),
        (json!({"prompt": "a", "stop": 5}), 400, "stop"),
        (json!({"prompt": "a", "logit_bias": {"x": 1}}), 400, "logit_bias"),
        (json!({"prompt": "a", "logprobs": 1000}), 400, "logprobs"),
        (json!({"prompt": "a", "suffix": "b"}), 400, "suffix"),
        (json!({"prompt": "a", "stream_options": {}}), 400, "stream_options"),
        (json!({"prompt": "a", "model": "other"}), 404, "model"),
    ] {
        let (got, error) = server.refused("/v1/completions", &body);
        assert_eq!((got, error["param"].as_str()), (status, Some(param)), "{body}: {error}");
        assert_eq!(error["type"], "invalid_request_error");
    }
    let (status, error) = server.refused("/v1/completions", &json!({"prompt": "a", "top_p": 2}));
    assert!(status == 400 && error["message"].as_str().unwrap().contains("top-p is 2"), "{error}");
    for body in [
        json!({}),
        json!({"messages": "hi"}),
        json!({"messages": [{"content": "hi"}]}),
        json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ] {
        assert_eq!(server.refused("/v1/chat/completions", &body).1["param"], "messages", "{body}");
    }
    assert_eq!(server.refused("/v1/none", &json!({})).0, 404);
    assert_eq!(server.call("/v1/completions", None, None).0, 405);
    let mut client = TcpStream::connect(server.address).unwrap();
    write!(client, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n").unwrap();
    let status = BufReader::new(client).lines().next().unwrap().unwrap();
    assert!(status.contains("413"), "{status}");
}

#[test]
fn too_many_requests_are_turned_away() {
    let server = start(|options, parrot| {
        (options.max_requests, parrot.pause) = (2, Duration::from_millis(20));
    });
    let body = json!({"prompt": TEXT, "max_tokens": 60, "n": 2});
    std::thread::scope(|scope| {
        scope.spawn(|| server.post("/v1/completions", body.clone()));
        let end = Instant::now() + Duration::from_secs(5);
        while server.log.0.lock().unwrap().0.len() < 2 {
            assert!(Instant::now() < end);
            sleep(Duration::from_millis(2));
        }
        let (status, error) = server.refused("/v1/completions", &json!({"prompt": "a"}));
        assert_eq!((status, error["type"].as_str()), (429, Some("rate_limit_error")));
    });
    server.post("/v1/completions", json!({"prompt": "a"}));
}

#[test]
fn keys_are_checked() {
    let server = start(|options, _| options.api_key = Some("secret".into()));
    let body = json!({"prompt": "a", "max_tokens": 1});
    for (key, status) in [(None, 401), (Some("wrong"), 401), (Some("secret"), 200)] {
        assert_eq!(server.call("/v1/completions", Some(&body), key).0, status, "{key:?}");
        assert_eq!(server.call("/v1/models", None, key).0, status, "{key:?}");
    }
    assert_eq!(server.call("/health", None, None).0, 200, "a load balancer has no key");
}

#[test]
fn a_client_that_leaves_ends_its_work() {
    let server = start(|_, parrot| parrot.pause = Duration::from_millis(10));
    for stream in [true, false] {
        let body = json!({"prompt": TEXT, "max_tokens": 150, "stream": stream}).to_string();
        let mut client = TcpStream::connect(server.address).unwrap();
        write!(client, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len())
            .unwrap();
        if stream {
            let mut lines = BufReader::new(&client).lines();
            assert!(
                lines.by_ref().map_while(Result::ok).any(|line| line.starts_with("data: {")),
                "the answer has begun"
            );
        } else {
            sleep(Duration::from_millis(100));
        }
        drop(client);
        let (end, expected) = (Instant::now() + Duration::from_millis(1400), if stream { 1 } else { 2 });
        while server.log.0.lock().unwrap().1.len() < expected {
            assert!(Instant::now() < end, "the engine goes on for nobody; stream: {stream}");
            sleep(Duration::from_millis(5));
        }
    }
}

#[test]
fn metrics_count_requests_and_times() {
    let server = start(|_, _| {});
    server.post("/v1/completions", json!({"prompt": "a", "max_tokens": 3}));
    server.refused("/v1/completions", &json!({}));
    let (_, text) = server.call("/metrics", None, None);
    for line in [
        "ottava_requests_total{path=\"/v1/completions\",status=\"200\"} 1",
        "ottava_requests_total{path=\"/v1/completions\",status=\"400\"} 1",
        "ottava_time_to_first_token_seconds_count 1",
        "ottava_e2e_request_latency_seconds_count 1",
        "ottava_kv_cache_usage_ratio 0.25",
        "ottava_generation_tokens_total 0",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
    }
}

#[test]
fn a_failed_engine_ends_the_server() {
    let server = start(|_, parrot| parrot.fails = true);
    let (status, error) = server.refused("/v1/completions", &json!({"prompt": "a"}));
    assert!(status == 500 && error["message"].as_str().unwrap().contains("a logit is NaN"), "{error}");
    let ended = server.thread.join().unwrap();
    assert!(ended.unwrap_err().to_string().contains("a logit is NaN"));
}
