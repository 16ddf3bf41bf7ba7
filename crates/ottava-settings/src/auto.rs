//! Settings that are either `"auto"` (`None`) or a value.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;
use std::marker::PhantomData;

/// The schema of a setting that is `"auto"` or a `T`.
pub(super) struct Auto<T>(PhantomData<T>);

impl<T: JsonSchema> JsonSchema for Auto<T> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        format!("Auto_{}", T::schema_name()).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let value = generator.subschema_for::<T>();
        json_schema!({"anyOf": [{"type": "string", "const": "auto"}, value]})
    }
}

pub(super) fn serialize<T: Serialize, S: Serializer>(value: &Option<T>, to: S) -> Result<S::Ok, S::Error> {
    match value {
        None => "auto".serialize(to),
        Some(value) => value.serialize(to),
    }
}

pub(super) fn deserialize<'de, T: serde::de::DeserializeOwned, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<T>, D::Error> {
    let value = toml::Value::deserialize(from)?;
    if value.as_str() == Some("auto") {
        return Ok(None);
    }
    // The error of the value's own type lists the allowed values.
    T::deserialize(value).map(Some).map_err(|error: toml::de::Error| serde::de::Error::custom(error.message()))
}
