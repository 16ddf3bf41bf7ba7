//! Tools in the words of messages, for chat templates that do not read tools. Calls have the format of the parser `hermes`.

use ottava_data::Chat;
use serde_json::{Value, json};

/// Returns the same conversation as messages with nothing but texts.
pub fn described(chat: &Chat) -> Chat {
    let mut messages: Vec<Value> = chat.messages.iter().map(in_words).collect();
    let tools = chat.tools.as_array().into_iter().flatten().map(|tool| tool["function"].to_string());
    let tools = tools.collect::<Vec<_>>().join("\n");
    let text = format!(
        "You may call these functions. Each line has the JSON description of a function:\n{tools}\n\nTo call a function, write the call as JSON between \
         markers:\n<tool_call>{{\"name\": NAME, \"arguments\": {{…}}}}</tool_call>"
    );
    match messages.first_mut().filter(|message| message["role"] == "system") {
        Some(system) => system["content"] = format!("{}\n\n{text}", text_of(&system["content"])).into(),
        None => messages.insert(0, Chat::message("system", &text)),
    }
    Chat { messages, tools: Value::Null, ..chat.clone() }
}

/// A message without calls and results of calls.
fn in_words(message: &Value) -> Value {
    let content = text_of(&message["content"]);
    if message["role"] == "tool" {
        return Chat::message("user", &format!("<tool_response>{content}</tool_response>"));
    }
    let calls = message["tool_calls"].as_array().into_iter().flatten().map(|call| {
        let function = json!({"name": call["function"]["name"], "arguments": call["function"]["arguments"]});
        format!("<tool_call>{function}</tool_call>")
    });
    let calls: Vec<String> = calls.collect();
    if calls.is_empty() {
        return message.clone();
    }
    let parts = (!content.is_empty()).then_some(content).into_iter().chain(calls);
    Chat::message("assistant", &parts.collect::<Vec<_>>().join("\n"))
}

/// The text of the content of a message.
fn text_of(content: &Value) -> String {
    match content {
        Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().join("\n"),
        content => content.as_str().unwrap_or_default().to_string(),
    }
}
