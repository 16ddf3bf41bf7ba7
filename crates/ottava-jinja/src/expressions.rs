//! Parses expressions, from the lowest to the highest precedence of operators.

use crate::ast::{Arguments, Expression, ExpressionKind};
use crate::error::Result;
use crate::lexer::Kind;
use crate::parser::{Parser, above, is_content, node};
use crate::value::Value;

type Kinds = ExpressionKind;

/// Builds `a op b`.
fn binary(
    kind: impl FnOnce(Box<Expression>, Box<Expression>) -> Kinds,
    left: Expression,
    right: Expression,
) -> Result<Expression> {
    let (line, depth) = (left.line, left.depth.max(right.depth));
    node(kind(Box::new(left), Box::new(right)), line, depth)
}

impl Parser {
    pub(crate) fn expression(&mut self) -> Result<Expression> {
        self.deeper(Parser::condition)
    }

    /// Parses one expression, or a tuple of several expressions with commas. With `conditions`, an expression may have an `if`.
    pub(crate) fn tuple(&mut self, conditions: bool) -> Result<Expression> {
        let line = self.line();
        let one = |parser: &mut Parser| if conditions { parser.expression() } else { parser.deeper(Parser::or) };
        let first = one(self)?;
        if !self.is_op(",") {
            return Ok(first);
        }
        let mut items = vec![first];
        while self.skip_op(",") {
            if self.ends_tuple() {
                break;
            }
            items.push(one(self)?);
        }
        above(Kinds::Tuple, items, line)
    }

    fn ends_tuple(&self) -> bool {
        matches!(self.kind(), Kind::VariableEnd | Kind::BlockEnd | Kind::Op(")")) || self.is_name("recursive")
    }

    fn condition(&mut self) -> Result<Expression> {
        let mut value = self.or()?;
        while self.skip_name("if") {
            let test = self.or()?;
            let otherwise = if self.skip_name("else") { Some(Box::new(self.deeper(Parser::condition)?)) } else { None };
            let depth = value.depth.max(test.depth).max(otherwise.as_ref().map_or(0, |otherwise| otherwise.depth));
            let line = value.line;
            value = node(Kinds::Condition(Box::new(test), Box::new(value), otherwise), line, depth)?;
        }
        Ok(value)
    }

    pub(crate) fn or(&mut self) -> Result<Expression> {
        let mut left = self.and()?;
        while self.skip_name("or") {
            left = binary(Kinds::Or, left, self.and()?)?;
        }
        Ok(left)
    }

    fn and(&mut self) -> Result<Expression> {
        let mut left = self.not()?;
        while self.skip_name("and") {
            left = binary(Kinds::And, left, self.not()?)?;
        }
        Ok(left)
    }

    fn not(&mut self) -> Result<Expression> {
        let line = self.line();
        if !self.skip_name("not") {
            return self.comparison();
        }
        let value = self.deeper(Parser::not)?;
        let depth = value.depth;
        node(Kinds::Not(Box::new(value)), line, depth)
    }

    fn comparison(&mut self) -> Result<Expression> {
        let first = self.sum()?;
        let mut others = Vec::new();
        loop {
            let is_not_in = self.is_name("not") && matches!(self.next_kind(), Kind::Name(name) if **name == *"in");
            let op = if is_not_in {
                self.advance();
                self.advance();
                "not in"
            } else if self.skip_name("in") {
                "in"
            } else if let Some(op) = self.one_of(&["==", "!=", ">=", "<=", ">", "<"]) {
                op
            } else {
                break;
            };
            others.push((op, self.sum()?));
        }
        if others.is_empty() {
            return Ok(first);
        }
        let depth = others.iter().map(|(_, other)| other.depth).max().unwrap_or(0).max(first.depth);
        let line = first.line;
        node(Kinds::Compare(Box::new(first), others), line, depth)
    }

    fn sum(&mut self) -> Result<Expression> {
        let mut left = self.concatenation()?;
        while let Some(op) = self.one_of(&["+", "-"]) {
            left = binary(|left, right| Kinds::Binary(op, left, right), left, self.concatenation()?)?;
        }
        Ok(left)
    }

    fn concatenation(&mut self) -> Result<Expression> {
        let (line, mut parts) = (self.line(), vec![self.product()?]);
        while self.skip_op("~") {
            parts.push(self.product()?);
        }
        if parts.len() == 1 { Ok(parts.remove(0)) } else { above(Kinds::Concatenation, parts, line) }
    }

    fn product(&mut self) -> Result<Expression> {
        let mut left = self.power()?;
        while let Some(op) = self.one_of(&["*", "//", "/", "%"]) {
            left = binary(|left, right| Kinds::Binary(op, left, right), left, self.power()?)?;
        }
        Ok(left)
    }

    fn power(&mut self) -> Result<Expression> {
        let mut left = self.unary(true)?;
        while self.skip_op("**") {
            left = binary(|left, right| Kinds::Binary("**", left, right), left, self.unary(true)?)?;
        }
        Ok(left)
    }

    fn unary(&mut self, with_filters: bool) -> Result<Expression> {
        let line = self.line();
        let value = match self.one_of(&["-", "+"]) {
            Some(sign) => {
                let value = self.deeper(|parser| parser.unary(false))?;
                let depth = value.depth;
                let kind = if sign == "-" { Kinds::Negative } else { Kinds::Positive };
                node(kind(Box::new(value)), line, depth)?
            }
            None => self.primary()?,
        };
        let value = self.postfix(value)?;
        if with_filters { self.filters_and_tests(value) } else { Ok(value) }
    }

    fn primary(&mut self) -> Result<Expression> {
        let line = self.line();
        let kind = match self.kind().clone() {
            Kind::Name(name) => {
                self.advance();
                match &*name {
                    "true" | "True" => Kinds::Constant(Value::Bool(true)),
                    "false" | "False" => Kinds::Constant(Value::Bool(false)),
                    "none" | "None" => Kinds::Constant(Value::None),
                    _ => {
                        self.names.insert(name.to_string());
                        Kinds::Name(name)
                    }
                }
            }
            Kind::Text(mut text) => {
                self.advance();
                while let Kind::Text(more) = self.kind() {
                    text.push_str(more);
                    self.advance();
                }
                Kinds::Constant(Value::text(text))
            }
            Kind::Number(number) => {
                self.advance();
                Kinds::Constant(number)
            }
            Kind::Op("(") => {
                self.advance();
                if self.skip_op(")") {
                    return node(Kinds::Tuple(Vec::new()), line, 0);
                }
                let value = self.tuple(true)?;
                self.expect_op(")")?;
                return Ok(value);
            }
            Kind::Op("[") => {
                self.advance();
                let items = self.list("]", Parser::expression)?;
                return above(Kinds::List, items, line);
            }
            Kind::Op("{") => {
                self.advance();
                let entry = |parser: &mut Parser| {
                    let key = parser.expression()?;
                    parser.expect_op(":")?;
                    Ok((key, parser.expression()?))
                };
                let entries = self.list("}", entry)?;
                let depth = entries.iter().map(|(key, value)| key.depth.max(value.depth)).max().unwrap_or(0);
                return node(Kinds::Dict(entries), line, depth);
            }
            _ => return self.unexpected("a value"),
        };
        node(kind, line, 0)
    }

    /// Parses parts that are separated by commas, and consumes the `end`.
    fn list<T>(&mut self, end: &str, mut one: impl FnMut(&mut Parser) -> Result<T>) -> Result<Vec<T>> {
        let mut parts = Vec::new();
        while !self.skip_op(end) {
            if !parts.is_empty() {
                self.expect_op(",")?;
                if self.skip_op(end) {
                    break;
                }
            }
            parts.push(one(self)?);
        }
        Ok(parts)
    }

    /// Parses attributes, items and calls after a value.
    fn postfix(&mut self, mut value: Expression) -> Result<Expression> {
        loop {
            let (line, depth) = (self.line(), value.depth);
            if self.skip_op(".") {
                let attribute = match self.kind().clone() {
                    Kind::Name(name) => Kinds::Attribute(Box::new(value), name),
                    Kind::Number(number @ Value::Int(_)) => {
                        Kinds::Item(Box::new(value), Box::new(node(Kinds::Constant(number), line, 0)?))
                    }
                    _ => return self.unexpected("a name or a number"),
                };
                self.advance();
                value = node(attribute, line, depth)?;
            } else if self.skip_op("[") {
                value = self.subscript(value)?;
            } else if self.is_op("(") {
                value = self.call(value)?;
            } else {
                return Ok(value);
            }
        }
    }

    fn call(&mut self, value: Expression) -> Result<Expression> {
        let (line, arguments) = (self.line(), self.arguments()?);
        let depth = value.depth.max(arguments.depth());
        node(Kinds::Call(Box::new(value), Box::new(arguments)), line, depth)
    }

    /// Parses an item or a slice of `value`, after the opening bracket.
    fn subscript(&mut self, value: Expression) -> Result<Expression> {
        let line = self.line();
        let mut parts = [None, None, None];
        let mut colons = 0;
        while !self.is_op("]") {
            if self.skip_op(":") {
                colons += 1;
                if colons > 2 {
                    return self.fail("a slice has a start, an end and a step at most");
                }
            } else {
                parts[colons] = Some(self.expression()?);
                if !self.is_op(":") && !self.is_op("]") {
                    return self.unexpected("`]`");
                }
            }
        }
        self.advance();
        let depth = parts.iter().flatten().map(|part| part.depth).max().unwrap_or(0).max(value.depth);
        if colons > 0 {
            return node(Kinds::Slice(Box::new(value), Box::new(parts)), line, depth);
        }
        let [Some(index), ..] = parts else { return self.fail("`[]` has no index") };
        let is_number = matches!(index.kind, ExpressionKind::Constant(Value::Int(_)));
        self.takes_parts |= is_number && is_content(&value);
        node(Kinds::Item(Box::new(value), Box::new(index)), line, depth)
    }

    fn filters_and_tests(&mut self, mut value: Expression) -> Result<Expression> {
        loop {
            let (line, depth) = (self.line(), value.depth);
            if self.skip_op("|") {
                let filter = self.filter()?;
                let takes_items = ["selectattr", "rejectattr", "map", "select", "reject"].contains(&&*filter.name);
                self.takes_parts |= takes_items && is_content(&value);
                let depth = depth.max(filter.arguments.depth());
                value = node(Kinds::Filter(Box::new(value), Box::new(filter)), line, depth)?;
            } else if self.skip_name("is") {
                value = self.test(value)?;
            } else if self.is_op("(") {
                value = self.call(value)?;
            } else {
                return Ok(value);
            }
        }
    }

    fn test(&mut self, value: Expression) -> Result<Expression> {
        let (line, negated) = (self.line(), self.skip_name("not"));
        let mut test = self.filter()?;
        let takes_value = match self.kind() {
            Kind::Name(name) if **name == *"is" => return self.fail("a test after `is` cannot have another `is`"),
            Kind::Name(name) => !["else", "or", "and"].contains(&&**name),
            Kind::Text(_) | Kind::Number(_) | Kind::Op("[" | "{") => true,
            _ => false,
        };
        // An argument without parentheses, as in `x is divisibleby 3`. Names such as `in` and `if` are not arguments.
        let is_keyword = matches!(self.kind(), Kind::Name(name) if ["in", "if", "not"].contains(&&**name));
        if takes_value && !is_keyword && test.arguments.is_empty() {
            let argument = self.primary()?;
            test.arguments.positional.push(self.postfix(argument)?);
        }
        let depth = value.depth.max(test.arguments.depth());
        let test = node(Kinds::Test(Box::new(value), Box::new(test)), line, depth)?;
        let depth = test.depth;
        if negated { node(Kinds::Not(Box::new(test)), line, depth) } else { Ok(test) }
    }

    /// Parses the arguments of a call, including the parentheses.
    pub(crate) fn arguments(&mut self) -> Result<Arguments> {
        self.expect_op("(")?;
        let mut arguments = Arguments::default();
        let one = |parser: &mut Parser| {
            let is_named = matches!(parser.kind(), Kind::Name(_)) && matches!(parser.next_kind(), Kind::Op("="));
            if parser.skip_op("*") {
                arguments.more = Some(Box::new(parser.expression()?));
            } else if parser.skip_op("**") {
                arguments.more_named = Some(Box::new(parser.expression()?));
            } else if is_named {
                let name = parser.expect_name()?;
                parser.advance();
                arguments.named.push((name, parser.expression()?));
            } else if !arguments.named.is_empty() || arguments.more.is_some() || arguments.more_named.is_some() {
                return parser.fail("an argument without a name follows one with a name");
            } else {
                arguments.positional.push(parser.expression()?);
            }
            Ok(())
        };
        self.list(")", one)?;
        Ok(arguments)
    }
}

impl Arguments {
    fn is_empty(&self) -> bool {
        self.positional.is_empty() && self.named.is_empty() && self.more.is_none() && self.more_named.is_none()
    }

    fn depth(&self) -> usize {
        let named = self.named.iter().map(|(_, value)| value);
        let more = [&self.more, &self.more_named].into_iter().flatten().map(|value| &**value);
        self.positional.iter().chain(named).chain(more).map(|value| value.depth).max().unwrap_or(0)
    }
}
