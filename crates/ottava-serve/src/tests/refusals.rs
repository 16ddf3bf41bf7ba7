//! Tests requests that are refused because of their origin or their fields.

use super::*;
use std::io::{BufRead, BufReader};

const COMPLETIONS: &str = "/v1/completions";
const CHATS: &str = "/v1/chat/completions";

/// Adds each of `fields` to a valid request, and expects that the request is refused with the name of the field.
fn expect_refused(server: &Server, path: &str, plain: &Value, fields: &[(&str, Value)]) {
    for (name, value) in fields {
        let mut body = plain.clone();
        body[name] = value.clone();
        let (status, error) = server.refused(path, &body);
        let text: String = body.to_string().chars().take(200).collect();
        assert_eq!((status, error["param"].as_str()), (400, Some(*name)), "{text}: {error}");
        assert_eq!(error["type"], "invalid_request_error");
    }
    assert!(server.log.get(|log| log.requests.is_empty()), "none reaches the engine");
}

#[test]
fn wrong_requests_name_the_field() {
    let server = start(|_, _| {});
    let plain = json!({"prompt": "a", "max_tokens": 4});
    expect_refused(
        &server,
        COMPLETIONS,
        &plain,
        &[
            ("prompt", json!(null)),
            ("prompt", json!([])),
            ("prompt", json!([1, "a"])),
            ("prompt", json!([[]])),
            ("prompt", json!([9999])),
            ("prompt", json!(vec![5; MODEL_LEN])),
            ("max_tokens", json!(MODEL_LEN)),
            ("max_tokens", json!(0)),
            ("max_tokens", json!("many")),
            ("min_tokens", json!(5)),
            ("n", json!(0)),
            ("n", json!(129)),
            ("stop", json!(5)),
            ("stop", json!("")),
            ("stop", json!(["a", ""])),
            ("stop", json!("x".repeat(1025))),
            ("stop_token_ids", json!([4096])),
            ("logit_bias", json!({"x": 1})),
            ("logit_bias", json!({"4096": 1})),
            ("logit_bias", json!({"5": 101})),
            ("logprobs", json!(1000)),
            ("top_p", json!(2)),
            ("min_p", json!(-1)),
            ("temperature", json!(-1)),
            ("repetition_penalty", json!(0)),
            ("frequency_penalty", json!(2.1)),
            ("presence_penalty", json!(-2.1)),
            ("top_k", json!(-2)),
            ("max_tokens", json!(5.5)),
            ("stream_options", json!({})),
        ],
    );
    let streamed = json!({"prompt": "a", "stream": true});
    expect_refused(&server, COMPLETIONS, &streamed, &[("stream_options", json!({"include_usage": 1}))]);
    let turn = |content: Value| json!([{"role": "user", "content": content}]);
    expect_refused(
        &server,
        CHATS,
        &json!({"messages": turn("a".into())}),
        &[
            ("messages", json!(null)),
            ("messages", json!("hi")),
            ("messages", json!([])),
            ("messages", json!([{"content": "hi"}])),
            ("messages", json!([{"role": "user"}])),
            ("messages", turn(Value::Null)),
            ("messages", turn(json!([{"type": "image_url"}]))),
            ("max_tokens", json!(0)),
            ("top_logprobs", json!(2)),
            ("continue_final_message", json!(true)),
            ("chat_template_kwargs", json!({"messages": []})),
        ],
    );
    assert_eq!(server.refused(COMPLETIONS, &json!({"prompt": "a", "model": "other"})).0, 404);
    assert_eq!(server.refused("/v1/none", &json!({})).0, 404);
    assert_eq!(server.call(COMPLETIONS, None, None).0, 405);
}

#[test]
fn what_is_not_implemented_is_refused_by_name() {
    let server = start(|_, _| {});
    let function = json!({"type": "function", "function": {"name": "f"}});
    let plain = json!({"prompt": "a"});
    expect_refused(
        &server,
        COMPLETIONS,
        &plain,
        &[
            ("guided_grammar", json!("root ::= a")),
            ("include_stop_str_in_output", json!(true)),
            ("suffix", json!("b")),
            ("use_beam_search", json!(true)),
        ],
    );
    let chat = json!({"messages": [{"role": "user", "content": "a"}]});
    expect_refused(
        &server,
        CHATS,
        &chat,
        &[
            ("tool_choice", json!("required")),
            ("tool_choice", function.clone()),
            ("tools", json!([{"type": "web_search"}])),
            ("tools", json!([{"type": "function"}])),
            ("functions", json!([{"name": "f"}])),
        ],
    );
    for (name, value) in [
        ("response_format", json!({"type": "text"})),
        ("structured_outputs", Value::Null),
        ("include_stop_str_in_output", json!(false)),
        ("suffix", json!("")),
        ("best_of", json!(1)),
        ("user", json!("me")),
    ] {
        let mut body = plain.clone();
        body[name] = value;
        server.post(COMPLETIONS, body);
    }
    for (name, value) in [("tools", json!([])), ("tool_choice", json!("none")), ("add_generation_prompt", json!(true))]
    {
        let mut body = chat.clone();
        body[name] = value;
        server.post(CHATS, body);
    }
    let mut without_tools = chat;
    without_tools["tools"] = json!([function]);
    without_tools["tool_choice"] = "none".into();
    server.post(CHATS, without_tools);
}

/// Requests with fields that other servers ignore, and how errors of a strict server name these fields.
fn with_fields_without_effect() -> Vec<(&'static str, Value, &'static str)> {
    let prompt = |name: &str, value: Value| {
        let mut body = json!({"prompt": "a", "max_tokens": 2, "stream": true});
        body[name] = value;
        body
    };
    let chat = |name: &str, value: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 2});
        body[name] = value;
        body
    };
    vec![
        (COMPLETIONS, prompt("top-p", json!([1, {"a": 2}])), "top-p"),
        (COMPLETIONS, prompt("messages", json!([])), "messages"),
        (
            COMPLETIONS,
            prompt("stream_options", json!({"include_obfuscation": true})),
            "stream_options.include_obfuscation",
        ),
        (CHATS, chat("store", json!(true)), "store"),
        (
            CHATS,
            chat("response_format", json!({"type": "json_object", "schema": {"type": "array", "uniqueItems": true}})),
            "response_format",
        ),
        (CHATS, chat("service_tier", json!("flex")), "service_tier"),
        (CHATS, chat("prediction", json!({"type": "content", "content": "b"})), "prediction"),
        (CHATS, chat("verbosity", json!("low")), "verbosity"),
        (CHATS, chat("reasoning_effort", json!("high")), "reasoning_effort"),
        (
            CHATS,
            chat("chat_template_kwargs", json!({"enable_thinking": false})),
            "chat_template_kwargs.enable_thinking",
        ),
    ]
}

#[test]
fn fields_without_effect_pass_unless_the_server_is_strict() {
    let server = start(|_, _| {});
    for (path, body, _) in with_fields_without_effect() {
        let (status, text) = server.call(path, Some(&body), None);
        assert_eq!(status, 200, "{body}: {text}");
    }
    let strict = start(|options, _| options.strict = true);
    for (path, body, name) in with_fields_without_effect() {
        let (status, error) = strict.refused(path, &body);
        assert_eq!((status, error["param"].as_str()), (400, Some(name)), "{body}: {error}");
        assert!(error["message"].as_str().unwrap().contains("without --strict"), "{error}");
    }
    // Values that ask for nothing are no reason to refuse.
    strict.post(CHATS, json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "store": false, "top_k": -1, "other": null}));
}

#[test]
fn mistakes_are_told_in_the_words_of_the_request() {
    let server = start(|_, _| {});
    let answer = |path: &str, text: &str| {
        let request =
            agent().post(format!("http://{}{path}", server.address)).header("Content-Type", "application/json");
        let mut response = request.send(text).unwrap();
        (response.status().as_u16(), response.body_mut().read_to_string().unwrap())
    };
    let digits = "99999999999999999999";
    let long = "a ".repeat(MODEL_LEN);
    let call = r#"{"role": "assistant", "tool_calls": [{"id": "a", "type": "function"}]}"#;
    for (path, body, words) in [
        (COMPLETIONS, format!(r#"{{"prompt": "a", "seed": {digits}}}"#), format!("`seed` is {digits};")),
        (COMPLETIONS, r#"{"prompt": "a", "logit_bias": {"x": 1, "5": 1, "y": 1}}"#.into(), r#"[\"x\", \"y\"]"#.into()),
        (COMPLETIONS, r#"{"prompt": "a", "truncate_prompt_tokens": 0}"#.into(), "`truncate_prompt_tokens` is 0".into()),
        (CHATS, format!(r#"{{"messages": [{{"role": "user", "content": "{long}"}}]}}"#), r#""param":"messages""#.into()),
        (
            COMPLETIONS,
            format!(r#"{{"prompt": "a", "truncate_prompt_tokens": -1, "max_tokens": {MODEL_LEN}}}"#),
            "`max_tokens` leaves no room".into(),
        ),
        (
            CHATS,
            format!(
                r#"{{"messages": [{{"role": "user", "content": "a"}}], "truncate_prompt_tokens": -1, "max_tokens": {MODEL_LEN}}}"#
            ),
            "`max_tokens` leaves no room".into(),
        ),
        (
            "/inference/v1/generate",
            format!(r#"{{"token_ids": [5], "truncate_prompt_tokens": -1, "sampling_params": {{"max_tokens": {MODEL_LEN}}}}}"#),
            r#""param":"max_tokens""#.into(),
        ),
        (CHATS, format!(r#"{{"messages": [{call}]}}"#), "message 0 has a call without the name".into()),
        (
            CHATS,
            r#"{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}"#.into(),
            "tool 0 has `parameters`".into(),
        ),
        ("/v1/responses", r#"{"input": "a", "text": {"format": {}}}"#.into(), "`text.format.type` is".into()),
        ("/inference/v1/generate", format!(r#"{{"token_ids": {:?}}}"#, vec![5; MODEL_LEN]), r#""param":"token_ids""#.into()),
    ] {
        let (status, text) = answer(path, &body);
        assert!(status == 400 && text.contains(&words), "{text}, and not {words}");
    }
    let (status, text) = server.call("/v1/models/%ff", None, None);
    assert!(status == 400 && text.starts_with(r#"{"error":{"message":"the path cannot be read"#), "{text}");
    // Integers beyond 64 bits stay exact.
    let (status, text) =
        answer("/v1/responses", &format!(r#"{{"input": "a", "max_output_tokens": 2, "metadata": {{"a": {digits}}}}}"#));
    assert!(status == 200 && text.contains(&format!(r#""metadata":{{"a":{digits}}}"#)), "{text}");
}

#[test]
fn a_broken_tokenizer_config_is_an_error_and_a_missing_one_is_none() {
    for (config, status, words) in [
        (None, 200, r#""tokenizer_class":"PreTrainedTokenizerFast""#),
        (Some(r#"{"tokenizer_class": "Otter"}"#), 200, r#""tokenizer_class":"Otter""#),
        (Some("{"), 500, "`tokenizer_config.json` of the model cannot be read"),
        (Some("[]"), 500, "`tokenizer_config.json` of the model cannot be read"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        std::fs::copy(data().join("tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
        let tokenizer = Tokenizer::load(folder.path()).unwrap();
        let server = start_with(|_, _| {}, |model| model.tokenizer = tokenizer);
        let path = folder.path().join("tokenizer_config.json");
        if let Some(text) = config {
            std::fs::write(&path, text).unwrap();
        }
        let (found, text) = server.call("/tokenizer_info", None, None);
        assert!(found == status && text.contains(words), "{config:?}: {text}");
        // The file is read once.
        std::fs::write(path, r#"{"tokenizer_class": "Changed"}"#).unwrap();
        assert_eq!(server.call("/tokenizer_info", None, None).1, text);
    }
}

#[test]
fn constraints_that_cannot_be_used_name_the_field() {
    let server = start(|_, _| {});
    let schema = |schema: Value| json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}});
    let plain = json!({"messages": [{"role": "user", "content": "a"}]});
    expect_refused(
        &server,
        CHATS,
        &plain,
        &[
            ("response_format", json!("json_object")),
            ("response_format", json!({"type": "xml"})),
            ("response_format", json!({"type": "json_schema"})),
            ("response_format", json!({"type": "json_object", "schema": 123})),
            ("response_format", json!({"type": "structural_tag"})),
            ("grammar", json!("root ::= [")),
            ("json_schema", json!(3)),
            ("response_format", schema(json!({"type": "nothing"}))),
            ("response_format", schema(json!({"type": "array", "contains": {"const": 1}}))),
            ("response_format", schema(json!({"$ref": "https://schemas.example/a.json"}))),
            ("response_format", schema(json!({"allOf": [{"type": "string"}, {"type": "integer"}]}))),
            ("structured_outputs", json!({"grammar": "root ::= a"})),
            ("structured_outputs", json!({"regex": "a", "choice": ["a"]})),
            ("guided_json", json!("no schema")),
            ("guided_json", json!({"type": "string", "pattern": "(a)\\1"})),
            ("guided_regex", json!("a(?=b)")),
            ("guided_regex", json!("(")),
            ("guided_regex", json!("(?>a|ab)c")),
            ("guided_json", json!(r#"{"const": {"a": 99999999999999999999}}"#)),
            ("guided_json", json!({"minimum": 1e20})),
            ("guided_regex", json!("a".repeat(300_000))),
            ("guided_choice", json!([])),
            ("guided_choice", json!(["a", ""])),
            ("guided_choice", json!(["a", 3])),
        ],
    );
    let with_regex = json!({"prompt": "a", "guided_regex": "a+"});
    expect_refused(
        &server,
        COMPLETIONS,
        &with_regex,
        &[("guided_choice", json!(["a"])), ("min_tokens", json!(2)), ("best_of", json!(0))],
    );
    let streamed = json!({"prompt": "a", "stream": true});
    expect_refused(&server, COMPLETIONS, &streamed, &[("best_of", json!(2)), ("best_of", json!(129))]);
    // Bounds beyond 64 bits can be used, also in a schema that is sent as a text.
    for kind in ["integer", "number"] {
        for bounds in [
            r#""minimum": -1e20, "maximum": 99999999999999999999"#,
            r#""exclusiveMinimum": -1e20"#,
            r#""maximum": 1e20"#,
        ] {
            let text = format!(r#"{{"type": "{kind}", {bounds}}}"#);
            server.post(COMPLETIONS, json!({"prompt": "a", "max_tokens": 2, "guided_json": text}));
        }
    }
}

#[test]
fn lists_without_bounds_are_refused_by_name() {
    let server = start(|_, _| {});
    let biases: serde_json::Map<String, Value> = (0..1025).map(|id| (id.to_string(), 1.into())).collect();
    expect_refused(
        &server,
        COMPLETIONS,
        &json!({"prompt": "a"}),
        &[
            ("stop", json!(vec!["a"; 17])),
            ("stop", json!(vec!["a"; 100_000])),
            ("stop_token_ids", json!(vec![1; 129])),
            ("logit_bias", Value::Object(biases)),
            ("prompt", json!(vec!["a"; 1025])),
            ("prompt", json!(vec![[1]; 1025])),
        ],
    );
    expect_refused(&server, COMPLETIONS, &json!({"prompt": vec!["a"; 9]}), &[("n", json!(128))]);
    let many = json!({"prompt": vec![vec![1; 150]; 1000], "max_tokens": 45});
    expect_refused(&server, COMPLETIONS, &many, &[("logprobs", json!(100))]);
    let turn = json!({"role": "user", "content": "a"});
    expect_refused(
        &server,
        CHATS,
        &json!({"messages": [turn]}),
        &[("messages", json!(vec![turn.clone(); 4097])), ("tools", json!(vec![json!({}); 129]))],
    );
}

/// Tokenizing a text of 15 MB would take more than half a minute and 2 GB here.
#[test]
fn texts_that_cannot_fit_are_refused_before_they_are_tokenized() {
    let server = start(|_, _| {});
    let text = "a b ".repeat(15 << 18);
    let started = Instant::now();
    for (path, body, param) in [
        (COMPLETIONS, json!({"prompt": text}), "prompt"),
        (CHATS, json!({"messages": [{"role": "user", "content": text}]}), "messages"),
    ] {
        let (status, error) = server.refused(path, &body);
        let found = (status, error["param"].as_str(), error["code"].as_str());
        assert_eq!(found, (400, Some(param), Some("context_length_exceeded")), "{error}");
    }
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
}

#[test]
fn too_many_requests_are_turned_away_before_their_bodies_are_read() {
    let server = start(|options, parrot| {
        (options.max_requests, parrot.pause) = (2, Duration::from_millis(20));
    });
    let body = json!({"prompt": TEXT, "max_tokens": 60, "n": 2});
    std::thread::scope(|scope| {
        for requests in [2, 4] {
            scope.spawn(|| server.post(COMPLETIONS, body.clone()));
            server.log.wait("both begin", |log| log.requests.len() == requests);
        }
        // The body is not JSON, and a large body is not even sent.
        let head = |length| {
            format!(
                "POST /v1/completions HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\nxx",
                server.address
            )
        };
        for length in [2, 10 << 20] {
            let status = BufReader::new(server.send(head(length).as_bytes())).lines().next().unwrap().unwrap();
            assert!(status.contains("429"), "{status}");
        }
        let (status, error) = server.refused(COMPLETIONS, &json!({"prompt": "a"}));
        assert_eq!((status, error["type"].as_str()), (429, Some("rate_limit_error")));
    });
    server.post(COMPLETIONS, json!({"prompt": "a"}));
    let status = BufReader::new(server.send(
        format!("POST /v1/completions HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: 99999999\r\n\r\n", server.address)
            .as_bytes(),
    ));
    assert!(status.lines().next().unwrap().unwrap().contains("413"));
}

#[test]
fn keys_are_checked() {
    let server = start(|options, _| options.api_key = Some("secret".into()));
    let body = json!({"prompt": "a", "max_tokens": 1});
    for (key, status) in [(None, 401), (Some("wrong"), 401), (Some("secret"), 200)] {
        assert_eq!(server.call(COMPLETIONS, Some(&body), key).0, status, "{key:?}");
        assert_eq!(server.call("/v1/models", None, key).0, status, "{key:?}");
    }
    assert_eq!(server.call("/health", None, None).0, 200, "a load balancer has no key");
    assert_eq!(status_of(&server, "Authorization: bearer secret\r\nContent-Type: application/json"), 200);
}

/// Returns the status of a completion with these lines in its head.
fn status_of(server: &Server, head: &str) -> u16 {
    let host = if head.contains("Host: ") { String::new() } else { format!("Host: {}\r\n", server.address) };
    let body = json!({"prompt": "a", "max_tokens": 1}).to_string();
    let length = body.len();
    let request = format!("POST /v1/completions HTTP/1.1\r\n{host}{head}\r\nContent-Length: {length}\r\n\r\n{body}");
    let line = BufReader::new(server.send(request.as_bytes())).lines().next().unwrap().unwrap();
    line[9..12].parse().unwrap()
}

/// A page in a browser on this machine can send requests to a server without a key, but it cannot choose Content-Type, Origin and Host freely.
#[test]
fn pages_of_other_sites_are_refused() {
    let server = start(|_, _| {});
    let own = format!("Content-Type: application/json\r\nOrigin: http://{}", server.address);
    for (head, status) in [
        ("Content-Type: application/json", 200),
        ("Content-Type: Application/JSON; charset=utf-8", 200),
        (own.as_str(), 200),
        ("Content-Type: application/json\r\nHost: localhost:9", 200),
        ("Content-Type: application/json\r\nHost: [::1]:9", 200),
        ("X-Other: 1", 415),
        ("Content-Type: text/plain", 415),
        ("Content-Type: application/x-www-form-urlencoded", 415),
        ("Content-Type: application/json\r\nOrigin: http://pages.example", 403),
        ("Content-Type: application/json\r\nOrigin: null", 403),
        ("Content-Type: application/json\r\nHost: pages.example", 403),
    ] {
        assert_eq!(status_of(&server, head), status, "{head}");
    }
    let with_key = start(|options, _| options.api_key = Some("secret".into()));
    let head = "Authorization: Bearer secret\r\nContent-Type: application/json\r\nHost: pages.example\r\nOrigin: http://pages.example";
    assert_eq!(status_of(&with_key, head), 200, "a page that knows the key may ask");
}
