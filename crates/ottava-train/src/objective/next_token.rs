//! The next token of texts, chats and completions.

use super::{Evaluation, LoadedRows, Objective, Opening, Rows, Validation};
use crate::evaluate::{Likelihood, TextLoss, evaluate};
use crate::phase::Passes;
use crate::step::{Loss, Metrics, NextTokenLoss, TrainStep};
use ottava_common::error::Result;
use ottava_data::{Batch, BatchLoader, DataSet, DataState, EvalLoader, Packing, RowLayout, Windows, loader};
use ottava_models::Decoder;
use ottava_recipe::mode::StepPrecision;
use ottava_settings::RunConfig;
use ottava_tensor::{DType, Device};

/// The next token of each token of documents.
pub(super) struct NextToken;

impl Objective for NextToken {
    fn loss(&self, _: usize, _: &Device, _: DType) -> Result<Box<dyn Loss>> {
        Ok(Box::new(NextTokenLoss))
    }

    fn passes(&self, config: &RunConfig) -> Vec<Passes> {
        config.validates().then(|| Passes::of_evaluation(config)).into_iter().collect()
    }

    fn open(&self, opening: &Opening) -> Result<Box<dyn Rows>> {
        Ok(Box::new(Documents::open(opening)?))
    }
}

/// Rows of documents.
pub(super) struct Documents {
    batches: BatchLoader,
    /// Rows of a micro-batch.
    rows: usize,
    /// Rows of a batch of an evaluation.
    rows_of_evaluation: usize,
    rows_of_epoch: f64,
    sets: Vec<DataSet>,
    layout: RowLayout,
}

impl Documents {
    pub(super) fn open(opening: &Opening) -> Result<Documents> {
        let Opening { config, data, state, share, .. } = *opening;
        Ok(Documents {
            batches: BatchLoader::new(&data.sets, data.layout, state, share)?,
            rows: config.training.per_device_train_batch_size,
            rows_of_evaluation: config.evaluation_batch(),
            rows_of_epoch: data.rows(),
            sets: data.sets.clone(),
            layout: data.layout,
        })
    }

    /// The next `count` micro-batches.
    pub(super) fn next_batches(&mut self, count: usize) -> Result<Vec<Batch>> {
        (0..count).map(|_| self.batches.next_batch(self.rows)).collect()
    }
}

impl Rows for Documents {
    fn examples(&self) -> f64 {
        self.rows_of_epoch
    }

    fn state(&self) -> DataState {
        self.batches.state()
    }

    fn load(&mut self, _: &mut Decoder, step: &mut TrainStep, _: StepPrecision) -> Result<LoadedRows> {
        let batches = self.next_batches(step.schedule().micro_batches)?;
        batches.iter().enumerate().try_for_each(|(number, batch)| step.load(number, batch))?;
        Ok(LoadedRows { first: batches.into_iter().next(), ..LoadedRows::default() })
    }

    fn evaluate(&self, model: &mut Decoder, step: &TrainStep, precision: StepPrecision) -> Result<Option<Validation>> {
        let (mut sets, mut all) = (Vec::new(), Vec::new());
        for DataSet { name, dataset, split, .. } in self.sets.iter().filter(|set| set.split.validation_len() > 0) {
            let bytes = loader::validation_bytes(dataset, split)?;
            let batches: Box<dyn Iterator<Item = Result<Batch>>> = match self.layout.packing {
                Packing::Wrapped | Packing::Auto => {
                    let windows = Windows::blocks(self.layout.seq_len);
                    Box::new(EvalLoader::new(dataset.clone(), *split, windows, self.rows_of_evaluation)?)
                }
                Packing::Bfd | Packing::None => {
                    Box::new(loader::whole_validation(dataset.clone(), *split, self.layout, self.rows_of_evaluation)?)
                }
            };
            let text = evaluate(model, batches, bytes, precision, step.partition(), &mut |_| {})?;
            if !name.is_empty() {
                sets.push((name.clone(), evaluation(&text)));
            }
            all.push((text, bytes));
        }
        Ok(match all.as_slice() {
            [] => None,
            [(one, _)] => Some(Validation { all: Some(evaluation(one)), sets, ..Validation::default() }),
            all => {
                let all = Some(evaluation(&TextLoss::of_all(all)));
                Some(Validation { all, sets, ..Validation::default() })
            }
        })
    }
}

/// Bits per byte are recorded; perplexity follows from the loss.
fn evaluation(text: &TextLoss) -> Evaluation {
    let metrics = match text.likelihood {
        Some(Likelihood { perplexity, bits_per_byte }) => Metrics::new(
            [("bits_per_byte", bits_per_byte)],
            format!("perplexity {perplexity:.2}  bits per byte {bits_per_byte:.4}"),
        ),
        None => Metrics::new([("", 0.0); 0], "with label smoothing"),
    };
    Evaluation { loss: text.loss, metrics }
}
