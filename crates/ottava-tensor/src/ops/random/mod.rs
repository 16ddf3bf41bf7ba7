//! Random initial values that are the same on every device, bit for bit.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use crate::ops::dispatch::dispatch;
use crate::{DType, Device, Result, Tensor};

pub(super) use cpu::hash;

/// Independent normal variables with mean 0 and standard deviation `std`, F32 of the given shape.
///
/// Element `i` is a function of `(seed, i)` alone: a hash to a uniform number, then the inverse of the normal distribution
/// (Wichura 1988, algorithm AS 241, PPND7) with a logarithm of this crate, all in correctly rounded operations.
pub fn normal(device: &Device, shape: &[usize], std: f32, seed: u64) -> Result<Tensor> {
    normal_from(device, shape, std, seed, 0)
}

/// The elements of a flat [`normal`] from number `first` on.
pub fn normal_from(device: &Device, shape: &[usize], std: f32, seed: u64, first: usize) -> Result<Tensor> {
    let (mut x, first) = (Tensor::empty(device, shape, DType::F32)?, first as u64);
    dispatch! { device,
        cpu => cpu::normal(&mut x, std, seed, first),
        gpu => cuda::normal(gpu, &mut x, std, seed, first)?,
    }
    Ok(x)
}
