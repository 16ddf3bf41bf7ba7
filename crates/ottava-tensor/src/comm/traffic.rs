//! Counters of the calls of collectives and of the bytes that they move.

use super::call::{Call, Op};
use serde::Serialize;
use std::iter::Sum;
use std::ops::{Add, Mul, Sub};

/// The calls of one kind and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Sent {
    /// The number of calls.
    pub calls: u64,
    /// The number of bytes that this rank sends in these calls.
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

impl Sum for Sent {
    fn sum<I: Iterator<Item = Sent>>(all: I) -> Sent {
        all.fold(Sent::default(), Sent::add)
    }
}

impl Mul<u64> for Sent {
    type Output = Sent;

    fn mul(self, times: u64) -> Sent {
        Sent { calls: self.calls * times, bytes: self.bytes * times }
    }
}

/// The pattern in which a kind of call moves bytes, for models of its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Every rank gets the whole buffer.
    Gather,
    /// Every rank gets a slice of a sum.
    Reduce,
    /// Every rank gets the whole sum. It moves the bytes of a reduce and of a gather.
    ReduceAndGather,
    /// Every rank sends different data to each other rank.
    Exchange,
    /// One rank sends to one other rank.
    Message,
}

/// Declares [`Traffic`] with a row for each kind of call: its documentation, its field, its name and its pattern.
macro_rules! traffic {
    ($($(#[$doc:meta])* $field:ident, $name:literal, $pattern:ident;)*) => {
        /// The messages and bytes that one rank sends in all its groups, by kind of call.
        ///
        /// Bytes are counted as a bandwidth-optimal collective of `W` ranks sends them, on every backend. A ring or a direct exchange sends (W - 1) /
        /// W of the buffer in [`all_gather`](super::Group::all_gather), [`reduce_scatter`](super::Group::reduce_scatter) and
        /// [`all_to_all`](super::Group::all_to_all), and twice this in [`all_reduce`](super::Group::all_reduce). In a
        /// [`broadcast`](super::Group::broadcast) all ranks but one send the buffer once, on average (W - 1) / W of it per rank. Each call is rounded
        /// down to whole bytes. A [message](super::Group::send) is counted for its sender. Barriers, agreements and splits are not counted.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
        pub struct Traffic {
            $($(#[$doc])* pub $field: Sent,)*
        }

        impl Traffic {
            /// Returns the kinds with their names and patterns, in the order of the fields.
            pub fn kinds(&self) -> impl Iterator<Item = (&'static str, Pattern, Sent)> {
                [$(($name, Pattern::$pattern, self.$field)),*].into_iter()
            }

            /// Applies `combine` kind by kind.
            fn zip(self, other: Traffic, combine: impl Fn(Sent, Sent) -> Sent) -> Traffic {
                Traffic { $($field: combine(self.$field, other.$field)),* }
            }
        }
    };
}

traffic! {
    /// All-gathers.
    all_gather, "all-gather", Gather;
    /// Reduce-scatters, in the type of the input.
    reduce_scatter, "reduce-scatter", Reduce;
    /// All-reduces, sums and maxima.
    all_reduce, "all-reduce", ReduceAndGather;
    /// All-to-alls.
    all_to_all, "all-to-all", Exchange;
    /// Broadcasts.
    broadcast, "broadcast", Gather;
    /// Messages to single ranks.
    send, "send", Message;
}

impl Traffic {
    /// Returns the calls and bytes of all kinds.
    pub fn total(&self) -> Sent {
        self.kinds().map(|(.., sent)| sent).sum()
    }

    /// Returns the calls and bytes of the kinds with this pattern.
    pub fn of(&self, pattern: Pattern) -> Sent {
        self.kinds().filter(|(_, of, _)| *of == pattern).map(|(.., sent)| sent).sum()
    }

    /// Counts `call` in a group of `size` ranks.
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

    /// Returns the difference to the earlier reading `before`.
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
