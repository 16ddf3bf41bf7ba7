//! Reward models: the scores of pairs of sequences.
//!
//! A reward model is a `DecoderConfig` with one label, whose `Head` has `HeadOutput::Scores`: the loss of a token is minus its score
//! (`negate_targets`), and only the last token of a row is a target (`RowTarget::Reward`). So the sum over a sequence is its reward, and all that
//! holds for preferences applies, with margins in the place of the reference. `reward_model` (`models/lib.rs`) makes the `config.json` of a reward
//! model from the file of a language model, and `AdaptedWeights` draws the new head. `language_model_config` refuses reward models for the engine,
//! export and conversion.
//!
//! `evaluate_rewards` (`preference/evaluation.rs`) evaluates records for `ottava eval`.

use super::preference::{Preference, PreferenceRows, Reference, ReferenceModel};
use super::{Objective, Opening, Rows};
use crate::phase::Passes;
use crate::step::Loss;
use ottava_common::error::Result;
use ottava_data::RowTarget;
use ottava_models::pad_token;
use ottava_settings::RunConfig;
use ottava_tensor::{DType, Device};

/// A reward model, trained on pairs with margins in the place of a reference model.
pub(super) struct Reward(Preference);

impl Reward {
    /// Rewards are scores as they are, so their factor is 1.
    pub(super) fn new(config: &RunConfig) -> Reward {
        Reward(Preference { terms: config.preference.terms(), beta: 1.0 })
    }
}

impl Objective for Reward {
    fn loss(&self, rows: usize, device: &Device, dtype: DType) -> Result<Box<dyn Loss>> {
        self.0.of_micro_batch(rows, device, dtype)
    }

    fn passes(&self, config: &RunConfig) -> Vec<Passes> {
        ReferenceModel::Absent.passes(config, 1)
    }

    fn open(&self, opening: &Opening) -> Result<Box<dyn Rows>> {
        let target = RowTarget::Reward { padding: pad_token(opening.model)? };
        Ok(Box::new(PreferenceRows::open(opening, self.0.clone(), target, Reference::Margins)?))
    }
}
