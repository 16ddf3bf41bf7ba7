use super::{BLOCK, CurrentScaling, MatrixSlice};
use crate::element::Element;
use crate::fp8::E4M3;
use crate::ops::destination::Fp8Output;
use crate::ops::destination::Seen;
use crate::ops::parallel_rows::ParallelRows;
use crate::ops::quantize::blocks::bound;
use crate::ops::quantize::blocks::cpu::largest;
use crate::ops::quantize::cpu::{current_scale, row};
use crate::quantized::QuantizedTensor;
use crate::{DType, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;

/// Runs `$work` with `$S` as the type of `$x`.
macro_rules! with_type {
    ($x:expr, $S:ident => $work:expr) => {
        match $x.dtype() {
            DType::F32 => {
                type $S = f32;
                $work
            }
            DType::F16 => {
                type $S = f16;
                $work
            }
            _ => {
                type $S = bf16;
                $work
            }
        }
    };
}

impl MatrixSlice {
    /// Returns the block row and the block column of the 128 elements with number `at` in the slice.
    fn block_of(&self, at: usize) -> (usize, usize) {
        let element = self.start + at * BLOCK;
        (element / self.columns / BLOCK, element % self.columns / BLOCK)
    }
}

pub(super) fn amaxes(x: &Tensor, slice: MatrixSlice, amaxes: &mut Tensor) {
    let (all, across) = (amaxes.host_mut::<f32>(), slice.columns / BLOCK);
    all.fill(0.0);
    with_type!(x, S => for (at, x) in x.host::<S>().chunks(BLOCK).enumerate() {
        let (i, j) = slice.block_of(at);
        all[i * across + j] = all[i * across + j].max(largest(x));
    });
}

pub(super) fn quantize(
    x: &Tensor,
    slice: MatrixSlice,
    amaxes: &Tensor,
    how: CurrentScaling,
    into: &mut QuantizedTensor,
    to: &mut Fp8Output,
) {
    let largest = E4M3::DTYPE.max_finite().expect("an FP8 format has a largest finite value");
    let across = slice.columns / BLOCK;
    let scale = |amax: &f32| current_scale(*amax, largest, bound(x.dtype()), how);
    let scales: Vec<f32> = amaxes.host::<f32>().iter().map(scale).collect();
    let QuantizedTensor { codes: Some(codes), scale_inv, transposed_scale_inv: Some(turned), .. } = into else {
        unreachable!("checked by the caller")
    };
    let pitches = [&*scale_inv, &**turned].map(|scales| scales.shape()[1]);
    let (scale_inv, turned) = (scale_inv.host_mut::<f32>(), turned.host_mut::<f32>());
    for (at, scale) in scales.iter().enumerate() {
        let (i, j) = (at / across, at % across);
        scale_inv[i * pitches[0] + j] = 1.0 / scale;
        turned[j * pitches[1] + i] = 1.0 / scale;
    }
    let seen = with_type!(x, S => codes
        .host_mut::<E4M3>()
        .par_rows_mut(BLOCK)
        .zip(x.host::<S>().par_rows(BLOCK))
        .enumerate()
        .with_min_len(64)
        .map(|(at, (codes, x))| {
            let (i, j) = slice.block_of(at);
            row(x, scales[i * across + j], codes)
        })
        .reduce(Seen::default, Seen::merge));
    seen.add_to(to.statistics, to.slot, x.len());
}
