//! Tests reasoning in answers. The stand-in of the engine repeats the last message.

use super::*;

const CHATS: &str = "/v1/chat/completions";

/// Starts a server whose template writes the last message, and the variables of reasoning for the message `variables`.
fn server() -> Server {
    start_with(
        |_, _| {},
        |model| {
            let text = "{% if messages[-1].content == 'variables' %}{{ reasoning_effort }} {{ enable_thinking }}{% else %}\
                        {% for m in messages %}{{ m.reasoning_content }}{% endfor %}{{ messages[-1].content }}{% endif %}";
            model.template = Some(template_of(text));
            model.reasoning_parser = Some("think".parse().unwrap());
        },
    )
}

fn request(content: &str) -> Value {
    json!({"messages": [{"role": "user", "content": content}], "stop": "$", "max_tokens": 100, "logprobs": true})
}

#[test]
fn reasoning_is_a_field_beside_content_in_answers_and_streams() {
    let server = server();
    let text = "<think>\nI look for it.\n</think>\n\nHere it is.$";
    let answer = server.post(CHATS, request(text));
    let message = &answer["choices"][0]["message"];
    assert_eq!((&message["reasoning"], &message["content"]), (&json!("I look for it."), &json!("Here it is.")));
    assert_eq!(message["reasoning_content"], message["reasoning"]);
    let (all, reasoning) =
        (&answer["usage"]["completion_tokens"], &answer["usage"]["completion_tokens_details"]["reasoning_tokens"]);
    let before = tokenizer().encode("<think>\nI look for it.\n</think>").unwrap().len() as u64;
    // The marker of real models is one token, and several tokens here.
    assert!(reasoning.as_u64().unwrap().abs_diff(before) <= 4 && all.as_u64() > reasoning.as_u64(), "{answer}");

    let mut streamed = request(text);
    streamed["stream"] = true.into();
    streamed["stream_options"] = json!({"include_usage": true, "continuous_usage_stats": true});
    let (events, _) = server.stream(CHATS, streamed);
    let joined = |field: &str| {
        events.iter().filter_map(|event| event["choices"][0]["delta"][field].as_str()).collect::<String>()
    };
    assert_eq!([joined("reasoning"), joined("content")], ["I look for it.", "Here it is."]);
    assert_eq!(joined("reasoning_content"), joined("reasoning"));
    assert!(events.iter().all(|event| event["usage"]["prompt_tokens"].is_u64()), "each piece has the usage");
    assert_eq!(events.last().unwrap()["usage"], answer["usage"]);
    let counts: Vec<_> = events.iter().map(|event| event["usage"]["completion_tokens"].as_u64().unwrap()).collect();
    assert!(counts[0] == 0 && counts.is_sorted(), "{counts:?}");
}

#[test]
fn an_answer_begins_within_reasoning_if_its_prompt_does() {
    let server = server();
    // The prompt ends with the marker, and the stand-in begins to repeat it.
    let mut request = request("I look.</think>Here.$<think>");
    let message = server.post(CHATS, request.clone())["choices"][0]["message"].clone();
    assert_eq!((&message["reasoning"], &message["content"]), (&json!("I look."), &json!("Here.")));
    // The answer is cut within reasoning.
    request["max_tokens"] = 2.into();
    let choice = server.post(CHATS, request)["choices"][0].clone();
    assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&Value::Null, &json!("length")));
    assert!(choice["message"]["reasoning"].as_str().unwrap().starts_with('I'), "{choice}");
}

#[test]
fn templates_read_the_effort_and_earlier_reasoning() {
    let server = server();
    let prompt = |body: Value| {
        server.post(CHATS, body);
        server.log.get(|log| tokenizer().decode(&log.requests.last().unwrap().prompt).unwrap())
    };
    let mut effort = request("variables");
    effort["reasoning_effort"] = "low".into();
    effort["chat_template_kwargs"] = json!({"enable_thinking": false});
    assert_eq!(prompt(effort).to_lowercase(), "low false");
    let earlier = json!({"messages": [{"role": "assistant", "content": "b", "reasoning": "so: "}, {"role": "user", "content": "a"}], "max_tokens": 1});
    assert_eq!(prompt(earlier), "so: a");
    // Without a variable for the effort, the switch of the template counts.
    let switched = start_with(
        |_, _| {},
        |model| model.template = Some(template_of("{{ enable_thinking }} {{ messages[-1].content }}")),
    );
    for (effort, expected) in [("none", "false"), ("high", "true")] {
        let mut body = request("a$");
        body["reasoning_effort"] = effort.into();
        switched.post(CHATS, body);
        let prompt = switched.log.get(|log| tokenizer().decode(&log.requests.last().unwrap().prompt).unwrap());
        assert!(prompt.to_lowercase().starts_with(expected), "{prompt}");
    }
}

#[test]
fn a_constraint_begins_after_reasoning() {
    let server = server();
    let answer = |content: &str, effort: Option<&str>| {
        let mut body = request(content);
        body["response_format"] = json!({"type": "json_object"});
        body["reasoning_effort"] = effort.into();
        let message = server.post(CHATS, body)["choices"][0]["message"].clone();
        let grammar = server.log.get(|log| format!("{:?}", log.requests.last().unwrap().grammar));
        (message["reasoning"].clone(), message["content"].clone(), grammar.contains("after ReasoningMarks"))
    };
    // The prompt ends within reasoning.
    assert_eq!(answer("I look.</think>{}$<think>", None), (json!("I look."), json!("{}"), true));
    // This template begins reasoning whatever the effort is.
    assert_eq!(answer("I look.</think>{}$<think>", Some("none")), (json!("I look."), json!("{}"), true));
    assert_eq!(answer("{}$</think>", Some("none")), (Value::Null, json!("{}"), false));
    // The marker of this tokenizer is several tokens, so reasoning that has not begun is not expected.
    assert_eq!(answer("<think>a</think>b$", None), (json!("a"), json!("b"), false));
    // A call that is constrained comes after reasoning too.
    let mut body = request("I look.</think>{\"depth\": 3}$<think>");
    body["tools"] = json!([{"type": "function", "function": {"name": "dive"}}]);
    body["tool_choice"] = json!({"type": "function", "function": {"name": "dive"}});
    let message = server.post(CHATS, body)["choices"][0]["message"].clone();
    let arguments = &message["tool_calls"][0]["function"]["arguments"];
    assert_eq!((&message["reasoning"], arguments), (&json!("I look."), &json!("{\"depth\": 3}")));
}
