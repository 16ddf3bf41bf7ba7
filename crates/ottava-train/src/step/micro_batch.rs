//! The inputs of a program: the micro-batches of a step, and the factors of their losses.

use super::loss::{Loss, NextTokenLoss};
use ottava_common::error::Result;
use ottava_data::Batch;
use ottava_recipe::context::Sequences;
use ottava_recipe::layer_ranks::ShardPlace;
use ottava_tensor::{Device, Tensor};

/// A micro-batch on the device.
pub struct MicroBatch {
    /// The token ids, I32 `[T]`.
    pub inputs: Tensor,
    /// The targets, I32 `[T]`.
    pub targets: Tensor,
    /// The positions of the tokens, and the boundaries of documents.
    pub sequences: Sequences,
    /// The loss that a step minimizes. Passes without gradients return [`Loss::evaluated`].
    pub loss: Box<dyn Loss>,
}

/// The rows of a micro-batch that is loaded.
pub struct Loaded<'a> {
    /// The token ids, I32 `[T]`.
    pub inputs: &'a Tensor,
    /// The targets, I32 `[T]`.
    pub targets: &'a Tensor,
    /// The positions of the tokens, and the boundaries of documents.
    pub sequences: &'a Sequences,
}

impl MicroBatch {
    /// Returns the same micro-batch with another loss.
    pub fn with_loss(self, loss: impl Loss) -> MicroBatch {
        MicroBatch { loss: Box::new(loss), ..self }
    }

    /// Copies `batch` to `device`, with the loss of the next token.
    pub fn new(batch: &Batch, device: &Device, place: ShardPlace) -> Result<MicroBatch> {
        let mut sequences = Sequences::divided(device, batch.rows, batch.seq_len, place)?;
        if let Some(lengths) = &batch.documents {
            sequences = sequences.with_documents(lengths.len().max(batch.rows))?;
            sequences.set_documents(lengths)?;
        }
        sequences.set_padding(&batch.padding)?;
        let tensor = |ids: Vec<i32>| Tensor::from_slice(device, &[ids.len()], &ids);
        let (inputs, targets) = (tensor(sequences.own(&batch.inputs))?, tensor(sequences.own(&batch.targets))?);
        Ok(MicroBatch { inputs, targets, sequences, loss: Box::new(NextTokenLoss) })
    }
}

/// The factors of the losses that backward differentiates, on the device: F32 `[1]` each (F64 for F64). Each replay of a captured step reads their
/// current values.
pub struct LossScale {
    /// The factor of each loss, as [`Loss::units`] counts them.
    pub per_unit: Tensor,
    /// The factor of the losses of layers. The loss of a layer is a mean over the tokens of a micro-batch.
    pub per_micro_batch: Tensor,
}
