//! From tokens to answers. The grammar, with the loosest operator first:
//!
//! ```text
//! answer  = [name ["(" name ")"] "="] union ["%"]
//! union   = list {"∪" list}
//! list    = item {"," item}                          without brackets: a set
//! item    = ("(" | "[") item "," … (")" | "]") | "\{" item "," … "\}" | ["+" | "-"] "∞" | sum
//! sum     = product {("+" | "-") product}
//! product = factor {["*" | "/"] factor}              a factor without operator is no bare number
//! factor  = ("+" | "-") factor | atom ["^" factor] ["%"]
//! atom    = number ["\frac" integers] | "π" | "(" sum ")" | "[" sum "]" | "{" sum "}" | "\frac" group group | "\sqrt" ["[" integer "]"] group
//! ```

use super::answer::{Answer, Value};
use super::lex::{Bracket, Token};
use super::number::Number;
use super::rational::Rational;
use super::units::{LETTERS, Units};
use std::cell::Cell;

/// How deep brackets, signs and powers may be nested.
const MAX_DEPTH: usize = 32;

/// The most products of terms that the numbers of an answer may cost, so that powers of long sums do not cost seconds.
const MAX_PRODUCTS: usize = 512;

/// The products that are left to an answer.
struct Work(Cell<usize>);

impl Work {
    /// Takes `products` off; `None` if fewer are left.
    fn spend(&self, products: usize) -> Option<()> {
        self.0.set(self.0.get().checked_sub(products)?);
        Some(())
    }
}

/// The answer that `tokens` are; `None` for what is none.
pub(crate) fn parse(tokens: &[Token], units: &Units) -> Option<Answer> {
    let tokens = without_units(after_equals(tokens), units);
    let (tokens, percent) = match tokens.split_last() {
        Some((Token::Sign('%'), before)) => (without_units(before, units), true),
        _ => (tokens, false),
    };
    let parts = split(tokens, &Token::Union)?;
    let work = Work(Cell::new(MAX_PRODUCTS));
    let value = match parts.as_slice() {
        [one] => list(one, &work)?,
        parts => Value::Union(parts.iter().map(|part| list(part, &work)).collect::<Option<_>>()?),
    };
    Some(Answer { value, percent })
}

/// The tokens after the last `=`, if the first token is a name.
fn after_equals(tokens: &[Token]) -> &[Token] {
    let last = tokens.iter().rposition(|token| *token == Token::Sign('='));
    match (tokens.first(), last) {
        (Some(Token::Word(_)), Some(last)) => &tokens[last + 1..],
        _ => tokens,
    }
}

/// `tokens` without units at the end, such as `cm`, `m^2` and `km/h`.
fn without_units<'a>(tokens: &'a [Token], units: &Units) -> &'a [Token] {
    let mut rest = tokens;
    while let Some(before) = without_unit(rest, units) {
        rest = match before {
            [before @ .., Token::Sign('/')] => before,
            before => before,
        };
    }
    rest
}

/// `tokens` without the unit at the end, and without its power.
fn without_unit<'a>(tokens: &'a [Token], units: &Units) -> Option<&'a [Token]> {
    use Token::{Close, Number, Open, Sign};
    let base = match tokens {
        [base @ .., Sign('^'), Number(_)] => base,
        [base @ .., Sign('^'), Open(Bracket::Group), Number(_), Close(Bracket::Group)] => base,
        base => base,
    };
    let is_letter = |word: &str| LETTERS.contains(&word);
    match base {
        [before @ .., Token::Unit(_)] => Some(before),
        [before @ .., Token::Word(word)] if units.contain(word) => Some(before),
        [before @ .., Token::Word(above), Sign('/'), Token::Word(below)]
            if is_letter(below) && (is_letter(above) || units.contain(above)) =>
        {
            Some(before)
        }
        _ => None,
    }
}

/// Divides `tokens` at `separator`, outside of brackets; `None` if brackets do not match.
fn split<'a>(tokens: &'a [Token], separator: &Token) -> Option<Vec<&'a [Token]>> {
    let (mut open, mut begin, mut parts) = (Vec::new(), 0, Vec::new());
    for (at, token) in tokens.iter().enumerate() {
        match token {
            Token::Open(bracket) => open.push(*bracket),
            Token::Close(bracket) => open.pop().filter(|open| match_each_other(*open, *bracket)).map(drop)?,
            token if token == separator && open.is_empty() => {
                parts.push(&tokens[begin..at]);
                begin = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&tokens[begin..]);
    open.is_empty().then_some(parts)
}

/// Half-open intervals end with another bracket.
fn match_each_other(open: Bracket, close: Bracket) -> bool {
    let ends_interval = |bracket| matches!(bracket, Bracket::Round | Bracket::Square);
    open == close || ends_interval(open) && ends_interval(close)
}

/// Items between commas: one item, or a set.
fn list(tokens: &[Token], work: &Work) -> Option<Value> {
    match split(tokens, &Token::Sign(','))?.as_slice() {
        [one] => item(one, 0, work),
        items => Some(Value::set(all(items, 0, work)?)),
    }
}

fn all(items: &[&[Token]], depth: usize, work: &Work) -> Option<Vec<Value>> {
    items.iter().map(|tokens| item(tokens, depth + 1, work)).collect()
}

/// A set, a tuple or an interval in brackets, an infinity or a number.
fn item(tokens: &[Token], depth: usize, work: &Work) -> Option<Value> {
    if depth > MAX_DEPTH {
        return None;
    }
    match tokens {
        [Token::Infinity] | [Token::Sign('+'), Token::Infinity] => return Some(Value::Infinity { negative: false }),
        [Token::Sign('-'), Token::Infinity] => return Some(Value::Infinity { negative: true }),
        [Token::Open(open), inner @ .., Token::Close(close)] => match (open, split(inner, &Token::Sign(','))) {
            (Bracket::Set, Some(items)) => return Some(Value::set(all(&items, depth, work)?)),
            (Bracket::Round | Bracket::Square, Some(items)) if items.len() > 1 => {
                return Some(Value::Listed { open: *open, items: all(&items, depth, work)?, close: *close });
            }
            _ => {}
        },
        _ => {}
    }
    let mut parser = Parser { tokens, at: 0, depth: 0, work };
    let sum = parser.sum()?;
    (parser.at == tokens.len()).then_some(Value::Number(sum))
}

/// A parser of sums by recursive descent.
struct Parser<'a> {
    tokens: &'a [Token],
    at: usize,
    depth: usize,
    work: &'a Work,
}

impl Parser<'_> {
    fn times(&self, a: &Number, b: &Number) -> Option<Number> {
        self.work.spend(a.terms() * b.terms())?;
        a.times(b)
    }

    fn power(&self, base: &Number, exponent: &Rational) -> Option<Number> {
        let factors = exponent.to_i64().map_or(1, |exponent| exponent.unsigned_abs().min(MAX_PRODUCTS as u64) as usize);
        if base.terms() > 1 {
            self.work.spend(factors * base.terms() * base.terms())?;
        }
        base.power(exponent)
    }

    fn peek(&self) -> Option<&Token> {
        self.tokens.get(self.at)
    }

    /// Takes the next token, if it is `token`.
    fn take(&mut self, token: &Token) -> bool {
        let is_next = self.peek() == Some(token);
        self.at += usize::from(is_next);
        is_next
    }

    /// Runs `parse` one level deeper.
    fn nested(&mut self, parse: impl FnOnce(&mut Self) -> Option<Number>) -> Option<Number> {
        self.depth += 1;
        let value = if self.depth > MAX_DEPTH { None } else { parse(self) };
        self.depth -= 1;
        value
    }

    fn sum(&mut self) -> Option<Number> {
        let mut sum = self.product()?;
        loop {
            if self.take(&Token::Sign('+')) {
                sum = sum.plus(&self.product()?)?;
            } else if self.take(&Token::Sign('-')) {
                sum = sum.plus(&self.product()?.negative())?;
            } else {
                return Some(sum);
            }
        }
    }

    fn product(&mut self) -> Option<Number> {
        let mut product = self.factor()?;
        loop {
            let begins_factor = matches!(
                self.peek(),
                Some(Token::Pi | Token::Frac | Token::Sqrt | Token::Open(Bracket::Round | Bracket::Group))
            );
            if self.take(&Token::Sign('*')) || begins_factor {
                let factor = self.factor()?;
                product = self.times(&product, &factor)?;
            } else if self.take(&Token::Sign('/')) {
                let divisor = self.factor()?.inverse()?;
                product = self.times(&product, &divisor)?;
            } else {
                return Some(product);
            }
        }
    }

    fn factor(&mut self) -> Option<Number> {
        if self.take(&Token::Sign('-')) {
            return Some(self.nested(Self::factor)?.negative());
        }
        if self.take(&Token::Sign('+')) {
            return self.nested(Self::factor);
        }
        let mut value = self.atom()?;
        if self.take(&Token::Sign('^')) {
            let exponent = self.nested(Self::factor)?.to_rational()?;
            value = self.power(&value, &exponent)?;
        }
        while self.take(&Token::Sign('%')) {
            value = value.times(&Number::rational(Rational::integer(100).inverse()?))?;
        }
        Some(value)
    }

    fn atom(&mut self) -> Option<Number> {
        match self.peek()?.clone() {
            Token::Number(value) => {
                self.at += 1;
                self.mixed(value)
            }
            Token::Pi => {
                self.at += 1;
                Some(Number::pi())
            }
            Token::Open(bracket @ (Bracket::Round | Bracket::Square | Bracket::Group)) => {
                self.at += 1;
                let value = self.nested(Self::sum)?;
                self.take(&Token::Close(bracket)).then_some(value)
            }
            Token::Frac => {
                self.at += 1;
                let numerator = self.argument()?;
                let denominator = self.argument()?;
                self.times(&numerator, &denominator.inverse()?)
            }
            Token::Sqrt => {
                self.at += 1;
                let degree = if self.take(&Token::Open(Bracket::Square)) { self.degree()? } else { 2 };
                self.argument()?.root(degree)
            }
            _ => None,
        }
    }

    /// An argument of a command: a group, or one token.
    fn argument(&mut self) -> Option<Number> {
        match self.peek()? {
            Token::Number(value) => {
                let value = Number::rational(value.clone());
                self.at += 1;
                Some(value)
            }
            Token::Open(_) | Token::Pi => self.nested(Self::atom),
            _ => None,
        }
    }

    /// The degree of a root, after its bracket.
    fn degree(&mut self) -> Option<u32> {
        let Some(Token::Number(degree)) = self.peek() else { return None };
        let degree = u32::try_from(degree.to_i64()?).ok()?;
        self.at += 1;
        self.take(&Token::Close(Bracket::Square)).then_some(degree)
    }

    /// The mixed number that an integer before a fraction of integers begins: `1\frac{1}{2}` is 3/2. Otherwise `value`.
    fn mixed(&mut self, value: Rational) -> Option<Number> {
        let begin = self.at;
        let fraction = match (value.to_i64(), self.take(&Token::Frac)) {
            (Some(_), true) => self.integer_argument().zip(self.integer_argument()),
            _ => None,
        };
        match fraction {
            Some((numerator, denominator)) => {
                Some(Number::rational(value.plus(&numerator.times(&denominator.inverse()?)?)?))
            }
            None => {
                self.at = begin;
                Some(Number::rational(value))
            }
        }
    }

    /// An argument that is an integer without a sign.
    fn integer_argument(&mut self) -> Option<Rational> {
        let in_group = self.take(&Token::Open(Bracket::Group));
        let Some(Token::Number(value)) = self.peek() else { return None };
        let value = value.clone();
        value.to_i64()?;
        self.at += 1;
        (!in_group || self.take(&Token::Close(Bracket::Group))).then_some(value)
    }
}
