//! Point-to-point messages between ranks of a group.
//!
//! Messages are matched by sender, receiver and order, and compared like collectives. A send on the CPU does not block: the hub buffers the
//! data, and fails the job if the receiver does not receive it within [`Limits::collective`](super::Limits::collective).
//!
//! An announcement goes from one rank to all other ranks of its group. It is numbered like a collective, but its sender has no deadline.

use super::call::{Call, Op};
use super::group::{Group, is_elsewhere};
use super::pending::{Pending, Progress};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

#[cfg(test)]
mod tests;

/// A message to one rank and a message from one rank, at the same time.
pub(super) struct Exchange<'a> {
    pub name: &'a str,
    pub to: usize,
    pub input: &'a Tensor,
    pub from: usize,
    pub output: Tensor,
}

impl Group {
    /// Sends `tensor`, of any type, to rank `to` of the group, which calls [`Group::receive`] or [`Group::exchange`].
    ///
    /// Errors with [`Error::Value`] if `to` is this rank. If the receiver expects another name, type or size, later calls of the two ranks
    /// error. On GPUs a send waits for its receive, so two ranks that send to each other must call [`Group::exchange`].
    pub fn send(&self, name: &str, to: usize, tensor: &Tensor) -> Result<Pending> {
        let call = self.message(name, |to| Op::Send { to }, to, tensor)?;
        if is_elsewhere(tensor) {
            return self.start_messages_on_gpu(Some((&call, tensor)), None);
        }
        self.start(call, tensor.read_bytes()?).detach()?;
        Ok(Pending { progress: Progress::Done, output: tensor.clone(), _input: None })
    }

    /// Receives the tensor that rank `from` of the group [sends](Group::send) into `tensor`.
    ///
    /// Errors like [`Group::send`].
    pub fn receive(&self, name: &str, from: usize, tensor: Tensor) -> Result<Pending> {
        let call = self.message(name, |from| Op::Receive { from }, from, &tensor)?;
        if is_elsewhere(&tensor) {
            return self.start_messages_on_gpu(None, Some((&call, tensor)));
        }
        Ok(Pending { progress: Progress::Sent(self.start(call, Vec::new())), output: tensor, _input: None })
    }

    /// Sends `input` to rank `to` and receives `output` from rank `from` at the same time, so that ranks that exchange tensors do not
    /// deadlock. Sizes may differ. If `to` and `from` are this rank, `input` is copied to `output`.
    ///
    /// Errors like [`Group::send`].
    pub fn exchange(&self, name: &str, to: usize, input: &Tensor, from: usize, output: Tensor) -> Result<Pending> {
        self.start_exchange(Exchange { name, to, input, from, output }, None)
    }

    /// Starts an exchange. If `at` is given, the output is in symmetric memory, and the input is written at this byte of the receiver's block.
    pub(super) fn start_exchange(&self, exchange: Exchange, at: Option<usize>) -> Result<Pending> {
        let Exchange { name, to, input, from, mut output } = exchange;
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
            if let Some((at, reached)) = at.zip(self.reached(&output)) {
                return self.start_exchange_by_copies([&sent, &received], [to, from], input, output, (reached, at));
            }
            return self.start_messages_on_gpu(Some((&sent, input)), Some((&received, output)));
        }
        self.start(sent, input.read_bytes()?).detach()?;
        Ok(Pending { progress: Progress::Sent(self.start(received, Vec::new())), output, _input: None })
    }

    /// Sends `bytes`, host data of any length, to all other ranks of the group, which [listen](Group::listen). Does not wait for these ranks.
    pub fn announce(&self, what: &str, bytes: Vec<u8>) -> Result<()> {
        self.start(Call::control(Op::Announce { root: self.endpoint.rank }, what), bytes).detach()
    }

    /// Waits for the bytes that rank `from` of the group [announces](Group::announce). The wait has no time limit, because a server without requests
    /// is healthy. If the rank ends, the wait errors at once.
    pub fn listen(&self, what: &str, from: usize) -> Result<Vec<u8>> {
        let root = self.rank_of(from, || format!("announce `{what}`: from"))?;
        Ok(self.start(Call::control(Op::Announce { root }, what), Vec::new()).wait()?.to_vec())
    }

    /// Returns a checked call: one side of a message with rank `peer` of the group.
    fn message(&self, name: &str, op: impl Fn(usize) -> Op, peer: usize, tensor: &Tensor) -> Result<Call> {
        let peer = self.rank_of(peer, || format!("message `{name}`: with"))?;
        let call = self.call(op(peer), name, tensor)?;
        if peer == self.endpoint.rank {
            return Err(Error::Value(format!("{call}: that is this rank")));
        }
        Ok(call)
    }
}
