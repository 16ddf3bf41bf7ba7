//! Collectives of tensors.

use super::call::{Call, Op, Reduce};
use super::group::{Group, is_elsewhere};
use super::pending::{Pending, Progress};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

impl Group {
    /// Gathers the slices of all ranks, in place. `buffer` has `size · n` elements of any type. Before the call, rank `r` has the elements
    /// `r·n..(r+1)·n`. Afterwards every rank has all elements.
    pub fn all_gather(&self, name: &str, buffer: Tensor) -> Result<Pending> {
        let call = self.call(Op::AllGather, name, &buffer)?;
        if is_elsewhere(&buffer) {
            return self.start_on_gpu(&call, None, buffer);
        }
        let own = buffer.reshape(&[self.size(), buffer.len() / self.size()])?.rows(self.rank(), self.rank() + 1)?;
        let bytes = own.read_bytes()?;
        drop(own);
        Ok(self.pending(call, bytes, None, buffer))
    }

    /// Sums `input` over all ranks in rank order and writes slice `r` of the sum to the `output` of rank `r`.
    ///
    /// `input` has `size · n` elements in F64, F32, F16 or BF16. `output` has `n` elements of the same type or of F32. Sums are computed in F32 (F64
    /// for F64) and rounded once. On GPUs the output must have the type of the input.
    pub fn reduce_scatter(&self, name: &str, input: &Tensor, output: Tensor) -> Result<Pending> {
        let call = self.call(Op::ReduceScatter { output: output.dtype() }, name, input)?;
        self.check_output(&call, &output, input.len() / self.size())?;
        if is_elsewhere(input) {
            return self.start_on_gpu(&call, Some(input), output);
        }
        Ok(self.pending(call, input.read_bytes()?, Some(input.clone()), output))
    }

    /// Reduces `buffer` elementwise over all ranks, in place. A sum is bit-identical to a [`Group::reduce_scatter`] to the same type, followed
    /// by a [`Group::all_gather`].
    pub fn all_reduce(&self, name: &str, reduce: Reduce, buffer: Tensor) -> Result<Pending> {
        let call = self.call(Op::AllReduce(reduce), name, &buffer)?;
        if is_elsewhere(&buffer) {
            return self.start_on_gpu(&call, None, buffer);
        }
        let bytes = buffer.read_bytes()?;
        Ok(self.pending(call, bytes, None, buffer))
    }

    /// Sends slice `r` of `input` to rank `r`. Slice `s` of `output` becomes slice `r` of the `input` of rank `s`, where `r` is this rank. Input and
    /// output have `size · n` elements of the same type, which may be any type.
    pub fn all_to_all(&self, name: &str, input: &Tensor, output: Tensor) -> Result<Pending> {
        let call = self.call(Op::AllToAll, name, input)?;
        self.check_output(&call, &output, input.len())?;
        if output.dtype() != input.dtype() {
            return Err(Error::Value(format!("{call}: the output is {}", output.dtype())));
        }
        if is_elsewhere(input) {
            return self.start_on_gpu(&call, Some(input), output);
        }
        Ok(self.pending(call, input.read_bytes()?, Some(input.clone()), output))
    }

    /// Copies `buffer` of rank `root` of the group to all ranks, in place. It may have any type.
    pub fn broadcast(&self, name: &str, root: usize, buffer: Tensor) -> Result<Pending> {
        let op = Op::Broadcast { root: self.rank_of(root, || format!("broadcast `{name}`: from"))? };
        let call = self.call(op, name, &buffer)?;
        if is_elsewhere(&buffer) {
            return self.start_on_gpu(&call, None, buffer);
        }
        let bytes = if root == self.rank() { buffer.read_bytes()? } else { Vec::new() };
        Ok(self.pending(call, bytes, None, buffer))
    }

    fn check_output(&self, call: &Call, output: &Tensor, elements: usize) -> Result<()> {
        self.check_device(&format!("{}: output", call.title()), output)?;
        if output.len() == elements {
            return Ok(());
        }
        Err(Error::Value(format!("{call}: the output has {} elements, expected {elements}", output.len())))
    }

    fn pending(&self, call: Call, bytes: Vec<u8>, input: Option<Tensor>, output: Tensor) -> Pending {
        Pending { progress: Progress::Sent(self.start(call, bytes)), output, _input: input }
    }
}
