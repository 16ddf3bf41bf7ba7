//! The gated delta rule: a recurrence over tokens whose state is a matrix for each value head. Yang et al. 2024, arXiv:2412.06464.
//!
//! The CPU reference is the recurrence itself, so the bits of a row depend neither on chunks nor on other segments, and decoding gives the bits of
//! training. A kernel may divide a segment into chunks that begin at the start of the segment.

pub(super) mod chunk_table;
mod cpu;
pub(super) mod cuda;
pub(super) mod delta_chunks;
#[cfg(test)]
mod tests;

use super::delta_gates::DeltaGates;
use super::dispatch::dispatch;
use super::{BoundaryStates, SegmentStates, Segments, expect_compute, real_type};
use crate::{Error, Result, Tensor};

/// The constant that is added to the sum of squares of a query or key before the square root.
const EPS: f64 = 1e-6;

/// The heads of the gated delta rule. Value head `j` uses key head `j / (value_heads / key_heads)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaSpec {
    /// The number `H_k` of query heads and of key heads.
    pub key_heads: usize,
    /// The number `H` of value heads, a multiple of `H_k`.
    pub value_heads: usize,
    /// The size `D_k` of a query or key.
    pub key_dim: usize,
    /// The size `D_v` of a value.
    pub value_dim: usize,
}

impl DeltaSpec {
    /// Returns the number of elements of a token's queries, and of its keys.
    pub const fn key_width(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Returns the number of elements of a token's values, and of its output.
    pub const fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Returns the number of elements of a token's queries, keys and values.
    pub const fn qkv_width(&self) -> usize {
        2 * self.key_width() + self.value_width()
    }

    /// Returns the number of value heads that share a key head.
    pub const fn group(&self) -> usize {
        self.value_heads / self.key_heads
    }

    /// Returns the shape of the state of a sequence.
    pub const fn state_shape(&self) -> [usize; 3] {
        [self.value_heads, self.key_dim, self.value_dim]
    }

    /// Returns the number of elements of the state of a sequence.
    pub const fn state_len(&self) -> usize {
        self.value_heads * self.key_dim * self.value_dim
    }
}

/// The gradients by the inputs of [`gated_delta_rule`].
pub struct DeltaGradient {
    /// The gradient by `qkv`, in the type of `qkv`.
    pub qkv: Tensor,
    /// The gradients by the gates.
    pub gates: DeltaGates,
    /// The gradient by [`BoundaryStates::before`], if it was given.
    pub before: Option<Tensor>,
}

fn check(what: &str, qkv: &Tensor, gates: &DeltaGates, spec: &DeltaSpec, segments: &Segments) -> Result<usize> {
    let [tokens, _] = qkv.dims(&format!("{what}: qkv"))?;
    expect_compute(&format!("{what}: qkv"), qkv)?;
    let DeltaSpec { key_heads, value_heads, key_dim, value_dim } = *spec;
    let has_sizes = [key_heads, value_heads, key_dim, value_dim].iter().all(|&size| size > 0);
    if !has_sizes || !value_heads.is_multiple_of(key_heads) {
        return Err(Error::Value(format!(
            "{what}: {spec:?}; sizes are above 0, and the value heads are a multiple of the key heads"
        )));
    }
    qkv.expect(&format!("{what}: qkv"), &[tokens, spec.qkv_width()])?;
    for (of, gate) in [("g", &gates.g), ("beta", &gates.beta)] {
        let what = &format!("{what}: {of}");
        gate.expect(what, &[tokens, value_heads])?;
        gate.expect_dtype(what, &[real_type(qkv.dtype())])?;
        gate.expect_device(what, qkv.device())?;
    }
    segments.check(what, qkv, tokens)?;
    Ok(tokens)
}

/// Returns the output `o` `[T, H·D_v]` of the gated delta rule, in the type of `qkv`.
///
/// A row of `qkv` `[T, 2·H_k·D_k + H·D_v]` has all queries, all keys and all values. Queries and keys are normalised here: `q = u · r / √D_k` with
/// `r = 1 / sqrt(Σ u² + 1e-6)`, and `k` likewise without `√D_k`. For each value head, with the state `S` `[D_k, D_v]` and the gates of the token:
///
/// `S ← exp(g) · S`; `d = beta · (v − Sᵀk)`; `S ← S + k · dᵀ`; `o = Sᵀq`.
///
/// The state before a segment is zero, or the state of the segment's sequence in `states`, `[slots, H, D_k, D_v]` in F32 (F64 for F64), which is
/// replaced by the state after the segment. Rows of padding are zero. On the CPU, sums over `D_k` are added in the order of the elements, in the type of the
/// states, each product rounded before it is added; `o` is rounded once. So a row has the same bits in every division of its sequence into segments
/// with states, and beside any other segments. A GPU adds in another order, and chunks on tensor cores round states and other operands of products to
/// the type of `qkv`.
///
/// Errors with [`Error::Shape`] or [`Error::Value`] if gates, segments and states do not fit `qkv`.
pub fn gated_delta_rule(
    qkv: &Tensor,
    gates: &DeltaGates,
    spec: &DeltaSpec,
    segments: Segments,
    states: Option<SegmentStates>,
) -> Result<Tensor> {
    let tokens = check("gated_delta_rule", qkv, gates, spec, &segments)?;
    if let Some(states) = &states {
        states.check("gated_delta_rule", &segments, &spec.state_shape(), real_type(qkv.dtype()))?;
        states.values.expect_device("gated_delta_rule: states", qkv.device())?;
    }
    let mut o = Tensor::empty(qkv.device(), &[tokens, spec.value_width()], qkv.dtype())?;
    dispatch! { qkv.device(),
        scratch => cpu::scratch(&o, spec, &segments, states.is_some()),
        cpu => cpu::gated_delta_rule(qkv, gates, spec, segments, states, &mut o)?,
        gpu => cuda::gated_delta_rule(gpu, qkv, gates, spec, segments, states, &mut o)?,
    }
    Ok(o)
}

/// Returns the gradients of [`gated_delta_rule`] from the gradient `d_o` `[T, H·D_v]` and the same inputs. Nothing else is saved by forward: states,
/// norms and differences are recomputed. Rows of padding have no gradient.
///
/// The gradients by queries and keys are sums over the value heads of a key head, in their order, and are rounded once. Has the errors of
/// [`gated_delta_rule`].
pub fn gated_delta_rule_backward(
    d_o: &Tensor,
    qkv: &Tensor,
    gates: &DeltaGates,
    spec: &DeltaSpec,
    segments: Segments,
    states: BoundaryStates,
) -> Result<DeltaGradient> {
    let what = "gated_delta_rule_backward";
    let tokens = check(what, qkv, gates, spec, &segments)?;
    d_o.expect("gated_delta_rule_backward: d_o", &[tokens, spec.value_width()])?;
    d_o.expect_dtype("gated_delta_rule_backward: d_o", &[qkv.dtype()])?;
    d_o.expect_device("gated_delta_rule_backward: d_o", qkv.device())?;
    states.check(what, qkv, &segments, &spec.state_shape())?;
    let of_gates = DeltaGates { g: gates.g.empty_like()?, beta: gates.beta.empty_like()? };
    let before = states.before.map(Tensor::empty_like).transpose()?;
    let mut gradient = DeltaGradient { qkv: qkv.empty_like()?, gates: of_gates, before };
    dispatch! { qkv.device(),
        scratch => cpu::scratch_of_backward(qkv, spec, &segments),
        cpu => cpu::gated_delta_rule_backward(d_o, [qkv, &gates.g, &gates.beta], spec, segments, states, &mut gradient)?,
        gpu => cuda::gated_delta_rule_backward(gpu, d_o, [qkv, &gates.g, &gates.beta], spec, segments, states, &mut gradient)?,
    }
    Ok(gradient)
}
