//! Counters of the calls of collectives and of the bytes that they move.

use super::call::{Call, Op};
use serde::Serialize;
use std::ops::{Add, Mul, Sub};

/// Collectives of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Sent {
    /// Calls.
    pub calls: u64,
    /// Bytes that this rank sends in them.
    pub bytes: u64,
}

impl Sent {
    fn count(&mut self, bytes: u64) {
        *self = *self + Sent { calls: 1, bytes };
    }
}

impl Add for Sent {
    type Output = Sent;

    fn add(self, other: Sent) -> Sent {
        Sent { calls: self.calls + other.calls, bytes: self.bytes + other.bytes }
    }
}

impl Sub for Sent {
    type Output = Sent;

    fn sub(self, other: Sent) -> Sent {
        Sent { calls: self.calls - other.calls, bytes: self.bytes - other.bytes }
    }
}

impl Mul<u64> for Sent {
    type Output = Sent;

    fn mul(self, times: u64) -> Sent {
        Sent { calls: self.calls * times, bytes: self.bytes * times }
    }
}

/// What one rank sends in all its groups, by kind of call.
///
/// Bytes are what a bandwidth-optimal collective of `W` ranks sends, on every backend: a ring or a direct exchange sends (W - 1) / W
/// of the buffer in [`all_gather`](super::Group::all_gather), [`reduce_scatter`](super::Group::reduce_scatter) and
/// [`all_to_all`](super::Group::all_to_all), and twice that in [`all_reduce`](super::Group::all_reduce). In a
/// [`broadcast`](super::Group::broadcast) all ranks but one send the buffer once, on average (W - 1) / W of it per rank. Each call is
/// rounded down to whole bytes. A [message](super::Group::send) counts for its sender. Barriers, agreements and splits are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Traffic {
    /// All-gathers.
    pub all_gather: Sent,
    /// Reduce-scatters, in the type of the input.
    pub reduce_scatter: Sent,
    /// All-reduces, sums and maxima.
    pub all_reduce: Sent,
    /// All-to-alls.
    pub all_to_all: Sent,
    /// Broadcasts.
    pub broadcast: Sent,
    /// Messages to single ranks.
    pub send: Sent,
}

impl Traffic {
    /// Calls and bytes of all kinds.
    pub fn total(&self) -> Sent {
        self.all_gather + self.reduce_scatter + self.all_reduce + self.all_to_all + self.broadcast + self.send
    }

    /// The kinds with their names, in the order of the fields.
    pub fn kinds(&self) -> [(&'static str, Sent); 6] {
        [
            ("all-gather", self.all_gather),
            ("reduce-scatter", self.reduce_scatter),
            ("all-reduce", self.all_reduce),
            ("all-to-all", self.all_to_all),
            ("broadcast", self.broadcast),
            ("send", self.send),
        ]
    }

    /// Applies `combine` kind by kind.
    fn zip(self, other: Traffic, combine: impl Fn(Sent, Sent) -> Sent) -> Traffic {
        Traffic {
            all_gather: combine(self.all_gather, other.all_gather),
            reduce_scatter: combine(self.reduce_scatter, other.reduce_scatter),
            all_reduce: combine(self.all_reduce, other.all_reduce),
            all_to_all: combine(self.all_to_all, other.all_to_all),
            broadcast: combine(self.broadcast, other.broadcast),
            send: combine(self.send, other.send),
        }
    }

    /// Adds `call` in a group of `size` ranks.
    pub(super) fn count(&mut self, call: &Call, size: usize) {
        let buffer = (call.buffer_bytes() * (size - 1)) as u64;
        let size = size as u64;
        match call.op {
            Op::AllGather => self.all_gather.count(buffer / size),
            Op::ReduceScatter { .. } => self.reduce_scatter.count(buffer / size),
            Op::AllReduce(_) => self.all_reduce.count(2 * buffer / size),
            Op::AllToAll => self.all_to_all.count(buffer / size),
            Op::Broadcast { .. } => self.broadcast.count(buffer / size),
            Op::Send { .. } => self.send.count(call.buffer_bytes() as u64),
            Op::Receive { .. } | Op::Announce { .. } | Op::Barrier | Op::Agree | Op::Split => {}
        }
    }
}

impl Add for Traffic {
    type Output = Traffic;

    fn add(self, other: Traffic) -> Traffic {
        self.zip(other, Sent::add)
    }
}

impl Sub for Traffic {
    type Output = Traffic;

    /// The difference to the earlier reading `before`.
    fn sub(self, before: Traffic) -> Traffic {
        self.zip(before, Sent::sub)
    }
}

impl Mul<u64> for Traffic {
    type Output = Traffic;

    fn mul(self, times: u64) -> Traffic {
        self.zip(Traffic::default(), |sent, _| sent * times)
    }
}
