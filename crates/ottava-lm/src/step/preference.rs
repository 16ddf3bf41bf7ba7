//! Steps of preference tuning: losses of pairs of sequences, or of sequences with labels, relative to a reference model.

use super::{MicroBatch, Program, ProgramInputs, TrainStep};
use crate::data::{Batch, PreferenceBatch};
use crate::error::Result;
use crate::mode::{Pass, StepPrecision};
use crate::models::Decoder;
use crate::parallel::{Schedule, Shared};
use crate::param::Units;
use ottava_tensor::ops::{
    IGNORE_INDEX, PreferenceLoss, PreferenceTargets, cast, preference_loss, real_type, sequence_log_probs,
};
use ottava_tensor::{DType, Device, Tensor};

/// A loss of preferences and its constant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Preference {
    /// The loss.
    pub loss: PreferenceLoss,
    /// The factor of log-probabilities relative to the reference model, the reward.
    pub beta: f64,
}

/// What the loss of preferences reads of a micro-batch whose sequences each have one row.
pub struct MicroBatchPreference {
    /// The loss.
    pub how: Preference,
    /// What is known of the sequences before forward.
    pub targets: PreferenceTargets,
    /// Whether each sequence is chosen, or desirable.
    pub chosen: Vec<bool>,
}

impl MicroBatchPreference {
    /// Room for `sequences` on `device`, in the type of sums of `compute`. Sequences are chosen and rejected in turns.
    pub fn new(how: Preference, sequences: usize, device: &Device, compute: DType) -> Result<MicroBatchPreference> {
        let tensor = |len, value: f64| from_host(&vec![value; len], device, real_type(compute));
        let targets = PreferenceTargets {
            reference: tensor(sequences, 0.0)?,
            lengths: tensor(sequences, 1.0)?,
            labels: tensor(sequences, 0.0)?,
            kl: tensor(1, 0.0)?,
        };
        Ok(MicroBatchPreference { how, targets, chosen: (0..sequences).map(|s| s % 2 == 0).collect() })
    }

    /// Sequences.
    pub fn sequences(&self) -> usize {
        self.chosen.len()
    }

    /// The losses of all sequences, their log-probabilities and those of the reference, `[3 · S]`, from the `targets` of tokens and the
    /// result `normed` of forward; and the gradient by that of `scale · Σ losses`, with `scale` `[1]` on the device.
    ///
    /// Computes all logits twice: the factor of a token's gradient is known only after the losses of all tokens of its sequence, and logits
    /// of whole sequences take too much memory to be kept.
    pub fn losses_and_gradient(
        &self,
        model: &mut Decoder,
        normed: &Tensor,
        targets: &Tensor,
        scale: &Tensor,
        units: &mut dyn Units,
    ) -> Result<(Tensor, Tensor)> {
        let sequences = self.sequences();
        let policy = sequence_log_probs(&model.losses(normed, targets, units)?, sequences)?;
        let Preference { loss, beta } = self.how;
        let (losses, factors) = preference_loss(loss, beta, &policy, &self.targets, scale, targets.len())?;
        let (_, dnormed) = model.losses_and_gradient(normed, targets, &factors, units)?;
        let mut all = Tensor::empty(losses.device(), &[3 * sequences], losses.dtype())?;
        for (i, part) in [&losses, &policy, &self.targets.reference].into_iter().enumerate() {
            all.copy_from(i * sequences, part)?;
        }
        Ok((all, dnormed))
    }
}

fn from_host(values: &[f64], device: &Device, dtype: DType) -> Result<Tensor> {
    Ok(cast(&Tensor::from_slice(&Device::Cpu, &[values.len()], values)?, dtype)?.to_device(device)?)
}

fn values(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(cast(&tensor.to_device(&Device::Cpu)?, DType::F64)?.to_vec()?)
}

/// Overwrites `tensor` with `values`.
fn write(tensor: &mut Tensor, values: &[f64]) -> Result<()> {
    Ok(tensor.write_bytes(&from_host(values, &Device::Cpu, tensor.dtype())?.read_bytes()?)?)
}

/// Sums over sequences, from which the metrics are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PreferenceSums {
    /// Losses, and their number: pairs, or sequences with labels.
    pub losses: [f64; 2],
    /// Chosen and rejected sequences.
    pub sequences: [f64; 2],
    /// Rewards of chosen and of rejected sequences.
    pub rewards: [f64; 2],
    /// Log-probabilities of chosen and of rejected sequences.
    pub log_probs: [f64; 2],
    /// Pairs whose chosen sequence has the higher reward, and all pairs.
    pub pairs: [f64; 2],
}

impl PreferenceSums {
    /// The sums over sequences of which those that are `chosen` are known, from `values` as [`MicroBatchPreference`] returns them.
    pub fn of(how: Preference, values: &[f64], chosen: &[bool]) -> PreferenceSums {
        let (losses, rest) = values.split_at(chosen.len());
        let (policy, reference) = rest.split_at(chosen.len());
        let each = how.loss.sequences();
        let reward = |s: usize| how.beta * (policy[s] - reference[s]);
        let mut sums = PreferenceSums { losses: [0.0, (chosen.len() / each) as f64], ..PreferenceSums::default() };
        for (s, is_chosen) in chosen.iter().enumerate() {
            let side = usize::from(!is_chosen);
            sums.losses[0] += losses[s];
            sums.sequences[side] += 1.0;
            sums.rewards[side] += reward(s);
            sums.log_probs[side] += policy[s];
            if each == 2 && *is_chosen {
                sums.pairs[0] += f64::from(reward(s) > reward(s + 1));
                sums.pairs[1] += 1.0;
            }
        }
        sums
    }

    /// All numbers, for [`PreferenceSums::from_numbers`].
    pub fn numbers(&self) -> Vec<f64> {
        [self.losses, self.sequences, self.rewards, self.log_probs, self.pairs].concat()
    }

    /// The sums with these numbers; zeros where they are missing.
    pub fn from_numbers(numbers: &[f64]) -> PreferenceSums {
        let pair = |i: usize| [2 * i, 2 * i + 1].map(|i| numbers.get(i).copied().unwrap_or_default());
        let [losses, sequences, rewards, log_probs, pairs] = [0, 1, 2, 3, 4].map(pair);
        PreferenceSums { losses, sequences, rewards, log_probs, pairs }
    }

    /// The sums over the sequences of both.
    pub fn merge(self, other: PreferenceSums) -> PreferenceSums {
        let sums: Vec<f64> = self.numbers().into_iter().zip(other.numbers()).map(|(a, b)| a + b).collect();
        PreferenceSums::from_numbers(&sums)
    }

    /// The mean loss.
    pub fn loss(&self) -> f64 {
        self.losses[0] / self.losses[1]
    }

    /// The metrics by TRL's names, without those of sequences that there are none of.
    pub fn metrics(&self) -> Vec<(&'static str, f64)> {
        let mean = |sums: [f64; 2], side: usize| sums[side] / self.sequences[side];
        let of_rewards = [0, 1].map(|side| mean(self.rewards, side));
        let all = [
            ("rewards/chosen", of_rewards[0]),
            ("rewards/rejected", of_rewards[1]),
            ("rewards/accuracies", self.pairs[0] / self.pairs[1]),
            ("rewards/margins", of_rewards[0] - of_rewards[1]),
            ("logps/chosen", mean(self.log_probs, 0)),
            ("logps/rejected", mean(self.log_probs, 1)),
        ];
        all.into_iter().filter(|(_, value)| value.is_finite()).collect()
    }
}

impl TrainStep {
    /// The same steps, for sequences of which each has a row and whose loss is that of preferences.
    pub fn with_preference(mut self, how: Preference) -> Result<TrainStep> {
        let losses = &self.results.losses;
        let (device, dtype) = (losses.device().clone(), losses.dtype());
        let mut sequences = 0;
        for MicroBatch { sequences: rows, preference, .. } in &mut self.micro_batches {
            sequences = rows.batch;
            *preference = Some(MicroBatchPreference::new(how, sequences, &device, dtype)?);
        }
        let micro_batches = self.micro_batches.len();
        self.results.losses = Tensor::empty(&device, &[micro_batches, 3 * sequences], dtype)?;
        self.units_per_micro_batch = sequences / how.loss.sequences();
        self.targets = vec![self.units_per_micro_batch; micro_batches];
        self.loss_scale.set(self.loss_scale.value, self.units())?;
        Ok(self)
    }

    /// Loads a micro-batch of preferences, with the log-probabilities of its sequences by the `reference` model if they are known.
    pub fn load_preferences(
        &mut self,
        micro_batch: usize,
        batch: &PreferenceBatch,
        reference: Option<&[f64]>,
    ) -> Result<()> {
        self.load(micro_batch, &batch.batch)?;
        let units = self.units_per_micro_batch;
        let preference = self.preference_mut(micro_batch);
        let label = |chosen: &bool| f64::from(u8::from(*chosen));
        write(&mut preference.targets.labels, &batch.chosen.iter().map(label).collect::<Vec<_>>())?;
        let rows = batch.batch.targets.chunks_exact(batch.batch.seq_len);
        let lengths = rows.map(|row| row.iter().filter(|&&target| target != IGNORE_INDEX).count().max(1) as f64);
        write(&mut preference.targets.lengths, &lengths.collect::<Vec<_>>())?;
        if let Some(reference) = reference {
            write(&mut preference.targets.reference, reference)?;
        }
        preference.chosen.clone_from(&batch.chosen);
        // Every pair counts, whatever the number of its tokens.
        self.targets[micro_batch] = units;
        Ok(())
    }

    /// Sets the estimate of the divergence from the reference model of a loaded micro-batch.
    pub fn set_kl(&mut self, micro_batch: usize, kl: f64) -> Result<()> {
        write(&mut self.preference_mut(micro_batch).targets.kl, &[kl])
    }

    /// Computes the log-probabilities of all loaded sequences by the model without its adapters, which are its reference. All ranks call it.
    pub fn compute_reference(&mut self, model: &mut Decoder, precision: StepPrecision) -> Result<()> {
        let TrainStep { schedule, micro_batches, partition, .. } = self;
        let inputs = ProgramInputs { micro_batches, loss_scale: None, precision, partition };
        let program = Program::reference_of(schedule, partition.ranks().pipeline().rank());
        // Ranks without the last stage have no losses, and do not need them.
        for (losses, micro_batch) in program.run(model, &inputs, None)?.into_iter().zip(micro_batches) {
            let preference = micro_batch.preference.as_mut().expect(OF_PREFERENCES);
            let log_probs = sequence_log_probs(&losses, preference.sequences())?;
            preference.targets.reference.copy_from(0, &log_probs)?;
        }
        partition.ranks().compare_gpu_calls("a pass of the reference model")
    }

    /// The log-probabilities of the rows of `batches`, by this rank's batches; empty on ranks without the last stage. All ranks call it with
    /// as many batches. `pass` is an evaluation, or that of the reference model.
    pub fn log_probs(
        &self,
        model: &mut Decoder,
        batches: &[&Batch],
        pass: Pass,
        precision: StepPrecision,
    ) -> Result<Vec<Vec<f64>>> {
        let schedule = Schedule { micro_batches: batches.len(), ..self.schedule };
        let program = Program { pass, ..Program::evaluation_of(&schedule, self.partition.ranks().pipeline().rank()) };
        let place = self.partition.ranks().sequence_place();
        let micro_batches = batches.iter().map(|batch| MicroBatch::new(batch, model.device(), place));
        let micro_batches = &micro_batches.collect::<Result<Vec<_>>>()?;
        let inputs = ProgramInputs { micro_batches, loss_scale: None, precision, partition: &self.partition };
        let losses = program.run(model, &inputs, None)?;
        self.partition.ranks().compare_gpu_calls("log-probabilities of sequences")?;
        let sums = losses.iter().zip(batches).map(|(losses, batch)| values(&sequence_log_probs(losses, batch.rows)?));
        sums.collect()
    }

    /// The sums over the sequences of this rank's step, if its loss is that of preferences.
    pub(super) fn preference_sums(&self) -> Result<Option<PreferenceSums>> {
        let of_micro_batches = self.micro_batches.iter().map(|micro_batch| micro_batch.preference.as_ref());
        let Some(preferences) = of_micro_batches.collect::<Option<Vec<_>>>() else { return Ok(None) };
        let all = values(&self.results.losses)?;
        let sums = preferences.iter().zip(all.chunks_exact(all.len() / preferences.len()));
        let sums = sums.map(|(preference, values)| PreferenceSums::of(preference.how, values, &preference.chosen));
        Ok(Some(sums.fold(PreferenceSums::default(), PreferenceSums::merge)))
    }

    /// The pairs or sequences with labels that all ranks have in a step.
    pub fn losses_per_step(&self) -> usize {
        self.units()
    }

    /// The ranks that have other sequences, and this rank's place among them.
    pub fn sequence_ranks(&self) -> (usize, usize) {
        let sharing = self.partition.ranks().sharing(Shared::Tokens);
        (sharing.rank(), sharing.size())
    }

    fn preference_mut(&mut self, micro_batch: usize) -> &mut MicroBatchPreference {
        self.micro_batches[micro_batch].preference.as_mut().expect(OF_PREFERENCES)
    }
}

/// Why a micro-batch has what the loss of preferences reads.
const OF_PREFERENCES: &str = "the step was made for preferences";
