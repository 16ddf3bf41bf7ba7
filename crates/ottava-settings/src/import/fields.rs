//! Other names of fields and roles in the data sets of Axolotl and LLaMA-Factory.

use crate::pairs::{self, Kind};
use serde_json::{Map, Value as Json};
use toml::Value;

/// Keys of a data set of Axolotl that name a field, and our field.
const AXOLOTL: &[(&str, &str)] = &[
    ("field_messages", "messages"),
    ("message_field_role", "role"),
    ("message_field_content", "content"),
    ("message_field_training", "train"),
    ("field_system", "system"),
    ("field_tools", "tools"),
    ("field_chosen", "chosen"),
    ("field_rejected", "rejected"),
    ("field_instruction", "instruction"),
    ("field_input", "input"),
    ("field_output", "output"),
];

/// Columns of LLaMA-Factory's `dataset_info.json`, and our field.
const LLAMA_FACTORY: &[(&str, &str)] = &[
    ("prompt", "instruction"),
    ("query", "input"),
    ("response", "output"),
    ("history", "history"),
    ("messages", "conversations"),
    ("system", "system"),
    ("tools", "tools"),
    ("chosen", "chosen"),
    ("rejected", "rejected"),
    ("kto_tag", "label"),
];

/// Tags of messages of LLaMA-Factory: our field, and names that are understood without a mapping.
const FIELD_TAGS: &[(&str, &str, &[&str])] =
    &[("role_tag", "from", &["from", "role"]), ("content_tag", "value", &["value", "content"])];
const ROLE_TAGS: &[(&str, &str, &[&str])] = &[
    ("user_tag", "user", &["human", "user"]),
    ("assistant_tag", "assistant", &["gpt", "assistant"]),
    ("system_tag", "system", &["system"]),
    ("observation_tag", "tool", &["observation", "tool"]),
];

/// The entries of `data.records.fields` and `data.records.roles`, each `ours=theirs`.
#[derive(Default)]
pub(super) struct Fields {
    fields: Vec<String>,
    roles: Vec<String>,
}

impl Fields {
    /// Adds what the key of a data set of Axolotl says. False for other keys.
    pub(super) fn axolotl(&mut self, key: &str, value: &Json) -> bool {
        match (key, value) {
            ("message_property_mappings", Json::Object(names)) => {
                names.iter().for_each(|(ours, theirs)| self.field(ours, theirs));
            }
            ("roles", Json::Object(roles)) => {
                for (ours, theirs) in roles {
                    let several = theirs.as_array().map_or(std::slice::from_ref(theirs), Vec::as_slice);
                    several.iter().for_each(|theirs| add(&mut self.roles, ours, theirs));
                }
            }
            _ => match AXOLOTL.iter().find(|(theirs, _)| *theirs == key) {
                Some((_, ours)) => self.field(ours, value),
                None => return false,
            },
        }
        true
    }

    /// Adds what an entry of LLaMA-Factory's `dataset_info.json` says. With `texts`, the column `prompt` has whole texts, which have a key of their own.
    pub(super) fn llama_factory(&mut self, entry: &Map<String, Json>, texts: bool) {
        let table = |key: &str| entry.get(key).and_then(Json::as_object);
        for (column, theirs) in
            table("columns").into_iter().flatten().filter(|(column, _)| !texts || *column != "prompt")
        {
            if let Some((_, ours)) = LLAMA_FACTORY.iter().find(|(name, _)| name == column) {
                self.field(ours, theirs);
            }
        }
        let Some(tags) = table("tags") else { return };
        let named = |rows: &'static [(&str, &str, &[&str])]| {
            let named = rows.iter().filter_map(|(tag, ours, known)| Some((*ours, tags.get(*tag)?, *known)));
            named.filter(|(_, theirs, known)| !theirs.as_str().is_some_and(|theirs| known.contains(&theirs)))
        };
        named(FIELD_TAGS).for_each(|(ours, theirs, _)| self.field(ours, theirs));
        named(ROLE_TAGS).for_each(|(ours, theirs, _)| add(&mut self.roles, ours, theirs));
    }

    fn field(&mut self, ours: &str, theirs: &Json) {
        add(&mut self.fields, ours, theirs);
    }

    /// Our settings. Conversations of `from` and `value` are understood without any.
    pub(super) fn settings(mut self) -> Vec<(&'static str, Value)> {
        let is_known = ["messages=conversations", "role=from", "content=value"];
        if !self.fields.is_empty() && self.fields.iter().all(|field| is_known.contains(&field.as_str())) {
            self.fields.clear();
            self.roles.retain(|role| !["user=human", "assistant=gpt"].contains(&role.as_str()));
        } else if self.fields.iter().any(|field| field.starts_with("role=")) && self.roles.is_empty() {
            // Axolotl's names of roles, where the file gives none.
            self.roles = ["user=human", "assistant=gpt"].map(String::from).to_vec();
        }
        let lists = [("data.records.fields", self.fields), ("data.records.roles", self.roles)].into_iter();
        let lists = lists.filter(|(_, list)| !list.is_empty());
        let tables = lists.filter_map(|(key, list)| Some((key, pairs::table(&list.into(), Kind::Texts)?)));
        tables.collect()
    }
}

/// Adds `ours=theirs` to `list`, unless it has it or the names are equal.
fn add(list: &mut Vec<String>, ours: &str, theirs: &Json) {
    let Some(theirs) = theirs.as_str().filter(|theirs| *theirs != ours) else { return };
    let entry = format!("{ours}={theirs}");
    if !list.contains(&entry) {
        list.push(entry);
    }
}
