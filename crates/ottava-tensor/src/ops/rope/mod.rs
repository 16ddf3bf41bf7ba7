//! Rotary position embedding in Hugging Face's layout: dimension `i` is paired with `i + D/2`. Su et al. 2021, arXiv:2104.09864.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use super::destination::{Output, Produced};
use super::{expect_compute, quantize};
use crate::{DType, Device, Error, Result, Tensor};

pub(crate) use cuda::{FP8_SOURCE, SOURCE};

/// Which rows and columns of a matrix `[T, W]` are rotated, and by which angles.
#[derive(Clone, Copy, Debug)]
pub struct RopeLayout {
    /// The first `heads · head_dim` columns are rotated: the query and key heads of a fused projection.
    pub heads: usize,
    /// Size `D` of a head.
    pub head_dim: usize,
    /// Rows per sequence: row `t` stands at position `start + t % seq_len`.
    pub seq_len: usize,
    /// Position of the first row of each sequence.
    pub start: usize,
}

/// The way to turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rotation {
    /// By the position's angles.
    Forward,
    /// Back: the gradient of [`Rotation::Forward`].
    Backward,
}

/// Rotates in place: `(a, b) -> (a·cos - b·sin, b·cos + a·sin)` for each pair of a head.
///
/// `x` `[T, W]`; `table` F32 `[P, D]` (F64 for F64) holds for each position `D/2` cosines, then `D/2` sines.
pub fn rope(x: &mut Tensor, table: &Tensor, layout: RopeLayout, rotation: Rotation) -> Result<()> {
    check(x, table, layout)?;
    match x.device().clone() {
        Device::Cpu => cpu::rope(x, table, layout, rotation),
        Device::DryCpu(_) => {}
        Device::Cuda(gpu) => cuda::rope(&gpu, x, table, layout, rotation)?,
    }
    Ok(())
}

/// [`rope`] of a copy, written to `output`; `x` stays as it is.
pub fn rope_to(x: &Tensor, table: &Tensor, layout: RopeLayout, rotation: Rotation, output: Output) -> Result<Produced> {
    check(x, table, layout)?;
    match (x.device(), output) {
        (Device::Cuda(gpu), Output::Fp8(mut to)) if cuda::fuses(x, table, layout) => {
            let [rows, columns] = x.dims("rope: x")?;
            let mut quantized = quantize::prepare(&to, x.device(), rows, columns)?;
            cuda::rope_codes(gpu, x, table, layout, rotation, &mut quantized, &mut to)?;
            Ok(Produced::Fp8(quantized))
        }
        (Device::Cuda(gpu), Output::Amax { amax }) => {
            quantize::expect_amax(amax, x.device())?;
            cuda::rope_amax(gpu, x, table, layout, rotation, amax)?;
            Ok(Produced::Measured)
        }
        (_, output) => {
            let mut y = x.duplicate()?;
            rope(&mut y, table, layout, rotation)?;
            output.deliver(y)
        }
    }
}

fn check(x: &Tensor, table: &Tensor, layout: RopeLayout) -> Result<()> {
    let [_, width] = x.dims("rope: x")?;
    let [positions, dim] = table.dims("rope: table")?;
    expect_compute("rope: x", x)?;
    table.expect_dtype("rope: table", &[super::real_type(x.dtype())])?;
    table.expect_device("rope: table", x.device())?;
    if dim != layout.head_dim || dim % 2 != 0 || layout.heads * dim > width {
        return Err(Error::Value(format!(
            "rope: {} heads of {} do not fit rows of {width} and a table of {dim}",
            layout.heads, layout.head_dim
        )));
    }
    if layout.start + layout.seq_len > positions {
        return Err(Error::Value(format!(
            "rope: positions up to {} are needed, the table ends at {positions}",
            layout.start + layout.seq_len
        )));
    }
    Ok(())
}

/// The table of [`rope`] for angles `position · inverse_frequencies[i]`, computed in F64 and rounded once.
pub fn rope_table(device: &Device, inverse_frequencies: &[f64], positions: usize, dtype: DType) -> Result<Tensor> {
    let half = inverse_frequencies.len();
    if device.ledger().is_some() {
        return Tensor::empty(device, &[positions, half * 2], dtype);
    }
    let mut table = Vec::with_capacity(positions * half * 2);
    for position in 0..positions {
        let angles = inverse_frequencies.iter().map(|f| position as f64 * f);
        table.extend(angles.clone().map(libm::cos));
        table.extend(angles.map(libm::sin));
    }
    let table = Tensor::from_slice(&Device::Cpu, &[positions, half * 2], &table)?;
    super::cast(&table, dtype)?.to_device(device)
}
