//! Embeddings of prompts: the activations after the last norm, pooled and divided by their norm; and the scores of prompts by a classifier.

use crate::batching::{Engine, Plan};
use crate::decode::in_f32;
use crate::request::{Event, Pooling};
use crate::sequence::Sequence;
use ottava_common::error::{Error, Result};
use ottava_tensor::Tensor;

impl Engine {
    /// Pools the rows of `hidden` for the prompts in `plan` that request it, and reports prompts that are read to their end.
    pub(super) fn pool_prompts(&mut self, plan: &Plan, hidden: &Tensor, events: &mut Vec<Event>) -> Result<()> {
        let mut end = 0;
        for &(at, new) in plan {
            let first = end;
            end += new;
            let sequence = &mut self.running[at];
            let Some(pooling) = sequence.request.pooling.filter(|_| sequence.pools()) else { continue };
            // Tokens after the prompt were drawn, so they are not pooled.
            let of_prompt = new.min(sequence.request.prompt.len() - sequence.computed);
            let is_last = sequence.computed + of_prompt == sequence.request.prompt.len();
            match pooling {
                Pooling::Mean => sequence.add_to_pooled(&values(hidden, first, first + of_prompt)?),
                Pooling::Last if is_last => {
                    sequence.add_to_pooled(&values(hidden, first + of_prompt - 1, first + of_prompt)?);
                }
                // A prompt of an encoder is computed in one pass.
                Pooling::Cls if sequence.computed == 0 => sequence.add_to_pooled(&values(hidden, first, first + 1)?),
                Pooling::Scores if is_last => {
                    let scored = if self.model.config().is_encoder() { first } else { first + of_prompt - 1 };
                    let row = Tensor::from_slice(hidden.device(), &[1], &[scored as i32])?;
                    let scores = in_f32(&self.model().logits(hidden, &row)?)?.to_vec::<f32>()?;
                    let sequence = &mut self.running[at];
                    sequence.is_pooled = true;
                    if scores.iter().any(|score| !score.is_finite()) {
                        let text = "a score is not finite: the model's weights or activations are not";
                        return Err(Error::NonFinite(text.into()));
                    }
                    events.push(Event::Embedding { id: sequence.id, values: scores });
                }
                Pooling::Last | Pooling::Cls | Pooling::Scores => {}
            }
            if is_last && pooling != Pooling::Scores {
                let sequence = &mut self.running[at];
                let event = Event::Embedding { id: sequence.id, values: sequence.take_embedding()? };
                events.push(event);
            }
        }
        Ok(())
    }
}

impl Sequence {
    /// Adds rows of activations to the pooled sum.
    fn add_to_pooled(&mut self, rows: &[Vec<f32>]) {
        for row in rows {
            self.pooled.resize(row.len(), 0.0);
            self.pooled.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x));
        }
    }

    /// Returns the sum divided by its norm. This equals the mean divided by its norm.
    ///
    /// Errors with [`Error::NonFinite`] if the sum is not finite.
    fn take_embedding(&mut self) -> Result<Vec<f32>> {
        self.is_pooled = true;
        let sum = std::mem::take(&mut self.pooled);
        let norm = sum.iter().map(|x| x * x).sum::<f64>().sqrt();
        if !norm.is_finite() {
            let text = "an activation of a prompt is not finite: the model's weights or activations are not";
            return Err(Error::NonFinite(text.into()));
        }
        // The embedding of zeros is zeros, as in PyTorch.
        Ok(sum.iter().map(|x| (x / norm.max(1e-12)) as f32).collect())
    }
}

/// Copies rows of activations to the host, in F32.
fn values(hidden: &Tensor, from: usize, to: usize) -> Result<Vec<Vec<f32>>> {
    let rows = in_f32(&hidden.rows(from, to)?)?;
    let [_, channels] = rows.dims("activations")?;
    Ok(rows.to_vec::<f32>()?.chunks_exact(channels).map(<[f32]>::to_vec).collect())
}
