//! What an embedding model asks of the other settings of a run.

use crate::RunConfig;
use crate::demands::Problems;
use ottava_models::DecoderConfig;

impl RunConfig {
    /// Problems of `[embedding]`, and of other settings that do not go together with it.
    pub(crate) fn embedding_problems(&self) -> Vec<String> {
        let (e, mut all) = (&self.embedding, Problems::default());
        if !e.is_on() {
            return all.0;
        }
        all.demand(
            e.temperature.is_finite() && e.temperature > 0.0,
            "`embedding.temperature` must be above 0: cosines are divided by it",
        );
        all.demand(
            e.negatives <= 64,
            format!("`embedding.negatives` is {}; at most 64 negative texts of a record are read", e.negatives),
        );
        let gathers = e.gather_across_ranks && self.parallel.data != 1;
        all.demand(
            gathers || self.training.per_device_train_batch_size * (1 + e.negatives) > 1,
            "`training.per_device_train_batch_size` is 1, and other texts of a micro-batch are the negatives of `[embedding]`; raise it",
        );
        let p = &self.parallel;
        all.demand(
            p.pipeline == 1 && !p.auto,
            format!(
                "`parallel.pipeline` is {}, and an embedding model has no head at its end; set it to 1, and `parallel.auto` to false",
                p.pipeline
            ),
        );
        all.0
    }

    /// Leaves out the head, which an embedding model does not read.
    pub(crate) fn shape_embedding(&self, sizes: &mut DecoderConfig) {
        if self.embedding.is_on() {
            sizes.head.pooled = true;
            sizes.head.tied = true;
        }
    }
}
