//! Dropout, and the noise of NEFTune: random numbers of the tokens of a step.
//!
//! A random number depends on the step's seed, on the token's number in the step, on the key of the layer and on the column. So it does not depend on
//! micro-batches, on recomputation or on how ranks divide rows, sequences and columns, and backward draws it again instead of storing a mask.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::expect_compute;
use crate::ops::dispatch::dispatch;
use crate::{DType, Device, Error, Result, Tensor};
use std::ops::Range;

/// The numbers of tokens, and the seed of their random numbers. Both are on the device, and a captured step reads the seed again in each replay.
#[derive(Clone, Debug)]
pub struct TokenDraws {
    seed: Tensor,    /* I32 [2], the low and the high half */
    numbers: Tensor, /* I32 [T] */
}

impl TokenDraws {
    /// Returns the draws of tokens with these `numbers`, with the seed 0.
    pub fn new(device: &Device, numbers: &[i32]) -> Result<TokenDraws> {
        let numbers = Tensor::from_slice(device, &[numbers.len()], numbers)?;
        Ok(TokenDraws { seed: Tensor::zeros(device, &[2], DType::I32)?, numbers })
    }

    /// Sets the seed. No other draws may share this seed's memory.
    pub fn set_seed(&mut self, seed: u64) -> Result<()> {
        self.seed.write_bytes(&seed.to_le_bytes())
    }

    /// Returns the number of tokens.
    pub fn tokens(&self) -> usize {
        self.numbers.len()
    }

    /// Returns the draws of these tokens.
    pub fn of_tokens(&self, tokens: Range<usize>) -> Result<TokenDraws> {
        Ok(TokenDraws { seed: self.seed.clone(), numbers: self.numbers.rows(tokens.start, tokens.end)? })
    }
}

/// The columns of a layer's random numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrawnColumns {
    /// The number of the layer's random numbers, different for each layer.
    pub key: u64,
    /// The first column of the tensor in the layer's whole tensor, if ranks divide columns.
    pub first: usize,
}

/// Returns `x` `[T, C]` with each element set to 0 with the probability `p`, and otherwise multiplied by `1 / (1 - p)`, rounded once.
///
/// The gradient by `x` is the same op of the gradient by the result. Source: Srivastava et al. 2014, "Dropout"; the factor as in PyTorch.
/// Errors unless `0 <= p < 1`.
pub fn dropout(x: &Tensor, p: f64, draws: &TokenDraws, columns: DrawnColumns) -> Result<Tensor> {
    if !(0.0..1.0).contains(&p) {
        return Err(Error::Value(format!("dropout: the probability {p} is not from 0 up to, but not including, 1")));
    }
    expect_draws("dropout: x", x, draws)?;
    let mut y = x.empty_like()?;
    dispatch! { x.device(),
        cpu => cpu::dropout(x, p, draws, columns, &mut y),
        gpu => cuda::dropout(gpu, x, p, draws, columns, &mut y)?,
    }
    Ok(y)
}

/// Returns `x + size · u` for `x` `[T, C]`, rounded once, with independent uniform numbers `u` between -1 and 1.
///
/// The gradient by `x` is the gradient by the result. Source: Jain et al. 2023, "NEFTune", arXiv:2310.05914.
pub fn add_noise(x: &Tensor, size: f32, draws: &TokenDraws, columns: DrawnColumns) -> Result<Tensor> {
    expect_draws("add_noise: x", x, draws)?;
    let mut y = x.empty_like()?;
    dispatch! { x.device(),
        cpu => cpu::add_noise(x, size, draws, columns, &mut y),
        gpu => cuda::add_noise(gpu, x, size, draws, columns, &mut y)?,
    }
    Ok(y)
}

fn expect_draws(what: &str, x: &Tensor, draws: &TokenDraws) -> Result<()> {
    let [_, columns] = x.dims(what)?;
    expect_compute(what, x)?;
    x.expect(what, &[draws.tokens(), columns])?;
    draws.numbers.expect_device(what, x.device())
}

/// Returns the number of the 2^32 equally likely random numbers that drop an element.
fn threshold(p: f64) -> u32 {
    (p * 4_294_967_296.0) as u32
}
