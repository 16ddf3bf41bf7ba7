//! The matrix product `a · bᵀ` of plain or FP8 operands.
//!
//! Hopper's FP8 products require both operands to be contiguous along the contracted dimension. So there is only one product, `gemm_nt(a, b) = a ·
//! bᵀ`, and a quantized matrix that is contracted along both dimensions also has a transposed copy. cuBLASLt transposes 16- and 32-bit operands at
//! no cost, so `Operand::Plain` only says which layout it has, and nothing is copied.
//!
//! Codes are padded with zeros to multiples of 16 in both dimensions. If blocks share a scale, they are padded to whole blocks of 128 along the
//! contracted dimension. So every shape is supported.
//!
//! On a GPU, cuBLASLt computes the product (`cuda.rs`), with these exceptions. Except for small blocks, they are for inference:
//!
//! - Products of few rows have a separate kernel (`skinny.rs`).
//! - If rows must not depend on other rows, products of many rows have a separate kernel too (`wgmma.rs`).
//! - If a product with row scales has so few output tiles that most of the GPU would be idle, cuBLASLt computes it without scales in F32, and a
//!   second kernel applies the scales and adds the addend (`unscaled_product`).
//! - Products of formats with small blocks are emulated: dequantized operands are multiplied (`emulated.rs`).
//! - If a product with row scales has 129 to 256 rows and is followed by an activation function, cuBLASLt writes it without scales in BF16, and the
//!   kernel of the activation function applies the scales (`product_activation_to`).
//!
//! In both separate kernels, a row of the result depends only on the same row of `a` and on `b`, and not on the number of rows. Their sums along `K` have
//! this order:
//!
//! - FP8: the tensor cores sum the products of 128 codes, from zero. F32 additions add these sums in order, from zero. If blocks of 128 share a scale,
//!   the sum of 128 codes is multiplied by the product of both scales, and added with one rounding.
//! - 16 bits: the tensor cores add all products in order, from zero, 16 at a time.
//! - The sum is multiplied by the product of both scales, and then the addend is added, both in F32. The result is rounded once.
//!
//! The CPU has separate kernels for AVX2 and AVX-512, because compilers do not keep the sums of portable loops in registers. These kernels are
//! bit-identical to the portable loops. Products of up to 32 rows read the other operand in place (`few_rows.rs`), with the same bits.

pub(in crate::ops) mod cpu;
pub(super) mod cuda;
mod emulated;
mod few_rows;
#[cfg(test)]
mod order_tests;
mod packed;
pub(super) mod skinny;
#[cfg(test)]
mod tests;
pub(in crate::ops) mod wgmma;

use super::operand::{Accumulation, Operand};
use crate::cuda::CudaDevice;
use crate::granularity::{Granularity, Shared};
use crate::ops::dispatch::dispatch;
use crate::{DType, Device, Error, Result, Tensor, planted};
use std::sync::Arc;

/// Returns whether all products of these types on `device` have the order of sums that this module states, within
/// [`CudaDevice::with_batch_invariance`]. `compute` is the type of plain operands and results, and `casts` are the formats and granularities of `a` and
/// `b`, if products read codes. Products of plain operands whose rows are not multiples of 16 bytes are then divided into chunks of constant size.
pub fn has_ordered_sums(device: &Device, compute: DType, casts: Option<[(DType, Granularity); 2]>) -> bool {
    let Device::Cuda(gpu) = device else { return false };
    let is_known = casts.is_none_or(|[(of_a, a), (of_b, b)]| {
        let is_whole = |granularity: Granularity| matches!(granularity.info().shared, Shared::Tensor | Shared::Row);
        let in_blocks = (a, b) == (Granularity::Blocks1x128, Granularity::Blocks128x128);
        of_a == DType::E4M3 && of_b == DType::E4M3 && (is_whole(a) && is_whole(b) || in_blocks)
    });
    compute == DType::BF16 && is_known && skinny::is_supported(gpu)
}

/// Returns `a · bᵀ`, `[M, N]` in type `out`, for `a` `[M, K]` and `b` `[N, K]`.
///
/// Plain operands have the same type, F64 (CPU), F32, F16 or BF16, and `out` is this type or F32. FP8 operands give BF16, F16 or F32.
/// Hopper does not support products of E5M2 with E5M2. Sums are F32 (F64 for F64).
///
/// The scales of FP8 operands must match: both per-tensor, both per-row, or both per-block with the same length. One of two operands with block
/// scales may have 128x128 blocks. Block scales do not support [`Accumulation::Fast`]. All other combinations are errors.
pub fn gemm_nt(a: Operand, b: Operand, out: DType, accumulation: Accumulation) -> Result<Tensor> {
    let (m, n) = check(a, b, out, accumulation)?;
    let mut result = Tensor::empty(a.matrix("gemm: a")?.0.device(), &[m, n], out)?;
    product(a, b, &mut result, accumulation, Addend::None)?;
    Ok(result)
}

/// Returns `a · bᵀ + addend`, for an `addend` `[M, N]` in the type of the result: a product fused with the residual connection. Types are
/// as in [`gemm_nt`]. The sum is rounded once.
pub fn gemm_nt_plus(a: Operand, b: Operand, addend: &Tensor, accumulation: Accumulation) -> Result<Tensor> {
    let (m, n) = check(a, b, addend.dtype(), accumulation)?;
    addend.expect("gemm: addend", &[m, n])?;
    addend.expect_device("gemm: addend", a.matrix("gemm: a")?.0.device())?;
    let mut result = addend.empty_like()?;
    product(a, b, &mut result, accumulation, Addend::Tensor(addend))?;
    Ok(result)
}

/// Computes `into = a · bᵀ`. Types are as in [`gemm_nt`].
pub fn gemm_nt_into(a: Operand, b: Operand, into: &mut Tensor, accumulation: Accumulation) -> Result<()> {
    let (m, n) = check(a, b, into.dtype(), accumulation)?;
    into.expect("gemm: into", &[m, n])?;
    product(a, b, into, accumulation, Addend::None)
}

/// Computes `into += a · bᵀ` in place, for weight gradients. Types are as in [`gemm_nt`].
pub fn gemm_nt_add(a: Operand, b: Operand, into: &mut Tensor, accumulation: Accumulation) -> Result<()> {
    let (m, n) = check(a, b, into.dtype(), accumulation)?;
    into.expect("gemm: into", &[m, n])?;
    product(a, b, into, accumulation, Addend::Out)
}

/// A product `a · bᵀ` without its scales: element `[i, j]` is `sums[i, j] · row_scale_inv[i] · column_scale_inv[j]`.
pub(super) struct UnscaledProduct<'a> {
    /// The sums, `[M, N]`, with the padded rows of `a`.
    pub sums: Tensor,
    /// The inverse scales of the rows, `[M]`.
    pub row_scale_inv: &'a Tensor,
    /// The inverse scales of the columns, `[N]`.
    pub column_scale_inv: &'a Tensor,
}

/// Returns the product of [`gemm_nt`] without its scales. Returns `None` if this is not faster on this GPU, or if the reader cannot apply the scales.
pub(super) fn unscaled<'a>(
    gpu: &Arc<CudaDevice>,
    a: Operand<'a>,
    b: Operand<'a>,
    out: DType,
    accumulation: Accumulation,
) -> Result<Option<UnscaledProduct<'a>>> {
    let (m, n) = check(a, b, out, accumulation)?;
    let (Some((row_scale_inv, _)), Some((column_scale_inv, _))) = (a.scale_inv(), b.scale_inv()) else {
        return Ok(None);
    };
    let sums = cuda::unscaled(gpu, a, b, [m, n], out, accumulation)?;
    Ok(sums.map(|sums| UnscaledProduct { sums, row_scale_inv, column_scale_inv }))
}

/// The addend of a product.
#[derive(Clone, Copy)]
enum Addend<'a> {
    None,
    /// The output itself.
    Out,
    /// Another tensor, with the shape and type of the output.
    Tensor(&'a Tensor),
}

fn product(a: Operand, b: Operand, out: &mut Tensor, accumulation: Accumulation, addend: Addend) -> Result<()> {
    if out.is_empty() {
        return Ok(());
    }
    dispatch! { out.device().clone(),
        scratch => cpu::scratch(a, b)?,
        cpu => {
            if let Addend::Tensor(addend) = addend {
                out.copy_from(0, addend)?;
            }
            cpu::gemm(a, b, out, !matches!(addend, Addend::None))?;
            if a.scale_inv().is_some() {
                planted::damage(out);
            }
        },
        gpu => cuda::gemm(&gpu, a, b, out, accumulation, addend)?,
    }
    Ok(())
}

fn check(a: Operand, b: Operand, out: DType, accumulation: Accumulation) -> Result<(usize, usize)> {
    let ((m, k), (n, other)) = (a.size("gemm: a")?, b.size("gemm: b")?);
    if k != other {
        return Err(Error::Shape {
            what: "gemm: b".into(),
            expected: format!("[{n}, {k}], to be contracted with a [{m}, {k}]"),
            got: vec![n, other],
        });
    }
    let (x, y) = (a.matrix("gemm: a")?.0, b.matrix("gemm: b")?.0);
    y.expect_device("gemm: b", x.device())?;
    check_types(a, b, out, accumulation)?;
    Ok((m, n))
}

/// Checks types, granularities and shapes of scales, but not sizes.
pub(super) fn check_types(a: Operand, b: Operand, out: DType, accumulation: Accumulation) -> Result<()> {
    let (x, y) = (a.matrix("gemm: a")?.0, b.matrix("gemm: b")?.0);
    let fits = match (x.dtype(), y.dtype()) {
        (DType::E5M2, DType::E5M2) => false,
        (x, y) if x.is_fp8() && y.is_fp8() => matches!(out, DType::F32 | DType::F16 | DType::BF16),
        (x, y) => x == y && !x.is_fp8() && (out == x || (out == DType::F32 && x != DType::F64)),
    };
    if !fits {
        return Err(Error::Value(format!(
            "gemm: {} · {} into {out} is not a product this program does",
            x.dtype(),
            y.dtype()
        )));
    }
    if let (Some((_, x)), Some((_, y))) = (a.scale_inv(), b.scale_inv()) {
        let fits = match (x.info().shared, y.info().shared) {
            (Shared::Square(_), Shared::Square(_)) => false,
            _ => x == y || (x.is_blocks() && x.block() == y.block()),
        };
        if !fits {
            return Err(Error::Value(format!("gemm: the hardware has no product of {x} · {y} scales")));
        }
        if x.is_blocks() && accumulation == Accumulation::Fast {
            return Err(Error::Value(format!("gemm: {x} scales have no fast accumulation")));
        }
    }
    for (what, operand) in [("gemm: scale_inv of a", a), ("gemm: scale_inv of b", b)] {
        if let Some((scale_inv, granularity)) = operand.scale_inv() {
            let (rows, k) = operand.size(what)?;
            scale_inv.expect(what, &granularity.scales_shape(rows, k))?;
        }
    }
    Ok(())
}
