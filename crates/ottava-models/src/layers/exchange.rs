//! The exchange of tokens for heads among ranks that divide sequences (DeepSpeed-Ulysses; Jacobs et al. 2023, arXiv:2309.14509).
//!
//! Before attention, each of `W` ranks has all `H` heads of its tokens: consecutive tokens of each of the `B` sequences of `S` tokens.
//! Attention needs all tokens of `H / W` heads, and so do the convolution and the recurrence of a recurrent layer. `name` is the name of the layer, for
//! error messages.

use ottava_common::error::{Error, Result};
use ottava_recipe::context::{Context, Sequences};
use ottava_recipe::layer_ranks::{LayerRanks, ShardPlace};
use ottava_recipe::param::Builder;
use ottava_tensor::Tensor;
use ottava_tensor::comm::Axis;
use ottava_tensor::ops::{RepeatedColumns, divide_columns, join_columns, repeat_columns, repeat_columns_backward};
use std::ops::Range;

/// Errors unless the number of ranks that divide tensors and sequences divides `count`. `what` names what is counted, for the message.
pub(super) fn expect_divisible(build: &Builder, name: &str, what: &str, count: usize) -> Result<()> {
    let (ranks, context) = (build.place().ranks, build.place_on(Axis::Context).ranks);
    if count.is_multiple_of(ranks * context) {
        return Ok(());
    }
    let keys = match (ranks, context) {
        (_, 1) => "`parallel.tensor` (in inference --gpus or --ranks)",
        (1, _) => "`parallel.context`",
        _ => "the product of `parallel.tensor` and `parallel.context`",
    };
    Err(Error::Config(format!(
        "`{name}` has {count} {what}, which {} ranks cannot divide; set {keys} to a divisor of {count}",
        ranks * context
    )))
}

/// Errors as [`expect_divisible`] unless ranks that divide sequences are a multiple of the number of heads, and each head is sent to several of them.
pub(super) fn expect_divisible_or_sent(build: &Builder, name: &str, what: &str, heads: usize) -> Result<()> {
    let (ranks, context) = (build.place().ranks, build.place_on(Axis::Context).ranks);
    let sent = if heads.is_multiple_of(ranks) { heads * replicas(heads / ranks, context) } else { heads };
    expect_divisible(build, name, what, sent)
}

/// Returns on how many neighbouring ranks each of `heads` heads is replicated, if `ranks` divide more heads of another kind. Returns 1 unless `ranks`
/// is a multiple of `heads`.
pub(super) fn replicas(heads: usize, ranks: usize) -> usize {
    if ranks.is_multiple_of(heads) { ranks / heads } else { 1 }
}

/// Returns the number of heads that each rank computes if ranks that divide sequences divide or repeat `heads` heads.
pub(super) fn share_of(heads: usize, place: ShardPlace) -> usize {
    place.share(heads * replicas(heads, place.ranks))
}

/// Sections of columns that ranks divide by heads when they exchange tokens for heads. If a section has fewer heads than there are ranks, each head is
/// sent to several neighbouring ranks, and the gradients of these ranks are added.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeadSections<const N: usize> {
    sections: [RepeatedColumns; N],
    place: ShardPlace,
}

impl<const N: usize> HeadSections<N> {
    /// Returns the sections with these numbers of heads and columns of a head, for the rank at `place` among the ranks that divide sequences.
    pub fn new(of: [(usize, usize); N], place: ShardPlace) -> HeadSections<N> {
        let section = |(heads, width)| RepeatedColumns {
            columns: heads * width,
            block: width,
            times: replicas(heads, place.ranks),
        };
        HeadSections { sections: of.map(section), place }
    }

    /// Returns the widths of the sections, with repetitions.
    fn widths(&self) -> [usize; N] {
        self.sections.map(|section| section.columns * section.times)
    }

    fn is_repeated(&self) -> bool {
        self.sections.iter().any(|section| section.times > 1)
    }

    /// Returns all tokens of this rank's heads from all heads of this rank's tokens. See [`heads_for_tokens`].
    pub fn heads_for_tokens(&self, name: &str, x: Tensor, context: &Context) -> Result<Tensor> {
        let x = if self.is_repeated() { repeat_columns(&x, &self.sections)? } else { x };
        heads_for_tokens(name, x, &self.widths(), context)
    }

    /// Returns all heads of this rank's tokens from all tokens of this rank's heads, with the sum of the repetitions of each head. This is backward of
    /// [`HeadSections::heads_for_tokens`].
    pub fn tokens_for_heads(&self, name: &str, x: Tensor, context: &Context) -> Result<Tensor> {
        let x = tokens_for_heads(name, x, &self.widths(), context)?;
        if self.is_repeated() { Ok(repeat_columns_backward(&x, &self.sections)?) } else { Ok(x) }
    }

    /// Returns the columns of this rank's heads, in each section.
    fn own(&self) -> [Range<usize>; N] {
        let (place, mut start) = (self.place, 0);
        self.sections.map(|RepeatedColumns { columns, block, times }| {
            let share = place.share(columns * times);
            let first = start + place.rank * share / (block * times) * block;
            start += columns;
            first..first + share
        })
    }

    /// Returns the values of this rank's heads, from a parameter with a row for each column of the sections.
    pub fn own_rows(&self, all: Tensor) -> Result<Tensor> {
        if !self.place.is_divided() {
            return Ok(all);
        }
        let (own, mut first) = (self.own(), 0);
        let rows = own.iter().map(ExactSizeIterator::len).sum();
        let mut values = Tensor::empty(all.device(), &[&[rows], &all.shape()[1..]].concat(), all.dtype())?;
        for range in own {
            values.copy_from(first, &all.rows(range.start, range.end)?)?;
            first += range.len();
        }
        Ok(values)
    }

    /// Returns the rows of this rank's heads of the gradient `all`, for an op that adds to them.
    pub fn lend<'a>(&self, all: &'a mut Tensor) -> Result<OwnRows<'a>> {
        let own = if self.place.is_divided() { Some(self.own_rows(all.clone())?) } else { None };
        Ok(OwnRows { all, own, ranges: self.own().into() })
    }
}

/// The rows of this rank's heads of a gradient.
pub(super) struct OwnRows<'a> {
    all: &'a mut Tensor,
    /// A copy of the rows. `None` if they are all rows.
    own: Option<Tensor>,
    ranges: Vec<Range<usize>>,
}

impl OwnRows<'_> {
    /// Returns the rows. What an op adds to them is in the gradient after [`OwnRows::put_back`].
    pub fn rows(&mut self) -> &mut Tensor {
        self.own.as_mut().unwrap_or(self.all)
    }

    /// Replaces the rows of the gradient.
    pub fn put_back(self) -> Result<()> {
        let OwnRows { all, own, ranges } = self;
        let (Some(own), mut first) = (own, 0) else { return Ok(()) };
        for range in ranges {
            all.copy_from(range.start, &own.rows(first, first + range.len())?)?;
            first += range.len();
        }
        Ok(())
    }
}

/// Returns all tokens of this rank's heads, `[B·S, C / W]`, from all heads of this rank's tokens, `x` `[B·S / W, C]`. The columns of `x` are
/// sections of these `widths`, and each section is divided by heads.
pub(super) fn heads_for_tokens(name: &str, x: Tensor, widths: &[usize], context: &Context) -> Result<Tensor> {
    let Sequences { batch, place, .. } = *context.sequences;
    if !place.is_divided() {
        return Ok(x);
    }
    let parts = divide_columns(&x, widths, place.ranks)?;
    drop(x);
    by_sequence(ranks_of(context).exchange(Axis::Context, name, &parts)?, batch)
}

/// Returns all heads of this rank's tokens, `[B·S / W, C]`. This is the inverse of [`heads_for_tokens`].
pub(super) fn tokens_for_heads(name: &str, x: Tensor, widths: &[usize], context: &Context) -> Result<Tensor> {
    let Sequences { batch, place, .. } = *context.sequences;
    if !place.is_divided() {
        return Ok(x);
    }
    let parts = by_rank(x, batch, place.ranks)?;
    Ok(join_columns(&ranks_of(context).exchange(Axis::Context, name, &parts)?, widths)?)
}

/// Returns all tokens `[B·S, C]` from this rank's tokens `x` `[B·S / W, C]`.
pub(super) fn all_tokens(name: &str, x: Tensor, context: &Context) -> Result<Tensor> {
    let Sequences { batch, place, .. } = *context.sequences;
    if !place.is_divided() {
        return Ok(x);
    }
    let [tokens, width] = x.dims("this rank's tokens")?;
    let all = ranks_of(context).gather(Axis::Context, name, &x)?;
    by_sequence(all.reshape(&[place.ranks, tokens, width])?, batch)
}

/// Sums `partial` `[B·S, C]` over the ranks, and returns the rows of this rank's tokens, `[B·S / W, C]`. This is backward of [`all_tokens`].
pub(super) fn sum_own_tokens(name: &str, partial: Tensor, context: &Context) -> Result<Tensor> {
    let Sequences { batch, place, .. } = *context.sequences;
    if !place.is_divided() {
        return Ok(partial);
    }
    let [tokens, width] = partial.dims("tokens of all ranks")?;
    let partial = by_rank(partial, batch, place.ranks)?.reshape(&[tokens, width])?;
    ranks_of(context).sum_own_rows(Axis::Context, name, partial, None)
}

/// Reorders tokens `[W, B·S / W, C]`, ordered by rank and then by sequence, into `[B·S, C]`, ordered by sequence.
fn by_sequence(parts: Tensor, batch: usize) -> Result<Tensor> {
    let [ranks, tokens, width] = parts.dims("tokens of all ranks")?;
    let by_sequence = match batch {
        1 => parts,
        _ => divide_columns(&parts.reshape(&[ranks, tokens * width])?, &[tokens * width], batch)?,
    };
    Ok(by_sequence.reshape(&[ranks * tokens, width])?)
}

/// Reorders tokens as the inverse of [`by_sequence`].
fn by_rank(x: Tensor, batch: usize, ranks: usize) -> Result<Tensor> {
    let [tokens, width] = x.dims("tokens of all ranks")?;
    let by_rank = match batch {
        1 => x,
        _ => divide_columns(&x.reshape(&[batch, tokens / batch * width])?, &[tokens / batch * width], ranks)?,
    };
    Ok(by_rank.reshape(&[ranks, tokens / ranks, width])?)
}

fn ranks_of<'a>(context: &Context<'a>) -> &'a dyn LayerRanks {
    let ranks = context.ranks;
    assert_eq!(ranks.place(Axis::Context), context.sequences.place, "the model was built for these ranks");
    ranks
}
