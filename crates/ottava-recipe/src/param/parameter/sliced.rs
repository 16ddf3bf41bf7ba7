//! A parameter in slices: this process updates one slice, and other ranks update the rest.

use super::{Param, Placement, Slice};
use crate::mode::Mode;
use crate::operand::FrozenScale;
use crate::scaling::{Casts, NextCast};
use crate::storage::States;
use ottava_common::error::{Error, Result};
use ottava_tensor::ops::{CodeCopies, MatrixSlice, empty_slice, quantize_slice, raise_amax, slice_amaxes, transpose};
use ottava_tensor::{DType, ExpandedTensor, Granularity, QuantizedTensor, Tensor};
use std::ops::Range;

impl Param {
    /// Keeps only the master weights of `elements`, a range of the flat parameter that starts at a multiple of 128: this process updates
    /// them, other ranks the rest. With `codes`, products read only the codes of its cast. With `offloads`, weights that are stored are in host
    /// memory; without codes, the weights of the slice are stored. Must be called before [`Param::load`].
    ///
    /// Errors if groups of moments do not divide rows evenly.
    pub fn keep_slice(&mut self, elements: Range<usize>, codes: bool, offloads: bool) -> Result<()> {
        if let Some(problem) = self.formats.slice_problem(self.weights.shape()) {
            return Err(Error::Config(problem));
        }
        assert!(!self.weights.are_loaded(), "slices are chosen before weights are loaded");
        if let Some(cast) = &mut self.cast {
            cast.stores_codes = false;
        }
        self.placement = if offloads { Placement::GatheredFromHost } else { Placement::Gathered };
        let stores_value = offloads && !codes;
        if stores_value {
            self.weights.keep_value();
        }
        self.slice =
            Some(Slice { elements, codes, is_cast_by_update: codes && self.formats.slice_casts(), stores_value });
        Ok(())
    }

    /// Whether products read only stored codes of this parameter, the same by rows and by columns, if ranks divide it: with one scale, or with
    /// scales of 128x128 blocks.
    pub fn is_read_as_codes(&self, casts: &Casts) -> Result<bool> {
        let (Some(cast), &[rows, columns]) = (&self.cast, self.weights.shape()) else { return Ok(false) };
        let is_padded = [rows, columns].iter().all(|n| n.is_multiple_of(QuantizedTensor::PAD));
        if !(cast.ranks_store_codes && cast.copies == CodeCopies::Both && is_padded) {
            return Ok(false);
        }
        Ok(match casts.scales.next_cast(cast.slot)? {
            NextCast::Known(_) | NextCast::Measured => true,
            NextCast::Blocks(_) => cast.cast.granularity.shares_codes(rows, columns),
            NextCast::Later => false,
        })
    }

    /// Whether its cast has a scale for each block of 128x128.
    pub fn has_block_scales(&self) -> bool {
        self.cast.as_ref().is_some_and(|cast| cast.cast.granularity == Granularity::Blocks128x128)
    }

    /// The amaxes of this process's slice, F32, if the scales of the next cast depend on the new weights: one amax, measured by the update or now,
    /// or, if ranks gather codes, the amaxes of the blocks of the whole parameter.
    pub fn slice_amaxes(&mut self, casts: &mut Casts) -> Result<Option<Tensor>> {
        let has_codes = self.slice.as_ref().is_some_and(|slice| slice.codes);
        let Some(cast) = &mut self.cast else { return Ok(None) };
        cast.frozen = FrozenScale::default();
        if let Some(amax) = cast.amax.take() {
            return Ok(Some(amax));
        }
        if has_codes && let NextCast::Blocks(_) = casts.scales.next_cast(cast.slot)? {
            return Ok(Some(slice_amaxes(&self.unrounded_slice()?, self.dtype(), self.place_of_slice())?));
        }
        let Some(mut amax) = casts.amax_for(cast.slot)? else { return Ok(None) };
        let value = self.weights.value()?;
        if !value.is_empty() {
            raise_amax(&value, &mut amax)?;
        }
        Ok(Some(amax))
    }

    /// Sets the scales of the next cast by the maximum of [`Param::slice_amaxes`] over ranks.
    pub fn set_scales(&mut self, amaxes: Tensor, casts: &mut Casts) -> Result<()> {
        let cast = self.cast.as_mut().expect("it has amaxes for its cast");
        match casts.scales.next_cast(cast.slot)? {
            NextCast::Blocks(_) => cast.block_amaxes = Some(amaxes),
            _ => cast.frozen.replace(casts.own_scale(cast.slot, amaxes)?)?,
        }
        Ok(())
    }

    /// The slice in the whole parameter, a matrix.
    fn place_of_slice(&self) -> MatrixSlice {
        let [rows, columns] = [0, 1].map(|dim| self.weights.shape().get(dim).copied().unwrap_or(0));
        MatrixSlice { rows, columns, start: self.slice().start }
    }

    /// The elements of the slice, flat, in the type in which they are stored.
    fn unrounded_slice(&self) -> Result<Tensor> {
        let stored = match self.weights.unrounded() {
            Some(master) => master.clone(),
            None => self.weights.value()?,
        };
        Ok(stored.reshape(&[stored.len()])?)
    }

    /// The format of the codes.
    ///
    /// Panics if FP8 products do not read this parameter.
    pub fn code_format(&self, casts: &Casts) -> DType {
        casts.scales.format(self.cast.as_ref().expect("it is read as codes").slot)
    }

    /// Casts this process's slice with the scales of the parameter, as a matrix of any shape, into an earlier cast or a new one. For an
    /// empty slice, only the scales are valid.
    pub fn quantize_slice(&mut self, into: Option<QuantizedTensor>, casts: &mut Casts) -> Result<QuantizedTensor> {
        const PAD: usize = QuantizedTensor::PAD;
        if let Some(amaxes) = self.cast.as_mut().and_then(|cast| cast.block_amaxes.take()) {
            return self.quantize_slice_by_blocks(&amaxes, into, casts);
        }
        let cast = self.cast.as_ref().expect("a parameter that is read as codes has a cast");
        let unrounded = self.weights.unrounded().filter(|master| !master.is_empty());
        let into = match (unrounded, into) {
            (Some(master), Some(mut into)) => {
                let master = master.reshape(&[into.rows, into.columns])?;
                casts.quantize_rounded_into(cast.slot, &cast.frozen, &master, self.dtype(), &mut into)?;
                return Ok(into);
            }
            (_, into) => into,
        };
        let value = self.weights.value()?;
        let (matrix, mode) = match value.is_empty() {
            false => {
                let rows = matrix_rows(value.len());
                (value.reshape(&[rows, value.len() / rows])?, casts.mode)
            }
            // It must not be measured.
            true => (Tensor::zeros(value.device(), &[PAD, PAD], value.dtype())?, Mode::EVALUATION),
        };
        let casts = &mut casts.in_mode(mode);
        match into {
            None => casts.quantize(cast.slot, &cast.frozen, &matrix, CodeCopies::Rows),
            Some(mut into) => {
                casts.quantize_into(cast.slot, &cast.frozen, &matrix, &mut into)?;
                Ok(into)
            }
        }
    }

    /// [`Param::quantize_slice`] with scales of 128x128 blocks, from the `amaxes` of the whole parameter.
    fn quantize_slice_by_blocks(
        &self,
        amaxes: &Tensor,
        into: Option<QuantizedTensor>,
        casts: &mut Casts,
    ) -> Result<QuantizedTensor> {
        let (place, values) = (self.place_of_slice(), self.unrounded_slice()?);
        let slot = self.cast.as_ref().expect("it is cast").slot;
        let NextCast::Blocks(how) = casts.scales.next_cast(slot)? else { unreachable!("blocks have been measured") };
        let mut into = match into {
            Some(into) => into,
            None => empty_slice(values.device(), place, values.len())?,
        };
        let statistics = (casts.statistics(), slot.index());
        quantize_slice(&values, self.dtype(), place, amaxes, how, &mut into, statistics)?;
        Ok(into)
    }

    /// Whether the next update can cast this process's slice in the same pass.
    pub fn is_cast_by_update(&self, casts: &Casts) -> Result<bool> {
        let Some(cast) =
            self.cast.as_ref().filter(|_| self.slice.as_ref().is_some_and(|slice| slice.is_cast_by_update))
        else {
            return Ok(false);
        };
        Ok(matches!(casts.scales.next_cast(cast.slot)?, NextCast::Known(_)))
    }

    /// The next update writes the codes of this process's slice to `into`; requires [`Param::is_cast_by_update`].
    pub fn write_codes_to(&mut self, into: QuantizedTensor) {
        self.cast.as_mut().expect("it is cast by the update").codes = Some(into);
    }

    /// The codes of [`Param::write_codes_to`].
    pub fn take_codes(&mut self) -> Option<QuantizedTensor> {
        self.cast.as_mut().and_then(|cast| cast.codes.take())
    }

    /// The next update writes the weights that layers read to `place`; returns `place` if the optimizer updates these weights themselves.
    pub fn write_value_to(&mut self, place: Tensor) -> Result<Option<Tensor>> {
        let shaped = place.reshape(&self.update_shape())?;
        drop(place);
        Ok(self.weights.write_value_to(shaped))
    }

    /// Replaces the slice by the `whole` weights, for inference.
    pub fn end_training(&mut self, whole: Tensor) {
        (self.slice, self.placement) = (None, Placement::Device);
        self.weights.set_value(whole);
    }

    /// The cast of the whole parameter from codes `[R, C]` with the scale of `slice`, and their transpose if requested.
    pub fn gathered_codes(&self, codes: Tensor, slice: &QuantizedTensor, transposes: bool) -> Result<QuantizedTensor> {
        let [rows, columns] = self.weights.shape() else { unreachable!("only matrices are cast") };
        let codes = codes.reshape(&[*rows, *columns])?;
        let transposed = transposes.then(|| transpose(&codes)).transpose()?;
        let (rows, columns) = (*rows, *columns);
        Ok(QuantizedTensor { codes: Some(codes), transposed, rows, columns, ..slice.clone() })
    }

    /// Whether this process has only a slice, which may be empty, of the master weights and moments.
    pub fn is_sliced(&self) -> bool {
        self.slice.is_some()
    }

    /// The elements whose master weights and moments this process has.
    pub fn slice(&self) -> Range<usize> {
        match &self.slice {
            Some(slice) => slice.elements.clone(),
            None => 0..self.weights.shape().iter().product(),
        }
    }

    /// The shape of master weights, moments and the gradient in an update.
    pub fn update_shape(&self) -> Vec<usize> {
        match &self.slice {
            None => self.weights.shape().to_vec(),
            Some(slice) => self.slice_shape(slice),
        }
    }

    /// The shape of a slice: groups of moments lie within rows.
    fn slice_shape(&self, slice: &Slice) -> Vec<usize> {
        const GROUP: usize = ExpandedTensor::GROUP;
        let elements = slice.elements.len();
        match self.formats.states {
            // A thread block processes at least one row.
            States::Coat => {
                let width = (0..=8).rev().map(|power| GROUP << power).find(|width| elements.is_multiple_of(*width));
                let width = width.unwrap_or(GROUP);
                vec![elements / width, width]
            }
            _ if slice.is_cast_by_update => vec![matrix_rows(elements), elements / matrix_rows(elements)],
            _ => vec![elements],
        }
    }
}

/// The number of rows of a matrix of `elements`, a multiple of 256, that a cast divides into efficient tiles.
fn matrix_rows(elements: usize) -> usize {
    const PAD: usize = QuantizedTensor::PAD;
    (4..=12).rev().map(|power| 1 << power).find(|rows| elements.is_multiple_of(rows * PAD)).unwrap_or(PAD)
}
