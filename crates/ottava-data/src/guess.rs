//! Guesses which fields of records hold texts, prompts, answers and messages, from the names of the fields.

use serde_json::{Map, Value};

/// The names of two columns that public data sets use for a question and its answer.
pub(super) const ANSWERED: [(&str, &str); 8] = [
    ("question", "answer"),
    ("query", "response"),
    ("prompt", "response"),
    ("prompt", "answer"),
    ("instruction", "response"),
    ("problem", "solution"),
    ("input", "output"),
    ("question", "response"),
];

/// Names of the list of the messages of a conversation, the best known first.
const LISTS: [&str; 8] =
    ["messages", "conversations", "conversation", "dialogue", "dialog", "chat", "turns", "utterances"];

/// Names of the role of a message.
const ROLES: [&str; 6] = ["role", "from", "speaker", "author", "sender", "name"];

/// Names of the text of a message.
const CONTENTS: [&str; 7] = ["content", "value", "text", "message", "body", "utterance", "msg"];

/// Names of a plain text.
const TEXTS: [&str; 7] = ["text", "content", "body", "document", "article", "story", "code"];

/// Names of speakers, and the roles that they mean.
const SPEAKERS: [(&str, &str); 9] = [
    ("human", "user"),
    ("customer", "user"),
    ("prompter", "user"),
    ("gpt", "assistant"),
    ("bot", "assistant"),
    ("model", "assistant"),
    ("ai", "assistant"),
    ("agent", "assistant"),
    ("chatbot", "assistant"),
];

/// The names of fields and roles of a file, as `data.records` takes them: Ottava's name with the name in the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Guess {
    /// For `data.records.fields`.
    pub fields: Vec<(String, String)>,
    /// For `data.records.roles`.
    pub roles: Vec<(String, String)>,
}

impl Guess {
    /// Guesses from the first record of a file. Returns `None` if the names of its fields say nothing.
    pub fn of_record(record: &Map<String, Value>) -> Option<Guess> {
        let of_list = LISTS.iter().find_map(|list| Some((list, conversation(record.get(*list)?)?)));
        if let Some((list, Guess { mut fields, roles })) = of_list {
            if *list != "messages" {
                fields.insert(0, ("messages".into(), list.to_string()));
            }
            return Some(Guess { fields, roles });
        }
        let is_text = |name: &&str| record.get(*name).is_some_and(Value::is_string);
        let pair = ANSWERED.iter().find(|(question, answer)| is_text(question) && is_text(answer));
        let fields = match pair {
            Some((question, answer)) => named(&[("prompt", question), ("completion", answer)]),
            None => named(&[("text", TEXTS.iter().find(|name| is_text(name))?)]),
        };
        Some(Guess { fields, roles: Vec::new() })
    }
}

/// Returns the pairs of different names.
fn named(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    let different = pairs.iter().filter(|(ours, theirs)| ours != theirs);
    different.map(|(ours, theirs)| (ours.to_string(), theirs.to_string())).collect()
}

/// Guesses the fields and the roles of messages.
fn conversation(list: &Value) -> Option<Guess> {
    let messages: Vec<&Map<String, Value>> = list.as_array()?.iter().map(Value::as_object).collect::<Option<_>>()?;
    let fields = fields_of_message(messages.first()?)?;
    let theirs = fields.iter().find(|(ours, _)| ours == "role").map_or("role", |(_, theirs)| theirs);
    let mut roles: Vec<(String, String)> = Vec::new();
    for speaker in messages.iter().filter_map(|message| message.get(theirs)?.as_str()) {
        let role = SPEAKERS.iter().find(|(known, _)| speaker.eq_ignore_ascii_case(known));
        if let Some((_, role)) = role.filter(|(_, role)| !roles.iter().any(|(known, _)| known == role)) {
            roles.push((role.to_string(), speaker.to_string()));
        }
    }
    Some(Guess { fields, roles })
}

/// Returns the names of role and content in a message, where they differ from Ottava's; `None` if the message does not seem to have them.
pub(super) fn fields_of_message(message: &Map<String, Value>) -> Option<Vec<(String, String)>> {
    let find =
        |names: &[&'static str]| names.iter().copied().find(|name| message.get(*name).is_some_and(Value::is_string));
    Some(named(&[("role", find(&ROLES)?), ("content", find(&CONTENTS)?)]))
}

/// Returns the pairs as a TOML table, such as `{ prompt = "question", completion = "answer" }`.
pub fn toml_table(pairs: &[(String, String)]) -> String {
    let quoted = |text: &str| serde_json::Value::from(text).to_string();
    let pairs: Vec<_> = pairs.iter().map(|(ours, theirs)| format!("{ours} = {}", quoted(theirs))).collect();
    format!("{{ {} }}", pairs.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn names_of_fields_say_what_records_hold() {
        let guess = |record: Value| Guess::of_record(record.as_object().unwrap());
        let told = |record: Value| guess(record).map(|found| (toml_table(&found.fields), toml_table(&found.roles)));
        let speaks = |list: &str| json!({list: [{"speaker": "Human", "text": "a"}, {"speaker": "bot", "text": "b"}]});
        let roles = "{ user = \"Human\", assistant = \"bot\" }";
        for (record, fields, roles) in [
            (json!({"answer": "b", "question": "a"}), "{ prompt = \"question\", completion = \"answer\" }", "{  }"),
            (json!({"id": 1, "body": "a"}), "{ text = \"body\" }", "{  }"),
            (speaks("messages"), "{ role = \"speaker\", content = \"text\" }", roles),
            (speaks("dialogue"), "{ messages = \"dialogue\", role = \"speaker\", content = \"text\" }", roles),
        ] {
            assert_eq!(told(record.clone()), Some((fields.into(), roles.into())), "{record}");
        }
        for record in [
            json!({"a": "x", "b": "y"}),
            json!({"question": 1, "answer": 2}),
            json!({"messages": ["a"]}),
            json!({"question": "a"}),
        ] {
            assert_eq!(guess(record.clone()), None, "{record}");
        }
    }
}
