//! Tests tool calls in answers. The stand-in of the engine repeats the calls of the prompt.

use super::*;
use crate::tool_choice::{Kind, ToolChoice};

/// Starts a server whose model writes calls in the format of Hermes.
fn server() -> Server {
    slow_server(Duration::ZERO)
}

/// Starts the same server, with a pause before each token.
fn slow_server(pause: Duration) -> Server {
    start_with(
        |_, parrot| parrot.pause = pause,
        |model| {
            let text = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.depth }}{% endfor %}{% endfor %}{{ '\n' }}{% for t in tools or [] %}{{ t.function.name }}{% endfor %}";
            model.template = Some(template_of(text));
            model.tool_call_parser = Some("hermes".parse().unwrap());
        },
    )
}

fn request(content: &str) -> Value {
    json!({"messages": [{"role": "user", "content": content}], "stop": "\ndive", "max_tokens": 100,
        "tools": [{"type": "function", "function": {"name": "dive", "parameters": {"type": "object"}}}]})
}

const CALLS: &str = r#"Yes: <tool_call>{"name": "dive", "arguments": {"depth": 3}}</tool_call>
<tool_call>{"name": "rise", "arguments": {}}</tool_call>"#;

#[test]
fn calls_are_fields_of_whole_answers_and_deltas_of_streams() {
    let server = server();
    let answer = server.post("/v1/chat/completions", request(CALLS));
    let choice = &answer["choices"][0];
    assert_eq!((&choice["finish_reason"], &choice["message"]["content"]), (&json!("tool_calls"), &json!("Yes:")));
    let expected = [json!({"name": "dive", "arguments": "{\"depth\": 3}"}), json!({"name": "rise", "arguments": "{}"})];
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    assert_eq!(calls.iter().map(|call| call["function"].clone()).collect::<Vec<_>>(), expected);
    assert!(calls[0]["type"] == "function" && calls[0]["id"] != calls[1]["id"], "{calls:?}");

    let mut streamed = request(CALLS);
    streamed["stream"] = true.into();
    let (events, done) = server.stream("/v1/chat/completions", streamed);
    let choices: Vec<_> = events.iter().map(|event| &event["choices"][0]).collect();
    let text: String = choices.iter().filter_map(|choice| choice["delta"]["content"].as_str()).collect();
    let deltas: Vec<_> =
        choices.iter().filter_map(|choice| choice["delta"]["tool_calls"].as_array()).flatten().collect();
    let joined = |index: u64| {
        let texts = |key: &'static str| {
            let of_call = deltas.iter().filter(move |delta| delta["index"] == index);
            of_call.filter_map(move |delta| delta["function"][key].as_str()).collect::<String>()
        };
        json!({"name": texts("name"), "arguments": texts("arguments")})
    };
    assert!(done && text == "Yes:", "{text:?}");
    assert_eq!([joined(0), joined(1)], expected);
    assert!(deltas.len() > 4, "arguments come in pieces: {deltas:?}");
    let ids = deltas.iter().filter(|delta| delta["id"].is_string() && delta["type"] == "function");
    assert_eq!(ids.count(), 2);
    assert_eq!(choices.last().unwrap()["finish_reason"], "tool_calls");
}

#[test]
fn without_tools_an_answer_is_text_and_arguments_reach_the_template_as_objects() {
    let server = server();
    let mut none = request(CALLS);
    none["tool_choice"] = "none".into();
    none["stop"] = "rise".into();
    let answer = server.post("/v1/chat/completions", none);
    let message = &answer["choices"][0]["message"];
    assert!(message["content"].as_str().unwrap().contains("<tool_call>") && message.get("tool_calls").is_none());

    let function = json!({"name": "dive", "arguments": "{\"depth\": 42}"});
    let mut earlier = request("then");
    earlier["messages"] = json!([{"role": "assistant", "content": "I ", "tool_calls": [{"id": "a", "type": "function", "function": function}]}]);
    server.post("/v1/chat/completions", earlier);
    let prompt = server.log.get(|log| log.requests.last().unwrap().prompt.clone());
    assert_eq!(tokenizer().decode(&prompt).unwrap(), "I 42\ndive");
}

#[test]
fn choices_of_tools_constrain_the_answer_or_are_refused() {
    let server = server();
    let named = |name: &str| json!({"type": "function", "function": {"name": name}});
    for (choice, reason, calls) in [(json!("required"), "length", 0), (named("dive"), "length", 1)] {
        let mut request = request("{}");
        request["tool_choice"] = choice;
        request["max_tokens"] = 2.into();
        let answer = server.post("/v1/chat/completions", request);
        assert!(server.log.get(|log| log.requests.last().unwrap().grammar.is_some()));
        // The stand-in ignores grammars.
        let choice = &answer["choices"][0];
        let found = choice["message"]["tool_calls"].as_array().map_or(0, Vec::len);
        assert_eq!((choice["finish_reason"].as_str().unwrap(), found), (reason, calls));
    }
    let mut both = request("a");
    both["response_format"] = json!({"type": "json_object"});
    both["tool_choice"] = "required".into();
    for (name, value, words) in [
        ("tool_choice", named("fly"), "`tool_choice` is the function \"fly\", which is not among the `tools`"),
        ("tool_choice", json!("any"), "it is none, auto, required or a function"),
        ("tool_choice", json!({"type": "tool"}), "`tool_choice` is not none, auto, required or {"),
        ("response_format", json!({"type": "json_object"}), "`tool_choice` and `response_format` both constrain"),
    ] {
        let mut request = if name == "response_format" { both.clone() } else { request("a") };
        request[name] = value;
        let (status, error) = server.refused("/v1/chat/completions", &request);
        assert_eq!((status, error["param"].as_str().unwrap()), (400, name));
        assert!(error["message"].as_str().unwrap().contains(words), "{error}");
    }
}

#[test]
fn without_parallel_calls_an_answer_ends_after_its_first_call() {
    // The text is repeated until the server ends the completion.
    let server = slow_server(Duration::from_millis(5));
    let mut request = request(CALLS);
    request["parallel_tool_calls"] = false.into();
    let answer = server.post("/v1/chat/completions", request.clone());
    let choice = &answer["choices"][0];
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    assert_eq!((calls.len(), &calls[0]["function"]["name"]), (1, &json!("dive")), "{choice}");
    assert_eq!((&choice["finish_reason"], &choice["message"]["content"]), (&json!("tool_calls"), &json!("Yes:")));
    server.log.wait("the engine ends the completion", |log| log.cancelled.len() == 1);
    let tokens = answer["usage"]["completion_tokens"].as_u64().unwrap() as usize;
    assert!(tokens < tokenizer().encode(CALLS).unwrap().len(), "{tokens} tokens are counted");

    let mut streamed = request.clone();
    streamed["stream"] = true.into();
    let (events, _) = server.stream("/v1/chat/completions", streamed);
    let deltas = events.iter().filter_map(|event| event["choices"][0]["delta"]["tool_calls"].as_array()).flatten();
    assert!(deltas.clone().count() > 0 && deltas.into_iter().all(|delta| delta["index"] == 0), "{events:?}");
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");

    // The schema of this request allows a list with a single call.
    let tools = request["tools"].as_array().unwrap();
    let required = ToolChoice { kind: Kind::Required, tools: tools.clone() };
    let schema = |most| required.schema(most).unwrap().unwrap();
    assert_eq!((schema(1)["maxItems"].as_u64(), schema(usize::MAX).get("maxItems")), (Some(1), None));
}

/// Templates are not trusted, and neither are the messages that they read.
#[test]
fn a_template_without_bounds_is_an_error_of_the_request() {
    let text = "{% set ns = namespace(x='ab') %}{% for m in messages %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}\
                {% endfor %}{{ 'x'|indent(10**10) }}";
    let server = start_with(|_, _| {}, move |model| model.template = Some(template_of(text)));
    let (status, answer) =
        server.refused("/v1/chat/completions", &json!({"messages": [{"role": "user", "content": "a"}]}));
    assert!(status == 400 && answer.to_string().contains("more than 64 MiB"), "{status} {answer}");
    server.post("/v1/completions", json!({"prompt": "a", "max_tokens": 1}));
}

#[test]
fn null_fields_and_parts_of_text_reach_the_template_as_in_training() {
    let server = start(|_, _| {});
    let tokens = |messages: Value| server.post("/tokenize", json!({"messages": messages}))["tokens"].clone();
    let plain = json!([{"role": "user", "content": "a\nb"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "c"}]);
    let dumped = json!([
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": null},
        {"role": "assistant", "content": null, "tool_calls": null, "refusal": null},
        {"role": "user", "content": "c", "tool_calls": []},
    ]);
    assert_eq!(tokens(dumped), tokens(plain));
}

/// As in OpenAI's API, a tool without `parameters` has no arguments.
#[test]
fn tools_without_parameters_get_no_arguments() {
    let tool = |parameters: Option<Value>| {
        let mut function = json!({"name": "ping"});
        parameters.into_iter().for_each(|parameters| function["parameters"] = parameters);
        json!({"type": "function", "function": function})
    };
    let none = json!({"type": "object", "properties": {}, "additionalProperties": false});
    let open = json!({"type": "object", "additionalProperties": true});
    let one = json!({"type": "object", "properties": {"depth": {"type": "integer"}}});
    for (parameters, expected) in [
        (None, &none),
        (Some(Value::Null), &none),
        (Some(json!({})), &none),
        (Some(json!({"type": "object"})), &none),
        (Some(json!({"type": "object", "properties": {}, "required": [], "title": "Ping"})), &none),
        (Some(open.clone()), &open),
        (Some(one.clone()), &one),
    ] {
        let schema = |kind| ToolChoice { kind, tools: vec![tool(parameters.clone())] }.schema(1).unwrap().unwrap();
        assert_eq!(schema(Kind::Named("ping".into())), *expected);
        let list = schema(Kind::Required);
        assert_eq!(list["items"]["anyOf"][0]["properties"]["parameters"], *expected);
    }
}

#[test]
fn calls_without_arguments_are_no_error() {
    let arguments = |function: Value| {
        let messages =
            json!({"messages": [{"role": "assistant", "content": null, "tool_calls": [{"function": function}]}]});
        let body = crate::body::Body::parse(messages.to_string().as_bytes(), &["messages"], None).ok().unwrap();
        let chat = crate::chat_request::conversation(&body).map_err(|error| error.json().to_string())?;
        Ok::<_, String>(chat.messages[0]["tool_calls"][0]["function"]["arguments"].clone())
    };
    for none in [
        json!({"arguments": ""}),
        json!({"arguments": " \n"}),
        json!({"arguments": null}),
        json!({}),
        json!({"arguments": "{}"}),
    ] {
        let mut function = none.clone();
        function["name"] = "ping".into();
        assert_eq!(arguments(function), Ok(json!({})), "{none}");
    }
    assert_eq!(arguments(json!({"name": "dive", "arguments": "{\"depth\": 3}"})), Ok(json!({"depth": 3})));
    assert!(arguments(json!({"name": "dive", "arguments": "{"})).unwrap_err().contains("not JSON"));
}

#[test]
fn big_integers_of_arguments_stay_exact() {
    let digits = "123456789012345678901234567890";
    let call = format!(r#"{{"function": {{"name": "dive", "arguments": {{"depth": {digits}}}}}}}"#);
    let text = format!(
        r#"{{"messages": [{{"role": "assistant", "content": "", "tool_calls": [{call}]}}], "max_tokens": {digits}}}"#
    );
    let body = crate::body::Body::parse(text.as_bytes(), &["messages", "max_tokens"], None).ok().unwrap();
    let chat = crate::chat_request::conversation(&body).ok().unwrap();
    let depth = &chat.messages[0]["tool_calls"][0]["function"]["arguments"]["depth"];
    assert_eq!(*depth, ottava_data::parse_json(digits).unwrap());
    assert!(body.count("max_tokens").is_err(), "it is no count");
}

#[test]
fn allowed_tools_are_all_that_the_template_and_the_schema_have() {
    let tool = |name: &str| json!({"type": "function", "function": {"name": name}});
    let tools = [tool("dive"), tool("rise"), tool("rest")];
    let allowed = |mode: &str, names: &[&str]| {
        let tools: Vec<Value> = names.iter().map(|name| tool(name)).collect();
        json!({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}})
    };
    let read = |value: &Value| ToolChoice::read(Some(value), &tools).map_err(|error| error.json().to_string());
    let choice = read(&allowed("required", &["rest", "dive"])).unwrap();
    assert_eq!((&choice.kind, &choice.tools), (&Kind::Required, &vec![tool("rest"), tool("dive")]));
    let schema = choice.schema(usize::MAX).unwrap().unwrap();
    assert_eq!(schema["items"]["anyOf"][1]["properties"]["name"]["const"], "dive");
    assert_eq!(read(&allowed("auto", &["rise"])).unwrap().for_template(Some(&json!([]))), json!([tool("rise")]));
    assert!(read(&allowed("required", &["fly"])).unwrap_err().contains("allows \\\"fly\\\""));
    assert!(read(&allowed("required", &[])).unwrap_err().contains("there are no `tools`"));
    let custom = [json!({"type": "custom", "custom": {"name": "dive"}})];
    assert!(ToolChoice::read(None, &custom).is_err(), "only functions are tools");
}

/// Nested models of Pydantic have `$defs` in the parameters of tools.
#[test]
fn references_of_parameters_are_valid_in_the_schema_of_all_calls() {
    let server = server();
    let parameters = json!({
        "$defs": {"Place": {"type": "object", "properties": {"name": {"type": "string"}, "next": {"$ref": "#/$defs/Place"}}}},
        "type": "object", "properties": {"to": {"$ref": "#/$defs/Place"}}, "required": ["to"],
    });
    let mut request = request("{}");
    request["tools"]
        .as_array_mut()
        .unwrap()
        .push(json!({"type": "function", "function": {"name": "go", "parameters": parameters}}));
    request["max_tokens"] = 2.into();
    for choice in [json!("required"), json!({"type": "function", "function": {"name": "go"}})] {
        request["tool_choice"] = choice;
        server.post("/v1/chat/completions", request.clone());
        assert!(server.log.get(|log| log.requests.last().unwrap().grammar.is_some()));
    }
}

/// The template of this server does not read tools.
#[test]
fn tools_are_described_in_a_message_if_the_template_does_not_read_them() {
    let server = start_with(|_, _| {}, |model| model.max_model_len = 1000);
    let mut body = request("hello");
    body["messages"] = json!([
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "a", "type": "function", "function": {"name": "dive", "arguments": "{\"depth\": 3}"}}]},
        {"role": "tool", "tool_call_id": "a", "content": "wet"},
    ]);
    body["max_tokens"] = 1.into();
    server.post("/v1/chat/completions", body);
    let prompt = server.log.get(|log| tokenizer().decode(&log.requests[0].prompt).unwrap());
    assert!(
        prompt.starts_with("system: You may call these functions") && prompt.contains("\"name\":\"dive\""),
        "{prompt}"
    );
    assert!(
        prompt.contains(r#"assistant: <tool_call>{"name":"dive","arguments":{"depth":3}}</tool_call>"#),
        "{prompt}"
    );
    assert!(prompt.contains("user: <tool_response>wet</tool_response>"), "{prompt}");
    // The calls of such answers are parsed.
    let server = start_with(
        |_, _| {},
        |model| {
            model.template =
                Some(template_of("{% if messages[0].role == 'system' %}{{ messages[1].content }}{% endif %}"))
        },
    );
    let answer = server.post("/v1/chat/completions", request(CALLS));
    assert_eq!(answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"], "dive", "{answer}");
}
