//! A parameter in slices: this process updates one slice, and other ranks update the rest.
//!
//! Ranks gather the slices from a buffer, as weights or as codes. Before an update, `Param::begin_write` gets the memory of a slice in the buffer,
//! so that the update can write directly to this memory. It returns a `SliceWrite`, which `Param::finish_write` consumes after the update.
//! `Param::finish_write` writes the rest of the slice, and returns the memory.

use super::{Param, into_shape};
use crate::param::ParamId;
use crate::param::ownership::{Ownership, Slice};
use crate::scaling::Casts;
use ottava_common::error::{Error, Result};
use ottava_tensor::{QuantizedTensor, Tensor};
use std::ops::Range;

/// The writer of the memory of a slice.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Writer {
    /// Only [`Param::finish_write`] writes.
    Cast,
    /// An update writes weights.
    Update,
    /// An update writes weights and casts them.
    CastingUpdate,
}

/// A slice that is being written, from [`Param::begin_write`] to [`Param::finish_write`].
#[must_use = "the slice is written by `Param::finish_write`"]
pub struct SliceWrite {
    param: ParamId,
    memory: SliceMemory,
    /// The cast that the last [`Param::finish_write`] returned, whose memory is reused. Its codes were taken out unless the slice is empty. `None`
    /// before the first cast, if ranks gather weights, or if the update writes the codes.
    cast: Option<QuantizedTensor>,
}

/// The memory of a slice in the buffer that ranks gather.
enum SliceMemory {
    /// This process has no elements of the parameter.
    None,
    /// The memory is set as the parameter's codes, which the update writes.
    Codes,
    /// The memory is set as the parameter's weights, which the update writes.
    Weights,
    /// The update does not write the memory.
    Unwritten(Tensor),
}

impl Param {
    /// Keeps only the master weights of `elements`, a range of the flat parameter that starts at a multiple of 128. This process updates
    /// these elements, and other ranks update the rest. With `codes`, products read only the codes of the parameter's cast. With `offloads`, what is
    /// stored for ranks to gather is in host memory; without `codes`, the weights of the slice are stored for this.
    ///
    /// Errors if groups of moments do not divide rows evenly. Panics after [`Param::load`].
    pub fn keep_slice(&mut self, elements: Range<usize>, codes: bool, offloads: bool) -> Result<()> {
        if let Some(problem) = self.formats.slice_problem(self.weights.shape()) {
            return Err(Error::Config(problem));
        }
        assert!(!self.weights.are_loaded(), "slices are chosen before weights are loaded");
        if let Some(cast) = &mut self.cast {
            cast.stores_codes = false;
        }
        let slice = Slice { elements, codes, offloads, is_cast_by_update: codes && self.formats.slice_casts() };
        if slice.stores_value() {
            self.weights.keep_value();
        }
        self.ownership = Ownership::Sliced(slice);
        Ok(())
    }

    /// Returns whether this process has only a slice of the master weights and moments. The slice may be empty.
    pub fn is_sliced(&self) -> bool {
        matches!(self.ownership, Ownership::Sliced(_))
    }

    /// Returns the elements whose master weights and moments this process has.
    pub fn slice(&self) -> Range<usize> {
        match &self.ownership {
            Ownership::Sliced(slice) => slice.elements.clone(),
            Ownership::Whole(_) | Ownership::Frozen(_) => 0..self.weights.shape().iter().product(),
        }
    }

    /// Returns the shape of master weights, moments and the gradient in an update.
    pub fn update_shape(&self) -> Vec<usize> {
        match &self.ownership {
            Ownership::Sliced(slice) => slice.shape(self.formats.states),
            Ownership::Whole(_) | Ownership::Frozen(_) => self.weights.shape().to_vec(),
        }
    }

    /// Returns whether products would read only stored codes of this parameter if ranks divide it. The codes by rows and by columns must be the same:
    /// with one scale, or with scales of 128x128 blocks.
    pub fn is_read_as_codes(&self, casts: &Casts) -> Result<bool> {
        self.cast.as_ref().map_or(Ok(false), |cast| cast.has_slices(self.weights.shape(), casts))
    }

    /// Returns the amaxes (F32) of this process's slice, if the scales of the next cast depend on the new weights. This is one amax, measured by the
    /// update or now. If ranks gather codes with block scales, these are the amaxes of all blocks of the whole parameter.
    pub fn slice_amaxes(&mut self, casts: &mut Casts) -> Result<Option<Tensor>> {
        match (&mut self.cast, &self.ownership) {
            (Some(cast), Ownership::Sliced(slice)) => {
                cast.slice_amaxes(&self.weights, slice.elements.start, slice.codes, casts)
            }
            _ => Ok(None),
        }
    }

    /// Sets the scales of the next cast from the maximum of [`Param::slice_amaxes`] over ranks. Amaxes of blocks are returned for
    /// [`Param::finish_write`].
    pub fn set_scales(&mut self, amaxes: Tensor, casts: &mut Casts) -> Result<Option<Tensor>> {
        self.cast.as_mut().expect("it has amaxes for its cast").set_scales(amaxes, casts)
    }

    /// Begins to write this process's slice to `memory`, its part of the buffer that ranks gather. `memory` is `None` for an empty slice. `cast` is
    /// the earlier cast of the slice from [`Param::finish_write`], if ranks gather codes.
    pub fn begin_write(
        &mut self,
        memory: Option<Tensor>,
        mut cast: Option<QuantizedTensor>,
        writer: Writer,
        casts: &Casts,
    ) -> Result<SliceWrite> {
        let Ownership::Sliced(slice) = &self.ownership else { unreachable!("only slices are gathered") };
        let own = self.cast.as_mut().filter(|_| slice.is_cast_by_update && writer == Writer::CastingUpdate);
        let memory = match memory {
            None => SliceMemory::None,
            Some(memory) if writer == Writer::Cast => SliceMemory::Unwritten(memory),
            Some(memory) if slice.codes => match (own, cast.take()) {
                (Some(own), Some(mut into)) if own.has_known_scale(casts)? => {
                    into.codes = Some(into_shape(memory, &[into.rows, into.columns])?);
                    own.codes = Some(into);
                    SliceMemory::Codes
                }
                (_, earlier) => {
                    cast = earlier;
                    SliceMemory::Unwritten(memory)
                }
            },
            Some(memory) => {
                let memory = into_shape(memory, &self.update_shape())?;
                match self.weights.write_value_to(memory) {
                    None => SliceMemory::Weights,
                    Some(memory) => SliceMemory::Unwritten(flat(memory)?),
                }
            }
        };
        Ok(SliceWrite { param: self.identity.id, memory, cast })
    }

    /// Ends a `write`, which completes the slice. Returns the memory as a vector, and the cast of the slice without the codes. `block_amaxes` are
    /// the result of [`Param::set_scales`].
    ///
    /// Panics if `write` belongs to another parameter.
    pub fn finish_write(
        &mut self,
        write: SliceWrite,
        block_amaxes: Option<Tensor>,
        casts: &mut Casts,
    ) -> Result<(Option<Tensor>, Option<QuantizedTensor>)> {
        let SliceWrite { param, memory, cast } = write;
        assert_eq!(param, self.identity.id, "a slice is written by its own parameter");
        let Ownership::Sliced(slice) = &self.ownership else { unreachable!("only slices are gathered") };
        if !slice.codes {
            return Ok(match memory {
                SliceMemory::None | SliceMemory::Codes => (None, None),
                SliceMemory::Weights => (self.weights.take_value().map(flat).transpose()?, None),
                SliceMemory::Unwritten(mut memory) => {
                    memory.copy_from(0, &flat(self.weights.value()?)?)?;
                    (Some(memory), None)
                }
            });
        }
        let start = slice.elements.start;
        let own = self.cast.as_mut().expect("a parameter that is read as codes has a cast");
        let quantize = |into| own.quantize_slice(&self.weights, start, into, block_amaxes, casts);
        let mut made = match (memory, cast) {
            (SliceMemory::Codes, _) => own.codes.take().expect("the update has written the codes"),
            (SliceMemory::Unwritten(memory), Some(mut into)) => {
                into.codes = Some(into_shape(memory, &[into.rows, into.columns])?);
                quantize(Some(into))?
            }
            (SliceMemory::Unwritten(mut memory), None) => {
                let mut made = quantize(None)?;
                memory.copy_from(0, &flat(made.codes.take().expect("rows were asked for"))?)?;
                return Ok((Some(memory), Some(made)));
            }
            (SliceMemory::None | SliceMemory::Weights, into) => return Ok((None, Some(quantize(into)?))),
        };
        Ok((made.codes.take().map(flat).transpose()?, Some(made)))
    }
}

/// Returns a tensor that is not shared as a vector.
fn flat(tensor: Tensor) -> Result<Tensor> {
    let elements = tensor.len();
    into_shape(tensor, &[elements])
}
