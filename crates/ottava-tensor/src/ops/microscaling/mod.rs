//! Casts to the formats with small blocks, MXFP8 and NVFP4, which Blackwell's tensor cores multiply. Hopper has no such products, so a product
//! dequantizes both operands to BF16 and multiplies them (`ops/gemm/emulated.rs`).
//!
//! **MXFP8**: 32 neighbours along the contracted dimension share a power of two. `scale_inv = 2^ceil(log2(amax / largest))`, from 2⁻¹²⁷ to 2¹²⁷, and
//! `code = satcast(x / scale_inv)`. A block of zeros has 2⁻¹²⁷, and a block with infinity has 2¹²⁷, as in Transformer Engine.
//!
//! **NVFP4**: 16 neighbours share a scale in E4M3, and the tensor has a scale in F32. With `g = 2688 / amax of the tensor` (1 if the amax is zero or
//! infinite), `scale_inv of a block = E4M3(amax of the block · (g · (1/6)))`, `scale_inv of the tensor = 1 / g`, and `value = E2M1(x / (scale_inv of the
//! block · scale_inv of the tensor))`. Weights have blocks of 16x16. These are the operations of Transformer Engine, in the same order.
//!
//! - Values are E2M1 values in E4M3 codes, so that products, statistics and ranks treat them as other codes. NaN stays NaN.
//! - The transposed copies of activations and gradients are cast after a Hadamard transform with fixed signs of 16 neighbours along the contracted
//!   dimension ([`hadamard`]). The transforms of both operands cancel in the product. Up to 15 neighbours at the end of rows are not transformed.
//! - Stochastic rounding draws no numbers from a generator: the random numbers of a block are hashes of the values of the block. So they do not depend on
//!   micro-batches, on ranks, on recomputation or on the step at which a run resumes.
//!
//! Source: OCP MX specification v1.0; NVIDIA 2025, "Pretraining Large Language Models with NVFP4", arXiv:2509.25149; Transformer Engine,
//! `common/cast/nvfp4` and `common/cast/mxfp8`.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::destination::CastStatistics;
use super::expect_compute;
use crate::granularity::{Levels, Microscaling};
use crate::ops::dispatch::dispatch;
use crate::{Result, Tensor};

/// The number of neighbours of a Hadamard transform.
pub(super) const TRANSFORMED: usize = 16;

/// The signs of the 16 values before the transform: bit `i` is set if value `i` is negated. Transformer Engine has the same signs.
pub(super) const SIGNS: u32 = 0b1101_0111_1110_1000;

/// The direction of [`hadamard`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hadamard {
    /// `y = H · (s ∘ x) / 4` for signs `s`.
    Forward,
    /// The inverse: `x = s ∘ (H · y) / 4`.
    Inverse,
}

impl Microscaling {
    /// Returns the number of neighbours of a block.
    pub(super) fn length(self) -> usize {
        match self.levels {
            Levels::One => 32,
            Levels::Two => 16,
        }
    }
}

/// Transforms each 16 neighbours of the rows of `x` `[R, C]` (F32, F16 or BF16) by the Hadamard matrix of 16, with fixed signs. The sums run in F32, in the
/// order of the neighbours, and are rounded once. The last `C % 16` columns are copied.
pub fn hadamard(x: &Tensor, direction: Hadamard) -> Result<Tensor> {
    x.dims::<2>("hadamard: x")?;
    expect_compute("hadamard: x", x)?;
    let mut y = x.empty_like()?;
    dispatch! { x.device(),
        cpu => cpu::hadamard(x, direction, &mut y),
        gpu => cuda::hadamard(gpu, x, direction, &mut y)?,
    }
    Ok(y)
}

/// Casts the rows of `x` in blocks along the columns, and writes zeros into the padding of codes. `tensor_amax`, F32 `[1]`, is the amax of `x`, if the
/// format has a scale of the tensor.
pub(super) fn cast(
    x: &Tensor,
    how: Microscaling,
    tensor_amax: Option<&Tensor>,
    codes: &mut Tensor,
    scale_inv: &mut Tensor,
    statistics: Option<(&mut CastStatistics, usize)>,
) -> Result<()> {
    dispatch! { x.device(),
        cpu => cpu::cast(x, how, tensor_amax, codes, scale_inv, statistics),
        gpu => cuda::cast(gpu, x, how, tensor_amax, codes, scale_inv, statistics)?,
    }
    Ok(())
}
