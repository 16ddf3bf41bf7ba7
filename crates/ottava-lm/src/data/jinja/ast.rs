//! Statements and expressions of a template.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::value::Value;

/// A parsed template.
#[derive(Debug)]
pub(super) struct Parsed {
    pub(super) body: Vec<Statement>,
    /// The variables that it reads.
    pub(super) names: BTreeSet<String>,
    /// Whether it looks into the content of messages as into a list of parts.
    pub(super) takes_parts: bool,
}

/// A statement with its line.
#[derive(Debug)]
pub(super) struct Statement {
    pub(super) kind: StatementKind,
    pub(super) line: usize,
}

#[derive(Debug)]
pub(super) enum StatementKind {
    /// Text outside of tags.
    Data(String),
    /// `{{ … }}`.
    Print(Expression),
    If {
        /// Conditions with their bodies, in order.
        branches: Vec<(Expression, Vec<Statement>)>,
        otherwise: Vec<Statement>,
    },
    For(For),
    Set(Target, Expression),
    /// `{% set x %}…{% endset %}` with filters.
    SetBlock(Target, Vec<FilterCall>, Vec<Statement>),
    With(Vec<(Target, Expression)>, Vec<Statement>),
    Filter(Vec<FilterCall>, Vec<Statement>),
    Macro(Macro),
    /// `{% call … %}`: the body is a macro without a name.
    Call(Macro, Expression),
    /// `{% generation %}`, a turn of the assistant.
    Generation(Vec<Statement>),
    /// `{% block %}`, which stands where it is, since no template extends another.
    Block(Vec<Statement>),
    Break,
    Continue,
}

#[derive(Debug)]
pub(super) struct For {
    pub(super) target: Target,
    pub(super) items: Expression,
    pub(super) condition: Option<Expression>,
    pub(super) recursive: bool,
    pub(super) body: Vec<Statement>,
    pub(super) otherwise: Vec<Statement>,
}

#[derive(Debug)]
pub(super) struct Macro {
    pub(super) name: Arc<str>,
    /// Parameters with their defaults.
    pub(super) parameters: Vec<(Arc<str>, Option<Expression>)>,
    pub(super) body: Vec<Statement>,
    /// Whether the body reads `varargs`, further arguments.
    pub(super) takes_more: bool,
    /// Whether the body reads `kwargs`, further arguments with names.
    pub(super) takes_more_named: bool,
}

/// What is assigned to.
#[derive(Debug)]
pub(super) enum Target {
    Name(Arc<str>),
    /// An attribute of a namespace.
    Attribute(Arc<str>, Arc<str>),
    Tuple(Vec<Target>),
}

#[derive(Debug)]
pub(super) struct FilterCall {
    pub(super) name: Arc<str>,
    pub(super) arguments: Arguments,
    pub(super) line: usize,
}

#[derive(Debug, Default)]
pub(super) struct Arguments {
    pub(super) positional: Vec<Expression>,
    pub(super) named: Vec<(Arc<str>, Expression)>,
    /// `*list`.
    pub(super) more: Option<Box<Expression>>,
    /// `**dict`.
    pub(super) more_named: Option<Box<Expression>>,
}

/// An expression with its line, and how many are nested in it.
#[derive(Debug)]
pub(super) struct Expression {
    pub(super) kind: ExpressionKind,
    pub(super) line: usize,
    pub(super) depth: usize,
}

type Boxed = Box<Expression>;

#[derive(Debug)]
pub(super) enum ExpressionKind {
    Constant(Value),
    Name(Arc<str>),
    List(Vec<Expression>),
    Tuple(Vec<Expression>),
    Dict(Vec<(Expression, Expression)>),
    /// `then if test else otherwise`: test, then, otherwise.
    Condition(Boxed, Boxed, Option<Boxed>),
    And(Boxed, Boxed),
    Or(Boxed, Boxed),
    Not(Boxed),
    /// A first value, then operators with further values.
    Compare(Boxed, Vec<(&'static str, Expression)>),
    Binary(&'static str, Boxed, Boxed),
    /// `a ~ b ~ …`.
    Concatenation(Vec<Expression>),
    Negative(Boxed),
    Positive(Boxed),
    Attribute(Boxed, Arc<str>),
    Item(Boxed, Boxed),
    /// Start, end and step.
    Slice(Boxed, Box<[Option<Expression>; 3]>),
    Call(Boxed, Box<Arguments>),
    Filter(Boxed, Box<FilterCall>),
    Test(Boxed, Box<FilterCall>),
}
