//! Collectives alone, and overlapped with products.

use super::gemm::Fprop;
use super::{ROUNDS, total};
use crate::comm::{Group, Pending, Reduce};
use crate::cuda::Event;
use crate::{DType, Device, Error, Result, Tensor};
use serde::Serialize;
use std::time::Instant;

/// The number of timed rounds of a collective. The median is reported.
const TIMED: usize = 11;

/// The number of bytes that a round of a collective moves on a GPU. Its calls are enqueued back to back, so launches of small calls overlap.
const ROUND_BYTES: usize = 128 << 20;

/// The maximum number of calls per round, and of collectives in flight next to products.
const MOST_CALLS: usize = 32;

/// The number of products per round next to collectives.
const PRODUCTS: usize = 8;

/// A collective as training calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum CollectiveKind {
    /// An all-gather of bytes, like the gather of codes of weights.
    AllGather,
    /// A reduce-scatter of BF16, like a reduction of gradients.
    ReduceScatter,
    /// An all-reduce of F32, like a reduction of gradients.
    AllReduce,
    /// An all-to-all of bytes.
    AllToAll,
    /// A sum of BF16 in the order of the ranks, like a sum of activations in decoding.
    Sum,
}

impl CollectiveKind {
    /// All kinds.
    pub const ALL: [CollectiveKind; 5] = [
        CollectiveKind::AllGather,
        CollectiveKind::ReduceScatter,
        CollectiveKind::AllReduce,
        CollectiveKind::AllToAll,
        CollectiveKind::Sum,
    ];

    /// Returns the name, such as "all-gather".
    pub fn as_str(self) -> &'static str {
        match self {
            CollectiveKind::AllGather => "all-gather",
            CollectiveKind::ReduceScatter => "reduce-scatter",
            CollectiveKind::AllReduce => "all-reduce",
            CollectiveKind::AllToAll => "all-to-all",
            CollectiveKind::Sum => "sum",
        }
    }

    /// Returns the type of the elements.
    pub fn dtype(self) -> DType {
        match self {
            CollectiveKind::AllGather | CollectiveKind::AllToAll => DType::E4M3,
            CollectiveKind::ReduceScatter | CollectiveKind::Sum => DType::BF16,
            CollectiveKind::AllReduce => DType::F32,
        }
    }

    /// Returns the number of bytes that each of `ranks` ranks sends for a buffer of `bytes`. Divided by the time, this is the bus bandwidth of
    /// nccl-tests.
    fn bus_bytes(self, bytes: usize, ranks: usize) -> f64 {
        let sent = bytes as f64 * (ranks - 1) as f64 / ranks as f64;
        if matches!(self, CollectiveKind::AllReduce | CollectiveKind::Sum) { 2.0 * sent } else { sent }
    }
}

/// The settings of a measurement.
#[derive(Clone, Debug)]
pub struct CommBench {
    /// The sizes of whole buffers in bytes, rounded down to sizes that the ranks can divide.
    pub bytes: Vec<usize>,
    /// The sizes of the buffers of sums.
    pub sum_bytes: Vec<usize>,
    /// The size in bytes of the buffers of collectives next to products.
    pub beside_bytes: usize,
    /// The numbers of tokens, outputs and inputs of the product.
    pub product: [usize; 3],
}

/// The measurement of one collective of one size, alone.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct CollectiveRow {
    /// The collective.
    pub kind: CollectiveKind,
    /// The number of bytes of the whole buffer.
    pub bytes: usize,
    /// The median time of a call in milliseconds.
    pub milliseconds: f64,
    /// The number of bytes per second that each rank sends.
    pub bus_bytes_per_second: f64,
}

/// The fit of `time = latency + bytes sent / bandwidth`, with the smallest sum of squared relative errors over the sizes of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LinkFit {
    /// The collective.
    pub kind: CollectiveKind,
    /// The time of a call without bytes in seconds.
    pub latency_seconds: f64,
    /// The number of bytes per second that each rank sends. Not positive if times do not grow with sizes.
    pub bytes_per_second: f64,
    /// The largest relative error of a time.
    pub residual: f64,
}

impl LinkFit {
    /// Fits pairs of seconds and the bytes that each rank sends. Returns `None` for fewer than two sizes.
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

/// The times of a collective and a product, alone and while the other operation runs back to back.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ContentionRow {
    /// The collective.
    pub kind: CollectiveKind,
    /// The number of bytes of the collective's whole buffer.
    pub bytes: usize,
    /// The time of a product alone in milliseconds.
    pub product_milliseconds: f64,
    /// The time of a product next to collectives in milliseconds.
    pub product_beside_milliseconds: f64,
    /// The time of the collective alone in milliseconds.
    pub collective_milliseconds: f64,
    /// The time of the collective next to products in milliseconds. `None` if too few collectives ran next to products.
    pub collective_beside_milliseconds: Option<f64>,
}

impl ContentionRow {
    /// Returns by how many percent products get slower.
    pub fn product_slowdown(&self) -> f64 {
        100.0 * (self.product_beside_milliseconds / self.product_milliseconds - 1.0)
    }

    /// Returns by how many percent collectives get slower.
    pub fn collective_slowdown(&self) -> Option<f64> {
        self.collective_beside_milliseconds.map(|beside| 100.0 * (beside / self.collective_milliseconds - 1.0))
    }
}

/// The measurements of a rank.
#[derive(Clone, Debug, Serialize)]
pub struct CommReport {
    /// The number of ranks of the group.
    pub ranks: usize,
    /// The measurements of collectives alone.
    pub rows: Vec<CollectiveRow>,
    /// A line through the times of each kind.
    pub fits: Vec<LinkFit>,
    /// The numbers of tokens, outputs and inputs of the product.
    pub product: [usize; 3],
    /// The type of the product's operands.
    pub product_dtype: &'static str,
    /// The measurements of all-gathers and reduce-scatters next to products.
    pub contention: Vec<ContentionRow>,
}

/// The tensors of a collective, which calls use in turn.
struct Buffers<'a> {
    comm: &'a Group,
    kind: CollectiveKind,
    /// The input of a reduce-scatter or an all-to-all.
    input: Option<Tensor>,
    /// The tensors that are written in place, or the outputs.
    outputs: Vec<Tensor>,
}

impl<'a> Buffers<'a> {
    /// Creates zeros for `calls` calls in flight.
    fn new(comm: &'a Group, device: &Device, kind: CollectiveKind, bytes: usize, calls: usize) -> Result<Buffers<'a>> {
        let (elements, dtype) = (bytes / kind.dtype().size(), kind.dtype());
        let (has_input, output) = match kind {
            CollectiveKind::AllGather | CollectiveKind::AllReduce => (false, elements),
            CollectiveKind::ReduceScatter => (true, elements / comm.size()),
            CollectiveKind::AllToAll => (true, elements),
            // A sum returns a new tensor.
            CollectiveKind::Sum => (true, 0),
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
            CollectiveKind::Sum => Ok(Pending::over(self.comm.sum(name, input(), None)?)),
        }
    }

    /// Ends a call, and frees its output for another call.
    fn end(&mut self, pending: Pending) -> Result<()> {
        self.outputs.push(pending.wait()?);
        Ok(())
    }

    /// Runs one call, and waits for it.
    fn call(&mut self) -> Result<()> {
        let pending = self.start()?;
        self.end(pending)
    }
}

/// A moment in the compute stream of a GPU, or on the clock of the CPU.
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

    /// Returns the milliseconds until `later`. Waits for both moments.
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
    /// Returns the sizes that training uses: buffers of 1 to 256 MiB, and 200 MB next to products of 8192 x 4096 x 11008. The CPU has small products.
    pub fn for_device(device: &Device) -> CommBench {
        let product = if matches!(device, Device::Cpu) { [128, 64, 96] } else { [8192, 4096, 11_008] };
        CommBench {
            bytes: [1, 4, 16, 64, 256].map(|mib| mib << 20).to_vec(),
            sum_bytes: [8, 32, 128, 512, 1024, 4096].map(|kib| kib << 10).to_vec(),
            beside_bytes: 200_000_000,
            product,
        }
    }

    /// Measures the group of `comm`. All ranks call it with equal settings, each with its device. Times are measured on this rank.
    ///
    /// Errors with [`Error::Value`] for a group of one rank, and for buffers that are smaller than 4 bytes per rank.
    pub fn run(&self, comm: &Group, device: &Device, mut report: impl FnMut(&CollectiveRow)) -> Result<CommReport> {
        let ranks = comm.size();
        if ranks < 2 {
            return Err(Error::Value("links are between ranks, and there is one; start 2 or more".into()));
        }
        // Slices have whole F32 elements.
        let divided = |bytes: usize| bytes / (4 * ranks) * (4 * ranks);
        if self.bytes.iter().chain(&self.sum_bytes).chain([&self.beside_bytes]).any(|&bytes| divided(bytes) == 0) {
            return Err(Error::Value(format!("buffers for {ranks} ranks have at least {} bytes", 4 * ranks)));
        }
        let (mut rows, mut fits) = (Vec::new(), Vec::new());
        for kind in CollectiveKind::ALL {
            let mut points = Vec::new();
            let sizes = if kind == CollectiveKind::Sum { &self.sum_bytes } else { &self.bytes };
            for bytes in sizes.iter().map(|&bytes| divided(bytes)) {
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

    /// Returns the median time of a call in milliseconds.
    fn alone(&self, comm: &Group, device: &Device, kind: CollectiveKind, bytes: usize) -> Result<f64> {
        let mut buffers = Buffers::new(comm, device, kind, bytes, 1)?;
        // A call on the CPU ends on the host, so calls do not overlap.
        let calls = if matches!(device, Device::Cpu) { 1 } else { (ROUND_BYTES / bytes).clamp(2, MOST_CALLS) };
        let mut rounds = Vec::new();
        for round in 0..=TIMED {
            comm.barrier("a round")?;
            let milliseconds = total(device, calls, &mut || buffers.call())? / calls as f64;
            // The first round warms up.
            if round > 0 {
                rounds.push(milliseconds);
            }
        }
        device.synchronize()?;
        Ok(median(rounds))
    }

    /// Times products next to collectives of `kind`.
    ///
    /// A round first enqueues collectives, then products. The collectives last about twice as long as the products. Before the first product and
    /// after the last product, collectives run alone. The time of collectives next to products is computed from their number and their time alone.
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
        // All ranks start as many collectives as rank 0.
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
            // The first round warms up.
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
        // Four points on a line are fitted in F64. Differences of sums lose a few of the 16 digits.
        assert!((fit.latency_seconds / 50e-6 - 1.0).abs() < 1e-6, "{fit:?}");
        assert!((fit.bytes_per_second / 265e9 - 1.0).abs() < 1e-6 && fit.residual < 1e-6, "{fit:?}");
        let off: Vec<_> = points.iter().enumerate().map(|(i, &(x, t))| (x, t * [1.1, 0.9][i % 2])).collect();
        let fit = LinkFit::fit(CollectiveKind::AllGather, &off).unwrap();
        // Points are alternately 10 % above and 10 % below the line, and the fit moves towards some of them.
        assert!(fit.residual > 0.05 && fit.residual < 0.15, "{fit:?}");
        assert_eq!(LinkFit::fit(CollectiveKind::AllGather, &points[..1]), None);
        assert_eq!(LinkFit::fit(CollectiveKind::AllGather, &[]), None);
    }

    #[test]
    fn ranks_measure_their_links() {
        let bench = CommBench {
            bytes: vec![1000, 4096, 1 << 16],
            sum_bytes: vec![64, 4096],
            beside_bytes: 1 << 16,
            product: [16, 32, 48],
        };
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
            assert_eq!((report.rows.len(), report.fits.len(), report.contention.len()), (4 * 3 + 2, 5, 2));
            assert_eq!(report.rows[0].bytes, 996, "whole F32 for three ranks");
            for row in &report.rows {
                let sent = row.kind.bus_bytes(row.bytes, 3);
                let rate = sent / (row.milliseconds * 1e-3);
                // The same quotient is computed in F64 from milliseconds, so it differs by a few units of 2⁻⁵³.
                assert!(row.milliseconds > 0.0 && (row.bus_bytes_per_second / rate - 1.0).abs() < 1e-9);
            }
            assert!(report.contention.iter().all(|row| row.product_beside_milliseconds > 0.0));
        }
        let bytes = CollectiveKind::ALL.map(|kind| kind.bus_bytes(300, 3));
        assert_eq!(bytes, [200.0, 200.0, 400.0, 200.0, 400.0]);
    }

    #[test]
    fn one_rank_has_no_links() {
        let bench = CommBench::for_device(&Device::Cpu);
        let error = bench.run(&Group::solo(), &Device::Cpu, |_| {}).unwrap_err().to_string();
        assert!(error.contains("start 2 or more"), "{error}");
    }
}
