//! Chat templates: the language of Jinja2 3.1 with Python's values, like in the sandbox of transformers.
//!
//! Templates are not trusted, so a rendering has limits of steps, memory and depth (`limits.rs`). Lists and dicts cannot be changed. Templates that
//! read other files (`include`, `import`, `extends`) are errors, as in transformers, which sets no loader.
//!
//! ```
//! use ottava_jinja::{Clock, Template, Value};
//!
//! let template = Template::parse("{% for word in text.split() %}[{{ word }}]{% endfor %}").unwrap();
//! let text = template.render(vec![("text".into(), Value::text("a b"))], Clock::Fixed).unwrap();
//! assert_eq!(text, "[a][b]");
//! assert_eq!(Template::parse("{% if %}").unwrap_err().to_string(), "expected a value, found `%}` (line 1)");
//! ```
//!
//! This is a separate crate so that tests can compile it with optimization. Without optimization, tests with hostile templates would take seconds.
//!
//! To add a function, filter or method, extend `call.rs`, `filters.rs`, `item_filters.rs`, `methods.rs` or `text_methods.rs`. Create values through
//! `Limits`. Add a line to `scripts/make_jinja_expressions.py`, which records the answers of Python.
#![forbid(unsafe_code)]

mod arguments;
mod ast;
mod call;
mod clock;
mod compare;
mod error;
mod eval;
mod expressions;
mod filters;
mod format;
mod item_filters;
mod items;
mod json;
pub mod json_text;
mod lexer;
mod limits;
mod methods;
mod number;
mod ops;
mod parser;
mod percent;
mod predicates;
mod statements;
mod template;
mod text;
mod text_methods;
mod value;

pub use clock::Clock;
pub use error::Failure;
pub use number::value_of_json;
pub use template::Template;
pub use value::{MARKS, Value};

#[cfg(test)]
mod tests;
