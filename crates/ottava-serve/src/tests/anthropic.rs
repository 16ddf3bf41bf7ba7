//! Tests `/v1/messages`. The stand-in of the engine repeats the last message.

use super::*;

const MESSAGES: &str = "/v1/messages";
const TEXT: &str = r#"<think>I look.</think>Yes: <tool_call>{"name": "dive", "arguments": {"depth": 3}}</tool_call>"#;

fn server() -> Server {
    start_with(
        |options, _| options.api_key = Some("secret".into()),
        |model| {
            let text = "{% for m in messages[:-1] %}{{ m.role }}:{{ m.reasoning_content }}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.depth }}{% endfor %};{% endfor %}\
                        {% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}{{ messages[-1].content }}{% if tools %}{{ '\n' }}tools{% endif %}";
            model.template = Some(template_of(text));
            model.reasoning_parser = Some("think".parse().unwrap());
            model.tool_call_parser = Some("hermes".parse().unwrap());
        },
    )
}

/// Sends a request with Anthropic's headers. Returns status and body.
fn call(server: &Server, path: &str, body: &Value) -> (u16, String) {
    let agent = agent();
    let post = agent.post(format!("http://{}{path}", server.address)).header("x-api-key", "secret");
    let mut response = post.header("Content-Type", "application/json").send(body.to_string()).unwrap();
    assert!(response.headers().contains_key("x-request-id"));
    (response.status().as_u16(), response.body_mut().read_to_string().unwrap())
}

fn post(server: &Server, body: &Value) -> Value {
    let (status, text) = call(server, MESSAGES, body);
    assert_eq!(status, 200, "{text}");
    serde_json::from_str(&text).unwrap()
}

/// A request for an answer that repeats `text` once.
fn request(text: &str) -> Value {
    json!({"max_tokens": 100, "stop_sequences": ["$"], "messages": [{"role": "user", "content": format!("{text}$")}],
        "tools": [{"name": "dive", "description": "go down", "input_schema": {"type": "object"}}]})
}

#[test]
fn messages_have_blocks_of_thinking_text_and_tools() {
    let server = server();
    let answer = post(&server, &request(TEXT));
    let content = answer["content"].as_array().unwrap();
    assert_eq!(content[0], json!({"type": "thinking", "thinking": "I look.", "signature": ""}));
    assert_eq!(content[1], json!({"type": "text", "text": "Yes:"}));
    let tool = (&content[2]["type"], &content[2]["name"], &content[2]["input"]);
    assert_eq!(tool, (&json!("tool_use"), &json!("dive"), &json!({"depth": 3})));
    assert_eq!(
        (&answer["stop_reason"], &answer["role"], &answer["type"]),
        (&json!("tool_use"), &json!("assistant"), &json!("message"))
    );
    assert!(answer["usage"]["output_tokens"].as_u64() > Some(5));
    let stopped = post(&server, &request("Yes"));
    assert_eq!((&stopped["stop_reason"], &stopped["stop_sequence"]), (&json!("stop_sequence"), &json!("$")));
    let mut cut = request(TEXT);
    cut["max_tokens"] = 5.into();
    assert_eq!(post(&server, &cut)["stop_reason"], "max_tokens");
    let (status, counted) = call(
        &server,
        "/v1/messages/count_tokens",
        &json!({"messages": request(TEXT)["messages"], "tools": request(TEXT)["tools"]}),
    );
    let used = |name: &str| answer["usage"][name].as_u64().unwrap();
    let used = used("input_tokens") + used("cache_read_input_tokens");
    assert_eq!((status, counted), (200, json!({"input_tokens": used}).to_string()));
}

#[test]
fn streams_of_messages_have_the_events_of_anthropic() {
    let server = server();
    let mut body = request(TEXT);
    let whole = post(&server, &body);
    body["stream"] = true.into();
    let (_, text) = call(&server, MESSAGES, &body);
    let event = |lines: &str| {
        let (name, data) = lines.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(Some(data["type"].as_str().unwrap()), name.strip_prefix("event: "));
        data
    };
    let events: Vec<Value> = text.split("\n\n").filter(|lines| !lines.is_empty()).map(event).collect();
    let mut names: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    names.dedup();
    let block = ["content_block_start", "content_block_delta", "content_block_stop"];
    let expected =
        [&["message_start", "ping"][..], &block, &block, &block, &["message_delta", "message_stop"]].concat();
    assert_eq!(names, expected);
    for (index, block) in whole["content"].as_array().unwrap().iter().enumerate() {
        let deltas = events.iter().filter(|event| event["type"] == "content_block_delta" && event["index"] == index);
        let texts = deltas.filter_map(|event| {
            ["thinking", "text", "partial_json"].iter().find_map(|key| event["delta"][key].as_str())
        });
        let joined: String = texts.collect();
        let expected = match block["type"].as_str().unwrap() {
            "thinking" => block["thinking"].as_str().unwrap().to_string(),
            "text" => block["text"].as_str().unwrap().to_string(),
            _ => "{\"depth\": 3}".to_string(),
        };
        assert_eq!(joined, expected);
    }
    let end = &events[events.len() - 2];
    assert_eq!(
        (&end["delta"]["stop_reason"], &end["usage"]["output_tokens"]),
        (&whole["stop_reason"], &whole["usage"]["output_tokens"])
    );
}

#[test]
fn blocks_of_requests_become_messages() {
    let server = server();
    let messages = json!([
        {"role": "user", "content": [{"type": "text", "text": "go", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "I go"},
            {"type": "tool_use", "id": "a", "name": "dive", "input": {"depth": 3}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "wet"}], "is_error": true},
            {"type": "text", "text": "so?"}]},
    ]);
    let body = json!({"max_tokens": 1, "system": [{"type": "text", "text": "brief"}], "messages": messages, "metadata": {"user_id": "me"},
        "thinking": {"type": "enabled", "budget_tokens": 2000}, "tool_choice": {"type": "auto", "disable_parallel_tool_use": true},
        "tools": [{"name": "dive", "input_schema": {"type": "object"}}]});
    post(&server, &body);
    let prompt = server.log.get(|log| tokenizer().decode(&log.requests.last().unwrap().prompt).unwrap());
    let expected = "system:brief;user:go;assistant:hmi godive3;tool:error: wet;trueso?\ntools";
    assert_eq!(prompt.to_lowercase(), expected);
}

#[test]
fn errors_of_messages_have_the_form_of_anthropic() {
    let server = server();
    let plain = json!({"max_tokens": 2, "messages": [{"role": "user", "content": "a"}]});
    for (name, value, words) in [
        ("max_tokens", Value::Null, "`max_tokens` is missing"),
        ("max_tokens", json!(0), "`max_tokens` is 0"),
        (
            "messages",
            json!([{"role": "user", "content": [{"type": "image"}]}]),
            "message 0 has a block of the type \"image\"",
        ),
        ("messages", json!([]), "`messages` is missing or empty"),
        ("thinking", json!({"type": "on"}), "`thinking.type`"),
        ("tool_choice", json!({"type": "required"}), "`tool_choice.type`"),
        ("tools", json!([{"type": "bash_20250124", "name": "bash"}]), "bash_20250124"),
        ("top_k", json!(-7), "`top_k` is -7"),
    ] {
        let mut body = plain.clone();
        body[name] = value;
        let (status, text) = call(&server, MESSAGES, &body);
        let error: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            (status, &error["type"], &error["error"]["type"]),
            (400, &json!("error"), &json!("invalid_request_error")),
            "{text}"
        );
        assert!(error["error"]["message"].as_str().unwrap().contains(words), "{text}");
    }
    let (status, text) = server.call(MESSAGES, Some(&plain), Some("wrong"));
    let error: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((status, &error["error"]["type"]), (401, &json!("authentication_error")));
}

#[test]
fn the_last_message_of_the_assistant_is_the_beginning_of_the_answer() {
    let server = start_with(
        |options, _| options.api_key = Some("secret".into()),
        |model| {
            let text = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}";
            model.template = Some(template_of(text));
        },
    );
    let last = |content: Value| json!({"max_tokens": 2, "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]});
    let prompt = || server.log.get(|log| tokenizer().decode(&log.requests.last().unwrap().prompt).unwrap());
    post(&server, &last(json!("It dives ")));
    assert!(prompt().to_lowercase().ends_with("it dives "), "{}", prompt());
    post(&server, &last(json!([{"type": "text", "text": "{\"depth\":"}])));
    assert!(prompt().ends_with("{\"depth\":"), "{}", prompt());
    let call = json!([{"type": "tool_use", "id": "a", "name": "dive", "input": {}}]);
    let (status, text) = super::anthropic::call(&server, MESSAGES, &last(call));
    assert!(status == 400 && text.contains("ends with calls of tools"), "{text}");
}

#[test]
fn nulls_of_messages_are_missing_fields() {
    let server = server();
    let messages =
        json!([{"role": "user", "content": [{"type": "text", "text": "a", "citations": null, "cache_control": null}]}]);
    let mut body = json!({"max_tokens": 2, "messages": messages, "output_config": {"format": null, "effort": null}});
    for name in ["system", "tools", "tool_choice", "thinking", "stop_sequences", "temperature", "metadata", "container"]
    {
        body[name] = Value::Null;
    }
    post(&server, &body);
    assert!(server.log.get(|log| log.requests.last().unwrap().grammar.is_none()));
    body["output_config"] = json!({"format": {"type": "yaml"}});
    let (status, text) = super::anthropic::call(&server, MESSAGES, &body);
    assert!(status == 400 && text.contains("`output_config.format.type` is"), "{text}");
}
