//! Chat templates: the language of Jinja2 3.1, as the sandbox of transformers runs it, with Python's values.
//!
//! A template is untrusted, so a rendering has limits: of steps, of memory and of depth (`limits.rs`). Lists and dicts cannot be changed.
//! Templates that read other files (`include`, `import`, `extends`) are errors, as in transformers, which gives them no loader.

mod arguments;
mod ast;
mod call;
mod compare;
mod error;
mod eval;
mod expressions;
mod filters;
mod format;
mod item_filters;
mod items;
mod json;
mod lexer;
mod limits;
mod methods;
pub(super) mod number;
mod ops;
mod parser;
mod percent;
mod predicates;
mod statements;
mod template;
mod text;
mod text_methods;
mod value;

pub(super) use number::value_of_json;
pub(super) use template::Template;
pub(super) use value::{MARKS, Value};

#[cfg(test)]
mod tests;
