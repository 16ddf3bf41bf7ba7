//! Timing of ops against hardware limits: memory-bound ops against a copy of the same bytes, products and attention against the rate of
//! a large product, and collectives alone and overlapped with products. `ottava bench` prints the results.

mod activations;
mod attention;
mod comm;
mod experts;
mod gemm;
mod kernels;
mod meter;
mod recurrences;
mod table;
mod updates;

pub use attention::{AttentionRow, attention};
pub use comm::{CollectiveKind, CollectiveRow, CommBench, CommReport, ContentionRow, LinkFit};
pub use gemm::{Operands, Product, Rates, gemm_cost};
pub use kernels::kernels;
pub use meter::{Cost, Meter, Power};
pub use table::KernelRow;

use crate::{DType, Device, Error, HostTransfer, MemoryKind, Result, Tensor};
use std::time::Instant;

/// The number of rounds. The median is reported.
const ROUNDS: usize = 5;

/// Returns the median milliseconds of one `op`. Five rounds of `iterations` are timed, between two events of the compute stream, or by the
/// clock on the CPU. A first, untimed run compiles the kernels.
pub fn time<E: From<Error>>(
    device: &Device,
    iterations: usize,
    mut op: impl FnMut() -> std::result::Result<(), E>,
) -> std::result::Result<f64, E> {
    op()?;
    device.synchronize()?;
    let mut rounds = [0.0; ROUNDS];
    for round in &mut rounds {
        *round = total(device, iterations, &mut op)? / iterations as f64;
    }
    rounds.sort_by(f64::total_cmp);
    Ok(rounds[ROUNDS / 2])
}

/// Returns the result of [`time`]. The number of iterations makes a round last about `milliseconds` on a GPU, because the clock of a GPU falls under
/// load. On a CPU, a round lasts a tenth of this time.
pub fn time_for<E: From<Error>>(
    device: &Device,
    milliseconds: f64,
    mut op: impl FnMut() -> std::result::Result<(), E>,
) -> std::result::Result<f64, E> {
    let milliseconds = if matches!(device, Device::Cuda(_)) { milliseconds } else { milliseconds / 10.0 };
    op()?;
    let one = total(device, 1, &mut op)?;
    time(device, (milliseconds / one).clamp(1.0, 100.0) as usize, op)
}

/// Returns the milliseconds of `iterations` consecutive runs.
fn total<E: From<Error>>(
    device: &Device,
    iterations: usize,
    op: &mut impl FnMut() -> std::result::Result<(), E>,
) -> std::result::Result<f64, E> {
    Ok(match device {
        Device::Cpu | Device::DryCpu(_) => {
            let start = Instant::now();
            (0..iterations).try_for_each(|_| op())?;
            start.elapsed().as_secs_f64() * 1e3
        }
        Device::Cuda(gpu) => {
            let start = gpu.record()?;
            (0..iterations).try_for_each(|_| op())?;
            f64::from(start.milliseconds_until(&gpu.record()?)?)
        }
    })
}

/// Returns the bytes per second of a large copy within `device`, counting reads and writes.
pub fn copy_bandwidth(device: &Device) -> Result<f64> {
    let bytes: usize = if matches!(device, Device::Cpu) { 64 << 20 } else { 1 << 30 };
    let from = Tensor::zeros(device, &[bytes / 4], DType::F32)?;
    let mut to = from.empty_like()?;
    let milliseconds = time(device, 10, || to.copy_from(0, &from))?;
    Ok(2.0 * bytes as f64 / (milliseconds * 1e-3))
}

/// The bytes per second between GPU memory and host memory.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct BusRates {
    /// The rate to the GPU, with the other direction idle.
    pub up: f64,
    /// The rate to the host, with the other direction idle.
    pub down: f64,
    /// The rate per direction, with both directions busy.
    pub both: f64,
}

impl BusRates {
    /// Measures the rates of a GPU. Returns `None` on a CPU.
    pub fn measure(device: &Device) -> Result<Option<BusRates>> {
        if !matches!(device, Device::Cuda(_)) {
            return Ok(None);
        }
        const BYTES: usize = 1 << 30;
        let host = || Tensor::zeros_in(device, &[BYTES / 4], DType::F32, MemoryKind::Host);
        let (mut from, mut to) = (host()?, host()?);
        let source = Tensor::zeros(device, &[BYTES / 4], DType::F32)?;
        let rate = |milliseconds: f64| BYTES as f64 / (milliseconds * 1e-3);
        let up = time(device, 4, || HostTransfer::fetch([&mut from])?.wait())?;
        let down = time(device, 4, || HostTransfer::store(source.clone(), &mut to)?.wait())?;
        let both = time(device, 4, || {
            let coming = HostTransfer::fetch([&mut from])?;
            HostTransfer::store(source.clone(), &mut to)?.wait()?;
            coming.wait()
        })?;
        Ok(Some(BusRates { up: rate(up), down: rate(down), both: rate(both) }))
    }
}
