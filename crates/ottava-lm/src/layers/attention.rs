//! Causal self-attention with rotary positions and shared key and value heads.

use super::{Linear, LinearSaved};
use crate::error::Result;
use crate::layer::{Context, GemmInput, Layer};
use crate::param::{Builder, Param};
use crate::scaling::{Frozen, ScalingState, Slot};
use ottava_tensor::Tensor;
use ottava_tensor::ops::{
    AttentionLayout, Copies, RopeLayout, Rotation, attention, attention_backward, attention_cached, rope, rope_to,
};

/// Sizes of an attention layer.
#[derive(Clone, Copy, Debug)]
pub struct AttentionConfig {
    /// Width `C` of the residual stream.
    pub channels: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Size of a head.
    pub head_dim: usize,
    /// Whether Q, K and V have biases.
    pub qkv_bias: bool,
    /// Whether the output projection has one.
    pub output_bias: bool,
}

/// `y = o_proj(attention(rope(qkv_proj(x))))`, with Q, K and V in one product.
pub struct Attention {
    config: AttentionConfig,
    qkv: Linear,    /* [(H + 2·H_kv)·D, C] */
    output: Linear, /* [C, H·D] */
    /// Cosines and sines by position, shared by all layers.
    rope_table: Tensor,
    deterministic: bool,
}

/// Saved by [`Attention`].
pub struct AttentionSaved {
    /// Its own input, which the norm before it may make again.
    pub input: LinearSaved,
    /// `[T, (H + 2·H_kv)·D]`, rotated; `None` where it is projected again.
    qkv: Option<Tensor>,
    o: Tensor,   /* [T, H·D] */
    lse: Tensor, /* [B, H, S] */
    output: LinearSaved,
}

impl AttentionSaved {
    /// The copies that an input made again needs: to be projected, and for wgrad.
    pub fn input_copies(&self) -> Copies {
        if self.qkv.is_none() { Copies::Both } else { Copies::Columns }
    }
}

/// Keys and values of the tokens so far, of one sequence in one layer: `[capacity, 2·H_kv·D]`.
pub struct KvCache(Tensor);

impl Attention {
    /// An attention layer with tensors called `name.q_proj` and so on.
    pub fn new(
        build: &mut Builder,
        name: &str,
        config: AttentionConfig,
        rope_table: Tensor,
        std: f32,
    ) -> Result<Attention> {
        let c = config;
        let part = |proj: &str, rows| (format!("{name}.{proj}"), rows);
        let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let qkv = [part("q_proj", q), part("k_proj", kv), part("v_proj", kv)];
        let output = [part("o_proj", c.channels)];
        Ok(Attention {
            qkv: Linear::new(build, &format!("{name}.qkv_proj"), &qkv, c.channels, c.qkv_bias, std)?,
            output: Linear::new(build, &format!("{name}.o_proj"), &output, q, c.output_bias, std)?,
            config,
            rope_table,
            deterministic: build.recipe.deterministic,
        })
    }

    /// The slot that a producer of its input should write to.
    pub fn input_slot(&self, scaling: &ScalingState) -> Option<Slot> {
        self.qkv.input_slot(scaling)
    }

    /// Its input, as [`Linear::cast_input`] has it, once more.
    pub fn cast_input_again(
        &self,
        x: GemmInput,
        copies: Copies,
        frozen: Frozen,
        scaling: &mut ScalingState,
    ) -> Result<GemmInput> {
        self.qkv.cast_input(x, copies, Some(frozen), scaling)
    }

    /// The slot that a producer of its output's gradient should measure for.
    pub fn gradient_slot(&self, scaling: &ScalingState) -> Option<Slot> {
        self.output.gradient_slot(scaling)
    }

    fn layout(&self, batch: usize, seq_len: usize) -> AttentionLayout {
        let AttentionConfig { heads, kv_heads, head_dim, .. } = self.config;
        AttentionLayout { batch, seq_len, heads, kv_heads, head_dim, deterministic: self.deterministic }
    }

    fn rope_layout(&self, seq_len: usize, start: usize) -> RopeLayout {
        RopeLayout { heads: self.config.heads + self.config.kv_heads, head_dim: self.config.head_dim, seq_len, start }
    }

    /// An empty cache for `capacity` tokens.
    pub fn cache(&self, capacity: usize, like: &Tensor) -> Result<KvCache> {
        let width = 2 * self.config.kv_heads * self.config.head_dim;
        Ok(KvCache(Tensor::zeros(like.device(), &[capacity, width], like.dtype())?))
    }

    /// Forward for new tokens of one sequence at positions `start..`, after those in `cache`, plus `residual`.
    pub fn forward_cached(
        &self,
        x: GemmInput,
        residual: &Tensor,
        cache: &mut KvCache,
        start: usize,
        context: &mut Context,
    ) -> Result<Tensor> {
        let (mut qkv, _) = self.qkv.forward(x, context)?;
        let tokens = qkv.shape()[0];
        rope(&mut qkv, &self.rope_table, self.rope_layout(tokens, start), Rotation::Forward)?;
        let o = attention_cached(&qkv, &mut cache.0, self.layout(1, tokens), start)?;
        Ok(self.output.forward_plus(o.into(), Some(residual), context)?.0)
    }

    /// [`Layer::forward`], plus `residual` `[T, C]` where there is one.
    pub fn forward_plus(
        &self,
        x: GemmInput,
        residual: Option<&Tensor>,
        context: &mut Context,
    ) -> Result<(Tensor, AttentionSaved)> {
        let (mut qkv, input) = self.qkv.forward(x, context)?;
        rope(&mut qkv, &self.rope_table, self.rope_layout(context.seq_len, 0), Rotation::Forward)?;
        let (o, lse) = attention(&qkv, self.layout(context.batch, context.seq_len))?;
        let (y, output) = self.output.forward_plus(o.clone().into(), residual, context)?;
        let qkv = (!context.recompute.qkv()).then_some(qkv);
        Ok((y, AttentionSaved { input, qkv, o, lse, output }))
    }
}

impl Layer for Attention {
    type Input = GemmInput;
    type Saved = AttentionSaved;

    fn forward(&self, x: GemmInput, context: &mut Context) -> Result<(Tensor, AttentionSaved)> {
        self.forward_plus(x, None, context)
    }

    fn backward(&mut self, dy: GemmInput, saved: AttentionSaved, context: &mut Context) -> Result<Tensor> {
        let AttentionSaved { input, qkv, o, lse, output } = saved;
        let dy = self.output.cast_gradient(dy, context.scaling)?;
        let d_o = self.output.dgrad(&dy, context.scaling)?;
        let operand = output.operand(|frozen| {
            self.output.cast_input(o.clone().into(), Copies::Columns, Some(frozen), context.scaling)
        })?;
        self.output.wgrad(&dy.for_wgrad(), &operand, context.scaling)?;
        drop(operand);
        let input = input.operand(|_| unreachable!("the norm has made a dropped input again"))?;
        let (layout, turns) = (self.layout(context.batch, context.seq_len), self.rope_layout(context.seq_len, 0));
        let qkv = match qkv {
            Some(qkv) => qkv,
            None => {
                let mut qkv = self.qkv.fprop(&input, None, context.scaling)?;
                rope(&mut qkv, &self.rope_table, turns, Rotation::Forward)?;
                qkv
            }
        };
        let dqkv = attention_backward(&d_o, &qkv, &o, &lse, layout)?;
        drop((qkv, o, d_o));
        let slot = self.qkv.gradient_slot(context.scaling);
        let (dqkv, ()) = context.scaling.produce(slot, Copies::Both, |output| {
            Ok((rope_to(&dqkv, &self.rope_table, turns, Rotation::Backward, output)?, ()))
        })?;
        self.qkv.backward(dqkv, LinearSaved::Kept(input), context)
    }

    fn parameters<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        self.qkv.parameters(visit);
        self.output.parameters(visit);
    }
}
