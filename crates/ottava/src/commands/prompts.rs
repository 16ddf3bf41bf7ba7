//! Files of prompts.

use ottava_common::{Error, Result, input};
use serde_json::{Map, Value, json};
use std::path::Path;

/// The maximum size of a file of prompts in bytes. The limit exists because all prompts are held in memory.
const MAX_FILE_BYTES: u64 = 1 << 30;

/// A prompt of `generate`.
pub enum Prompt {
    /// A text. With `--chat`, the text is a message.
    Text { text: String, record: Map<String, Value> },
    /// A conversation, which the chat template renders.
    Messages { messages: Vec<Value>, record: Map<String, Value> },
}

impl Prompt {
    /// Creates a prompt from a text without a record.
    pub fn of_text(text: &str) -> Prompt {
        let Value::Object(record) = json!({"prompt": text}) else { unreachable!("an object") };
        Prompt::Text { text: text.to_string(), record }
    }

    /// Reads a record with `prompt` or `messages`.
    fn of_record(line: &str) -> Result<Prompt, String> {
        let record: Map<String, Value> = serde_json::from_str(line).map_err(|e| format!("this is no object: {e}"))?;
        match (record.get("prompt"), record.get("messages")) {
            (Some(Value::String(text)), None) => Ok(Prompt::Text { text: text.clone(), record }),
            (None, Some(Value::Array(messages))) => Ok(Prompt::Messages { messages: messages.clone(), record }),
            (Some(_), Some(_)) => Err("the record has both `prompt` and `messages`; keep one of them".into()),
            (Some(_), None) => Err("`prompt` is no string".into()),
            (None, Some(_)) => Err("`messages` is no list".into()),
            (None, None) => Err("the record has neither `prompt` nor `messages`; add one of them".into()),
        }
    }
}

/// Reads the prompts of a file: one per record of a .jsonl file, or one per line of a .txt file. Empty lines are skipped.
///
/// Errors with [`Error::Data`], which names the line.
pub fn read_prompts(path: &Path) -> Result<Vec<Prompt>> {
    let wrong = |reason: String| Error::Data(format!("{}: {reason}", path.display()));
    let records = match path.extension().and_then(|extension| extension.to_str()) {
        Some("jsonl") => true,
        Some("txt") => false,
        _ => return Err(wrong("unknown kind of prompts; name a .jsonl or a .txt file".into())),
    };
    let text = input::read_text(path, MAX_FILE_BYTES).map_err(|e| wrong(e.to_string()))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let prompt = |(number, line)| match records {
        true => Prompt::of_record(line)
            .map_err(|reason| Error::Data(format!("{}:{}: {reason}", path.display(), number + 1))),
        false => Ok(Prompt::of_text(line)),
    };
    let prompts = lines.map(prompt).collect::<Result<Vec<_>>>()?;
    if prompts.is_empty() {
        return Err(wrong("there is no prompt in it".into()));
    }
    Ok(prompts)
}
