//! A collective in progress.

use super::call::Call;
use super::combine::Bytes;
use super::fault::during;
use super::history::History;
use super::hub::Reply;
use crate::cuda::Transfer;
use crate::error::{Error, RankFault, Result};
use crate::tensor::Tensor;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

/// A started call: its answer, and what its errors name.
pub(super) struct Started {
    pub call: Call,
    pub number: u64,
    pub reply: Receiver<Reply>,
    pub history: Arc<History>,
}

impl Started {
    /// Waits for the answer.
    pub fn wait(self) -> Result<Bytes> {
        let during = during(&self.call, self.number);
        match self.reply.recv() {
            Ok(Ok(bytes)) => Ok(bytes),
            Ok(Err(fault)) => Err(fault.error(&during, self.history.recent())),
            Err(_) => {
                let message = format!("this rank left its group during {during}");
                Err(Error::Ranks { fault: RankFault::Lost, message, recent: self.history.recent() })
            }
        }
    }
}

/// How far a collective is.
pub(super) enum Progress {
    /// Sent to the group; the answer has the bytes of the output.
    Sent(Started),
    /// Enqueued on the GPU, after which the output is written.
    Gpu(Transfer),
    /// Ended: it moves nothing between ranks.
    Done,
}

/// A collective in progress, with its tensors. [`Pending::wait`] ends it. Dropping it discards the result on this rank alone; later work of
/// a GPU still waits for it.
#[must_use = "the collective ends in wait()"]
pub struct Pending {
    // Dropped first: compute must wait for a collective before its tensors are freed.
    pub(super) progress: Progress,
    pub(super) output: Tensor,
    /// Read by the collective until it ends.
    pub(super) _input: Option<Tensor>,
}

impl Pending {
    /// Waits until all ranks have called the collective, and returns the tensor that it wrote. On a GPU the host does not wait, but later
    /// work of the GPU does.
    ///
    /// Errors with [`Error::Ranks`] when a rank is lost or calls another collective; not on a GPU, where
    /// [`Group::with_gpu`](super::Group::with_gpu) says what happens then.
    pub fn wait(self) -> Result<Tensor> {
        let Pending { progress, mut output, _input } = self;
        match progress {
            Progress::Done => {}
            Progress::Gpu(transfer) => transfer.wait()?,
            Progress::Sent(started) => {
                let during = during(&started.call, started.number);
                let bytes = started.wait()?;
                if bytes.len() != output.bytes() {
                    let message = format!("{during} gave {} bytes, expected {}", bytes.len(), output.bytes());
                    return Err(Error::Ranks { fault: RankFault::Desync, message, recent: Vec::new() });
                }
                output.write_bytes(&bytes)?;
            }
        }
        Ok(output)
    }
}
