//! The exchange of queries, keys and values among ranks that divide sequences.

use super::{Attention, HeadsSpec};
use crate::layers::exchange::{HeadSections, share_of};
use ottava_common::error::Result;
use ottava_recipe::context::{Context, Sequences};
use ottava_tensor::Tensor;
use ottava_tensor::ops::AttentionSpec;

impl Attention {
    /// Returns the sections of Q, K and V that ranks send.
    fn sent_qkv(&self, context: &Context) -> HeadSections<3> {
        let HeadsSpec { heads, kv_heads, head_dim, .. } = self.heads;
        HeadSections::new([heads, kv_heads, kv_heads].map(|heads| (heads, head_dim)), context.sequences.place)
    }

    /// Returns Q, K and V of all tokens for this rank's heads, from Q, K and V of this rank's tokens for all heads.
    pub(super) fn qkv_of_heads(&self, qkv: Tensor, context: &Context) -> Result<Tensor> {
        self.sent_qkv(context).heads_for_tokens(&self.name, qkv, context)
    }

    /// Returns the gradient by the input of [`Attention::qkv_of_heads`].
    pub(super) fn qkv_of_heads_backward(&self, dqkv: Tensor, context: &Context) -> Result<Tensor> {
        self.sent_qkv(context).tokens_for_heads(&self.name, dqkv, context)
    }

    /// Returns the width of the output of attention.
    pub(super) fn output_widths(&self) -> [usize; 1] {
        [self.heads.heads * self.heads.head_dim]
    }

    /// Returns the spec of attention for this rank's share of the heads over `sequences`.
    pub(super) fn spec_of_rank(&self, sequences: &Sequences) -> AttentionSpec {
        let (place, spec) = (sequences.place, &self.spec);
        AttentionSpec { heads: place.share(spec.heads), kv_heads: share_of(spec.kv_heads, place), ..*spec }
    }
}
