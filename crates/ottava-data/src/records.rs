//! Records of files: a text, a chat, a prompt with its completion, and other formattings.

use ottava_jinja::json_text;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::chat::Chat;
use crate::content::Content;
use crate::example_records::{classified, related};
use crate::messages::{alpaca, messages, sharegpt, system_of};
use crate::preference_records::{completion, label, labeled, labeled_chat, margin, pair};
use crate::prompt_records::prompt_record;
use crate::shards::{PreferenceKind, RecordKind};
use crate::values::{list, text};

/// The formatting of a file: the fields that its records have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Formatting {
    /// The formatting of the first record of the file.
    #[default]
    Auto,
    /// A text in the field text_field.
    Text,
    /// messages, a list of objects with role and content; also tools.
    Messages,
    /// prompt and completion, two texts or two lists of messages.
    PromptCompletion,
    /// instruction, output, and optionally input, system, history.
    Alpaca,
    /// conversations, a list of objects with from and value, or role and content; optionally system.
    Sharegpt,
    /// `input_ids`; all of them contribute to the loss.
    Tokens,
    /// input_ids, and labels (-100 if the token is not a target), loss_mask, assistant_masks or completion_mask (1 for a target).
    LabeledTokens,
    /// chosen and rejected, two texts or two lists of messages, after a prompt or with a common beginning.
    Preference,
    /// prompt, completion and label (true for a desirable completion).
    UnpairedPreference,
    /// prompt, a text or a list of messages, and any other fields, which rewards read; never detected.
    Prompts,
    /// text or messages, and label; also two texts in text and text_pair, or in query and document; never detected, used by `[classification]`.
    Classification,
    /// anchor, positive, and optionally negative or negative_1, negative_2, ...; never detected, used by `[embedding]`.
    Embedding,
}

/// The fields that may say which of `input_ids` are targets; 1 marks a target.
const MASKS: [&str; 3] = ["loss_mask", "assistant_masks", "completion_mask"];

/// The label of a token that is not trained on.
const NO_LABEL: i64 = -100;

impl Formatting {
    /// Returns the name in `data.records.formatting`.
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
            Formatting::Prompts => "prompts",
            Formatting::Classification => "classification",
            Formatting::Embedding => "embedding",
        }
    }

    /// Detects the formatting of a file from its first record. Errors with the reason if `record` is not an object.
    pub(super) fn detect(record: &str) -> Result<Formatting, String> {
        match json_text::parse(record) {
            Ok(Value::Object(record)) => Ok(Formatting::of_record(&record)),
            Ok(_) => Err("not a usable record: a record is an object".into()),
            Err(reason) => Err(format!("not a usable record: {reason}")),
        }
    }

    /// Returns the formatting of records with the fields of `record`. Fields of chats take precedence over `text`, and fields that are `null` count
    /// as missing.
    pub(super) fn of_record(record: &Map<String, Value>) -> Formatting {
        let has = |key: &str| record.get(key).is_some_and(|value| !value.is_null());
        match () {
            () if has("input_ids") && (has("labels") || MASKS.iter().any(|mask| has(mask))) => {
                Formatting::LabeledTokens
            }
            () if has("input_ids") => Formatting::Tokens,
            () if has("chosen") && has("rejected") => Formatting::Preference,
            () if labeled(record) => Formatting::UnpairedPreference,
            () if has("messages") => Formatting::Messages,
            () if has("conversations") => Formatting::Sharegpt,
            () if has("prompt") && has("completion") => Formatting::PromptCompletion,
            () if has("instruction") && has("output") => Formatting::Alpaca,
            () => Formatting::Text,
        }
    }

    /// Whether each record has a prompt that does not contribute to the loss.
    pub fn has_prompts(self) -> bool {
        !matches!(self, Formatting::Auto | Formatting::Text | Formatting::Tokens)
    }

    /// Returns the kind of the records.
    pub fn kind(self) -> RecordKind {
        match self {
            Formatting::Preference => RecordKind::Preferences(PreferenceKind::Pairs),
            Formatting::UnpairedPreference => RecordKind::Preferences(PreferenceKind::Labels),
            Formatting::Prompts => RecordKind::Prompts,
            Formatting::Classification | Formatting::Embedding => RecordKind::Examples,
            _ => RecordKind::Documents,
        }
    }

    /// Reads the content of a record that is not a plain text. Errors with the reason.
    pub(super) fn read(self, record: &Value) -> Result<Content, String> {
        let record = record.as_object().ok_or("a record is an object")?;
        let chat = |messages: Vec<Value>| Content::Chat(Chat { messages, ..Chat::default() });
        let content = match self {
            Formatting::Auto | Formatting::Text => unreachable!("a text is read by itself"),
            Formatting::Messages => chat(messages(record, "messages")?),
            Formatting::PromptCompletion => completion(record, "completion")?,
            Formatting::Alpaca => chat(alpaca(record, text(record, "output")?)?),
            Formatting::Sharegpt => chat(sharegpt(record)?),
            Formatting::Tokens | Formatting::LabeledTokens => tokens(record)?,
            Formatting::Preference => Content::Pair { completions: Box::new(pair(record)?), margin: margin(record)? },
            Formatting::UnpairedPreference => Content::Labeled(Box::new(labeled_chat(record)?), label(record)?),
            Formatting::Prompts => Content::Prompt(Box::new(prompt_record(record)?)),
            Formatting::Classification => Content::Example(Box::new(classified(record)?)),
            Formatting::Embedding => Content::Example(Box::new(related(record)?)),
        };
        let content = content.with_tools(&tools(record)?);
        match system_of(record)? {
            "" => Ok(content),
            system => content.with_system(system),
        }
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
    let attended: Option<Vec<i64>> = numbers("attention_mask").ok();
    let kept = |at: usize| attended.as_ref().is_none_or(|mask| mask.get(at) != Some(&0));
    let pairs = ids.iter().zip(&learned).enumerate().filter(|(at, _)| kept(*at));
    let pairs =
        pairs.map(|(_, (id, learned))| Ok((u32::try_from(*id).map_err(|_| format!("{id} is no token"))?, *learned)));
    let (ids, learned) = pairs.collect::<Result<Vec<_>, String>>()?.into_iter().unzip();
    Ok(Content::Tokens { ids, learned })
}

/// Reads the descriptions of functions: a list, or the JSON text of a list.
fn tools(record: &Map<String, Value>) -> Result<Value, String> {
    let wrong = || "field `tools` is not a list".to_string();
    let tools = match record.get("tools") {
        None | Some(Value::Null) => return Ok(Value::Null),
        Some(Value::String(text)) if text.is_empty() => return Ok(Value::Null),
        Some(Value::String(text)) => json_text::parse(text).map_err(|_| wrong())?,
        Some(value) => value.clone(),
    };
    match tools {
        Value::Array(_) => Ok(tools),
        _ => Err(wrong()),
    }
}

#[cfg(test)]
#[path = "records_tests.rs"]
mod tests;
