//! The loss of sampled completions in a step.

use super::packing::{PackedBatch, Place, SampleRows, documents_of_row};
use super::policy::{Policy, factors};
use super::sample::Sample;
use super::sums::{KnownToken, Sums, ValueSums};
use crate::objective::FrozenModel;
use crate::step::host::{from_host, values, write};
use crate::step::{Loaded, Loss, Metrics, TrainStep};
use ottava_common::error::{Error, Result};
use ottava_data::RowShare;
use ottava_models::Decoder;
use ottava_recipe::param::Units;
use ottava_settings::Aggregation;
use ottava_tensor::ops::{
    EntropyBonus, PolicyBound, PolicyTargets, ValueTargets, add, entropy_gradient, policy_loss, value_loss,
};
use ottava_tensor::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};
use std::rc::Rc;

/// A sample and what is known of it before its step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Scored {
    /// The sample.
    pub sample: Sample,
    /// The log-probabilities of its tokens as steps compute them with the weights that drew it, if draws are corrected.
    pub old: Option<Vec<f32>>,
    /// The advantages of its tokens.
    pub advantages: Vec<f64>,
    /// What is known of the values of its tokens, if values give the advantages.
    pub estimates: Option<Estimates>,
    /// Whether its tokens count in the loss.
    pub counts: bool,
}

/// What is known of the values of the tokens of a sample before its step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Estimates {
    /// The values by the value head with the weights that drew the tokens.
    pub values: Vec<f64>,
    /// The returns.
    pub returns: Vec<f64>,
}

/// The frozen models of a run.
#[derive(Default)]
pub struct OtherModels {
    /// The reference model, unless it is the trained model without its adapters, or there is none.
    pub(super) reference: Option<FrozenModel>,
    /// The reward models, in the order of the settings.
    pub(super) rewards: Vec<FrozenModel>,
}

/// The loss of a micro-batch of samples.
pub struct PolicyMicroBatch {
    how: Policy,
    others: Rc<OtherModels>,
    known: PolicyTargets,
    /// The values of the tokens at their draws, and their returns, if the model has a value head.
    estimates: Option<[Tensor; 2]>,
    /// Rows, as many as samples if no row is shared.
    rows: usize,
    counted: usize,
    /// What is known of the tokens, for metrics.
    tokens: Vec<KnownToken>,
}

/// The values of the tokens of a micro-batch after a step.
#[derive(Clone, Copy)]
struct TokenValues<'a> {
    /// The losses of the policy, without the entropy.
    bounded: &'a [f64],
    /// Minus the log-probabilities.
    losses: &'a [f64],
    entropies: Option<&'a [f64]>,
    /// The losses of the values.
    of_values: Option<&'a [f64]>,
}

impl PolicyMicroBatch {
    /// Room on `device` for `rows` rows of `tokens` tokens, each with at most [`documents_of_row`] documents, in the type of sums `dtype`.
    pub fn new(
        how: Policy,
        others: Rc<OtherModels>,
        rows: usize,
        tokens: usize,
        device: &Device,
        dtype: DType,
    ) -> Result<PolicyMicroBatch> {
        let tensor = |value: f64| from_host(&vec![value; rows * tokens], device, dtype);
        let known = PolicyTargets {
            old: tensor(0.0)?,
            reference: tensor(0.0)?,
            advantages: tensor(0.0)?,
            corrections: tensor(1.0)?,
            weights: tensor(1.0)?,
            sequences: Tensor::zeros(device, &[rows * documents_of_row(tokens) + 1], DType::I32)?,
        };
        let estimates = how.value.map(|_| Ok::<_, Error>([tensor(0.0)?, tensor(0.0)?])).transpose()?;
        Ok(PolicyMicroBatch { how, others, known, estimates, rows, counted: 0, tokens: Vec::new() })
    }

    /// Loads the micro-batches of this rank for the next step. All ranks call it with the same samples, which become `rows`.
    pub fn load_step(step: &mut TrainStep, rows: SampleRows, scored: &[Scored], share: RowShare) -> Result<()> {
        let samples: Vec<&Sample> = scored.iter().map(|scored| &scored.sample).collect();
        let packed = rows.pack(&samples, share);
        step.use_micro_batches(packed.len());
        for (micro_batch, packed) in packed.iter().enumerate() {
            step.loss_mut::<PolicyMicroBatch>(micro_batch).load(scored, packed)?;
            step.load(micro_batch, &packed.batch)?;
        }
        Ok(())
    }

    /// Loads what is known of `samples`, which are in the micro-batch `packed`; before the step loads its tokens.
    pub fn load(&mut self, samples: &[Scored], packed: &PackedBatch) -> Result<()> {
        let all = self.known.old.len();
        let [mut old, mut advantages, mut weights, mut values, mut returns] = [(); 5].map(|()| vec![0.0; all]);
        let mut corrections = vec![1.0; all];
        self.tokens.clear();
        for &Place { sample: number, start } in &packed.places {
            let Scored { sample, old: of_steps, advantages: of_tokens, estimates, counts } = &samples[number];
            let weight = if *counts { self.how.aggregation.weight(sample.drawn()) } else { 0.0 };
            let drawn: Vec<f64> = sample.logprobs.iter().map(|&logprob| f64::from(logprob)).collect();
            let (before, factors) = match (self.how.correction_by_pass, of_steps) {
                (Some(how), Some(old)) => {
                    let old: Vec<f64> = old.iter().map(|&old| f64::from(old)).collect();
                    let factors = factors(&how, &old, &drawn);
                    (old, factors)
                }
                _ => (drawn.clone(), vec![1.0; drawn.len()]),
            };
            for (i, at) in sample.predictions().enumerate() {
                let at = start + at;
                (old[at], corrections[at]) = (before[i], factors[i]);
                (advantages[at], weights[at]) = (of_tokens[i], weight);
                (values[at], returns[at]) = estimates.as_ref().map_or((0.0, 0.0), |of| (of.values[i], of.returns[i]));
                if *counts {
                    let (drawn, old, correction) = (drawn[i], before[i], factors[i]);
                    let (reference, advantage, value, returns) = (0.0, of_tokens[i], values[at], returns[at]);
                    let sample = number;
                    self.tokens.push(KnownToken {
                        at,
                        sample,
                        drawn,
                        old,
                        reference,
                        advantage,
                        correction,
                        weight,
                        value,
                        returns,
                    });
                }
            }
        }
        self.counted = match self.how.aggregation {
            Aggregation::Tokens => self.tokens.len(),
            // A sequence whose tokens do not count is a zero in the mean, as in TRL.
            Aggregation::Sequences | Aggregation::Constant(_) => packed.places.len(),
        };
        self.known.sequences.write_bytes(bytemuck::cast_slice(&self.offsets(packed)))?;
        if let Some([of_draws, known]) = &mut self.estimates {
            write(of_draws, &values)?;
            write(known, &returns)?;
        }
        write(&mut self.known.old, &old)?;
        write(&mut self.known.corrections, &corrections)?;
        write(&mut self.known.advantages, &advantages)?;
        write(&mut self.known.weights, &weights)
    }

    /// The offsets at which the documents of `packed` begin, and for each possible further document the number of all tokens.
    fn offsets(&self, packed: &PackedBatch) -> Vec<i32> {
        let lengths = packed.batch.documents.iter().flatten();
        let ends = lengths.scan(0, |end, length| {
            *end += *length as i32;
            Some(*end)
        });
        let rest = std::iter::repeat(self.known.old.len() as i32);
        [0].into_iter().chain(ends).chain(rest).take(self.known.sequences.len()).collect()
    }

    /// The frozen models of the run.
    pub(super) fn others(&self) -> &Rc<OtherModels> {
        &self.others
    }

    /// Sets the log-probabilities by the reference model, if the loss has one, by a pass over the `loaded` rows.
    pub(super) fn read_reference(&mut self, loaded: Loaded) -> Result<()> {
        let Some(reference) = &self.others.reference else { return Ok(()) };
        let losses = reference.losses(loaded.inputs, loaded.targets, loaded.sequences)?;
        self.set_reference(&losses)
    }

    /// Sets the log-probabilities by the reference model, from its losses `[T]` of the tokens of the micro-batch.
    pub(super) fn set_reference(&mut self, losses: &Tensor) -> Result<()> {
        let reference: Vec<f64> = values(losses)?.into_iter().map(|loss| -loss).collect();
        self.tokens.iter_mut().for_each(|token| token.reference = reference[token.at]);
        write(&mut self.known.reference, &reference)
    }

    /// The number of values of a token: the loss of the policy, minus the log-probability and, if the loss has them, the entropy and the loss of the value.
    fn values_of_token(&self) -> usize {
        2 + usize::from(self.how.entropy_coef > 0.0) + usize::from(self.how.value.is_some())
    }

    /// The losses of the values of the tokens, if the model has a value head. Adds their gradient to `dnormed`, the gradient by `normed`.
    fn value_losses(
        &self,
        model: &mut Decoder,
        normed: &Tensor,
        targets: &Tensor,
        scale: &Tensor,
        dnormed: &mut Tensor,
    ) -> Result<Option<Tensor>> {
        let (Some(how), Some([old, returns])) = (&self.how.value, &self.estimates) else { return Ok(None) };
        let known = ValueTargets { old, returns, weights: &self.known.weights };
        let (losses, gradient) = value_loss(how, &model.values(normed)?, targets, known, scale)?;
        *dnormed = add(dnormed, &model.value_gradient(normed, &gradient)?)?;
        Ok(Some(losses))
    }

    /// Returns what is known of the tokens after a step with these `losses` of all places. If the step corrects, it also knows old log-probabilities and
    /// factors.
    fn known_tokens(&self, losses: &[f64]) -> Vec<KnownToken> {
        let mut tokens = self.tokens.clone();
        if let Some(how) = &self.how.loss.correction {
            for of_sample in tokens.chunk_by_mut(|a, b| a.sample == b.sample) {
                let old: Vec<f64> = of_sample.iter().map(|token| -losses[token.at]).collect();
                let drawn: Vec<f64> = of_sample.iter().map(|token| token.drawn).collect();
                for ((token, factor), old) in of_sample.iter_mut().zip(factors(how, &old, &drawn)).zip(&old) {
                    (token.old, token.correction) = (*old, factor);
                }
            }
        }
        tokens
    }

    /// The sums of metrics of a micro-batch whose tokens have these values.
    fn sums(&self, values: &TokenValues) -> Vec<f64> {
        let [low, high] = match self.how.loss.bound {
            PolicyBound::Clip { low, high, .. } | PolicyBound::Weight { low, high } => [low, high],
            PolicyBound::None => [f64::INFINITY; 2],
        };
        let TokenValues { bounded, losses, entropies, of_values } = *values;
        let mut sums = Sums { losses: bounded.iter().sum(), ..Sums::default() };
        if let (Some(how), Some(of_values)) = (&self.how.value, of_values) {
            sums.value = ValueSums::of(of_values, &self.tokens);
            sums.losses += how.coefficient * sums.value.losses;
        }
        for KnownToken { at, drawn, old, reference, advantage, correction, weight, .. } in &self.known_tokens(losses) {
            let (lp, entropy) = (-losses[*at], entropies.map(|entropies| entropies[*at]));
            let (apart, w) = ((lp - drawn).abs(), (lp - old).exp());
            let d = (reference - lp).clamp(-20.0, 20.0);
            sums.tokens += 1.0;
            sums.losses -= entropy.map_or(0.0, |entropy| self.how.entropy_coef * weight * entropy);
            sums.entropy += entropy.unwrap_or(-drawn);
            sums.correction += correction;
            sums.kl += d.exp() - 1.0 - d;
            sums.clipped_low += f64::from(w < 1.0 - low && *advantage < 0.0);
            sums.clipped_high += f64::from(w > 1.0 + high && *advantage > 0.0);
            sums.difference += apart;
            sums.largest_difference = sums.largest_difference.max(apart);
            sums.mult_error += apart.exp();
        }
        sums.numbers()
    }
}

impl Loss for PolicyMicroBatch {
    fn units(&self, tokens: usize) -> usize {
        match self.how.aggregation {
            Aggregation::Tokens => tokens,
            Aggregation::Sequences | Aggregation::Constant(_) => self.rows,
        }
    }

    fn counted(&self, _: &[i32]) -> usize {
        self.counted
    }

    fn values(&self, tokens: usize) -> usize {
        self.values_of_token() * tokens
    }

    /// Computes all logits twice, as the losses of preferences do. The second time, the entropy of each token is known.
    fn losses_and_gradient(
        &self,
        model: &mut Decoder,
        normed: &Tensor,
        targets: &Tensor,
        scale: &Tensor,
        units: &mut dyn Units,
    ) -> Result<(Tensor, Tensor)> {
        let losses = model.losses(normed, targets, units)?;
        let (bounded, factors) = policy_loss(&self.how.loss, &losses, targets, &self.known, scale)?;
        let (entropies, mut dnormed) = match self.how.entropy_coef {
            0.0 => (None, model.losses_and_gradient(normed, targets, &factors, units)?.1),
            coefficient => {
                let (vocabulary, weights) = (model.config().vocabulary, &self.known.weights);
                let of_chunk = &mut |logits: &mut Tensor, start, end| {
                    let (factors, weights) = (&factors.rows(start, end)?, &weights.rows(start, end)?);
                    let bonus = EntropyBonus { factors, weights, scale, coefficient };
                    Ok(entropy_gradient(logits, vocabulary, &targets.rows(start, end)?, bonus)?)
                };
                let (entropies, dnormed) = model.chunked_gradient(normed, targets.len(), units, of_chunk)?;
                (Some(entropies), dnormed)
            }
        };
        let mut all = Tensor::empty(losses.device(), &[self.values(losses.len())], losses.dtype())?;
        let of_values = self.value_losses(model, normed, targets, scale, &mut dnormed)?;
        for (part, values) in [&bounded, &losses].into_iter().chain(&entropies).chain(&of_values).enumerate() {
            all.copy_from(part * losses.len(), values)?;
        }
        Ok((all, dnormed))
    }

    fn add(&self, sums: Vec<f64>, values: &[f64]) -> Result<Vec<f64>> {
        let mut parts = values.chunks_exact(values.len() / self.values_of_token());
        let mut next = |is_there: bool| if is_there { parts.next() } else { None };
        let values = TokenValues {
            bounded: next(true).expect("a loss of each token"),
            losses: next(true).expect("a log-probability of each token"),
            entropies: next(self.how.entropy_coef > 0.0),
            of_values: next(self.how.value.is_some()),
        };
        Ok(self.merge(sums, &self.sums(&values)))
    }

    fn merge(&self, sums: Vec<f64>, of_rank: &[f64]) -> Vec<f64> {
        Sums::from_numbers(&sums).merge(&Sums::from_numbers(of_rank)).numbers()
    }

    fn metrics(&self, sums: &[f64]) -> Metrics {
        Sums::from_numbers(sums).metrics(&self.how)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objective::rollout::End;
    use ottava_settings::{PolicyConfig, ReinforcementConfig};
    use ottava_tensor::ops::{Correction, PolicyLoss};
    use serde_json::Value;

    const RECORDED: &str = include_str!("../../../tests/data/referee_policy.json");

    fn numbers(value: &Value) -> Vec<f64> {
        value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
    }

    fn corrected(in_step: bool, correction: Correction) -> Policy {
        let settings = ReinforcementConfig::default();
        Policy {
            loss: PolicyLoss { correction: in_step.then_some(correction), ..settings.policy_loss() },
            entropy_coef: 0.0,
            value: None,
            correction_by_pass: (!in_step).then_some(correction),
            aggregation: settings.aggregation(),
        }
    }

    /// A step that computes the ratios itself has the losses, gradients and metrics of a step after a pass with the same weights.
    #[test]
    fn a_step_corrects_as_after_a_pass() {
        let drawn = [vec![-1.0, -1.5, -3.0], vec![-0.25, -2.0, -0.5]];
        let lp = [[-1.25f32, -1.5, -0.5], [-0.5, -1.0, -0.75]];
        let ids = Tensor::from_slice(&Device::Cpu, &[12], &[1i32; 12]).unwrap();
        for (of_sequence, is_mask) in [(false, false), (false, true), (true, false), (true, true)] {
            let correction = Correction { of_sequence, is_mask, min: 0.9, max: 1.25 };
            let [pass, step] = [false, true].map(|in_step| {
                let scored = |at: usize| Scored {
                    sample: Sample::of_turn(vec![0, 0], vec![1, 1, 1], drawn[at].clone(), End::Text),
                    old: (!in_step).then(|| lp[at].to_vec()),
                    advantages: vec![0.5, 0.25, -1.0],
                    estimates: None,
                    counts: true,
                };
                let (how, scored) = (corrected(in_step, correction), [scored(0), scored(1)]);
                let mut micro_batch =
                    PolicyMicroBatch::new(how, Rc::default(), 2, 6, &Device::Cpu, DType::F64).unwrap();
                let packing = SampleRows { rows: 2, max_length: 6, end: 0 };
                let packed = packing.pack(&[&scored[0].sample, &scored[1].sample], RowShare::ALL);
                micro_batch.load(&scored, &packed[0]).unwrap();
                let mut losses = vec![0.0; 12];
                for token in &micro_batch.tokens {
                    losses[token.at] = -f64::from(lp[token.sample][token.at % 6 - 1]);
                }
                let tensor = |values: &[f64]| Tensor::from_slice(&Device::Cpu, &[values.len()], values).unwrap();
                let (bounded, factors) =
                    policy_loss(&how.loss, &tensor(&losses), &ids, &micro_batch.known, &tensor(&[1.0])).unwrap();
                let bounded = values(&bounded).unwrap();
                let all = [&bounded[..], &losses].concat();
                (bounded, values(&factors).unwrap(), micro_batch.add(Vec::new(), &all).unwrap())
            });
            assert_eq!(step, pass, "{correction:?}");
            let mean = Sums::from_numbers(&step.2).correction / 6.0;
            assert!(mean != 1.0 && mean <= 1.25, "{correction:?}: {mean}");
        }
    }

    /// With a correction, old log-probabilities come from the pass, and the loss of a token has the factor of its ratio. Tokens that do not count have
    /// the weight 0, and no part in the metrics.
    #[test]
    fn a_micro_batch_loads_ratios_of_the_pass_and_the_draw() {
        let how = corrected(false, Correction { of_sequence: false, is_mask: false, min: 0.0, max: 2.0 });
        let scored = |counts| Scored {
            sample: Sample::of_turn(vec![0, 0], vec![1, 1, 1], vec![-1.0, -1.5, -3.0], End::Text),
            old: Some(vec![-1.25, -1.5, -0.5]),
            advantages: vec![0.5, 0.25, -1.0],
            estimates: None,
            counts,
        };
        let mut micro_batch = PolicyMicroBatch::new(how, Rc::default(), 2, 6, &Device::Cpu, DType::F64).unwrap();
        let scored = [scored(true), scored(false)];
        let packing = SampleRows { rows: 2, max_length: 6, end: 0 };
        let packed = packing.pack(&[&scored[0].sample, &scored[1].sample], RowShare::ALL);
        micro_batch.load(&scored, &packed[0]).unwrap();
        let known = |tensor: &Tensor| values(tensor).unwrap();
        // A row has two tokens of the prompt. The second token of the prompt predicts the first drawn token.
        let row = [0.0, -1.25, -1.5, -0.5, 0.0, 0.0];
        assert_eq!(known(&micro_batch.known.old), [row, row].concat());
        let factors = [1.0, (-0.25f64).exp(), 1.0, 2.0, 1.0, 1.0];
        let apart = known(&micro_batch.known.corrections).into_iter().zip([factors, factors].concat());
        assert!(apart.clone().all(|(a, b)| (a - b).abs() < 1e-12), "{:?}", apart.collect::<Vec<_>>());
        let weights = [0.0, 1.0, 1.0, 1.0, 0.0, 0.0];
        assert_eq!(known(&micro_batch.known.weights), [weights, [0.0; 6]].concat());
        assert_eq!((micro_batch.tokens.len(), micro_batch.counted(&[])), (3, 3));
    }

    /// Losses, and their gradients by log-probabilities, as TRL's `GRPOTrainer` computes them (`scripts/make_policy_referee.py`): each loss, by tokens and
    /// by sequences, means over all tokens, over sequences and by a constant, and both divergences.
    #[test]
    fn losses_and_gradients_equal_trl() {
        let recorded: Value = serde_json::from_str(RECORDED).unwrap();
        let most = recorded["most"].as_u64().unwrap() as usize;
        let lengths: Vec<usize> = numbers(&recorded["lengths"]).into_iter().map(|length| length as usize).collect();
        let (rows, advantages) = (lengths.len(), numbers(&recorded["advantages"]));
        let row = |name: &str, row: usize| numbers(&recorded[name][row])[..lengths[row]].to_vec();
        let tensor = |values: &[f64]| Tensor::from_slice(&Device::Cpu, &[values.len()], values).unwrap();
        // Some of the samples share a row.
        let packing = SampleRows { rows, max_length: most + 1, end: 0 };
        for case in recorded["cases"].as_array().unwrap() {
            let loss: PolicyConfig = serde_json::from_value(case["settings"].clone()).unwrap();
            let settings = ReinforcementConfig { loss, max_completion_length: most, ..ReinforcementConfig::default() };
            let (loss, aggregation) = (settings.policy_loss(), settings.aggregation());
            let how = Policy { loss, entropy_coef: 0.0, value: None, correction_by_pass: None, aggregation };
            let samples: Vec<Scored> = (0..rows)
                .map(|at| Scored {
                    sample: Sample::of_turn(
                        vec![0],
                        vec![0; lengths[at]],
                        row("old", at).into_iter().map(|lp| lp as f32).collect(),
                        End::Text,
                    ),
                    old: None,
                    advantages: vec![advantages[at]; lengths[at]],
                    estimates: None,
                    counts: true,
                })
                .collect();
            let all: Vec<&Sample> = samples.iter().map(|scored| &scored.sample).collect();
            let packed = packing.pack(&all, RowShare::ALL).remove(0);
            assert!(packed.places.iter().any(|place| place.start % (most + 1) > 0), "{:?}", packed.places);
            let placed = |name: &str| {
                let mut losses = vec![0.0; packed.batch.targets.len()];
                for &Place { sample, start } in &packed.places {
                    row(name, sample).into_iter().enumerate().for_each(|(i, lp)| losses[start + i] = -lp);
                }
                tensor(&losses)
            };
            let ids = Tensor::from_slice(&Device::Cpu, &[packed.batch.targets.len()], &packed.batch.targets).unwrap();
            let mut micro_batch =
                PolicyMicroBatch::new(how, Rc::default(), rows, most + 1, &Device::Cpu, DType::F64).unwrap();
            micro_batch.load(&samples, &packed).unwrap();
            micro_batch.set_reference(&placed("reference")).unwrap();
            let counted = micro_batch.counted(&[]) as f64;
            let (losses, scale) = (placed("log_probs"), tensor(&[1.0 / counted]));
            let (bounded, factors) = policy_loss(&how.loss, &losses, &ids, &micro_batch.known, &scale).unwrap();
            // Draws report log-probabilities in F32, half a unit of 2⁻²³ from the recorded ones.
            const DRAWN: f64 = 1e-6;
            let loss = values(&bounded).unwrap().iter().sum::<f64>() / counted;
            let expected = case["loss"].as_f64().unwrap();
            assert!((loss - expected).abs() < DRAWN, "{}: {loss}, {expected} in TRL", case["name"]);
            let factors = values(&factors).unwrap();
            for &Place { sample, start } in &packed.places {
                let expected = numbers(&case["gradient"][sample]).into_iter().take(lengths[sample]);
                for (i, expected) in expected.enumerate() {
                    let found = -factors[start + i];
                    let what = || format!("{}, {sample}, {i}: {found}, {expected} in TRL", case["name"]);
                    assert!((found - expected).abs() < DRAWN, "{}", what());
                }
            }
        }
    }
}
