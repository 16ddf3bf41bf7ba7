//! Rows of the benchmark of memory-bound ops, and the tensors of their casts.

use super::{Cost, Meter, copy_bandwidth};
use crate::ops::*;
use crate::{DType, Device, Granularity, Result, Tensor};

/// The measurement of one op at one size.
#[derive(Clone, Debug)]
pub struct KernelRow {
    /// The op and its outputs.
    pub name: &'static str,
    /// The number of bytes that must be read and written once.
    pub bytes: usize,
    /// The measured cost.
    pub cost: Cost,
    /// The time of a copy of the same bytes in milliseconds.
    pub floor_milliseconds: f64,
}

/// Rows that are timed one after the other.
pub(super) struct Table<'a> {
    meter: Meter<'a>,
    iterations: usize,
    /// The bytes per second of a copy.
    bandwidth: f64,
    /// The seed of the last random tensor.
    seed: u64,
    pub(super) rows: Vec<KernelRow>,
}

impl<'a> Table<'a> {
    pub(super) fn new(meter: Meter<'a>) -> Result<Table<'a>> {
        let iterations = if matches!(meter.device, Device::Cpu) { 1 } else { 20 };
        Ok(Table { meter, iterations, bandwidth: copy_bandwidth(meter.device)?, seed: 0, rows: Vec::new() })
    }

    /// Returns the device on which ops run.
    pub(super) fn device(&self) -> &'a Device {
        self.meter.device
    }

    /// Times `op`, which must move `bytes`.
    pub(super) fn row(&mut self, name: &'static str, bytes: usize, op: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let cost = self.meter.rounds_of(self.iterations, op)?;
        let floor_milliseconds = bytes as f64 / self.bandwidth * 1e3;
        self.rows.push(KernelRow { name, bytes, cost, floor_milliseconds });
        Ok(())
    }

    /// Returns normally distributed values, which differ in each call.
    pub(super) fn random(&mut self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        self.seed += 1;
        cast(&normal(self.device(), shape, 1.0, self.seed)?, dtype)
    }
}

/// The tensors that casts read and write in addition to codes.
pub(super) struct CastTensors {
    pub(super) scale: Tensor,
    pub(super) amax: Tensor,
    pub(super) seen: CastStatistics,
    /// The statistics of a second cast in the same op.
    pub(super) unseen: CastStatistics,
}

impl CastTensors {
    pub(super) fn new(device: &Device) -> Result<CastTensors> {
        let (scale, amax) = (Tensor::from_slice(device, &[1], &[64f32])?, Tensor::zeros(device, &[1], DType::F32)?);
        Ok(CastTensors { scale, amax, seen: CastStatistics::new(device, 1)?, unseen: CastStatistics::new(device, 1)? })
    }
}

/// Returns the number of bytes of BF16 elements.
pub(super) fn bf16(elements: usize) -> usize {
    2 * elements
}

/// Returns the number of bytes of activations saved in FP8.
pub(super) fn compressed(elements: usize) -> usize {
    elements + elements / 16
}

/// Returns an output of codes and their transpose, as in training.
pub(super) fn both<'a>(scale: &'a Tensor, statistics: &'a mut CastStatistics) -> Output<'a> {
    let scale = CastScale::Given(scale);
    Output::Fp8(Fp8Output { format: DType::E4M3, scale, copies: CodeCopies::Both, statistics, slot: 0 })
}

/// Returns an output with per-row or per-block scales that the cast computes.
pub(super) fn own(granularity: Granularity, statistics: &mut CastStatistics) -> Output<'_> {
    let scale = CastScale::Own(granularity, CurrentScaling::default());
    Output::Fp8(Fp8Output { format: DType::E4M3, scale, copies: CodeCopies::Both, statistics, slot: 0 })
}
