//! DPO and its relatives: pairs of completions relative to a reference model.

use super::preference::{Preference, PreferenceRows, ReferenceModel};
use super::{Objective, Opening, Rows};
use crate::phase::Passes;
use crate::step::Loss;
use ottava_common::error::Result;
use ottava_data::RowTarget;
use ottava_settings::RunConfig;
use ottava_tensor::{DType, Device};

/// Pairs of a chosen and a rejected completion.
pub(super) struct Pairs {
    how: Preference,
    reference: ReferenceModel,
}

impl Pairs {
    pub(super) fn new(config: &RunConfig) -> Pairs {
        let how = Preference { terms: config.preference.terms(), beta: config.preference.beta };
        Pairs { how, reference: ReferenceModel::of(config) }
    }
}

impl Objective for Pairs {
    fn loss(&self, rows: usize, device: &Device, dtype: DType) -> Result<Box<dyn Loss>> {
        self.how.of_micro_batch(rows, device, dtype)
    }

    fn passes(&self, config: &RunConfig) -> Vec<Passes> {
        self.reference.passes(config, 1)
    }

    fn open(&self, opening: &Opening) -> Result<Box<dyn Rows>> {
        let reference = self.reference.values(&opening.data.key());
        Ok(Box::new(PreferenceRows::open(opening, self.how.clone(), RowTarget::Completion, reference)?))
    }
}
