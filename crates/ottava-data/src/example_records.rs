//! Records of examples: texts with a label, and texts that belong together.

use serde_json::{Map, Value};

use crate::chat::Chat;
use crate::content::{Content, ExampleRecord, ExampleText};
use crate::messages::{messages, sharegpt};
use crate::values::{is_not, text};

/// The field with the text of a classifier.
pub(super) const TEXT_FIELD: &str = "text";

/// The column with the label of an example.
pub const LABEL: &str = "label";

/// The column with the number of tokens of each text of an example.
pub const LENGTHS: &str = "lengths";

/// The fields of a text and of the second text of a pair. The first pair whose first field a record has is read.
const TEXTS: [[&str; 2]; 7] = [
    [TEXT_FIELD, "text_pair"],
    ["query", "document"],
    ["query", "passage"],
    ["sentence1", "sentence2"],
    ["premise", "hypothesis"],
    ["question1", "question2"],
    ["sentence", ""],
];

/// The fields of a label. The first field that a record has is read.
const LABELS: [&str; 3] = [LABEL, "labels", "score"];

fn present<'r>(record: &'r Map<String, Value>, key: &str) -> Option<&'r Value> {
    record.get(key).filter(|value| !value.is_null())
}

/// Reads a text, a pair of texts or a chat, with its label. Errors with the reason.
pub(super) fn classified(record: &Map<String, Value>) -> Result<ExampleRecord, String> {
    let label = LABELS.iter().find_map(|key| present(record, key)).ok_or("field `label` is missing")?;
    let chat = |messages: Vec<Value>| Content::Chat(Chat { messages, ..Chat::default() });
    let of_texts = TEXTS.iter().find(|[first, second]| {
        present(record, first).is_some() && (*first != "query" || present(record, second).is_some())
    });
    let read = match of_texts {
        Some([first, second]) => ExampleText {
            content: Content::Text(text(record, first)?.into()),
            pair: present(record, second).map(|_| text(record, second).map(str::to_string)).transpose()?,
        },
        None if present(record, "messages").is_some() => {
            ExampleText { content: chat(messages(record, "messages")?), pair: None }
        }
        None if present(record, "conversations").is_some() => {
            ExampleText { content: chat(sharegpt(record)?), pair: None }
        }
        None => {
            return Err(
                "field `text` is missing; other names of the fields `text`, `text_pair` and `label` are set in \
                        `data.records.fields`"
                    .into(),
            );
        }
    };
    let columns = Map::from_iter([(LABEL.to_string(), label.clone())]);
    Ok(ExampleRecord { texts: vec![read], columns })
}

/// Reads an anchor with a positive text and any number of negative texts. Errors with the reason.
pub(super) fn related(record: &Map<String, Value>) -> Result<ExampleRecord, String> {
    let [anchor, positive] = if record.contains_key("query") { ["query", "positive"] } else { ["anchor", "positive"] };
    let numbered = (1..).map(|number| format!("negative_{number}")).take_while(|key| present(record, key).is_some());
    let mut texts = vec![text(record, anchor)?, text(record, positive)?];
    match present(record, "negative") {
        Some(Value::Array(all)) => {
            let read =
                |value| Value::as_str(value).ok_or_else(|| is_not("negative", value, "a text or a list of texts"));
            texts.extend(all.iter().map(read).collect::<Result<Vec<_>, String>>()?);
        }
        Some(_) => texts.push(text(record, "negative")?),
        None => {}
    }
    let numbered: Vec<String> = numbered.collect();
    texts.extend(numbered.iter().map(|key| text(record, key)).collect::<Result<Vec<_>, String>>()?);
    let read = |text: &str| ExampleText { content: Content::Text(text.into()), pair: None };
    Ok(ExampleRecord { texts: texts.into_iter().map(read).collect(), columns: Map::new() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn record(value: Value) -> Map<String, Value> {
        value.as_object().unwrap().clone()
    }

    #[test]
    fn texts_pairs_and_chats_have_labels() {
        let read =
            |value| classified(&record(value)).map(|record| (record.texts[0].clone(), record.columns["label"].clone()));
        let text = |text: &str, pair: Option<&str>| ExampleText {
            content: Content::Text(text.into()),
            pair: pair.map(str::to_string),
        };
        assert_eq!(read(json!({"text": "a", "label": 2})), Ok((text("a", None), json!(2))));
        assert_eq!(
            read(json!({"text": "a", "text_pair": "b", "labels": ["x"]})),
            Ok((text("a", Some("b")), json!(["x"])))
        );
        assert_eq!(read(json!({"query": "q", "passage": "d", "score": 0.5})), Ok((text("q", Some("d")), json!(0.5))));
        assert_eq!(read(json!({"sentence": "s", "label": "yes"})), Ok((text("s", None), json!("yes"))));
        let (chat, _) = read(json!({"messages": [{"role": "user", "content": "a"}], "label": 1})).unwrap();
        assert!(matches!(chat.content, Content::Chat(_)));
        assert_eq!(read(json!({"text": "a"})), Err("field `label` is missing".into()));
        assert!(read(json!({"label": 1})).unwrap_err().starts_with("field `text` is missing"));
    }

    #[test]
    fn an_anchor_has_a_positive_text_and_any_number_of_negative_texts() {
        let read = |value| {
            let texts = related(&record(value))?.texts.into_iter();
            Ok::<_, String>(texts.map(|text| format!("{:?}", text.content)).collect::<Vec<_>>().join(" "))
        };
        assert_eq!(read(json!({"anchor": "a", "positive": "p"})).unwrap(), "Text(\"a\") Text(\"p\")");
        let three = "Text(\"a\") Text(\"p\") Text(\"n\") Text(\"m\")";
        assert_eq!(read(json!({"query": "a", "positive": "p", "negative": ["n", "m"]})).unwrap(), three);
        assert_eq!(read(json!({"anchor": "a", "positive": "p", "negative_1": "n", "negative_2": "m"})).unwrap(), three);
        assert_eq!(read(json!({"anchor": "a"})), Err("field `positive` is missing".into()));
    }
}
