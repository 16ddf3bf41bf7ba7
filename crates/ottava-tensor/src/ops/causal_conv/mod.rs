//! Causal convolution of each channel over neighbouring tokens, with SiLU, as before the recurrences of Mamba (Gu and Dao 2023, arXiv:2312.00752) and
//! of the gated delta rule.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::dispatch::dispatch;
use super::{SegmentStates, Segments, expect_compute, expect_gradient};
use crate::{Error, Result, Tensor};

/// The maximum number of taps.
pub const MAX_TAPS: usize = 4;

/// The parameters of a convolution of `C` channels with `K` taps.
#[derive(Clone, Copy, Debug)]
pub struct ConvWeights<'a> {
    /// The factors `[C, 1, K]`. The last factor multiplies the token itself.
    pub weight: &'a Tensor,
    /// The bias `[C]`, if the convolution has one.
    pub bias: Option<&'a Tensor>,
}

impl ConvWeights<'_> {
    /// Checks the parameters for rows `x` `[T, C]`, and returns `[T, C, K]`.
    fn check(&self, what: &str, x: &Tensor, segments: &Segments) -> Result<[usize; 3]> {
        let [tokens, channels] = x.dims(&format!("{what}: x"))?;
        expect_compute(&format!("{what}: x"), x)?;
        let [_, _, taps] = self.weight.dims(&format!("{what}: weight"))?;
        if taps == 0 || taps > MAX_TAPS {
            return Err(Error::Value(format!("{what}: {taps} taps; 1 to {MAX_TAPS} are implemented")));
        }
        self.weight.expect(&format!("{what}: weight"), &[channels, 1, taps])?;
        if let Some(bias) = self.bias {
            bias.expect(&format!("{what}: bias"), &[channels])?;
        }
        for tensor in [Some(self.weight), self.bias].into_iter().flatten() {
            tensor.expect_dtype(&format!("{what}: parameters"), &[x.dtype()])?;
            tensor.expect_device(&format!("{what}: parameters"), x.device())?;
        }
        segments.check(what, x, tokens)?;
        Ok([tokens, channels, taps])
    }
}

/// Returns `y[t, c] = silu(p[t, c])` with `p[t, c] = bias[c] + Σ_i weight[c, 0, i] · x[t − (K − 1) + i, c]`, `[T, C]` in the type of `x`.
///
/// The inputs before a segment are zero, or the last `K − 1` inputs of the segment's sequence in `states`, `[slots, K − 1, C]` in the type of `x`,
/// oldest first. Each state is replaced by the last `K − 1` inputs up to the end of the segment. Rows of padding are zero.
///
/// The sum begins with the bias, or zero, and adds the taps in the order of `i`, in F32 (F64 for F64), each product rounded before it is added. The
/// result is rounded once. So a row has the same bits in every division of its sequence into segments with states, and beside any other segments.
///
/// Errors with [`Error::Shape`] or [`Error::Value`] if parameters, segments and states do not fit `x`.
pub fn causal_conv(
    x: &Tensor,
    weights: ConvWeights,
    segments: Segments,
    states: Option<SegmentStates>,
) -> Result<Tensor> {
    let [_, channels, taps] = weights.check("causal_conv", x, &segments)?;
    if let Some(states) = &states {
        states.check("causal_conv", &segments, &[taps - 1, channels], x.dtype())?;
        states.values.expect_device("causal_conv: states", x.device())?;
    }
    let mut y = x.empty_like()?;
    dispatch! { x.device(),
        cpu => cpu::causal_conv(x, weights, segments, states, &mut y)?,
        gpu => cuda::causal_conv(gpu, x, weights, segments, states, &mut y)?,
    }
    Ok(y)
}

/// Returns the gradient by `x` of [`causal_conv`] without states, from the gradient `dy` `[T, C]` and the same `x`. Adds to the gradients of the
/// parameters: `dweight` `[C, 1, K]` and `dbias` `[C]`, F32 (F64 for F64).
///
/// With `dp = dy · silu′(p)`: `dx[s, c] = Σ_i weight[c, 0, i] · dp[s + (K − 1) − i, c]` in the segment of `s`, in the order of `i`;
/// `dweight[c, 0, i] += Σ_t dp[t, c] · x[t − (K − 1) + i, c]`; `dbias[c] += Σ_t dp[t, c]`. The sums over tokens add partial sums in order, on the CPU
/// of 64 rows of the matrix. `p` is recomputed. Has the errors of [`causal_conv`], and errors if only one of bias and `dbias` is given.
pub fn causal_conv_backward(
    dy: &Tensor,
    x: &Tensor,
    weights: ConvWeights,
    segments: Segments,
    dweight: &mut Tensor,
    dbias: Option<&mut Tensor>,
) -> Result<Tensor> {
    let [tokens, channels, taps] = weights.check("causal_conv_backward", x, &segments)?;
    dy.expect("causal_conv_backward: dy", &[tokens, channels])?;
    dy.expect_dtype("causal_conv_backward: dy", &[x.dtype()])?;
    dy.expect_device("causal_conv_backward: dy", x.device())?;
    dweight.expect("causal_conv_backward: dweight", &[channels, 1, taps])?;
    expect_gradient("causal_conv_backward: dweight", dweight, x)?;
    if let Some(dbias) = &dbias {
        dbias.expect("causal_conv_backward: dbias", &[channels])?;
        expect_gradient("causal_conv_backward: dbias", dbias, x)?;
    }
    if dbias.is_some() != weights.bias.is_some() {
        return Err(Error::Value("causal_conv_backward: a bias and its gradient are given together".into()));
    }
    let mut dx = x.empty_like()?;
    dispatch! { x.device(),
        scratch => cpu::scratch_of_backward(x, taps),
        cpu => cpu::causal_conv_backward(dy, x, weights, segments, &mut dx, dweight, dbias)?,
        gpu => cuda::causal_conv_backward(gpu, [dy, x], weights, segments, &mut dx, dweight, dbias)?,
    }
    Ok(dx)
}
