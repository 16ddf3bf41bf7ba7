//! Settings that are `"auto"` (`None`) or a value.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

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
    // An error of the value's own type names what it may be.
    T::deserialize(value).map(Some).map_err(|error: toml::de::Error| serde::de::Error::custom(error.message()))
}
