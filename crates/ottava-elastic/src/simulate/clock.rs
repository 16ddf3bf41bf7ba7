//! Time, the queue of events, and random numbers.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, VecDeque};

/// Events in the order of their times. Events of the same time come in the order in which they were added.
#[derive(Debug)]
pub(super) struct Clock<E> {
    /// The time in seconds.
    pub now: f64,
    added: u64,
    queue: BinaryHeap<Timed<E>>,
    /// The seconds of a message.
    latency: f64,
    /// Messages, in their order: all have the same latency.
    messages: VecDeque<Timed<E>>,
}

#[derive(Debug)]
struct Timed<E> {
    at: f64,
    number: u64,
    event: E,
}

impl<E> Clock<E> {
    pub fn new(latency: f64) -> Clock<E> {
        Clock { now: 0.0, added: 0, queue: BinaryHeap::new(), latency, messages: VecDeque::new() }
    }

    /// Adds a message, which arrives after the latency.
    pub fn send(&mut self, event: E) {
        self.added += 1;
        self.messages.push_back(Timed { at: self.now + self.latency, number: self.added, event });
    }

    /// Adds an event `delay` seconds from now.
    pub fn after(&mut self, delay: f64, event: E) {
        self.added += 1;
        self.queue.push(Timed { at: self.now + delay, number: self.added, event });
    }

    /// Returns the next event before `end`, and sets the time to its time. Without such an event, sets the time to `end`.
    pub fn next_before(&mut self, end: f64) -> Option<E> {
        // The order of the heap is reversed.
        let is_message = match (self.messages.front(), self.queue.peek()) {
            (Some(message), Some(other)) => message > other,
            (message, _) => message.is_some(),
        };
        let next = if is_message { self.messages.front() } else { self.queue.peek() };
        if next.is_none_or(|next| next.at >= end) {
            self.now = end;
            return None;
        }
        let Timed { at, event, .. } = if is_message { self.messages.pop_front() } else { self.queue.pop() }?;
        self.now = at;
        Some(event)
    }
}

impl<E> Ord for Timed<E> {
    fn cmp(&self, other: &Timed<E>) -> Ordering {
        other.at.total_cmp(&self.at).then(other.number.cmp(&self.number))
    }
}

impl<E> PartialOrd for Timed<E> {
    fn partial_cmp(&self, other: &Timed<E>) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> PartialEq for Timed<E> {
    fn eq(&self, other: &Timed<E>) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<E> Eq for Timed<E> {}

/// Random numbers that depend on the seed alone (SplitMix64; Steele, Lea and Flood 2014).
#[derive(Debug)]
pub(super) struct Random {
    state: u64,
}

impl Random {
    pub fn new(seed: u64) -> Random {
        Random { state: seed.wrapping_mul(0xd1b5_4a32_d192_ed03) }
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number from 0 to 1, without 1.
    pub fn uniform(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Returns a number from 0 to `end`, without `end`.
    pub fn below(&mut self, end: u32) -> u32 {
        (self.uniform() * f64::from(end)) as u32
    }

    /// Returns a time with an exponential distribution.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -(1.0 - self.uniform()).ln() * mean
    }
}
