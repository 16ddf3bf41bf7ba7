//! The orthogonalisation of Muon's updates by a Newton-Schulz iteration. Jordan et al. 2024, <https://kellerjordan.github.io/posts/muon/>.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::gemm::{Accumulation, Operand, gemm_nt};
use super::global_norm::global_norm;
use super::parameter::Gradient;
use crate::ops::dispatch::dispatch;
use crate::{DType, Result, Tensor};

/// Coefficients `a`, `b`, `c` of a step, which move singular values from 0 to 1 into about 0.7 to 1.2 in few steps.
const COEFFICIENTS: [f32; 3] = [3.4445, -4.7750, 2.0315];

/// Steps of the iteration.
const STEPS: usize = 5;

/// Smallest norm that a matrix is divided by.
const EPSILON: f32 = 1e-7;

/// `factor · U · Vᵀ`, approximately, for the singular value decomposition `x = U · S · Vᵀ` of a BF16 matrix `[R, C]`; BF16 `[R, C]`.
///
/// `X = x / max(‖x‖, 1e-7)`, then five times `X = (a·I + b·A + c·A²) · X` with `A = X · Xᵀ`, or from the right with `A = Xᵀ · X` if
/// there are more rows than columns. Operands of products are BF16 and sums F32. `A²` stays F32, and the polynomial of `A` is computed in
/// F32 and rounded once to BF16, in the last step after it was multiplied by `factor`. The host reads nothing.
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

/// `x / max(‖x‖, 1e-7)`.
fn normalize(x: &Tensor) -> Result<Tensor> {
    let norm = global_norm(&[Gradient::Plain(x)])?;
    let mut y = x.empty_like()?;
    dispatch! { x.device(),
        cpu => cpu::normalize(x, &norm, &mut y),
        gpu => cuda::normalize(gpu, x, &norm, &mut y)?,
    }
    Ok(y)
}

/// `factor · (a·I + b·gram + c·square)` for BF16 `gram` and F32 `square`, both `[N, N]`; BF16, in the memory of `gram`.
fn polynomial(mut gram: Tensor, square: &Tensor, factor: f32) -> Result<Tensor> {
    dispatch! { square.device(),
        cpu => cpu::polynomial(&mut gram, square, factor),
        gpu => cuda::polynomial(gpu, &mut gram, square, factor)?,
    }
    Ok(gram)
}
