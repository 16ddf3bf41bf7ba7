//! Token ids and log-probabilities for programs that train on completions or score them.

use super::*;

const COMPLETIONS: &str = "/v1/completions";
const CHATS: &str = "/v1/chat/completions";
const GENERATE: &str = "/inference/v1/generate";

fn ids(text: &str) -> Vec<u32> {
    tokenizer().encode(text).unwrap()
}

/// The names that log-probabilities give these tokens.
fn names(ids: &[u32]) -> Vec<String> {
    ids.iter().map(|id| format!("token_id:{id}")).collect()
}

/// The elements of a list in all pieces of a stream, in order.
fn joined(events: &[Value], list: &str) -> Value {
    events.iter().filter_map(|event| event.pointer(list)?.as_array().cloned()).flatten().collect()
}

#[test]
fn completions_return_token_ids_with_the_token_that_ends_them() {
    let server = start(|_, _| {});
    let prompt = ids(TEXT);
    let stop = prompt[3];
    let body = json!({"prompt": [TEXT, "two words"], "add_special_tokens": false, "max_tokens": 9, "logprobs": 1,
        "stop_token_ids": [stop], "return_token_ids": true, "return_tokens_as_token_ids": true});
    let whole = server.post(COMPLETIONS, body.clone());
    let choice = &whole["choices"][0];
    assert_eq!(choice["prompt_token_ids"], json!(prompt));
    assert_eq!(choice["token_ids"], json!(prompt[..4]));
    assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("stop"), &json!(stop)));
    assert_eq!(choice["text"], tokenizer().decode(&prompt[..3]).unwrap(), "the stop token is no text");
    assert_eq!(choice["logprobs"]["tokens"], json!(names(&prompt[..4])), "each token has a log-probability");
    let likeliest = choice["logprobs"]["top_logprobs"][1].as_object().unwrap();
    assert!(likeliest.keys().eq(&names(&prompt[1..2])), "{likeliest:?}");
    let second = &whole["choices"][1];
    assert_eq!(
        (second["prompt_token_ids"].clone(), second["stop_reason"].clone()),
        (json!(ids("two words")), Value::Null)
    );

    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let (events, _) = server.stream(COMPLETIONS, streamed);
    let of_first: Vec<Value> = events.into_iter().filter(|event| event["choices"][0]["index"] == 0).collect();
    assert_eq!(joined(&of_first, "/choices/0/token_ids"), choice["token_ids"]);
    assert_eq!(of_first[0]["choices"][0]["prompt_token_ids"], choice["prompt_token_ids"]);
    assert!(of_first[1..].iter().all(|event| event["choices"][0].get("prompt_token_ids").is_none()), "once");
    assert_eq!(of_first.last().unwrap()["choices"][0]["stop_reason"], stop);

    let mut plain = body;
    for name in ["return_token_ids", "return_tokens_as_token_ids"] {
        plain[name] = false.into();
    }
    let plain = &server.post(COMPLETIONS, plain)["choices"][0];
    assert!(plain.get("token_ids").is_none() && plain.get("prompt_token_ids").is_none(), "{plain}");
    let tokens = plain["logprobs"]["tokens"].as_array().unwrap().iter().map(|token| token.as_str().unwrap());
    assert_eq!(json!(tokens.collect::<String>()), plain["text"], "texts, without the stop token");
}

#[test]
fn chats_return_token_ids_and_log_probabilities_of_prompts() {
    let server = start(|_, _| {});
    let prompt = ids("user: a stone\nassistant:");
    let body = json!({"messages": [{"role": "user", "content": "a stone"}], "max_tokens": 4, "n": 2, "logprobs": true,
        "prompt_logprobs": 1, "return_token_ids": true, "return_tokens_as_token_ids": true});
    let whole = server.post(CHATS, body.clone());
    assert_eq!(whole["prompt_token_ids"], json!(prompt));
    let of_prompt = whole["prompt_logprobs"].as_array().unwrap();
    assert_eq!((of_prompt.len(), &of_prompt[0]), (prompt.len(), &Value::Null));
    assert_eq!(of_prompt[2][prompt[2].to_string()]["logprob"], -0.75);
    for choice in whole["choices"].as_array().unwrap() {
        assert_eq!((&choice["token_ids"], &choice["stop_reason"]), (&json!(prompt[..4]), &Value::Null));
        let content = choice["logprobs"]["content"].as_array().unwrap();
        let tokens: Vec<&str> = content.iter().map(|entry| entry["token"].as_str().unwrap()).collect();
        assert_eq!(tokens, names(&prompt[..4]));
    }
    let mut streamed = body;
    streamed["stream"] = true.into();
    let (events, _) = server.stream(CHATS, streamed);
    assert_eq!(events[0]["prompt_token_ids"], whole["prompt_token_ids"]);
    for name in ["prompt_token_ids", "prompt_logprobs"] {
        let told: Vec<&Value> = events.iter().filter_map(|event| event.get(name)).collect();
        assert_eq!(told, [&whole[name]], "{name} once");
    }
    let of_second: Vec<Value> = events.into_iter().filter(|event| event["choices"][0]["index"] == 1).collect();
    assert_eq!(joined(&of_second, "/choices/0/token_ids"), json!(prompt[..4]));
}

#[test]
fn stop_reasons_tell_what_ended_a_text() {
    let server = start(|_, _| {});
    let eos = tokenizer().eos_ids()[0];
    let text = ids(TEXT);
    let prompt: Vec<u32> = text[..3].iter().copied().chain([eos]).collect();
    for (fields, reason, stop) in [
        (json!({"max_tokens": 2}), "length", Value::Null),
        (json!({}), "stop", Value::Null),
        (json!({"stop_token_ids": [eos]}), "stop", Value::Null),
        (json!({"stop_token_ids": [eos], "ignore_eos": true}), "stop", json!(eos)),
        (json!({"stop_token_ids": [prompt[1]]}), "stop", json!(prompt[1])),
        (json!({"stop": ["never there", " of"]}), "stop", json!(" of")),
    ] {
        let mut body = json!({"prompt": prompt, "max_tokens": 20});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let answer = server.post(COMPLETIONS, body);
        // The server ends a completion at a text of `stop` before the engine tells its end.
        assert_eq!(answer["usage"]["prompt_tokens_details"], json!({"cached_tokens": 1}), "{fields}");
        let choice = &answer["choices"][0];
        assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!(reason), &stop), "{fields}");
    }
    let body = json!({"messages": [{"role": "user", "content": TEXT}], "max_tokens": 40, "stop": "sea"});
    let choice = &server.post(CHATS, body)["choices"][0];
    assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("stop"), &json!("sea")));
}

/// What the client of verifiers sends and reads.
#[test]
fn generate_takes_and_gives_token_ids() {
    let server = start(|_, _| {});
    let eos = tokenizer().eos_ids()[0];
    let prompt: Vec<u32> = ids(TEXT).into_iter().chain([eos]).collect();
    let sampling = json!({"temperature": 1.0, "top_p": 0.9, "max_tokens": 20, "logprobs": 1, "seed": 5, "n": 2,
        "stop_token_ids": [eos], "skip_special_tokens": false, "detokenize": false, "extra_args": {}});
    let body = json!({"model": "parrot", "token_ids": prompt, "sampling_params": sampling, "cache_salt": "step 3",
        "priority": 0, "request_id": "sample-7"});
    let whole = server.post(GENERATE, body.clone());
    assert_eq!(whole["request_id"], "sample-7");
    assert_eq!(whole["usage"]["prompt_tokens"], prompt.len());
    let choices = whole["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 2);
    for choice in choices {
        assert_eq!((&choice["token_ids"], &choice["finish_reason"]), (&json!(prompt), &json!("stop")));
        let content = choice["logprobs"]["content"].as_array().unwrap();
        let tokens: Vec<&str> = content.iter().map(|entry| entry["token"].as_str().unwrap()).collect();
        assert_eq!(tokens, names(&prompt), "one for each token, also for the last");
        assert!(choice.get("text").is_none(), "{choice}");
    }
    server.log.get(|log| {
        let Request { sampling, logprobs, prompt_logprobs, .. } = &log.requests[0];
        assert_eq!((sampling.seed, sampling.top_p, *logprobs, *prompt_logprobs), (5, 0.9, Some(1), None));
    });
    let mut streamed = body;
    (streamed["stream"], streamed["stream_options"]) = (true.into(), json!({"include_usage": true}));
    let (events, done) = server.stream(GENERATE, streamed);
    assert!(done && events.iter().all(|event| event["request_id"] == "sample-7"));
    let of_first: Vec<Value> = events.iter().filter(|event| event["choices"][0]["index"] == 0).cloned().collect();
    assert_eq!(joined(&of_first, "/choices/0/token_ids"), json!(prompt));
    assert_eq!(joined(&of_first, "/choices/0/logprobs/content"), choices[0]["logprobs"]["content"]);
    assert_eq!(events.last().unwrap()["usage"], whole["usage"]);

    // Teachers and references score prompts.
    let scored = json!({"token_ids": prompt, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1}});
    let scored = server.post(GENERATE, scored);
    assert_eq!(scored["prompt_logprobs"].as_array().unwrap().len(), prompt.len());
    assert!(scored["choices"][0]["logprobs"].is_null() && scored["request_id"].is_string());
    assert_eq!(server.post(GENERATE, json!({"token_ids": prompt}))["choices"][0]["token_ids"], json!(prompt));
}

#[test]
fn generate_names_fields_that_cannot_be_used() {
    let server = start(|options, _| options.strict = true);
    for (body, param) in [
        (json!({}), "token_ids"),
        (json!({"token_ids": []}), "token_ids"),
        (json!({"token_ids": "a"}), "token_ids"),
        (json!({"token_ids": [[1], [2]]}), "token_ids"),
        (json!({"token_ids": [4096]}), "token_ids"),
        (json!({"token_ids": [1], "prompt": "a"}), "prompt"),
        (json!({"token_ids": [1], "max_tokens": 5}), "max_tokens"),
        (json!({"token_ids": [1], "features": {"mm_hashes": {}}}), "features"),
        (json!({"token_ids": [1], "priority": 2}), "priority"),
        (json!({"token_ids": [1], "sampling_params": 5}), "sampling_params"),
        (json!({"token_ids": [1], "sampling_params": {"max_token": 5}}), "sampling_params.max_token"),
        (json!({"token_ids": [1], "sampling_params": {"stream": true}}), "sampling_params.stream"),
        (json!({"token_ids": [1], "sampling_params": {"max_tokens": 0}}), "max_tokens"),
        (json!({"token_ids": [1], "sampling_params": {"temperature": -1}}), "temperature"),
        (json!({"token_ids": [1], "sampling_params": {"extra_args": {"a": 1}}}), "extra_args"),
    ] {
        let (status, error) = server.refused(GENERATE, &body);
        assert_eq!((status, error["param"].as_str()), (400, Some(param)), "{body}: {error}");
    }
    assert!(server.log.get(|log| log.requests.is_empty()), "none reaches the engine");
    let (status, error) = server.refused(GENERATE, &json!({"model": "owl", "token_ids": [1]}));
    assert_eq!((status, error["code"].as_str()), (404, Some("model_not_found")));
}
