//! The ranks that divide the tensors of layers (tensor parallelism), the tokens of sequences (context parallelism) and the experts of mixtures
//! (expert parallelism), as layers see them.
//!
//! With tensor parallelism, each rank has a part of each weight (Shoeybi et al. 2019, arXiv:1909.08053). Of the activations between
//! sublayers, each rank has a share of the tokens: consecutive rows, in the order of the ranks (sequence parallelism; Korthikanti et al.
//! 2022, arXiv:2205.05198).
//!
//! With context parallelism, each rank has all weights and consecutive tokens of every sequence. For attention, ranks exchange tokens for
//! heads: each computes some of the heads for all tokens (Jacobs et al. 2023, arXiv:2309.14509).
//!
//! With expert parallelism, each rank has some of the experts of each mixture and tokens of its own. It gathers the tokens of all ranks for its
//! experts, and the outputs of all experts for its tokens are added. Ranks of tensor parallelism divide experts too, whole ones: the ranks of
//! [`Axis::Expert`] are here all ranks that divide experts, the ranks of expert x tensor.
//!
//! `Slots` brings `LayerRanks` to the `Builder`, and `Casts` to each pass; `LayerAxes` (`parallel/layer_axes.rs`) implements it. A linear knows its
//! `Split`, and exchanges what the split implies:
//!
//! - The cast of an operand whose rows are divided (`OperandCast::gathering`) gathers codes if all ranks use one scale, and values if not. A
//!   `Gathering` (`operand.rs`) is an operand whose all-gather is in flight; the first GEMM that reads it starts with this rank's rows
//!   (`multiply_arriving` in `layers/linear/core.rs`). Codes are transposed for wgrad only when wgrad reads them.
//! - Partial sums of `Linear::fprop` (divided inputs) and `Linear::dgrad` (divided outputs) are added in F32 in the order of the ranks, together
//!   with the residual connection, and rounded once (`sum_parts`). The rows of other ranks are computed first; sending them overlaps with the GEMM
//!   of the rank's own rows (`LayerRanks::sum_computed_rows`). If NCCL sends them, this GEMM leaves multiprocessors free (`Pending::beside`).
//! - The head merges the losses of parts of the vocabulary (`merge_losses`).
//! - Norms, biases that are added to such sums, and other tensors that each rank has whole get gradients of the rank's tokens only.
//!   `Ranks::sum_whole_gradients` adds these gradients.
//! - If there are fewer key and value heads than ranks, a `Shard` of keys or values knows its `replica`: neighbouring ranks hold the same rows,
//!   `Ranks::sum_replicated_gradients` adds their gradients, and only the first rank counts the gradients in the norm and writes the rows to
//!   checkpoints.
//!
//! With context parallelism, `Sequences` knows this rank's place among the ranks that divide each sequence. Positions, inputs and targets
//! belong to its tokens; boundaries of documents belong to whole sequences. Only attention looks beyond a token: `layers/exchange.rs`
//! exchanges tokens for heads before attention and heads for tokens after it (`LayerRanks::exchange`), so attention itself computes what
//! one rank computes.
//!
//! To change how ranks divide attention: `Attention::attend` and its backward, with the keys of other ranks in `AttentionInput`, and `lse` to merge
//! results; the rows of a rank in `Ranks::rows`; the axes in `ParallelConfig::mesh`.
//!
//! With expert parallelism, the matrices of a rank are a `GroupedLinear` of fewer experts, whose `Param` knows the first tensor of the whole stack
//! (`Param::within_stack`). `Dispatch` (`layers/moe/dispatch.rs`) gathers tokens and choices of all ranks, lays out the rows of its own experts
//! (`slots` of a range), sends codes where all ranks would cast the same codes (`gather_quantized`), and adds the sums of all ranks.
//!
//! Exchanges in layers have groups of their own (`Mesh::layer_group`), and so communicators whose number of CTAs suits what compute does meanwhile.
//! `tests/promises/parallel/tensor.rs`, `context.rs`, `expert_ranks.rs` and `expert_tensor.rs` compare divided models with one rank, for every recipe, and
//! plant faults in the exchange.

use ottava_common::error::Result;
use ottava_tensor::Tensor;
use ottava_tensor::comm::{Axis, Pending};
use std::ops::Range;

/// A rank's place among the ranks that divide the tensors of layers, the tokens of sequences, or the experts of mixtures.
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

    /// Which of `n` equal things are its share.
    pub fn range(self, n: usize) -> Range<usize> {
        self.rank * self.share(n)..(self.rank + 1) * self.share(n)
    }

    /// Whether there are several ranks.
    pub fn is_divided(self) -> bool {
        self.ranks > 1
    }
}

/// The rows of all ranks; the gather of some may still be in progress.
pub enum Arriving {
    /// All are there.
    Here(Tensor),
    /// Ranks send them.
    Coming(Pending),
}

impl Arriving {
    /// Waits for all rows.
    pub fn wait(self) -> Result<Tensor> {
        match self {
            Arriving::Here(all) => Ok(all),
            Arriving::Coming(pending) => Ok(pending.wait()?),
        }
    }
}

/// The ranks that divide a tensor with one scale, as casts see them: they exchange amaxes and nothing else.
pub trait AmaxRanks {
    /// The elementwise maximum of `amax` over the ranks of `axis`; `name` is the name of the cast, for error messages.
    fn largest(&self, axis: Axis, name: &str, amax: Tensor) -> Result<Tensor>;
}

/// The exchange of activations among the ranks that divide the tensors, sequences and experts of layers: the ranks of the axes tensor,
/// context and expert. The ranks of the expert axis are here the ranks of expert x tensor. `name` names a tensor, for error messages.
pub trait LayerRanks: AmaxRanks {
    /// This rank among the ranks of `axis`.
    fn place(&self, axis: Axis) -> ShardPlace;

    /// Sends part `i` of `parts` `[ranks, …]` to rank `i` of `axis`, and returns what they have sent, in their order.
    fn exchange(&self, axis: Axis, name: &str, parts: &Tensor) -> Result<Tensor>;

    /// Starts to collect the rows of all ranks of `axis`, in their order, from this rank's `rows` `[N, …]`.
    fn start_gather(&self, axis: Axis, name: &str, rows: &Tensor) -> Result<Arriving>;

    /// [`LayerRanks::start_gather`] to its end.
    fn gather(&self, axis: Axis, name: &str, rows: &Tensor) -> Result<Tensor> {
        self.start_gather(axis, name, rows)?.wait()
    }

    /// This rank's rows of `addend + Σ partial` over the ranks of `axis`, of `rows` rows in all: `partial` computes the given rows of this rank's
    /// partial sum, `[…, C]`; `addend` and result are `[rows / ranks, C]`. The rows of each other rank are sent while the next are computed.
    fn sum_computed_rows(
        &self,
        axis: Axis,
        name: &str,
        rows: usize,
        partial: &mut dyn FnMut(Range<usize>) -> Result<Tensor>,
        addend: Option<&Tensor>,
    ) -> Result<Tensor>;

    /// [`LayerRanks::sum_computed_rows`] of a `partial` sum `[T, C]` that is computed already.
    fn sum_own_rows(&self, axis: Axis, name: &str, partial: Tensor, addend: Option<&Tensor>) -> Result<Tensor> {
        let mut rows = |range: Range<usize>| Ok(partial.rows(range.start, range.end)?);
        self.sum_computed_rows(axis, name, partial.shape()[0], &mut rows, addend)
    }

    /// `Σ x` over the ranks of `axis`.
    fn sum(&self, axis: Axis, name: &str, x: Tensor) -> Result<Tensor>;
}

/// One rank, which has all tensors, sequences and experts whole.
pub struct Undivided;

impl LayerRanks for Undivided {
    fn place(&self, _: Axis) -> ShardPlace {
        ShardPlace::ALONE
    }

    fn exchange(&self, _: Axis, _: &str, parts: &Tensor) -> Result<Tensor> {
        Ok(parts.clone())
    }

    fn start_gather(&self, _: Axis, _: &str, rows: &Tensor) -> Result<Arriving> {
        Ok(Arriving::Here(rows.clone()))
    }

    fn sum_computed_rows(
        &self,
        _: Axis,
        _: &str,
        rows: usize,
        partial: &mut dyn FnMut(Range<usize>) -> Result<Tensor>,
        addend: Option<&Tensor>,
    ) -> Result<Tensor> {
        let sum = partial(0..rows)?;
        match addend {
            Some(addend) => Ok(ottava_tensor::ops::add(&sum, addend)?),
            None => Ok(sum),
        }
    }

    fn sum(&self, _: Axis, _: &str, x: Tensor) -> Result<Tensor> {
        Ok(x)
    }
}

impl AmaxRanks for Undivided {
    fn largest(&self, _: Axis, _: &str, amax: Tensor) -> Result<Tensor> {
        Ok(amax)
    }
}
