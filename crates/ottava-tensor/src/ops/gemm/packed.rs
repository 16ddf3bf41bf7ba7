//! Operands in the form that the kernels read: panels of rows in the arithmetic type, and scales.

use crate::Tensor;
use crate::element::{Float, Real, with_float};
use crate::granularity::Granularity;
use crate::ops::operand::Operand;
use crate::ops::parallel_rows::ParallelRows;
use rayon::prelude::*;

/// The number of terms per partial sum.
pub(super) const BLOCK: usize = 128;

/// The inverse scales of an operand.
#[derive(Clone, Copy)]
pub(super) struct Scales<'a> {
    pub(super) granularity: Granularity,
    shape: &'a [usize],
    values: &'a [f32],
}

impl<'a> Scales<'a> {
    pub(super) fn of(operand: Operand<'a>) -> Option<Scales<'a>> {
        let (scale_inv, granularity) = operand.scale_inv()?;
        Some(Scales { granularity, shape: scale_inv.shape(), values: scale_inv.host() })
    }

    /// Returns the row of scales that repeats the scale of the tensor, if the tensor has it besides the scales of blocks.
    pub(super) fn tensor_scale(self) -> Option<usize> {
        self.granularity.has_tensor_scale().then(|| self.shape[0] - 1)
    }

    /// Returns the inverse scales of the rows of a panel, for a block along `K`. Rows beyond the matrix have no stored scale and get 0.
    pub(super) fn panel<const P: usize>(self, panel: usize, block: usize) -> [f32; P] {
        let at = |i| self.granularity.scale_index(self.shape, panel * P + i, block);
        std::array::from_fn(|i| self.values.get(at(i)).copied().unwrap_or_default())
    }
}

/// Packs a matrix into panels of `P` rows, each `[K, P]`, in the arithmetic type. Missing rows are zero.
pub(super) fn pack<R: Real, const P: usize>((x, transposed): (&Tensor, bool), rows: usize, k: usize) -> Vec<R> {
    let mut panels = vec![R::default(); rows.div_ceil(P) * P * k];
    let width = x.shape()[1];
    with_float!(x.dtype(), S => {
        let x: &[S] = x.host();
        panels.par_rows_mut(P * k).enumerate().for_each(|(panel, out)| {
            let first = panel * P;
            let count = P.min(rows - first);
            if transposed {
                for (p, out) in out.chunks_exact_mut(P).enumerate() {
                    for (out, x) in out.iter_mut().zip(&x[p * width + first..][..count]) {
                        *out = widen(*x);
                    }
                }
            } else {
                for i in 0..count {
                    for (p, x) in x[(first + i) * width..][..k].iter().enumerate() {
                        out[p * P + i] = widen(*x);
                    }
                }
            }
        });
    });
    panels
}

#[inline(always)]
fn widen<S: Float, R: Real>(x: S) -> R {
    R::of(x.load().to_f64())
}

pub(super) fn panel<R, const P: usize>(panels: &[R], k: usize, i: usize) -> &[R] {
    &panels[i * P * k..][..P * k]
}
