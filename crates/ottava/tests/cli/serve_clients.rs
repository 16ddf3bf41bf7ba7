//! Tests requests that clients of OpenAI's API and of vLLM send, with a real model.

use crate::serve::{Server, request};
use crate::setup::Run;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::path::Path;

/// Creates a model with a chat template and the bundled tokenizer, whose tokens have several bytes.
fn run() -> Run {
    let run = Run::new();
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tokenizer/tokenizer.json");
    run.write("model/tokenizer.json", &std::fs::read(tokenizer).unwrap());
    let template = "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}{% for m in messages %}{{ m.content }}\n{% endfor %}{{ mood }}";
    run.write("model/chat_template.jinja", template.as_bytes());
    run.replace("model/config.json", "\"vocab_size\": 100", "\"vocab_size\": 4096");
    run.replace("model/config.json", "\"max_position_embeddings\": 64", "\"max_position_embeddings\": 256");
    run
}

/// Returns the head and the body of the answer to a request.
fn ask(server: &Server, request: &[u8]) -> (String, String) {
    let (mut client, mut text) = (server.connect(), String::new());
    client.write_all(request).unwrap();
    client.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head.to_string(), body.to_string())
}

fn get(server: &Server, path: &str) -> (String, Value) {
    let (head, body) =
        ask(server, format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").as_bytes());
    (head, serde_json::from_str(&body).unwrap_or_default())
}

#[test]
fn tokens_models_and_versions_have_the_shapes_of_vllm() {
    let run = run();
    let server = Server::start(&run, &["--served-model-name", "org/otter"]);
    let text = "a sea otter 🦦\n";
    let tokens = server.post("/tokenize", json!({"model": "org/otter", "prompt": text, "return_token_strs": true}));
    let ids = tokens["tokens"].as_array().unwrap();
    assert_eq!((tokens["count"].as_u64(), tokens["max_model_len"].as_u64()), (Some(ids.len() as u64), Some(256)));
    assert_eq!(tokens["token_strs"].as_array().unwrap().len(), ids.len());
    assert_eq!(server.post("/detokenize", json!({"tokens": ids})), json!({"prompt": text}));
    // A conversation with a tool and a variable of the template.
    let chat = json!({"messages": [{"role": "user", "content": "hello"}], "chat_template_kwargs": {"mood": "calm"},
        "tools": [{"type": "function", "function": {"name": "dive"}}]});
    let rendered = server.post("/tokenize", chat.clone());
    assert!(rendered["token_strs"].is_null());
    assert_eq!(server.post("/detokenize", json!({"tokens": rendered["tokens"]}))["prompt"], "dive\nhello\ncalm");
    let mut answered = chat;
    answered["max_tokens"] = 1.into();
    assert_eq!(server.post("/v1/chat/completions", answered)["usage"]["prompt_tokens"], rendered["count"]);
    for (path, body) in [
        ("/tokenize", json!({"prompt": ["a", "b"]})),
        ("/tokenize", json!({"prompt": "a", "messages": []})),
        ("/detokenize", json!({"tokens": [4096]})),
        ("/detokenize", json!({"tokens": "a"})),
        ("/detokenize", json!({"tokens": [1], "model": "other"})),
    ] {
        let (head, _) = ask(&server, &request(path, body.to_string().as_bytes()));
        assert!(head.starts_with("HTTP/1.1 40"), "{path} {body}: {head}");
    }
    for path in ["/v1/models/org/otter", "/v1/models/org%2Fotter"] {
        let (head, model) = get(&server, path);
        assert!(
            head.starts_with("HTTP/1.1 200") && model["id"] == "org/otter" && model["object"] == "model",
            "{model}"
        );
    }
    let (head, error) = get(&server, "/v1/models/other");
    assert!(head.starts_with("HTTP/1.1 404") && error["error"]["code"] == "model_not_found", "{error}");
    assert_eq!(get(&server, "/version").1["version"], env!("CARGO_PKG_VERSION"));
}

#[test]
fn pages_of_allowed_origins_may_ask() {
    let run = run();
    let arguments = ["--allowed-origin", "https://chat.example", "--allowed-origin", "http://localhost:3000"];
    let server = Server::start(&run, &[&arguments[..], &["--api-key", "secret"]].concat());
    let preflight = |origin: &str| {
        let head = format!(
            "OPTIONS /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nOrigin: {origin}\r\n\
             Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization,x-stainless-os\r\n\r\n"
        );
        ask(&server, head.as_bytes()).0.to_ascii_lowercase()
    };
    for origin in ["https://chat.example", "http://localhost:3000"] {
        let answer = preflight(origin);
        assert!(answer.starts_with("http/1.1 204"), "{answer}");
        assert!(answer.contains(&format!("access-control-allow-origin: {origin}\r\n")), "{answer}");
        assert!(answer.contains("access-control-allow-headers: authorization,x-stainless-os"), "{answer}");
        assert!(answer.contains("access-control-allow-methods: get, post, delete, options"), "{answer}");
    }
    assert!(!preflight("https://other.example").contains("access-control"));
    // The request itself still needs the key, and pages can read the error.
    for (key, status) in [("wrong", "401"), ("secret", "200")] {
        let body = br#"{"prompt": "a", "max_tokens": 1}"#;
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nOrigin: https://chat.example\r\n\
             Content-Type: application/json\r\nAuthorization: Bearer {key}\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        let (head, _) = ask(&server, &[head.as_bytes(), body].concat());
        assert!(head.contains(status) && head.contains("access-control-allow-origin: https://chat.example"), "{head}");
    }
    run.fail(&["serve", "model", "--allowed-origin", "chat.example"], 1, &["`chat.example` is no origin"]);
}

#[test]
fn the_folder_suggests_sampling() {
    let run = run();
    run.write("model/generation_config.json", br#"{"top_k": 1, "do_sample": true}"#);
    let texts = |more: &[&str], body: Value| {
        let answer = Server::start(&run, more).post("/v1/completions", body);
        answer["choices"].as_array().unwrap().iter().map(|choice| choice["text"].to_string()).collect::<Vec<_>>()
    };
    let body = |sampling: Value| {
        let mut body = json!({"prompt": "line 4", "max_tokens": 12, "n": 3, "seed": 1, "ignore_eos": true});
        body.as_object_mut().unwrap().extend(sampling.as_object().unwrap().clone());
        body
    };
    let greedy = texts(&[], body(json!({"temperature": 0})));
    assert_eq!(texts(&[], body(json!({}))), greedy, "of one token, the likeliest");
    assert_ne!(texts(&[], body(json!({"top_k": -1}))), greedy, "the request goes first");
    assert_ne!(texts(&["--generation-config", "none"], body(json!({}))), greedy);
}

#[test]
fn the_best_of_several_completions_are_returned() {
    let run = run();
    let server = Server::start(&run, &[]);
    let body = |n: usize, more: Value| {
        let mut body = json!({"prompt": ["line 4", "a"], "max_tokens": 6, "n": n, "seed": 7, "ignore_eos": true});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/completions", body)
    };
    let all = body(5, json!({"logprobs": 0}));
    let all = all["choices"].as_array().unwrap();
    let mean = |choice: &Value| {
        let logprobs = choice["logprobs"]["token_logprobs"].as_array().unwrap();
        logprobs.iter().map(|logprob| logprob.as_f64().unwrap()).sum::<f64>() / logprobs.len() as f64
    };
    let mut expected = Vec::new();
    for of_prompt in all.chunks(5) {
        let mut sorted: Vec<&Value> = of_prompt.iter().collect();
        sorted.sort_by(|a, b| mean(b).total_cmp(&mean(a)));
        expected.extend(sorted[..2].iter().map(|choice| choice["text"].clone()));
    }
    let best = body(2, json!({"best_of": 5}));
    let choices = best["choices"].as_array().unwrap();
    assert_eq!(choices.iter().map(|choice| choice["text"].clone()).collect::<Vec<_>>(), expected);
    assert!(choices.iter().enumerate().all(|(at, c)| c["index"] == at && c["logprobs"].is_null()), "{best}");
    assert_eq!(best["usage"]["completion_tokens"], 60, "all tokens are paid for");
}

/// A random model draws completions at temperature 1, in batches, with a cache that is too small for them.
#[test]
fn all_draws_are_valid_by_their_schema() {
    let run = run();
    let server = Server::start(&run, &["--max-num-seqs", "8", "--kv-cache-tokens", "416"]);
    let schema = json!({"type": "object", "required": ["name", "ok", "at"], "additionalProperties": false,
        "properties": {"name": {"type": "string", "maxLength": 3}, "ok": {"type": "boolean"},
            "at": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 1, "maxItems": 3}}});
    let format = json!({"type": "json_schema", "json_schema": {"name": "otter", "strict": true, "schema": schema}});
    let valid = |text: &str| {
        let Ok(value) = serde_json::from_str::<Value>(text) else { return false };
        let at = value["at"].as_array().map_or(&[][..], |at| &at[..]);
        value.as_object().is_some_and(|object| object.len() == 3)
            && value["name"].as_str().is_some_and(|name| name.chars().count() <= 3)
            && value["ok"].is_boolean()
            && (1..=3).contains(&at.len())
            && at.iter().all(|at| at.as_u64().is_some_and(|at| at < 100))
    };
    let prompt = json!([{"role": "user", "content": "an otter, please"}]);
    let body = json!({"messages": prompt, "n": 100, "seed": 1, "response_format": format, "max_tokens": 120});
    let (mut complete, mut texts) = (0, Vec::new());
    for seed in [1, 1000] {
        let mut body = body.clone();
        body["seed"] = seed.into();
        let answer = server.post("/v1/chat/completions", body);
        for choice in answer["choices"].as_array().unwrap() {
            let text = choice["message"]["content"].as_str().unwrap();
            assert_eq!(choice["finish_reason"], "stop", "{choice}");
            assert!(valid(text), "{text}");
            (complete, texts) = (complete + 1, [texts, vec![text.to_string()]].concat());
        }
    }
    texts.sort();
    texts.dedup();
    assert!(complete == 200 && texts.len() > 150, "{} different ones of {complete}", texts.len());
    let metrics = ask(&server, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").1;
    let preemptions = metrics.lines().find_map(|line| line.strip_prefix("ottava:num_preemptions_total "));
    assert!(preemptions.is_some_and(|count| count != "0"), "{metrics}");
    // A stream with log-probabilities has the same completions.
    let mut streamed = body.clone();
    streamed["n"] = 2.into();
    let whole = server.post("/v1/chat/completions", streamed.clone());
    streamed["stream"] = true.into();
    streamed["logprobs"] = true.into();
    let (_, events) = ask(&server, &request("/v1/chat/completions", streamed.to_string().as_bytes()));
    for index in 0..2 {
        let pieces = events.lines().filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok());
        let content = pieces.filter(|piece| piece["choices"][0]["index"] == index);
        let content: String =
            content.filter_map(|piece| Some(piece["choices"][0]["delta"]["content"].as_str()?.to_string())).collect();
        assert_eq!(whole["choices"][index]["message"]["content"], content);
    }
    // A stop string ends the text before the schema is satisfied, and too few tokens truncate it.
    let mut stopped = body.clone();
    stopped["n"] = 1.into();
    stopped["stop"] = "\"ok\"".into();
    let text = server.post("/v1/chat/completions", stopped)["choices"][0]["message"]["content"].clone();
    assert!(text.as_str().unwrap().starts_with("{\"name\": \"") && !text.as_str().unwrap().contains("ok\""), "{text}");
    let mut short = body;
    short["n"] = 1.into();
    short["max_tokens"] = 4.into();
    assert_eq!(server.post("/v1/chat/completions", short)["choices"][0]["finish_reason"], "length");
    // Further constraints: vLLM's fields, and any JSON object.
    for (name, value, expected) in [
        ("structured_outputs", json!({"choice": ["yes", "no"]}), "yes no"),
        ("guided_choice", json!(["yes", "no"]), "yes no"),
        ("guided_regex", json!("[0-4]"), "0 1 2 3 4"),
    ] {
        let body = json!({"prompt": "a", "max_tokens": 20, "n": 5, name: value});
        let answer = server.post("/v1/completions", body);
        for choice in answer["choices"].as_array().unwrap() {
            let text = choice["text"].as_str().unwrap();
            assert!(
                expected.split(' ').any(|expected| expected == text) && choice["finish_reason"] == "stop",
                "{choice}"
            );
        }
    }
    let body = json!({"prompt": "a", "max_tokens": 30, "response_format": {"type": "json_object"}});
    let text = server.post("/v1/completions", body)["choices"][0]["text"].clone();
    assert!(text.as_str().unwrap().starts_with('{'), "{text}");
}

/// Prompts with the same beginning are computed once, and give the same texts as without the cache.
#[test]
fn prompts_that_begin_alike_share_the_cache() {
    let run = run();
    let body = |tail: &str| json!({"prompt": format!("{}{tail}", "line 4 of the text\n".repeat(8)), "max_tokens": 8, "seed": 3, "logprobs": 1});
    let hits = |server: &Server| {
        let text = ask(server, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").1;
        let value = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
        (value("ottava:prefix_cache_hits_total"), value("ottava:prefix_cache_queries_total"))
    };
    let answers = |server: &Server| ["a", "b", "a"].map(|tail| server.post("/v1/completions", body(tail)));
    let texts = |answers: &[Value; 3]| answers.each_ref().map(|answer| answer["choices"][0].clone());
    let cached = |answers: &[Value; 3]| {
        answers.each_ref().map(|answer| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap())
    };
    let (shared, computed) = (Server::start(&run, &[]), Server::start(&run, &["--no-enable-prefix-caching"]));
    let (with, without) = (answers(&shared), answers(&computed));
    assert_eq!(texts(&with), texts(&without));
    let (Some(found), Some(all)) = hits(&shared) else { panic!("no metrics") };
    assert!(found >= 64 && found < all, "{found} of {all}");
    assert_eq!((cached(&with).iter().sum::<u64>(), cached(&without)), (found, [0, 0, 0]));
    assert!(cached(&with)[0] == 0 && cached(&with)[1] > 0, "{:?}", cached(&with));
    assert_eq!(hits(&computed), (Some(0), Some(0)));
}

/// Answers are the same as without speculation. Metrics count the proposals.
#[test]
fn speculation_changes_no_answer_and_is_counted() {
    let run = run();
    let config = r#"{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}"#;
    let (plain, speculating) =
        (Server::start(&run, &[]), Server::start(&run, &["--speculative-config", config, "--batch-invariant"]));
    let more = [
        json!({"temperature": 0, "logprobs": 2}),
        json!({"temperature": 0.6, "seed": 2, "n": 3, "stop": ["e", "1"]}),
        json!({"temperature": 1, "seed": 4, "guided_regex": "[0-9]{4} (ab|cd)+e"}),
    ];
    for more in more {
        let mut body = json!({"prompt": "line 4 line 4 line", "max_tokens": 40});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let of = |server: &Server| {
            let answer = server.post("/v1/completions", body.clone());
            (answer["choices"].clone(), answer["usage"].clone())
        };
        assert_eq!(of(&speculating), of(&plain), "{body}");
    }
    let text = ask(&speculating, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").1;
    let value = |name: &str| -> u64 {
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("ottava:spec_decode_num_{name}_total ")));
        line.expect("it is there").parse().unwrap()
    };
    let (drafts, proposed, accepted) = (value("drafts"), value("draft_tokens"), value("accepted_tokens"));
    assert!(drafts > 0 && drafts <= proposed && accepted > 0 && accepted <= proposed, "{text}");
}

/// An untrained model calls the tools that a request demands.
#[test]
fn demanded_calls_of_tools_conform_to_their_parameters() {
    let run = run();
    let server = Server::start(&run, &["--tool-call-parser", "hermes"]);
    let depth = json!({"type": "object", "properties": {"depth": {"enum": [1, 20]}}, "required": ["depth"], "additionalProperties": false});
    let tool = |name: &str, parameters: &Value| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
    let tools = json!([
        tool("dive", &depth),
        tool("rest", &json!({"type": "object", "properties": {}, "additionalProperties": false}))
    ]);
    let mut complete = 0;
    for choice in [json!("required"), json!({"type": "function", "function": {"name": "dive"}})] {
        for (seed, stream) in [(1, false), (2, true), (3, false), (4, true)] {
            let body = json!({"messages": [{"role": "user", "content": "hello"}], "tools": tools, "tool_choice": choice,
                "temperature": 1, "seed": seed, "max_tokens": 120, "stream": stream});
            let (calls, reason) = match stream {
                false => {
                    let answer = server.post("/v1/chat/completions", body);
                    let choice = &answer["choices"][0];
                    (choice["message"]["tool_calls"].clone(), choice["finish_reason"].clone())
                }
                true => {
                    let (_, events) = ask(&server, &request("/v1/chat/completions", body.to_string().as_bytes()));
                    let events =
                        events.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
                    let choices: Vec<Value> =
                        events.map(|data| serde_json::from_str::<Value>(data).unwrap()["choices"][0].take()).collect();
                    let deltas = choices.iter().filter_map(|choice| choice["delta"]["tool_calls"].as_array()).flatten();
                    let mut calls: Vec<Value> = Vec::new();
                    for delta in deltas {
                        match delta["id"].is_string() {
                            true => calls.push(delta.clone()),
                            false => {
                                let call = calls.last_mut().unwrap();
                                let more = delta["function"]["arguments"].as_str().unwrap();
                                let arguments = call["function"]["arguments"].as_str().unwrap().to_string() + more;
                                call["function"]["arguments"] = arguments.into();
                            }
                        }
                    }
                    (calls.into(), choices.last().unwrap()["finish_reason"].clone())
                }
            };
            if reason == "length" {
                continue;
            }
            complete += 1;
            assert_eq!(reason, if choice == "required" { "tool_calls" } else { "stop" });
            for call in calls.as_array().unwrap() {
                let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
                let expected = match call["function"]["name"].as_str().unwrap() {
                    "dive" => [json!({"depth": 1}), json!({"depth": 20})].contains(&arguments),
                    _ => choice == "required" && arguments == json!({}),
                };
                assert!(expected, "{choice}: {calls}");
            }
        }
    }
    assert!(complete >= 5, "{complete} of 8 answers end before the limit of tokens");
    run.fail(&["serve", "model", "--tool-call-parser", "x"], 1, &["there is no parser \"x\"; hermes, qwen, "]);
}

/// The log-probability of a token that is drawn at a temperature, as `processed_logprobs`, is the one at `logits / temperature`: with as many likeliest
/// tokens as the vocabulary has, these are the whole distribution.
#[test]
fn generate_returns_log_probabilities_of_its_draws() {
    let run = run();
    let server = Server::start(&run, &["--logprobs-mode", "processed_logprobs"]);
    let sampling = json!({"temperature": 2.0, "top_k": 50, "max_tokens": 12, "logprobs": 50, "seed": 3});
    let answer = server.post("/inference/v1/generate", json!({"token_ids": [5, 17, 9], "sampling_params": sampling}));
    let choice = &answer["choices"][0];
    let (ids, content) = (choice["token_ids"].as_array().unwrap(), choice["logprobs"]["content"].as_array().unwrap());
    assert_eq!((ids.len(), content.len()), (12, 12));
    for (id, entry) in ids.iter().zip(content) {
        assert_eq!(entry["token"], format!("token_id:{id}"));
        let top = entry["top_logprobs"].as_array().unwrap();
        let probability = |entry: &Value| entry["logprob"].as_f64().unwrap().exp();
        let sum: f64 = top.iter().map(probability).sum();
        assert!((sum - 1.0).abs() < 1e-4, "50 tokens can be drawn, with {sum} together");
        assert!(top.iter().any(|other| other["token"] == entry["token"] && other["logprob"] == entry["logprob"]));
    }
}
