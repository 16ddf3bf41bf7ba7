//! Answers, and when they are equal.

use super::lex::Bracket;
use super::number::Number;
use super::rational::Rational;

/// An answer.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(super) value: Value,
    /// Whether a percent sign ends it, which `value` is without.
    pub(super) percent: bool,
}

/// What an answer is.
#[derive(Clone, Debug)]
pub(super) enum Value {
    Number(Number),
    Infinity {
        negative: bool,
    },
    /// A tuple or an interval.
    Listed {
        open: Bracket,
        items: Vec<Value>,
        close: Bracket,
    },
    /// Distinct elements in no order.
    Set(Vec<Value>),
    /// A union of sets and intervals, in no order.
    Union(Vec<Value>),
}

impl Value {
    /// The set of `items`; a set of one element is the element.
    pub(super) fn set(mut items: Vec<Value>) -> Value {
        if items.len() == 1 { items.remove(0) } else { Value::Set(items) }
    }
}

/// How far a number may be from the right one: `|x - gold| <= tolerance * max(1, |gold|)`, compared in F64. 0 compares exactly.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tolerance(pub(crate) f64);

impl Answer {
    /// Whether this answer equals the right answer `gold`. If only one of them has a percent sign, 50% equals 50 and 1/2.
    pub(crate) fn equals(&self, gold: &Answer, tolerance: Tolerance) -> bool {
        let plain = || equal(&self.value, &gold.value, tolerance);
        match (&self.value, &gold.value) {
            (Value::Number(a), Value::Number(b)) if self.percent != gold.percent => {
                let hundredth = |number: &Number, percent: bool| {
                    let factor = Rational::integer(if percent { 100 } else { 1 }).inverse()?;
                    number.times(&Number::rational(factor))
                };
                let values = hundredth(a, self.percent).zip(hundredth(b, gold.percent));
                plain() || values.is_some_and(|(a, b)| close(&a, &b, tolerance))
            }
            _ => self.percent == gold.percent && plain(),
        }
    }
}

/// Whether two numbers are equal, with percent signs as in [`Answer::equals`].
pub(crate) fn equal_values(found: (Rational, bool), gold: (Rational, bool), tolerance: Tolerance) -> bool {
    let answer = |(value, percent)| Answer { value: Value::Number(Number::rational(value)), percent };
    answer(found).equals(&answer(gold), tolerance)
}

fn equal(a: &Value, gold: &Value, tolerance: Tolerance) -> bool {
    match (a, gold) {
        (Value::Number(a), Value::Number(gold)) => close(a, gold, tolerance),
        (Value::Infinity { negative: a }, Value::Infinity { negative: gold }) => a == gold,
        (Value::Listed { open, items, close }, Value::Listed { open: o, items: golds, close: c }) => {
            let pairs = || items.iter().zip(golds).all(|(a, gold)| equal(a, gold, tolerance));
            open == o && close == c && items.len() == golds.len() && pairs()
        }
        (Value::Set(a), Value::Set(gold)) | (Value::Union(a), Value::Union(gold)) => {
            let holds = |all: &[Value], one: &Value| all.iter().any(|other| equal(other, one, tolerance));
            a.iter().all(|one| holds(gold, one)) && gold.iter().all(|one| holds(a, one))
        }
        _ => false,
    }
}

fn close(a: &Number, gold: &Number, Tolerance(tolerance): Tolerance) -> bool {
    if tolerance == 0.0 || a == gold {
        return a == gold;
    }
    let (a, gold) = (a.to_f64(), gold.to_f64());
    (a - gold).abs() <= tolerance * gold.abs().max(1.0)
}
