//! Collectives alone, and beside products.

use super::gemm::Fprop;
use super::{ROUNDS, total};
use crate::comm::{Group, Pending, Reduce};
use crate::cuda::Event;
use crate::{DType, Device, Error, Result, Tensor};
use serde::Serialize;
use std::time::Instant;

/// Timed rounds of a collective, whose median is reported.
const TIMED: usize = 11;

/// Bytes that a round of a collective moves on a GPU, in calls back to back: launches of small ones then overlap.
const ROUND_BYTES: usize = 128 << 20;

/// Most calls of a round, and most collectives in flight beside products.
const MOST_CALLS: usize = 32;

/// Products of a round beside collectives.
const PRODUCTS: usize = 8;

/// A collective as training calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum CollectiveKind {
    /// An all-gather of bytes, as ranks gather codes of weights.
    AllGather,
    /// A reduce-scatter of BF16, as ranks reduce gradients.
    ReduceScatter,
    /// An all-reduce of F32, as ranks reduce gradients.
    AllReduce,
    /// An all-to-all of bytes.
    AllToAll,
}

impl CollectiveKind {
    /// All kinds.
    pub const ALL: [CollectiveKind; 4] =
        [CollectiveKind::AllGather, CollectiveKind::ReduceScatter, CollectiveKind::AllReduce, CollectiveKind::AllToAll];

    /// Its name, as "all-gather".
    pub fn as_str(self) -> &'static str {
        match self {
            CollectiveKind::AllGather => "all-gather",
            CollectiveKind::ReduceScatter => "reduce-scatter",
            CollectiveKind::AllReduce => "all-reduce",
            CollectiveKind::AllToAll => "all-to-all",
        }
    }

    /// The type of its elements.
    pub fn dtype(self) -> DType {
        match self {
            CollectiveKind::AllGather | CollectiveKind::AllToAll => DType::E4M3,
            CollectiveKind::ReduceScatter => DType::BF16,
            CollectiveKind::AllReduce => DType::F32,
        }
    }

    /// Bytes that each of `ranks` ranks sends for a buffer of `bytes`: divided by the time they are its bus bandwidth, as in nccl-tests.
    fn bus_bytes(self, bytes: usize, ranks: usize) -> f64 {
        let sent = bytes as f64 * (ranks - 1) as f64 / ranks as f64;
        if self == CollectiveKind::AllReduce { 2.0 * sent } else { sent }
    }
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct CommBench {
    /// Sizes of whole buffers in bytes, rounded down to what the ranks can divide.
    pub bytes: Vec<usize>,
    /// Bytes of the buffers of collectives beside products.
    pub beside_bytes: usize,
    /// Tokens, outputs and inputs of the product.
    pub product: [usize; 3],
}

/// One collective of one size, alone.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct CollectiveRow {
    /// The collective.
    pub kind: CollectiveKind,
    /// Bytes of the whole buffer.
    pub bytes: usize,
    /// Median milliseconds of a call.
    pub milliseconds: f64,
    /// Bytes per second that each rank sends.
    pub bus_bytes_per_second: f64,
}

/// `time = latency + bytes sent / bandwidth`, with the smallest sum of squared relative errors over the sizes of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LinkFit {
    /// The collective.
    pub kind: CollectiveKind,
    /// Seconds of a call without bytes.
    pub latency_seconds: f64,
    /// Bytes per second that each rank sends. Not positive where times do not grow with sizes.
    pub bytes_per_second: f64,
    /// Largest relative error of a time.
    pub residual: f64,
}

impl LinkFit {
    /// Fits pairs of bytes that each rank sends and seconds; `None` for fewer than two sizes.
    fn fit(kind: CollectiveKind, points: &[(f64, f64)]) -> Option<LinkFit> {
        // Minimises the sum of ((latency + slope · x) / t - 1)².
        let sum = |of: fn(f64, f64) -> f64| points.iter().map(|&(x, t)| of(x, t)).sum::<f64>();
        let (a, b, c) = (sum(|_, t| 1.0 / (t * t)), sum(|x, t| x / (t * t)), sum(|x, t| x * x / (t * t)));
        let (d, e) = (sum(|_, t| 1.0 / t), sum(|x, t| x / t));
        let determinant = a * c - b * b;
        if points.iter().all(|(x, _)| *x == points[0].0) {
            return None;
        }
        let (latency, slope) = ((d * c - b * e) / determinant, (a * e - b * d) / determinant);
        let residual = points.iter().map(|(x, t)| ((latency + slope * x) / t - 1.0).abs()).fold(0.0, f64::max);
        Some(LinkFit { kind, latency_seconds: latency, bytes_per_second: 1.0 / slope, residual })
    }
}

/// A collective and a product, alone and while the other runs back to back.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ContentionRow {
    /// The collective.
    pub kind: CollectiveKind,
    /// Bytes of its whole buffer.
    pub bytes: usize,
    /// Milliseconds of a product alone.
    pub product_milliseconds: f64,
    /// Milliseconds of a product beside collectives.
    pub product_beside_milliseconds: f64,
    /// Milliseconds of the collective alone.
    pub collective_milliseconds: f64,
    /// Milliseconds of the collective beside products; `None` where too few ran beside them to tell.
    pub collective_beside_milliseconds: Option<f64>,
}

impl ContentionRow {
    /// By how many percent products get slower.
    pub fn product_slowdown(&self) -> f64 {
        100.0 * (self.product_beside_milliseconds / self.product_milliseconds - 1.0)
    }

    /// By how many percent collectives get slower.
    pub fn collective_slowdown(&self) -> Option<f64> {
        self.collective_beside_milliseconds.map(|beside| 100.0 * (beside / self.collective_milliseconds - 1.0))
    }
}

/// What a rank has measured.
#[derive(Clone, Debug, Serialize)]
pub struct CommReport {
    /// Ranks of the group.
    pub ranks: usize,
    /// Collectives alone.
    pub rows: Vec<CollectiveRow>,
    /// A line through the times of each kind.
    pub fits: Vec<LinkFit>,
    /// Tokens, outputs and inputs of the product.
    pub product: [usize; 3],
    /// The type of its operands.
    pub product_dtype: &'static str,
    /// All-gathers and reduce-scatters beside products.
    pub contention: Vec<ContentionRow>,
}

/// Tensors of a collective in turn.
struct Buffers<'a> {
    comm: &'a Group,
    kind: CollectiveKind,
    /// The input of a reduce-scatter or an all-to-all.
    input: Option<Tensor>,
    /// Written in place, or outputs.
    outputs: Vec<Tensor>,
}

impl<'a> Buffers<'a> {
    /// Zeros for so many calls in flight.
    fn new(comm: &'a Group, device: &Device, kind: CollectiveKind, bytes: usize, calls: usize) -> Result<Buffers<'a>> {
        let (elements, dtype) = (bytes / kind.dtype().size(), kind.dtype());
        let (has_input, output) = match kind {
            CollectiveKind::AllGather | CollectiveKind::AllReduce => (false, elements),
            CollectiveKind::ReduceScatter => (true, elements / comm.size()),
            CollectiveKind::AllToAll => (true, elements),
        };
        let input = if has_input { Some(Tensor::zeros(device, &[elements], dtype)?) } else { None };
        let zeros = |_| {
            let mut zeros = comm.symmetric(device, &[output], dtype)?;
            zeros.fill_zero()?;
            Ok(zeros)
        };
        let outputs = (0..calls).map(zeros).collect::<Result<_>>()?;
        Ok(Buffers { comm, kind, input, outputs })
    }

    /// Starts a call on the next output.
    fn start(&mut self) -> Result<Pending> {
        let output = self.outputs.pop().expect("no more calls are in flight than there are outputs");
        let input = || self.input.as_ref().expect("the kind has an input");
        let name = "benchmark";
        match self.kind {
            CollectiveKind::AllGather => self.comm.all_gather(name, output),
            CollectiveKind::ReduceScatter => self.comm.reduce_scatter(name, input(), output),
            CollectiveKind::AllReduce => self.comm.all_reduce(name, Reduce::Sum, output),
            CollectiveKind::AllToAll => self.comm.all_to_all(name, input(), output),
        }
    }

    /// Ends a call, whose output is free again.
    fn end(&mut self, pending: Pending) -> Result<()> {
        self.outputs.push(pending.wait()?);
        Ok(())
    }

    /// One call, alone.
    fn call(&mut self) -> Result<()> {
        let pending = self.start()?;
        self.end(pending)
    }
}

/// A moment in the compute stream of a GPU, or on the clock.
enum Moment {
    Clock(Instant),
    Event(Event),
}

impl Moment {
    fn now(device: &Device) -> Result<Moment> {
        Ok(match device {
            Device::Cpu | Device::DryCpu(_) => Moment::Clock(Instant::now()),
            Device::Cuda(gpu) => Moment::Event(gpu.record()?),
        })
    }

    /// Milliseconds until `later`, for which it waits.
    fn until(&self, later: &Moment) -> Result<f64> {
        match (self, later) {
            (Moment::Clock(start), Moment::Clock(end)) => Ok((*end - *start).as_secs_f64() * 1e3),
            (Moment::Event(start), Moment::Event(end)) => start.milliseconds_until(end).map(f64::from),
            _ => unreachable!("both are of one device"),
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

impl CommBench {
    /// Sizes that training uses: buffers of 1 to 256 MiB, and 200 MB beside products of 8192 x 4096 x 11008; small products on the CPU.
    pub fn for_device(device: &Device) -> CommBench {
        let product = if matches!(device, Device::Cpu) { [128, 64, 96] } else { [8192, 4096, 11_008] };
        CommBench { bytes: [1, 4, 16, 64, 256].map(|mib| mib << 20).to_vec(), beside_bytes: 200_000_000, product }
    }

    /// Measures the group of `comm`, whose ranks all call this with equal settings, each with its device. Times are measured on this rank.
    ///
    /// Errors with [`Error::Value`] for a group of one rank, and for buffers that are smaller than 4 bytes per rank.
    pub fn run(&self, comm: &Group, device: &Device, mut report: impl FnMut(&CollectiveRow)) -> Result<CommReport> {
        let ranks = comm.size();
        if ranks < 2 {
            return Err(Error::Value("links are between ranks, and there is one; start 2 or more".into()));
        }
        // Slices of whole F32.
        let divided = |bytes: usize| bytes / (4 * ranks) * (4 * ranks);
        if self.bytes.iter().chain([&self.beside_bytes]).any(|&bytes| divided(bytes) == 0) {
            return Err(Error::Value(format!("buffers for {ranks} ranks have at least {} bytes", 4 * ranks)));
        }
        let (mut rows, mut fits) = (Vec::new(), Vec::new());
        for kind in CollectiveKind::ALL {
            let mut points = Vec::new();
            for bytes in self.bytes.iter().map(|&bytes| divided(bytes)) {
                let milliseconds = self.alone(comm, device, kind, bytes)?;
                let sent = kind.bus_bytes(bytes, ranks);
                let row =
                    CollectiveRow { kind, bytes, milliseconds, bus_bytes_per_second: sent / (milliseconds * 1e-3) };
                report(&row);
                rows.push(row);
                points.push((sent, milliseconds * 1e-3));
            }
            fits.extend(LinkFit::fit(kind, &points));
        }
        let product_dtype = if matches!(device, Device::Cpu) { DType::BF16 } else { DType::E4M3 };
        let product = Fprop::random(device, self.product, product_dtype)?;
        let contention = [CollectiveKind::AllGather, CollectiveKind::ReduceScatter]
            .into_iter()
            .map(|kind| self.contention(comm, device, kind, divided(self.beside_bytes), &product))
            .collect::<Result<_>>()?;
        Ok(CommReport { ranks, rows, fits, product: self.product, product_dtype: product_dtype.name(), contention })
    }

    /// Median milliseconds of a call.
    fn alone(&self, comm: &Group, device: &Device, kind: CollectiveKind, bytes: usize) -> Result<f64> {
        let mut buffers = Buffers::new(comm, device, kind, bytes, 1)?;
        // A call on the CPU ends on the host, so calls do not overlap.
        let calls = if matches!(device, Device::Cpu) { 1 } else { (ROUND_BYTES / bytes).clamp(2, MOST_CALLS) };
        let mut rounds = Vec::new();
        for round in 0..=TIMED {
            comm.barrier("a round")?;
            let milliseconds = total(device, calls, &mut || buffers.call())? / calls as f64;
            // The first warms up.
            if round > 0 {
                rounds.push(milliseconds);
            }
        }
        device.synchronize()?;
        Ok(median(rounds))
    }

    /// Times products beside collectives of `kind`.
    ///
    /// A round enqueues collectives that last about twice as long as its products, and then the products. Collectives run alone before the
    /// first product begins and after the last one ends; from their number, and their time alone, follows their time beside products.
    fn contention(
        &self,
        comm: &Group,
        device: &Device,
        kind: CollectiveKind,
        bytes: usize,
        product: &Fprop,
    ) -> Result<ContentionRow> {
        let collective = self.alone(comm, device, kind, bytes)?;
        product.run()?;
        let mut rounds = Vec::new();
        for _ in 0..ROUNDS {
            comm.barrier("products")?;
            device.synchronize()?;
            rounds.push(total(device, PRODUCTS, &mut || product.run())? / PRODUCTS as f64);
        }
        let product_alone = median(rounds);
        // All ranks start as many as rank 0.
        let wanted = (2.0 * PRODUCTS as f64 * product_alone / collective).ceil().clamp(4.0, MOST_CALLS as f64);
        let calls = comm.agree("collectives of a round", &[wanted as u8])?[0][0] as usize;
        let mut buffers = Buffers::new(comm, device, kind, bytes, calls)?;
        let (mut products, mut collectives) = (Vec::new(), Vec::new());
        for round in 0..=ROUNDS {
            device.synchronize()?;
            comm.barrier("a round")?;
            let begin = Moment::now(device)?;
            let pending = (0..calls).map(|_| buffers.start()).collect::<Result<Vec<_>>>()?;
            let first = Moment::now(device)?;
            (0..PRODUCTS).try_for_each(|_| product.run())?;
            let last = Moment::now(device)?;
            pending.into_iter().try_for_each(|pending| buffers.end(pending))?;
            let end = Moment::now(device)?;
            device.synchronize()?;
            let (beside, alone) = (first.until(&last)?, begin.until(&first)? + last.until(&end)?);
            // The first warms up.
            if round > 0 {
                products.push(beside / PRODUCTS as f64);
                collectives.push(beside / (calls as f64 - alone / collective));
            }
        }
        let collective_beside = median(collectives);
        Ok(ContentionRow {
            kind,
            bytes,
            product_milliseconds: product_alone,
            product_beside_milliseconds: median(products),
            collective_milliseconds: collective,
            collective_beside_milliseconds: (collective_beside > 0.0 && collective_beside.is_finite())
                .then_some(collective_beside),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::threads;
    use std::thread;

    #[test]
    fn a_line_is_found_again() {
        let line = |x: f64| 50e-6 + x / 265e9;
        let points: Vec<_> = [1e6, 4e6, 16e6, 64e6].map(|x| (x, line(x))).to_vec();
        let fit = LinkFit::fit(CollectiveKind::AllGather, &points).unwrap();
        // Four points on a line are fitted in F64; differences of sums lose a few of its 16 digits.
        assert!((fit.latency_seconds / 50e-6 - 1.0).abs() < 1e-6, "{fit:?}");
        assert!((fit.bytes_per_second / 265e9 - 1.0).abs() < 1e-6 && fit.residual < 1e-6, "{fit:?}");
        let off: Vec<_> = points.iter().enumerate().map(|(i, &(x, t))| (x, t * [1.1, 0.9][i % 2])).collect();
        let fit = LinkFit::fit(CollectiveKind::AllGather, &off).unwrap();
        // Points are in turn 10 % above and 10 % below the line, and the fit moves towards some points.
        assert!(fit.residual > 0.05 && fit.residual < 0.15, "{fit:?}");
        assert_eq!(LinkFit::fit(CollectiveKind::AllGather, &points[..1]), None);
        assert_eq!(LinkFit::fit(CollectiveKind::AllGather, &[]), None);
    }

    #[test]
    fn ranks_measure_their_links() {
        let bench = CommBench { bytes: vec![1000, 4096, 1 << 16], beside_bytes: 1 << 16, product: [16, 32, 48] };
        let reports = threads::group(3).into_iter().map(|comm| {
            let bench = bench.clone();
            thread::spawn(move || {
                let mut seen = 0;
                let report = bench.run(&comm, &Device::Cpu, |_| seen += 1).unwrap();
                assert_eq!(seen, report.rows.len());
                report
            })
        });
        for report in reports.collect::<Vec<_>>() {
            let report = report.join().unwrap();
            assert_eq!((report.rows.len(), report.fits.len(), report.contention.len()), (4 * 3, 4, 2));
            assert_eq!(report.rows[0].bytes, 996, "whole F32 for three ranks");
            for row in &report.rows {
                let sent = row.kind.bus_bytes(row.bytes, 3);
                let rate = sent / (row.milliseconds * 1e-3);
                // The same quotient in F64, computed from milliseconds: some units of 2⁻⁵³.
                assert!(row.milliseconds > 0.0 && (row.bus_bytes_per_second / rate - 1.0).abs() < 1e-9);
            }
            assert!(report.contention.iter().all(|row| row.product_beside_milliseconds > 0.0));
        }
        let bytes = CollectiveKind::ALL.map(|kind| kind.bus_bytes(300, 3));
        assert_eq!(bytes, [200.0, 200.0, 400.0, 200.0]);
    }

    #[test]
    fn one_rank_has_no_links() {
        let bench = CommBench::for_device(&Device::Cpu);
        let error = bench.run(&Group::solo(), &Device::Cpu, |_| {}).unwrap_err().to_string();
        assert!(error.contains("start 2 or more"), "{error}");
    }
}
