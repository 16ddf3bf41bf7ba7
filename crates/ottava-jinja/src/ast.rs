//! The statements and expressions of a template.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::value::Value;

/// A parsed template.
#[derive(Debug)]
pub(crate) struct Parsed {
    pub(crate) body: Vec<Statement>,
    /// The variables that the template reads.
    pub(crate) names: BTreeSet<String>,
    /// Whether the template reads the content of messages as a list of parts.
    pub(crate) takes_parts: bool,
}

/// A statement, and its line.
#[derive(Debug)]
pub(crate) struct Statement {
    pub(crate) kind: StatementKind,
    pub(crate) line: usize,
}

#[derive(Debug)]
pub(crate) enum StatementKind {
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
    /// `{% set x %}…{% endset %}`, with filters.
    SetBlock(Target, Vec<FilterCall>, Vec<Statement>),
    With(Vec<(Target, Expression)>, Vec<Statement>),
    Filter(Vec<FilterCall>, Vec<Statement>),
    Macro(Macro),
    /// `{% call … %}`: its body is a macro without a name.
    Call(Macro, Expression),
    /// `{% generation %}`, a turn of the assistant.
    Generation(Vec<Statement>),
    /// `{% block %}`, which is rendered in place, because templates cannot extend other templates.
    Block(Vec<Statement>),
    Break,
    Continue,
}

#[derive(Debug)]
pub(crate) struct For {
    pub(crate) target: Target,
    pub(crate) items: Expression,
    pub(crate) condition: Option<Expression>,
    pub(crate) recursive: bool,
    pub(crate) body: Vec<Statement>,
    pub(crate) otherwise: Vec<Statement>,
}

#[derive(Debug)]
pub(crate) struct Macro {
    pub(crate) name: Arc<str>,
    /// The parameters with their defaults.
    pub(crate) parameters: Vec<(Arc<str>, Option<Expression>)>,
    pub(crate) body: Vec<Statement>,
    /// Whether the body reads `varargs`, the further positional arguments.
    pub(crate) takes_more: bool,
    /// Whether the body reads `kwargs`, the further named arguments.
    pub(crate) takes_more_named: bool,
}

/// The target of an assignment.
#[derive(Debug)]
pub(crate) enum Target {
    Name(Arc<str>),
    /// An attribute of a namespace.
    Attribute(Arc<str>, Arc<str>),
    Tuple(Vec<Target>),
}

#[derive(Debug)]
pub(crate) struct FilterCall {
    pub(crate) name: Arc<str>,
    pub(crate) arguments: Arguments,
    pub(crate) line: usize,
}

#[derive(Debug, Default)]
pub(crate) struct Arguments {
    pub(crate) positional: Vec<Expression>,
    pub(crate) named: Vec<(Arc<str>, Expression)>,
    /// `*list`.
    pub(crate) more: Option<Box<Expression>>,
    /// `**dict`.
    pub(crate) more_named: Option<Box<Expression>>,
}

/// An expression, its line, and the depth of the expressions that are nested in it.
#[derive(Debug)]
pub(crate) struct Expression {
    pub(crate) kind: ExpressionKind,
    pub(crate) line: usize,
    pub(crate) depth: usize,
}

type Boxed = Box<Expression>;

#[derive(Debug)]
pub(crate) enum ExpressionKind {
    Constant(Value),
    Name(Arc<str>),
    List(Vec<Expression>),
    Tuple(Vec<Expression>),
    Dict(Vec<(Expression, Expression)>),
    /// `then if test else otherwise`, in the order test, then, otherwise.
    Condition(Boxed, Boxed, Option<Boxed>),
    And(Boxed, Boxed),
    Or(Boxed, Boxed),
    Not(Boxed),
    /// A first value, and then operators with further values.
    Compare(Boxed, Vec<(&'static str, Expression)>),
    Binary(&'static str, Boxed, Boxed),
    /// `a ~ b ~ …`.
    Concatenation(Vec<Expression>),
    Negative(Boxed),
    Positive(Boxed),
    Attribute(Boxed, Arc<str>),
    Item(Boxed, Boxed),
    /// A slice with start, end and step.
    Slice(Boxed, Box<[Option<Expression>; 3]>),
    Call(Boxed, Box<Arguments>),
    Filter(Boxed, Box<FilterCall>),
    Test(Boxed, Box<FilterCall>),
}
