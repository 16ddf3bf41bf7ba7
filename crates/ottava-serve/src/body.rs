//! The JSON object of a request. A field that is missing or `null` has its default. A field that is too long or of another type is an error that names
//! the field. Unknown fields are skipped, and their names are kept.
//!
//! Limits are checked while the body is parsed, so a list that is too long is refused before it is in memory.

use crate::error::{ApiError, Result};
use crate::tolerance::Tolerance;
use ottava_data::{keep_integers, write_json};
use serde::de::value::SeqAccessDeserializer;
use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Number, Value};
use std::cell::RefCell;
use std::fmt;

/// The maximum number of values of all fields together. Prompts do not count.
pub const MOST_VALUES: usize = 1 << 16;
/// The maximum number of prompts of a request.
pub const MOST_PROMPTS: usize = 1024;

/// The fields of a request.
pub struct Body {
    /// The length of the body as JSON, in bytes.
    pub bytes: usize,
    fields: Map<String, Value>,
    /// The prompt, if the request has one.
    prompt: Option<Prompt>,
    /// The names of unknown fields, at most [`MOST_UNKNOWN`].
    unknown: Vec<String>,
}

/// The maximum number of names of unknown fields that are kept.
const MOST_UNKNOWN: usize = 32;

/// Why a field has no effect.
const UNKNOWN: &str = "is not a field of this request";

/// The prompt of a request.
#[derive(Debug, PartialEq)]
pub enum Prompt {
    Texts(Vec<String>),
    Ids(Vec<Vec<u32>>),
}

impl Prompt {
    /// Returns the number of prompts.
    pub fn len(&self) -> usize {
        match self {
            Prompt::Texts(texts) => texts.len(),
            Prompt::Ids(lists) => lists.len(),
        }
    }
}

impl Body {
    /// A body with these fields, which had `bytes` bytes as JSON in another form.
    pub fn of(bytes: usize, fields: Map<String, Value>) -> Body {
        Body { bytes, fields, prompt: None, unknown: Vec::new() }
    }

    /// Parses the body, and skips fields that are not among `known`. The field `prompt` is the prompt. Errors if the body is not a
    /// JSON object.
    pub fn parse(bytes: &[u8], known: &[&str], prompt: Option<&str>) -> Result<Body> {
        let at = RefCell::new(String::new());
        let bytes = keep_integers(bytes);
        let mut deserializer = serde_json::Deserializer::from_slice(&bytes);
        let parsed = Fields { known, prompt, at: &at }.deserialize(&mut deserializer);
        let parsed = parsed.map(|body| Body { bytes: bytes.len(), ..body });
        parsed.and_then(|body| deserializer.end().map(|()| body)).map_err(|error| {
            let (at, text) = (at.into_inner(), error.to_string());
            match error.is_data() && !at.is_empty() {
                // The error names the field, so line and column are omitted.
                true => ApiError::field(
                    &at,
                    format!("`{at}`: {}", text.rsplit_once(" at line ").map_or(text.as_str(), |text| text.0)),
                ),
                false => ApiError::invalid(format!("the body is no JSON object: {text}")),
            }
        })
    }

    /// Ignores the fields that were skipped. Errors if they must be refused.
    pub fn ignore_unknown(&self, tolerance: &Tolerance) -> Result<()> {
        self.unknown.iter().try_for_each(|name| tolerance.ignore(name, UNKNOWN))
    }

    /// Returns a field, or `None` if it is missing or `null`.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.fields.get(name).filter(|value| !value.is_null())
    }

    /// Takes the prompt.
    pub fn take_prompt(&mut self) -> Option<Prompt> {
        self.prompt.take()
    }

    /// The same body, with the fields of its object `name` as fields of its own. Ignores fields that are not among `known`, or errors if they must be
    /// refused.
    pub fn unfold(mut self, name: &str, known: &[&str], tolerance: &Tolerance) -> Result<Body> {
        let Some(value) = self.fields.remove(name).filter(|value| !value.is_null()) else { return Ok(self) };
        let Value::Object(inner) = value else {
            return Err(ApiError::field(name, format!("`{name}` is {}; it is an object", short(&value))));
        };
        for (inner_name, value) in inner {
            match known.contains(&inner_name.as_str()) {
                true => drop(self.fields.insert(inner_name, value)),
                false if value.is_null() => {}
                false => tolerance.ignore(&format!("{name}.{inner_name}"), UNKNOWN)?,
            }
        }
        Ok(self)
    }

    fn read<'a, T>(&'a self, name: &str, kind: &str, read: impl FnOnce(&'a Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        read(value)
            .map(Some)
            .ok_or_else(|| ApiError::field(name, format!("`{name}` is {}; it is {kind}", short(value))))
    }

    pub fn number(&self, name: &str) -> Result<Option<f64>> {
        self.read(name, "a number", Value::as_f64)
    }

    pub fn count(&self, name: &str) -> Result<Option<usize>> {
        self.read(name, "a whole number from 0 up", |value| usize::try_from(whole(value)?).ok())
    }

    /// Reads a whole number, which may be negative.
    pub fn integer(&self, name: &str) -> Result<Option<i64>> {
        self.read(name, "a whole number", whole)
    }

    pub fn flag(&self, name: &str) -> Result<bool> {
        Ok(self.read(name, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    /// Reads a flag whose default is true.
    pub fn flag_on(&self, name: &str) -> Result<bool> {
        Ok(self.read(name, "true or false", Value::as_bool)?.unwrap_or(true))
    }

    pub fn text(&self, name: &str) -> Result<Option<&str>> {
        self.read(name, "a text", Value::as_str)
    }

    /// Reads a list of at most `most` values.
    pub fn list(&self, name: &str, most: usize) -> Result<Option<&Vec<Value>>> {
        let list = self.read(name, "a list", Value::as_array)?;
        expect_at_most(name, list.map_or(0, Vec::len), most)?;
        Ok(list)
    }

    /// Reads an object with at most `most` fields.
    pub fn object(&self, name: &str, most: usize) -> Result<Option<&Map<String, Value>>> {
        let object = self.read(name, "an object", Value::as_object)?;
        expect_at_most(name, object.map_or(0, Map::len), most)?;
        Ok(object)
    }

    /// Reads a text, or a list of at most `most` texts.
    pub fn texts(&self, name: &str, most: usize) -> Result<Vec<&str>> {
        let texts: Option<Vec<&str>> = self.read(name, "a text or a list of texts", |value| match value {
            Value::Array(list) => list.iter().map(Value::as_str).collect(),
            value => Some(vec![value.as_str()?]),
        })?;
        let texts = texts.unwrap_or_default();
        expect_at_most(name, texts.len(), most)?;
        Ok(texts)
    }

    /// Reads a list of at most `most` token ids.
    pub fn ids(&self, name: &str, most: usize) -> Result<Vec<u32>> {
        let id = |value: &Value| u32::try_from(value.as_u64()?).ok();
        let ids = |value: &Value| value.as_array()?.iter().map(id).collect::<Option<Vec<_>>>();
        let ids = self.read(name, "a list of token ids", ids)?.unwrap_or_default();
        expect_at_most(name, ids.len(), most)?;
        Ok(ids)
    }
}

/// Returns a whole number, which may be written as `5.0`.
fn whole(value: &Value) -> Option<i64> {
    let of_float = || value.as_f64().filter(|number| number.fract() == 0.0 && number.abs() < 9e15);
    value.as_i64().or_else(|| of_float().map(|number| number as i64))
}

fn expect_at_most(name: &str, count: usize, most: usize) -> Result<()> {
    match count > most {
        true => Err(ApiError::field(name, format!("`{name}` has {count} entries; at most {most}"))),
        false => Ok(()),
    }
}

/// Formats a value briefly for an error message.
fn short(value: &Value) -> String {
    // A long list is not formatted, since only its beginning would be shown.
    let text = match value {
        Value::Array(_) => "a list".into(),
        // An integer beyond 64 bits is a special object.
        Value::Object(fields) => Some(value)
            .filter(|_| fields.len() == 1)
            .map(write_json)
            .filter(|text| !text.starts_with('{'))
            .unwrap_or("an object".into()),
        value => value.to_string(),
    };
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// Reads the fields of a body.
struct Fields<'a> {
    known: &'a [&'a str],
    /// The name of the field that is the prompt.
    prompt: Option<&'a str>,
    /// The name of the field that is being read, for error messages.
    at: &'a RefCell<String>,
}

impl<'de> DeserializeSeed<'de> for Fields<'_> {
    type Value = Body;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<Body, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Fields<'_> {
    type Value = Body;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Body, A::Error> {
        let (mut body, mut left) = (Body::of(0, Map::new()), MOST_VALUES);
        while let Some(name) = map.next_key::<String>()? {
            self.at.replace(name.chars().take(60).collect());
            if !self.known.contains(&name.as_str()) {
                if map.next_value::<Option<IgnoredAny>>()?.is_some() && body.unknown.len() < MOST_UNKNOWN {
                    body.unknown.push(name);
                }
            } else if self.prompt == Some(name.as_str()) {
                body.prompt = map.next_value_seed(PromptVisitor)?;
            } else {
                let value = map.next_value_seed(Bounded { left: &mut left })?;
                body.fields.insert(name, value);
            }
            self.at.replace(String::new());
        }
        Ok(body)
    }
}

/// Reads a value, and counts the values in its lists and objects. Errors beyond `left` values.
struct Bounded<'a> {
    left: &'a mut usize,
}

impl<'de> DeserializeSeed<'de> for Bounded<'_> {
    type Value = Value;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<Value, D::Error> {
        *self.left = self.left.saturating_sub(1);
        match *self.left {
            0 => Err(D::Error::custom(format!("the request has more than {MOST_VALUES} values"))),
            _ => deserializer.deserialize_any(self),
        }
    }
}

impl<'de> Visitor<'de> for Bounded<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a JSON value")
    }
    fn visit_bool<E>(self, value: bool) -> std::result::Result<Value, E> {
        Ok(value.into())
    }
    fn visit_i64<E>(self, value: i64) -> std::result::Result<Value, E> {
        Ok(value.into())
    }
    fn visit_u64<E>(self, value: u64) -> std::result::Result<Value, E> {
        Ok(value.into())
    }
    fn visit_f64<E>(self, value: f64) -> std::result::Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }
    fn visit_str<E>(self, value: &str) -> std::result::Result<Value, E> {
        Ok(value.into())
    }
    fn visit_unit<E>(self) -> std::result::Result<Value, E> {
        Ok(Value::Null)
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> std::result::Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = list.next_element_seed(Bounded { left: self.left })? {
            values.push(value);
        }
        Ok(values.into())
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Value, A::Error> {
        let mut fields = Map::new();
        while let Some(name) = map.next_key::<String>()? {
            fields.insert(name, map.next_value_seed(Bounded { left: self.left })?);
        }
        Ok(fields.into())
    }
}

/// The accepted values of prompts, for error messages.
const PROMPT: &str = "a text, token ids, or a list of texts or of token ids";

/// Reads a prompt without more memory than its texts or token ids take.
struct PromptVisitor;

impl<'de> DeserializeSeed<'de> for PromptVisitor {
    type Value = Option<Prompt>;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for PromptVisitor {
    type Value = Option<Prompt>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(PROMPT)
    }
    fn visit_unit<E>(self) -> std::result::Result<Self::Value, E> {
        Ok(None)
    }
    fn visit_str<E>(self, text: &str) -> std::result::Result<Self::Value, E> {
        Ok(Some(Prompt::Texts(vec![text.into()])))
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> std::result::Result<Self::Value, A::Error> {
        let (mut ids, mut texts, mut lists) = (Vec::new(), Vec::new(), Vec::new());
        while let Some(element) = list.next_element()? {
            match element {
                Element::Id(id) => ids.push(id),
                Element::Text(text) => texts.push(text),
                Element::Ids(ids) => lists.push(ids),
            }
            if texts.len().max(lists.len()) > MOST_PROMPTS {
                return Err(A::Error::custom(format!("there are more than {MOST_PROMPTS} prompts")));
            }
        }
        match (ids.is_empty(), texts.is_empty(), lists.is_empty()) {
            (_, true, true) => Ok(Some(Prompt::Ids(vec![ids]))),
            (true, false, true) => Ok(Some(Prompt::Texts(texts))),
            (true, true, false) => Ok(Some(Prompt::Ids(lists))),
            _ => Err(A::Error::custom(format!("the list has values of several kinds; it is {PROMPT}"))),
        }
    }
}

/// An element of a list of prompts.
enum Element {
    Id(u32),
    Text(String),
    Ids(Vec<u32>),
}

impl<'de> Deserialize<'de> for Element {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Element, D::Error> {
        struct ElementVisitor;
        impl<'de> Visitor<'de> for ElementVisitor {
            type Value = Element;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str(PROMPT)
            }
            fn visit_u64<E: Error>(self, id: u64) -> std::result::Result<Element, E> {
                u32::try_from(id).map(Element::Id).map_err(|_| E::custom(format!("there is no token {id}")))
            }
            fn visit_str<E>(self, text: &str) -> std::result::Result<Element, E> {
                Ok(Element::Text(text.into()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> std::result::Result<Element, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(list)).map(Element::Ids)
            }
        }
        deserializer.deserialize_any(ElementVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: &[&str] = &["n", "a", "stop", "ids", "top_p", "m", "bias", "prompt"];

    fn parse(text: &str) -> Result<Body> {
        Body::parse(text.as_bytes(), KNOWN, Some("prompt"))
    }

    fn error<T>(result: Result<T>) -> (String, Value) {
        let error = result.err().expect("it is refused").json()["error"].clone();
        (error["message"].as_str().unwrap().to_string(), error["param"].clone())
    }

    #[test]
    fn fields_of_other_types_are_named() {
        let body =
            parse(r#"{"n": "two", "a": null, "other": null, "stop": ["x", 1], "ids": [1, -2], "top_p": 1, "m": 1.5}"#)
                .unwrap();
        let (message, param) = error(body.count("n"));
        assert_eq!((message.as_str(), param), ("`n` is \"two\"; it is a whole number from 0 up", "n".into()));
        assert_eq!(error(body.texts("stop", 4)).1, "stop");
        assert_eq!(error(body.ids("ids", 4)).1, "ids");
        assert_eq!(error(body.count("m")).1, "m");
        assert_eq!(body.number("top_p").unwrap(), Some(1.0));
        assert_eq!((body.text("a").unwrap(), body.count("missing").unwrap()), (None, None));
        let long = parse(&format!("{{\"n\": \"{}\"}}", "ü".repeat(200))).unwrap();
        assert!(error(long.count("n")).0.contains('…'));
        for wrong in ["[1]", "{", "", "{} x", "{\"n\": 1e999}"] {
            assert_eq!(error(parse(wrong)).1, Value::Null, "{wrong}");
        }
    }

    #[test]
    fn unknown_fields_are_skipped_or_named() {
        let body = parse(r#"{"n": 1, "top-p": [1], "none": null}"#).unwrap();
        assert_eq!(body.count("n").unwrap(), Some(1));
        body.ignore_unknown(&Tolerance::new(false)).unwrap();
        let (message, param) = error(body.ignore_unknown(&Tolerance::new(true)));
        assert!(param == "top-p" && message.contains("`top-p` is not a field of this request"), "{message}");
    }

    #[test]
    fn whole_numbers_may_have_a_decimal_point() {
        let body = parse(r#"{"n": 5.0, "m": -2.0, "top_p": 1e300}"#).unwrap();
        assert_eq!((body.count("n").unwrap(), body.integer("m").unwrap()), (Some(5), Some(-2)));
        assert!(body.count("m").is_err() && body.integer("top_p").is_err());
    }

    #[test]
    fn prompts_are_texts_or_ids() {
        for (text, expected) in [
            (r#""one""#, Some(Prompt::Texts(vec!["one".into()]))),
            (r#"["one", "two"]"#, Some(Prompt::Texts(vec!["one".into(), "two".into()]))),
            ("[1, 2]", Some(Prompt::Ids(vec![vec![1, 2]]))),
            ("[[1], [2, 3]]", Some(Prompt::Ids(vec![vec![1], vec![2, 3]]))),
            ("null", None),
        ] {
            let mut body = parse(&format!("{{\"prompt\": {text}}}")).unwrap();
            assert_eq!(body.take_prompt(), expected, "{text}");
        }
        for wrong in ["5", "true", "{}", "[1, \"a\"]", "[\"a\", [1]]", "[-1]", "[4294967296]", "[[1, \"a\"]]", "[1.5]"]
        {
            let (message, param) = error(parse(&format!("{{\"prompt\": {wrong}}}")));
            assert!(param == "prompt" && !message.contains("line 1"), "{wrong}: {message}");
        }
    }

    #[test]
    fn lists_without_bounds_are_refused_while_they_are_read() {
        let many = |value: &str| vec![value; MOST_VALUES].join(",");
        for (text, param) in [
            (format!("{{\"stop\": [{}]}}", many("\"x\"")), "stop"),
            (format!("{{\"n\": 1, \"bias\": {{{}}}}}", many("\"5\": 1")), "bias"),
            (format!("{{\"bias\": [{}]}}", many("[]")), "bias"),
            (format!("{{\"prompt\": [{}]}}", vec!["[1]"; MOST_PROMPTS + 1].join(",")), "prompt"),
        ] {
            // Text after the error is not read.
            let (message, found) = error(parse(&format!("{}, and no JSON", text.trim_end_matches('}'))));
            assert!(found == param && message.contains("more than"), "{message}");
        }
        let body = parse(r#"{"stop": ["a", "b", "c"], "ids": [1, 2, 3]}"#).unwrap();
        assert_eq!(error(body.texts("stop", 2)).0, "`stop` has 3 entries; at most 2");
        assert_eq!(error(body.ids("ids", 2)).0, "`ids` has 3 entries; at most 2");
    }
}
