//! The exchange of tokens for heads among ranks that divide sequences (DeepSpeed-Ulysses; Jacobs et al. 2023, arXiv:2309.14509).
//!
//! Before attention, a rank has all `H` heads of its tokens, which are consecutive tokens of each of the `B` sequences of `S` tokens;
//! attention needs all tokens of `H / W` heads. If there are fewer key and value heads than ranks, each is sent to several neighbouring ranks,
//! and the gradients from them are added.

use super::{Attention, AttentionConfig, kv_replicas};
use crate::context::{Context, Sequences};
use crate::error::Result;
use ottava_tensor::Tensor;
use ottava_tensor::comm::Axis;
use ottava_tensor::ops::{
    AttentionSpec, RepeatedColumns, divide_columns, join_columns, repeat_columns, repeat_columns_backward,
};

/// Columns of sections with their repetitions.
fn widths(sections: [RepeatedColumns; 3]) -> [usize; 3] {
    sections.map(|section| section.columns * section.times)
}

fn is_repeated(sections: &[RepeatedColumns]) -> bool {
    sections.iter().any(|section| section.times > 1)
}

impl Attention {
    /// Q, K and V as ranks send them.
    fn sent_qkv(&self, context: &Context) -> [RepeatedColumns; 3] {
        let AttentionConfig { heads, kv_heads, head_dim, .. } = self.config;
        let replicas = kv_replicas(kv_heads, context.sequences.place.ranks);
        [(heads, 1), (kv_heads, replicas), (kv_heads, replicas)].map(|(heads, times)| RepeatedColumns {
            columns: heads * head_dim,
            block: head_dim,
            times,
        })
    }

    /// Q, K and V of all tokens for this rank's heads, from those of all heads for this rank's tokens.
    pub(super) fn qkv_of_heads(&self, qkv: Tensor, context: &Context) -> Result<Tensor> {
        let sections = self.sent_qkv(context);
        let qkv = if is_repeated(&sections) { repeat_columns(&qkv, &sections)? } else { qkv };
        self.heads_for_tokens(qkv, &widths(sections), context)
    }

    /// The gradient by the input of [`Attention::qkv_of_heads`].
    pub(super) fn qkv_of_heads_backward(&self, dqkv: Tensor, context: &Context) -> Result<Tensor> {
        let sections = self.sent_qkv(context);
        let dqkv = self.tokens_for_heads(dqkv, &widths(sections), context)?;
        if is_repeated(&sections) { Ok(repeat_columns_backward(&dqkv, &sections)?) } else { Ok(dqkv) }
    }

    /// Columns of the output of attention.
    pub(super) fn output_widths(&self) -> [usize; 1] {
        [self.config.heads * self.config.head_dim]
    }

    /// What this rank computes of attention over `sequences`: its share of the heads.
    pub(super) fn spec_of_rank(&self, sequences: &Sequences) -> AttentionSpec {
        let (place, spec) = (sequences.place, &self.spec);
        let kv_heads = spec.kv_heads * kv_replicas(spec.kv_heads, place.ranks);
        AttentionSpec { heads: place.share(spec.heads), kv_heads: place.share(kv_heads), ..*spec }
    }

    /// All tokens of this rank's heads `[B·S, C / W]`, from this rank's tokens of all heads: `x` `[B·S / W, C]`, with sections of heads of
    /// these `widths`.
    pub(super) fn heads_for_tokens(&self, x: Tensor, widths: &[usize], context: &Context) -> Result<Tensor> {
        let Sequences { batch, place, .. } = *context.sequences;
        if !place.is_divided() {
            return Ok(x);
        }
        let parts = divide_columns(&x, widths, place.ranks)?;
        drop(x);
        let parts = self.exchange(&parts, context)?;
        let [ranks, tokens, width] = parts.dims("heads of all tokens")?;
        // By rank and sequence, to by sequence and rank.
        let by_sequence = match batch {
            1 => parts,
            _ => divide_columns(&parts.reshape(&[ranks, tokens * width])?, &[tokens * width], batch)?,
        };
        Ok(by_sequence.reshape(&[ranks * tokens, width])?)
    }

    /// This rank's tokens of all heads `[B·S / W, C]`: the inverse of [`Attention::heads_for_tokens`].
    pub(super) fn tokens_for_heads(&self, x: Tensor, widths: &[usize], context: &Context) -> Result<Tensor> {
        let Sequences { batch, place, .. } = *context.sequences;
        if !place.is_divided() {
            return Ok(x);
        }
        let [tokens, width] = x.dims("tokens of this rank's heads")?;
        let by_rank = match batch {
            1 => x,
            _ => divide_columns(&x.reshape(&[batch, tokens / batch * width])?, &[tokens / batch * width], place.ranks)?,
        };
        let parts = by_rank.reshape(&[place.ranks, tokens / place.ranks, width])?;
        drop(by_rank);
        Ok(join_columns(&self.exchange(&parts, context)?, widths)?)
    }

    fn exchange(&self, parts: &Tensor, context: &Context) -> Result<Tensor> {
        let ranks = context.casts.layer_ranks();
        assert_eq!(ranks.place(Axis::Context), context.sequences.place, "the model was built for these ranks");
        ranks.exchange(Axis::Context, &self.name, parts)
    }
}
