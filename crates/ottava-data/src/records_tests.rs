use serde_json::json;

use super::*;
use crate::preference_records::after;

fn read(record: Value) -> Result<Content, String> {
    Formatting::detect(&record.to_string()).unwrap().read(&record)
}

fn roles(record: Value) -> Vec<String> {
    let Content::Chat(chat) = read(record).unwrap() else { panic!("a chat") };
    let told = |m: &Value| format!("{}:{}", m["role"].as_str().unwrap(), m["content"].as_str().unwrap());
    chat.messages.iter().map(told).collect()
}

#[test]
fn records_of_all_kinds_are_read() {
    let chat = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
    assert_eq!(roles(json!({"messages": chat, "text": "x"})), ["user:a", "assistant:b"]);
    let alpaca = json!({"instruction": "i", "input": "x", "output": "o", "system": "s", "history": [["h", "g"]]});
    assert_eq!(roles(alpaca), ["system:s", "user:h", "assistant:g", "user:i\nx", "assistant:o"]);
    assert_eq!(roles(json!({"instruction": "i", "input": "", "output": "o"})), ["user:i", "assistant:o"]);
    let sharegpt = json!({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]});
    assert_eq!(roles(sharegpt), ["user:a", "assistant:b"]);
    let roles_in_sharegpt = json!({"conversations": chat, "system": "s"});
    assert_eq!(roles(roles_in_sharegpt), ["system:s", "user:a", "assistant:b"]);
    let call = r#"{"name": "f", "arguments": {"a": 1}}"#;
    let calls = json!({"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": call}]});
    let Content::Chat(called) = read(calls).unwrap() else { panic!("a chat") };
    assert_eq!(called.messages[1]["tool_calls"][0]["function"], json!({"name": "f", "arguments": {"a": 1}}));
    let Content::Chat(chat) = read(json!({"prompt": [chat[0]], "completion": [chat[1]], "tools": "[{}]"})).unwrap()
    else {
        panic!("a chat")
    };
    assert_eq!((chat.messages.len(), chat.learned_from, chat.tools), (2, 1, json!([{}])));
    let texts = read(json!({"prompt": "p", "completion": "c"})).unwrap();
    assert_eq!(texts, Content::Completion { prompt: "p".into(), completion: "c".into() });
    assert_eq!(Formatting::detect(r#"{"text": "x", "prompt": "y"}"#), Ok(Formatting::Text));
    for formatting in [
        Formatting::Auto,
        Formatting::PromptCompletion,
        Formatting::Sharegpt,
        Formatting::Preference,
        Formatting::UnpairedPreference,
    ] {
        assert_eq!(json!(formatting), formatting.as_str());
    }
}

#[test]
fn preferences_are_read_in_the_shapes_of_trl() {
    let [user, good, bad] =
        [("user", "u"), ("assistant", "g"), ("assistant", "b")].map(|(role, text)| Chat::message(role, text));
    let texts =
        |prompt: &str, completion: &str| Content::Completion { prompt: prompt.into(), completion: completion.into() };
    let chat = |completion: &Value| after(vec![user.clone()], vec![completion.clone()]);
    let pair = |completions: [Content; 2]| Content::Pair { completions: Box::new(completions), margin: 0.0 };
    let pair_of_texts = pair([texts("p", "a"), texts("p", "b")]);
    let pair_of_chats = pair([chat(&good), chat(&bad)]);
    let with_margin = Content::Pair { completions: Box::new([texts("p", "a"), texts("p", "b")]), margin: 0.5 };
    for (record, expected) in [
        (json!({"prompt": "p", "chosen": "a", "rejected": "b"}), pair_of_texts.clone()),
        (json!({"prompt": "p", "chosen": "a", "rejected": "b", "margin": null}), pair_of_texts),
        (json!({"prompt": "p", "chosen": "a", "rejected": "b", "margin": 0.5}), with_margin),
        (json!({"chosen": "p q a", "rejected": "p q b"}), pair([texts("p q", " a"), texts("p q", " b")])),
        (json!({"prompt": [user], "chosen": [good], "rejected": [bad]}), pair_of_chats.clone()),
        (json!({"chosen": [user, good], "rejected": [user, bad]}), pair_of_chats.clone()),
        (json!({"prompt": "u", "chosen": [user, good], "rejected": [user, bad], "messages": []}), pair_of_chats),
        (json!({"prompt": "p", "completion": "c", "label": false}), Content::Labeled(Box::new(texts("p", "c")), false)),
        (json!({"prompt": [user], "completion": [good], "label": 1}), Content::Labeled(Box::new(chat(&good)), true)),
    ] {
        assert_eq!(read(record.clone()).unwrap(), expected, "{record}");
    }
}

#[test]
fn wrong_records_say_which_field() {
    for (record, says) in [
        (json!({"messages": []}), "`messages` is an empty list"),
        (json!({"messages": "x"}), "`messages` is not a list"),
        (
            json!({"messages": [{"content": "x"}]}),
            "message 1 of `messages`: field `role` is missing; the message has `content`",
        ),
        (
            json!({"messages": [{"speaker": "a", "text": "x"}]}),
            "set data.records.fields = { role = \"speaker\", content = \"text\" }",
        ),
        (json!({"messages": [{"role": "user"}]}), "message 1 of `messages`: field `content` is missing"),
        (json!({"messages": [{"role": "user", "content": 1}]}), "field `content` is not a text"),
        (
            json!({"messages": [{"role": "user", "contnet": "x"}]}),
            "`contnet` is no field of a message; did you mean `content`?",
        ),
        (json!({"messages": [{"role": "user", "content": "x", "train": 1}]}), "`train` is neither true nor false"),
        (json!({"conversations": [{"from": "function_call", "value": "x"}]}), "is not the JSON of a call"),
        (json!({"messages": [[]], "tools": 1}), "message 1 of `messages` is not an object"),
        (json!({"messages": [{"role": "user", "content": "x"}], "tools": {}}), "`tools` is not a list"),
        (json!({"prompt": "p", "completion": []}), "neither two texts nor two lists"),
        (json!({"prompt": "p", "completion": ""}), "`completion` is empty"),
        (json!({"chosen": "a b", "rejected": "a b"}), "do not differ"),
        (
            json!({"chosen": [{"role": "user", "content": "x"}], "rejected": [{"role": "user", "content": "y"}]}),
            "no first message",
        ),
        (json!({"prompt": "p", "chosen": "c", "rejected": ""}), "`rejected` is empty"),
        (json!({"prompt": "p", "chosen": "c", "rejected": "r", "margin": "x"}), "`margin` is not a number"),
        (json!({"prompt": "p", "chosen": "c", "rejected": ["r"]}), "`prompt` and `rejected` are neither two texts"),
        (json!({"prompt": "p", "completion": "c", "label": "yes"}), "`label` is neither true nor false"),
        (json!({"instruction": 1, "output": "o"}), "`instruction` is not a text"),
        (json!({"instruction": "i", "output": "o", "history": [1]}), "`history` is not a list of pairs"),
        (json!({"conversations": [{"from": "dog", "value": "w"}]}), "turn 1 of `conversations`: `from` is \"dog\""),
        (json!({"conversations": [{"from": "human"}]}), "turn 1 of `conversations`: field `value` is missing"),
    ] {
        let reason = read(record.clone()).unwrap_err();
        assert!(reason.contains(says), "{record}: {reason}");
    }
}

/// Returns role, content and `train` of the messages of a chat.
fn turns(record: Value) -> Result<Value, String> {
    let Content::Chat(chat) = read(record)? else { panic!("a chat") };
    let turn = |message: &Value| json!([message["role"], message["content"], message.get("train")]);
    Ok(chat.messages.iter().map(turn).collect())
}

#[test]
fn null_is_as_a_missing_field() {
    let user = json!({"role": "user", "content": "a", "name": null, "tool_calls": null});
    let answer = json!({"role": "assistant", "content": "b", "tool_calls": null, "train": null, "weight": null});
    let record = json!({"text": null, "messages": [user, answer], "tools": null, "system": null, "chosen": null, "rejected": null});
    let Content::Chat(chat) = read(record).unwrap() else { panic!("a chat") };
    assert_eq!(chat.messages, [Chat::message("user", "a"), Chat::message("assistant", "b")]);
    let turn = json!([{"from": "human", "value": "a", "role": null, "weight": null}, {"from": "gpt", "value": "b", "content": null}]);
    assert_eq!(
        turns(json!({"conversations": turn, "messages": null})).unwrap(),
        json!([["user", "a", null], ["assistant", "b", null]])
    );
    assert_eq!(Formatting::detect(r#"{"text": "x", "messages": null, "input_ids": null}"#), Ok(Formatting::Text));
    for content in [
        json!({"role": "user", "content": null, "tool_calls": null}),
        json!({"role": "user", "content": null, "tool_calls": []}),
        json!({"role": "user"}),
    ] {
        let reason = read(json!({"messages": [content]})).unwrap_err();
        assert!(reason.contains("message 1 of `messages`: field `content` is missing or null"), "{reason}");
    }
    let call = json!({"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f"}}]});
    assert!(read(json!({"messages": [call]})).is_ok());
}

#[test]
fn turns_with_a_weight_of_zero_are_not_trained_on() {
    let turns_of = |weight: Value| {
        let good = json!({"from": "gpt", "value": "good", "weight": 1});
        turns(
            json!({"conversations": [{"from": "human", "value": "a", "weight": 0}, {"from": "gpt", "value": "bad", "weight": weight}, good]}),
        )
    };
    for weight in [json!(0), json!(0.0), json!(false)] {
        assert_eq!(
            turns_of(weight).unwrap(),
            json!([["user", "a", false], ["assistant", "bad", false], ["assistant", "good", null]])
        );
    }
    assert!(turns_of(json!(0.5)).unwrap_err().contains("turn 2 of `conversations`: field `weight` is 0.5; it is 0"));
    let message = |fields: Value| turns(json!({"messages": [fields]}));
    assert_eq!(
        message(json!({"role": "assistant", "content": "x", "weight": 0})).unwrap(),
        json!([["assistant", "x", false]])
    );
    let both = json!({"role": "assistant", "content": "x", "weight": 0, "train": true});
    assert!(message(both).unwrap_err().contains("contradict"));
    // Fields of a turn that the reader does not know stay in the message. Encoding refuses such a field if the chat template does not read it.
    let Content::Chat(chat) = read(json!({"conversations": [{"from": "gpt", "value": "x", "mask": 1}]})).unwrap()
    else {
        panic!("a chat")
    };
    assert_eq!(chat.messages[0]["mask"], 1);
}

#[test]
fn a_system_message_of_its_own_never_vanishes() {
    let [user, answer, other] =
        [("user", "u"), ("assistant", "a"), ("assistant", "o")].map(|(role, text)| Chat::message(role, text));
    let first = |content: &Content| match content {
        Content::Chat(chat) => (chat.messages[0]["content"].clone(), chat.learned_from),
        _ => panic!("a chat"),
    };
    for (record, learned_from) in [
        (json!({"system": "s", "messages": [user, answer]}), 0),
        (json!({"system": "s", "prompt": [user], "completion": [answer]}), 2),
        (json!({"system": "s", "conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]}), 0),
        (json!({"system": "s", "instruction": "u", "output": "a"}), 0),
        (json!({"system": "s", "prompt": [user], "chosen": [answer], "rejected": [other]}), 2),
        (json!({"system": "s", "chosen": [user, answer], "rejected": [user, other]}), 2),
        (json!({"system": "s", "prompt": [user], "completion": [answer], "label": true}), 2),
        (json!({"system": "s", "messages": [user, answer], "label": true}), 2),
    ] {
        match read(record.clone()).unwrap() {
            Content::Pair { completions, .. } => completions
                .iter()
                .for_each(|content| assert_eq!(first(content), (json!("s"), learned_from), "{record}")),
            Content::Labeled(content, _) => assert_eq!(first(&content), (json!("s"), learned_from), "{record}"),
            content => assert_eq!(first(&content), (json!("s"), learned_from), "{record}"),
        }
    }
    let system = |text: &str| Chat::message("system", text);
    assert_eq!(turns(json!({"system": "s", "messages": [system("s"), user]})).unwrap().as_array().unwrap().len(), 2);
    for (record, says) in [
        (json!({"system": "s", "messages": [system("t"), user]}), "begins with another system message"),
        (
            json!({"system": "s", "conversations": [{"from": "system", "value": "t"}]}),
            "begins with another system message",
        ),
        (json!({"system": "s", "prompt": "p", "completion": "c"}), "put its text into `prompt`"),
        (json!({"system": "s", "prompt": "p", "chosen": "c", "rejected": "r"}), "put its text into `prompt`"),
    ] {
        let reason = read(record.clone()).unwrap_err();
        assert!(reason.contains(says), "{record}: {reason}");
    }
}

#[test]
fn conversations_with_a_label_are_preferences() {
    let [user, answer] = [Chat::message("user", "u"), Chat::message("assistant", "a")];
    let expected = |label| Content::Labeled(Box::new(after(vec![user.clone()], vec![answer.clone()])), label);
    for (record, label) in [
        (json!({"messages": [user, answer], "label": true}), true),
        (json!({"messages": [user, answer], "label": 0}), false),
        (json!({"messages": [user, answer], "label": "False"}), false),
        (
            json!({"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}], "label": false}),
            false,
        ),
        (json!({"instruction": "u", "input": "", "output": "a", "label": true}), true),
    ] {
        assert_eq!(read(record.clone()).unwrap(), expected(label), "{record}");
    }
    // A column `label` with other values is not the label of an answer.
    assert_eq!(Formatting::detect(r#"{"messages": [], "label": "sports"}"#), Ok(Formatting::Messages));
    let reason = read(json!({"messages": [user], "label": true})).unwrap_err();
    assert!(reason.contains("ends with the answer of the assistant"), "{reason}");
    for (label, expected) in [("True", true), ("1", true), ("1.0", true), ("false", false), ("0", false)] {
        let record = json!({"prompt": "p", "completion": "c", "label": label});
        let Content::Labeled(_, found) = read(record).unwrap() else { panic!("a label") };
        assert_eq!(found, expected, "{label}");
    }
    for (margin, expected) in [(json!("0.5"), 0.5), (json!(""), 0.0), (json!(2), 2.0)] {
        let Content::Pair { margin, .. } =
            read(json!({"prompt": "p", "chosen": "c", "rejected": "r", "margin": margin})).unwrap()
        else {
            panic!("a pair")
        };
        assert_eq!(margin, expected);
    }
}

#[test]
fn an_empty_list_of_tools_stays_one_as_in_transformers() {
    let tools = |tools: Value| {
        let Content::Chat(chat) =
            read(json!({"messages": [{"role": "user", "content": "a"}], "tools": tools})).unwrap()
        else {
            panic!("a chat")
        };
        chat.tools
    };
    assert_eq!(
        (tools(json!([])), tools(json!("[]")), tools(json!("")), tools(Value::Null)),
        (json!([]), json!([]), Value::Null, Value::Null)
    );
}

#[test]
fn pairs_of_llama_factory_are_read() {
    let [user, good, bad] =
        [("user", "u"), ("assistant", "g"), ("assistant", "b")].map(|(role, text)| Chat::message(role, text));
    let [chosen, rejected] = [&good, &bad].map(|answer| {
        Content::Chat(Chat { messages: vec![user.clone(), answer.clone()], learned_from: 1, ..Chat::default() })
    });
    let expected = Content::Pair { completions: Box::new([chosen, rejected]), margin: 0.0 };
    let turns = json!([{"from": "human", "value": "u"}]);
    let [chosen, rejected] = [json!({"from": "gpt", "value": "g"}), json!({"from": "gpt", "value": "b"})];
    for record in [
        json!({"conversations": turns, "chosen": chosen, "rejected": rejected}),
        json!({"messages": [user], "chosen": good, "rejected": bad}),
        json!({"prompt": [user], "chosen": good, "rejected": bad}),
        json!({"prompt": "u", "chosen": good, "rejected": bad}),
        json!({"conversations": turns, "chosen": "g", "rejected": "b"}),
        json!({"instruction": "u", "input": "", "chosen": "g", "rejected": "b"}),
    ] {
        assert_eq!(read(record.clone()).unwrap(), expected, "{record}");
    }
    let reason = read(json!({"conversations": turns, "chosen": {"from": "gpt"}, "rejected": rejected})).unwrap_err();
    assert!(reason.contains("`chosen`: field `value` is missing"), "{reason}");
}

#[test]
fn values_that_only_python_knows_are_named_where_they_are_used() {
    let content = |record: &str| {
        let mut formatting = Formatting::Auto;
        crate::fields::json_content(record, "text", &mut formatting, &crate::mapping::Mapping::default())
    };
    for unused in ["NaN", "-Infinity", "1e400", "123456789012345678901234567890", "\"\\ud800\""] {
        let text = content(&format!(r#"{{"text": "a", "score": {unused}}}"#));
        assert_eq!(text, Ok(Content::Text("a".into())), "{unused}");
        let chat = content(&format!(r#"{{"score": {unused}, "messages": [{{"role": "user", "content": "a"}}]}}"#));
        assert!(matches!(chat, Ok(Content::Chat(_))), "{unused}: {chat:?}");
    }
    for (record, says) in [
        (r#"{"text": NaN}"#, "field `text` is NaN, and not a text"),
        (r#"{"text": null}"#, "field `text` is null"),
        (
            r#"{"text": "a\ud83d"}"#,
            "a text with a lone surrogate (\\ud83d), which is half of a character, and not a text",
        ),
        (r#"{"text": "a\u0000b"}"#, "field `text` has a zero byte"),
        (r#"{"prompt": "a\u0000b", "completion": "c"}"#, "a text has a zero byte"),
        (r#"{"messages": [{"role": "user", "content": "a\u0000"}]}"#, "a text has a zero byte"),
        (r#"{"messages": [{"role": "user", "content": "a\ud83d"}]}"#, "`content` is a text with a lone surrogate"),
        (
            r#"{"messages": [{"role": "user", "content": "a", "tool_calls": [{"x": "\ud83d"}]}]}"#,
            "a message has a text with a lone",
        ),
        (r#"{"prompt": "p", "chosen": "c", "rejected": "r", "margin": NaN}"#, "`margin` is NaN, and not a number"),
        (
            r#"{"question": "a", "answer": "b"}"#,
            r#"set data.records.fields = { prompt = "question", completion = "answer" }"#,
        ),
    ] {
        let reason = content(record).unwrap_err();
        assert!(reason.contains(says), "{record}: {reason}");
    }
}
