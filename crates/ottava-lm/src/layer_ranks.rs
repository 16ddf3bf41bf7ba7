//! The ranks that divide the tensors of layers (tensor parallelism) and the tokens of sequences (context parallelism), as layers see them.
//!
//! With tensor parallelism, each rank has a part of each weight (Shoeybi et al. 2019, arXiv:1909.08053). Of the activations between
//! sublayers, each rank has a share of the tokens: consecutive rows, in the order of the ranks (sequence parallelism; Korthikanti et al.
//! 2022, arXiv:2205.05198).
//!
//! With context parallelism, each rank has all weights and consecutive tokens of every sequence. For attention, ranks exchange tokens for
//! heads: each computes some of the heads for all tokens (Jacobs et al. 2023, arXiv:2309.14509).

use crate::error::Result;
use ottava_tensor::Tensor;

/// A rank's place among those that divide the tensors of layers, or the tokens of sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardPlace {
    /// This rank.
    pub rank: usize,
    /// The number of ranks.
    pub ranks: usize,
}

impl ShardPlace {
    /// A single rank, which holds all elements.
    pub const ALONE: ShardPlace = ShardPlace { rank: 0, ranks: 1 };

    /// Its share of `n` equal things.
    pub fn share(self, n: usize) -> usize {
        n / self.ranks
    }

    /// Whether there are several ranks.
    pub fn is_divided(self) -> bool {
        self.ranks > 1
    }
}

/// The exchange of activations among the ranks that divide the tensors and the sequences of layers. `name` is that of a tensor, for error messages.
pub trait LayerRanks {
    /// This rank among those that divide tensors.
    fn place(&self) -> ShardPlace;

    /// This rank among those that divide sequences.
    fn sequence_place(&self) -> ShardPlace;

    /// Sends part `i` of `parts` `[ranks, …]` to rank `i` of those that divide sequences, and returns what they have sent, in their order.
    fn exchange(&self, name: &str, parts: &Tensor) -> Result<Tensor>;

    /// The rows of all ranks, in their order, from this rank's `rows` `[N, …]`.
    fn gather(&self, name: &str, rows: &Tensor) -> Result<Tensor>;

    /// This rank's rows of `addend + Σ partial` over ranks: `partial` `[T, C]`, `addend` and result `[T / ranks, C]`.
    fn sum_own_rows(&self, name: &str, partial: Tensor, addend: Option<&Tensor>) -> Result<Tensor>;

    /// `Σ x` over ranks.
    fn sum(&self, name: &str, x: Tensor) -> Result<Tensor>;

    /// The elementwise maximum of `x` over ranks.
    fn largest(&self, name: &str, x: Tensor) -> Result<Tensor>;
}

/// One rank, which has all tensors and sequences whole.
pub struct Undivided;

impl LayerRanks for Undivided {
    fn place(&self) -> ShardPlace {
        ShardPlace::ALONE
    }

    fn sequence_place(&self) -> ShardPlace {
        ShardPlace::ALONE
    }

    fn exchange(&self, _: &str, parts: &Tensor) -> Result<Tensor> {
        Ok(parts.clone())
    }

    fn gather(&self, _: &str, rows: &Tensor) -> Result<Tensor> {
        Ok(rows.clone())
    }

    fn sum_own_rows(&self, _: &str, partial: Tensor, addend: Option<&Tensor>) -> Result<Tensor> {
        match addend {
            Some(addend) => Ok(ottava_tensor::ops::add(&partial, addend)?),
            None => Ok(partial),
        }
    }

    fn sum(&self, _: &str, x: Tensor) -> Result<Tensor> {
        Ok(x)
    }

    fn largest(&self, _: &str, x: Tensor) -> Result<Tensor> {
        Ok(x)
    }
}
