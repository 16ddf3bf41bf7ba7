//! The cast of a slice of a weight. The ranks that have the other slices share its scales, so ranks compute the maximum of their amaxes first.

use super::{UpdateCast, WeightCast};
use crate::mode::Mode;
use crate::operand::FrozenScale;
use crate::param::Weights;
use crate::scaling::{Casts, NextCast};
use ottava_common::error::Result;
use ottava_tensor::ops::{CodeCopies, MatrixSlice, empty_slice, quantize_slice, raise_amax, slice_amaxes};
use ottava_tensor::{QuantizedTensor, Tensor};

impl WeightCast {
    /// Returns whether a matrix of `shape` can be cast slice by slice. Products must read the same codes by rows and by columns, with one scale
    /// or with scales of 128x128 blocks.
    pub(in crate::param) fn has_slices(&self, shape: &[usize], casts: &Casts) -> Result<bool> {
        let &[rows, columns] = shape else { return Ok(false) };
        let is_padded = [rows, columns].iter().all(|n| n.is_multiple_of(QuantizedTensor::PAD));
        if !(self.ranks_store_codes && self.copies == CodeCopies::Both && is_padded) {
            return Ok(false);
        }
        Ok(match casts.scales.next_cast(self.slot)? {
            NextCast::Known(_) | NextCast::Measured => true,
            NextCast::Blocks(_) => self.cast.granularity.shares_codes(rows, columns),
            NextCast::Later => false,
        })
    }

    /// Returns whether an update can also cast the weights, because their scale does not depend on other slices.
    pub(in crate::param) fn has_known_scale(&self, casts: &Casts) -> Result<bool> {
        Ok(matches!(casts.scales.next_cast(self.slot)?, NextCast::Known(_)))
    }

    /// Keeps the amax that an update of a slice has measured.
    pub(in crate::param) fn finish_slice_update(&mut self, update: UpdateCast) {
        self.amax = update.amax;
    }

    /// Returns the amaxes (F32) of the slice of `weights` that begins at the element `start`, if the scales of the next cast depend on the new
    /// weights. This is one amax, measured by the update or now. If ranks gather `codes` with block scales, these are the amaxes of all blocks of the
    /// whole weight.
    pub(in crate::param) fn slice_amaxes(
        &mut self,
        weights: &Weights,
        start: usize,
        codes: bool,
        casts: &mut Casts,
    ) -> Result<Option<Tensor>> {
        self.frozen = FrozenScale::default();
        if let Some(amax) = self.amax.take() {
            return Ok(Some(amax));
        }
        if codes && let NextCast::Blocks(_) = casts.scales.next_cast(self.slot)? {
            return Ok(Some(slice_amaxes(&unrounded(weights)?, weights.dtype(), place_of_slice(weights, start))?));
        }
        let Some(mut amax) = casts.amax_for(self.slot)? else { return Ok(None) };
        let value = weights.value()?;
        if !value.is_empty() {
            raise_amax(&value, &mut amax)?;
        }
        Ok(Some(amax))
    }

    /// Sets the scale of the next cast from the amax of the whole weight. Amaxes of blocks are returned for [`WeightCast::quantize_slice`].
    pub(in crate::param) fn set_scales(&mut self, amaxes: Tensor, casts: &mut Casts) -> Result<Option<Tensor>> {
        match casts.scales.next_cast(self.slot)? {
            NextCast::Blocks(_) => Ok(Some(amaxes)),
            _ => {
                self.frozen.replace(casts.own_scale(self.slot, amaxes)?)?;
                Ok(None)
            }
        }
    }

    /// Casts the slice of `weights` that begins at the element `start`, with the scales of the whole weight. The slice is cast as a matrix of any
    /// shape, into an earlier cast or a new cast. `block_amaxes` are the result of [`WeightCast::set_scales`]. For an empty slice, only the scales
    /// are valid.
    pub(in crate::param) fn quantize_slice(
        &self,
        weights: &Weights,
        start: usize,
        into: Option<QuantizedTensor>,
        block_amaxes: Option<Tensor>,
        casts: &mut Casts,
    ) -> Result<QuantizedTensor> {
        const PAD: usize = QuantizedTensor::PAD;
        if let Some(amaxes) = block_amaxes {
            return self.quantize_slice_by_blocks(weights, start, into, &amaxes, casts);
        }
        let unrounded = weights.unrounded().filter(|master| !master.is_empty());
        let into = match (unrounded, into) {
            (Some(master), Some(mut into)) => {
                let master = master.reshape(&[into.rows, into.columns])?;
                casts.quantize_rounded_into(self.slot, &self.frozen, &master, weights.dtype(), &mut into)?;
                return Ok(into);
            }
            (_, into) => into,
        };
        let value = weights.value()?;
        let (matrix, mode) = match value.is_empty() {
            false => {
                let rows = matrix_rows(value.len());
                (value.reshape(&[rows, value.len() / rows])?, casts.mode)
            }
            // The zeros that replace an empty slice must not be measured.
            true => (Tensor::zeros(value.device(), &[PAD, PAD], value.dtype())?, Mode::EVALUATION),
        };
        let casts = &mut casts.in_mode(mode);
        match into {
            None => casts.quantize(self.slot, &self.frozen, &matrix, CodeCopies::Rows),
            Some(mut into) => {
                casts.quantize_into(self.slot, &self.frozen, &matrix, &mut into)?;
                Ok(into)
            }
        }
    }

    /// Casts the slice like [`WeightCast::quantize_slice`], with scales of 128x128 blocks from the `amaxes` of the whole weight.
    fn quantize_slice_by_blocks(
        &self,
        weights: &Weights,
        start: usize,
        into: Option<QuantizedTensor>,
        amaxes: &Tensor,
        casts: &mut Casts,
    ) -> Result<QuantizedTensor> {
        let (place, values) = (place_of_slice(weights, start), unrounded(weights)?);
        let NextCast::Blocks(how) = casts.scales.next_cast(self.slot)? else {
            unreachable!("blocks have been measured")
        };
        let mut into = match into {
            Some(into) => into,
            None => empty_slice(values.device(), place, values.len())?,
        };
        let statistics = (casts.statistics(), self.slot.index());
        quantize_slice(&values, weights.dtype(), place, amaxes, how, &mut into, statistics)?;
        Ok(into)
    }
}

/// Returns the place of the slice that begins at the element `start` in the whole matrix.
fn place_of_slice(weights: &Weights, start: usize) -> MatrixSlice {
    let [rows, columns] = [0, 1].map(|dim| weights.shape().get(dim).copied().unwrap_or(0));
    MatrixSlice { rows, columns, start }
}

/// Returns the elements of a slice, flat, in the type in which they are stored.
fn unrounded(weights: &Weights) -> Result<Tensor> {
    let stored = match weights.unrounded() {
        Some(master) => master.clone(),
        None => weights.value()?,
    };
    Ok(stored.reshape(&[stored.len()])?)
}

/// Returns the number of rows for casting `elements` elements as a matrix, so that the cast has efficient tiles. `elements` is a multiple of 256.
pub(in crate::param) fn matrix_rows(elements: usize) -> usize {
    const PAD: usize = QuantizedTensor::PAD;
    (4..=12).rev().map(|power| 1 << power).find(|rows| elements.is_multiple_of(rows * PAD)).unwrap_or(PAD)
}
