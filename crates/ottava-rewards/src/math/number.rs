//! Numbers `r₁ √n₁ π^k₁ + r₂ √n₂ π^k₂ + …` with rational r, in a form in which equal numbers have equal terms.
//!
//! The square roots of different integers without square divisors are linearly independent over the rationals, and π is transcendental over them,
//! so comparing terms decides equality.

use super::rational::Rational;
use num_integer::gcd;
use std::collections::BTreeMap;
use std::f64::consts::PI;

/// The most terms of a sum.
const MAX_TERMS: usize = 16;

/// The largest exponent of π, and of a sum of several terms.
const MAX_POWER: i64 = 32;

/// The factor √n π^k of a term.
type Factor = (u64, i64);

/// The sum. Operations return `None` where the result is no such sum or too large.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Number(BTreeMap<Factor, Rational>);

impl Number {
    pub(crate) fn rational(value: Rational) -> Number {
        Number::term((1, 0), value)
    }

    pub(crate) fn pi() -> Number {
        Number::term((1, 1), Rational::integer(1))
    }

    fn term(factor: Factor, value: Rational) -> Number {
        Number(if value.is_zero() { BTreeMap::new() } else { BTreeMap::from([(factor, value)]) })
    }

    /// The number of terms.
    pub(crate) fn terms(&self) -> usize {
        self.0.len()
    }

    /// The value, if it is rational.
    pub(crate) fn to_rational(&self) -> Option<Rational> {
        match self.0.first_key_value() {
            None => Some(Rational::integer(0)),
            Some((&(1, 0), value)) if self.0.len() == 1 => Some(value.clone()),
            Some(_) => None,
        }
    }

    pub(crate) fn plus(&self, other: &Number) -> Option<Number> {
        let mut sum = self.clone();
        for (&factor, value) in &other.0 {
            sum.add(factor, value.clone())?;
        }
        Some(sum)
    }

    fn add(&mut self, factor: Factor, value: Rational) -> Option<()> {
        let sum = match self.0.remove(&factor) {
            Some(own) => own.plus(&value)?,
            None => value,
        };
        if !sum.is_zero() {
            self.0.insert(factor, sum);
        }
        (self.0.len() <= MAX_TERMS).then_some(())
    }

    pub(crate) fn negative(&self) -> Number {
        Number(self.0.iter().map(|(&factor, value)| (factor, value.negative())).collect())
    }

    pub(crate) fn times(&self, other: &Number) -> Option<Number> {
        let mut product = Number(BTreeMap::new());
        for (&(n, k), left) in &self.0 {
            for (&(m, l), right) in &other.0 {
                // √n √m = d √(n/d) √(m/d) with the greatest common divisor d; no square divides (n/d)(m/d).
                let common = gcd(n, m);
                let inside = (n / common).checked_mul(m / common)?;
                let value = left.times(right)?.times(&Rational::integer(i64::try_from(common).ok()?))?;
                let power = Some(k + l).filter(|power| power.abs() <= MAX_POWER)?;
                product.add((inside, power), value)?;
            }
        }
        Some(product)
    }

    /// `1 / self`, for sums of one or two terms: 1 / (a + b) = (a - b) / (a² - b²), if that has one term.
    pub(crate) fn inverse(&self) -> Option<Number> {
        let mut terms = self.0.iter();
        match (terms.next(), terms.next(), terms.next()) {
            (Some((&(n, k), value)), None, None) => {
                // 1 / (r √n π^k) = √n / (r n π^k)
                let inside = Rational::integer(i64::try_from(n).ok()?);
                Some(Number::term((n, -k), value.times(&inside)?.inverse()?))
            }
            (Some((&a, left)), Some((&b, right)), None) => {
                let conjugate = Number(BTreeMap::from([(a, left.clone()), (b, right.negative())]));
                let square = self.times(&conjugate)?;
                if square.0.len() > 1 { None } else { conjugate.times(&square.inverse()?) }
            }
            _ => None,
        }
    }

    pub(crate) fn power(&self, exponent: &Rational) -> Option<Number> {
        if let Some(power) = exponent.to_i64() {
            return self.integer_power(power);
        }
        let (numerator, degree) = exponent.parts()?;
        let power = self.to_rational()?.power(numerator)?;
        Number::rational(power).root(u32::try_from(degree).ok()?).filter(|_| !self.is_negative_rational())
    }

    fn integer_power(&self, exponent: i64) -> Option<Number> {
        if let Some(value) = self.to_rational() {
            return Some(Number::rational(value.power(exponent)?));
        }
        if exponent.abs() > MAX_POWER {
            return None;
        }
        let base = if exponent < 0 { self.inverse()? } else { self.clone() };
        let one = Number::rational(Rational::integer(1));
        (0..exponent.abs()).try_fold(one, |power, _| power.times(&base))
    }

    fn is_negative_rational(&self) -> bool {
        self.to_rational().is_some_and(|value| value.is_negative())
    }

    /// The root of a rational number: any square root of numbers that are not negative, and exact roots. Odd roots of negative numbers are negative.
    pub(crate) fn root(&self, degree: u32) -> Option<Number> {
        let value = self.to_rational()?;
        if value.is_negative() && degree % 2 == 1 {
            return Some(Number::rational(value.negative()).root(degree)?.negative());
        }
        if degree != 2 {
            return value.root(degree).map(Number::rational);
        }
        let (outside, inside) = value.square_part()?;
        Some(Number::term((inside, 0), outside))
    }

    pub(crate) fn to_f64(&self) -> f64 {
        self.0.iter().map(|(&(n, k), value)| value.to_f64() * (n as f64).sqrt() * PI.powi(k as i32)).sum()
    }
}
