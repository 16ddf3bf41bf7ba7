//! The states of recurrent layers: the values that a sequence keeps between passes of inference, in fixed slots.

use ottava_tensor::ops::{SegmentStates, Segments, real_type};
use ottava_tensor::{DType, Device, Result, Suspended, Tensor};

/// The sizes of a recurrent layer on this rank: a causal convolution, and a recurrence with a matrix for each head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecurrentSpec {
    /// The number of channels of the convolution, `C`.
    pub channels: usize,
    /// The number of taps of the convolution, `K`.
    pub taps: usize,
    /// The shape of the recurrence's state: heads, rows and columns.
    pub state: [usize; 3],
    /// The number of products of a token with the state, each of as many multiplications as the state has elements.
    pub products: usize,
}

impl RecurrentSpec {
    /// Returns the number of bytes of the states of one sequence, in a model that computes in `compute`.
    pub fn state_bytes(&self, compute: DType) -> usize {
        (self.taps - 1) * self.channels * compute.size() + self.state_len() * real_type(compute).size()
    }

    /// Returns the number of elements of the recurrence's state.
    pub fn state_len(&self) -> usize {
        self.state.iter().product()
    }
}

/// The states of one recurrent layer, by slot. A slot belongs to one sequence at a time.
pub struct RecurrentStates {
    /// The last inputs of the convolution, `[slots, K − 1, C]` in the compute type.
    pub inputs: Tensor,
    /// The states of the recurrence, `[slots, heads, rows, columns]` in F32 (F64 for F64).
    pub matrices: Tensor,
}

/// The states of a recurrent layer without memory.
pub struct SuspendedStates([Suspended; 2]);

impl SuspendedStates {
    /// Takes memory for the states again, whose content is undefined. Also returns whether the memory lies elsewhere than before.
    ///
    /// Errors if the device has too little memory.
    pub fn resume(&self) -> Result<(RecurrentStates, bool)> {
        let SuspendedStates([inputs, matrices]) = self;
        let states = RecurrentStates { inputs: inputs.resume()?, matrices: matrices.resume()? };
        let stay = inputs.is_place_of(&states.inputs) && matrices.is_place_of(&states.matrices);
        Ok((states, !stay))
    }
}

/// The new tokens of recurrent layers in a pass: a segment for each sequence. All tensors are I32 on the device.
#[derive(Clone, Copy)]
pub struct RecurrentBatch<'a> {
    /// The offsets of the segments, `[N + 1]`.
    pub starts: &'a Tensor,
    /// The slot of each sequence, `[N]`.
    pub slots: &'a Tensor,
    /// The number of tokens of each sequence before the pass, `[N]`.
    pub past: &'a Tensor,
}

impl<'a> RecurrentBatch<'a> {
    /// Returns the new tokens of each sequence.
    pub fn segments(&self) -> Segments<'a> {
        Segments::At(self.starts)
    }
}

impl RecurrentStates {
    /// Allocates `slots` slots for a layer with the sizes `spec` that computes in `compute`.
    pub fn new(device: &Device, spec: &RecurrentSpec, slots: usize, compute: DType) -> Result<RecurrentStates> {
        let [heads, rows, columns] = spec.state;
        Ok(RecurrentStates {
            inputs: Tensor::zeros(device, &[slots, spec.taps - 1, spec.channels], compute)?,
            matrices: Tensor::zeros(device, &[slots, heads, rows, columns], real_type(compute))?,
        })
    }

    /// Replaces the states in slot `slot` by the states in slot `from` of `source`, whose layer has the same sizes.
    ///
    /// Errors if a slot does not exist.
    pub fn copy_from(&mut self, slot: usize, source: &RecurrentStates, from: usize) -> Result<()> {
        self.inputs.copy_from(slot, &source.inputs.rows(from, from + 1)?)?;
        self.matrices.copy_from(slot, &source.matrices.rows(from, from + 1)?)
    }

    /// Returns the memory of the states to the device. The states are lost.
    pub fn suspend(self) -> SuspendedStates {
        SuspendedStates([self.inputs, self.matrices].map(Tensor::suspend))
    }

    /// Returns the last inputs of the convolution, for the sequences of `batch`.
    pub fn inputs_of<'a>(&'a mut self, batch: &RecurrentBatch<'a>) -> SegmentStates<'a> {
        SegmentStates { values: &mut self.inputs, slots: batch.slots, past: batch.past }
    }

    /// Returns the states of the recurrence, for the sequences of `batch`.
    pub fn matrices_of<'a>(&'a mut self, batch: &RecurrentBatch<'a>) -> SegmentStates<'a> {
        SegmentStates { values: &mut self.matrices, slots: batch.slots, past: batch.past }
    }
}
