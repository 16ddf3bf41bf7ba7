//! Texts of an item: the value of a field, or a rendered template.

use crate::literal;
use ottava_common::{Error, Result};
use ottava_jinja::{Clock, Template, Value, value_of_json};
use serde_json::{Map, Value as Json};

/// The fields of an item.
pub(crate) type Fields = Map<String, Json>;

/// A field of the items, or a template over all fields. A source that equals the name of a field is this field, as in lm-evaluation-harness.
pub(crate) struct Source {
    /// The name of the field, if there is one. `None` for a source that is always a template.
    field: Option<String>,
    template: Template,
}

/// What a source gives for an item.
pub(crate) enum Found {
    /// The value of a field, as it is.
    Field(Json),
    /// The text that a template renders.
    Rendered(String),
}

impl Source {
    /// Parses the source of the setting `key`. Errors with [`Error::Config`] if it is no template.
    pub(crate) fn parse(key: &str, source: &str) -> Result<Source> {
        let template = Template::parse_strict(source)
            .map_err(|failure| Error::Config(format!("`{key}` is not a Jinja template: {failure}")))?;
        Ok(Source { field: Some(source.into()), template })
    }

    /// Parses a source that never is the name of a field, such as a choice of a list.
    pub(crate) fn template(key: &str, source: &str) -> Result<Source> {
        Ok(Source { field: None, ..Source::parse(key, source)? })
    }

    /// Returns the field or the rendered text of an item. Errors with the reason.
    pub(crate) fn find(&self, fields: &Fields) -> Result<Found, String> {
        if let Some(value) = self.field.as_ref().and_then(|field| fields.get(field)) {
            return Ok(Found::Field(value.clone()));
        }
        let variables: Vec<(String, Value)> =
            fields.iter().map(|(name, value)| (name.clone(), value_of_json(value))).collect();
        self.template.render(variables, Clock::Fixed).map(Found::Rendered).map_err(|failure| failure.to_string())
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
                literal::texts(&text).ok_or_else(|| format!("{text:?} is no list of texts, such as ['a', 'b']"))
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
