//! Exact fractions up to a size.

use num_bigint::{BigInt, Sign};
use num_integer::Integer;
use num_traits::{One, Signed, ToPrimitive, Zero};

/// The most bits of numerator and denominator, about 600 decimal digits.
const MAX_BITS: u64 = 2048;

/// A fraction in lowest terms. Operations return `None` where the result has more than [`MAX_BITS`] bits or does not exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rational {
    numerator: BigInt,
    /// Positive.
    denominator: BigInt,
}

impl Rational {
    pub(crate) fn new(numerator: BigInt, denominator: BigInt) -> Option<Rational> {
        if denominator.is_zero() {
            return None;
        }
        let mut common = numerator.gcd(&denominator);
        if denominator.sign() == Sign::Minus {
            common = -common;
        }
        let (numerator, denominator) = (numerator / &common, denominator / &common);
        (numerator.bits().max(denominator.bits()) <= MAX_BITS).then_some(Rational { numerator, denominator })
    }

    pub(crate) fn integer(value: i64) -> Rational {
        Rational { numerator: value.into(), denominator: BigInt::one() }
    }

    /// The number `whole.fraction` times ten to the power of `exponent`; `whole` and `fraction` are digits, and may be empty.
    pub(crate) fn decimal(whole: &str, fraction: &str, exponent: i32) -> Option<Rational> {
        // A digit has more than three bits.
        let most_digits = (MAX_BITS / 3) as usize;
        if whole.len() > most_digits || fraction.len() > most_digits {
            return None;
        }
        let digits = BigInt::parse_bytes(format!("0{whole}{fraction}").as_bytes(), 10)?;
        let power = exponent.checked_sub(fraction.len() as i32)?;
        Rational::new(digits, BigInt::one())?.times(&Rational::integer(10).power(i64::from(power))?)
    }

    pub(crate) fn is_zero(&self) -> bool {
        self.numerator.is_zero()
    }

    pub(crate) fn is_negative(&self) -> bool {
        self.numerator.is_negative()
    }

    /// The integer, if the denominator is 1 and the value fits.
    pub(crate) fn to_i64(&self) -> Option<i64> {
        if self.denominator.is_one() { self.numerator.to_i64() } else { None }
    }

    /// Numerator and denominator, if both fit.
    pub(crate) fn parts(&self) -> Option<(i64, i64)> {
        Some((self.numerator.to_i64()?, self.denominator.to_i64()?))
    }

    pub(crate) fn plus(&self, other: &Rational) -> Option<Rational> {
        let numerator = &self.numerator * &other.denominator + &other.numerator * &self.denominator;
        Rational::new(numerator, &self.denominator * &other.denominator)
    }

    pub(crate) fn negative(&self) -> Rational {
        Rational { numerator: -&self.numerator, denominator: self.denominator.clone() }
    }

    pub(crate) fn times(&self, other: &Rational) -> Option<Rational> {
        Rational::new(&self.numerator * &other.numerator, &self.denominator * &other.denominator)
    }

    pub(crate) fn inverse(&self) -> Option<Rational> {
        Rational::new(self.denominator.clone(), self.numerator.clone())
    }

    /// The power, without computing one that is too large. 0 to the power of 0 does not exist.
    pub(crate) fn power(&self, exponent: i64) -> Option<Rational> {
        let base = if exponent < 0 { self.inverse()? } else { self.clone() };
        let times = exponent.unsigned_abs();
        if times == 0 && base.is_zero() {
            return None;
        }
        // A base of b bits is at least 2^(b - 1).
        let least_bits = base.numerator.bits().max(base.denominator.bits()).saturating_sub(1).saturating_mul(times);
        if least_bits > MAX_BITS {
            return None;
        }
        // The bits bound the exponent, except for 0, 1 and -1.
        let small =
            if base.numerator.bits() <= 1 && base.denominator.is_one() { times.min(2 - times % 2) } else { times };
        let small = u32::try_from(small).ok()?;
        Rational::new(base.numerator.pow(small), base.denominator.pow(small))
    }

    /// The exact root of a number that is not negative.
    pub(crate) fn root(&self, degree: u32) -> Option<Rational> {
        if degree == 0 || self.is_negative() {
            return None;
        }
        let root =
            Rational { numerator: self.numerator.nth_root(degree), denominator: self.denominator.nth_root(degree) };
        (root.power(degree.into()).as_ref() == Some(self)).then_some(root)
    }

    /// `(r, n)` with `self = r² n`, for the square root `r √n`; n is a positive integer without square divisors. `None` for negative numbers,
    /// and where n would have to be found among numbers above 10^12.
    pub(crate) fn square_part(&self) -> Option<(Rational, u64)> {
        if let Some(root) = self.root(2) {
            return Some((root, 1));
        }
        let product = (&self.numerator * &self.denominator).to_u64().filter(|&product| product <= 1_000_000_000_000)?;
        let (outside, inside) = square_divisor(product);
        let root = Rational::new(outside.into(), self.denominator.clone())?;
        Some((root, inside))
    }

    pub(crate) fn to_f64(&self) -> f64 {
        // Neither part alone may fit an F64.
        let excess = self.numerator.bits().max(self.denominator.bits()).saturating_sub(1000);
        let small = |value: &BigInt| (value >> excess).to_f64().unwrap_or(f64::NAN);
        match (self.numerator.to_f64(), self.denominator.to_f64()) {
            (Some(n), Some(d)) if n.is_finite() && d.is_finite() => n / d,
            _ => small(&self.numerator) / small(&self.denominator),
        }
    }
}

/// `(d, n)` with `value = d² n` and no square divisor of n, in steps of the cube root of `value`.
fn square_divisor(mut value: u64) -> (u64, u64) {
    let (mut outside, mut inside, mut divisor) = (1, 1, 2);
    while divisor * divisor * divisor <= value {
        while value.is_multiple_of(divisor * divisor) {
            value /= divisor * divisor;
            outside *= divisor;
        }
        if value.is_multiple_of(divisor) {
            value /= divisor;
            inside *= divisor;
        }
        divisor += 1;
    }
    // Two prime factors are left at most: they are equal, or no square divides them.
    let root = value.isqrt();
    if root * root == value { (outside * root, inside) } else { (outside, inside * value) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn square_divisors_leave_no_square() {
        for value in 1..3000u64 {
            let (outside, inside) = square_divisor(value);
            assert_eq!(outside * outside * inside, value);
            assert!((2..60).all(|d| inside % (d * d) != 0), "{value}: {inside}");
        }
    }

    #[test]
    fn powers_and_roots_end_at_the_limit() {
        let two = Rational::integer(2);
        assert!(two.power(2047).is_some() && two.power(2048).is_none() && two.power(i64::MAX).is_none());
        assert_eq!(Rational::integer(-1).power(i64::MAX), Some(Rational::integer(-1)));
        assert_eq!(Rational::integer(-1).power(i64::MAX - 1), Some(Rational::integer(1)));
        assert_eq!(Rational::integer(0).power(i64::MAX), Some(Rational::integer(0)));
        assert_eq!((Rational::integer(0).power(0), Rational::integer(0).power(-1)), (None, None));
        assert_eq!(Rational::integer(27).root(3), Some(Rational::integer(3)));
        assert_eq!((Rational::integer(28).root(3), Rational::integer(-4).root(2)), (None, None));
        let huge = two.power(2000).unwrap();
        assert_eq!(huge.plus(&Rational::integer(1)).unwrap().times(&huge.inverse().unwrap()).unwrap().to_f64(), 1.0);
    }
}
