//! Embedding models: the anchors and the texts that belong to them are near each other, and other texts of a batch are far.
//!
//! The loss is InfoNCE (van den Oord et al. 2018, arXiv:1807.03748), in sentence-transformers `MultipleNegativesRankingLoss`. A micro-batch has the rows of
//! all anchors, then of all positive texts, then of the first negative texts, and so on. An embedding is a product of a matrix of weights of tokens with
//! the activations, so ranks that divide tokens add their parts.

mod batch;
mod evaluation;
mod loss;
mod rows;

pub use batch::weights_of;
pub use loss::{Contrast, ContrastMicroBatch};

use super::{Objective, Opening, Rows};
use crate::phase::Passes;
use crate::step::Loss;
use ottava_common::error::Result;
use ottava_settings::{EmbeddingPooling, RunConfig};
use ottava_tensor::{DType, Device};
use rows::RelatedRows;

/// Texts that belong together.
pub(super) struct Embedding {
    how: Contrast,
}

impl Embedding {
    /// The objective of the run of `config`.
    pub(super) fn new(config: &RunConfig) -> Embedding {
        let e = &config.embedding;
        let pooling = e.pooling.unwrap_or(EmbeddingPooling::Mean);
        let (temperature, gathers) = (e.temperature, e.gather_across_ranks);
        Embedding { how: Contrast { pooling, temperature, texts: e.texts(), gathers, seq_len: config.data.max_length } }
    }
}

impl Objective for Embedding {
    fn loss(&self, rows: usize, device: &Device, dtype: DType) -> Result<Box<dyn Loss>> {
        Ok(Box::new(ContrastMicroBatch::new(self.how, rows, device, dtype)?))
    }

    fn evaluated(&self, rows: usize, device: &Device, dtype: DType) -> Result<Box<dyn Loss>> {
        self.loss(rows, device, dtype)
    }

    fn passes(&self, config: &RunConfig) -> Vec<Passes> {
        let passes = Passes { micro_batches: 1, ..Passes::of_evaluation(config) };
        config.validates().then_some(passes).into_iter().collect()
    }

    fn open(&self, opening: &Opening) -> Result<Box<dyn Rows>> {
        Ok(Box::new(RelatedRows::open(opening, self.how)?))
    }
}
