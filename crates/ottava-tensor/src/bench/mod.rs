//! Timing of ops against hardware limits: memory-bound ops against a copy of the same bytes; products and attention against the rate of
//! a large product; collectives, alone and beside products. Printed by `ottava bench`.

mod activations;
mod attention;
mod comm;
mod experts;
mod gemm;
mod kernels;
mod meter;
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

/// Rounds whose median is reported.
const ROUNDS: usize = 5;

/// Median milliseconds of one `op`: five rounds of `iterations` each, between two events of the compute stream, or by the
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

/// As [`time`], with as many iterations as make a round last about `milliseconds` on a GPU. Its clock falls under load; on a CPU a tenth of that
/// will do.
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

/// Milliseconds of `iterations` in a row.
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

/// Bytes per second of a large copy within `device`, reads and writes both counted.
pub fn copy_bandwidth(device: &Device) -> Result<f64> {
    let bytes: usize = if matches!(device, Device::Cpu) { 64 << 20 } else { 1 << 30 };
    let from = Tensor::zeros(device, &[bytes / 4], DType::F32)?;
    let mut to = from.empty_like()?;
    let milliseconds = time(device, 10, || to.copy_from(0, &from))?;
    Ok(2.0 * bytes as f64 / (milliseconds * 1e-3))
}

/// Bytes per second between GPU and host memory.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct BusRates {
    /// To the GPU, with the other direction idle.
    pub up: f64,
    /// To the host, with the other direction idle.
    pub down: f64,
    /// Per direction, with both directions busy.
    pub both: f64,
}

impl BusRates {
    /// Measures a GPU; `None` on a CPU.
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
