//! Parses the grammar of Jinja2 3.1.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::ast::{
    Arguments, Expression, ExpressionKind, FilterCall, For, Macro, Parsed, Statement, StatementKind, Target,
};
use crate::error::{Failure, Result};
use crate::lexer::{Kind, Token};
use crate::value::Value;

/// The maximum depth of nested expressions or blocks.
const MAX_DEPTH: usize = 100;

/// Parses the tokens of a template.
pub(crate) fn parse(tokens: Vec<Token>) -> Result<Parsed> {
    let mut parser = Parser { tokens, at: 0, names: BTreeSet::new(), depth: 0, takes_parts: false };
    let (body, _) = parser.statements(&[])?;
    Ok(Parsed { body, names: parser.names, takes_parts: parser.takes_parts })
}

/// Parses tokens. Its methods for expressions are in `expressions.rs`.
pub(crate) struct Parser {
    tokens: Vec<Token>,
    at: usize,
    pub(crate) names: BTreeSet<String>,
    /// The number of blocks and brackets around the current token.
    depth: usize,
    /// Whether an expression reads the content of a message as a list of parts.
    pub(crate) takes_parts: bool,
}

impl Parser {
    pub(crate) fn kind(&self) -> &Kind {
        &self.tokens[self.at].kind
    }

    pub(crate) fn line(&self) -> usize {
        self.tokens[self.at].line
    }

    /// Returns the kind of the token after the current token.
    pub(crate) fn next_kind(&self) -> &Kind {
        &self.tokens[(self.at + 1).min(self.tokens.len() - 1)].kind
    }

    pub(crate) fn advance(&mut self) {
        self.at = (self.at + 1).min(self.tokens.len() - 1);
    }

    pub(crate) fn fail<T>(&self, reason: impl Into<String>) -> Result<T> {
        Err(Failure { reason: reason.into(), line: self.line() })
    }

    pub(crate) fn unexpected<T>(&self, expected: &str) -> Result<T> {
        let found = match self.kind() {
            Kind::Data(_) => "text".to_string(),
            Kind::VariableBegin => "`{{`".into(),
            Kind::VariableEnd => "`}}`".into(),
            Kind::BlockBegin => "`{%`".into(),
            Kind::BlockEnd => "`%}`".into(),
            Kind::Name(name) => format!("`{name}`"),
            Kind::Text(text) => format!("the text {text:?}"),
            Kind::Number(_) => "a number".into(),
            Kind::Op(op) => format!("`{op}`"),
            Kind::End => "the end of the template".into(),
        };
        self.fail(format!("expected {expected}, found {found}"))
    }

    /// Runs `parse` one nesting level deeper.
    pub(crate) fn deeper<T>(&mut self, parse: impl FnOnce(&mut Parser) -> Result<T>) -> Result<T> {
        if self.depth == MAX_DEPTH {
            return self.fail(format!("more than {MAX_DEPTH} blocks and brackets are within each other"));
        }
        self.depth += 1;
        let parsed = parse(self);
        self.depth -= 1;
        parsed
    }

    pub(crate) fn is_op(&self, op: &str) -> bool {
        matches!(self.kind(), Kind::Op(found) if *found == op)
    }

    pub(crate) fn is_name(&self, name: &str) -> bool {
        matches!(self.kind(), Kind::Name(found) if **found == *name)
    }

    pub(crate) fn skip_op(&mut self, op: &str) -> bool {
        let found = self.is_op(op);
        if found {
            self.advance();
        }
        found
    }

    pub(crate) fn skip_name(&mut self, name: &str) -> bool {
        let found = self.is_name(name);
        if found {
            self.advance();
        }
        found
    }

    /// If the next token is an operator of `ops`, consumes and returns it.
    pub(crate) fn one_of(&mut self, ops: &[&'static str]) -> Option<&'static str> {
        let op = ops.iter().copied().find(|op| self.is_op(op))?;
        self.advance();
        Some(op)
    }

    pub(crate) fn expect_op(&mut self, op: &str) -> Result<()> {
        match self.skip_op(op) {
            true => Ok(()),
            false => self.unexpected(&format!("`{op}`")),
        }
    }

    pub(crate) fn expect_name(&mut self) -> Result<Arc<str>> {
        let Kind::Name(name) = self.kind() else { return self.unexpected("a name") };
        let name = name.clone();
        self.advance();
        Ok(name)
    }

    fn expect_keyword(&mut self, name: &str) -> Result<()> {
        match self.skip_name(name) {
            true => Ok(()),
            false => self.unexpected(&format!("`{name}`")),
        }
    }

    fn expect_block_end(&mut self) -> Result<()> {
        match self.kind() {
            Kind::BlockEnd => {
                self.advance();
                Ok(())
            }
            _ => self.unexpected("`%}`"),
        }
    }

    /// Parses statements up to a tag whose name is in `ends`. Consumes the name and returns it. If `ends` is empty, parses to the end of the
    /// template.
    fn statements(&mut self, ends: &[&'static str]) -> Result<(Vec<Statement>, &'static str)> {
        let mut body = Vec::new();
        loop {
            let line = self.line();
            let kind = match self.kind().clone() {
                Kind::Data(text) => {
                    self.advance();
                    StatementKind::Data(text)
                }
                Kind::VariableBegin => {
                    self.advance();
                    let value = self.tuple(true)?;
                    let Kind::VariableEnd = self.kind() else { return self.unexpected("`}}`") };
                    self.advance();
                    StatementKind::Print(value)
                }
                Kind::BlockBegin => {
                    self.advance();
                    if let Some(end) = ends.iter().find(|end| self.is_name(end)) {
                        self.advance();
                        return Ok((body, end));
                    }
                    let kind = self.deeper(Parser::block)?;
                    self.expect_block_end()?;
                    kind
                }
                Kind::End if ends.is_empty() => return Ok((body, "")),
                _ => return self.unexpected(&format!("`{{% {} %}}`", ends.last().unwrap_or(&""))),
            };
            body.push(Statement { kind, line });
        }
    }

    /// Parses the body of a block up to the tag `end`.
    fn body(&mut self, end: &'static str) -> Result<Vec<Statement>> {
        self.expect_block_end()?;
        Ok(self.statements(&[end])?.0)
    }

    /// Parses a statement in a tag with its body, up to the `%}` of its last tag.
    fn block(&mut self) -> Result<StatementKind> {
        let name = self.expect_name()?;
        Ok(match &*name {
            "if" => self.conditional()?,
            "for" => self.for_loop()?,
            "set" => self.set()?,
            "with" => self.with()?,
            "filter" => {
                let filters = self.filters(true)?;
                StatementKind::Filter(filters, self.body("endfilter")?)
            }
            "macro" => {
                let name = self.expect_name()?;
                let parameters = self.parameters()?;
                StatementKind::Macro(self.macro_body(name, parameters, "endmacro")?)
            }
            "call" => self.call_block()?,
            "generation" => StatementKind::Generation(self.body("endgeneration")?),
            "block" => {
                self.expect_name()?;
                let body = self.body("endblock")?;
                if matches!(self.kind(), Kind::Name(_)) {
                    self.advance();
                }
                StatementKind::Block(body)
            }
            "break" => StatementKind::Break,
            "continue" => StatementKind::Continue,
            "include" | "import" | "from" | "extends" => {
                return self.fail(format!("`{name}` reads another template, and a chat template has none"));
            }
            _ => return self.fail(format!("unknown tag `{name}`")),
        })
    }

    fn conditional(&mut self) -> Result<StatementKind> {
        let (mut branches, mut otherwise) = (Vec::new(), Vec::new());
        loop {
            let test = self.tuple(false)?;
            self.expect_block_end()?;
            let (body, end) = self.statements(&["elif", "else", "endif"])?;
            branches.push((test, body));
            if end == "else" {
                otherwise = self.body("endif")?;
            }
            if end != "elif" {
                return Ok(StatementKind::If { branches, otherwise });
            }
        }
    }

    fn for_loop(&mut self) -> Result<StatementKind> {
        let target = self.targets("in")?;
        self.expect_keyword("in")?;
        let items = self.tuple(false)?;
        self.takes_parts |= is_content(&items);
        let condition = if self.skip_name("if") { Some(self.expression()?) } else { None };
        let recursive = self.skip_name("recursive");
        self.expect_block_end()?;
        let (body, end) = self.statements(&["endfor", "else"])?;
        let otherwise = if end == "else" { self.body("endfor")? } else { Vec::new() };
        Ok(StatementKind::For(For { target, items, condition, recursive, body, otherwise }))
    }

    fn set(&mut self) -> Result<StatementKind> {
        let target = self.targets("")?;
        if self.skip_op("=") {
            return Ok(StatementKind::Set(target, self.tuple(true)?));
        }
        let filters = self.filters(false)?;
        Ok(StatementKind::SetBlock(target, filters, self.body("endset")?))
    }

    fn with(&mut self) -> Result<StatementKind> {
        let mut values = Vec::new();
        while !matches!(self.kind(), Kind::BlockEnd) {
            if !values.is_empty() {
                self.expect_op(",")?;
            }
            let target = self.target()?;
            self.expect_op("=")?;
            values.push((target, self.expression()?));
        }
        Ok(StatementKind::With(values, self.body("endwith")?))
    }

    fn call_block(&mut self) -> Result<StatementKind> {
        let parameters = if self.is_op("(") { self.parameters()? } else { Vec::new() };
        let call = self.expression()?;
        if !matches!(call.kind, ExpressionKind::Call(..)) {
            return self.fail("`{% call %}` needs a call, such as `{% call name() %}`");
        }
        Ok(StatementKind::Call(self.macro_body("caller".into(), parameters, "endcall")?, call))
    }

    fn macro_body(
        &mut self,
        name: Arc<str>,
        parameters: Vec<(Arc<str>, Option<Expression>)>,
        end: &'static str,
    ) -> Result<Macro> {
        let mut outside = std::mem::take(&mut self.names);
        let body = self.body(end)?;
        let [takes_more, takes_more_named] = ["varargs", "kwargs"].map(|name| self.names.contains(name));
        outside.append(&mut self.names);
        self.names = outside;
        Ok(Macro { name, parameters, body, takes_more, takes_more_named })
    }

    fn parameters(&mut self) -> Result<Vec<(Arc<str>, Option<Expression>)>> {
        let mut parameters: Vec<(Arc<str>, Option<Expression>)> = Vec::new();
        self.expect_op("(")?;
        while !self.is_op(")") {
            if !parameters.is_empty() {
                self.expect_op(",")?;
            }
            let name = self.expect_name()?;
            let default = if self.skip_op("=") { Some(self.expression()?) } else { None };
            if default.is_none() && parameters.last().is_some_and(|(_, default)| default.is_some()) {
                return self.fail(format!("parameter `{name}` has no default, and the one before it has"));
            }
            parameters.push((name, default));
        }
        self.advance();
        Ok(parameters)
    }

    /// Parses the targets of an assignment before `end`: a name, or several names with commas.
    fn targets(&mut self, end: &str) -> Result<Target> {
        let mut targets = vec![self.target()?];
        let mut is_tuple = false;
        while self.skip_op(",") {
            is_tuple = true;
            if self.is_name(end) || self.is_op("=") {
                break;
            }
            targets.push(self.target()?);
        }
        Ok(if is_tuple { Target::Tuple(targets) } else { targets.remove(0) })
    }

    fn target(&mut self) -> Result<Target> {
        if self.skip_op("(") {
            let targets = self.deeper(|parser| parser.targets(""))?;
            self.expect_op(")")?;
            return Ok(targets);
        }
        let name = self.expect_name()?;
        if ["true", "false", "none", "True", "False", "None"].contains(&&*name) {
            return self.fail(format!("`{name}` cannot be assigned to"));
        }
        match self.skip_op(".") {
            true => {
                self.names.insert(name.to_string());
                Ok(Target::Attribute(name, self.expect_name()?))
            }
            false => Ok(Target::Name(name)),
        }
    }

    /// Parses filters with their arguments. With `inline`, the first filter has no `|` before it.
    fn filters(&mut self, inline: bool) -> Result<Vec<FilterCall>> {
        let mut filters = Vec::new();
        while (inline && filters.is_empty()) || self.skip_op("|") {
            filters.push(self.filter()?);
        }
        Ok(filters)
    }

    pub(crate) fn filter(&mut self) -> Result<FilterCall> {
        let (line, mut name) = (self.line(), self.expect_name()?);
        while self.skip_op(".") {
            name = format!("{name}.{}", self.expect_name()?).into();
        }
        let arguments = if self.is_op("(") { self.arguments()? } else { Arguments::default() };
        Ok(FilterCall { name, arguments, line })
    }
}

/// Whether an expression is the content of a message, optionally with filters.
pub(crate) fn is_content(value: &Expression) -> bool {
    match &value.kind {
        ExpressionKind::Name(name) | ExpressionKind::Attribute(_, name) => **name == *"content",
        ExpressionKind::Item(_, key) => {
            matches!(&key.kind, ExpressionKind::Constant(Value::Str(name)) if **name == *"content")
        }
        ExpressionKind::Filter(value, _) | ExpressionKind::Slice(value, _) => is_content(value),
        _ => false,
    }
}

/// Creates an expression. Errors if it has too many nested expressions.
pub(crate) fn node(kind: ExpressionKind, line: usize, inner: usize) -> Result<Expression> {
    match inner < 2 * MAX_DEPTH {
        true => Ok(Expression { kind, line, depth: inner + 1 }),
        false => Err(Failure { reason: "an expression has too many parts".into(), line }),
    }
}

/// Creates an expression with several inner expressions.
pub(crate) fn above(
    kind: impl FnOnce(Vec<Expression>) -> ExpressionKind,
    parts: Vec<Expression>,
    line: usize,
) -> Result<Expression> {
    let depth = parts.iter().map(|part| part.depth).max().unwrap_or(0);
    node(kind(parts), line, depth)
}
