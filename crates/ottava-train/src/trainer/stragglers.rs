//! Finds ranks that are slower than the others.
//!
//! Collectives make all ranks as slow as the slowest one, so the time of a step does not tell which rank is slow. Each rank therefore times the same
//! products, which need no other rank. This finds slow GPUs and slow processors; it does not find slow disks or networks.

use ottava_common::error::Result;
use ottava_parallel::Ranks;
use ottava_tensor::ops::{Accumulation, Operand, gemm_nt};
use ottava_tensor::{DType, Device, Tensor};
use std::fs;
use std::time::Instant;

/// The number of searches in a row after which a slow rank is named. A single time may be long because of other work on the host.
const SEARCHES: u32 = 3;

/// The ranks that were slow in the last searches.
#[derive(Default)]
pub(super) struct Stragglers {
    /// For each rank, the number of searches in a row in which it was slow.
    slow: Vec<u32>,
    /// The names of the hosts of all ranks, after the first search.
    hosts: Vec<String>,
}

/// What a rank has measured.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Measured {
    /// The seconds of the products.
    seconds: f64,
    /// The clock of the GPU in megahertz; NaN without a GPU.
    clock: f64,
    /// The bits of `nvmlClocksThrottleReasons` of the GPU; 0 without a GPU.
    reasons: u64,
}

/// The reasons for a low clock, as nvidia-smi names them. Idle GPUs and clocks that a person has set are not among them.
const REASONS: [(u64, &str); 6] = [
    (1 << 2, "SW power cap"),
    (1 << 3, "HW slowdown"),
    (1 << 4, "sync boost"),
    (1 << 5, "SW thermal slowdown"),
    (1 << 6, "HW thermal slowdown"),
    (1 << 7, "HW power brake slowdown"),
];

/// A rank that was slow in all of the last searches.
#[derive(Clone, Debug, PartialEq)]
struct Found {
    rank: usize,
    own: Measured,
    median: Measured,
}

impl Stragglers {
    /// Searches for slow ranks. All `ranks` call it. The leading rank warns of each rank that becomes a straggler. Returns whether this rank did.
    pub(super) fn search(&mut self, device: &Device, ranks: &Ranks, ratio: f64) -> Result<bool> {
        if self.hosts.is_empty() {
            let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
            let names = ranks.gather_bytes("names of hosts", name.trim().as_bytes())?;
            self.hosts = names.iter().map(|name| String::from_utf8_lossy(name).into_owned()).collect();
        }
        let own = Measured::of(device)?;
        let all = ranks.gather("times of products", [own.seconds, own.clock, own.reasons as f64])?;
        let measured = |[seconds, clock, reasons]: [f64; 3]| Measured { seconds, clock, reasons: reasons as u64 };
        let all: Vec<Measured> = all.into_iter().map(measured).collect();
        let found = self.note(&all, ratio);
        if ranks.leads() {
            found.iter().for_each(|found| tracing::warn!("{}", self.describe(found)));
        }
        Ok(found.iter().any(|found| found.rank == ranks.rank()))
    }

    /// Notes the times of `all` ranks. Returns the ranks that were slow in the last searches and not in the search before them.
    fn note(&mut self, all: &[Measured], ratio: f64) -> Vec<Found> {
        let median = Measured {
            seconds: median(all.iter().map(|measured| measured.seconds)),
            clock: median(all.iter().map(|measured| measured.clock)),
            reasons: 0,
        };
        self.slow.resize(all.len(), 0);
        let mut found = Vec::new();
        for ((rank, own), searches) in all.iter().copied().enumerate().zip(&mut self.slow) {
            *searches = if own.seconds > ratio * median.seconds { *searches + 1 } else { 0 };
            if *searches == SEARCHES {
                found.push(Found { rank, own, median });
            }
        }
        found
    }

    fn describe(&self, Found { rank, own, median }: &Found) -> String {
        let clock = match own.clock.is_nan() || median.clock.is_nan() {
            true => String::new(),
            false => format!(
                "; its GPU runs at {:.0} MHz ({}), the median GPU at {:.0} MHz",
                own.clock,
                reasons(own.reasons),
                median.clock
            ),
        };
        format!(
            "rank {rank} on host {} is slow: the same products take {:.2} ms, {:.1} times the median of all ranks{clock}",
            self.hosts.get(*rank).map_or("", String::as_str),
            own.seconds * 1e3,
            own.seconds / median.seconds
        )
    }
}

impl Measured {
    /// Measures this rank. The products of a GPU take some milliseconds, so that their start does not matter.
    fn of(device: &Device) -> Result<Measured> {
        let (size, dtype, products) = match device {
            Device::Cuda(_) => (2048, DType::BF16, 300),
            Device::Cpu | Device::DryCpu(_) => (256, DType::F32, 5),
        };
        let [a, b] = [Tensor::zeros(device, &[size, size], dtype)?, Tensor::zeros(device, &[size, size], dtype)?];
        let product = || gemm_nt(Operand::plain(&a), Operand::plain(&b), dtype, Accumulation::Exact);
        // The first product of a run may take time to choose its algorithm.
        product()?;
        device.synchronize()?;
        let begin = Instant::now();
        for _ in 0..products {
            product()?;
        }
        device.synchronize()?;
        let seconds = begin.elapsed().as_secs_f64();
        let (clock, reasons) = match device {
            Device::Cuda(gpu) => (gpu.clock(), gpu.throttle_reasons()),
            Device::Cpu | Device::DryCpu(_) => (None, None),
        };
        Ok(Measured { seconds, clock: clock.unwrap_or(f64::NAN), reasons: reasons.unwrap_or(0) })
    }
}

/// Names the reasons for a low clock.
fn reasons(bits: u64) -> String {
    let named: Vec<&str> = REASONS.iter().filter(|(bit, _)| bits & bit != 0).map(|(_, name)| *name).collect();
    if named.is_empty() { "NVML reports no throttling".into() } else { named.join(", ") }
}

/// Returns the middle one of `numbers`; of an even count, the smaller one of the two in the middle, so that one of two ranks can be slow.
fn median(numbers: impl Iterator<Item = f64>) -> f64 {
    let mut numbers: Vec<f64> = numbers.collect();
    numbers.sort_by(f64::total_cmp);
    numbers[(numbers.len() - 1) / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(times: &[f64]) -> Vec<Measured> {
        times.iter().map(|&seconds| Measured { seconds, clock: 2.0 / seconds, reasons: 4 | 64 }).collect()
    }

    #[test]
    fn a_rank_is_named_once_after_three_slow_searches_in_a_row() {
        let mut stragglers =
            Stragglers { hosts: ["n0", "n0", "n1", "n1"].map(String::from).to_vec(), ..Stragglers::default() };
        let (even, slow) = ([1.0, 1.1, 0.9, 1.0], [1.0, 1.1, 0.9, 1.6]);
        let mut found =
            |times: &[f64]| stragglers.note(&of(times), 1.3).iter().map(|found| found.rank).collect::<Vec<_>>();
        assert!([&slow, &slow, &even, &slow, &slow].into_iter().all(|times| found(times).is_empty()));
        assert_eq!([&slow, &slow, &slow].map(|times| found(times)), [vec![3], vec![], vec![]], "named once");
        assert_eq!([&even, &slow, &slow, &slow].map(|times| found(times)), [vec![], vec![], vec![], vec![3]], "again");
    }

    #[test]
    fn one_of_two_ranks_is_slow_and_the_message_has_host_times_and_clocks() {
        let mut stragglers = Stragglers { hosts: vec!["n0".into(), "n1".into()], ..Stragglers::default() };
        let found = (0..3).flat_map(|_| stragglers.note(&of(&[0.002, 0.004]), 1.5)).collect::<Vec<_>>();
        assert_eq!(found.len(), 1);
        let said = stragglers.describe(&found[0]);
        assert!(
            said.starts_with("rank 1 on host n1 is slow: the same products take 4.00 ms, 2.0 times the median"),
            "{said}"
        );
        let expected = "its GPU runs at 500 MHz (SW power cap, HW thermal slowdown), the median GPU at 500 MHz";
        assert!(said.contains(expected), "{said}");
        assert_eq!(reasons(1 | 2), "NVML reports no throttling", "an idle GPU, and a clock that a person has set");
        let without = Measured { seconds: 1.0, clock: f64::NAN, reasons: 0 };
        assert!(!stragglers.describe(&Found { rank: 0, own: without, median: without }).contains("GPU"));
    }

    #[test]
    fn a_rank_measures_itself() {
        let own = Measured::of(&Device::Cpu).unwrap();
        assert!(own.seconds > 0.0 && own.seconds.is_finite() && own.clock.is_nan());
    }
}
