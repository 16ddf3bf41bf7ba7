//! The rows of a run on texts that belong together, and validation.

use super::batch::{batch_of, weights_of};
use super::evaluation::{Compared, Related};
use super::loss::{Contrast, ContrastMicroBatch};
use crate::objective::{Evaluation, LoadedRows, Opening, Rows, Validation};
use crate::step::TrainStep;
use ottava_common::error::Result;
use ottava_data::examples::LENGTHS;
use ottava_data::{Batch, DataState, Example, ExampleLoader, ExampleRows, Tokenizer};
use ottava_models::{Decoder, is_encoder};
use ottava_recipe::mode::StepPrecision;
use ottava_tensor::comm::Axis;
use serde_json::Value;

/// The rows of a run on texts that belong together.
pub(super) struct RelatedRows {
    how: Contrast,
    loader: ExampleLoader,
    rows: ExampleRows,
    /// Examples of a micro-batch.
    per_batch: usize,
    validation: Vec<Example>,
}

impl RelatedRows {
    /// The texts of the data.
    ///
    /// Errors with [`Error::Data`](ottava_common::Error::Data) if a record has too few negative texts.
    pub(super) fn open(opening: &Opening, how: Contrast) -> Result<RelatedRows> {
        let Opening { config, data, state, share, .. } = *opening;
        let loader = ExampleLoader::new(data, state, share)?;
        let mut more = 0;
        loader.check(&mut |columns| {
            let texts = columns.get(LENGTHS).and_then(Value::as_array).map_or(0, Vec::len);
            more += usize::from(texts > how.texts);
            match texts >= how.texts {
                true => Ok(()),
                false => Err(format!(
                    "it has {} negative texts, and `embedding.negatives` is {}; set that to the smallest number of negative texts of a record",
                    texts.saturating_sub(2),
                    how.texts - 2
                )),
            }
        })?;
        if share.rank == 0 && more > 0 {
            tracing::warn!(
                "{more} records have more negative texts than `embedding.negatives` = {}, which are left out",
                how.texts - 2
            );
        }
        let tokenizer = Tokenizer::load(config.tokenizer_path())?;
        // The last token counts, whatever it is.
        let rows = ExampleRows::new(&tokenizer, config.data.max_length, None).for_encoder(is_encoder(opening.model)?);
        let validation = (0..loader.validation_len()).map(|i| loader.validation(i)).collect::<Result<_>>()?;
        Ok(RelatedRows { how, loader, rows, per_batch: config.training.per_device_train_batch_size, validation })
    }
}

/// Loads `batch` into micro-batch number `micro_batch` of `step`.
fn load(step: &mut TrainStep, micro_batch: usize, batch: &Batch, how: &Contrast) -> Result<()> {
    let place = step.partition().ranks().place(Axis::Context);
    let weights = weights_of(batch, how.pooling, place)?;
    step.loss_mut::<ContrastMicroBatch>(micro_batch).set_weights(&weights, place.rank == 0)?;
    step.load(micro_batch, batch)
}

impl Rows for RelatedRows {
    fn examples(&self) -> f64 {
        self.loader.train_len() as f64
    }

    fn state(&self) -> DataState {
        self.loader.state()
    }

    fn load(&mut self, _: &mut Decoder, step: &mut TrainStep, _: StepPrecision) -> Result<LoadedRows> {
        for micro_batch in 0..step.schedule().micro_batches {
            let examples = self.loader.next(self.per_batch)?;
            let examples: Vec<&Example> = examples.iter().collect();
            load(step, micro_batch, &batch_of(&examples, self.per_batch, &self.how, &self.rows), &self.how)?;
        }
        Ok(LoadedRows::default())
    }

    fn evaluate(&self, model: &mut Decoder, step: &TrainStep, precision: StepPrecision) -> Result<Option<Validation>> {
        if self.validation.is_empty() {
            return Ok(None);
        }
        let RelatedRows { how, rows, per_batch, validation, .. } = self;
        let related = Related { examples: validation, how, rows, per_batch: *per_batch };
        let Compared { loss, metrics } = related.evaluate(model, step.partition(), precision)?;
        Ok(Some(Validation::of_one(Evaluation { loss, metrics })))
    }
}
