//! A parsed template.

use crate::ast::Parsed;
use crate::clock::Clock;
use crate::error::Result;
use crate::eval::Rendering;
use crate::limits::Limits;
use crate::value::Value;
use crate::{lexer, parser};

/// A parsed template.
#[derive(Debug)]
pub struct Template(pub(crate) Parsed);

impl Template {
    /// Parses a template, with `trim_blocks` and `lstrip_blocks` as in transformers. Errors with the reason.
    pub fn parse(source: &str) -> Result<Template> {
        parser::parse(lexer::tokens(source)?).map(Template)
    }

    /// Whether the template reads the variable `name`.
    pub fn reads(&self, name: &str) -> bool {
        self.0.names.contains(name)
    }

    /// Whether the template reads the content of messages as a list of parts.
    pub fn takes_parts(&self) -> bool {
        self.0.takes_parts
    }

    /// Renders the template, and puts [`MARKS`](crate::value::MARKS) around the text of `{% generation %}` blocks. Errors with the reason.
    pub fn render(&self, variables: Vec<(String, Value)>, clock: Clock) -> Result<String> {
        Rendering::new(variables, clock, Limits::default()).run(&self.0.body)
    }
}
