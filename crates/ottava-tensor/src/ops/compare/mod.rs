//! Sums that tell how far a tensor is from a reference: norms, error and direction.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::dequantize::{Layout, dequantize, is_indirect};
use super::{Operand, transpose};
use crate::ops::dispatch::dispatch;
use crate::{DType, Error, Result, Tensor};

/// The number of sums of a comparison: `Σ x²`, `Σ r²`, `Σ x·r` and `Σ (x − r)²`.
pub const SUMS: usize = 4;

/// The types of tensors that can be compared; F64 only on the CPU.
const TYPES: &[DType] = &[DType::F32, DType::F64, DType::BF16, DType::F16];

/// Compares `x` with `reference`: writes `Σ x²`, `Σ r²`, `Σ x·r` and `Σ (x − r)²` in F64 to row `at` of `sums`, F64 `[n, 4]`. `x` and `reference`
/// have the same size and type (F32, BF16, F16, or F64 on the CPU).
pub fn compare(x: &Tensor, reference: &Tensor, sums: &mut Tensor, at: usize) -> Result<()> {
    if x.len() != reference.len() {
        return Err(different_sizes(x, 1, reference));
    }
    let [x, reference] = [x.reshape(&[1, x.len()])?, reference.reshape(&[1, reference.len()])?];
    compare_rows(&x, 1, &reference, sums, at)
}

/// Compares as [`compare`], but only rows 0, `every`, 2 · `every`, … of `x` `[M, N]`, with the rows of `reference` `[⌈M / every⌉, N]`.
pub fn compare_rows(x: &Tensor, every: usize, reference: &Tensor, sums: &mut Tensor, at: usize) -> Result<()> {
    x.expect_dtype("compare: x", TYPES)?;
    reference.expect_dtype("compare: reference", &[x.dtype()])?;
    let ([rows, columns], of_reference) = (x.dims("compare: x")?, reference.dims("compare: reference")?);
    if of_reference != [rows.div_ceil(every), columns] {
        return Err(different_sizes(x, every, reference));
    }
    expect_places(x, reference, sums, at)?;
    dispatch! { reference.device(),
        cpu => write(sums, at, cpu::compare_rows(x, every, reference)),
        gpu => cuda::compare_rows(gpu, x, every, reference, sums, at)?,
    }
    Ok(())
}

/// Compares as [`compare`], but the products of rows with a direction. `x` and `reference` `[S, N]` are replaced by `x · direction` and
/// `reference · direction` `[S]` for a `direction` `[S, N]` of the same type.
pub fn compare_along(x: &Tensor, reference: &Tensor, direction: &Tensor, sums: &mut Tensor, at: usize) -> Result<()> {
    x.expect_dtype("compare: x", TYPES)?;
    let shape: [usize; 2] = x.dims("compare: x")?;
    for (what, other) in [("compare: reference", reference), ("compare: direction", direction)] {
        other.expect_dtype(what, &[x.dtype()])?;
        other.expect(what, &shape)?;
        expect_places(x, other, sums, at)?;
    }
    dispatch! { x.device(),
        cpu => write(sums, at, cpu::compare_along(x, reference, direction)),
        gpu => cuda::compare_along(gpu, x, reference, direction, sums, at)?,
    }
    Ok(())
}

/// Compares as [`compare`] the dequantized values of codes, as [`dequantize`](super::dequantize()) returns them, with the matrix `[rows, columns]` that was cast, in F32 or BF16.
pub fn compare_codes(codes: Operand, matrix: &Tensor, sums: &mut Tensor, at: usize) -> Result<()> {
    matrix.expect_dtype("compare: matrix", &[DType::F32, DType::BF16])?;
    if is_indirect(codes) {
        let values = dequantize(codes, 1, matrix.dtype())?;
        let values = if matches!(codes, Operand::Columns(_)) { transpose(&values)? } else { values };
        return compare(&values, matrix, sums, at);
    }
    let (stored, scale_inv, layout) = Layout::of("compare: codes", codes)?;
    let is_transposed = matches!(codes, Operand::Columns(_));
    let [rows, columns] = if is_transposed { [layout.columns, layout.rows] } else { [layout.rows, layout.columns] };
    matrix.expect("compare: matrix", &[rows, columns])?;
    expect_places(stored, matrix, sums, at)?;
    dispatch! { matrix.device(),
        cpu => write(sums, at, cpu::compare_codes(stored, scale_inv, &layout, is_transposed, matrix)),
        gpu => cuda::compare_codes(gpu, stored, scale_inv, &layout, is_transposed, matrix, sums, at)?,
    }
    Ok(())
}

fn write(sums: &mut Tensor, at: usize, values: [f64; SUMS]) {
    sums.host_mut::<f64>()[at * SUMS..(at + 1) * SUMS].copy_from_slice(&values);
}

fn expect_places(x: &Tensor, reference: &Tensor, sums: &Tensor, at: usize) -> Result<()> {
    x.expect_device("compare: x", reference.device())?;
    sums.expect_dtype("compare: sums", &[DType::F64])?;
    if (at + 1) * SUMS > sums.len() {
        return Err(Error::Value(format!("compare: row {at} is beyond sums of shape {:?}", sums.shape())));
    }
    Ok(())
}

fn different_sizes(x: &Tensor, every: usize, reference: &Tensor) -> Error {
    let rows = if every == 1 { String::new() } else { format!(", of which one row in {every} is compared,") };
    Error::Value(format!(
        "compare: a tensor of shape {:?}{rows} and its reference of shape {:?} have different sizes",
        x.shape(),
        reference.shape()
    ))
}
