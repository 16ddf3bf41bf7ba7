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
    /// [`Call::numbered`](super::call::Call::numbered).
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

    /// Leaves the call to the job, unless that has failed already.
    pub fn detach(self) -> Result<()> {
        match self.reply.try_recv() {
            Ok(Err(fault)) => Err(fault.error(&self.call, self.history.recent())),
            Ok(Ok(_)) | Err(_) => Ok(()),
        }
    }
}

/// The state of a call.
pub(super) enum Progress {
    /// Sent to the job; the answer has the bytes of the output.
    Sent(Started),
    /// Enqueued on the GPU, after which the output is written.
    Gpu(Transfer),
    /// Enqueued on the GPU, after which `others` are to be added.
    Parts(Box<Parts>),
    /// Ended, or dropped before its end.
    Done,
}

/// The parts of a sum: the part of this rank, and the parts of the other ranks in their order, which arrive.
pub(super) struct Parts {
    /// `None` in a dry run.
    pub transfer: Option<Transfer>,
    pub own: Tensor,
    pub rank: usize,
    pub others: Tensor,
}

/// A collective or message in progress, with its tensors. [`Pending::wait`] waits for it. Dropping it discards the result on this rank
/// only; later GPU work still waits for it.
#[must_use = "the call ends in wait()"]
pub struct Pending {
    // Dropped first: compute must wait for a collective before its tensors are freed.
    pub(super) progress: Progress,
    pub(super) output: Tensor,
    /// Read by the collective until it ends.
    pub(super) _input: Option<Tensor>,
}

impl Pending {
    /// Runs `work` while the call is in progress: products of `work` leave multiprocessors to it if it takes any
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

    /// Waits for the collective or message and returns the tensor that was written. A send returns its input; on the CPU it does not wait
    /// for the receiver. On a GPU the host does not wait, but later GPU work does.
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
