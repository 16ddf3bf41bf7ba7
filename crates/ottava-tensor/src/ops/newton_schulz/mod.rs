//! Orthogonalises Muon's updates by a Newton-Schulz iteration. Jordan et al. 2024, <https://kellerjordan.github.io/posts/muon/>.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::gemm::gemm_nt;
use super::global_norm::global_norm;
use super::operand::{Accumulation, Operand};
use super::parameter::Gradient;
use crate::ops::dispatch::dispatch;
use crate::{DType, Result, Tensor};

/// The coefficients `a`, `b`, `c` of a step. In few steps, they move singular values between 0 and 1 into about 0.7 to 1.2.
const COEFFICIENTS: [f32; 3] = [3.4445, -4.7750, 2.0315];

/// The number of steps of the iteration.
const STEPS: usize = 5;

/// The smallest norm by which a matrix is divided.
const EPSILON: f32 = 1e-7;

/// Returns an approximation of `factor · U · Vᵀ` for the singular value decomposition `x = U · S · Vᵀ` of a BF16 matrix `[R, C]`, as BF16 `[R, C]`.
///
/// `X = x / max(‖x‖, 1e-7)`, then five times `X = (a·I + b·A + c·A²) · X` with `A = X · Xᵀ`. If there are more rows than columns, the polynomial of
/// `A = Xᵀ · X` is multiplied from the right. Operands of products are BF16, and sums are F32. `A²` stays F32. The polynomial of `A` is computed in
/// F32 and rounded once to BF16; in the last step, it is multiplied by `factor` before rounding. The host reads nothing.
pub fn newton_schulz(x: &Tensor, factor: f32) -> Result<Tensor> {
    let [rows, columns] = x.dims("newton_schulz: x")?;
    x.expect_dtype("newton_schulz: x", &[DType::BF16])?;
    let mut y = normalize(x)?;
    let product = |a: Operand, b: Operand, out| gemm_nt(a, b, out, Accumulation::Exact);
    for step in 1..=STEPS {
        let factor = if step == STEPS { factor } else { 1.0 };
        let side = if rows > columns { Operand::plain_transposed(&y) } else { Operand::plain(&y) };
        let gram = product(side, side, DType::BF16)?;
        let square = product(Operand::plain(&gram), Operand::plain(&gram), DType::F32)?;
        let polynomial = polynomial(gram, &square, factor)?;
        drop(square);
        // The polynomial is symmetric.
        y = match rows > columns {
            true => product(Operand::plain(&y), Operand::plain(&polynomial), DType::BF16)?,
            false => product(Operand::plain(&polynomial), Operand::plain_transposed(&y), DType::BF16)?,
        };
    }
    Ok(y)
}

/// Returns `x / max(‖x‖, 1e-7)`.
fn normalize(x: &Tensor) -> Result<Tensor> {
    let norm = global_norm(&[Gradient::Plain(x)])?;
    let mut y = x.empty_like()?;
    dispatch! { x.device(),
        cpu => cpu::normalize(x, &norm, &mut y),
        gpu => cuda::normalize(gpu, x, &norm, &mut y)?,
    }
    Ok(y)
}

/// Returns `factor · (a·I + b·gram + c·square)` in BF16, in the memory of `gram`. `gram` is BF16 and `square` is F32, both `[N, N]`.
fn polynomial(mut gram: Tensor, square: &Tensor, factor: f32) -> Result<Tensor> {
    dispatch! { square.device(),
        cpu => cpu::polynomial(&mut gram, square, factor),
        gpu => cuda::polynomial(gpu, &mut gram, square, factor)?,
    }
    Ok(gram)
}
