//! A parsed template.

use super::ast::Parsed;
use super::error::Result;
use super::eval::Rendering;
use super::limits::Limits;
use super::value::Value;
use super::{lexer, parser};
use crate::data::clock::Clock;

/// A parsed template.
#[derive(Debug)]
pub(in crate::data) struct Template(pub(super) Parsed);

impl Template {
    /// Parses a template, with `trim_blocks` and `lstrip_blocks` as in transformers. Errors with the reason.
    pub(in crate::data) fn parse(source: &str) -> Result<Template> {
        parser::parse(lexer::tokens(source)?).map(Template)
    }

    /// Whether the template reads the variable `name`.
    pub(in crate::data) fn reads(&self, name: &str) -> bool {
        self.0.names.contains(name)
    }

    /// Whether the template looks into the content of messages as into a list of parts.
    pub(in crate::data) fn takes_parts(&self) -> bool {
        self.0.takes_parts
    }

    /// Renders the template, with [`MARKS`](super::value::MARKS) around the text of `{% generation %}` blocks. Errors with the reason.
    pub(in crate::data) fn render(&self, variables: Vec<(String, Value)>, clock: Clock) -> Result<String> {
        Rendering::new(variables, clock, Limits::default()).run(&self.0.body)
    }
}
