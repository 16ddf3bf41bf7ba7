//! Tests `/v1/responses`. The stand-in of the engine repeats the last message.

use super::*;

const RESPONSES: &str = "/v1/responses";
const CALL: &str = r#"<tool_call>{"name": "dive", "arguments": {"depth": 3}}</tool_call>"#;

fn server() -> Server {
    start_with(
        |_, _| {},
        |model| {
            let text = "{% for m in messages[:-1] %}{{ m.role }}:{{ m.reasoning_content }}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.depth }}{% endfor %};{% endfor %}\
                        {{ messages[-1].content }}{% for t in tools or [] %}{{ '\n\n\n\n' }}{{ t.function.name }}{{ t.function.parameters.type }}{% endfor %}";
            model.template = Some(template_of(text));
            model.reasoning_parser = Some("think".parse().unwrap());
            model.tool_call_parser = Some("hermes".parse().unwrap());
        },
    )
}

fn prompt(server: &Server) -> String {
    server.log.get(|log| tokenizer().decode(&log.requests.last().unwrap().prompt).unwrap())
}

/// A request for an answer that repeats `text` once.
fn request(text: &str) -> Value {
    json!({"input": text, "max_output_tokens": tokenizer().encode(text).unwrap().len()})
}

fn named_events(server: &Server, path: &str, body: &Value) -> Vec<(String, Value)> {
    let (status, text) = server.call(path, Some(body), None);
    assert_eq!(status, 200, "{text}");
    let event = |lines: &str| {
        let (name, data) = lines.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        (name.strip_prefix("event: ").unwrap().to_string(), data)
    };
    text.split("\n\n").filter(|lines| !lines.is_empty()).map(event).collect()
}

#[test]
fn responses_have_items_of_reasoning_texts_and_calls() {
    let server = server();
    let text = format!("<think>I look.</think>Yes: {CALL}");
    let mut body = request(&text);
    body["tools"] = json!([{"type": "function", "name": "dive", "parameters": {"type": "object"}, "strict": true}]);
    body["metadata"] = json!({"of": "me"});
    body["max_output_tokens"] = 100.into();
    body["tool_choice"] = "none".into();
    let answer = server.post(RESPONSES, body.clone());
    assert_eq!((&answer["object"], &answer["status"]), (&json!("response"), &json!("incomplete")));
    assert_eq!(answer["incomplete_details"], json!({"reason": "max_output_tokens"}));
    let kinds = |answer: &Value| -> Vec<String> {
        answer["output"].as_array().unwrap().iter().map(|item| item["type"].as_str().unwrap().to_string()).collect()
    };
    assert_eq!(kinds(&answer), ["reasoning", "message"], "{answer}");
    assert_eq!(answer["output"][0]["content"][0], json!({"type": "reasoning_text", "text": "I look."}));
    assert_eq!(answer["metadata"]["of"], "me");
    assert!(answer["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64().unwrap() > 2);

    let server = start_with(
        |_, _| {},
        |model| {
            model.template = Some(template_of("{{ messages[-1].content }}{% if tools %}{{ '\n' }}tools{% endif %}"));
            model.tool_call_parser = Some("hermes".parse().unwrap());
        },
    );
    body["tool_choice"] = "auto".into();
    body["parallel_tool_calls"] = false.into();
    let call = server.post(RESPONSES, body)["output"]
        .as_array()
        .unwrap()
        .iter()
        .find(|item| item["type"] == "function_call")
        .unwrap()
        .clone();
    assert_eq!((&call["name"], &call["arguments"]), (&json!("dive"), &json!("{\"depth\": 3}")));
    assert!(call["call_id"].is_string() && call["id"].as_str().unwrap().starts_with("fc_"), "{call}");
}

#[test]
fn streams_of_responses_have_the_events_of_openai_in_order() {
    let server = server();
    let text = format!("<think>I look.</think>Yes: {CALL}");
    let mut body = request(&text);
    body["stream"] = true.into();
    body["tools"] = json!([{"type": "function", "name": "dive", "parameters": {"type": "object"}}]);
    body["max_output_tokens"] = json!(body["max_output_tokens"].as_u64().unwrap() + 1);
    let events = named_events(&server, RESPONSES, &body);
    for (number, (name, data)) in events.iter().enumerate() {
        assert_eq!((data["type"].as_str(), &data["sequence_number"]), (Some(name.as_str()), &json!(number)), "{data}");
    }
    let mut names: Vec<&str> = events.iter().map(|(name, _)| name.trim_start_matches("response.")).collect();
    names.dedup();
    let text_item = |kind: &'static str| {
        let [delta, done] = match kind {
            "reasoning" => ["reasoning_text.delta", "reasoning_text.done"],
            _ => ["output_text.delta", "output_text.done"],
        };
        ["output_item.added", "content_part.added", delta, done, "content_part.done", "output_item.done"]
    };
    let call =
        ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"];
    let begin = ["created", "in_progress"];
    let expected = [&begin[..], &text_item("reasoning"), &text_item("message"), &call, &["incomplete"]].concat();
    assert_eq!(names, expected, "{events:?}");
    let last = &events.last().unwrap().1["response"];
    for (index, item) in last["output"].as_array().unwrap().iter().enumerate() {
        let of_item = || events.iter().filter(|(_, data)| data["output_index"] == index);
        let deltas: String = of_item().filter_map(|(_, data)| data["delta"].as_str()).collect();
        let whole = item["arguments"].as_str().or_else(|| item["content"][0]["text"].as_str());
        assert_eq!(Some(deltas.as_str()), whole);
        assert_eq!(of_item().next_back().unwrap().1["item"], *item);
        assert!(of_item().all(|(_, data)| data["item_id"].is_null() || data["item_id"] == item["id"]));
    }
    assert_eq!(server.call(&format!("{RESPONSES}/{}", last["id"].as_str().unwrap()), None, None).1, last.to_string());
}

#[test]
fn a_response_goes_on_from_a_stored_one() {
    let server = server();
    let answer = server.post(RESPONSES, request("<think>b</think>a"));
    let id = answer["id"].as_str().unwrap().to_string();
    let path = format!("{RESPONSES}/{id}");
    assert_eq!(serde_json::from_str::<Value>(&server.call(&path, None, None).1).unwrap(), answer);
    let next = json!({"input": "c", "previous_response_id": id, "max_output_tokens": 1, "instructions": "brief"});
    let second = server.post(RESPONSES, next.clone());
    assert_eq!(prompt(&server), "system:brief;user:<think>b</think>a;assistant:ba;c");
    assert_eq!(second["previous_response_id"], *id);
    // Instructions are of one request.
    let third = json!({"input": "d", "previous_response_id": second["id"], "max_output_tokens": 1, "store": false});
    let third = server.post(RESPONSES, third);
    assert!(
        prompt(&server).starts_with("user:<think>b</think>a;assistant:ba;user:c;assistant:"),
        "{}",
        prompt(&server)
    );
    assert_eq!(server.call(&format!("{RESPONSES}/{}", third["id"].as_str().unwrap()), None, None).0, 404);
    let agent = agent();
    let delete = || agent.delete(format!("http://{}{path}", server.address)).call().unwrap().status().as_u16();
    assert_eq!((delete(), delete()), (200, 404));
    let (status, error) = server.refused(RESPONSES, &next);
    assert_eq!((status, error["code"].as_str()), (404, Some("previous_response_not_found")));
}

#[test]
fn items_of_requests_become_messages() {
    let server = server();
    let input = json!([
        {"role": "developer", "content": "brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "a", "name": "dive", "arguments": "{\"depth\": 3}"},
        {"type": "function_call", "call_id": "b", "name": "rise", "arguments": ""},
        {"type": "function_call_output", "call_id": "a", "output": "wet"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "done", "annotations": []}]},
        {"role": "user", "content": "thanks"},
    ]);
    let body = json!({"input": input, "max_output_tokens": 1, "instructions": "kind", "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "low"}, "include": ["reasoning.encrypted_content"]});
    server.post(RESPONSES, body);
    let expected = "system:kind\n\nbrief;user:go;assistant:hmdive3rise;tool:wet;assistant:done;thanks";
    assert_eq!(prompt(&server), expected);
}

#[test]
fn requests_for_responses_that_cannot_be_answered_name_the_field() {
    let server = server();
    for (name, value, words) in [
        ("input", Value::Null, "`input` is missing"),
        ("input", json!([{"type": "web_search_call"}]), "of the type \"web_search_call\""),
        ("input", json!([{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]), "images"),
        ("input", json!([{"role": "user", "content": "a".repeat(9000)}]), "`input`"),
        ("background", json!(true), "in the background are not implemented"),
        ("conversation", json!("conv_1"), "`conversation` is not implemented"),
        ("tools", json!([{"type": "web_search"}]), "only functions are implemented"),
        ("max_output_tokens", json!(0), "`max_output_tokens` is 0"),
        ("text.format", json!({"type": "json_schema", "name": "a"}), "JSON schema"),
    ] {
        let mut body = json!({"input": "a"});
        match name {
            "text.format" => body["text"] = json!({"format": value}),
            name => body[name] = value,
        }
        let (status, error) = server.refused(RESPONSES, &body);
        let name = if name == "max_output_tokens" { "max_output_tokens" } else { name };
        assert_eq!((status, error["param"].as_str()), (400, Some(name)), "{error}");
        assert!(error["message"].as_str().unwrap().contains(words) || words == "`input`", "{error}");
    }
    let schema = json!({"type": "json_schema", "name": "a", "schema": {"type": "object", "properties": {}}});
    server.post(RESPONSES, json!({"input": "a", "max_output_tokens": 2, "text": {"format": schema}}));
    assert!(server.log.get(|log| log.requests.last().unwrap().grammar.is_some()));
}

#[test]
fn a_response_that_is_cut_has_incomplete_items_and_can_be_continued() {
    let server = server();
    let tools = json!([{"type": "function", "name": "dive", "parameters": {"type": "object"}}]);
    let mut body = request(&format!("So: {CALL}"));
    body["tools"] = tools.clone();
    // The call is cut within its arguments.
    let begun = CALL.split_once(" 3}").unwrap().0;
    body["max_output_tokens"] = tokenizer().encode(&format!("So: {begun}")).unwrap().len().into();
    let cut = server.post(RESPONSES, body.clone());
    let items = |response: &Value| {
        let items = response["output"].as_array().unwrap().iter();
        items
            .map(|item| format!("{} {}", item["type"].as_str().unwrap(), item["status"].as_str().unwrap()))
            .collect::<Vec<_>>()
    };
    assert_eq!(cut["status"], "incomplete");
    assert_eq!(items(&cut), ["message completed", "function_call incomplete"], "{cut}");
    let call = &cut["output"][1];
    let output = json!([{"type": "function_call_output", "call_id": call["call_id"], "output": "no"}]);
    let next = json!({"input": output, "previous_response_id": cut["id"], "max_output_tokens": 1, "tools": tools});
    server.post(RESPONSES, next);
    // A client may also send the items.
    let input = [&[json!({"role": "user", "content": "a"})], &cut["output"].as_array().unwrap()[..]].concat();
    server.post(RESPONSES, json!({"input": input, "max_output_tokens": 1}));
    // A message is cut, and the events say so too.
    body["input"] = json!("a long text$");
    body["max_output_tokens"] = 1.into();
    assert_eq!(items(&server.post(RESPONSES, body.clone())), ["message incomplete"]);
    body["stream"] = true.into();
    let done =
        named_events(&server, RESPONSES, &body).into_iter().find(|(name, _)| name == "response.output_item.done");
    assert_eq!(done.unwrap().1["item"]["status"], "incomplete");
}

#[test]
fn system_messages_at_the_beginning_become_one() {
    let server = server();
    let input = json!([
        {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "brief"}]},
        {"type": "message", "role": "developer", "content": "warm"},
        {"role": "user", "content": "go"},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "now"}]},
        {"role": "user", "content": "so"},
    ]);
    let body = json!({"input": input, "max_output_tokens": 1, "instructions": "kind", "max_tool_calls": 3, "include": ["web_search_call.results"]});
    server.post(RESPONSES, body);
    assert_eq!(prompt(&server), "system:kind\n\nbrief\n\nwarm;user:go;system:now;so");
    for (name, value, words) in [
        ("include", json!(["everything"]), "`include` has \"everything\""),
        ("max_tool_calls", json!("many"), "`max_tool_calls` is \"many\""),
    ] {
        let (status, error) = server.refused(RESPONSES, &json!({"input": "a", name: value}));
        assert!(status == 400 && error["message"].as_str().unwrap().contains(words), "{error}");
    }
}
