//! Classifiers: the labels of texts, from the scores of the last token of each text.
//!
//! The target of a row is the number of its row of labels, at the token whose scores are read (`ottava_data::examples`). So the losses of a micro-batch
//! are losses of tokens, whatever ranks divide. `LabelReader` makes numbers of the labels of records, and `LabelMetrics` are the metrics of scores.

mod evaluation;
mod labels;
mod loss;
mod metrics;
mod rows;

pub use evaluation::{LabeledTexts, Scored, scores_of};
pub use labels::LabelReader;
pub use loss::LabelMicroBatch;
pub use metrics::{LabelMetrics, predicted};

use super::{Objective, Opening, Rows};
use crate::phase::Passes;
use crate::step::Loss;
use ottava_common::error::Result;
use ottava_settings::RunConfig;
use ottava_tensor::{DType, Device};
use rows::LabeledRows;

/// The labels of texts.
pub(super) struct Classification {
    reader: LabelReader,
}

impl Classification {
    /// The objective of the run of `config`, whose labels are resolved.
    pub(super) fn new(config: &RunConfig) -> Classification {
        let (names, problem) = (config.classification.labels().names, config.classification.problem());
        Classification { reader: LabelReader { problem, names } }
    }
}

impl Objective for Classification {
    fn loss(&self, rows: usize, device: &Device, dtype: DType) -> Result<Box<dyn Loss>> {
        let LabelReader { problem, names } = &self.reader;
        Ok(Box::new(LabelMicroBatch::new(problem.loss(), [rows, names.len()], device, dtype)?))
    }

    fn evaluated(&self, rows: usize, device: &Device, dtype: DType) -> Result<Box<dyn Loss>> {
        self.loss(rows, device, dtype)
    }

    fn passes(&self, config: &RunConfig) -> Vec<Passes> {
        let passes = Passes { micro_batches: 1, ..Passes::of_evaluation(config) };
        config.validates().then_some(passes).into_iter().collect()
    }

    fn open(&self, opening: &Opening) -> Result<Box<dyn Rows>> {
        Ok(Box::new(LabeledRows::open(opening, self.reader.clone())?))
    }
}
