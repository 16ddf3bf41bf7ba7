//! Replaces names of fields and roles: `data.records.fields` and `data.records.roles`.

use serde_json::{Map, Value};

/// The fields of records that can have other names.
const OF_RECORDS: &[&str] = &[
    "text",
    "text_pair",
    "messages",
    "conversations",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "system",
    "history",
    "tools",
    "input_ids",
    "labels",
    "loss_mask",
    "chosen",
    "rejected",
    "label",
    "anchor",
    "positive",
    "negative",
    "margin",
    "chat_template_kwargs",
];

/// The fields of messages that can have other names.
const OF_MESSAGES: &[&str] =
    &["role", "content", "from", "value", "train", "weight", "tool_calls", "reasoning_content"];

/// The roles of messages that can have other names.
const ROLES: &[&str] = &["system", "user", "assistant", "tool"];

/// Names that are replaced in records.
#[derive(Clone, Debug, Default)]
pub(super) struct Mapping {
    /// Our name of each field, and its name in the files.
    fields: Vec<(&'static str, String)>,
    /// Our name of each role, and its name in the files.
    roles: Vec<(&'static str, String)>,
}

impl Mapping {
    /// Parses lists of `ours=theirs`. Errors with the reason.
    pub(super) fn parse(fields: &[String], roles: &[String]) -> Result<Mapping, String> {
        let read = |key: &str, list: &[String], known: &[&[&'static str]]| {
            let pairs = list.iter().map(|entry| {
                let (ours, theirs) = entry.split_once('=').ok_or_else(|| {
                    format!(
                        "`data.{key}` has the entry {entry:?}; write \"ours=theirs\", such as \"{}=x\"",
                        known[0][0]
                    )
                })?;
                let all = || known.iter().flat_map(|list| list.iter());
                match all().find(|name| **name == ours.trim()) {
                    Some(name) => Ok((*name, theirs.trim().to_string())),
                    None => {
                        let names: Vec<_> = all().map(|name| format!("`{name}`")).collect();
                        Err(format!(
                            "`data.{key}` has the entry {entry:?}; the names before the sign are {}",
                            names.join(", ")
                        ))
                    }
                }
            });
            pairs.collect::<Result<Vec<_>, String>>()
        };
        Ok(Mapping {
            fields: read("fields", fields, &[OF_RECORDS, OF_MESSAGES])?,
            roles: read("roles", roles, &[ROLES])?,
        })
    }

    /// Whether no name is replaced.
    pub(super) fn is_empty(&self) -> bool {
        self.fields.is_empty() && self.roles.is_empty()
    }

    /// Replaces the names in `record` and its messages.
    pub(super) fn apply(&self, record: &mut Map<String, Value>) {
        self.rename(record, OF_RECORDS);
        for list in ["messages", "conversations", "prompt", "completion", "chosen", "rejected"] {
            match record.get_mut(list) {
                Some(Value::Array(messages)) => messages.iter_mut().for_each(|message| self.apply_to_message(message)),
                Some(message) => self.apply_to_message(message),
                None => {}
            }
        }
    }

    fn apply_to_message(&self, message: &mut Value) {
        let Some(message) = message.as_object_mut() else { return };
        self.rename(message, OF_MESSAGES);
        for field in ["role", "from"] {
            let Some(Value::String(role)) = message.get_mut(field) else { continue };
            if let Some((ours, _)) = self.roles.iter().find(|(_, theirs)| theirs == role) {
                *role = (*ours).to_string();
            }
        }
    }

    fn rename(&self, object: &mut Map<String, Value>, names: &[&str]) {
        for (ours, theirs) in self.fields.iter().filter(|(ours, _)| names.contains(ours)) {
            if let Some(value) = object.remove(theirs) {
                object.insert((*ours).to_string(), value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn fields_and_roles_get_our_names() {
        let list = |entries: &[&str]| entries.iter().map(|entry| entry.to_string()).collect::<Vec<_>>();
        let mapping = Mapping::parse(
            &list(&["messages=chat", "role=speaker", "content=text"]),
            &list(&["assistant=bot", "user=me"]),
        )
        .unwrap();
        let Value::Object(mut record) =
            json!({"chat": [{"speaker": "me", "text": "a"}, {"speaker": "bot", "text": "b"}], "text": "kept"})
        else {
            unreachable!()
        };
        mapping.apply(&mut record);
        let expected = json!({"text": "kept", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]});
        assert_eq!(Value::Object(record), expected);
        for (fields, roles, says) in [
            (&["chat"][..], &[][..], "write \"ours=theirs\""),
            (&["chats=x"], &[], "the names before the sign are `text`, `text_pair`, `messages`"),
            (&[], &["bot=assistant"], "`system`, `user`, `assistant`, `tool`"),
        ] {
            assert!(Mapping::parse(&list(fields), &list(roles)).unwrap_err().contains(says));
        }
    }
}
