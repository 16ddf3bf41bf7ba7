//! Random initial values that are bit-identical on every device.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use crate::ops::dispatch::dispatch;
use crate::{DType, Device, Result, Tensor};

pub(super) use cpu::hash;

/// Returns independent normal variables with mean 0 and standard deviation `std`, F32 of the given shape.
///
/// Element `i` depends only on `(seed, i)`. A hash gives a uniform number, and the inverse of the normal distribution
/// (Wichura 1988, algorithm AS 241, PPND7) maps it. The logarithm is this crate's, and all operations are correctly rounded.
pub fn normal(device: &Device, shape: &[usize], std: f32, seed: u64) -> Result<Tensor> {
    normal_from(device, shape, std, seed, 0)
}

/// Returns the elements of a flat [`normal`], beginning with element `first`.
pub fn normal_from(device: &Device, shape: &[usize], std: f32, seed: u64, first: usize) -> Result<Tensor> {
    let (mut x, first) = (Tensor::empty(device, shape, DType::F32)?, first as u64);
    dispatch! { device,
        cpu => cpu::normal(&mut x, std, seed, first),
        gpu => cuda::normal(gpu, &mut x, std, seed, first)?,
    }
    Ok(x)
}
