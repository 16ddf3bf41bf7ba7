//! Messages from one rank of a group to another.
//!
//! They are matched by sender, receiver and order, and compared like collectives. A sender does not wait: what it sends on the CPU waits in
//! the hub, which fails the job when the receiver does not come within [`Limits::collective`](super::Limits::collective).

use super::call::{Call, Op};
use super::group::{Group, is_elsewhere};
use super::pending::{Pending, Progress};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

#[cfg(test)]
mod tests;

impl Group {
    /// Sends `tensor`, of any type, to rank `to` of the group, which calls [`Group::receive`] or [`Group::exchange`].
    ///
    /// Errors with [`Error::Value`] when `to` is this rank. Where the receiver expects another name, type or size, the later calls of both
    /// error. On GPUs, where a send waits for its receive, two ranks that send to each other call [`Group::exchange`].
    pub fn send(&self, name: &str, to: usize, tensor: &Tensor) -> Result<Pending> {
        let call = self.message(name, |to| Op::Send { to }, to, tensor)?;
        if is_elsewhere(tensor) {
            return self.start_messages_on_gpu(Some((&call, tensor)), None);
        }
        self.start(call, tensor.read_bytes()?).detach()?;
        Ok(Pending { progress: Progress::Done, output: tensor.clone(), _input: None })
    }

    /// Receives from rank `from` of the group what that [sends](Group::send), into `tensor`.
    ///
    /// Errors as [`Group::send`].
    pub fn receive(&self, name: &str, from: usize, tensor: Tensor) -> Result<Pending> {
        let call = self.message(name, |from| Op::Receive { from }, from, &tensor)?;
        if is_elsewhere(&tensor) {
            return self.start_messages_on_gpu(None, Some((&call, tensor)));
        }
        Ok(Pending { progress: Progress::Sent(self.start(call, Vec::new())), output: tensor, _input: None })
    }

    /// Sends `input` to rank `to` and receives `output` from rank `from`, at once, so that ranks that exchange tensors do not wait for each
    /// other's receive. Sizes may differ. Both ranks may be this one, which copies then.
    ///
    /// Errors as [`Group::send`].
    pub fn exchange(&self, name: &str, to: usize, input: &Tensor, from: usize, mut output: Tensor) -> Result<Pending> {
        if [to, from] == [self.rank(); 2] {
            if input.dtype() != output.dtype() || input.len() != output.len() {
                let [(sent, of), (got, into)] = [input, &output].map(|tensor| (tensor.len(), tensor.dtype()));
                return Err(Error::Value(format!("exchange `{name}` of {sent} {of} with {got} {into} of this rank")));
            }
            output.copy_from(0, input)?;
            return Ok(Pending { progress: Progress::Done, output, _input: None });
        }
        let sent = self.message(name, |to| Op::Send { to }, to, input)?;
        let received = self.message(name, |from| Op::Receive { from }, from, &output)?;
        output.expect_device(&format!("{}: output", received.title()), input.device())?;
        if is_elsewhere(input) {
            return self.start_messages_on_gpu(Some((&sent, input)), Some((&received, output)));
        }
        self.start(sent, input.read_bytes()?).detach()?;
        Ok(Pending { progress: Progress::Sent(self.start(received, Vec::new())), output, _input: None })
    }

    /// One side of a message with rank `peer` of the group, checked.
    fn message(&self, name: &str, op: impl Fn(usize) -> Op, peer: usize, tensor: &Tensor) -> Result<Call> {
        let peer = self.rank_of(peer, || format!("message `{name}`: with"))?;
        let call = self.call(op(peer), name, tensor)?;
        if peer == self.endpoint.rank {
            return Err(Error::Value(format!("{call}: that is this rank")));
        }
        Ok(call)
    }
}
