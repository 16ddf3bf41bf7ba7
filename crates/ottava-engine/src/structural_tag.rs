//! Structural tags: texts in which constrained parts are between tags, as xgrammar and vLLM take them. They become rules in llguidance's Lark notation.
//!
//! The earlier form has `structures`, which are tags around JSON, and `triggers`. The newer form has a `format`, which may have formats within it. Free
//! text is one lexeme, which ends where a trigger or the end of its tag is complete. Formats without recursion are regular expressions, because a lexeme
//! of llguidance takes as much text as it can, and would take the text that follows it too.

use crate::gbnf::{Translated, is_gbnf, literal, quoted, translate};
use serde_json::{Value, json};

/// The maximum depth of formats.
const MOST_DEPTH: usize = 16;

/// A kind of format.
struct Kind {
    name: &'static str,
    fields: &'static [&'static str],
    /// Fields that are not implemented, with the value that has no effect.
    defaults: &'static [(&'static str, &'static str)],
}

const KINDS: &[Kind] = &[
    Kind { name: "const_string", fields: &["value"], defaults: &[] },
    Kind { name: "json_schema", fields: &["json_schema"], defaults: &[("style", "\"json\""), ("any_order", "false")] },
    Kind { name: "grammar", fields: &["grammar"], defaults: &[] },
    Kind { name: "regex", fields: &["pattern"], defaults: &[("excludes", "[]")] },
    Kind {
        name: "any_text",
        fields: &[],
        defaults: &[("excludes", "[]"), ("max_tokens", "null"), ("max_chars", "null")],
    },
    Kind { name: "sequence", fields: &["elements"], defaults: &[] },
    Kind { name: "or", fields: &["elements"], defaults: &[] },
    Kind { name: "tag", fields: &["begin", "content", "end"], defaults: &[] },
    Kind {
        name: "triggered_tags",
        fields: &["triggers", "tags", "at_least_one", "stop_after_first"],
        defaults: &[("excludes", "[]")],
    },
    Kind {
        name: "tags_with_separator",
        fields: &["tags", "separator", "at_least_one", "stop_after_first"],
        defaults: &[],
    },
];

/// Writes a structural tag as a grammar in Lark's notation. `json` prepares a JSON schema for llguidance. Errors with the reason.
pub fn lark(tag: &Value, json: &dyn Fn(&Value) -> Result<Value, String>) -> Result<String, String> {
    let format = match (&tag["format"], &tag["structures"]) {
        (Value::Object(format), _) => {
            expect_known(tag, "a structural tag", &["format"], &[])?;
            format.clone().into()
        }
        (_, Value::Array(structures)) => {
            expect_known(tag, "a structural tag", &["structures", "triggers"], &[])?;
            let of = |structure: &Value| {
                expect_known(structure, "a structure", &["begin", "schema", "end"], &[])?;
                let content = json!({"type": "json_schema", "json_schema": structure["schema"]});
                Ok(json!({"begin": structure["begin"], "content": content, "end": structure["end"]}))
            };
            let tags = structures.iter().map(of).collect::<Result<Vec<Value>, String>>()?;
            json!({"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags})
        }
        _ => return Err("a structural tag has a `format`, or `structures` and `triggers`".into()),
    };
    let mut rules = Rules { json, text: String::new(), count: 0 };
    let start = rules.format(&format, 0, true)?;
    Ok(format!("start: {start}\n{}", rules.text))
}

/// Errors if `value` has a field that is neither among `fields` nor has a value without effect.
fn expect_known(value: &Value, of: &str, fields: &[&str], defaults: &[(&str, &str)]) -> Result<(), String> {
    let has_effect = |name: &str, value: &Value| {
        let json = value.to_string();
        let is_default = defaults.iter().any(|(known, default)| *known == name && json == *default);
        name != "type" && !fields.contains(&name) && !value.is_null() && !is_default
    };
    match value.as_object().into_iter().flatten().find(|(name, value)| has_effect(name, value)) {
        Some((name, value)) if defaults.iter().any(|(known, _)| known == name) => {
            Err(format!("{of} has {value} as `{name}`, which is not implemented; leave it out"))
        }
        Some((name, _)) => {
            Err(format!("{of} has no field `{name}`; its fields are {}", [&["type"][..], fields].concat().join(", ")))
        }
        None => Ok(()),
    }
}

/// The kind of a format. Errors if there is no such kind, or if a field of the format is not implemented.
fn kind_of(format: &Value) -> Result<&'static str, String> {
    let names = || KINDS.iter().map(|kind| kind.name).collect::<Vec<_>>().join(", ");
    let name = text(format, "type").map_err(|_| format!("the `type` of a format is one of {}", names()))?;
    let kind = KINDS.iter().find(|kind| kind.name == name);
    let kind = kind.ok_or_else(|| format!("the format `{name}` is not implemented; there are {}", names()))?;
    expect_known(format, &format!("`{name}`"), kind.fields, kind.defaults)?;
    Ok(kind.name)
}

/// The text of a field.
fn text<'a>(value: &'a Value, field: &str) -> Result<&'a str, String> {
    value[field].as_str().ok_or_else(|| format!("`{field}` is missing or no text"))
}

/// The list of a field, which has one entry at least.
fn list<'a>(value: &'a Value, field: &str) -> Result<&'a Vec<Value>, String> {
    value[field].as_array().filter(|list| !list.is_empty()).ok_or_else(|| format!("`{field}` is missing or empty"))
}

/// The flag of a field, which is false by default.
fn flag(value: &Value, field: &str) -> Result<bool, String> {
    match &value[field] {
        Value::Null => Ok(false),
        Value::Bool(flag) => Ok(*flag),
        other => Err(format!("`{field}` is {other}; it is true or false")),
    }
}

/// The texts of which one ends a tag. None if the tag has no end of its own.
fn ends_of(tag: &Value) -> Result<Vec<&str>, String> {
    let ends = match &tag["end"] {
        Value::Array(ends) => ends.iter().map(Value::as_str).collect::<Option<Vec<_>>>(),
        end => end.as_str().map(|end| vec![end]),
    };
    let ends = ends.filter(|ends| !ends.is_empty()).ok_or("`end` of a tag is missing or no text")?;
    match ends.contains(&"") {
        true if ends.len() > 1 => Err("`end` of a tag has an empty text beside another text".into()),
        true => Ok(Vec::new()),
        false => Ok(ends),
    }
}

/// A regular expression between slashes.
fn slashed(expression: &str) -> String {
    let (mut text, mut chars) = (String::from("/(?:"), expression.chars());
    while let Some(c) = chars.next() {
        match c {
            '\\' => text.extend([Some('\\'), chars.next()].into_iter().flatten()),
            '/' => text.push_str("\\/"),
            c => text.push(c),
        }
    }
    text + ")/"
}

/// Returns a format as a regular expression; `None` if the format has none, or if free text would have no end. `is_last` says whether nothing follows
/// the format, or whether its end is searched for.
fn expression(format: &Value, depth: usize, is_last: bool) -> Result<Option<String>, String> {
    if depth > MOST_DEPTH {
        return Err(format!("there are more than {MOST_DEPTH} formats within each other"));
    }
    let expression = match kind_of(format)? {
        "const_string" => Some(literal(text(format, "value")?)),
        "regex" => Some(text(format, "pattern")?.to_string()),
        "any_text" if is_last => Some("(?s:.*)".to_string()),
        "grammar" if is_gbnf(text(format, "grammar")?) => match translate(text(format, "grammar")?)? {
            Translated::Regex(expression) => Some(expression),
            Translated::Lark(_) => None,
        },
        kind @ ("sequence" | "or") => {
            let elements = list(format, "elements")?;
            let is_last = |number| is_last && (kind == "or" || number + 1 == elements.len());
            let parts = elements.iter().enumerate().map(|(number, part)| expression(part, depth + 1, is_last(number)));
            let parts = parts.collect::<Result<Option<Vec<_>>, _>>()?;
            let by = if kind == "or" { ")|(?:" } else { ")(?:" };
            parts.map(|parts| format!("(?:{})", parts.join(by)))
        }
        _ => None,
    };
    Ok(expression)
}

struct Rules<'a> {
    json: &'a dyn Fn(&Value) -> Result<Value, String>,
    /// The rules so far.
    text: String,
    count: usize,
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
        if let Some(expression) = expression(format, depth, is_last)? {
            return Ok(self.rule("", &slashed(&expression)));
        }
        let body = match kind_of(format)? {
            "json_schema" => format!("%json {}", (self.json)(&format["json_schema"])?),
            "grammar" => match text(format, "grammar")? {
                gbnf if is_gbnf(gbnf) => match translate(gbnf)? {
                    Translated::Lark(rules) => format!("%lark {{\n{rules}}}"),
                    Translated::Regex(expression) => slashed(&expression),
                },
                rules => format!("%lark {{\n{rules}\n}}"),
            },
            "sequence" => {
                let elements = list(format, "elements")?;
                let last = |number| is_last && number + 1 == elements.len();
                let parts =
                    elements.iter().enumerate().map(|(number, part)| self.format(part, depth + 1, last(number)));
                parts.collect::<Result<Vec<_>, _>>()?.join(" ")
            }
            "or" => {
                let parts = list(format, "elements")?.iter().map(|part| self.format(part, depth + 1, is_last));
                parts.collect::<Result<Vec<_>, _>>()?.join(" | ")
            }
            "tag" => {
                let inside = self.inside(format, depth, is_last)?;
                format!("{} {inside}", quoted(text(format, "begin")?))
            }
            "tags_with_separator" => self.separated(format, depth)?,
            "triggered_tags" if is_last => self.triggered(format, depth)?,
            kind => {
                return Err(format!(
                    "`{kind}` is for the end of a text, because it has no end of its own; put it into a `tag` that has one"
                ));
            }
        };
        Ok(self.rule("", &body))
    }

    /// Returns what matches the content and the end of a tag. `is_last` says whether nothing follows the tag.
    fn inside(&mut self, tag: &Value, depth: usize, is_last: bool) -> Result<String, String> {
        if !matches!(tag["type"].as_str(), None | Some("tag")) {
            return Err(format!("the entries of `tags` are tags; one has {} as `type`", tag["type"]));
        }
        expect_known(tag, "`tag`", &["begin", "content", "end"], &[])?;
        let (content, ends) = (&tag["content"], ends_of(tag)?);
        let any_end = ends.iter().map(|end| literal(end)).collect::<Vec<_>>().join("|");
        let is_open = is_last && ends.is_empty();
        match expression(content, depth + 1, is_last || !ends.is_empty())? {
            Some(content) if !ends.is_empty() => Ok(self.lazy(&format!("(?:{content})(?:{any_end})"))),
            _ => {
                let inside = self.format(content, depth + 1, is_open)?;
                let ends: Vec<String> = ends.iter().map(|end| quoted(end)).collect();
                Ok(if ends.is_empty() { inside } else { self.rule("", &format!("{inside} ({})", ends.join(" | "))) })
            }
        }
    }

    /// Free text, in which each trigger begins a tag.
    fn triggered(&mut self, format: &Value, depth: usize) -> Result<String, String> {
        let triggers = list(format, "triggers")?.iter().map(Value::as_str).collect::<Option<Vec<_>>>();
        let triggers =
            triggers.filter(|triggers| !triggers.contains(&"")).ok_or("`triggers` has an entry that is no text")?;
        for (at, trigger) in triggers.iter().enumerate() {
            let contains = |(other_at, other): (usize, &&str)| other_at != at && trigger.contains(*other);
            if let Some((_, other)) = triggers.iter().enumerate().find(|&other| contains(other)) {
                return Err(format!(
                    "the trigger {trigger:?} contains the trigger {other:?}, which is complete first; leave one of them out"
                ));
            }
        }
        let (at_least_one, stop_after_first) = (flag(format, "at_least_one")?, flag(format, "stop_after_first")?);
        let (mut whole, mut tags) = (Vec::new(), vec![Vec::new(); triggers.len()]);
        for tag in list(format, "tags")? {
            let begin = text(tag, "begin")?;
            let Some(of) = triggers.iter().position(|trigger| begin.starts_with(trigger)) else {
                return Err(format!("no trigger begins the tag {begin:?}"));
            };
            let inside = self.inside(tag, depth, stop_after_first)?;
            whole.push(format!("{} {inside}", quoted(begin)));
            tags[of].push(format!("{} {inside}", quoted(&begin[triggers[of].len()..])));
        }
        let mut parts = Vec::new();
        for (trigger, tags) in triggers.iter().zip(&tags).filter(|(_, tags)| !tags.is_empty()) {
            let begin = self.lazy(&format!("(?s:.*){}", literal(trigger)));
            parts.push(format!("{begin} ({})", tags.join(" | ")));
        }
        // Where a trigger is complete, its lexeme wins over this one.
        let free = self.rule("", "/(?s:.*)/");
        let (whole, tagged) = (whole.join(" | "), parts.join(" | "));
        // A text that must have a tag begins with a tag, as in xgrammar.
        Ok(match (at_least_one, stop_after_first) {
            (true, true) => whole,
            (false, true) => format!("({tagged} | {free})"),
            (true, false) => format!("({whole}) ({tagged})* {free}"),
            (false, false) => format!("({tagged})* {free}"),
        })
    }

    /// Tags with a text between them.
    fn separated(&mut self, format: &Value, depth: usize) -> Result<String, String> {
        let mut tags = Vec::new();
        for tag in list(format, "tags")? {
            let inside = self.inside(tag, depth, false)?;
            tags.push(format!("{} {inside}", quoted(text(tag, "begin")?)));
        }
        let (tags, separator) = (format!("({})", tags.join(" | ")), quoted(text(format, "separator")?));
        let rest = match flag(format, "stop_after_first")? {
            true => String::new(),
            false => format!(" ({separator} {tags})*"),
        };
        Ok(match flag(format, "at_least_one")? {
            true => format!("{tags}{rest}"),
            false => format!("({tags}{rest} | \"\")"),
        })
    }
}
