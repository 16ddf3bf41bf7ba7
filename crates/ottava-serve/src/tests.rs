//! Tests the server over HTTP. A stand-in for the engine repeats the prompts.

mod adapters;
mod anthropic;
mod cases;
mod clients;
mod embeddings;
mod reasoning;
mod refusals;
mod responses;
mod texts;
mod token_ids;
mod tools;

use crate::backend::Backend;
use crate::server::{Model, NamedAdapter, Options, serve};
use ottava_data::{ChatTemplate, Clock, Tokenizer};
use ottava_engine::{
    AdapterId, EngineStats, Event, FinishReason, LoadAdapters, Pooling, Request, RequestId, Sampling, TokenLogprob,
};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};

const MODEL_LEN: usize = 200;

/// A stand-in for the engine. It draws the tokens of the prompt again and again, one per step. The log-probabilities are functions of position and
/// token.
struct Parrot {
    running: BTreeMap<RequestId, (Request, usize)>,
    held: BTreeMap<RequestId, (Request, usize)>,
    log: Log,
    steps: usize,
    max_batch: usize,
    /// The duration of each step.
    pause: Duration,
    fails: Option<Failure>,
}

#[derive(Clone, Copy)]
enum Failure {
    Error,
    Panic,
    /// An error: the grammars of all completions allow no further token.
    Stuck,
}

/// The calls that the stand-in has received.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Asked>>);

#[derive(Default)]
struct Asked {
    requests: Vec<Request>,
    /// The number of steps before each of these cancellations.
    steps: Vec<usize>,
    cancelled: Vec<RequestId>,
    /// The number of times a completion was held.
    holds: usize,
    /// The number of adapters that were loaded, and the adapters that were freed.
    loaded: usize,
    removed: Vec<AdapterId>,
}

impl Log {
    fn get<T>(&self, get: impl FnOnce(&Asked) -> T) -> T {
        get(&self.0.lock().unwrap())
    }

    /// Waits until `done` returns true.
    fn wait(&self, what: &str, done: impl Fn(&Asked) -> bool) {
        let end = Instant::now() + Duration::from_secs(10);
        while !self.get(&done) {
            assert!(Instant::now() < end, "{what}");
            sleep(Duration::from_millis(2));
        }
    }
}

fn logprob(place: usize, token: u32, top: usize) -> TokenLogprob {
    let value = -0.25 * (place + 1) as f32;
    let top = [(token, value), (7, value - 1.0), (8, f32::NEG_INFINITY)].into_iter().take(top).collect();
    TokenLogprob { token, logprob: value, top }
}

impl Backend for Parrot {
    fn add(&mut self, request: Request) -> ottava_common::Result<RequestId> {
        let mut log = self.log.0.lock().unwrap();
        let id = RequestId(log.requests.len() as u64);
        log.requests.push(request.clone());
        log.steps.push(self.steps);
        self.running.insert(id, (request, 0));
        Ok(id)
    }

    fn cancel(&mut self, id: RequestId) {
        if self.running.remove(&id).or(self.held.remove(&id)).is_some() {
            self.log.0.lock().unwrap().cancelled.push(id);
        }
    }

    fn hold(&mut self, id: RequestId) {
        self.held.extend(self.running.remove_entry(&id));
        self.log.0.lock().unwrap().holds += 1;
    }

    fn resume(&mut self, id: RequestId) {
        self.running.extend(self.held.remove_entry(&id));
    }

    fn max_batch(&self) -> usize {
        self.max_batch
    }

    fn step(&mut self) -> ottava_common::Result<Vec<Event>> {
        sleep(self.pause);
        match self.fails {
            Some(Failure::Error) => return Err(ottava_common::Error::NonFinite("a logit is NaN".into())),
            Some(Failure::Panic) => panic!("the parrot has flown"),
            Some(Failure::Stuck) | None => self.steps += 1,
        }
        let mut events = Vec::new();
        let mut done = Vec::new();
        for (&id, (request, drawn)) in &mut self.running {
            let prompt = &request.prompt;
            if request.pooling.is_some() {
                // The embeddings are not returned in the order of their requests.
                let values = vec![prompt.len() as f32, prompt[0] as f32, -0.1, 1e-7];
                events.insert(0, Event::Finished { id, reason: FinishReason::Length, cached_tokens: 0 });
                events.insert(0, Event::Embedding { id, values });
                done.push(id);
                continue;
            }
            if let (0, Some(top)) = (*drawn, request.prompt_logprobs) {
                let of_token = |(i, &token): (usize, &u32)| (i > 0).then(|| logprob(i, token, top));
                events.push(Event::Prompt { id, logprobs: prompt.iter().enumerate().map(of_token).collect() });
            }
            let token = prompt[*drawn % prompt.len()];
            let place = prompt.len() + *drawn;
            let of_token = request.logprobs.map(|top| logprob(place, token, top));
            events.push(Event::Token { id, token, logprob: of_token, cached_tokens: 1 });
            *drawn += 1;
            let stops = request.stop_ids.contains(&token);
            if matches!(self.fails, Some(Failure::Stuck)) {
                events.push(Event::Finished { id, reason: FinishReason::Stuck, cached_tokens: 0 });
                done.push(id);
            } else if stops || *drawn == request.max_new_tokens {
                let reason = if stops { FinishReason::Stop } else { FinishReason::Length };
                events.push(Event::Finished { id, reason, cached_tokens: 1 });
                done.push(id);
            }
        }
        done.iter().for_each(|id| drop(self.running.remove(id)));
        Ok(events)
    }

    fn is_idle(&self) -> bool {
        self.running.is_empty()
    }

    fn load_adapters(&mut self, _: LoadAdapters) -> ottava_common::Result<AdapterId> {
        let mut log = self.log.0.lock().unwrap();
        log.loaded += 1;
        Ok(AdapterId(log.loaded - 1))
    }

    fn remove_adapters(&mut self, id: AdapterId) {
        assert!(self.running.values().all(|(request, _)| request.adapter != Some(id)), "it is in use");
        self.log.0.lock().unwrap().removed.push(id);
    }

    fn stats(&self) -> EngineStats {
        EngineStats { running: self.running.len(), kv_blocks: 4, used_kv_blocks: 1, ..EngineStats::default() }
    }
}

/// A server that runs as long as the test process.
struct Server {
    address: SocketAddr,
    log: Log,
    thread: JoinHandle<ottava_common::Result<()>>,
}

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tokenizer")
}

fn tokenizer() -> Tokenizer {
    Tokenizer::load(&data()).unwrap()
}

fn template() -> ChatTemplate {
    template_of("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:")
}

fn template_of(text: &str) -> ChatTemplate {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    ChatTemplate::load(&data(), Some(file.path()), Clock::Now).unwrap().unwrap()
}

fn start(change: impl FnOnce(&mut Options, &mut Parrot)) -> Server {
    start_with(change, |_| {})
}

fn start_with(
    change: impl FnOnce(&mut Options, &mut Parrot),
    change_model: impl FnOnce(&mut Model) + Send + 'static,
) -> Server {
    let mut options = Options {
        address: "127.0.0.1:0".parse().unwrap(),
        names: vec!["parrot".into()],
        max_requests: 8,
        max_connections: 64,
        client_timeout: Duration::from_secs(10),
        api_key: None,
        shutdown_timeout: Duration::from_secs(5),
        allowed_origins: Vec::new(),
        strict: false,
    };
    let (running, held, log, pause) = (BTreeMap::new(), BTreeMap::new(), Log::default(), Duration::ZERO);
    let mut parrot = Parrot { running, held, log, pause, steps: 0, max_batch: 1000, fails: None };
    change(&mut options, &mut parrot);
    let (log, (sender, receiver), template) = (parrot.log.clone(), channel(), Some(template()));
    let (vocabulary, channels, pooling) = (4096, 4, Pooling::Mean);
    let (max_model_len, sampling) = (MODEL_LEN, Sampling::unchanged());
    let load = move || {
        let (tokenizer, tool_call_parser) = (tokenizer(), None);
        let (root, adapters) = ("birds/parrot".into(), Vec::new());
        let mut model = Model {
            root,
            adapters,
            open_adapters: None,
            tokenizer,
            template,
            tool_call_parser,
            reasoning_parser: None,
            vocabulary,
            channels,
            pooling,
            is_encoder: false,
            classifier: None,
            max_model_len,
            sampling,
        };
        change_model(&mut model);
        Ok((parrot, model))
    };
    let thread = std::thread::spawn(move || serve(&options, load, |address| sender.send(address).unwrap()));
    Server { address: receiver.recv().unwrap(), log, thread }
}

/// A client that returns answers of any status.
fn agent() -> ureq::Agent {
    ureq::Agent::config_builder().http_status_as_error(false).build().into()
}

impl Server {
    /// Sends a request, and returns the status and the body of the answer.
    fn call(&self, path: &str, body: Option<&Value>, key: Option<&str>) -> (u16, String) {
        let agent = agent();
        let url = format!("http://{}{path}", self.address);
        let with_key = key.map_or_else(String::new, |key| format!("Bearer {key}"));
        let mut response = match body {
            Some(body) => {
                let post = agent.post(url).header("Authorization", with_key).header("Content-Type", "application/json");
                post.send(body.to_string()).unwrap()
            }
            None => agent.get(url).header("Authorization", with_key).call().unwrap(),
        };
        (response.status().as_u16(), response.body_mut().read_to_string().unwrap())
    }

    fn post(&self, path: &str, body: Value) -> Value {
        let (status, text) = self.call(path, Some(&body), None);
        assert_eq!(status, 200, "{text}");
        serde_json::from_str(&text).unwrap()
    }

    /// Returns the events of a streamed answer, and whether it ended with `[DONE]`.
    fn stream(&self, path: &str, body: Value) -> (Vec<Value>, bool) {
        let (status, text) = self.call(path, Some(&body), None);
        assert_eq!(status, 200, "{text}");
        let lines: Vec<&str> = text.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
        let done = lines.last() == Some(&"[DONE]");
        let events = &lines[..lines.len() - usize::from(done)];
        (events.iter().map(|event| serde_json::from_str(event).unwrap()).collect(), done)
    }

    /// Opens a connection and sends `bytes`.
    fn send(&self, bytes: &[u8]) -> TcpStream {
        let mut client = TcpStream::connect(self.address).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        client.write_all(bytes).unwrap();
        client
    }

    /// Returns the head and the body of a request.
    fn request(&self, path: &str, body: &Value) -> Vec<u8> {
        let (body, host) = (body.to_string(), self.address);
        let length = body.len();
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        );
        (head + &body).into_bytes()
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
    let answer = server.post(
        "/v1/completions",
        json!({"model": "parrot", "prompt": TEXT, "max_tokens": ids.len(), "user": "me", "whatever": null}),
    );
    assert_eq!((answer["object"].as_str(), answer["model"].as_str()), (Some("text_completion"), Some("parrot")));
    assert!(answer["id"].as_str().unwrap().starts_with("cmpl-") && answer["created"].as_u64().unwrap() > 1_700_000_000);
    let choice = json!({"index": 0, "text": tokenizer().decode(&ids).unwrap(), "logprobs": null, "finish_reason": "length",
            "stop_reason": null});
    assert_eq!(answer["choices"], json!([choice]));
    let usage = json!({"prompt_tokens": ids.len(), "completion_tokens": ids.len(), "total_tokens": 2 * ids.len(),
        "prompt_tokens_details": {"cached_tokens": 1}});
    assert_eq!(answer["usage"], usage);
    let models = server.call("/v1/models", None, None);
    assert!(models.0 == 200 && models.1.contains("\"parrot\""), "{models:?}");
    assert_eq!(server.call("/health", None, None).0, 200);
}

/// Tests the request that lm-eval's `local-completions` sends, and the fields that it reads.
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
    // The same request without new tokens.
    let mut none = body;
    none["max_tokens"] = 0.into();
    let answer = server.post("/v1/completions", none);
    let tokens = answer["choices"][1]["logprobs"]["tokens"].as_array().unwrap();
    assert_eq!((tokens.len(), answer["usage"]["completion_tokens"].as_u64()), (prompts[1].len(), Some(0)));
}

/// If a token is only a part of a character, it decodes to a replacement character, but the text has no replacement character.
#[test]
fn text_offsets_count_characters_of_the_text() {
    let server = start(|_, _| {});
    let prompt = tokenizer().encode("a 🎼 b 日 c").unwrap();
    let body = json!({"prompt": prompt, "max_tokens": prompt.len(), "logprobs": 0, "echo": true});
    let choice = server.post("/v1/completions", body)["choices"][0].clone();
    let (text, lists) = (choice["text"].as_str().unwrap(), &choice["logprobs"]);
    let tokens = lists["tokens"].as_array().unwrap().iter().map(|token| token.as_str().unwrap());
    let offsets = lists["text_offset"].as_array().unwrap().iter().map(|at| at.as_u64().unwrap() as usize);
    assert!(tokens.clone().any(|token| token.contains(char::REPLACEMENT_CHARACTER)), "{lists}");
    for (token, at) in tokens.zip(offsets).filter(|(token, _)| !token.contains(char::REPLACEMENT_CHARACTER)) {
        assert!(text.chars().skip(at).collect::<String>().starts_with(token), "{token:?} at {at} of {text:?}");
    }
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
    assert!(events[0].get("usage").is_none());
    assert_eq!(whole["choices"].as_array().unwrap().len(), 4);
    let seeds: Vec<u64> =
        server.log.get(|log| log.requests.iter().map(|request| request.sampling.seed).take(4).collect());
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
    assert_eq!(server.log.get(|log| log.requests[0].prompt.clone()), prompt);
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
    server.log.wait("the engine goes on after the stop string", |log| !log.cancelled.is_empty());
    // A stop token is not part of the text.
    let sea = *tokenizer().encode(TEXT).unwrap().last().unwrap();
    let answer = server.post("/v1/completions", json!({"prompt": TEXT, "max_tokens": 100, "stop_token_ids": [sea]}));
    let choice = &answer["choices"][0];
    assert!(choice["finish_reason"] == "stop" && !choice["text"].as_str().unwrap().contains("sea"), "{choice}");
}

#[test]
fn metrics_count_requests_and_times() {
    let server = start(|_, _| {});
    server.post("/v1/completions", json!({"prompt": "a", "max_tokens": 3}));
    server.refused("/v1/completions", &json!({}));
    let (_, text) = server.call("/metrics", None, None);
    for line in [
        "ottava:http_requests_total{path=\"/v1/completions\",status=\"200\"} 1",
        "ottava:http_requests_total{path=\"/v1/completions\",status=\"400\"} 1",
        "ottava:time_to_first_token_seconds_count 1",
        "ottava:e2e_request_latency_seconds_count 1",
        "ottava:kv_cache_usage_perc 0.25",
        "ottava:generation_tokens_total 0",
        "ottava:num_preemptions_total 0",
        "ottava:spec_decode_num_drafts_total 0",
        "ottava:spec_decode_num_draft_tokens_total 0",
        "ottava:spec_decode_num_accepted_tokens_total 0",
        "ottava:request_time_per_output_token_seconds_count 1",
        "ottava:inter_token_latency_seconds_count 2",
        "ottava:request_decode_time_seconds_count 1",
        "ottava:request_success_total{finished_reason=\"length\"} 1",
        "ottava:request_prompt_tokens_sum 1.0",
        "ottava:request_generation_tokens_sum 3.0",
        "ottava:request_params_max_tokens_sum 3.0",
        "ottava:request_params_n_sum 1.0",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
    }
    // Other tests in this process also prepare requests, so the value varies.
    assert!(text.contains("\nottava:num_requests_preparing "), "{text}");
}

/// The stand-in ignores adapters when it repeats prompts; its log shows which adapter was requested.
#[test]
fn requests_choose_adapters_by_name() {
    let adapter = |(number, name): (usize, &str)| NamedAdapter {
        name: name.into(),
        root: format!("adapters/{name}"),
        id: AdapterId(number),
    };
    let server = start_with(
        |_, _| {},
        move |model| model.adapters = ["sql", "gull"].into_iter().enumerate().map(adapter).collect(),
    );
    let (status, text) = server.call("/v1/models", None, None);
    let models: Value = serde_json::from_str(&text).unwrap();
    let of = |model: &Value| ["id", "root", "parent"].map(|key| model[key].as_str().map(str::to_string));
    let expected = [
        ("parrot", "birds/parrot", None),
        ("sql", "adapters/sql", Some("parrot")),
        ("gull", "adapters/gull", Some("parrot")),
    ];
    let expected =
        expected.map(|(id, root, parent)| [Some(id), Some(root), parent].map(|text| text.map(str::to_string)));
    assert_eq!(status, 200);
    assert_eq!(models["data"].as_array().unwrap().iter().map(of).collect::<Vec<_>>(), expected);
    let one = server.call("/v1/models/gull", None, None).1;
    assert_eq!(serde_json::from_str::<Value>(&one).unwrap(), models["data"][2]);

    let chat = json!([{"role": "user", "content": "a"}]);
    for (model, id) in [(json!("parrot"), None), (json!("gull"), Some(1)), (json!("sql"), Some(0)), (Value::Null, None)]
    {
        let name = model.as_str().unwrap_or("parrot");
        for (path, mut body) in [
            ("/v1/completions", json!({"prompt": [TEXT, "b"], "n": 2, "max_tokens": 2})),
            ("/v1/chat/completions", json!({"messages": chat, "max_tokens": 2})),
        ] {
            body["model"] = model.clone();
            let before = server.log.get(|log| log.requests.len());
            assert_eq!(server.post(path, body.clone())["model"], name);
            body["stream"] = true.into();
            assert!(server.stream(path, body).0.iter().all(|event| event["model"] == name));
            let adapters: Vec<_> =
                server.log.get(|log| log.requests[before..].iter().map(|request| request.adapter).collect());
            assert!(
                adapters.len() >= 2 && adapters.iter().all(|adapter| *adapter == id.map(AdapterId)),
                "{adapters:?}"
            );
        }
        server.post("/tokenize", json!({"model": model, "prompt": TEXT}));
    }
    let (status, error) = server.refused("/v1/completions", &json!({"model": "owl", "prompt": TEXT}));
    assert_eq!((status, error["code"].as_str()), (404, Some("model_not_found")));
    assert!(error["message"].as_str().unwrap().contains("this server has `parrot`, `sql`, `gull`"), "{error}");
}

#[test]
fn paths_names_and_ids_are_those_that_clients_of_other_servers_use() {
    let server = start(|options, _| options.names = vec!["parrot".into(), "macaw".into()]);
    let body = json!({"prompt": "a", "max_tokens": 1, "model": "macaw"});
    assert_eq!(server.post("/completions", body.clone())["model"], "macaw");
    let models: Value = serde_json::from_str(&server.call("/models", None, None).1).unwrap();
    assert_eq!([&models["data"][0]["id"], &models["data"][1]["id"]], ["parrot", "macaw"]);
    for (path, has) in [("/ping", "ok"), ("/load", "server_load"), ("/models/macaw", "macaw")] {
        let (status, text) = server.call(path, None, None);
        assert!(status == 200 && text.contains(has), "{path}: {status} {text}");
    }
    let (_, metrics) = server.call("/metrics", None, None);
    for line in [
        "{path=\"/v1/completions\",status=\"200\"} 1",
        "{path=\"/v1/models\",status=\"200\"} 1",
        "{path=\"/health\",status=\"200\"} 1",
    ] {
        assert!(metrics.contains(line), "{line} is missing in\n{metrics}");
    }
    let agent = agent();
    let id_of = |sent: Option<&str>| {
        let mut get = agent.get(format!("http://{}/v1/models", server.address));
        if let Some(id) = sent {
            get = get.header("x-request-id", id);
        }
        get.call().unwrap().headers()["x-request-id"].to_str().unwrap().to_string()
    };
    assert_eq!(id_of(Some("mine")), "mine");
    assert!(id_of(None).starts_with("req_") && id_of(None) != id_of(Some(&"x".repeat(200))));
}
