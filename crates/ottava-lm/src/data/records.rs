//! Records of a `.jsonl` file: a text, a chat, or a prompt with its completion.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::chat::Chat;
use super::shards::PreferenceKind;

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
    /// `conversations`: a list of objects with `from` and `value`, or `role` and `content`; optionally `system`.
    Sharegpt,
    /// `input_ids`, all of which contribute to the loss.
    Tokens,
    /// `input_ids`, with `labels`, `loss_mask`, `assistant_masks` or `completion_mask`.
    LabeledTokens,
    /// `chosen` and `rejected`: two texts, or two lists of messages, after a `prompt` or with one as their common beginning.
    Preference,
    /// `prompt`, `completion` and `label`: true for a desirable completion.
    UnpairedPreference,
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
    /// Tokens, and which of them contribute to the loss.
    Tokens {
        /// Ids.
        ids: Vec<u32>,
        /// For each id, whether the model is trained to write it.
        learned: Vec<bool>,
    },
    /// Completions of one prompt, chats or texts: the chosen one, and the rejected one.
    Pair {
        /// The completions.
        completions: Box<[Content; 2]>,
        /// By how much the reward of the chosen one should be higher.
        margin: f32,
    },
    /// A completion of a prompt, a chat or a text, and whether it is desirable.
    Labeled(Box<Content>, bool),
}

impl Content {
    /// Gives descriptions of functions to chats.
    fn with_tools(self, tools: &Value) -> Content {
        match self {
            Content::Chat(chat) => Content::Chat(Chat { tools: tools.clone(), ..chat }),
            Content::Pair { completions, margin } => {
                Content::Pair { completions: Box::new(completions.map(|content| content.with_tools(tools))), margin }
            }
            Content::Labeled(content, label) => Content::Labeled(Box::new(content.with_tools(tools)), label),
            other => other,
        }
    }
}

/// Fields that say which of `input_ids` are targets: 1 for a target.
const MASKS: [&str; 3] = ["loss_mask", "assistant_masks", "completion_mask"];

/// The label of a token that is not trained on.
const NO_LABEL: i64 = -100;

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
            Formatting::Tokens => "tokens",
            Formatting::LabeledTokens => "labeled_tokens",
            Formatting::Preference => "preference",
            Formatting::UnpairedPreference => "unpaired_preference",
        }
    }

    /// The formatting of a file whose first record is `record`. Errors with the reason where this is not an object.
    pub(super) fn detect(record: &str) -> Result<Formatting, String> {
        match serde_json::from_str::<BTreeMap<String, IgnoredAny>>(record) {
            Ok(fields) => Ok(Formatting::of_fields(&|key| fields.contains_key(key))),
            Err(error) => {
                Err(format!("not a usable record: {}", error.to_string().replace(" at line 1 column ", " at column ")))
            }
        }
    }

    /// The formatting of records that have these fields. The fields of a chat go before `text`.
    pub(super) fn of_fields(has: &dyn Fn(&str) -> bool) -> Formatting {
        match () {
            () if has("input_ids") && (has("labels") || MASKS.iter().any(|mask| has(mask))) => {
                Formatting::LabeledTokens
            }
            () if has("input_ids") => Formatting::Tokens,
            () if has("chosen") && has("rejected") => Formatting::Preference,
            () if has("prompt") && has("completion") && has("label") => Formatting::UnpairedPreference,
            () if has("messages") => Formatting::Messages,
            () if has("conversations") => Formatting::Sharegpt,
            () if has("prompt") && has("completion") => Formatting::PromptCompletion,
            () if has("instruction") && has("output") => Formatting::Alpaca,
            () => Formatting::Text,
        }
    }

    /// Whether each record has a prompt, which does not contribute to the loss.
    pub fn has_prompts(self) -> bool {
        !matches!(self, Formatting::Auto | Formatting::Text | Formatting::Tokens)
    }

    /// The kind of preferences in records, if they have any.
    pub fn preference(self) -> Option<PreferenceKind> {
        match self {
            Formatting::Preference => Some(PreferenceKind::Pairs),
            Formatting::UnpairedPreference => Some(PreferenceKind::Labels),
            _ => None,
        }
    }

    /// The content of a record that is not a plain text. Errors with the reason.
    pub(super) fn read(self, record: &Value) -> Result<Content, String> {
        let record = record.as_object().ok_or("a record is an object")?;
        let content = match self {
            Formatting::Auto | Formatting::Text => unreachable!("a text is read by itself"),
            Formatting::Messages => Content::Chat(Chat { messages: messages(record, "messages")?, ..Chat::default() }),
            Formatting::PromptCompletion => completion(record, "completion")?,
            Formatting::Alpaca => Content::Chat(Chat { messages: alpaca(record)?, ..Chat::default() }),
            Formatting::Sharegpt => Content::Chat(Chat { messages: sharegpt(record)?, ..Chat::default() }),
            Formatting::Tokens | Formatting::LabeledTokens => tokens(record)?,
            Formatting::Preference => Content::Pair { completions: Box::new(pair(record)?), margin: margin(record)? },
            Formatting::UnpairedPreference => {
                Content::Labeled(Box::new(completion(record, "completion")?), label(record)?)
            }
        };
        Ok(content.with_tools(&tools(record)?))
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

/// A list, or one written as a text, as in files of CSV.
fn list<'a>(record: &'a Map<String, Value>, key: &str) -> Result<Cow<'a, [Value]>, String> {
    let parsed = |text: &str| serde_json::from_str::<Vec<Value>>(text).ok();
    let list = match field(record, key)? {
        Value::Array(list) => Cow::Borrowed(list.as_slice()),
        Value::String(text) => Cow::Owned(parsed(text).ok_or_else(|| format!("field `{key}` is not a list"))?),
        _ => return Err(format!("field `{key}` is not a list")),
    };
    match list.is_empty() {
        true => Err(format!("field `{key}` is an empty list")),
        false => Ok(list),
    }
}

fn tokens(record: &Map<String, Value>) -> Result<Content, String> {
    let numbers = |key: &str| {
        let numbers: Option<Vec<i64>> =
            list(record, key)?.iter().map(|value| value.as_i64().or_else(|| value.as_bool().map(i64::from))).collect();
        numbers.ok_or_else(|| format!("field `{key}` holds something else than whole numbers"))
    };
    let ids = numbers("input_ids")?;
    let mut learned = vec![true; ids.len()];
    let named = ["labels"].into_iter().chain(MASKS).find(|key| record.get(*key).is_some_and(|value| !value.is_null()));
    if let Some(key) = named {
        let marks = numbers(key)?;
        if marks.len() != ids.len() {
            return Err(format!("`input_ids` has {} entries and `{key}` has {}", ids.len(), marks.len()));
        }
        for (at, ((learned, mark), id)) in learned.iter_mut().zip(&marks).zip(&ids).enumerate() {
            *learned = match key {
                "labels" if mark != id && *mark != NO_LABEL => {
                    return Err(format!(
                        "entry {} of `labels` is {mark}; it is the token, {id}, or {NO_LABEL}",
                        at + 1
                    ));
                }
                "labels" => *mark != NO_LABEL,
                _ => *mark != 0,
            };
        }
    }
    let attended: Option<Vec<i64>> = record.get("attention_mask").and_then(|_| numbers("attention_mask").ok());
    let kept = |at: usize| attended.as_ref().is_none_or(|mask| mask.get(at) != Some(&0));
    let pairs = ids.iter().zip(&learned).enumerate().filter(|(at, _)| kept(*at));
    let pairs =
        pairs.map(|(_, (id, learned))| Ok((u32::try_from(*id).map_err(|_| format!("{id} is no token"))?, *learned)));
    let (ids, learned) = pairs.collect::<Result<Vec<_>, String>>()?.into_iter().unzip();
    Ok(Content::Tokens { ids, learned })
}

fn messages(record: &Map<String, Value>, key: &str) -> Result<Vec<Value>, String> {
    let messages = list(record, key)?;
    for (i, message) in messages.iter().enumerate() {
        let place = format!("message {} of `{key}`", i + 1);
        let fields = message.as_object().ok_or_else(|| format!("{place} is not an object"))?;
        text(fields, "role").map_err(|reason| format!("{place}: {reason}"))?;
        if let Some((field, known)) = fields.keys().find_map(|field| Some((field, misspelt(field)?))) {
            return Err(format!("{place}: `{field}` is no field of a message; did you mean `{known}`?"));
        }
        if fields.get("train").is_some_and(|train| !train.is_boolean() && !train.is_null()) {
            return Err(format!("{place}: field `train` is neither true nor false"));
        }
        match fields.get("content") {
            Some(Value::String(_) | Value::Array(_)) => {}
            None | Some(Value::Null) if fields.contains_key("tool_calls") => {}
            None => return Err(format!("{place}: field `content` is missing")),
            Some(_) => return Err(format!("{place}: field `content` is not a text")),
        }
    }
    Ok(messages.to_vec())
}

/// Fields of messages.
const OF_MESSAGES: [&str; 9] =
    ["role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "thinking", "reasoning", "train"];

/// Fields of other formats that say whether a message is learned.
const LEARNED: [&str; 6] = ["weight", "training", "trainable", "loss", "loss_weight", "mask"];

/// Whether messages have a field of this name.
pub(super) fn is_of_messages(field: &str) -> bool {
    OF_MESSAGES.contains(&field)
}

/// Why a message must not have `fields`, which no chat template knows and this one does not read.
pub(super) fn unknown_fields(fields: &[String], template: &Path) -> String {
    let hint = match fields.iter().any(|field| LEARNED.contains(&field.as_str())) {
        true => "; whether a message is trained on is the field `train`, true or false",
        false => "",
    };
    let (quoted, listed) = (list_of(fields, '`'), list_of(fields, '"'));
    format!(
        "messages have the fields {quoted}, which are unknown and which the chat template {} does not read{hint}; \
         rename them with `data.fields`, or leave them out with `data.ignored_fields = [{listed}]`",
        template.display()
    )
}

fn list_of(fields: &[String], quote: char) -> String {
    fields.iter().map(|field| format!("{quote}{field}{quote}")).collect::<Vec<_>>().join(", ")
}

/// The field that the name of another one nearly is.
fn misspelt(field: &str) -> Option<&'static str> {
    // A name that is much longer is near to none, and comparing takes time.
    if OF_MESSAGES.contains(&field) || field.len() > 24 {
        return None;
    }
    let near = |known: &&&str| strsim::damerau_levenshtein(field, known) * 4 <= known.len();
    OF_MESSAGES.iter().find(near).copied()
}

/// The `prompt` with the completion in field `key`.
fn completion(record: &Map<String, Value>, key: &str) -> Result<Content, String> {
    match (field(record, "prompt")?, field(record, key)?) {
        (Value::String(prompt), Value::String(completion)) if !completion.is_empty() => {
            Ok(Content::Completion { prompt: prompt.clone(), completion: completion.clone() })
        }
        (Value::String(_), Value::String(_)) => Err(format!("field `{key}` is empty")),
        (Value::Array(_), Value::Array(_)) => Ok(after(messages(record, "prompt")?, messages(record, key)?)),
        _ => Err(format!("fields `prompt` and `{key}` are neither two texts nor two lists of messages")),
    }
}

fn after(mut prompt: Vec<Value>, completion: Vec<Value>) -> Content {
    let learned_from = prompt.len();
    prompt.extend(completion);
    Content::Chat(Chat { messages: prompt, learned_from, ..Chat::default() })
}

/// The chosen and the rejected completion, after `prompt`, or after their common beginning where there is none, or where it is a text and
/// they are conversations.
fn pair(record: &Map<String, Value>) -> Result<[Content; 2], String> {
    let keys = ["chosen", "rejected"];
    let are_lists = keys.iter().all(|key| record.get(*key).is_some_and(Value::is_array));
    let prompt = record.get("prompt").filter(|prompt| !(prompt.is_null() || prompt.is_string() && are_lists));
    if prompt.is_some() {
        return Ok([completion(record, keys[0])?, completion(record, keys[1])?]);
    }
    let same = "`chosen` and `rejected` do not differ, or one is the beginning of the other".to_string();
    if are_lists {
        let [chosen, rejected] = [messages(record, keys[0])?, messages(record, keys[1])?];
        let common = chosen.iter().zip(&rejected).take_while(|(a, b)| a == b).count();
        return match common {
            0 => Err("`chosen` and `rejected` have no first message in common, and there is no `prompt`".into()),
            common if common == chosen.len().min(rejected.len()) => Err(same),
            common => Ok([chosen, rejected].map(|all| after(all[..common].to_vec(), all[common..].to_vec()))),
        };
    }
    let [chosen, rejected] = [text(record, keys[0])?, text(record, keys[1])?];
    let mut common: usize =
        chosen.chars().zip(rejected.chars()).take_while(|(a, b)| a == b).map(|(c, _)| c.len_utf8()).sum();
    if common == chosen.len().min(rejected.len()) {
        return Err(same);
    }
    // A word and the space before it are one token.
    common -= usize::from(chosen[..common].ends_with(' '));
    Ok([chosen, rejected].map(|all| {
        let (prompt, completion) = all.split_at(common);
        Content::Completion { prompt: prompt.into(), completion: completion.into() }
    }))
}

/// The margin of a pair; 0 where there is none.
fn margin(record: &Map<String, Value>) -> Result<f32, String> {
    let Some(value) = record.get("margin").filter(|value| !value.is_null()) else { return Ok(0.0) };
    let margin = value.as_f64().map(|margin| margin as f32).filter(|margin| margin.is_finite());
    margin.ok_or_else(|| "field `margin` is not a number".into())
}

fn label(record: &Map<String, Value>) -> Result<bool, String> {
    match field(record, "label")? {
        Value::Bool(label) => Ok(*label),
        Value::Number(number) if number.as_u64().is_some_and(|number| number < 2) => Ok(number.as_u64() == Some(1)),
        _ => Err("field `label` is neither true nor false".into()),
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
    let turns = list(record, "conversations")?;
    if turns.iter().all(|turn| turn.get("role").is_some() && turn.get("from").is_none()) {
        messages.extend(self::messages(record, "conversations")?);
        return Ok(messages);
    }
    for (i, turn) in turns.iter().enumerate() {
        let place = |reason: String| format!("turn {} of `conversations`: {reason}", i + 1);
        let turn = turn.as_object().ok_or_else(|| place("it is not an object".into()))?;
        let (role, value) = (text(turn, "from").map_err(place)?, text(turn, "value").map_err(place)?);
        let mut message = match role {
            "human" | "user" => Chat::message("user", value),
            "gpt" | "assistant" | "model" | "chatgpt" | "bot" => Chat::message("assistant", value),
            "system" => Chat::message("system", value),
            "observation" | "function_response" | "tool" => Chat::message("tool", value),
            "function_call" => function_call(value).map_err(place)?,
            other => {
                return Err(place(format!(
                    "`from` is {other:?}; it is human, gpt, system, function_call or observation (`data.roles` gives names to others)"
                )));
            }
        };
        if let (Some(train), Some(message)) = (turn.get("train"), message.as_object_mut()) {
            message.insert("train".into(), train.clone());
        }
        messages.push(message);
    }
    Ok(messages)
}

/// A message with the calls that LLaMA-Factory writes as a text: an object with `name` and `arguments`, or a list of them.
fn function_call(value: &str) -> Result<Value, String> {
    let wrong = || "its `value` is not the JSON of a call: an object with `name` and `arguments`".to_string();
    let calls = match serde_json::from_str(value) {
        Ok(Value::Array(calls)) => calls,
        Ok(call @ Value::Object(_)) => vec![call],
        _ => return Err(wrong()),
    };
    if calls.iter().any(|call| !(call["name"].is_string() && call.get("arguments").is_some())) {
        return Err(wrong());
    }
    let calls: Vec<Value> = calls.into_iter().map(|call| json!({"type": "function", "function": call})).collect();
    Ok(json!({"role": "assistant", "content": "", "tool_calls": calls}))
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
        let calls =
            json!({"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": call}]});
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
        let texts = |prompt: &str, completion: &str| Content::Completion {
            prompt: prompt.into(),
            completion: completion.into(),
        };
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
            (
                json!({"prompt": "p", "completion": "c", "label": false}),
                Content::Labeled(Box::new(texts("p", "c")), false),
            ),
            (
                json!({"prompt": [user], "completion": [good], "label": 1}),
                Content::Labeled(Box::new(chat(&good)), true),
            ),
        ] {
            assert_eq!(read(record.clone()).unwrap(), expected, "{record}");
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
            (json!({"prompt": "p", "chosen": "c", "rejected": "r", "margin": "2"}), "`margin` is not a number"),
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
}
