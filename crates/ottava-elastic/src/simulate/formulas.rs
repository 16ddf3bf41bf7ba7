//! Closed formulas for goodput, and the number of spares.

use serde::Serialize;

/// A job that goes back to a checkpoint after each failure. Times are in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Disk {
    /// The mean time between failures.
    pub between_failures: f64,
    /// The pause of training for a checkpoint.
    pub pause: f64,
    /// The time until a checkpoint is complete.
    pub write: f64,
    /// The time from a failure to the first step after it.
    pub restart: f64,
}

impl Disk {
    /// Whether failures are so rare that the formula of [`Disk::goodput`] holds: at least ten restarts apart.
    pub fn is_rare(&self) -> bool {
        self.between_failures >= 10.0 * self.restart
    }

    /// Returns the interval between checkpoints that maximizes the goodput: `d + sqrt(2 d (M + R) + d²)`. It exceeds the interval `sqrt(2 d M)` of Young
    /// 1974 slightly.
    pub fn best_interval(&self) -> f64 {
        let Disk { between_failures, pause, restart, .. } = *self;
        pause + (2.0 * pause * (between_failures + restart) + pause * pause).sqrt()
    }

    /// Returns the share of the time that trains new steps, if checkpoints are `interval` apart: `1 - d/t - (t/2 + w + R)/M`. It holds if [`Disk::is_rare`].
    pub fn goodput(&self, interval: f64) -> f64 {
        let Disk { between_failures, pause, write, restart } = *self;
        1.0 - pause / interval - (interval / 2.0 + write + restart) / between_failures
    }
}

/// Returns the share of the time that trains new steps, if a snapshot is in memory after each step: `(1 - c) exp(-R/M)`. `cost` is the share of the time
/// that snapshots take.
pub fn memory_goodput(cost: f64, restart: f64, between_failures: f64) -> f64 {
    (1.0 - cost) * (-restart / between_failures).exp()
}

/// Returns the smallest number of spare hosts that is enough with a probability of `quantile`, if `lost` hosts are being repaired on average. The number
/// of hosts in repair has a Poisson distribution.
pub fn spares(lost: f64, quantile: f64) -> u32 {
    // The first terms of a large number are too small for a float, but their logarithms are not.
    let (mut log, mut sum, mut count) = (-lost, 0.0, 0);
    loop {
        let term = log.exp();
        sum += term;
        // The sum of rounded terms may stay below a quantile close to 1.
        if sum >= quantile || (term < f64::EPSILON && f64::from(count) > lost) {
            return count;
        }
        count += 1;
        log += (lost / f64::from(count)).ln();
    }
}
