//! The cast of a weight to the FP8 codes that products read.

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
use ottava_tensor::{Granularity, QuantizedTensor, Tensor};

/// The cast of a weight.
pub(super) struct WeightCast {
    /// The slot of its scale and statistics.
    pub slot: Slot,
    /// How the weight is cast.
    pub cast: Cast,
    /// The copies that products read.
    pub copies: CodeCopies,
    /// The codes, if they are stored between products.
    pub codes: Option<QuantizedTensor>,
    /// Whether codes are stored; otherwise each product casts the weight.
    pub stores_codes: bool,
    /// Whether ranks that divide the weight may store codes, also of an offloaded weight.
    pub ranks_store_codes: bool,
    /// Whether the weight is frozen, so that it is cast once and its codes are stored in the layout of fprop alone, if the codes of dgrad are the
    /// same codes transposed.
    pub is_frozen: bool,
    /// Whether the codes replace a frozen weight.
    pub replaces_value: bool,
    /// Whether the codes of a frozen weight are the codes of the folder, if the folder has codes.
    pub folder: Option<FolderUse>,
    /// The scale of a cast by the weight's own amax.
    pub frozen: FrozenScale,
    /// F32 `[1]`: the amax of the new weights for current scaling, during an update.
    pub amax: Option<Tensor>,
    /// The amaxes of the blocks of a whole weight, from when ranks have found them to the cast of this rank's slice.
    pub block_amaxes: Option<Tensor>,
}

impl WeightCast {
    /// A `cast` in `slot` to `copies` that stores no codes.
    pub fn new(slot: Slot, cast: Cast, copies: CodeCopies) -> WeightCast {
        let (codes, frozen, amax, block_amaxes) = (None, FrozenScale::default(), None, None);
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
            folder: None,
            frozen,
            amax,
            block_amaxes,
        }
    }

    /// Whether dgrad of a weight of this shape reads the codes of fprop, transposed.
    fn is_transposed_later(&self, shape: &[usize]) -> bool {
        let shares_codes = match shape {
            [rows, columns] => self.cast.granularity.shares_codes(*rows, *columns),
            _ => false,
        };
        self.is_frozen && self.copies == CodeCopies::Both && shares_codes
    }

    /// Takes the codes of a frozen weight from `source`, if it has them as the cast makes them. Returns whether the values are needed.
    pub fn read_codes(&mut self, weights: &Weights, shards: &[Shard], source: &mut dyn WeightSource) -> Result<bool> {
        let (device, shares_codes) = (weights.device(), self.is_transposed_later(weights.shape()));
        let _scope = device.scope(if shares_codes { FROZEN_CODES } else { CODES });
        if let Some((used, codes)) = folder_codes::read(shards, &self.cast, device, source)? {
            (self.folder, self.codes) = (Some(used), codes);
        }
        Ok(self.codes.is_none() || !self.replaces_value || !shares_codes)
    }

    /// Adds to the codes of a folder the copy for dgrad, if that has other codes.
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

    /// Casts `weights` for the next step, unless they are frozen and cast already.
    pub fn quantize(&mut self, weights: &mut Weights, casts: &mut Casts) -> Result<()> {
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

    /// Replaces the scale of the codes by one equal scale per row, for products whose other operand has a scale per row. No code changes.
    pub fn repeat_scale(&mut self) -> Result<()> {
        // Casts in each product have scales per row of their own.
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

    /// Prepares an update, and returns how to cast the new weights.
    pub fn begin_update(&mut self, casts: &mut Casts) -> Result<NextCast> {
        let next = casts.scales.next_cast(self.slot)?;
        match next {
            NextCast::Measured => self.amax = casts.amax_for(self.slot)?,
            // The weight is no longer cast by its own scale.
            NextCast::Known(_) | NextCast::Blocks(_) | NextCast::Later => self.frozen = FrozenScale::default(),
        }
        Ok(next)
    }

    /// What the update itself writes: the codes, or the amax for a cast after it.
    pub fn in_update<'a>(&'a mut self, next: &'a Option<NextCast>) -> Option<ops::WeightCast<'a>> {
        let scale = match next {
            Some(NextCast::Known(scale)) => Some(CastScale::Given(scale)),
            Some(NextCast::Blocks(how)) => Some(CastScale::Own(Granularity::Blocks128x128, *how)),
            Some(NextCast::Measured | NextCast::Later) | None => None,
        };
        match scale {
            Some(scale) => {
                let into = self.codes.as_mut().expect("weights are quantized before the first step");
                Some(ops::WeightCast::Codes { scale, slot: self.slot.index(), into })
            }
            None => self.amax.as_mut().map(ops::WeightCast::Amax),
        }
    }

    /// Casts updated weights whose scales depend on them.
    pub fn finish_update(&mut self, weights: &Weights, casts: &mut Casts) -> Result<()> {
        if let Some(amax) = self.amax.take() {
            self.frozen.replace(casts.own_scale(self.slot, amax)?)?;
        } else if !matches!(casts.scales.next_cast(self.slot)?, NextCast::Later) {
            return Ok(());
        }
        match &mut self.codes {
            Some(codes) => casts.quantize_into(self.slot, &self.frozen, &weights.value()?, codes),
            None => Ok(()),
        }
    }

    /// The copy of stored `codes` that dgrad reads, transposed now if only the copy of fprop is stored.
    pub fn for_backward(codes: &QuantizedTensor) -> Result<QuantizedTensor> {
        match codes.transposed {
            Some(_) => Ok(codes.clone()),
            None => Ok(transpose_codes(codes)?),
        }
    }

    /// Casts and measures `values` for fprop.
    pub fn cast_for_forward(&self, values: Values, casts: &mut Casts) -> Result<QuantizedTensor> {
        casts.quantize(self.slot, &self.frozen, values, CodeCopies::Rows)
    }

    /// New codes of `values` for dgrad.
    pub fn cast_for_backward(&self, values: Values, casts: &mut Casts) -> Result<QuantizedTensor> {
        casts.requantize(self.slot, &self.frozen, values, CodeCopies::Columns)
    }
}
