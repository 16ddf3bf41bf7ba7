//! The interface of layers to the ranks that divide the tensors of layers (tensor parallelism), the tokens of sequences (context parallelism) and
//! the experts of mixtures (expert parallelism).
//!
//! With tensor parallelism, each rank has a part of each weight (Shoeybi et al. 2019, arXiv:1909.08053). Between sublayers, each rank has the
//! activations of a share of the tokens: consecutive rows, in the order of the ranks (sequence parallelism; Korthikanti et al.
//! 2022, arXiv:2205.05198).
//!
//! With context parallelism, each rank has all weights and consecutive tokens of every sequence. For attention and recurrences, ranks exchange tokens
//! for heads: each rank computes some of the heads for all tokens (Jacobs et al. 2023, arXiv:2309.14509).
//!
//! With expert parallelism, each rank has some of the experts of each mixture, and different tokens. A rank gathers the tokens of all ranks for its
//! experts. The outputs of all experts are added for each token. Ranks of tensor parallelism also divide experts, as whole experts. So
//! [`Axis::Expert`] means here all ranks that divide experts: the ranks of expert x tensor.
//!
//! `Slots` brings `LayerRanks` to the `Builder`, and `Casts` to each pass; `LayerAxes` (`parallel/layer_axes.rs`) implements `LayerRanks`. The
//! `Split` of a linear decides what it exchanges:
//!
//! - The cast of an operand whose rows are divided (`OperandCast::gathering`) gathers codes if all ranks use one scale, and values if not. A
//!   `Gathering` (`operand.rs`) is an operand whose all-gather is in flight; the first GEMM that reads it starts with this rank's rows
//!   (`multiply_arriving` in `layers/linear/core.rs`). Codes are transposed for wgrad only when wgrad reads them.
//! - Partial sums of `Linear::fprop` (divided inputs) and `Linear::dgrad` (divided outputs) are added in F32 in the order of the ranks, together
//!   with the residual connection, and rounded once (`sum_parts`). The rows of other ranks are computed first; sending them overlaps with the GEMM
//!   of the rank's own rows (`LayerRanks::sum_computed_rows`). If NCCL sends them, this GEMM leaves multiprocessors free (`Pending::beside`).
//! - The head merges the losses of parts of the vocabulary (`merge_losses`).
//! - Norms, biases that are added to such sums, and other tensors that each rank has whole get gradients from the rank's tokens only.
//!   `Ranks::sum_whole_gradients` adds the gradients of all ranks.
//! - If there are fewer key and value heads than ranks, neighbouring ranks hold the same rows of keys and values (`Shard::replica`).
//!   `Ranks::sum_replicated_gradients` adds their gradients. Only the first of these ranks counts the gradients in the norm and writes the rows to
//!   checkpoints.
//!
//! With context parallelism, `Sequences` has this rank's place among the ranks that divide each sequence. Positions, inputs and targets belong to the
//! rank's tokens. Boundaries of documents belong to whole sequences. Only attention and recurrent layers read other tokens: `layers/exchange.rs`
//! exchanges tokens for heads before them and heads for tokens after them (`LayerRanks::exchange`), so attention itself is the same as on one rank. A
//! recurrent layer reads the parameters of the rank's heads (`MixerHeads` in `layers/recurrent.rs`).
//!
//! To change how ranks divide attention, change `Attention::attend` and its backward, with the keys of other ranks in `AttentionInput` and `lse` for
//! merging results; `Ranks::rows`, which decides the rows of a rank; and the axes in `ParallelConfig::mesh`.
//!
//! With expert parallelism, the matrices of a rank are a `GroupedLinear` of fewer experts, whose `Param` knows the first tensor of the whole stack
//! (`Param::within_stack`). `Dispatch` (`layers/moe/dispatch.rs`) gathers tokens and choices of all ranks, lays out the rows of the rank's experts
//! (`slots` of a range), sends codes if all ranks would cast the same codes (`gather_quantized`), and adds the sums of all ranks.
//!
//! Exchanges in layers have separate groups (`Mesh::layer_group`) and thus separate communicators. Their number of CTAs suits what is computed
//! meanwhile. `tests/promises/parallel/tensor.rs`, `context.rs`, `expert_ranks.rs` and `expert_tensor.rs` compare divided models with one rank, for
//! every recipe, and plant faults in the exchange.

use ottava_common::error::Result;
use ottava_tensor::Tensor;
use ottava_tensor::comm::{Axis, Pending};
use std::ops::Range;

/// A rank's place among the ranks that divide the tensors of layers, the tokens of sequences, or the experts of mixtures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardPlace {
    /// The index of this rank.
    pub rank: usize,
    /// The number of ranks.
    pub ranks: usize,
}

impl ShardPlace {
    /// A single rank, which holds all elements.
    pub const ALONE: ShardPlace = ShardPlace { rank: 0, ranks: 1 };

    /// Returns this rank's share of `n` elements, which must divide evenly.
    pub fn share(self, n: usize) -> usize {
        n / self.ranks
    }

    /// Returns the range of this rank's share of `n` elements, which must divide evenly.
    pub fn range(self, n: usize) -> Range<usize> {
        self.rank * self.share(n)..(self.rank + 1) * self.share(n)
    }

    /// Returns whether there are several ranks.
    pub fn is_divided(self) -> bool {
        self.ranks > 1
    }
}

/// The rows of all ranks, or a gather of them that may still be in progress.
pub enum Arriving {
    /// All rows have arrived.
    Here(Tensor),
    /// The rows are being gathered.
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

/// The ranks that divide a tensor with one scale. Casts use this interface, which exchanges only amaxes.
pub trait AmaxRanks {
    /// Returns the elementwise maximum of `amax` over the ranks of `axis`. `name` is the name of the cast, for error messages.
    fn largest(&self, axis: Axis, name: &str, amax: Tensor) -> Result<Tensor>;
}

/// The exchange of activations among the ranks of the axes tensor, context and expert, which divide the tensors, sequences and experts of layers.
/// Here the expert axis means the ranks of expert x tensor. `name` names a tensor, for error messages.
pub trait LayerRanks: AmaxRanks {
    /// Returns this rank's place among the ranks of `axis`.
    fn place(&self, axis: Axis) -> ShardPlace;

    /// Sends part `i` of `parts` `[ranks, …]` to rank `i` of `axis`. Returns the parts that the ranks have sent to this rank, in the order of the
    /// ranks.
    fn exchange(&self, axis: Axis, name: &str, parts: &Tensor) -> Result<Tensor>;

    /// Starts to gather the rows of all ranks of `axis`, in the order of the ranks. `rows` `[N, …]` are this rank's rows.
    fn start_gather(&self, axis: Axis, name: &str, rows: &Tensor) -> Result<Arriving>;

    /// Gathers the rows like [`LayerRanks::start_gather`], and waits for them.
    fn gather(&self, axis: Axis, name: &str, rows: &Tensor) -> Result<Tensor> {
        self.start_gather(axis, name, rows)?.wait()
    }

    /// Returns this rank's rows of `addend + Σ partial` over the ranks of `axis`. `partial` computes a range of rows of this rank's partial sum
    /// `[rows, C]`; `addend` and the result are `[rows / ranks, C]`. While rows for one rank are sent, the next rows are computed.
    fn sum_computed_rows(
        &self,
        axis: Axis,
        name: &str,
        rows: usize,
        partial: &mut dyn FnMut(Range<usize>) -> Result<Tensor>,
        addend: Option<&Tensor>,
    ) -> Result<Tensor>;

    /// Runs [`LayerRanks::sum_computed_rows`] on a `partial` sum `[T, C]` that is already computed.
    fn sum_own_rows(&self, axis: Axis, name: &str, partial: Tensor, addend: Option<&Tensor>) -> Result<Tensor> {
        let mut rows = |range: Range<usize>| Ok(partial.rows(range.start, range.end)?);
        self.sum_computed_rows(axis, name, partial.shape()[0], &mut rows, addend)
    }

    /// Returns `addend + Σ x` over the ranks of `axis`, added in their order and rounded once. All ranks give the same addend.
    fn sum(&self, axis: Axis, name: &str, x: &Tensor, addend: Option<&Tensor>) -> Result<Tensor>;
}

/// A single rank, which divides nothing.
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
        axis: Axis,
        name: &str,
        rows: usize,
        partial: &mut dyn FnMut(Range<usize>) -> Result<Tensor>,
        addend: Option<&Tensor>,
    ) -> Result<Tensor> {
        self.sum(axis, name, &partial(0..rows)?, addend)
    }

    fn sum(&self, _: Axis, _: &str, x: &Tensor, addend: Option<&Tensor>) -> Result<Tensor> {
        match addend {
            Some(addend) => Ok(ottava_tensor::ops::add(x, addend)?),
            None => Ok(x.clone()),
        }
    }
}

impl AmaxRanks for Undivided {
    fn largest(&self, _: Axis, _: &str, amax: Tensor) -> Result<Tensor> {
        Ok(amax)
    }
}
