//! YAML as other trainers and model cards write it: one document of tables, lists and scalars. The line of each key is kept. Aliases are refused, and the
//! nesting depth is limited, so a small file cannot become a large value.

use serde_json::{Map, Value};
use std::collections::BTreeMap;
use yaml_rust2::parser::{Event, Parser};
use yaml_rust2::scanner::TScalarStyle;

/// The maximum nesting depth of tables and lists.
const MAX_DEPTH: usize = 32;

/// A parsed document.
#[derive(Debug)]
pub struct Yaml {
    /// The outermost table of the document.
    pub table: Map<String, Value>,
    /// The line of each key, from 1, by dotted path.
    pub lines: BTreeMap<String, usize>,
}

/// A table or list that is still being read.
enum Open {
    Table(Map<String, Value>, Option<String>),
    List(Vec<Value>),
}

impl Yaml {
    /// Reads a document whose outermost value is a table. Errors with the line and the reason.
    pub fn parse(text: &str) -> Result<Yaml, String> {
        let mut parser = Parser::new(text.chars());
        let (mut open, mut path): (Vec<Open>, Vec<String>) = (Vec::new(), Vec::new());
        let (mut root, mut lines) = (None, BTreeMap::new());
        loop {
            let (event, marker) = parser.next_token().map_err(|error| error.to_string())?;
            let wrong = |reason: &str| Err(format!("line {}: {reason}", marker.line()));
            let complete = match event {
                Event::StreamEnd => break,
                Event::Nothing | Event::StreamStart | Event::DocumentEnd => continue,
                Event::DocumentStart if root.is_some() => return wrong("a second document; one file is one run"),
                Event::DocumentStart => continue,
                Event::Alias(_) => return wrong("an alias (`*name`) is not read; write its value out"),
                Event::MappingStart(..) | Event::SequenceStart(..) if open.len() == MAX_DEPTH => {
                    return wrong("too many tables within each other");
                }
                Event::MappingStart(..) => {
                    open.push(Open::Table(Map::new(), None));
                    continue;
                }
                Event::SequenceStart(..) => {
                    open.push(Open::List(Vec::new()));
                    path.push(String::new());
                    continue;
                }
                Event::MappingEnd | Event::SequenceEnd => match open.pop() {
                    Some(Open::Table(table, _)) => Value::Object(table),
                    Some(Open::List(list)) => {
                        path.pop();
                        Value::Array(list)
                    }
                    None => return wrong("an end without a start"),
                },
                Event::Scalar(text, style, ..) => {
                    if let Some(Open::Table(table, key @ None)) = open.last_mut() {
                        if table.contains_key(&text) {
                            return wrong(&format!("`{text}` is there twice"));
                        }
                        path.push(text.clone());
                        lines.insert(path.join("."), marker.line());
                        *key = Some(text);
                        continue;
                    }
                    if style == TScalarStyle::Plain { plain(&text) } else { Value::String(text) }
                }
            };
            match open.last_mut() {
                None => root = Some(complete),
                Some(Open::List(list)) => list.push(complete),
                Some(Open::Table(table, key)) => {
                    let Some(key) = key.take() else { return wrong("a key is a word") };
                    path.pop();
                    table.insert(key, complete);
                }
            }
        }
        match root {
            Some(Value::Object(table)) => Ok(Yaml { table, lines }),
            _ => Err("the file is not a table of keys and values".into()),
        }
    }
}

/// Reads a scalar without quotation marks. `1e-4` is a number, as in other trainers, although YAML 1.1 reads it as a text.
fn plain(text: &str) -> Value {
    match text {
        "" | "~" | "null" | "Null" | "NULL" | "None" => return Value::Null,
        "true" | "True" | "TRUE" | "yes" | "Yes" | "on" | "On" => return Value::Bool(true),
        "false" | "False" | "FALSE" | "no" | "No" | "off" | "Off" => return Value::Bool(false),
        _ => {}
    }
    let digits = text.replace('_', "");
    if let Ok(number) = digits.parse::<i64>() {
        return number.into();
    }
    let looks_numeric = digits.starts_with(|c: char| c.is_ascii_digit() || "+-.".contains(c));
    match digits.parse::<f64>() {
        Ok(number) if looks_numeric && number.is_finite() => number.into(),
        _ => Value::String(text.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn tables_lists_and_scalars_are_read() {
        let text = "a: 1e-4\nb: true\nc:\nd: 'yes'\nlist:\n  - path: x\n    type: alpaca\n  - 3\ninner: {stage: 2, device: cpu}\ne: 1_000\n";
        let yaml = Yaml::parse(text).unwrap();
        let expected = json!({"a": 1e-4, "b": true, "c": null, "d": "yes", "list": [{"path": "x", "type": "alpaca"}, 3],
            "inner": {"stage": 2, "device": "cpu"}, "e": 1000});
        assert_eq!(Value::Object(yaml.table), expected);
        assert_eq!((yaml.lines["b"], yaml.lines["inner.stage"]), (2, 9));
        // DeepSpeed's files are JSON, which YAML includes.
        assert_eq!(Yaml::parse("{\"zero\": {\"stage\": 3}}").unwrap().table["zero"]["stage"], 3);
    }

    #[test]
    fn what_is_not_a_table_is_refused_with_its_line() {
        for (text, says) in [
            ("- a", "not a table"),
            ("", "not a table"),
            ("a: 1\na: 2", "line 2: `a` is there twice"),
            ("a: &x 1\nb: *x", "line 2: an alias"),
            ("a: 1\n---\nb: 2", "a second document"),
            ("a: [1", "line 2 column 1"),
            ("? [a, b]\n: 1", "a key is a word"),
        ] {
            let error = Yaml::parse(text).unwrap_err();
            assert!(error.contains(says), "{text:?}: {error}");
        }
        assert!(Yaml::parse(&format!("a: {}", "[".repeat(40))).unwrap_err().contains("too many tables"));
        assert!(Yaml::parse(&format!("a: {}", "[".repeat(100_000))).is_err());
    }
}
