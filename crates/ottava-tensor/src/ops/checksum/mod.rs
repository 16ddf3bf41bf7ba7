//! Checksums of the bytes of tensors, used to find tensors that differ between ranks.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use crate::ops::dispatch::dispatch;
use crate::{DType, Error, Result, Tensor};

/// Returns the checksum of each of `tensors`, which may have any type: I64 `[tensors]`.
///
/// The checksum is `Σ hash(word + i · 0x9E3779B97F4A7C15)` modulo 2⁶⁴ over the 64-bit words of a tensor. `i` is the number of the word, and `hash` is
/// the finaliser of SplitMix64. The last word is padded with zeros. Sums of integers are exact in any order, so equal bytes give equal checksums on
/// every device. Errors if there are no tensors, or if they are on several devices.
pub fn checksums(tensors: &[&Tensor]) -> Result<Tensor> {
    let first = tensors.first().ok_or_else(|| Error::Value("checksums: no tensors were given".into()))?;
    let mut sums = Tensor::zeros(first.device(), &[tensors.len()], DType::I64)?;
    for (i, x) in tensors.iter().enumerate() {
        x.expect_device("checksums: tensor", first.device())?;
        dispatch! { x.device(),
            cpu => sums.host_mut::<i64>()[i] = cpu::checksum(&x.read_bytes()?) as i64,
            gpu => cuda::checksum(gpu, x, &mut sums, i)?,
        }
    }
    Ok(sums)
}
