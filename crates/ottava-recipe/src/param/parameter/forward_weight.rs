//! What forward passes read of a weight, lent for a while: gathered from ranks, or cast once instead of by each product.

use super::Param;
use crate::param::ownership::Ownership;
use crate::param::scopes::CODES;
use crate::param::{Loan, WeightCast};
use crate::scaling::{Casts, Values};
use ottava_common::error::Result;
use ottava_tensor::ops::CodeCopies;
use ottava_tensor::{DType, Granularity, MemoryKind, QuantizedTensor, Suspended, Tensor};
use std::mem;

/// What forward passes without a loan read of a weight. The default is nothing.
#[derive(Default)]
pub struct ForwardWeight {
    /// The values. Forward computes missing values from master weights.
    pub value: Option<Tensor>,
    /// The codes by rows. Forward casts the values if codes are missing.
    pub codes: Option<QuantizedTensor>,
}

/// A weight that forward read, without memory and without content.
pub struct SuspendedWeight {
    value: Option<Suspended>,
    codes: Option<SuspendedCodes>,
}

struct SuspendedCodes {
    codes: Option<Suspended>,
    scale_inv: Suspended,
    granularity: Granularity,
    format: DType,
    rows: usize,
    columns: usize,
}

impl ForwardWeight {
    /// Returns the tensors of values, codes and scales.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let codes = self.codes.iter().flat_map(|codes| codes.codes.iter().chain([&codes.scale_inv]));
        self.value.iter().chain(codes)
    }

    /// Returns the same tensors as [`ForwardWeight::tensors`].
    pub fn tensors_mut(&mut self) -> impl Iterator<Item = &mut Tensor> {
        let codes = self.codes.iter_mut().flat_map(|codes| codes.codes.iter_mut().chain([&mut codes.scale_inv]));
        self.value.iter_mut().chain(codes)
    }

    /// Returns a weight of the same shapes and types, with memory of its own and undefined content.
    pub fn empty_like(&self) -> Result<ForwardWeight> {
        let mut like = ForwardWeight { value: self.value.clone(), codes: self.codes.clone() };
        for tensor in like.tensors_mut() {
            *tensor = Tensor::empty(tensor.device(), tensor.shape(), tensor.dtype())?;
        }
        Ok(like)
    }

    /// Returns whether both weights have the same parts: values, codes or both.
    pub fn has_parts_of(&self, other: &ForwardWeight) -> bool {
        self.value.is_some() == other.value.is_some() && self.codes.is_some() == other.codes.is_some()
    }

    /// Returns the memory of the weight to the device.
    pub fn suspend(self) -> SuspendedWeight {
        let codes = |QuantizedTensor { codes, scale_inv, granularity, format, rows, columns, .. }| SuspendedCodes {
            codes: codes.map(Tensor::suspend),
            scale_inv: scale_inv.suspend(),
            granularity,
            format,
            rows,
            columns,
        };
        SuspendedWeight { value: self.value.map(Tensor::suspend), codes: self.codes.map(codes) }
    }
}

impl SuspendedWeight {
    /// Takes memory for the weight again. Returns the weight, whose content is undefined, and whether it lies at other addresses than before, so that
    /// graphs that read it are no longer valid.
    ///
    /// Errors as [`Suspended::resume`].
    pub fn resume(&self) -> Result<(ForwardWeight, bool)> {
        let mut has_moved = false;
        let mut again = |suspended: &Suspended| {
            let resumed = suspended.resume()?;
            has_moved |= !suspended.is_place_of(&resumed);
            Ok::<_, ottava_common::Error>(resumed)
        };
        let value = self.value.as_ref().map(&mut again).transpose()?;
        let codes = match &self.codes {
            None => None,
            Some(SuspendedCodes { codes, scale_inv, granularity, format, rows, columns }) => Some(QuantizedTensor {
                codes: codes.as_ref().map(&mut again).transpose()?,
                scale_inv: again(scale_inv)?,
                transposed: None,
                transposed_scale_inv: None,
                granularity: *granularity,
                format: *format,
                rows: *rows,
                columns: *columns,
            }),
        };
        Ok((ForwardWeight { value, codes }, has_moved))
    }
}

impl Param {
    /// Returns what forward reads of a weight on `loan`: codes if FP8 products read codes, otherwise values. A weight that is lent as values is cast now.
    pub fn for_forward(&self, loan: &Loan, casts: &mut Casts) -> Result<ForwardWeight> {
        Ok(match self.reads_codes(casts) {
            true => ForwardWeight { value: None, codes: Some(self.codes_for_forward(loan, casts)?.only_rows()) },
            false => ForwardWeight { value: Some(self.read(loan)?), codes: None },
        })
    }

    /// Returns whether fprop reads codes of this weight that can be cast before the product.
    fn reads_codes(&self, casts: &Casts) -> bool {
        let has_own_codes = |cast: &&WeightCast| cast.copies != CodeCopies::Columns;
        self.cast.as_ref().filter(has_own_codes).is_some_and(|cast| !casts.is_high_precision(cast.slot))
    }

    /// Returns whether this process stores the whole weight, on the device, and each forward casts it.
    pub fn is_cast_by_forward(&self, casts: &Casts) -> bool {
        let is_whole = matches!(
            self.ownership,
            Ownership::Whole(MemoryKind::Device) | Ownership::Frozen(Some(MemoryKind::Device))
        );
        is_whole && self.reads_codes(casts) && self.cast.as_ref().is_some_and(|cast| cast.codes.is_none())
    }

    /// Returns the weight with codes that forward reads in passes until the next update, instead of casting the weight for each product. The codes are
    /// written to `memory`, if it is not `None`.
    ///
    /// Panics if [`Param::is_cast_by_forward`] is false.
    pub fn cast_for_passes(&self, memory: Option<ForwardWeight>, casts: &mut Casts) -> Result<ForwardWeight> {
        let _scope = self.weights.device().scope(CODES);
        let cast = self.cast.as_ref().expect("the weight of an FP8 product has a cast");
        let value = self.weights.value()?;
        let codes = match memory.and_then(|memory| memory.codes) {
            Some(mut codes) => {
                if cast.has_block_scales() {
                    // Scales of 128x128 have padding that no cast writes.
                    codes.scale_inv.fill_zero()?;
                }
                casts.quantize_into(cast.slot, &cast.frozen, &value, &mut codes)?;
                codes
            }
            None => cast.cast_for_forward(Values::from(&value), casts)?,
        };
        Ok(ForwardWeight { value: self.weights.is_stored().then_some(value), codes: Some(codes) })
    }

    /// Exchanges what forward passes without a loan read with `weight`. A second call restores what the parameter stored. In between, no update may run.
    pub fn exchange(&mut self, weight: &mut ForwardWeight) {
        self.weights.exchange_value(&mut weight.value);
        if let Some(cast) = &mut self.cast {
            mem::swap(&mut cast.codes, &mut weight.codes);
        }
    }
}
