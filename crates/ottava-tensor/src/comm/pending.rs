//! A collective or message in progress.

use super::combine::Bytes;
use super::history::History;
use super::round::Reply;
use crate::cuda::Transfer;
use crate::error::{Error, RankFault, Result};
use crate::ops::sum_parts_into;
use crate::tensor::Tensor;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

/// A started call: the receiver of its answer, and its name for errors.
pub(super) struct Started {
    /// The text of [`Call::numbered`](super::call::Call::numbered).
    pub call: String,
    pub reply: Receiver<Reply>,
    pub history: Arc<History>,
}

impl Started {
    /// Waits for the answer.
    pub fn wait(self) -> Result<Bytes> {
        match self.reply.recv() {
            Ok(Ok(bytes)) => Ok(bytes),
            Ok(Err(fault)) => Err(fault.error(&self.call, self.history.recent())),
            Err(_) => {
                let message = format!("this rank left its job during {}", self.call);
                Err(Error::Ranks { fault: RankFault::Lost, message, recent: self.history.recent() })
            }
        }
    }

    /// Returns without waiting for the call. Errors if the job has already failed.
    pub fn detach(self) -> Result<()> {
        match self.reply.try_recv() {
            Ok(Err(fault)) => Err(fault.error(&self.call, self.history.recent())),
            Ok(Ok(_)) | Err(_) => Ok(()),
        }
    }
}

/// The state of a call.
pub(super) enum Progress {
    /// The call was sent to the job. Its answer has the bytes of the output.
    Sent(Started),
    /// The call is enqueued on the GPU. The output is written when the transfer ends.
    Gpu(Transfer),
    /// Copies are enqueued on the GPU. When they end, `own` and `others` must be added.
    Parts(Box<Parts>),
    /// The call has ended, or was dropped before its end.
    Done,
}

/// The parts of a sum: the part of this rank, and the arriving parts of the other ranks in the order of the ranks.
pub(super) struct Parts {
    /// The copies. `None` in a dry run.
    pub transfer: Option<Transfer>,
    pub own: Tensor,
    pub rank: usize,
    pub others: Tensor,
}

/// A collective or message in progress, with its tensors. [`Pending::wait`] waits for it. Dropping a `Pending` discards the result only on this rank.
/// Later GPU work still waits for the call.
#[must_use = "the call ends in wait()"]
pub struct Pending {
    // Dropped first, because compute must wait for a collective before its tensors are freed.
    pub(super) progress: Progress,
    pub(super) output: Tensor,
    /// The tensor that the call reads until its end.
    pub(super) _input: Option<Tensor>,
}

impl Pending {
    /// Returns a call that has ended with `output`.
    pub(crate) fn over(output: Tensor) -> Pending {
        Pending { progress: Progress::Done, output, _input: None }
    }

    /// Runs `work` while the call is in progress. If the call takes multiprocessors, products of `work` leave these multiprocessors free
    /// ([`CudaDevice::beside_collectives`](crate::cuda::CudaDevice::beside_collectives)).
    pub fn beside<R>(&self, work: impl FnOnce() -> R) -> R {
        match &self.progress {
            Progress::Gpu(transfer) => transfer.beside(work),
            Progress::Parts(parts) => match &parts.transfer {
                Some(transfer) => transfer.beside(work),
                None => work(),
            },
            Progress::Sent(_) | Progress::Done => work(),
        }
    }

    /// Waits for the collective or message, and returns the tensor that it wrote. A send returns its input. On the CPU, a send does not wait for the
    /// receiver. On a GPU the host does not wait, but later GPU work does.
    ///
    /// On the CPU, errors with [`Error::Ranks`] if a rank is lost or calls another collective. For GPUs see
    /// [`Group::with_gpu`](super::Group::with_gpu).
    pub fn wait(self) -> Result<Tensor> {
        let Pending { progress, mut output, _input } = self;
        match progress {
            Progress::Done => {}
            Progress::Gpu(transfer) => transfer.wait()?,
            Progress::Parts(parts) => {
                let Parts { transfer, own, rank, others } = *parts;
                transfer.map_or(Ok(()), Transfer::wait)?;
                sum_parts_into(&own, rank, &others, None, &mut output)?;
            }
            Progress::Sent(started) => {
                let call = started.call.clone();
                let bytes = started.wait()?;
                if bytes.len() != output.bytes() {
                    let message = format!("{call} gave {} bytes, expected {}", bytes.len(), output.bytes());
                    return Err(Error::Ranks { fault: RankFault::Desync, message, recent: Vec::new() });
                }
                output.write_bytes(&bytes)?;
            }
        }
        Ok(output)
    }
}
