//! FP8 quantization of a slice of a matrix with scales of 128x128 blocks. The slices of several ranks may cut a block. So [`slice_amaxes`] first
//! finds the amaxes of blocks, the caller takes their maximum over ranks, and then [`quantize_slice`] casts.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::cast;
use super::destination::{CastScale, CastStatistics, CodeCopies, CurrentScaling, Fp8Output};
use super::quantize::expect_measured;
use crate::granularity::Granularity;
use crate::quantized::QuantizedTensor;
use crate::{DType, Device, Error, Result, Tensor};

/// The side of a block.
const BLOCK: usize = 128;

/// A part of a matrix `[rows, columns]` in row-major order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixSlice {
    /// The number of rows of the whole matrix, a multiple of 128.
    pub rows: usize,
    /// The number of columns of the whole matrix, a multiple of 128.
    pub columns: usize,
    /// The index of the first element of the slice in the matrix, a multiple of 128.
    pub start: usize,
}

impl MatrixSlice {
    /// Returns the number of 128x128 blocks of the whole matrix.
    pub fn blocks(&self) -> usize {
        self.rows / BLOCK * (self.columns / BLOCK)
    }

    /// Checks that the elements `x` can be the slice.
    fn check(&self, x: &Tensor) -> Result<()> {
        let (MatrixSlice { rows, columns, start }, length) = (*self, x.len());
        let whole = [rows, columns, start, length].iter().all(|n| n.is_multiple_of(BLOCK));
        match whole && start + length <= rows * columns {
            true => Ok(()),
            false => Err(Error::Value(format!(
                "quantize_slice: {length} elements from number {start} on of a [{rows}, {columns}] matrix; sizes and ends must be multiples of {BLOCK} within the matrix"
            ))),
        }
    }
}

/// Returns the amaxes of the 128x128 blocks of a matrix, over the elements `x` of `slice` (F32, F16 or BF16) rounded to `dtype`.
/// They are F32 `[blocks]` in row-major order. The amax of a block without elements is 0. NaN is ignored.
pub fn slice_amaxes(x: &Tensor, dtype: DType, slice: MatrixSlice) -> Result<Tensor> {
    expect_values(x, dtype)?;
    slice.check(x)?;
    // Every amax is written, by the kernels and by the reference.
    let mut amaxes = Tensor::empty(x.device(), &[slice.blocks()], DType::F32)?;
    if let Device::Cuda(gpu) = x.device() {
        cuda::amaxes(gpu, x, dtype, slice, &mut amaxes)?;
    } else {
        let rounded = rounded(x, dtype)?;
        x.device().on_cpu(|| cpu::amaxes(&rounded, slice, &mut amaxes));
    }
    Ok(amaxes)
}

/// Casts the elements `x` of `slice` (F32, F16 or BF16), rounded to `dtype`. The result equals the cast of the whole matrix by
/// [`quantize_blocks`](crate::ops::quantize_blocks) to E4M3 with scales of 128x128 blocks. `amaxes` are the amaxes of the whole matrix
/// ([`slice_amaxes`]). Overwrites the codes of `into`, which cover the slice, and its scales, which cover the whole matrix ([`empty_slice`]).
pub fn quantize_slice(
    x: &Tensor,
    dtype: DType,
    slice: MatrixSlice,
    amaxes: &Tensor,
    how: CurrentScaling,
    into: &mut QuantizedTensor,
    (statistics, slot): (&mut CastStatistics, usize),
) -> Result<()> {
    expect_values(x, dtype)?;
    slice.check(x)?;
    amaxes.expect("quantize_slice: amaxes", &[slice.blocks()])?;
    amaxes.expect_dtype("quantize_slice: amaxes", &[DType::F32])?;
    amaxes.expect_device("quantize_slice: amaxes", x.device())?;
    expect_measured(into.format, statistics, slot, x.device())?;
    let scales = |rows, columns| Granularity::Blocks128x128.scales_shape(rows, columns);
    into.scale_inv.expect("quantize_slice: scale_inv", &scales(slice.rows, slice.columns))?;
    let (Some(codes), Some(turned)) = (&into.codes, &into.transposed_scale_inv) else {
        return Err(Error::Value("quantize_slice: `into` has no codes or no scales of the transpose".into()));
    };
    codes.expect("quantize_slice: codes", &[x.len() / BLOCK, BLOCK])?;
    codes.expect_dtype("quantize_slice: codes", &[DType::E4M3])?;
    turned.expect("quantize_slice: transposed_scale_inv", &scales(slice.columns, slice.rows))?;
    let scale = CastScale::Own(Granularity::Blocks128x128, how);
    let mut to = Fp8Output { format: DType::E4M3, scale, copies: CodeCopies::Rows, statistics, slot };
    if let Device::Cuda(gpu) = x.device() {
        return cuda::quantize(gpu, x, dtype, slice, amaxes, into, &mut to);
    }
    let rounded = rounded(x, dtype)?;
    x.device().on_cpu(|| cpu::quantize(&rounded, slice, amaxes, how, into, &mut to));
    Ok(())
}

/// Allocates the result of [`quantize_slice`] for `elements` of a matrix: codes `[elements / 128, 128]`, and scales for both copies of the whole
/// matrix.
pub fn empty_slice(device: &Device, slice: MatrixSlice, elements: usize) -> Result<QuantizedTensor> {
    let granularity = Granularity::Blocks128x128;
    let (rows, columns) = (elements / BLOCK, BLOCK);
    // The padding of scales is zero.
    let scales = |rows, columns| Tensor::zeros(device, &granularity.scales_shape(rows, columns), DType::F32);
    Ok(QuantizedTensor {
        codes: Some(Tensor::empty(device, &[rows, columns], DType::E4M3)?),
        transposed: None,
        scale_inv: scales(slice.rows, slice.columns)?,
        transposed_scale_inv: Some(Box::new(scales(slice.columns, slice.rows)?)),
        granularity,
        format: DType::E4M3,
        rows,
        columns,
    })
}

fn expect_values(x: &Tensor, dtype: DType) -> Result<()> {
    x.expect_dtype("quantize_slice: x", &[DType::F32, DType::F16, DType::BF16])?;
    match x.dtype() == dtype || x.dtype() == DType::F32 && matches!(dtype, DType::F16 | DType::BF16) {
        true => Ok(()),
        false => Err(Error::Value(format!("quantize_slice: values of {} are not rounded to {dtype}", x.dtype()))),
    }
}

fn rounded(x: &Tensor, dtype: DType) -> Result<Tensor> {
    if x.dtype() == dtype { Ok(x.clone()) } else { cast(x, dtype) }
}
