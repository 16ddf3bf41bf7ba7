//! The log-probabilities or rewards of records, and their losses.

use super::how::Preference;
use super::loss::log_probs;
use super::sums::{PreferenceSums, Sequences};
use crate::evaluate::round;
use crate::step::host::values;
use crate::step::{MicroBatch, token_losses};
use ottava_common::error::{Error, Result};
use ottava_data::{Batch, PreferenceKind, RecordKind, Records, RowLayout, RowTarget, Split, TokenDataset};
use ottava_models::Decoder;
use ottava_parallel::Partition;
use ottava_recipe::mode::{Pass, StepPrecision};
use ottava_tensor::comm::Axis;
use ottava_tensor::ops::{PreferenceLoss, PreferenceTargets, preference_loss};
use ottava_tensor::{Device, Tensor};
use std::sync::Arc;

/// The log-probabilities of a record, or its rewards: of its documents, and of its prompt with the completion of another record, if labels
/// need that.
pub(super) type OfRecord = Vec<f64>;

/// A pass over records.
#[derive(Clone, Copy)]
pub(super) struct PassOver {
    /// Records of a batch.
    pub per_batch: usize,
    /// An evaluation of the model, or of the reference model.
    pub pass: Pass,
    /// The precision of products.
    pub precision: StepPrecision,
}

/// The log-probabilities, or rewards, of the rows of `batches`, by this rank's batches; empty on ranks without the last stage. All ranks call it
/// with as many batches. `pass` is `Pass::Evaluation` or `Pass::Reference`.
pub fn row_log_probs(
    model: &mut Decoder,
    partition: &Partition,
    batches: &[&Batch],
    pass: Pass,
    precision: StepPrecision,
) -> Result<Vec<Vec<f64>>> {
    let place = partition.ranks().place(Axis::Context);
    let micro_batches = batches.iter().map(|batch| MicroBatch::new(batch, model.device(), place));
    let losses = token_losses(model, &micro_batches.collect::<Result<Vec<_>>>()?, pass, precision, partition)?;
    losses.iter().zip(batches).map(|(losses, batch)| values(&log_probs(model, losses, batch.rows)?)).collect()
}

/// The log-probabilities, or rewards, of `which` of `records`, in their order, on all ranks of `partition`. Each rank computes every one of its
/// turns of a batch.
pub(super) fn record_log_probs(
    model: &mut Decoder,
    partition: &Partition,
    records: &Records,
    which: &[usize],
    pass: PassOver,
) -> Result<Vec<OfRecord>> {
    let PassOver { per_batch, pass, precision } = pass;
    let ranks = partition.ranks();
    let (_, world) = ranks.rows();
    let mut found = Vec::with_capacity(which.len());
    for of_round in which.chunks(per_batch * world) {
        let turns: Vec<&[usize]> = of_round.chunks(per_batch).collect();
        let of_turns = round(ranks, &turns, 1, "evaluating preferences", |mine| {
            let batch = records.batch(mine[0])?;
            let rows: Vec<_> = std::iter::once(&batch.batch).chain(&batch.mismatched).collect();
            Ok(vec![row_log_probs(model, partition, &rows, pass, precision)?.concat()])
        })?;
        // Ranks that divide sequences have the same numbers.
        for (turn, of_rows) in turns.iter().zip(of_turns.iter().map(|of_turn| &of_turn[0])) {
            let documents: usize = turn.iter().map(|&record| records.documents(record).count()).sum();
            let (documents, mismatched) = of_rows.split_at(documents);
            for (i, documents) in documents.chunks_exact(documents.len() / turn.len()).enumerate() {
                found.push(documents.iter().chain(mismatched.get(i)).copied().collect());
            }
        }
    }
    Ok(found)
}

/// The margins of `which` of `records`, which a reward model has in the place of log-probabilities of a reference model.
pub(super) fn margins(records: &Records, which: &[usize]) -> Result<Vec<OfRecord>> {
    let of_record =
        |&record: &usize| records.documents(record).map(|document| records.margin(document).map(f64::from)).collect();
    which.iter().map(of_record).collect()
}

/// The sums over `which` of `records`, computed by the op of the loss from the log-probabilities by the trained model and by its reference.
/// Losses that compare all pairs of a batch take `per_batch` records, as training does.
///
/// Errors with [`Error::NonFinite`] when the loss is infinite or NaN.
pub(super) fn sums(
    how: &Preference,
    records: &Records,
    which: &[usize],
    policy: &[OfRecord],
    reference: &[OfRecord],
    per_batch: usize,
) -> Result<PreferenceSums> {
    let each = how.sequences();
    let own = |all: &[OfRecord]| all.iter().flat_map(|of_record| of_record[..each].to_vec()).collect::<Vec<_>>();
    let (policy_of, reference_of) = (own(policy), own(reference));
    let documents = || which.iter().flat_map(|&record| records.documents(record));
    let chosen = documents().map(|document| records.is_chosen(document)).collect::<Result<Vec<_>>>()?;
    let lengths = documents().map(|document| Ok(records.targets(document)? as f64)).collect::<Result<Vec<_>>>()?;
    let labels: Vec<f64> = chosen.iter().map(|chosen| f64::from(u8::from(*chosen))).collect();
    let apart = policy.iter().zip(reference).filter(|(policy, _)| policy.len() > each);
    let apart: f64 = apart.map(|(policy, reference)| policy[each] - reference[each]).sum();
    // No mismatched rows add up to -0.
    let kl = if apart > 0.0 { apart / which.len() as f64 } else { 0.0 };
    let tensor = |values: &[f64]| Tensor::from_slice(&Device::Cpu, &[values.len()], values);
    let one = tensor(&[1.0])?;
    let mut sums = PreferenceSums::default();
    for start in (0..policy_of.len()).step_by(per_batch * each) {
        let batch = start..policy_of.len().min(start + per_batch * each);
        let targets = PreferenceTargets {
            reference: tensor(&reference_of[batch.clone()])?,
            lengths: tensor(&lengths[batch.clone()])?,
            labels: tensor(&labels[batch.clone()])?,
            kl: tensor(&[kl])?,
        };
        let policy = tensor(&policy_of[batch.clone()])?;
        let (losses, _) = preference_loss(&how.terms, how.beta, &policy, &targets, &one, policy.len())?;
        let known = Sequences { chosen: &chosen[batch.clone()], lengths: &lengths[batch.clone()], kl };
        let values = [&losses.to_vec::<f64>()?, &policy_of[batch.clone()], &reference_of[batch]].concat();
        sums = sums.merge(PreferenceSums::of(how, &values, &known));
    }
    match sums.loss().is_finite() {
        true => Ok(sums),
        false => Err(Error::NonFinite(format!(
            "the loss of the preferences is {}: the model's weights or activations are not finite",
            sums.loss()
        ))),
    }
}

/// The sums over the pairs of `dataset` with the rewards of the reward model `model`, which pads rows of `layout` with the token `padding`,
/// in batches of `per_batch` pairs; and the number of pairs that are left out, since a sequence does not fit.
///
/// Errors with [`Error::Data`] when all are left out, or the data are no pairs.
pub fn evaluate_rewards(
    model: &mut Decoder,
    dataset: Arc<TokenDataset>,
    layout: RowLayout,
    padding: Option<i64>,
    per_batch: usize,
) -> Result<(PreferenceSums, usize)> {
    if dataset.meta().kind != RecordKind::Preferences(PreferenceKind::Pairs) {
        return Err(Error::Data(
            "the model is a reward model, which is evaluated on pairs of preferences (`chosen` and `rejected`), and the data are others".into(),
        ));
    }
    let split = Split::all_validation(dataset.records()).of_groups(PreferenceKind::Pairs.documents());
    let records = Records::validation(dataset, &split, layout, RowTarget::Reward { padding })?;
    let all: Vec<usize> = (0..records.len()).collect();
    if all.is_empty() {
        let text = format!("each pair has a sequence of more than {} tokens; raise --max-length", layout.seq_len);
        return Err(Error::Data(text));
    }
    let pass = PassOver { per_batch, pass: Pass::Evaluation, precision: StepPrecision::Recipe };
    let rewards = record_log_probs(model, &Partition::solo(), &records, &all, pass)?;
    let how = Preference::of(PreferenceLoss::BradleyTerry { centering: 0.0 }, 1.0);
    let margins = margins(&records, &all)?;
    Ok((sums(&how, &records, &all, &rewards, &margins, per_batch)?, records.left_out()))
}
