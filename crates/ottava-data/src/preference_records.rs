//! Records of preferences: pairs of answers, or answers with labels.

use serde_json::{Map, Value};

use crate::chat::Chat;
use crate::content::Content;
use crate::messages::{alpaca, messages, sharegpt, turn_or_message};
use crate::values::{field, is_not, text};

/// Returns the `prompt` with the completion in field `key`.
pub(super) fn completion(record: &Map<String, Value>, key: &str) -> Result<Content, String> {
    match (field(record, "prompt")?, field(record, key)?) {
        (Value::String(prompt), Value::String(completion)) if !completion.is_empty() => {
            Ok(Content::Completion { prompt: prompt.clone(), completion: completion.clone() })
        }
        (Value::String(_), Value::String(_)) => Err(format!("field `{key}` is empty")),
        (Value::Array(_), Value::Array(_)) => Ok(after(messages(record, "prompt")?, messages(record, key)?)),
        _ => Err(format!("fields `prompt` and `{key}` are neither two texts nor two lists of messages")),
    }
}

pub(super) fn after(mut prompt: Vec<Value>, completion: Vec<Value>) -> Content {
    let learned_from = prompt.len();
    prompt.extend(completion);
    Content::Chat(Chat { messages: prompt, learned_from, ..Chat::default() })
}

/// Returns the chosen and the rejected completion after `prompt`. If there is no prompt, or if the prompt is a text and the completions are
/// conversations, their common beginning is the prompt.
pub(super) fn pair(record: &Map<String, Value>) -> Result<[Content; 2], String> {
    let keys = ["chosen", "rejected"];
    if let Some(answers) = answers(record)? {
        return Ok(answers);
    }
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
    // A word and the space before it form one token, so the space belongs to the completions.
    common -= usize::from(chosen[..common].ends_with(' '));
    Ok([chosen, rejected].map(|all| {
        let (prompt, completion) = all.split_at(common);
        Content::Completion { prompt: prompt.into(), completion: completion.into() }
    }))
}

/// Reads a pair in a form of LLaMA-Factory: answers that are objects, after `conversations`, `messages` or a `prompt`; or answers that are texts,
/// after `conversations` or an `instruction`. Returns `None` for other forms.
fn answers(record: &Map<String, Value>) -> Result<Option<[Content; 2]>, String> {
    let keys = ["chosen", "rejected"];
    let (has, all) = (
        |key: &str| record.get(key).is_some_and(|value| !value.is_null()),
        |is: fn(&Value) -> bool| keys.iter().all(|key| record.get(*key).is_some_and(is)),
    );
    if !(all(Value::is_object) || (all(Value::is_string) && (has("conversations") || has("instruction")))) {
        return Ok(None);
    }
    let answer = |key: &str| match &record[key] {
        Value::String(text) => Ok(Chat::message("assistant", text)),
        other => turn_or_message(other, key),
    };
    let prompt = match () {
        () if has("conversations") => sharegpt(record)?,
        () if has("messages") => messages(record, "messages")?,
        () if has("instruction") => {
            let mut prompt = alpaca(record, "")?;
            prompt.pop();
            prompt
        }
        () if record.get("prompt").is_some_and(Value::is_string) => {
            vec![Chat::message("user", text(record, "prompt")?)]
        }
        () => messages(record, "prompt")?,
    };
    Ok(Some([after(prompt.clone(), vec![answer(keys[0])?]), after(prompt, vec![answer(keys[1])?])]))
}

/// Reads the margin of a pair; 0 if it is missing. In CSV files, numbers are texts.
pub(super) fn margin(record: &Map<String, Value>) -> Result<f32, String> {
    let Some(value) = record.get("margin").filter(|value| !value.is_null() && *value != "") else { return Ok(0.0) };
    let margin = value.as_f64().or_else(|| value.as_str()?.trim().parse().ok()).map(|margin| margin as f32);
    margin.filter(|margin| margin.is_finite()).ok_or_else(|| is_not("margin", value, "a number"))
}

/// Whether a record is an answer with a label: it has `label`, `prompt` and `completion`, or a `label` that is true or false with a conversation or
/// an instruction.
pub(super) fn labeled(record: &Map<String, Value>) -> bool {
    let has = |key: &str| record.get(key).is_some_and(|value| !value.is_null());
    let is_label = record.get("label").and_then(truth).is_some();
    has("label") && has("prompt") && has("completion")
        || is_label && (has("messages") || has("conversations") || (has("instruction") && has("output")))
}

/// Returns the answer with its prompt. The answer in a conversation is its last message.
pub(super) fn labeled_chat(record: &Map<String, Value>) -> Result<Content, String> {
    let has = |key: &str| record.get(key).is_some_and(|value| !value.is_null());
    let mut prompt = match () {
        () if has("prompt") || has("completion") => return completion(record, "completion"),
        () if has("conversations") => sharegpt(record)?,
        () if has("instruction") => alpaca(record, text(record, "output")?)?,
        () => messages(record, "messages")?,
    };
    let answer = prompt.pop().filter(|answer| answer["role"] == "assistant" && !prompt.is_empty());
    let answer =
        answer.ok_or("with `label`, a conversation ends with the answer of the assistant that the label is about")?;
    Ok(after(prompt, vec![answer]))
}

pub(super) fn label(record: &Map<String, Value>) -> Result<bool, String> {
    truth(field(record, "label")?).ok_or_else(|| "field `label` is neither true nor false".into())
}

/// Reads a truth value. Accepts also 1 and 0, and the texts of all these values, as in CSV.
fn truth(value: &Value) -> Option<bool> {
    let number = |number: f64| {
        if number == 1.0 {
            Some(true)
        } else if number == 0.0 {
            Some(false)
        } else {
            None
        }
    };
    match value {
        Value::Bool(value) => Some(*value),
        Value::Number(value) => number(value.as_f64()?),
        Value::String(text) => match text.trim() {
            "True" | "true" | "TRUE" => Some(true),
            "False" | "false" | "FALSE" => Some(false),
            text => number(text.parse().ok()?),
        },
        _ => None,
    }
}
