//! Tables in which one key chooses among variants. Each variant has its own keys.

use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer};
use toml::Table;

/// Reads a table with variants. The key `tag` chooses the variant; without this key, the variant is `default`.
pub(super) fn read<'de, T: DeserializeOwned, D: Deserializer<'de>>(
    from: D,
    tag: &str,
    default: &str,
) -> Result<T, D::Error> {
    let mut table = Table::deserialize(from)?;
    table.entry(tag).or_insert_with(|| default.into());
    // The error of the table's own type lists the allowed values.
    table.try_into().map_err(|error: toml::de::Error| D::Error::custom(error.message()))
}
