//! The exchange of queries, keys and values among ranks that divide sequences. If there are fewer key and value heads than ranks, each head is
//! sent to several neighbouring ranks, and the gradients of these ranks are added.

use super::{Attention, HeadsSpec, kv_replicas};
use crate::layers::exchange::{heads_for_tokens, tokens_for_heads};
use ottava_common::error::Result;
use ottava_recipe::context::{Context, Sequences};
use ottava_tensor::Tensor;
use ottava_tensor::ops::{AttentionSpec, RepeatedColumns, repeat_columns, repeat_columns_backward};

/// Returns the widths of the sections, with repetitions.
fn widths(sections: [RepeatedColumns; 3]) -> [usize; 3] {
    sections.map(|section| section.columns * section.times)
}

fn is_repeated(sections: &[RepeatedColumns]) -> bool {
    sections.iter().any(|section| section.times > 1)
}

impl Attention {
    /// Returns the sections of Q, K and V that ranks send.
    fn sent_qkv(&self, context: &Context) -> [RepeatedColumns; 3] {
        let HeadsSpec { heads, kv_heads, head_dim, .. } = self.heads;
        let replicas = kv_replicas(kv_heads, context.sequences.place.ranks);
        [(heads, 1), (kv_heads, replicas), (kv_heads, replicas)].map(|(heads, times)| RepeatedColumns {
            columns: heads * head_dim,
            block: head_dim,
            times,
        })
    }

    /// Returns Q, K and V of all tokens for this rank's heads, from Q, K and V of this rank's tokens for all heads.
    pub(super) fn qkv_of_heads(&self, qkv: Tensor, context: &Context) -> Result<Tensor> {
        let sections = self.sent_qkv(context);
        let qkv = if is_repeated(&sections) { repeat_columns(&qkv, &sections)? } else { qkv };
        heads_for_tokens(&self.name, qkv, &widths(sections), context)
    }

    /// Returns the gradient by the input of [`Attention::qkv_of_heads`].
    pub(super) fn qkv_of_heads_backward(&self, dqkv: Tensor, context: &Context) -> Result<Tensor> {
        let sections = self.sent_qkv(context);
        let dqkv = tokens_for_heads(&self.name, dqkv, &widths(sections), context)?;
        if is_repeated(&sections) { Ok(repeat_columns_backward(&dqkv, &sections)?) } else { Ok(dqkv) }
    }

    /// Returns the width of the output of attention.
    pub(super) fn output_widths(&self) -> [usize; 1] {
        [self.heads.heads * self.heads.head_dim]
    }

    /// Returns the spec of attention for this rank's share of the heads over `sequences`.
    pub(super) fn spec_of_rank(&self, sequences: &Sequences) -> AttentionSpec {
        let (place, spec) = (sequences.place, &self.spec);
        let kv_heads = spec.kv_heads * kv_replicas(spec.kv_heads, place.ranks);
        AttentionSpec { heads: place.share(spec.heads), kv_heads: place.share(kv_heads), ..*spec }
    }
}
