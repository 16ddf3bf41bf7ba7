//! Simulates the overlap of compute and collectives as two streams that slow each other down.

use std::collections::VecDeque;

/// The result of a collective, for which compute waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Brings {
    /// The weights of a unit.
    Weights(usize),
    /// The sums of gradients.
    Gradients,
}

/// A collective.
#[derive(Clone, Copy, Debug)]
pub(super) struct Collective {
    /// The seconds of the collective without overlap.
    pub seconds: f64,
    /// The time of the collective when it overlaps with products, relative to `seconds`.
    pub beside_products: f64,
}

/// A step in progress. Times are in seconds.
#[derive(Debug)]
pub(super) struct Timeline {
    /// The time of a product that overlaps with collectives, relative to its time alone.
    products: f64,
    /// The collectives in order. Each has the seconds that are left of it.
    collectives: VecDeque<(Brings, Collective)>,
    /// The seconds for which compute waited for collectives.
    pub exposed: f64,
    /// The seconds by which collectives slowed compute down.
    pub slowdown: f64,
    /// The seconds of compute, without overlap.
    pub computed: f64,
}

impl Timeline {
    /// Returns an empty timeline. A product that overlaps with collectives takes `products` times as long.
    pub fn new(products: f64) -> Timeline {
        Timeline { products, collectives: VecDeque::new(), exposed: 0.0, slowdown: 0.0, computed: 0.0 }
    }

    /// Enqueues a collective after all earlier collectives.
    pub fn start(&mut self, brings: Brings, collective: Collective) {
        self.collectives.push_back((brings, collective));
    }

    /// Waits for the collective with the result `brings`, and for all earlier collectives.
    pub fn wait(&mut self, brings: Brings) {
        while self.collectives.iter().any(|(other, _)| *other == brings) {
            self.exposed += self.collectives.pop_front().map_or(0.0, |(_, left)| left.seconds);
        }
    }

    /// Runs compute that takes `seconds` without overlap.
    pub fn compute(&mut self, mut seconds: f64) {
        self.computed += seconds;
        while seconds > 0.0 {
            let Some((_, left)) = self.collectives.front_mut() else { return };
            let [collective, compute] = [left.seconds * left.beside_products, seconds * self.products];
            let both = collective.min(compute);
            self.slowdown += both - both / self.products;
            // The comparison is made once, because subtracting rounded times could end the collective and the compute together.
            if collective > compute {
                left.seconds -= both / left.beside_products;
                return;
            }
            self.collectives.pop_front();
            seconds -= both / self.products;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A collective of 2 s takes 4 s while it overlaps with compute. In these 4 s, compute does 3.2 s of its work.
    #[test]
    fn both_slow_down_while_both_run() {
        let begin = || Timeline::new(1.25);
        let of = |seconds| Collective { seconds, beside_products: 2.0 };
        let mut hidden = begin();
        hidden.start(Brings::Gradients, of(2.0));
        hidden.compute(8.0);
        hidden.wait(Brings::Gradients);
        assert_eq!(hidden.exposed, 0.0);
        assert!((hidden.slowdown - 0.8).abs() < 1e-12);
        // Compute ends after 2.5 s, and the collective takes 0.75 s more.
        let mut exposed = begin();
        exposed.start(Brings::Weights(0), of(2.0));
        exposed.compute(2.0);
        exposed.wait(Brings::Weights(0));
        assert_eq!((exposed.exposed, exposed.slowdown), (0.75, 0.5));
        // Compute does not wait for collectives after the one that it needs.
        let mut first = begin();
        first.start(Brings::Weights(0), of(1.0));
        first.start(Brings::Weights(1), of(1.0));
        first.wait(Brings::Weights(0));
        assert_eq!(first.exposed, 1.0);
        first.compute(10.0);
        first.wait(Brings::Weights(1));
        assert_eq!(first.exposed, 1.0);
    }
}
