//! The gate of the output: a sigmoid of elements that are projected beside the queries.

use super::{Attention, HeadsSpec, gated};
use crate::layers::exchange::tokens_for_heads;
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_tensor::Tensor;
use ottava_tensor::ops::{ColumnRuns, GateFunction, move_columns, output_gate_backward};

/// The columns of a projection with gates and their places without gates.
struct Columns {
    /// The number of query heads.
    heads: usize,
    head_dim: usize,
    /// The number of columns of all keys and values.
    kv: usize,
}

impl Columns {
    fn of(HeadsSpec { heads, kv_heads, head_dim, .. }: HeadsSpec) -> Columns {
        Columns { heads, head_dim, kv: 2 * kv_heads * head_dim }
    }

    fn queries(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Returns the runs of queries in the projection, the runs of gates, and the runs of queries or gates alone.
    fn runs(&self) -> [ColumnRuns; 3] {
        let (dim, step) = (self.head_dim, 2 * self.head_dim);
        [ColumnRuns { first: 0, step }, ColumnRuns { first: dim, step }, ColumnRuns { first: 0, step: dim }]
    }

    /// Returns the keys and values in the projection, and without gates.
    fn keys_and_values(&self) -> [ColumnRuns; 2] {
        [2 * self.queries(), self.queries()].map(|first| ColumnRuns { first, step: 0 })
    }
}

impl Attention {
    /// Returns the output for this rank's tokens. See [`gated`].
    pub(super) fn gated_output(&self, o: &Tensor, gate: Option<&Tensor>, context: &Context) -> Result<Tensor> {
        gated(&self.name, &self.output_widths(), o, gate, context)
    }

    /// Returns the gradients by the output of attention for this rank's tokens, and by the gate, from the gradient `d` by the result of
    /// [`Attention::gated_output`].
    pub(super) fn gated_output_backward(
        &self,
        d: Tensor,
        o: &Tensor,
        gate: Option<Tensor>,
        context: &Context,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let Some(gate) = gate else { return Ok((d, None)) };
        let o = tokens_for_heads(&self.name, o.clone(), &self.output_widths(), context)?;
        let [d_o, dgate] = output_gate_backward(GateFunction::Sigmoid, &d, &o, &gate)?;
        Ok((d_o, Some(dgate)))
    }

    /// Takes the gate out of the projection, if the layer has a gate. Returns Q, K and V, and the gate.
    pub(super) fn take_gate(&self, projected: Tensor) -> Result<(Tensor, Option<Tensor>)> {
        if !self.heads.output_gate {
            return Ok((projected, None));
        }
        let of = Columns::of(self.heads);
        let empty = |width| Tensor::empty(projected.device(), &[projected.shape()[0], width], projected.dtype());
        let (mut qkv, mut gate) = (empty(of.queries() + of.kv)?, empty(of.queries())?);
        let ([queries, gates, alone], [from, to]) = (of.runs(), of.keys_and_values());
        move_columns(&projected, queries, &mut qkv, alone, of.heads, of.head_dim)?;
        move_columns(&projected, gates, &mut gate, alone, of.heads, of.head_dim)?;
        move_columns(&projected, from, &mut qkv, to, 1, of.kv)?;
        Ok((qkv, Some(gate)))
    }

    /// Returns the gradient by the projection, from the gradients by Q, K and V and by the gate.
    pub(super) fn put_gate(&self, dqkv: Tensor, dgate: Option<Tensor>) -> Result<Tensor> {
        let Some(dgate) = dgate else { return Ok(dqkv) };
        let of = Columns::of(self.heads);
        let width = 2 * of.queries() + of.kv;
        let mut projected = Tensor::empty(dqkv.device(), &[dqkv.shape()[0], width], dqkv.dtype())?;
        let ([queries, gates, alone], [to, from]) = (of.runs(), of.keys_and_values());
        move_columns(&dqkv, alone, &mut projected, queries, of.heads, of.head_dim)?;
        move_columns(&dgate, alone, &mut projected, gates, of.heads, of.head_dim)?;
        move_columns(&dqkv, from, &mut projected, to, 1, of.kv)?;
        Ok(projected)
    }
}
