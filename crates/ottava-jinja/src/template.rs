//! A parsed template.

use crate::ast::Parsed;
use crate::clock::Clock;
use crate::error::Result;
use crate::eval::Rendering;
use crate::lexer::{self, Whitespace};
use crate::limits::Limits;
use crate::parser;
use crate::value::Value;

/// A parsed template.
#[derive(Debug)]
pub struct Template {
    pub(crate) parsed: Parsed,
    /// Whether an undefined value that is used is an error.
    is_strict: bool,
}

impl Template {
    /// Parses a template, with `trim_blocks` and `lstrip_blocks` as in transformers. Errors with the reason.
    pub fn parse(source: &str) -> Result<Template> {
        let parsed = parser::parse(lexer::tokens(source, Whitespace::Trimmed)?)?;
        Ok(Template { parsed, is_strict: false })
    }

    /// Parses a template with Jinja's default white space, with `keep_trailing_newline`. Renderings treat undefined values as `StrictUndefined` does:
    /// a value that is printed, compared, tested for truth, filtered or iterated over is an error. Errors with the reason.
    pub fn parse_strict(source: &str) -> Result<Template> {
        let parsed = parser::parse(lexer::tokens(source, Whitespace::Kept)?)?;
        Ok(Template { parsed, is_strict: true })
    }

    /// Whether the template reads the variable `name`.
    pub fn reads(&self, name: &str) -> bool {
        self.parsed.names.contains(name)
    }

    /// Whether the template reads the content of messages as a list of parts.
    pub fn takes_parts(&self) -> bool {
        self.parsed.takes_parts
    }

    /// Renders the template, and puts [`MARKS`](crate::value::MARKS) around the text of `{% generation %}` blocks. Errors with the reason.
    pub fn render(&self, variables: Vec<(String, Value)>, clock: Clock) -> Result<String> {
        let limits = Limits::default().strict(self.is_strict);
        Rendering::new(variables, clock, limits).run(&self.parsed.body)
    }
}
