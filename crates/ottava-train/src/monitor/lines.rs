//! The lines of a run's files, with the fields that a monitor reads.

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::fmt;
use std::marker::PhantomData;

/// The entries of an object, in their order.
pub struct Entries<V>(pub Vec<(String, V)>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Entries<V> {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        struct Object<V>(PhantomData<V>);
        impl<'de, V: Deserialize<'de>> Visitor<'de> for Object<V> {
            type Value = Entries<V>;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries<V>, A::Error> {
                let mut entries = Vec::with_capacity(map.size_hint().unwrap_or(16));
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }
        input.deserialize_map(Object(PhantomData))
    }
}

/// A field of `metrics.jsonl`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Field {
    /// The value is a number.
    Number(f64),
    /// The value is null in the file, because the number was not finite.
    NotFinite,
    /// The value is not a number.
    Other,
}

impl<'de> Deserialize<'de> for Field {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Field, D::Error> {
        struct AnyField;
        impl<'de> Visitor<'de> for AnyField {
            type Value = Field;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a value")
            }
            fn visit_f64<E>(self, value: f64) -> Result<Field, E> {
                Ok(if value.is_finite() { Field::Number(value) } else { Field::NotFinite })
            }
            fn visit_u64<E>(self, value: u64) -> Result<Field, E> {
                Ok(Field::Number(value as f64))
            }
            fn visit_i64<E>(self, value: i64) -> Result<Field, E> {
                Ok(Field::Number(value as f64))
            }
            fn visit_unit<E>(self) -> Result<Field, E> {
                Ok(Field::NotFinite)
            }
            fn visit_bool<E>(self, _: bool) -> Result<Field, E> {
                Ok(Field::Other)
            }
            fn visit_str<E>(self, _: &str) -> Result<Field, E> {
                Ok(Field::Other)
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Field, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Field::Other)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Field, A::Error> {
                while list.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Field::Other)
            }
        }
        input.deserialize_any(AnyField)
    }
}

/// A line of `casts.jsonl`.
#[derive(serde::Deserialize)]
pub struct CastLine {
    pub step: u64,
    pub casts: Entries<CastCell>,
}

/// The counts of a cast.
#[derive(serde::Deserialize)]
pub struct CastCell {
    elements: u64,
    saturated: u64,
    underflowed: u64,
}

impl CastCell {
    /// Returns the shares of elements that saturated and that underflowed.
    pub fn shares(&self) -> [f64; 2] {
        [self.saturated, self.underflowed].map(|count| count as f64 / self.elements.max(1) as f64)
    }
}

/// A line of `sentinel.jsonl`.
#[derive(serde::Deserialize)]
pub struct SentinelLine {
    pub step: u64,
    pub loss_gap: Option<f64>,
    pub gradient_cosine: Option<f64>,
    pub gradient_norm_ratio: Option<f64>,
    #[serde(default)]
    pub findings: Vec<Finding>,
}

/// A finding of a comparison.
#[derive(serde::Deserialize)]
pub struct Finding {
    pub text: String,
}

/// A line of `alarms.jsonl`.
#[derive(serde::Deserialize)]
pub struct AlarmLine {
    pub step: u64,
    pub alarm: String,
    pub policy: String,
    pub text: String,
}

/// A line of `rollbacks.jsonl`.
#[derive(serde::Deserialize)]
pub struct RollbackLine {
    pub from: u64,
    pub to: u64,
    pub reason: String,
}

/// A line of `completions.jsonl` or `samples.jsonl`.
#[derive(Clone, Debug, PartialEq, serde::Deserialize, serde::Serialize)]
pub struct CompletionLine {
    /// The step for which the completion was drawn.
    pub step: u64,
    /// The text of the prompt.
    pub prompt: String,
    /// The text of the completion.
    pub completion: String,
    /// Its reward, in reinforcement learning.
    pub reward: Option<f64>,
}
