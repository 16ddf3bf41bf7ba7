//! Structural tags: texts in which constrained parts are between tags, as xgrammar and vLLM take them. They become rules in llguidance's Lark notation.
//!
//! The earlier form has `structures`, which are tags around JSON, and `triggers`. The newer form has a `format`, which may have formats within it. Free
//! text is one lexeme, which ends where a trigger or the end of its tag is complete.

use crate::gbnf::{Translated, is_gbnf, literal, quoted, translate};
use serde_json::{Value, json};

/// The maximum depth of formats.
const MOST_DEPTH: usize = 16;
const KINDS: &str =
    "const_string, json_schema, grammar, regex, any_text, sequence, or, tag, triggered_tags, tags_with_separator";

/// Writes a structural tag as a grammar in Lark's notation. `json` prepares a JSON schema for llguidance. Errors with the reason.
pub fn lark(tag: &Value, json: &dyn Fn(&Value) -> Result<Value, String>) -> Result<String, String> {
    let format = match (tag.get("format"), tag.get("structures")) {
        (Some(format), _) if format.is_object() => format.clone(),
        (_, Some(Value::Array(structures))) => {
            let of = |structure: &Value| {
                let content = json!({"type": "json_schema", "json_schema": structure["schema"]});
                json!({"begin": structure["begin"], "content": content, "end": structure["end"]})
            };
            let tags: Vec<Value> = structures.iter().map(of).collect();
            json!({"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags})
        }
        _ => return Err("a structural tag has a `format`, or `structures` and `triggers`".into()),
    };
    let mut rules = Rules { json, text: String::new(), count: 0 };
    let start = rules.format(&format, 0, true)?;
    Ok(format!("start: {start}\n{}", rules.text))
}

struct Rules<'a> {
    json: &'a dyn Fn(&Value) -> Result<Value, String>,
    /// The rules so far.
    text: String,
    count: usize,
}

/// The text of a field.
fn text<'a>(value: &'a Value, field: &str) -> Result<&'a str, String> {
    value[field].as_str().ok_or_else(|| format!("`{field}` is missing or no text"))
}

/// The list of a field, which has one entry at least.
fn list<'a>(value: &'a Value, field: &str) -> Result<&'a Vec<Value>, String> {
    value[field].as_array().filter(|list| !list.is_empty()).ok_or_else(|| format!("`{field}` is missing or empty"))
}

/// A regular expression between slashes.
fn slashed(expression: &str) -> String {
    let (mut text, mut chars) = (String::from("/"), expression.chars());
    while let Some(c) = chars.next() {
        match c {
            '\\' => text.extend([Some('\\'), chars.next()].into_iter().flatten()),
            '/' => text.push_str("\\/"),
            c => text.push(c),
        }
    }
    text + "/"
}

impl Rules<'_> {
    /// Adds a rule, and returns its name.
    fn rule(&mut self, attribute: &str, body: &str) -> String {
        let name = format!("t{}", self.count);
        self.count += 1;
        self.text += &format!("{name}{attribute}: {body}\n");
        name
    }

    /// A rule for a text that ends where `expression` first matches all of it.
    fn lazy(&mut self, expression: &str) -> String {
        self.rule("[lazy]", &slashed(expression))
    }

    /// Returns what matches a format. `is_last` says whether nothing follows it.
    fn format(&mut self, format: &Value, depth: usize, is_last: bool) -> Result<String, String> {
        if depth > MOST_DEPTH {
            return Err(format!("there are more than {MOST_DEPTH} formats within each other"));
        }
        let kind = text(format, "type").map_err(|_| format!("the `type` of a format is one of {KINDS}"))?;
        let open =
            || format!("`{kind}` is for the end of a text, because it has no end of its own; put it into a `tag`");
        match kind {
            "const_string" => Ok(quoted(text(format, "value")?)),
            "json_schema" => Ok(format!("%json {}", (self.json)(&format["json_schema"])?)),
            "grammar" => self.grammar(text(format, "grammar")?),
            "regex" => Ok(self.rule("", &slashed(text(format, "pattern")?))),
            "any_text" | "triggered_tags" if !is_last => Err(open()),
            "any_text" => Ok(self.rule("", "/(?s:.*)/")),
            "sequence" => {
                let elements = list(format, "elements")?;
                let last = |number| is_last && number + 1 == elements.len();
                let parts =
                    elements.iter().enumerate().map(|(number, part)| self.format(part, depth + 1, last(number)));
                Ok(format!("({})", parts.collect::<Result<Vec<_>, _>>()?.join(" ")))
            }
            "or" => {
                let parts = list(format, "elements")?.iter().map(|part| self.format(part, depth + 1, is_last));
                Ok(format!("({})", parts.collect::<Result<Vec<_>, _>>()?.join(" | ")))
            }
            "tag" => self.tag(format, text(format, "begin")?, depth),
            "triggered_tags" => self.triggered(format, depth),
            "tags_with_separator" => self.separated(format, depth),
            other => Err(format!("the format `{other}` is not implemented; there are {KINDS}")),
        }
    }

    /// A tag whose begin has the rest `begin`, because its trigger was read.
    fn tag(&mut self, tag: &Value, begin: &str, depth: usize) -> Result<String, String> {
        let content = &tag["content"];
        let ends = match &tag["end"] {
            Value::Array(ends) => ends.iter().map(Value::as_str).collect::<Option<Vec<_>>>(),
            end => end.as_str().map(|end| vec![end]),
        };
        let ends = ends.filter(|ends| !ends.is_empty()).ok_or("`end` of a tag is missing or no text")?;
        let any_end = ends.iter().map(|end| literal(end)).collect::<Vec<_>>().join("|");
        let inside = match content["type"].as_str() {
            Some("any_text") => self.lazy(&format!("(?s:.*)(?:{any_end})")),
            Some("regex") => self.lazy(&format!("(?:{})(?:{any_end})", text(content, "pattern")?)),
            _ => {
                let inside = self.format(content, depth + 1, false)?;
                let ends: Vec<String> = ends.iter().map(|end| quoted(end)).collect();
                format!("{inside} ({})", ends.join(" | "))
            }
        };
        Ok(format!("({} {inside})", quoted(begin)))
    }

    /// Free text, in which each trigger begins a tag.
    fn triggered(&mut self, format: &Value, depth: usize) -> Result<String, String> {
        let triggers = list(format, "triggers")?.iter().map(Value::as_str).collect::<Option<Vec<_>>>();
        let triggers =
            triggers.filter(|triggers| !triggers.contains(&"")).ok_or("`triggers` has an entry that is no text")?;
        let mut tags: Vec<Vec<String>> = vec![Vec::new(); triggers.len()];
        for tag in list(format, "tags")? {
            let begin = text(tag, "begin")?;
            let Some(of) = triggers.iter().position(|trigger| begin.starts_with(trigger)) else {
                return Err(format!("no trigger begins the tag {begin:?}"));
            };
            let tag = self.tag(tag, &begin[triggers[of].len()..], depth)?;
            tags[of].push(tag);
        }
        let mut parts = Vec::new();
        for (trigger, tags) in triggers.iter().zip(&tags).filter(|(_, tags)| !tags.is_empty()) {
            let begin = self.lazy(&format!("(?s:.*){}", literal(trigger)));
            parts.push(format!("{begin} ({})", tags.join(" | ")));
        }
        // Where a trigger is complete, its lexeme wins over this one.
        let free = self.rule("", "/(?s:.*)/");
        let (tagged, flag) = (parts.join(" | "), |name: &str| format[name] == true);
        Ok(match (flag("at_least_one"), flag("stop_after_first")) {
            (true, true) => format!("({tagged})"),
            (false, true) => format!("({tagged} | {free})"),
            (true, false) => format!("({tagged})+ {free}"),
            (false, false) => format!("({tagged})* {free}"),
        })
    }

    /// Tags with a text between them.
    fn separated(&mut self, format: &Value, depth: usize) -> Result<String, String> {
        let mut tags = Vec::new();
        for tag in list(format, "tags")? {
            tags.push(self.tag(tag, text(tag, "begin")?, depth)?);
        }
        let (tags, separator) = (format!("({})", tags.join(" | ")), quoted(text(format, "separator")?));
        let rest = if format["stop_after_first"] == true { String::new() } else { format!(" ({separator} {tags})*") };
        let some = format!("({tags}{rest})");
        Ok(if format["at_least_one"] == true { some } else { format!("({some} | \"\")") })
    }

    fn grammar(&mut self, grammar: &str) -> Result<String, String> {
        if !is_gbnf(grammar) {
            return Ok(format!("%lark {{\n{grammar}\n}}"));
        }
        match translate(grammar)? {
            Translated::Regex(expression) => Ok(self.rule("", &slashed(&expression))),
            Translated::Lark(rules) => Ok(format!("%lark {{\n{rules}}}")),
        }
    }
}
