//! What a run optimises. An [`Objective`] follows from the settings alone: the loss of its steps, and the passes that it runs beside them. With the
//! data it opens [`Rows`], which load each step and evaluate. [`of`] is the only place that chooses between objectives.
//!
//! An objective has two parts: a `Loss`, which knows no data, and `Rows`, which may use the model.
//!
//! - A `Loss` (`step/loss.rs`) is a value in each `MicroBatch`. The action `Loss` runs its `losses_and_gradient`. A loss says how many losses there
//!   are and how many count, stores its values, adds them up over micro-batches and ranks, and makes `Metrics` of the sums. A loss owns the tensors
//!   that it reads besides token ids; an objective writes these tensors between steps (`TrainStep::loss_mut`), so a captured step only reads
//!   tensors that the host has written before. `NextTokenLoss` is the smallest loss.
//! - An `Objective` makes the losses of a step, which `Run::new` gives to `TrainStep`, and lists the passes without gradients beside the steps
//!   (`Passes`), which the plan rehearses in their phases (`phase.rs`), and runs another model beside the trained one if it has one
//!   (`Objective::run_other_models`). With the data it opens `Rows`, the only part with a state. The trainer sees only `Rows`. They get the
//!   model and the step when they load, so they may make the rows of a step themselves, or run other passes first. They may report metrics with the
//!   rows (`LoadedRows`), which observers of the trainer see.
//!
//! `ObjectiveKind::properties` (`settings/objective/mod.rs`) holds what settings and plans need before an objective is built, such as the rows of an
//! example. All evaluations run in rounds (`round` in `evaluate.rs`), which divide turns among ranks, gather their numbers and agree on stops.
//!
//! To add an objective, such as GRPO: a file in this folder with its `Objective`, `Rows` and `Loss`; the choice in `of`; its kind and properties in
//! `settings/objective/mod.rs`; its settings. The test `tests/promises/objectives/bandit.rs` of this crate has a policy-gradient objective whose rows the model
//! samples.

pub mod classification;
mod contract;
pub mod distillation;
pub mod embedding;
mod frozen;
mod kto;
mod next_token;
mod pairs;
pub mod preference;
mod reward;
pub mod rollout;
mod validation;

pub use contract::{LoadedRows, Objective, Opening, Rows};
pub use frozen::FrozenModel;
pub use validation::{ComparedMetric, Evaluation, Validation, metric_of_task};

use classification::Classification;
use embedding::Embedding;
use kto::Labels;
use next_token::NextToken;
use ottava_settings::{ObjectiveKind, RunConfig};
use pairs::Pairs;
use reward::Reward;
use rollout::Reinforcement;

/// The objective of the run of `config`, once its data are resolved.
pub fn of(config: &RunConfig) -> Box<dyn Objective> {
    match config.objective() {
        ObjectiveKind::NextToken => Box::new(NextToken),
        ObjectiveKind::Pairs => Box::new(Pairs::new(config)),
        ObjectiveKind::Labels => Box::new(Labels::new(config)),
        ObjectiveKind::Reward => Box::new(Reward::new(config)),
        ObjectiveKind::Reinforcement => Box::new(Reinforcement::new(config)),
        ObjectiveKind::Distillation => distillation::of(config),
        ObjectiveKind::Classification => Box::new(Classification::new(config)),
        ObjectiveKind::Embedding => Box::new(Embedding::new(config)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::phase::{Passes, Phase};
    use ottava_recipe::mode::Pass::{Evaluation, Reference};
    use ottava_settings::{LossType, RunConfig};

    #[test]
    fn each_objective_lists_its_passes() {
        let passes = |loss: Option<LossType>, precompute: Option<bool>, validates: bool| {
            let mut config = RunConfig::default();
            (config.preference.loss_type, config.preference.precompute_ref_log_probs) =
                (loss.map(Into::into), precompute);
            config.data.val_set_size = if validates { 4.0 } else { 0.0 };
            (config.training.per_device_train_batch_size, config.training.gradient_accumulation_steps) = (2, 3);
            let of_run = of(&config).passes(&config);
            of_run
                .into_iter()
                .map(|Passes { phase, pass, micro_batches, rows }| (phase, pass, micro_batches, rows))
                .collect()
        };
        let held_out = |pass, micro_batches, rows| (Phase::Evaluation, pass, micro_batches, rows);
        let (dpo, kto) = (Some(LossType::Sigmoid), Some(LossType::Kto));
        let cases: [(Vec<_>, &[_]); 11] = [
            (passes(None, None, false), &[]),
            (passes(None, None, true), &[held_out(Evaluation, 1, 2)]),
            (passes(dpo, Some(true), true), &[held_out(Evaluation, 1, 4), (Phase::Reference, Evaluation, 1, 4)]),
            (passes(dpo, Some(false), false), &[(Phase::Rows, Reference, 3, 4)]),
            (
                passes(dpo, Some(false), true),
                &[held_out(Evaluation, 1, 4), (Phase::Rows, Reference, 3, 4), held_out(Reference, 1, 4)],
            ),
            (passes(kto, Some(true), false), &[(Phase::Reference, Evaluation, 2, 2), (Phase::Rows, Evaluation, 3, 2)]),
            (
                passes(kto, Some(false), false),
                &[(Phase::Rows, Reference, 3, 2), (Phase::Rows, Evaluation, 3, 2), (Phase::Rows, Reference, 3, 2)],
            ),
            (passes(Some(LossType::ApoZeroUnpaired), Some(true), false), &[(Phase::Reference, Evaluation, 1, 2)]),
            (passes(Some(LossType::BradleyTerry), None, true), &[held_out(Evaluation, 1, 4)]),
            (passes(Some(LossType::Simpo), Some(true), false), &[]),
            (passes(Some(LossType::Orpo), Some(false), true), &[held_out(Evaluation, 1, 4)]),
        ];
        for (i, (found, expected)) in cases.iter().enumerate() {
            assert_eq!(found, expected, "case {i}");
        }
    }
}
