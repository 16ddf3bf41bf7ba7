//! Parts of a tensor that all other ranks of a group send.

use super::group::Group;
use super::messages::Exchange;
use super::pending::Pending;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// The memory in which equal parts from all other ranks of a group arrive, in the order of the ranks.
pub struct Inbox<'a> {
    group: &'a Group,
    /// The memory of each part, by sender. `None` once the part has been started.
    places: Vec<Option<Tensor>>,
    arriving: Vec<Pending>,
}

impl<'a> Inbox<'a> {
    /// Divides `memory` among the other ranks of `group`.
    pub(super) fn new(group: &'a Group, memory: Tensor) -> Result<Inbox<'a>> {
        let others = group.size() - 1;
        let part = memory.len() / others.max(1);
        let ranges: Vec<_> = (0..others).map(|at| at * part..(at + 1) * part).collect();
        let places = memory.split(&ranges)?.into_iter().map(Some).collect();
        Ok(Inbox { group, places, arriving: Vec::with_capacity(others) })
    }

    /// Sends `part` to rank `to`, and receives the part of rank `from`. `name` is as in [`Group::exchange`]. Each rank must send to and receive from
    /// each other rank once.
    pub fn exchange(&mut self, name: &str, to: usize, part: &Tensor, from: usize) -> Result<()> {
        let rank = self.group.rank();
        let place = self.places.get_mut(number(from, rank)).and_then(Option::take);
        let place = place.ok_or_else(|| Error::Value(format!("inbox `{name}`: rank {from} has sent its part")))?;
        let at = number(rank, to) * part.bytes();
        let exchange = Exchange { name, to, input: part, from, output: place };
        self.arriving.push(self.group.start_exchange(exchange, Some(at))?);
        Ok(())
    }

    /// Runs `work` while the last parts arrive ([`Pending::beside`]).
    pub fn beside<R>(&self, work: impl FnOnce() -> R) -> R {
        match self.arriving.last() {
            Some(pending) => pending.beside(work),
            None => work(),
        }
    }

    /// Waits for all parts, and returns them one after the other in one tensor.
    pub fn wait(self) -> Result<Tensor> {
        Tensor::join(self.arriving.into_iter().map(Pending::wait).collect::<Result<_>>()?)
    }
}

/// Returns the index of rank `sender` among the ranks other than `receiver`.
pub(super) fn number(sender: usize, receiver: usize) -> usize {
    sender - usize::from(sender > receiver)
}
