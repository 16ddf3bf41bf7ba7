//! What an encoder asks of the settings of a run.

use super::{EmbeddingPooling, ObjectiveKind};
use crate::RunConfig;
use ottava_common::error::Result;
use ottava_models::{ConfigFile, DecoderConfig};

impl RunConfig {
    /// Errors if the model of `file` and `sizes` is an encoder, and the run asks for what encoders do not have.
    pub(crate) fn expect_encoder_fits(&self, sizes: &DecoderConfig, file: &ConfigFile) -> Result<()> {
        let is_trainable = matches!(self.objective(), ObjectiveKind::Classification | ObjectiveKind::Embedding);
        let problem = match sizes.is_encoder() {
            false if self.embedding.pooling == Some(EmbeddingPooling::Cls) => {
                "`embedding.pooling` is \"cls\", and the first token of this model sees no other token; set it to \"mean\" or \"last\""
            }
            false => return Ok(()),
            true if !is_trainable => {
                "this is an encoder, whose tokens see later tokens, so it does not predict the next token; set `classification.num_labels` to \
                 train a classifier, or `embedding.pooling` to train an embedding model"
            }
            true if self.lora.r > 0 => {
                "this is an encoder, and adapters of encoders are not implemented; set `lora.r` to 0 to train all weights"
            }
            true if self.parallel.pipeline > 1 => {
                "this is an encoder, and pipelines of encoders are not implemented; set `parallel.pipeline` to 1"
            }
            true => return Ok(()),
        };
        Err(file.error(problem))
    }
}
