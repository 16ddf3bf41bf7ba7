//! The exchange of tokens for heads among ranks that divide sequences (DeepSpeed-Ulysses; Jacobs et al. 2023, arXiv:2309.14509).
//!
//! Before attention, each of `W` ranks has all `H` heads of its tokens: consecutive tokens of each of the `B` sequences of `S` tokens.
//! Attention needs all tokens of `H / W` heads. `name` is the name of the attention layer, for error messages.

use ottava_common::error::{Error, Result};
use ottava_recipe::context::{Context, Sequences};
use ottava_recipe::layer_ranks::LayerRanks;
use ottava_recipe::param::Builder;
use ottava_tensor::Tensor;
use ottava_tensor::comm::Axis;
use ottava_tensor::ops::{divide_columns, join_columns};

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

/// Errors if ranks divide sequences. `what` is the kind of the recurrent layer `name`, for the message.
pub(super) fn expect_whole_sequences(build: &Builder, name: &str, what: &str) -> Result<()> {
    match build.place_on(Axis::Context).is_divided() {
        true => Err(Error::Config(format!(
            "`{name}` is a {what}, whose state passes through all tokens of a sequence; ranks of `parallel.context` cannot divide them: set \
             `parallel.context` to 1"
        ))),
        false => Ok(()),
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
