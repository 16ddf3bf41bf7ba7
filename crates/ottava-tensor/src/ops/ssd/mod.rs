//! The state space duality (SSD) of Mamba-2: a recurrence over tokens whose state is a matrix for each head. Dao and Gu 2024, arXiv:2405.21060.
//!
//! The CPU reference is the recurrence itself, so the bits of a row depend neither on chunks nor on other segments, and decoding gives the bits of
//! training. A kernel may divide a segment into chunks that begin at the start of the segment.

mod cpu;
pub(super) mod cuda;
pub(super) mod ssd_chunks;
#[cfg(test)]
mod tests;

use super::dispatch::dispatch;
use super::{BoundaryStates, SegmentStates, Segments, expect_compute, expect_gradient, real_type};
use crate::{Error, Result, Tensor};

/// The heads of a state space. Head `h` uses `B` and `C` of group `h / (heads / groups)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SsdSpec {
    /// The number `H` of heads, a multiple of `G`.
    pub heads: usize,
    /// The number `G` of groups of heads. The heads of a group share `B` and `C`.
    pub groups: usize,
    /// The size `P` of a head.
    pub head_dim: usize,
    /// The number `N` of state elements for each element of a head.
    pub state_dim: usize,
    /// The smallest and the largest time step. Time steps outside are replaced by the limit.
    pub dt_limits: [f64; 2],
}

impl SsdSpec {
    /// Returns the number of elements of a token's inputs `x`, and of its output.
    pub const fn width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Returns the number of elements of a token's `B`, and of its `C`.
    pub const fn group_width(&self) -> usize {
        self.groups * self.state_dim
    }

    /// Returns the number of elements of a token's `x`, `B` and `C`.
    pub const fn xbc_width(&self) -> usize {
        self.width() + 2 * self.group_width()
    }

    /// Returns the number of heads of a group.
    pub const fn group(&self) -> usize {
        self.heads / self.groups
    }

    /// Returns the shape of the state of a sequence.
    pub const fn state_shape(&self) -> [usize; 3] {
        [self.heads, self.head_dim, self.state_dim]
    }
}

/// The projections and parameters that [`ssd`] reads.
#[derive(Clone, Copy, Debug)]
pub struct SsdInput<'a> {
    /// All `x`, all `B` and all `C` of a token, `[T, H·P + 2·G·N]`.
    pub xbc: &'a Tensor,
    /// The projection for the time steps, `[T, H]` in the type of `xbc`.
    pub dt: &'a Tensor,
    /// The logarithm of each head's rate of decay, `[H]` in F32 (F64 for F64).
    pub a_log: &'a Tensor,
    /// The bias that is added to `dt`, `[H]` in F32 (F64 for F64).
    pub dt_bias: &'a Tensor,
    /// The factor of `x` in the output, `[H]` in F32 (F64 for F64).
    pub d: &'a Tensor,
}

/// The gradients by the projections and states of [`ssd`].
pub struct SsdGradient {
    /// The gradient by `xbc`, in the type of `xbc`.
    pub xbc: Tensor,
    /// The gradient by `dt`, in the type of `dt`.
    pub dt: Tensor,
    /// The gradient by [`BoundaryStates::before`], if it was given.
    pub before: Option<Tensor>,
}

/// The gradients of the parameters, to which [`ssd_backward`] adds: `[H]` each in F32 (F64 for F64).
pub struct SsdParameterGradients<'a> {
    /// By `a_log`.
    pub a_log: &'a mut Tensor,
    /// By `dt_bias`.
    pub dt_bias: &'a mut Tensor,
    /// By `d`.
    pub d: &'a mut Tensor,
}

fn check(what: &str, input: &SsdInput, spec: &SsdSpec, segments: &Segments) -> Result<usize> {
    let SsdInput { xbc, dt, a_log, dt_bias, d } = *input;
    let [tokens, _] = xbc.dims(&format!("{what}: xbc"))?;
    expect_compute(&format!("{what}: xbc"), xbc)?;
    let SsdSpec { heads, groups, head_dim, state_dim, dt_limits: [least, most] } = *spec;
    let has_sizes = [heads, groups, head_dim, state_dim].iter().all(|&size| size > 0);
    // A comparison with NaN is false.
    let has_limits = 0.0 <= least && least <= most;
    if !has_sizes || !heads.is_multiple_of(groups) || !has_limits {
        return Err(Error::Value(format!(
            "{what}: {spec:?}; sizes are above 0, the heads are a multiple of the groups, and the limits of time steps ascend from 0"
        )));
    }
    xbc.expect(&format!("{what}: xbc"), &[tokens, spec.xbc_width()])?;
    dt.expect(&format!("{what}: dt"), &[tokens, heads])?;
    dt.expect_dtype(&format!("{what}: dt"), &[xbc.dtype()])?;
    for (of, vector) in [("a_log", a_log), ("dt_bias", dt_bias), ("d", d)] {
        let what = &format!("{what}: {of}");
        vector.expect(what, &[heads])?;
        vector.expect_dtype(what, &[real_type(xbc.dtype())])?;
    }
    [dt, a_log, dt_bias, d].into_iter().try_for_each(|tensor| tensor.expect_device(what, xbc.device()))?;
    segments.check(what, xbc, tokens)?;
    Ok(tokens)
}

/// Returns the output `y` `[T, H·P]` of the recurrence, in the type of `xbc`.
///
/// For each head, with the state `S` `[P, N]`, the token's `x` `[P]` and `dt`, and `B` and `C` `[N]` of the head's group:
///
/// `Δ = min(max(softplus(dt + dt_bias), least), most)`; `S ← exp(−Δ · exp(a_log)) · S + (Δ · x) · Bᵀ`; `y = S · C + d · x`.
///
/// The state before a segment is zero, or the state of the segment's sequence in `states`, `[slots, H, P, N]` in F32 (F64 for F64), which is replaced
/// by the state after the segment. Rows of padding are zero. On the CPU, sums over `N` are added in the order of the elements, in the type of the states, each
/// product rounded before it is added; `y` is rounded once. So a row has the same bits in every division of its sequence into segments with states,
/// and beside any other segments. A GPU adds in another order, and chunks on tensor cores round states and other operands of products to the type of
/// `xbc`.
///
/// Errors with [`Error::Shape`] or [`Error::Value`] if parameters, segments and states do not fit `xbc`.
pub fn ssd(input: SsdInput, spec: &SsdSpec, segments: Segments, states: Option<SegmentStates>) -> Result<Tensor> {
    let (tokens, xbc) = (check("ssd", &input, spec, &segments)?, input.xbc);
    if let Some(states) = &states {
        states.check("ssd", &segments, &spec.state_shape(), real_type(xbc.dtype()))?;
        states.values.expect_device("ssd: states", xbc.device())?;
    }
    let mut y = Tensor::empty(xbc.device(), &[tokens, spec.width()], xbc.dtype())?;
    dispatch! { xbc.device(),
        scratch => cpu::scratch(&y, spec, &segments, states.is_some()),
        cpu => cpu::ssd(input, spec, segments, states, &mut y)?,
        gpu => cuda::ssd(gpu, input, spec, segments, states, &mut y)?,
    }
    Ok(y)
}

/// Returns the gradients of [`ssd`] from the gradient `dy` `[T, H·P]` and the same inputs. Adds to the gradients of the parameters. Nothing else is
/// saved by forward: states and time steps are recomputed. Rows of padding have no gradient.
///
/// With the gradient `dS` by the state after a token and `X = Δ · x`: `dX = dS · B`; `dx = Δ · dX + d · dy`; `dB = dSᵀ · X` and `dC = Sᵀ · dy`, summed over
/// the heads of a group in their order and rounded once; `q`, the gradient by the logarithm of the decay, is the decay times the sum of the products of
/// `dS` and the state before the token; `dΔ = −exp(a_log) · q + Σ dX · x`. The gradient by `dt` is `dΔ · sigmoid(dt + dt_bias)` within the limits, and 0
/// for a time step that a limit replaced. The parameters gain `ddt_bias += Σ_t ddt`, `da_log += Σ_t −Δ · exp(a_log) · q` and `dd += Σ_t Σ dy · x`, in
/// partial sums of 64 rows that are added in order. Has the errors of [`ssd`].
pub fn ssd_backward(
    dy: &Tensor,
    input: SsdInput,
    spec: &SsdSpec,
    segments: Segments,
    states: BoundaryStates,
    parameters: SsdParameterGradients,
) -> Result<SsdGradient> {
    let (what, xbc) = ("ssd_backward", input.xbc);
    let tokens = check(what, &input, spec, &segments)?;
    dy.expect("ssd_backward: dy", &[tokens, spec.width()])?;
    dy.expect_dtype("ssd_backward: dy", &[xbc.dtype()])?;
    dy.expect_device("ssd_backward: dy", xbc.device())?;
    states.check(what, xbc, &segments, &spec.state_shape())?;
    for gradient in [&*parameters.a_log, &*parameters.dt_bias, &*parameters.d] {
        gradient.expect("ssd_backward: gradients of parameters", &[spec.heads])?;
        expect_gradient("ssd_backward: gradients of parameters", gradient, xbc)?;
    }
    let before = states.before.map(Tensor::empty_like).transpose()?;
    let mut gradient = SsdGradient { xbc: xbc.empty_like()?, dt: input.dt.empty_like()?, before };
    dispatch! { xbc.device(),
        scratch => cpu::scratch_of_backward(xbc, spec, &segments),
        cpu => cpu::ssd_backward(dy, input, spec, segments, states, &mut gradient, parameters)?,
        gpu => cuda::ssd_backward(gpu, dy, input, spec, segments, states, (&mut gradient, parameters))?,
    }
    Ok(gradient)
}
