//! A collective in progress.

use super::call::Call;
use super::combine::Bytes;
use super::fault::during;
use super::history::History;
use super::hub::Reply;
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

/// A collective in progress, with its tensors. [`Pending::wait`] ends it; dropping it discards the result on this rank alone.
#[must_use = "the collective ends in wait()"]
pub struct Pending {
    pub(super) started: Started,
    pub(super) output: Tensor,
    /// Read by the collective until it ends.
    pub(super) _input: Option<Tensor>,
}

impl Pending {
    /// Waits until all ranks have called the collective, and returns the tensor that it wrote.
    ///
    /// Errors with [`Error::Ranks`] when a rank is lost or calls another collective.
    pub fn wait(self) -> Result<Tensor> {
        let mut output = self.output;
        let during = during(&self.started.call, self.started.number);
        let bytes = self.started.wait()?;
        if bytes.len() != output.bytes() {
            let message = format!("{during} gave {} bytes, expected {}", bytes.len(), output.bytes());
            return Err(Error::Ranks { fault: RankFault::Desync, message, recent: Vec::new() });
        }
        output.write_bytes(&bytes)?;
        Ok(output)
    }
}
