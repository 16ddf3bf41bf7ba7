//! The recurrence of one head.

use crate::element::{Float, Real};
use crate::ops::delta_gates::cpu::softplus;
use crate::ops::ssd::SsdSpec;
use crate::ops::swiglu::cpu::sigmoid;

/// The inputs of one token and head.
pub(super) struct Token<'a, S: Float> {
    pub x: &'a [S],
    pub b: &'a [S],
    pub c: &'a [S],
    /// The negative rate of decay.
    pub a: S::Real,
    pub d: S::Real,
    /// The time step.
    pub dt: S::Real,
    /// The derivative of the time step by its projection.
    pub slope: S::Real,
    /// The factor of the state.
    pub decay: S::Real,
}

impl<'a, S: Float> Token<'a, S> {
    /// Creates the inputs from `x`, `B` and `C`, and the projection `raw` of the time step with its bias.
    pub fn new([x, b, c]: [&'a [S]; 3], raw: S::Real, a: S::Real, d: S::Real, limits: [f64; 2]) -> Token<'a, S> {
        let (step, [least, most]) = (softplus(raw), limits.map(S::Real::of));
        let (dt, slope) = match (step < least, step > most) {
            (true, _) => (least, S::Real::of(0.0)),
            (_, true) => (most, S::Real::of(0.0)),
            _ => (step, sigmoid(raw)),
        };
        Token { x, b, c, a, d, dt, slope, decay: (dt * a).exp() }
    }
}

/// The state of one head and segment.
pub(super) struct Head<R> {
    /// `[P, N]`.
    pub state: Vec<R>,
    /// The output of the last token, `[P]`.
    y: Vec<R>,
}

impl<R: Real> Head<R> {
    /// Creates the head with the state `before` its segment, or zero.
    pub fn new(spec: &SsdSpec, before: Option<&[R]>) -> Head<R> {
        let zeros = |len| vec![R::of(0.0); len];
        let state = before.map_or_else(|| zeros(spec.head_dim * spec.state_dim), <[R]>::to_vec);
        Head { state, y: zeros(spec.head_dim) }
    }

    /// Runs a token, and returns its output.
    pub fn step<S: Float<Real = R>>(&mut self, token: &Token<S>) -> &[R] {
        let Token { x, b, c, d, dt, decay, .. } = token;
        let rows = self.state.chunks_exact_mut(b.len());
        for (row, (y, x)) in rows.zip(self.y.iter_mut().zip(*x)) {
            let (mut sum, input) = (R::of(0.0), *dt * x.load());
            for (s, (b, c)) in row.iter_mut().zip(b.iter().zip(*c)) {
                *s = *s * *decay + input * b.load();
                sum += *s * c.load();
            }
            *y = sum + *d * x.load();
        }
        &self.y
    }

    pub fn into_state(self) -> Vec<R> {
        self.state
    }
}
