//! Compute and collectives beside each other: a stream of each, and how they slow each other down.

use serde::Serialize;
use std::collections::VecDeque;

/// How products and collectives slow each other down while both run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Contention {
    /// Time of a product beside collectives, over its time alone.
    pub products: f64,
    /// Time of a collective beside products, over its time alone.
    pub collectives: f64,
}

impl Contention {
    /// Gathers and reduce-scatters of 200 MB beside FP8 products on four H200: products take 1.176 and 1.161 times as long, collectives
    /// 1.375 and 1.480 times (`ottava bench comm`, docs/parallelism.md).
    pub const H200: Contention = Contention { products: 1.17, collectives: 1.43 };
}

/// What a collective brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Brings {
    /// The weights of a unit.
    Weights(usize),
    /// Sums of gradients.
    Gradients,
}

/// A step in progress. Times are in seconds.
#[derive(Debug)]
pub(super) struct Timeline {
    contention: Contention,
    /// Collectives in their order, with the time that each still takes alone.
    collectives: VecDeque<(Brings, f64)>,
    /// Compute waited for a collective.
    pub exposed: f64,
    /// By so much collectives have slowed compute down.
    pub slowdown: f64,
}

impl Timeline {
    pub fn new(contention: Contention) -> Timeline {
        Timeline { contention, collectives: VecDeque::new(), exposed: 0.0, slowdown: 0.0 }
    }

    /// Starts a collective that takes `seconds` alone, after those before it.
    pub fn start(&mut self, brings: Brings, seconds: f64) {
        self.collectives.push_back((brings, seconds));
    }

    /// Waits for what `brings`, and for all collectives before it.
    pub fn wait(&mut self, brings: Brings) {
        while self.collectives.iter().any(|(other, _)| *other == brings) {
            self.exposed += self.collectives.pop_front().map_or(0.0, |(_, left)| left);
        }
    }

    /// Runs compute that takes `seconds` alone.
    pub fn compute(&mut self, mut seconds: f64) {
        let Contention { products, collectives } = self.contention;
        while seconds > 0.0 {
            let Some((_, left)) = self.collectives.front_mut() else { return };
            // Until the collective or compute ends.
            let both = (*left * collectives).min(seconds * products);
            self.slowdown += both - both / products;
            seconds -= both / products;
            *left -= both / collectives;
            if seconds > 0.0 || *left <= 0.0 {
                self.collectives.pop_front();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A collective of 2 s takes 4 s beside compute, which does 3.2 s of its work in that time.
    #[test]
    fn both_slow_down_while_both_run() {
        let begin = || Timeline::new(Contention { products: 1.25, collectives: 2.0 });
        let mut hidden = begin();
        hidden.start(Brings::Gradients, 2.0);
        hidden.compute(8.0);
        hidden.wait(Brings::Gradients);
        assert_eq!(hidden.exposed, 0.0);
        assert!((hidden.slowdown - 0.8).abs() < 1e-12);
        // After 2.5 s compute has ended, and the collective takes 0.75 s more.
        let mut exposed = begin();
        exposed.start(Brings::Weights(0), 2.0);
        exposed.compute(2.0);
        exposed.wait(Brings::Weights(0));
        assert_eq!((exposed.exposed, exposed.slowdown), (0.75, 0.5));
        // Nobody waits for what comes after.
        let mut first = begin();
        first.start(Brings::Weights(0), 1.0);
        first.start(Brings::Weights(1), 1.0);
        first.wait(Brings::Weights(0));
        assert_eq!(first.exposed, 1.0);
        first.compute(10.0);
        first.wait(Brings::Weights(1));
        assert_eq!(first.exposed, 1.0);
    }
}
