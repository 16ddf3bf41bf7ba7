//! Mathematical answers: which texts are answers, and when two of them are equal.
//!
//! Equality is decided, never estimated: numbers are exact sums of terms `r √n π^k` (`number.rs`), and a text outside of the grammar (`parse.rs`) is
//! no answer. Texts of more than [`MAX_TEXT`] bytes, numbers of more than 2,048 bits and sums of more than 16 terms are no answers either, so that
//! hostile texts cost milliseconds. `docs/rewards.md` has the rules for users.

mod answer;
mod lex;
mod number;
mod parse;
mod rational;
#[cfg(test)]
mod tests;
mod units;

pub(crate) use answer::{Answer, Tolerance, equal_values};
pub(crate) use lex::tokens;
pub(crate) use parse::parse;
pub(crate) use rational::Rational;
pub(crate) use units::Units;

/// The most bytes of an answer.
pub(crate) const MAX_TEXT: usize = 1024;
