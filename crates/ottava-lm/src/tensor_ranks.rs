//! The ranks that divide the tensors of layers (tensor parallelism), as layers see them.
//!
//! Each rank has a part of each weight (Shoeybi et al. 2019, arXiv:1909.08053). Of the activations between sublayers, each rank has a share
//! of the tokens: consecutive rows, in the order of the ranks (sequence parallelism; Korthikanti et al. 2022, arXiv:2205.05198).

use crate::error::Result;
use ottava_tensor::Tensor;

/// A rank's place among those that divide the tensors of layers.
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

/// The exchange of activations among the ranks that divide the tensors of layers. `name` is that of a tensor, for error messages.
pub trait TensorRanks {
    /// This rank among them.
    fn place(&self) -> ShardPlace;

    /// The rows of all ranks, in their order, from this rank's `rows` `[N, …]`.
    fn gather(&self, name: &str, rows: &Tensor) -> Result<Tensor>;

    /// This rank's rows of `addend + Σ partial` over ranks: `partial` `[T, C]`, `addend` and result `[T / ranks, C]`.
    fn sum_own_rows(&self, name: &str, partial: Tensor, addend: Option<&Tensor>) -> Result<Tensor>;

    /// `Σ x` over ranks.
    fn sum(&self, name: &str, x: Tensor) -> Result<Tensor>;

    /// The elementwise maximum of `x` over ranks.
    fn largest(&self, name: &str, x: Tensor) -> Result<Tensor>;
}

/// One rank, which has all tensors whole.
pub struct Undivided;

impl TensorRanks for Undivided {
    fn place(&self) -> ShardPlace {
        ShardPlace::ALONE
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
