//! The linears that have adapters, by names, patterns and layers with PEFT's meaning.

use fancy_regex::Regex;
use ottava_common::error::{Error, Result};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

/// The word that targets all linears of the blocks.
pub(super) const ALL_LINEAR: &str = "all-linear";

/// The linears that have adapters.
#[derive(Clone, Debug, PartialEq)]
pub enum Targets {
    /// All linears of the blocks: `"all-linear"`.
    AllLinear,
    /// Linears with one of these names, or whose names end in a dot and one of these names: `["q_proj", "v_proj"]`.
    Names(Vec<String>),
    /// Linears whose whole names match a regular expression.
    Pattern(Pattern),
}

/// A regular expression in Python's syntax.
#[derive(Clone, Debug)]
pub struct Pattern {
    text: String,
    regex: Regex,
}

impl Pattern {
    /// Creates a pattern that must match a whole name.
    ///
    /// Errors with a sentence if `text` is not a regular expression.
    pub fn new(text: &str) -> Result<Pattern, String> {
        Pattern::of(text, &format!(r"\A(?:{text})\z"))
    }

    /// Creates a pattern that must match a whole name, or the part of a name after a dot. The keys of `rank_pattern` are such patterns.
    ///
    /// Errors like [`Pattern::new`].
    fn of_ending(text: &str) -> Result<Pattern, String> {
        Pattern::of(text, &format!(r"\A(?:.*\.)?(?:{text})\z"))
    }

    fn of(text: &str, whole: &str) -> Result<Pattern, String> {
        let regex = Regex::new(whole).map_err(|error| format!("\"{text}\" is no regular expression: {error}"))?;
        Ok(Pattern { text: text.into(), regex })
    }

    /// Returns the text of the expression.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns whether `name` matches. If matching takes too many steps, returns false. [`Targets::check`] reports such patterns.
    fn matches(&self, name: &str) -> bool {
        self.regex.is_match(name).unwrap_or(false)
    }
}

impl PartialEq for Pattern {
    fn eq(&self, other: &Pattern) -> bool {
        self.text == other.text
    }
}

impl Targets {
    /// No linear.
    pub const NONE: Targets = Targets::Names(Vec::new());

    /// Returns whether the targets contain the linear called `linear`.
    pub fn names(&self, linear: &str) -> bool {
        match self {
            Targets::AllLinear => true,
            Targets::Names(targets) => targets.iter().any(|target| names_it(target, linear)),
            Targets::Pattern(pattern) => pattern.matches(linear),
        }
    }

    /// Returns a sentence if a target is not a linear of the model, or if a pattern cannot be matched.
    pub(super) fn problem(&self, linears: &[&String]) -> Option<String> {
        match self {
            Targets::AllLinear => None,
            Targets::Names(targets) => {
                let unknown = targets.iter().find(|target| !linears.iter().any(|linear| names_it(target, linear)))?;
                Some(format!("`{unknown}` is no linear of this model's blocks"))
            }
            Targets::Pattern(Pattern { text, regex }) => {
                let matches = |linear: &&String| regex.is_match(linear);
                match linears.iter().map(matches).collect::<Result<Vec<bool>, _>>() {
                    Err(error) => Some(format!("\"{text}\" cannot be matched: {error}; simplify it")),
                    Ok(found) if !found.contains(&true) => {
                        Some(format!("\"{text}\" matches the whole name of no linear of this model's blocks"))
                    }
                    Ok(_) => None,
                }
            }
        }
    }
}

/// PEFT's settings for single linears and layers, in addition to `target_modules`.
#[derive(Clone, Debug, PartialEq)]
pub struct Exceptions {
    /// The linears among the targets that have no adapters: `exclude_modules`.
    pub exclude: Targets,
    /// The layers whose linears have adapters, if the targets are names: `layers_to_transform`. Empty means all layers.
    pub layers: Vec<usize>,
    /// The names that precede the numbers of layers: `layers_pattern`. Empty means any name.
    pub layers_pattern: Vec<String>,
    /// The ranks of linears, by patterns of the ends of their names: `rank_pattern`.
    pub ranks: BTreeMap<String, usize>,
    /// The values of `alpha` of linears, by patterns of the ends of their names: `alpha_pattern`.
    pub alphas: BTreeMap<String, f64>,
}

impl Default for Exceptions {
    /// Returns no exceptions.
    fn default() -> Exceptions {
        Exceptions {
            exclude: Targets::NONE,
            layers: Vec::new(),
            layers_pattern: Vec::new(),
            ranks: BTreeMap::new(),
            alphas: BTreeMap::new(),
        }
    }
}

impl Exceptions {
    /// Returns whether `linear` is in one of the layers.
    pub(super) fn has_layer(&self, linear: &str) -> bool {
        self.layers.is_empty() || self.layer_of(linear).is_some_and(|layer| self.layers.contains(&layer))
    }

    /// Returns the first number in a name that follows two names. If `layers_pattern` is set, the number must follow one of its patterns.
    fn layer_of(&self, linear: &str) -> Option<usize> {
        let any = [r".*?\.[^.]*".to_string()];
        let before: Vec<String> = self.layers_pattern.iter().map(|text| format!(r"(?:.*?\.)?(?:{text})")).collect();
        let before = if before.is_empty() { &any[..] } else { &before };
        before.iter().find_map(|before| {
            let regex = Regex::new(&format!(r"\A{before}\.(\d+)\.")).ok()?;
            regex.captures(linear).ok().flatten()?.get(1)?.as_str().parse().ok()
        })
    }

    /// Returns the value of the pattern that `linear` matches.
    pub(super) fn of<T: Copy>(patterns: &BTreeMap<String, T>, linear: &str) -> Option<T> {
        Exceptions::values(patterns)(linear)
    }

    /// Returns a function that returns the value of the pattern that a name matches. Each pattern is compiled once.
    pub(super) fn values<T: Copy>(patterns: &BTreeMap<String, T>) -> impl Fn(&str) -> Option<T> {
        let compiled = patterns.iter().filter_map(|(text, value)| Some((Pattern::of_ending(text).ok()?, *value)));
        let compiled: Vec<_> = compiled.collect();
        move |name| compiled.iter().find(|(pattern, _)| pattern.matches(name)).map(|(_, value)| *value)
    }

    /// Returns a sentence if a pattern is invalid, or if a linear matches two patterns with different values. PEFT would take the first pattern of
    /// the file.
    pub(super) fn problem(&self, linears: &[&String]) -> Option<String> {
        let ranks = self.ranks.iter().map(|(text, rank)| (text.clone(), *rank as f64)).collect();
        for (key, patterns) in [("rank_pattern", &ranks), ("alpha_pattern", &self.alphas)] {
            let mut compiled = Vec::new();
            for (text, value) in patterns {
                match Pattern::of_ending(text) {
                    Ok(pattern) => compiled.push((pattern, *value)),
                    Err(problem) => return Some(format!("`{key}`: {problem}")),
                }
            }
            for linear in linears {
                let mut found = compiled.iter().filter(|(pattern, _)| pattern.matches(linear));
                if let (Some((first, one)), Some((second, other))) = (found.next(), found.next())
                    && one != other
                {
                    let (first, second) = (first.text(), second.text());
                    return Some(format!("`{key}`: `{first}` and `{second}` both match `{linear}`; leave one"));
                }
            }
        }
        if let Some((text, rank)) = self.ranks.iter().find(|(_, rank)| **rank == 0 || **rank > 1 << 24) {
            return Some(format!("`rank_pattern`: the rank of `{text}` is {rank}"));
        }
        if let Some(text) = self.layers_pattern.iter().find(|text| Pattern::new(text).is_err()) {
            return Some(format!("`layers_pattern`: \"{text}\" is no regular expression"));
        }
        (self.exclude == Targets::AllLinear).then(|| "`exclude_modules` excludes all linears".into())
    }
}

pub(super) fn names_it(target: &str, linear: &str) -> bool {
    linear.strip_suffix(target).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// Returns the part of a name after its last dot.
pub fn last_name(linear: &str) -> &str {
    linear.rsplit('.').next().unwrap_or(linear)
}

/// Returns the last parts of the names of `linears`, for an error.
pub(super) fn last_names<'a>(linears: impl Iterator<Item = &'a String>) -> String {
    let known: BTreeSet<&str> = linears.map(|linear| last_name(linear)).collect();
    known.into_iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

impl JsonSchema for Targets {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Targets".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})
    }
}

impl Serialize for Targets {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Targets::AllLinear => ALL_LINEAR.serialize(to),
            Targets::Names(names) => names.serialize(to),
            Targets::Pattern(pattern) => pattern.text().serialize(to),
        }
    }
}

impl<'de> Deserialize<'de> for Targets {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Targets, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "\"all-linear\", a list of names of linears, or a regular expression")]
        enum Written {
            Word(String),
            Names(Vec<String>),
        }
        match Written::deserialize(from)? {
            Written::Word(word) if word.eq_ignore_ascii_case(ALL_LINEAR) => Ok(Targets::AllLinear),
            Written::Word(word) => Pattern::new(&word).map(Targets::Pattern).map_err(serde::de::Error::custom),
            Written::Names(names) => Ok(Targets::Names(names)),
        }
    }
}

/// Returns the error about targets that a model does not have. `known` lists the linears of the model.
pub(super) fn error(problem: &str, known: &str) -> Error {
    Error::Config(format!(
        "`target_modules`: {problem}, which are {known}; name some of them, or write \"{ALL_LINEAR}\""
    ))
}
