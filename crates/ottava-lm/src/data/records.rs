//! Records of a `.jsonl` file: a text, a chat, or a prompt with its completion.

use std::collections::BTreeMap;

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::chat::Chat;

/// The fields that a record has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Formatting {
    /// That of the first record of the file.
    #[default]
    Auto,
    /// A text in one field.
    Text,
    /// `messages`: a list of objects with `role` and `content`; also `tools`.
    Messages,
    /// `prompt` and `completion`: two texts, or two lists of messages.
    PromptCompletion,
    /// `instruction`, `output`, and optionally `input`, `system` and `history`.
    Alpaca,
    /// `conversations`: a list of objects with `from` and `value`; optionally `system`.
    Sharegpt,
}

/// The content of a document.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// A text, never empty.
    Text(String),
    /// A conversation, which a chat template renders.
    Chat(Chat),
    /// A text to complete, and its completion.
    Completion {
        /// The text before.
        prompt: String,
        /// The text that the model is trained to write.
        completion: String,
    },
}

impl Formatting {
    /// The name as in `data.formatting`.
    pub fn as_str(self) -> &'static str {
        match self {
            Formatting::Auto => "auto",
            Formatting::Text => "text",
            Formatting::Messages => "messages",
            Formatting::PromptCompletion => "prompt_completion",
            Formatting::Alpaca => "alpaca",
            Formatting::Sharegpt => "sharegpt",
        }
    }

    /// The formatting of a file whose first record is `record`. The fields of a chat go before `text`.
    pub(super) fn detect(record: &str) -> Formatting {
        let fields: BTreeMap<String, IgnoredAny> = serde_json::from_str(record).unwrap_or_default();
        let has = |key: &str| fields.contains_key(key);
        match () {
            () if has("messages") => Formatting::Messages,
            () if has("conversations") => Formatting::Sharegpt,
            () if has("prompt") && has("completion") => Formatting::PromptCompletion,
            () if has("instruction") && has("output") => Formatting::Alpaca,
            () => Formatting::Text,
        }
    }

    /// Whether each record has a prompt, which does not contribute to the loss.
    pub fn has_prompts(self) -> bool {
        !matches!(self, Formatting::Auto | Formatting::Text)
    }

    /// The content of a record that is not a plain text. Errors with the reason.
    pub(super) fn read(self, record: &Value) -> Result<Content, String> {
        let record = record.as_object().ok_or("a record is an object")?;
        let content = match self {
            Formatting::Auto | Formatting::Text => unreachable!("a text is read by itself"),
            Formatting::Messages => Content::Chat(Chat { messages: messages(record, "messages")?, ..Chat::default() }),
            Formatting::PromptCompletion => prompt_completion(record)?,
            Formatting::Alpaca => Content::Chat(Chat { messages: alpaca(record)?, ..Chat::default() }),
            Formatting::Sharegpt => Content::Chat(Chat { messages: sharegpt(record)?, ..Chat::default() }),
        };
        Ok(match content {
            Content::Chat(chat) => Content::Chat(Chat { tools: tools(record)?, ..chat }),
            other => other,
        })
    }
}

fn field<'a>(record: &'a Map<String, Value>, key: &str) -> Result<&'a Value, String> {
    record.get(key).ok_or_else(|| format!("field `{key}` is missing"))
}

fn text<'a>(record: &'a Map<String, Value>, key: &str) -> Result<&'a str, String> {
    field(record, key)?.as_str().ok_or_else(|| format!("field `{key}` is not a text"))
}

/// A text that may be missing or `null`, which are as an empty one.
fn optional_text<'a>(record: &'a Map<String, Value>, key: &str) -> Result<&'a str, String> {
    match record.get(key) {
        None | Some(Value::Null) => Ok(""),
        Some(_) => text(record, key),
    }
}

fn list<'a>(record: &'a Map<String, Value>, key: &str) -> Result<&'a [Value], String> {
    match field(record, key)? {
        Value::Array(list) if !list.is_empty() => Ok(list),
        Value::Array(_) => Err(format!("field `{key}` is an empty list")),
        _ => Err(format!("field `{key}` is not a list")),
    }
}

fn messages(record: &Map<String, Value>, key: &str) -> Result<Vec<Value>, String> {
    let messages = list(record, key)?;
    for (i, message) in messages.iter().enumerate() {
        let place = format!("message {} of `{key}`", i + 1);
        let fields = message.as_object().ok_or_else(|| format!("{place} is not an object"))?;
        text(fields, "role").map_err(|reason| format!("{place}: {reason}"))?;
        match fields.get("content") {
            Some(Value::String(_) | Value::Array(_)) => {}
            None | Some(Value::Null) if fields.contains_key("tool_calls") => {}
            None => return Err(format!("{place}: field `content` is missing")),
            Some(_) => return Err(format!("{place}: field `content` is not a text")),
        }
    }
    Ok(messages.to_vec())
}

fn prompt_completion(record: &Map<String, Value>) -> Result<Content, String> {
    match (field(record, "prompt")?, field(record, "completion")?) {
        (Value::String(prompt), Value::String(completion)) if !completion.is_empty() => {
            Ok(Content::Completion { prompt: prompt.clone(), completion: completion.clone() })
        }
        (Value::String(_), Value::String(_)) => Err("field `completion` is empty".into()),
        (Value::Array(_), Value::Array(_)) => {
            let mut chat = messages(record, "prompt")?;
            let learned_from = chat.len();
            chat.extend(messages(record, "completion")?);
            Ok(Content::Chat(Chat { messages: chat, learned_from, ..Chat::default() }))
        }
        _ => Err("fields `prompt` and `completion` are neither two texts nor two lists of messages".into()),
    }
}

fn alpaca(record: &Map<String, Value>) -> Result<Vec<Value>, String> {
    let mut messages = system(record)?;
    if let Some(history) = record.get("history").filter(|history| !history.is_null()) {
        let turns: Vec<(String, String)> = serde_json::from_value(history.clone())
            .map_err(|_| "field `history` is not a list of pairs of texts".to_string())?;
        for (instruction, output) in turns {
            messages.extend([Chat::message("user", &instruction), Chat::message("assistant", &output)]);
        }
    }
    let (instruction, input) = (text(record, "instruction")?, optional_text(record, "input")?);
    let separator = if input.is_empty() { "" } else { "\n" };
    messages.push(Chat::message("user", &format!("{instruction}{separator}{input}")));
    messages.push(Chat::message("assistant", text(record, "output")?));
    Ok(messages)
}

fn sharegpt(record: &Map<String, Value>) -> Result<Vec<Value>, String> {
    let mut messages = system(record)?;
    for (i, turn) in list(record, "conversations")?.iter().enumerate() {
        let place = |reason: String| format!("turn {} of `conversations`: {reason}", i + 1);
        let turn = turn.as_object().ok_or_else(|| place("it is not an object".into()))?;
        let role = match text(turn, "from").map_err(place)? {
            "human" | "user" => "user",
            "gpt" | "assistant" | "model" | "chatgpt" => "assistant",
            "system" => "system",
            "observation" | "function_response" | "tool" => "tool",
            other => {
                return Err(place(format!("`from` is {other:?}; it is human, gpt, system or observation")));
            }
        };
        messages.push(Chat::message(role, text(turn, "value").map_err(place)?));
    }
    Ok(messages)
}

/// The system message in a field of its own.
fn system(record: &Map<String, Value>) -> Result<Vec<Value>, String> {
    let system = optional_text(record, "system")?;
    Ok(if system.is_empty() { Vec::new() } else { vec![Chat::message("system", system)] })
}

/// Descriptions of functions, a list or a list written as a text.
fn tools(record: &Map<String, Value>) -> Result<Value, String> {
    let wrong = || "field `tools` is not a list".to_string();
    let tools = match record.get("tools") {
        None | Some(Value::Null) => return Ok(Value::Null),
        Some(Value::String(text)) if text.is_empty() => return Ok(Value::Null),
        Some(Value::String(text)) => serde_json::from_str(text).map_err(|_| wrong())?,
        Some(value) => value.clone(),
    };
    match tools {
        Value::Array(list) if list.is_empty() => Ok(Value::Null),
        Value::Array(_) => Ok(tools),
        _ => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(record: Value) -> Result<Content, String> {
        Formatting::detect(&record.to_string()).read(&record)
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
        let Content::Chat(chat) = read(json!({"prompt": [chat[0]], "completion": [chat[1]], "tools": "[{}]"})).unwrap()
        else {
            panic!("a chat")
        };
        assert_eq!((chat.messages.len(), chat.learned_from, chat.tools), (2, 1, json!([{}])));
        let texts = read(json!({"prompt": "p", "completion": "c"})).unwrap();
        assert_eq!(texts, Content::Completion { prompt: "p".into(), completion: "c".into() });
        assert_eq!(Formatting::detect(r#"{"text": "x", "prompt": "y"}"#), Formatting::Text);
        for formatting in [Formatting::Auto, Formatting::PromptCompletion, Formatting::Sharegpt] {
            assert_eq!(json!(formatting), formatting.as_str());
        }
    }

    #[test]
    fn wrong_records_say_which_field() {
        for (record, says) in [
            (json!({"messages": []}), "`messages` is an empty list"),
            (json!({"messages": "x"}), "`messages` is not a list"),
            (json!({"messages": [{"content": "x"}]}), "message 1 of `messages`: field `role` is missing"),
            (json!({"messages": [{"role": "user"}]}), "message 1 of `messages`: field `content` is missing"),
            (json!({"messages": [{"role": "user", "content": 1}]}), "field `content` is not a text"),
            (json!({"messages": [[]], "tools": 1}), "message 1 of `messages` is not an object"),
            (json!({"messages": [{"role": "user", "content": "x"}], "tools": {}}), "`tools` is not a list"),
            (json!({"prompt": "p", "completion": []}), "neither two texts nor two lists"),
            (json!({"prompt": "p", "completion": ""}), "`completion` is empty"),
            (json!({"instruction": 1, "output": "o"}), "`instruction` is not a text"),
            (json!({"instruction": "i", "output": "o", "history": [1]}), "`history` is not a list of pairs"),
            (json!({"conversations": [{"from": "dog", "value": "w"}]}), "turn 1 of `conversations`: `from` is \"dog\""),
            (json!({"conversations": [{"from": "human"}]}), "turn 1 of `conversations`: field `value` is missing"),
        ] {
            let reason = read(record.clone()).unwrap_err();
            assert!(reason.contains(says), "{record}: {reason}");
        }
    }
}
