//! Distillation from stored distributions of a teacher: the likeliest tokens at each learned token of the data, and the rest of each distribution.
//!
//! `ottava logits` writes the folder (`writer.rs`) in a format of its own (`format.rs`). `Rows::load` reads the distributions of the documents of a
//! step from the folder (`store.rs`). The op `divergence_gradient_of_top` compares the model with these distributions.

mod format;
mod store;
mod writer;

pub use writer::{StoredLogits, store_logits};

use super::loss::{DivergenceLoss, TeacherDistributions};
use crate::objective::next_token::{Documents, NextToken};
use crate::objective::{LoadedRows, Objective, Opening, Rows, Validation};
use crate::phase::Passes;
use crate::step::{Loss, TrainStep};
use format::Distributions;
use ottava_common::error::Result;
use ottava_data::DataState;
use ottava_models::Decoder;
use ottava_recipe::mode::StepPrecision;
use ottava_settings::RunConfig;
use ottava_tensor::ops::{Divergence, TopLogProbs, cast, divergence_gradient_of_top};
use ottava_tensor::{DType, Device, Tensor};
use std::ops::Range;
use store::{Store, TopRows};

/// The objective of a run that reads stored distributions.
pub(super) struct StoredDistillation {
    run: RunConfig,
}

impl StoredDistillation {
    pub(super) fn new(run: &RunConfig) -> StoredDistillation {
        StoredDistillation { run: run.clone() }
    }
}

impl Objective for StoredDistillation {
    fn loss(&self, rows: usize, device: &Device, dtype: DType) -> Result<Box<dyn Loss>> {
        let (tokens, how) = (rows * self.run.data.max_length, self.run.distillation.divergence());
        let teacher = StoredTeacher::new(tokens, self.run.known_tokens()?, device, dtype)?;
        Ok(Box::new(DivergenceLoss::from(teacher, how)))
    }

    fn passes(&self, config: &RunConfig) -> Vec<Passes> {
        NextToken.passes(config)
    }

    fn open(&self, opening: &Opening) -> Result<Box<dyn Rows>> {
        let wanted = Distributions::of(&self.run, opening.data, String::new())?;
        let store = Store::open(&self.run.distillation.logits, &wanted)?;
        Ok(Box::new(StoredRows { documents: Documents::open(opening)?, store, top_k: wanted.top_k }))
    }
}

/// The teacher's likeliest tokens and the rest, at each token of a micro-batch.
struct StoredTeacher {
    /// I32 `[T, k]`.
    ids: Tensor,
    /// Log-probabilities of `ids`, `[T, k]`.
    log_probs: Tensor,
    /// The log-probability of all other tokens together, `[T]`.
    rest: Tensor,
}

impl StoredTeacher {
    fn new(tokens: usize, k: usize, device: &Device, dtype: DType) -> Result<StoredTeacher> {
        let _scope = device.whole_scope("teacher");
        let zeros = |shape: &[usize], dtype| Tensor::zeros(device, shape, dtype);
        Ok(StoredTeacher {
            ids: zeros(&[tokens, k], DType::I32)?,
            log_probs: zeros(&[tokens, k], dtype)?,
            rest: zeros(&[tokens], dtype)?,
        })
    }

    /// Overwrites the distributions.
    fn set(&mut self, TopRows { ids, log_probs, rest }: &TopRows) -> Result<()> {
        self.ids.write_bytes(&Tensor::from_slice(&Device::Cpu, &[ids.len()], ids)?.read_bytes()?)?;
        for (tensor, values) in [(&mut self.log_probs, log_probs), (&mut self.rest, rest)] {
            let values = Tensor::from_slice(&Device::Cpu, &[values.len()], values)?;
            tensor.write_bytes(&cast(&values, tensor.dtype())?.read_bytes()?)?;
        }
        Ok(())
    }
}

impl TeacherDistributions for StoredTeacher {
    fn divergence_gradient(
        &self,
        Range { start, end }: Range<usize>,
        logits: &mut Tensor,
        vocabulary: usize,
        targets: &Tensor,
        scale: &Tensor,
        how: Divergence,
    ) -> Result<Tensor> {
        let [ids, log_probs, rest] = [&self.ids, &self.log_probs, &self.rest].map(|tensor| tensor.rows(start, end));
        let teacher = TopLogProbs { ids: &ids?, log_probs: &log_probs?, rest: &rest? };
        Ok(divergence_gradient_of_top(logits, teacher, vocabulary, targets, scale, how)?)
    }
}

/// Rows of documents with the stored distributions at the learned tokens.
struct StoredRows {
    documents: Documents,
    store: Store,
    top_k: usize,
}

impl Rows for StoredRows {
    fn examples(&self) -> f64 {
        self.documents.examples()
    }

    fn state(&self) -> DataState {
        self.documents.state()
    }

    fn load(&mut self, _: &mut Decoder, step: &mut TrainStep, _: StepPrecision) -> Result<LoadedRows> {
        let batches = self.documents.next_batches(step.schedule().micro_batches)?;
        for (number, batch) in batches.iter().enumerate() {
            step.load(number, batch)?;
            let rows = self.store.read(batch, self.top_k)?;
            step.loss_mut::<DivergenceLoss<StoredTeacher>>(number).teacher.set(&rows)?;
        }
        Ok(LoadedRows::default())
    }

    /// Computes the cross-entropy of the next token, as a run without a teacher does.
    fn evaluate(&self, model: &mut Decoder, step: &TrainStep, precision: StepPrecision) -> Result<Option<Validation>> {
        self.documents.evaluate(model, step, precision)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A chunk of logits is compared with the distributions of its own tokens.
    #[test]
    fn chunks_have_the_distributions_of_their_tokens() {
        const TOKENS: usize = 3;
        let mut teacher = StoredTeacher::new(TOKENS, 2, &Device::Cpu, DType::F64).unwrap();
        let (ids, log_probs) = (vec![0, 1, 1, 2, 2, 3], [-0.5f32, -1.5, -1.0, -1.25, -0.75, -2.0].to_vec());
        teacher.set(&TopRows { ids, log_probs, rest: vec![-1.75, -1.0, -0.9] }).unwrap();
        let logits = [0.3, -0.2, 0.9, 0.1, 0.5, 0.5, -1.0, 0.2, 0.0, 0.7, 0.4, -0.6];
        let scale = Tensor::from_slice(&Device::Cpu, &[1], &[1.0]).unwrap();
        let divergences = |start: usize, end: usize| -> Vec<f64> {
            let mut logits = Tensor::from_slice(&Device::Cpu, &[end - start, 4], &logits[4 * start..4 * end]).unwrap();
            let targets = Tensor::from_slice(&Device::Cpu, &[end - start], &vec![0; end - start]).unwrap();
            let how = Divergence { beta: 0.5, temperature: 1.0 };
            let found = teacher.divergence_gradient(start..end, &mut logits, 4, &targets, &scale, how).unwrap();
            found.to_vec().unwrap()
        };
        assert_eq!([divergences(0, 1), divergences(1, 3)].concat(), divergences(0, 3));
    }
}
