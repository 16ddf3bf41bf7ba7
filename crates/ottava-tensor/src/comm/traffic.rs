//! Counters of the bytes that collectives move.

use super::call::{Call, Op};

/// Bytes that one rank of a group of `W` sends, by kind of collective.
///
/// They are what the collective itself has to move, whatever the backend: a ring or a direct exchange sends (W - 1) / W of the
/// buffer in [`all_gather`](super::Comm::all_gather), [`reduce_scatter`](super::Comm::reduce_scatter) and
/// [`all_to_all`](super::Comm::all_to_all), and twice that in [`all_reduce`](super::Comm::all_reduce). In a
/// [`broadcast`](super::Comm::broadcast) all ranks but one send the buffer once, (W - 1) / W of it on average. Each call is rounded down to
/// bytes. Barriers and agreements are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes of all-gathers.
    pub all_gather: u64,
    /// Bytes of reduce-scatters, in the type of the input.
    pub reduce_scatter: u64,
    /// Bytes of all-reduces, sums and maxima.
    pub all_reduce: u64,
    /// Bytes of all-to-alls.
    pub all_to_all: u64,
    /// Bytes of broadcasts.
    pub broadcast: u64,
}

impl Traffic {
    /// Bytes of all kinds.
    pub fn total(&self) -> u64 {
        self.all_gather + self.reduce_scatter + self.all_reduce + self.all_to_all + self.broadcast
    }

    /// Adds `call` in a group of `size` ranks.
    pub(super) fn count(&mut self, call: &Call, size: usize) {
        let buffer = (call.buffer_bytes() * (size - 1)) as u64;
        let size = size as u64;
        match call.op {
            Op::AllGather => self.all_gather += buffer / size,
            Op::ReduceScatter { .. } => self.reduce_scatter += buffer / size,
            Op::AllReduce(_) => self.all_reduce += 2 * buffer / size,
            Op::AllToAll => self.all_to_all += buffer / size,
            Op::Broadcast { .. } => self.broadcast += buffer / size,
            Op::Barrier | Op::Agree => {}
        }
    }
}
