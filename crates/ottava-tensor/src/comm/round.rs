//! An open call: some ranks of its channel have not made it yet.

use super::call::{Call, Channel, Op};
use super::combine::Bytes;
use super::fault::Fault;
use super::members::Members;
use std::sync::Arc;
use std::time::Instant;

/// The answer to a call.
pub(super) type Reply = Result<Bytes, Fault>;

/// Delivers an answer. It is called with the hub locked, so it must neither block nor call the hub.
pub(super) type Sink = Box<dyn FnOnce(Reply) + Send>;

/// A call of a rank, with the bytes that the rank contributes and the sink for the answer.
pub(super) struct Arrival {
    pub rank: usize,
    pub call: Call,
    pub bytes: Vec<u8>,
    pub sink: Sink,
}

impl Arrival {
    /// Returns whether the rank waits for the other ranks. A sender does not wait.
    pub fn waits(&self) -> bool {
        match self.call.op {
            Op::Send { .. } => false,
            Op::Announce { root } => root != self.rank,
            _ => true,
        }
    }
}

/// One call of all ranks of a channel.
pub(super) struct Round {
    pub group: Arc<Members>,
    pub number: u64,
    /// The ranks of the channel.
    ranks: Vec<usize>,
    /// The time at which the first rank made the call.
    pub began: Instant,
    /// The arrivals, by index in `ranks`.
    pub arrivals: Vec<Option<Arrival>>,
}

impl Round {
    pub fn new(channel: Channel, number: u64, group: Arc<Members>) -> Round {
        let ranks = channel.pair.map_or_else(|| group.ranks.clone(), |(from, to)| vec![from, to]);
        let arrivals = ranks.iter().map(|_| None).collect();
        Round { group, number, ranks, began: Instant::now(), arrivals }
    }

    pub fn add(&mut self, arrival: Arrival) {
        let place = self.ranks.iter().position(|&rank| rank == arrival.rank).expect("a rank of the channel");
        self.arrivals[place] = Some(arrival);
    }

    pub fn came(&self) -> impl Iterator<Item = &Arrival> {
        self.arrivals.iter().flatten()
    }

    pub fn missing(&self) -> impl Iterator<Item = usize> {
        self.ranks.iter().zip(&self.arrivals).filter(|(_, arrival)| arrival.is_none()).map(|(&rank, _)| rank)
    }

    /// Returns the missing ranks that have to make the call in time. A rank that must announce something has no deadline.
    pub fn due(&self) -> impl Iterator<Item = usize> {
        let announces = |rank: usize| self.came().any(|came| came.call.op == Op::Announce { root: rank });
        self.missing().filter(move |&rank| !announces(rank))
    }

    /// Returns whether `rank` has made the call and waits for the other ranks.
    pub fn holds(&self, rank: usize) -> bool {
        self.came().any(|arrival| arrival.rank == rank && arrival.waits())
    }

    /// Returns the problem of an arrival, or `None` if it has no problem.
    pub fn problem(&self, Arrival { rank, call, bytes, .. }: &Arrival) -> Option<String> {
        let (number, group, sent) = (self.number, &self.group, bytes.len());
        if let Some(expected) = call.sent_bytes(*rank, group.ranks.len()).filter(|&expected| expected != sent) {
            return Some(format!("rank {rank} sends {sent} bytes for {call}, expected {expected}"));
        }
        if self.came().any(|other| other.rank == *rank) {
            return Some(format!("rank {rank} calls {call} as number {number}{group}, which it has called before"));
        }
        let other = self.came().next().filter(|other| !call.fits(&other.call))?;
        let (own, other) = ((rank, call), (&other.rank, &other.call));
        let ((low, low_call), (high, high_call)) = if other.0 < own.0 { (other, own) } else { (own, other) };
        let kind = if matches!(call.op, Op::Send { .. } | Op::Receive { .. }) { "message" } else { "collective" };
        Some(format!("rank {high} calls {high_call} as its {kind} {number}{group}, rank {low} calls {low_call}"))
    }
}
