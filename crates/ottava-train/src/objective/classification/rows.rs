//! The rows of a run on texts with labels, and validation.

use super::evaluation::LabeledTexts;
use super::labels::LabelReader;
use super::loss::LabelMicroBatch;
use super::metrics::LabelMetrics;
use crate::objective::{Evaluation, LoadedRows, Opening, Rows, Validation};
use crate::step::TrainStep;
use ottava_common::error::{Error, Result};
use ottava_data::examples::LABEL;
use ottava_data::{DataState, Example, ExampleLoader, ExampleRows, Tokenizer};
use ottava_models::{Decoder, is_encoder, pad_token};
use ottava_recipe::mode::StepPrecision;
use serde_json::{Map, Value};

/// The rows of a run on texts with labels.
pub(super) struct LabeledRows {
    reader: LabelReader,
    loader: ExampleLoader,
    rows: ExampleRows,
    /// Texts of a micro-batch.
    per_batch: usize,
    /// Texts of a batch of an evaluation.
    per_evaluated: usize,
    validation: Vec<Example>,
}

impl LabeledRows {
    /// The texts of the data.
    ///
    /// Errors with [`Error::Data`] if a record has no label that the classifier knows.
    pub(super) fn open(opening: &Opening, reader: LabelReader) -> Result<LabeledRows> {
        let Opening { config, data, state, share, .. } = *opening;
        let loader = ExampleLoader::new(data, state, share)?;
        loader.check(&mut |columns| label_of(&reader, columns).map(drop))?;
        if share.rank == 0 {
            let shown = reader.names.iter().take(8).cloned().collect::<Vec<_>>().join(", ");
            tracing::info!(
                "training a classifier ({}), number of labels {}: {shown}",
                reader.problem.as_str(),
                reader.names.len()
            );
        }
        let tokenizer = Tokenizer::load(config.tokenizer_path())?;
        let rows = ExampleRows::new(&tokenizer, config.data.max_length, pad_token(opening.model)?)
            .for_encoder(is_encoder(opening.model)?);
        let validation = (0..loader.validation_len()).map(|i| loader.validation(i)).collect::<Result<_>>()?;
        let per_batch = config.training.per_device_train_batch_size;
        let per_evaluated = config.evaluation_batch();
        Ok(LabeledRows { reader, loader, rows, per_batch, per_evaluated, validation })
    }
}

fn label_of(reader: &LabelReader, columns: &Map<String, Value>) -> Result<Vec<f64>, String> {
    reader.read(columns.get(LABEL).unwrap_or(&Value::Null))
}

impl Rows for LabeledRows {
    fn examples(&self) -> f64 {
        self.loader.train_len() as f64
    }

    fn state(&self) -> DataState {
        self.loader.state()
    }

    fn load(&mut self, _: &mut Decoder, step: &mut TrainStep, _: StepPrecision) -> Result<LoadedRows> {
        for micro_batch in 0..step.schedule().micro_batches {
            let examples = self.loader.next(self.per_batch)?;
            let labels = examples.iter().map(|example| label_of(&self.reader, &example.columns));
            let labels = labels.collect::<Result<Vec<_>, String>>().map_err(Error::Data)?;
            step.loss_mut::<LabelMicroBatch>(micro_batch).set_labels(&labels.concat())?;
            step.load(micro_batch, &self.rows.batch(examples.iter().map(|example| &example.texts[0]), self.per_batch))?;
        }
        Ok(LoadedRows::default())
    }

    fn evaluate(&self, model: &mut Decoder, step: &TrainStep, precision: StepPrecision) -> Result<Option<Validation>> {
        if self.validation.is_empty() {
            return Ok(None);
        }
        let LabeledRows { reader, rows, per_evaluated, validation, .. } = self;
        let texts = LabeledTexts { examples: validation, reader, rows, per_batch: *per_evaluated };
        let LabelMetrics { loss, metrics } = texts.evaluate(model, step.partition(), precision)?;
        Ok(Some(Validation::of_one(Evaluation { loss, metrics })))
    }
}
