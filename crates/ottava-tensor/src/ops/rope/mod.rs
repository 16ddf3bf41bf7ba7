//! Rotary position embedding. Su et al. 2021, arXiv:2104.09864.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::destination::{Output, Produced};
use super::{expect_compute, quantize};
use crate::ops::dispatch::dispatch;
use crate::ops::parallel_rows::ParallelRows;
use crate::{DType, Device, Error, Result, Tensor};
use rayon::prelude::*;

/// The elements of a head that are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairs {
    /// The elements `i` and `i + R/2`, as in Hugging Face's Llama.
    Halves,
    /// The neighbours `2i` and `2i + 1` (interleaved).
    Neighbours,
}

/// The rotated columns of a matrix `[T, W]`.
#[derive(Clone, Copy, Debug)]
pub struct RopeLayout {
    /// The number of rotated heads. They are the first `heads · head_dim` columns: the query and key heads of a fused projection.
    pub heads: usize,
    /// The size `D` of a head.
    pub head_dim: usize,
    /// The pairs of elements that are rotated.
    pub pairs: RopePairs,
}

/// The angles of the rows of a matrix, by the positions of the rows.
#[derive(Clone, Copy, Debug)]
pub struct Angles<'a> {
    /// The cosines and sines, F32 `[P, R]` (F64 for F64): for each position `R/2` cosines, then `R/2` sines. `R` is at most the size of a head. If it
    /// is smaller, only the first `R` elements of each head are rotated.
    pub table: &'a Tensor,
    /// The position of each row, I32 `[T]`, below `P`. Positions are data, so a captured step supports any packing of documents.
    pub positions: &'a Tensor,
}

/// The direction of the rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rotation {
    /// Rotates by the angles of the position.
    Forward,
    /// Rotates by the negative angles: the gradient of [`Rotation::Forward`].
    Backward,
}

/// Rotates in place: `(a, b) -> (a·cos - b·sin, b·cos + a·sin)` for each pair of a head.
///
/// `x` is `[T, W]`, and `angles` are the angles of its rows.
pub fn rope(x: &mut Tensor, angles: Angles, layout: RopeLayout, rotation: Rotation) -> Result<()> {
    check(x, angles, layout)?;
    dispatch! { x.device().clone(),
        cpu => cpu::rope(x, angles, layout, rotation)?,
        gpu => cuda::rope(&gpu, x, angles, layout, rotation)?,
    }
    Ok(())
}

/// Rotates a copy of `x` as [`rope`] does, and writes it to `output`. `x` does not change.
pub fn rope_to(x: &Tensor, angles: Angles, layout: RopeLayout, rotation: Rotation, output: Output) -> Result<Produced> {
    check(x, angles, layout)?;
    match (x.device(), output) {
        (Device::Cuda(gpu), Output::Fp8(mut to)) if cuda::fuses(x, angles.table, layout) => {
            let [rows, columns] = x.dims("rope: x")?;
            let mut quantized = quantize::prepare(&to, x.device(), rows, columns)?;
            cuda::rope_codes(gpu, x, angles, layout, rotation, &mut quantized, &mut to)?;
            Ok(Produced::Fp8(quantized))
        }
        (Device::Cuda(gpu), Output::Amax { amax }) if !is_partial(angles, layout) => {
            quantize::expect_amax(amax, x.device())?;
            cuda::rope_amax(gpu, x, angles, layout, rotation, amax)?;
            Ok(Produced::Measured)
        }
        (_, output) => {
            let mut y = x.duplicate()?;
            rope(&mut y, angles, layout, rotation)?;
            output.apply(y)
        }
    }
}

/// Returns whether a part of each head is not rotated.
fn is_partial(angles: Angles, layout: RopeLayout) -> bool {
    angles.table.shape()[1] < layout.head_dim
}

pub(super) fn check(x: &Tensor, angles: Angles, layout: RopeLayout) -> Result<()> {
    let Angles { table, positions } = angles;
    let [tokens, width] = x.dims("rope: x")?;
    let [_, dim] = table.dims("rope: table")?;
    expect_compute("rope: x", x)?;
    table.expect_dtype("rope: table", &[super::real_type(x.dtype())])?;
    table.expect_device("rope: table", x.device())?;
    positions.expect("rope: positions", &[tokens])?;
    positions.expect_dtype("rope: positions", &[DType::I32])?;
    positions.expect_device("rope: positions", x.device())?;
    if dim > layout.head_dim || dim % 2 != 0 || layout.heads * layout.head_dim > width {
        return Err(Error::Value(format!(
            "rope: {} heads of {} do not fit rows of {width} and a table of {dim}",
            layout.heads, layout.head_dim
        )));
    }
    Ok(())
}

/// Returns the table of [`rope`] for the angles `position · inverse_frequencies[i]`, computed in F64 and rounded once.
pub fn rope_table(device: &Device, inverse_frequencies: &[f64], positions: usize, dtype: DType) -> Result<Tensor> {
    table(device, inverse_frequencies.len(), positions, dtype, |position, pair| {
        let angle = position as f64 * inverse_frequencies[pair];
        (libm::cos(angle), libm::sin(angle))
    })
}

/// Returns the table with which [`rope`] multiplies heads of `dim` elements by `factor(position)`, computed in F64 and rounded once: the cosines are the
/// factor, and the sines are zero.
pub fn factor_table(
    device: &Device,
    factor: impl Fn(usize) -> f64 + Sync,
    [positions, dim]: [usize; 2],
    dtype: DType,
) -> Result<Tensor> {
    table(device, dim / 2, positions, dtype, |position, _| (factor(position), 0.0))
}

/// Returns the table of the cosines and sines that `of` returns for each position and pair.
fn table(
    device: &Device,
    half: usize,
    positions: usize,
    dtype: DType,
    of: impl Fn(usize, usize) -> (f64, f64) + Sync,
) -> Result<Tensor> {
    if device.tracker().is_some() {
        return Tensor::empty(device, &[positions, half * 2], dtype);
    }
    let mut table = vec![0f64; positions * half * 2];
    table.par_rows_mut(half * 2).enumerate().for_each(|(position, row)| {
        let (cos, sin) = row.split_at_mut(half);
        for (pair, (cos, sin)) in cos.iter_mut().zip(sin).enumerate() {
            (*cos, *sin) = of(position, pair);
        }
    });
    let table = Tensor::from_slice(&Device::Cpu, &[positions, half * 2], &table)?;
    super::cast(&table, dtype)?.to_device(device)
}
