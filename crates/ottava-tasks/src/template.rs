//! Texts of an item: the value of a field, or a rendered template.

use crate::literal;
use ottava_common::{Error, Result};
use ottava_jinja::{Clock, Template, Value, value_of_json};
use serde_json::{Map, Value as Json};
use std::collections::BTreeSet;

/// The beginnings of expressions, statements and comments of Jinja.
const JINJA: [&str; 3] = ["{{", "{%", "{#"];

/// The fields of an item.
pub(crate) type Fields = Map<String, Json>;

/// A field of the items, or a template over all fields. A source that equals the name of a field of any item is this field for all items, as in
/// lm-evaluation-harness.
pub(crate) enum Source {
    Field(String),
    Template(Template),
}

/// What a source gives for an item.
pub(crate) enum Found {
    /// The value of a field, as it is.
    Field(Json),
    /// The text that a template renders.
    Rendered(String),
}

impl Source {
    /// Parses the source of the setting `key` for items that have these `fields`.
    ///
    /// Errors with [`Error::Config`] if the source is neither a field nor a template. A source without Jinja is a template only if it is empty or a
    /// number, since another constant text is a misspelt field.
    pub(crate) fn parse(key: &str, source: &str, fields: &BTreeSet<&str>) -> Result<Source> {
        if fields.contains(source) {
            return Ok(Source::Field(source.into()));
        }
        let is_constant = source.bytes().all(|byte| byte.is_ascii_digit());
        if !is_constant && !JINJA.iter().any(|begin| source.contains(begin)) {
            let names: Vec<_> = fields.iter().map(|name| format!("`{name}`")).collect();
            return Err(Error::Config(format!(
                "`{key}` is {source:?}, which is neither a field of the items ({}) nor a template; write a field, or a constant text as {{{{ {source:?} }}}}",
                names.join(", ")
            )));
        }
        Source::template(key, source)
    }

    /// Parses a source that never is the name of a field, such as a choice of a list. Errors with [`Error::Config`] if it is no template.
    pub(crate) fn template(key: &str, source: &str) -> Result<Source> {
        let wrong = |failure| Error::Config(format!("`{key}` is not a Jinja template: {failure}"));
        Template::parse_strict(source).map(Source::Template).map_err(wrong)
    }

    /// Returns the field or the rendered text of an item. Errors with the reason.
    pub(crate) fn find(&self, fields: &Fields) -> Result<Found, String> {
        let template = match self {
            Source::Field(name) => {
                let value = fields.get(name).cloned();
                return value.map(Found::Field).ok_or_else(|| format!("the item has no field `{name}`"));
            }
            Source::Template(template) => template,
        };
        let variables: Vec<(String, Value)> =
            fields.iter().map(|(name, value)| (name.clone(), value_of_json(value))).collect();
        template.render(variables, Clock::Fixed).map(Found::Rendered).map_err(|failure| failure.to_string())
    }

    /// Returns the text for an item.
    pub(crate) fn text(&self, fields: &Fields) -> Result<String, String> {
        match self.find(fields)? {
            Found::Field(value) => text_of(value),
            Found::Rendered(text) => Ok(text),
        }
    }

    /// Returns the list of texts for an item: of a field with a list, or of a template that renders one.
    pub(crate) fn texts(&self, fields: &Fields) -> Result<Vec<String>, String> {
        match self.find(fields)? {
            Found::Field(Json::Array(items)) => items.into_iter().map(text_of).collect(),
            Found::Field(other) => Err(format!("{other} is no list of texts")),
            Found::Rendered(text) => {
                let all = literal::list(&text);
                let all = all.ok_or_else(|| format!("{text:?} is no list of texts, such as ['a', 'b']"))?;
                all.into_iter().map(text_of).collect()
            }
        }
    }
}

/// Returns a text or a number as text.
pub(crate) fn text_of(value: Json) -> Result<String, String> {
    match value {
        Json::String(text) => Ok(text),
        Json::Number(number) => Ok(number.to_string()),
        other => Err(format!("{other} is neither a text nor a number")),
    }
}
