//! The cast of a weight to the FP8 codes that products read.

pub(super) mod slice;

use super::builder::WeightSource;
use super::folder_codes::{self, FolderUse};
use super::scopes::{CODES, FROZEN_CODES};
use super::shard::Shard;
use super::weights::Weights;
use crate::Cast;
use crate::operand::FrozenScale;
use crate::scaling::{Casts, NextCast, Slot, Values};
use ottava_common::error::Result;
use ottava_tensor::ops::{self, CastScale, CodeCopies, transpose_codes};
use ottava_tensor::{DType, Granularity, QuantizedTensor, Tensor};

/// The cast of a weight.
pub struct WeightCast {
    /// The slot of the cast's scale and statistics.
    pub(super) slot: Slot,
    /// The cast of the weight.
    pub(super) cast: Cast,
    /// The copies that products read.
    pub(super) copies: CodeCopies,
    /// The codes, if they are stored between products.
    pub(super) codes: Option<QuantizedTensor>,
    /// Whether codes are stored. Otherwise each product casts the weight.
    pub(super) stores_codes: bool,
    /// Whether ranks that divide the weight may store codes, even of an offloaded weight.
    pub(super) ranks_store_codes: bool,
    /// Whether the weight is frozen. A frozen weight is cast once. If dgrad reads the same codes transposed, codes are stored only in the layout of
    /// fprop.
    pub(super) is_frozen: bool,
    /// Whether the codes replace a frozen weight.
    pub(super) replaces_value: bool,
    /// Whether a frozen weight uses the codes of the folder, if the folder has codes.
    pub(super) folder: Option<FolderUse>,
    /// The scale of a cast by the weight's own amax.
    pub(super) frozen: FrozenScale,
    /// The amax of a slice, F32 `[1]`. It is set by the update that measures it, until ranks compute their maximum.
    pub(super) amax: Option<Tensor>,
}

/// The casts of new weights in an update, from [`Param::begin_update`](super::Param::begin_update) to
/// [`Param::finish_update`](super::Param::finish_update). The default casts nothing.
#[derive(Default)]
pub struct UpdateCast {
    /// The cast to stored codes.
    to_codes: Option<NextCast>,
    /// The amax of the new weights, F32 `[1]`, for a cast after the update.
    amax: Option<Tensor>,
}

impl WeightCast {
    /// Creates a `cast` in `slot` to `copies`, which stores no codes.
    pub(super) fn new(slot: Slot, cast: Cast, copies: CodeCopies) -> WeightCast {
        let (codes, folder, frozen, amax) = (None, None, FrozenScale::default(), None);
        let [stores_codes, ranks_store_codes, is_frozen, replaces_value] = [false; 4];
        WeightCast {
            slot,
            cast,
            copies,
            codes,
            stores_codes,
            ranks_store_codes,
            is_frozen,
            replaces_value,
            folder,
            frozen,
            amax,
        }
    }

    /// Returns the index of the slot.
    pub fn slot(&self) -> usize {
        self.slot.index()
    }

    /// Returns the format of the codes.
    pub fn format(&self, casts: &Casts) -> DType {
        casts.scales.format(self.slot)
    }

    /// Returns whether each block of 128x128 has a scale.
    pub fn has_block_scales(&self) -> bool {
        self.cast.granularity == Granularity::Blocks128x128
    }

    /// Returns whether a frozen weight uses the codes of the folder from which it was loaded, or `None` if the folder has no codes.
    pub fn folder_use(&self) -> Option<FolderUse> {
        self.folder
    }

    /// Returns whether dgrad transposes the stored codes of fprop, for a weight of this shape.
    fn is_transposed_later(&self, shape: &[usize]) -> bool {
        let shares_codes = match shape {
            [rows, columns] => self.cast.granularity.shares_codes(*rows, *columns),
            _ => false,
        };
        self.is_frozen && self.copies == CodeCopies::Both && shares_codes
    }

    /// Takes the codes of a frozen weight from `source`, if they match the cast. Returns whether the values are needed too.
    pub(super) fn read_codes(
        &mut self,
        weights: &Weights,
        shards: &[Shard],
        source: &mut dyn WeightSource,
    ) -> Result<bool> {
        let (device, shares_codes) = (weights.device(), self.is_transposed_later(weights.shape()));
        let _scope = device.scope(if shares_codes { FROZEN_CODES } else { CODES });
        if let Some((used, codes)) = folder_codes::read(shards, &self.cast, device, source)? {
            (self.folder, self.codes) = (Some(used), codes);
        }
        Ok(self.codes.is_none() || !self.replaces_value || !shares_codes)
    }

    /// Adds the copy for dgrad to the codes of a folder, if dgrad needs other codes than fprop.
    fn complete(&mut self, weights: &mut Weights, casts: &mut Casts) -> Result<()> {
        let is_complete = self.copies != CodeCopies::Both || self.is_transposed_later(weights.shape());
        if let Some(codes) = self.codes.as_mut().filter(|codes| codes.transposed.is_none() && !is_complete) {
            let _scope = weights.device().scope(CODES);
            let value = weights.value()?;
            self.frozen.replace(casts.freeze(self.slot, &value)?)?;
            let columns = casts.quantize(self.slot, &self.frozen, &value, CodeCopies::Columns)?;
            codes.transposed = columns.transposed;
            codes.transposed_scale_inv = Some(Box::new(columns.scale_inv));
            if self.replaces_value {
                weights.drop_frozen();
            }
        }
        Ok(())
    }

    /// Casts `weights` for the next step. Frozen weights are cast only once.
    pub(super) fn quantize(&mut self, weights: &mut Weights, casts: &mut Casts) -> Result<()> {
        if self.is_frozen && self.codes.is_some() {
            return self.complete(weights, casts);
        }
        let value = weights.value()?;
        let is_transposed_later = self.is_transposed_later(weights.shape());
        let _scope = weights.device().scope(if is_transposed_later { FROZEN_CODES } else { CODES });
        self.frozen.replace(casts.freeze(self.slot, &value)?)?;
        match &mut self.codes {
            _ if !self.stores_codes => {}
            Some(codes) => casts.quantize_into(self.slot, &self.frozen, &value, codes)?,
            none => {
                let mut codes = casts.quantize(self.slot, &self.frozen, &value, self.copies)?;
                if is_transposed_later {
                    codes.transposed = None;
                }
                *none = Some(codes);
            }
        }
        if self.replaces_value {
            weights.drop_frozen();
        }
        Ok(())
    }

    /// Replaces the scale of the codes by equal scales per row, for products whose other operand has scales per row. The codes do not change.
    pub(super) fn repeat_scale(&mut self) -> Result<()> {
        // Weights that each product casts compute scales per row in these casts.
        self.frozen = FrozenScale::default();
        if let Some(codes) = self.codes.as_mut().filter(|codes| codes.granularity == Granularity::PerTensor) {
            let scale_inv = codes.scale_inv.to_vec::<f32>()?[0];
            let shape = Granularity::PerRow.scales_shape(codes.rows, codes.columns);
            let repeated = vec![scale_inv; shape[0]];
            let scale_inv = Tensor::from_slice(codes.scale_inv.device(), &shape, &repeated)?;
            *codes = QuantizedTensor { scale_inv, granularity: Granularity::PerRow, ..codes.only_rows() };
        }
        Ok(())
    }

    /// Prepares an update.
    pub(super) fn begin_update(&mut self, casts: &mut Casts) -> Result<UpdateCast> {
        let next = casts.scales.next_cast(self.slot)?;
        let amax = match next {
            NextCast::Measured => casts.amax_for(self.slot)?,
            NextCast::Known(_) | NextCast::Blocks(_) | NextCast::Later => {
                // The weight is no longer cast by a scale of its own.
                self.frozen = FrozenScale::default();
                None
            }
        };
        // A slice has codes here only if the update can write them.
        let has_codes = self.stores_codes || self.codes.is_some();
        Ok(UpdateCast { to_codes: Some(next).filter(|_| has_codes), amax })
    }

    /// Returns the destination that the update itself writes: the codes, or the amax for a cast after the update.
    pub(super) fn in_update<'a>(&'a mut self, update: &'a mut UpdateCast) -> Option<ops::WeightCast<'a>> {
        let scale = match &update.to_codes {
            Some(NextCast::Known(scale)) => Some(CastScale::Given(scale)),
            Some(NextCast::Blocks(how)) => Some(CastScale::Own(Granularity::Blocks128x128, *how)),
            Some(NextCast::Measured | NextCast::Later) | None => None,
        };
        match scale {
            Some(scale) => {
                let into = self.codes.as_mut().expect("weights are quantized before the first step");
                Some(ops::WeightCast::Codes { scale, slot: self.slot.index(), into })
            }
            None => update.amax.as_mut().map(ops::WeightCast::Amax),
        }
    }

    /// Casts updated weights, if their scales depend on the new weights.
    pub(super) fn finish_update(&mut self, update: UpdateCast, weights: &Weights, casts: &mut Casts) -> Result<()> {
        if let Some(amax) = update.amax {
            self.frozen.replace(casts.own_scale(self.slot, amax)?)?;
        } else if !matches!(casts.scales.next_cast(self.slot)?, NextCast::Later) {
            return Ok(());
        }
        match &mut self.codes {
            Some(codes) => casts.quantize_into(self.slot, &self.frozen, &weights.value()?, codes),
            None => Ok(()),
        }
    }

    /// Returns the codes for dgrad. If only the copy for fprop is stored, the codes are transposed now.
    pub(super) fn for_backward(codes: &QuantizedTensor) -> Result<QuantizedTensor> {
        match codes.transposed {
            Some(_) => Ok(codes.clone()),
            None => Ok(transpose_codes(codes)?),
        }
    }

    /// Casts and measures `values` for fprop.
    pub(super) fn cast_for_forward(&self, values: Values, casts: &mut Casts) -> Result<QuantizedTensor> {
        casts.quantize(self.slot, &self.frozen, values, CodeCopies::Rows)
    }

    /// Casts `values` for dgrad, without measuring.
    pub(super) fn cast_for_backward(&self, values: Values, casts: &mut Casts) -> Result<QuantizedTensor> {
        casts.requantize(self.slot, &self.frozen, values, CodeCopies::Columns)
    }
}
