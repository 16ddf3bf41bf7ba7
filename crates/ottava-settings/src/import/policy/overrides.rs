//! Scripts that start verl: `python3 -m verl.trainer.main_ppo key=value …`, with variables of the shell.

use ottava_common::yaml::Yaml;
use serde_json::{Map, Value as Json};
use std::collections::BTreeMap;

/// The module that a script starts.
const MODULE: &str = "verl.trainer.main_ppo";

/// The overrides of a script that starts verl, as a file of their keys; `None` for another text.
pub(in crate::import) fn yaml_of_script(text: &str) -> Option<Yaml> {
    let start = text.find(MODULE)?;
    let (mut variables, mut table, mut lines) = (BTreeMap::new(), Map::new(), BTreeMap::new());
    for (_, word) in words(&text[..start]) {
        if let Some((name, value)) = word.split_once('=').filter(|(name, _)| is_name(name)) {
            variables.insert(name.to_string(), expand(value, &variables));
        }
    }
    let first = text[..start].lines().count().max(1);
    for (line, word) in words(&text[start..]) {
        let Some((key, value)) = word.split_once('=') else { continue };
        let path = key.trim_start_matches('+');
        if !path.contains('.') || !path.split('.').all(is_name) {
            continue;
        }
        lines.insert(path.to_string(), first + line);
        insert(&mut table, path, scalar(&expand(value, &variables)));
    }
    Some(Yaml { table, lines })
}

fn is_name(text: &str) -> bool {
    !text.is_empty()
        && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
        && !text.starts_with(|c: char| c.is_ascii_digit())
}

/// The words of a script, without quotation marks, each with the number of lines before it. Comments and the ends of lines that go on are no words.
fn words(script: &str) -> Vec<(usize, String)> {
    let mut all = Vec::new();
    for (number, line) in script.lines().enumerate() {
        let (mut word, mut quote, mut is_word) = (String::new(), None, false);
        for c in line.trim_end_matches('\\').chars() {
            match (quote, c) {
                (None, '#') if !is_word => break,
                (None, '\'' | '"') => (quote, is_word) = (Some(c), true),
                (Some(open), c) if open == c => quote = None,
                (None, c) if c.is_whitespace() => {
                    if is_word {
                        all.push((number, std::mem::take(&mut word)));
                    }
                    is_word = false;
                }
                (_, c) => {
                    word.push(c);
                    is_word = true;
                }
            }
        }
        if is_word {
            all.push((number, word));
        }
    }
    all
}

/// A text with the variables that the script sets. A variable that it does not set stays as it is.
fn expand(text: &str, variables: &BTreeMap<String, String>) -> String {
    let mut expanded = text.to_string();
    // Longer names first, since a name may be the beginning of another.
    let mut names: Vec<&String> = variables.keys().collect();
    names.sort_by_key(|name| std::cmp::Reverse(name.len()));
    for name in names {
        for written in [format!("${{{name}}}"), format!("${name}")] {
            expanded = expanded.replace(&written, &variables[name]);
        }
    }
    expanded
}

/// A value as Hydra reads it: a number, a truth value, nothing, a list or a text.
fn scalar(text: &str) -> Json {
    match text {
        "True" | "true" => true.into(),
        "False" | "false" => false.into(),
        "null" | "None" => Json::Null,
        _ => match text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            Some(list) => list.split(',').map(|item| scalar(item.trim().trim_matches(['\'', '"']))).collect(),
            None => text
                .parse::<i64>()
                .map(Json::from)
                .or_else(|_| text.parse::<f64>().map(Json::from))
                .unwrap_or_else(|_| Json::String(text.into())),
        },
    }
}

fn insert(table: &mut Map<String, Json>, path: &str, value: Json) {
    match path.split_once('.') {
        Some((name, rest)) => {
            let inner = table.entry(name).or_insert_with(|| Json::Object(Map::new()));
            if let Json::Object(inner) = inner {
                insert(inner, rest, value);
            }
        }
        None => drop(table.insert(path.to_string(), value)),
    }
}
