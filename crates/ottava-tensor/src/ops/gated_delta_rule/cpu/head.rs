//! The recurrence of one value head.

use crate::element::{Float, Real};
use crate::ops::gated_delta_rule::{DeltaSpec, EPS};

/// A query or key of length 1, times a factor.
pub(super) struct Unit<R> {
    /// The elements.
    pub values: Vec<R>,
    /// The reciprocal length of the projected query or key.
    rstd: R,
    /// The factor.
    factor: R,
}

impl<R: Real> Unit<R> {
    fn new<S: Float<Real = R>>(x: &[S], factor: R) -> Unit<R> {
        let squares = x.iter().map(|x| x.load() * x.load()).sum::<R>();
        let rstd = R::of(1.0) / (squares + R::of(EPS)).sqrt();
        Unit { values: x.iter().map(|x| x.load() * rstd * factor).collect(), rstd, factor }
    }

    /// Returns the gradient by the projected query or key, from the gradient `d` by the values.
    pub fn backward(&self, d: &[R]) -> impl Iterator<Item = R> {
        let dot = self.values.iter().zip(d).map(|(y, d)| *y * *d).sum::<R>();
        // With y = x · rstd · factor: dx = rstd · (factor · d − x · rstd · Σ (x · rstd) · factor · d).
        let of = move |(y, d): (&R, &R)| self.rstd * (self.factor * *d - *y / self.factor * dot);
        self.values.iter().zip(d).map(of)
    }
}

/// The inputs of one token and value head.
pub(super) struct Token<'a, S: Float> {
    pub q: Unit<S::Real>,
    pub k: Unit<S::Real>,
    pub v: &'a [S],
    pub decay: S::Real,
    pub beta: S::Real,
}

impl<'a, S: Float> Token<'a, S> {
    pub fn new(q: &[S], k: &[S], v: &'a [S], decay: S::Real, beta: S::Real) -> Token<'a, S> {
        let scale = S::Real::of(1.0) / S::Real::of(q.len() as f64).sqrt();
        Token { q: Unit::new(q, scale), k: Unit::new(k, S::Real::of(1.0)), v, decay, beta }
    }
}

/// The state of one value head and segment.
pub(super) struct Head<R> {
    /// `[D_k, D_v]`.
    pub state: Vec<R>,
    /// The difference of the last token, `[D_v]`.
    d: Vec<R>,
    /// The output of the last token, `[D_v]`.
    o: Vec<R>,
}

impl<R: Real> Head<R> {
    /// Creates the head with the state `before` its segment, or zero.
    pub fn new(spec: &DeltaSpec, before: Option<&[R]>) -> Head<R> {
        let zeros = |len| vec![R::of(0.0); len];
        let state = before.map_or_else(|| zeros(spec.key_dim * spec.value_dim), <[R]>::to_vec);
        Head { state, d: zeros(spec.value_dim), o: zeros(spec.value_dim) }
    }

    /// Runs a token, and returns its output.
    pub fn step<S: Float<Real = R>>(&mut self, token: &Token<S>) -> &[R] {
        let Head { state, d, o } = self;
        let Token { q, k, v, decay, beta } = token;
        state.iter_mut().for_each(|s| *s = *s * *decay);
        project(state, &k.values, d);
        d.iter_mut().zip(*v).for_each(|(d, v)| *d = *beta * (v.load() - *d));
        for (row, k) in state.chunks_exact_mut(d.len()).zip(&k.values) {
            row.iter_mut().zip(&*d).for_each(|(s, d)| *s += *k * *d);
        }
        project(state, &q.values, o);
        o
    }

    pub fn into_state(self) -> Vec<R> {
        self.state
    }
}

/// Computes `y = Sᵀx` for a matrix `S` with a row for each element of `x`, in the order of the rows.
pub(super) fn project<R: Real>(s: &[R], x: &[R], y: &mut [R]) {
    y.fill(R::of(0.0));
    for (row, x) in s.chunks_exact(y.len()).zip(x) {
        y.iter_mut().zip(row).for_each(|(y, s)| *y += *s * *x);
    }
}
