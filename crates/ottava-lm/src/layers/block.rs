//! The transformer block: attention and MLP, each behind a norm and beside a residual connection.

use super::{Attention, AttentionSaved, KvCache, Linear, Mlp, MlpSaved, Norm, NormSaved};
use crate::error::Result;
use crate::layer::{Context, Layer};
use crate::param::Param;
use ottava_tensor::Tensor;
use ottava_tensor::ops::add;

/// `h = x + attention(norm(x))`;  `y = h + mlp(norm(h))`.
pub struct Block {
    /// Before attention.
    pub attention_norm: Norm,
    /// The tokens' exchange.
    pub attention: Attention,
    /// Before the MLP.
    pub mlp_norm: Norm,
    /// Each token's own computation.
    pub mlp: Mlp,
}

/// Saved by [`Block`].
pub struct BlockSaved {
    attention_norm: NormSaved,
    attention: AttentionSaved,
    mlp_norm: NormSaved,
    mlp: MlpSaved,
}

impl Block {
    /// The linears, for [`Linear::quantize_weight`].
    pub fn linears(&mut self) -> impl Iterator<Item = &mut Linear> {
        self.attention.linears().into_iter().chain(self.mlp.linears())
    }

    /// Forward for new tokens of one sequence; see [`Attention::forward_cached`].
    pub fn forward_cached(
        &self,
        x: &Tensor,
        cache: &mut KvCache,
        start: usize,
        context: &mut Context,
    ) -> Result<Tensor> {
        let (normed, _) = self.attention_norm.forward(x, self.attention.input_slot(), context)?;
        let out = self.attention.forward_cached(normed, cache, start, context)?;
        let (h, normed, _) = self.mlp_norm.forward_sum(x, &out, self.mlp.input_slot(), context)?;
        Ok(add(&h, &self.mlp.forward(normed, context)?.0)?)
    }
}

impl Layer for Block {
    type Input = Tensor;
    type Saved = BlockSaved;

    fn forward(&self, x: Tensor, context: &mut Context) -> Result<(Tensor, BlockSaved)> {
        let (normed, attention_norm) = self.attention_norm.forward(&x, self.attention.input_slot(), context)?;
        let (out, attention) = self.attention.forward(normed, context)?;
        let (h, normed, mlp_norm) = self.mlp_norm.forward_sum(&x, &out, self.mlp.input_slot(), context)?;
        let (out, mlp) = self.mlp.forward(normed, context)?;
        Ok((add(&h, &out)?, BlockSaved { attention_norm, attention, mlp_norm, mlp }))
    }

    fn backward(&mut self, dy: Tensor, saved: BlockSaved, context: &mut Context) -> Result<Tensor> {
        let dnormed = self.mlp.backward(dy.clone().into(), saved.mlp, context)?;
        let dh = self.mlp_norm.backward(&dnormed, saved.mlp_norm, Some(&dy))?;
        let dnormed = self.attention.backward(dh.clone().into(), saved.attention, context)?;
        self.attention_norm.backward(&dnormed, saved.attention_norm, Some(&dh))
    }

    fn parameters<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        visit(&mut self.attention_norm.weight);
        self.attention.parameters(visit);
        visit(&mut self.mlp_norm.weight);
        self.mlp.parameters(visit);
    }
}
