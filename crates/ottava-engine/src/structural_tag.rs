//! Structural tags: texts in which constrained parts are between tags, as xgrammar and vLLM take them. They become rules in llguidance's Lark notation.
//!
//! The earlier form has `structures`, which are tags around JSON, and `triggers`. The newer form has a `format`, which may have formats within it. Free
//! text is one lexeme, which ends where a trigger or the end of its tag is complete. Formats without recursion are regular expressions, because a lexeme
//! of llguidance takes as much text as it can, and would take the text that follows it too. So a format is written with its [`End`].

use crate::expression::{self, literal};
use crate::gbnf::{Translated, is_gbnf, quoted, translate};
use serde_json::{Value, json};

/// The maximum depth of formats.
const MOST_DEPTH: usize = 16;
/// The maximum of `max_chars`, and the maximum number of repetitions.
const MOST_CHARS: u64 = 65_536;
const MOST_REPETITIONS: i64 = 4096;

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
    Kind { name: "any_text", fields: &["excludes", "max_chars"], defaults: &[("max_tokens", "null")] },
    Kind { name: "sequence", fields: &["elements"], defaults: &[] },
    Kind { name: "or", fields: &["elements"], defaults: &[] },
    Kind { name: "optional", fields: &["content"], defaults: &[] },
    Kind { name: "star", fields: &["content"], defaults: &[] },
    Kind { name: "plus", fields: &["content"], defaults: &[] },
    Kind { name: "repeat", fields: &["content", "min", "max"], defaults: &[] },
    Kind { name: "tag", fields: &["begin", "content", "end"], defaults: &[] },
    Kind {
        name: "triggered_tags",
        fields: &["triggers", "tags", "at_least_one", "stop_after_first", "excludes"],
        defaults: &[],
    },
    Kind {
        name: "tags_with_separator",
        fields: &["tags", "separator", "at_least_one", "stop_after_first"],
        defaults: &[],
    },
    Kind { name: "dispatch", fields: &["rules", "loop", "excludes"], defaults: &[] },
];

/// What comes after a format.
#[derive(Clone, Copy)]
enum End<'a> {
    /// Nothing: the format ends the text.
    OfText,
    /// One of the texts that end the tag around the format.
    Texts(&'a [&'a str]),
    /// Another format, so free text would not end.
    Other,
}

impl End<'_> {
    /// Writes a rule's body `before`, and this end after it.
    fn after(self, before: &str) -> String {
        match self {
            End::Texts(_) => format!("({before}) {}", self.alone()),
            End::OfText | End::Other => before.to_string(),
        }
    }

    /// Writes this end as a rule's body.
    fn alone(self) -> String {
        match self {
            End::Texts(texts) => format!("({})", texts.iter().map(|end| quoted(end)).collect::<Vec<_>>().join(" | ")),
            End::OfText | End::Other => quoted(""),
        }
    }
}

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
    let start = rules.format(&format, 0, End::OfText)?;
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

/// The flag of a field, with its default.
fn flag(value: &Value, field: &str, default: bool) -> Result<bool, String> {
    match &value[field] {
        Value::Null => Ok(default),
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

/// Errors if free text of a format may not contain a text that could be in it: `excludes` may contain only texts that include the `end` of the enclosing
/// tag.
fn expect_no_excludes(format: &Value, end: End) -> Result<(), String> {
    let ends = if let End::Texts(ends) = end { ends } else { &[] };
    let cannot_be = |text: &Value| text.as_str().is_some_and(|text| ends.iter().any(|end| text.contains(end)));
    match &format["excludes"] {
        Value::Null => Ok(()),
        Value::Array(texts) if texts.iter().all(cannot_be) => Ok(()),
        value => Err(format!(
            "`{}` has {value} as `excludes`, which is not implemented, except for the `end` of the tag around it; leave it out",
            text(format, "type")?
        )),
    }
}

/// Returns free text as a regular expression.
fn any_text(format: &Value, end: End) -> Result<String, String> {
    expect_no_excludes(format, end)?;
    match &format["max_chars"] {
        Value::Null => Ok("(?s:.*)".into()),
        value => match value.as_u64().filter(|&most| most <= MOST_CHARS) {
            Some(most) => Ok(format!("(?s:.{{0,{most}}})")),
            None => Err(format!("`any_text` has {value} as `max_chars`; it is a whole number up to {MOST_CHARS}")),
        },
    }
}

/// How often the content of a format comes, as a regular expression and Lark write it; `None` if the format has another kind.
fn repetition(format: &Value, kind: &str) -> Result<Option<String>, String> {
    let count = |field: &str| format[field].as_i64().filter(|&count| (-1..=MOST_REPETITIONS).contains(&count));
    Ok(match kind {
        "optional" => Some("?".into()),
        "star" => Some("*".into()),
        "plus" => Some("+".into()),
        "repeat" => match (count("min"), count("max")) {
            (Some(least @ 0..), Some(-1)) => Some(format!("{{{least},}}")),
            (Some(least @ 0..), Some(most @ 1..)) if least <= most => Some(format!("{{{least},{most}}}")),
            _ => {
                return Err(format!(
                    "`repeat` has `min` from 0 to {MOST_REPETITIONS}, and `max` from `min`, but at least 1, to {MOST_REPETITIONS}, or -1"
                ));
            }
        },
        _ => None,
    })
}

/// Returns a format as a regular expression; `None` if the format has none, or if free text would have no end.
fn expression(format: &Value, depth: usize, end: End) -> Result<Option<String>, String> {
    if depth > MOST_DEPTH {
        return Err(format!("there are more than {MOST_DEPTH} formats within each other"));
    }
    let expression = match kind_of(format)? {
        "const_string" => Some(literal(text(format, "value")?)),
        "regex" => Some(expression::translate(text(format, "pattern")?)?),
        "any_text" if !matches!(end, End::Other) => Some(any_text(format, end)?),
        "grammar" if is_gbnf(text(format, "grammar")?) => match translate(text(format, "grammar")?)? {
            Translated::Regex(expression) => Some(expression),
            Translated::Lark(_) => None,
        },
        kind @ ("sequence" | "or") => {
            let elements = list(format, "elements")?;
            let end_of = |number| if kind == "or" || number + 1 == elements.len() { end } else { End::Other };
            let parts = elements.iter().enumerate().map(|(number, part)| expression(part, depth + 1, end_of(number)));
            let parts = parts.collect::<Result<Option<Vec<_>>, _>>()?;
            let by = if kind == "or" { ")|(?:" } else { ")(?:" };
            parts.map(|parts| format!("(?:{})", parts.join(by)))
        }
        kind => match repetition(format, kind)? {
            Some(times) => {
                expression(&format["content"], depth + 1, End::Other)?.map(|part| format!("(?:{part}){times}"))
            }
            None => None,
        },
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

    /// Returns what matches a format and its end.
    fn format(&mut self, format: &Value, depth: usize, end: End) -> Result<String, String> {
        if let Some(expression) = expression(format, depth, end)? {
            return Ok(match end {
                End::Texts(ends) => {
                    let ends = ends.iter().map(|end| literal(end)).collect::<Vec<_>>().join("|");
                    self.lazy(&format!("(?:{expression})(?:{ends})"))
                }
                End::OfText | End::Other => self.rule("", &slashed(&expression)),
            });
        }
        let body = match kind_of(format)? {
            "json_schema" => end.after(&format!("%json {}", (self.json)(&format["json_schema"])?)),
            "grammar" => match text(format, "grammar")? {
                gbnf if is_gbnf(gbnf) => match translate(gbnf)? {
                    Translated::Lark(rules) => end.after(&format!("%lark {{\n{rules}}}")),
                    Translated::Regex(expression) => end.after(&slashed(&expression)),
                },
                rules => end.after(&format!("%lark {{\n{rules}\n}}")),
            },
            "sequence" => {
                let elements = list(format, "elements")?;
                let end_of = |number| if number + 1 == elements.len() { end } else { End::Other };
                let parts =
                    elements.iter().enumerate().map(|(number, part)| self.format(part, depth + 1, end_of(number)));
                parts.collect::<Result<Vec<_>, _>>()?.join(" ")
            }
            "or" => {
                let parts = list(format, "elements")?.iter().map(|part| self.format(part, depth + 1, end));
                parts.collect::<Result<Vec<_>, _>>()?.join(" | ")
            }
            // Free text inside `optional` ends at the end of the enclosing tag.
            "optional" => format!("{} | {}", self.format(&format["content"], depth + 1, end)?, end.alone()),
            "tag" => format!("{} {}", quoted(text(format, "begin")?), self.inside(format, depth, end)?),
            "tags_with_separator" => end.after(&self.separated(format, depth)?),
            "triggered_tags" if !matches!(end, End::Other) => self.triggered(format, depth, end)?,
            "dispatch" if !matches!(end, End::Other) => self.dispatched(format, depth, end)?,
            kind => match repetition(format, kind)? {
                Some(times) => {
                    let content = self.format(&format["content"], depth + 1, End::Other)?;
                    end.after(&format!("({content}){times}"))
                }
                None => {
                    return Err(format!(
                        "`{kind}` is for the end of a text, because it has no end of its own; put it into a `tag` that has one"
                    ));
                }
            },
        };
        Ok(self.rule("", &body))
    }

    /// Returns what matches the content and the end of a tag, and the end after the tag.
    fn inside(&mut self, tag: &Value, depth: usize, end: End) -> Result<String, String> {
        if !matches!(tag["type"].as_str(), None | Some("tag")) {
            return Err(format!("the entries of `tags` are tags; one has {} as `type`", tag["type"]));
        }
        expect_known(tag, "`tag`", &["begin", "content", "end"], &[])?;
        let (content, ends) = (&tag["content"], ends_of(tag)?);
        if ends.is_empty() {
            return self.format(content, depth + 1, end);
        }
        let inside = self.format(content, depth + 1, End::Texts(&ends))?;
        Ok(end.after(&inside))
    }

    /// Free text, in which each trigger begins a tag.
    fn triggered(&mut self, format: &Value, depth: usize, end: End) -> Result<String, String> {
        let triggers = list(format, "triggers")?.iter().map(Value::as_str).collect::<Option<Vec<_>>>();
        let triggers = triggers.ok_or("`triggers` has an entry that is no text")?;
        let at_least_one = flag(format, "at_least_one", false)?;
        let stops = flag(format, "stop_after_first", false)?;
        let (mut whole, mut branches) =
            (Vec::new(), triggers.iter().map(|&trigger| (trigger, Vec::new())).collect::<Vec<_>>());
        for tag in list(format, "tags")? {
            let begin = text(tag, "begin")?;
            let Some((trigger, bodies)) = branches.iter_mut().find(|(trigger, _)| begin.starts_with(*trigger)) else {
                return Err(format!("no trigger begins the tag {begin:?}"));
            };
            let inside = self.inside(tag, depth, if stops { end } else { End::Other })?;
            whole.push(format!("{} {inside}", quoted(begin)));
            bodies.push(format!("{} {inside}", quoted(&begin[trigger.len()..])));
        }
        let rest = self.free(format, &branches, stops, end)?;
        // A text that must have a tag begins with a tag, as in xgrammar.
        Ok(match (at_least_one, stops) {
            (true, true) => whole.join(" | "),
            (true, false) => format!("({}) {rest}", whole.join(" | ")),
            (false, _) => rest,
        })
    }

    /// Free text, in which each pattern is followed by its format.
    fn dispatched(&mut self, format: &Value, depth: usize, end: End) -> Result<String, String> {
        let (stops, mut branches) = (!flag(format, "loop", true)?, Vec::new());
        for rule in list(format, "rules")? {
            let pattern = rule[0].as_str().filter(|_| rule.as_array().is_some_and(|pair| pair.len() == 2));
            let pattern = pattern.ok_or("`rules` has an entry that is no pair of a text and a format")?;
            branches.push((pattern, vec![self.format(&rule[1], depth + 1, if stops { end } else { End::Other })?]));
        }
        self.free(format, &branches, stops, end)
    }

    /// Free text in which each trigger is followed by one of its bodies, and the end after the free text. If it `stops`, the bodies have the end too.
    fn free(
        &mut self,
        format: &Value,
        branches: &[(&str, Vec<String>)],
        stops: bool,
        end: End,
    ) -> Result<String, String> {
        expect_no_excludes(format, end)?;
        let triggers: Vec<&str> = branches.iter().map(|(trigger, _)| *trigger).collect();
        expect_apart(&triggers, end)?;
        let mut tagged = Vec::new();
        for (trigger, bodies) in branches.iter().filter(|(_, bodies)| !bodies.is_empty()) {
            let begin = self.lazy(&format!("(?s:.*){}", literal(trigger)));
            tagged.push(format!("{begin} ({})", bodies.join(" | ")));
        }
        // Where a trigger is complete, its lexeme wins over this one.
        let free = self.format(&json!({"type": "any_text"}), 0, end)?;
        let tagged = tagged.join(" | ");
        Ok(if stops { format!("({tagged} | {free})") } else { format!("({tagged})* {free}") })
    }

    /// Tags with a text between them.
    fn separated(&mut self, format: &Value, depth: usize) -> Result<String, String> {
        let mut tags = Vec::new();
        for tag in list(format, "tags")? {
            let inside = self.inside(tag, depth, End::Other)?;
            tags.push(format!("{} {inside}", quoted(text(tag, "begin")?)));
        }
        let (tags, separator) = (format!("({})", tags.join(" | ")), quoted(text(format, "separator")?));
        let rest = match flag(format, "stop_after_first", false)? {
            true => String::new(),
            false => format!(" ({separator} {tags})*"),
        };
        Ok(match flag(format, "at_least_one", false)? {
            true => format!("{tags}{rest}"),
            false => format!("({tags}{rest} | \"\")"),
        })
    }
}

/// Errors if a trigger contains another one, or if a trigger and the end of the tag around it contain each other: the contained text is complete first.
fn expect_apart(triggers: &[&str], end: End) -> Result<(), String> {
    let ends = if let End::Texts(ends) = end { ends } else { &[] };
    let (of_trigger, of_end) = ("trigger", "end of the tag");
    let marks: Vec<(&str, &str)> = [(of_trigger, triggers), (of_end, ends)]
        .into_iter()
        .flat_map(|(kind, texts)| texts.iter().map(move |&text| (kind, text)))
        .collect();
    if triggers.contains(&"") {
        return Err("a trigger is an empty text".into());
    }
    for (at, (kind, text)) in marks.iter().enumerate() {
        let contains = |other: &(usize, &(&str, &str))| {
            other.0 != at && text.contains(other.1.1) && (*kind == of_trigger || other.1.0 == of_trigger)
        };
        if let Some((_, (other_kind, other))) = marks.iter().enumerate().find(contains) {
            return Err(format!(
                "the {kind} {text:?} contains the {other_kind} {other:?}, which is complete first; leave one of them out"
            ));
        }
    }
    Ok(())
}
