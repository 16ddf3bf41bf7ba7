//! KTO and its relatives: completions with labels relative to a reference model.

use super::preference::{Preference, PreferenceRows, ReferenceModel};
use super::{Objective, Opening, Rows};
use crate::phase::{Passes, Phase};
use crate::step::Loss;
use ottava_common::error::Result;
use ottava_data::RowTarget;
use ottava_recipe::mode::Pass;
use ottava_settings::RunConfig;
use ottava_tensor::{DType, Device};

/// Completions that are desirable or not.
pub(super) struct Labels {
    how: Preference,
    reference: ReferenceModel,
}

impl Labels {
    pub(super) fn new(config: &RunConfig) -> Labels {
        let how = Preference { terms: config.preference.terms(), beta: config.preference.beta };
        Labels { how, reference: ReferenceModel::of(config) }
    }
}

impl Objective for Labels {
    fn loss(&self, rows: usize, device: &Device, dtype: DType) -> Result<Box<dyn Loss>> {
        self.how.of_micro_batch(rows, device, dtype)
    }

    /// If the divergence from the reference model is estimated, evaluations have the completions of other prompts too, and so have passes before each
    /// step.
    fn passes(&self, config: &RunConfig) -> Vec<Passes> {
        if !self.how.needs_divergence() {
            return self.reference.passes(config, 1);
        }
        let (micro_batches, rows) = (config.training.gradient_accumulation_steps, config.micro_batch_rows());
        let mismatched = |pass| Passes { phase: Phase::Rows, pass, micro_batches, rows };
        let reference = (self.reference == ReferenceModel::BeforeEachStep).then(|| mismatched(Pass::Reference));
        let mut passes = self.reference.passes(config, 2);
        passes.push(mismatched(Pass::Evaluation));
        passes.extend(reference);
        passes
    }

    fn open(&self, opening: &Opening) -> Result<Box<dyn Rows>> {
        let reference = self.reference.values(&opening.data.key());
        Ok(Box::new(PreferenceRows::open(opening, self.how.clone(), RowTarget::Completion, reference)?))
    }
}
