//! Tables whose keys the user chooses, such as names of fields.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;
use toml::{Table, Value};

/// Names with their values, in the order of the file.
#[derive(Clone, Debug, PartialEq)]
pub struct Pairs<T>(pub Vec<(String, T)>);

/// One name, or a list of names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Names {
    /// One name.
    One(String),
    /// Several names.
    Several(Vec<String>),
}

impl<T> Default for Pairs<T> {
    fn default() -> Pairs<T> {
        Pairs(Vec::new())
    }
}

impl<T: Serialize> Serialize for Pairs<T> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Pairs<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Pairs<T>, D::Error> {
        struct Entries<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Entries<T> {
            type Value = Pairs<T>;
            fn expecting(&self, to: &mut fmt::Formatter) -> fmt::Result {
                to.write_str("a table, such as { name = \"value\" }")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs<T>, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Pairs(pairs))
            }
        }
        from.deserialize_map(Entries(PhantomData))
    }
}

impl<T: JsonSchema> JsonSchema for Pairs<T> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        format!("Pairs_{}", T::schema_name()).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let value = generator.subschema_for::<T>();
        json_schema!({"type": "object", "additionalProperties": value})
    }
}

impl Pairs<String> {
    /// Returns `name=value` for each pair.
    pub(super) fn entries(&self) -> Vec<String> {
        self.0.iter().map(|(name, value)| format!("{name}={value}")).collect()
    }
}

impl Pairs<Names> {
    /// Returns `name=value` for each value of each name.
    pub(super) fn entries(&self) -> Vec<String> {
        let of = |(name, values): &(String, Names)| match values {
            Names::One(value) => vec![format!("{name}={value}")],
            Names::Several(values) => values.iter().map(|value| format!("{name}={value}")).collect(),
        };
        self.0.iter().flat_map(of).collect()
    }
}

impl Pairs<Value> {
    /// Returns `name=value` for each pair. A text is written unchanged, and any other value as JSON. A text that would be read as another JSON value
    /// is written as a JSON string.
    pub(super) fn entries(&self) -> Vec<String> {
        let text = |value: &Value| match value.as_str() {
            Some(text) if serde_json::from_str::<serde_json::Value>(text).is_err() => text.to_string(),
            _ => serde_json::to_string(value).expect("plain data are JSON"),
        };
        self.0.iter().map(|(name, value)| format!("{name}={}", text(value))).collect()
    }
}

/// The type of the values in a list of `name=value`.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    /// Texts. If a name occurs several times, its value is a list.
    Texts,
    /// JSON values. A value that is not JSON is a text.
    Json,
    /// Numbers. The names may contain `=`.
    Numbers,
}

/// Converts a list of `name=value`, or one text with several `name=value` separated by commas, to a table. Returns `None` for any other value.
pub(super) fn table(written: &Value, kind: Kind) -> Option<Value> {
    let entries: Vec<&str> = match written {
        Value::Array(list) => list.iter().map(Value::as_str).collect::<Option<_>>()?,
        Value::String(text) => {
            let parts: Vec<&str> = text.split(',').collect();
            if parts.iter().all(|part| part.contains('=')) { parts } else { vec![text] }
        }
        _ => return None,
    };
    let mut table = Table::new();
    for entry in entries {
        let (name, text) = if matches!(kind, Kind::Numbers) { entry.rsplit_once('=') } else { entry.split_once('=') }?;
        let (name, text) = (name.trim(), text.trim());
        let value = match kind {
            Kind::Texts => None,
            Kind::Json => {
                serde_json::from_str::<serde_json::Value>(text).ok().and_then(|json| Value::try_from(json).ok())
            }
            Kind::Numbers => format!("value = {text}").parse::<Table>().ok().and_then(|mut read| read.remove("value")),
        };
        let value = value.unwrap_or_else(|| text.into());
        match table.get_mut(name) {
            None => drop(table.insert(name.into(), value)),
            Some(Value::Array(several)) => several.push(value),
            Some(one) => *one = Value::Array(vec![one.clone(), value]),
        }
    }
    Some(Value::Table(table))
}
