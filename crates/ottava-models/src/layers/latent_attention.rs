//! Latent attention: keys and values are projected up from a small latent. The part of each key with the rotary position is shared by all heads.
//! DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.
//!
//! Ranks that divide tensors divide heads. Every rank has the projections to latents. Each rank computes the latents of its own tokens, and ranks
//! gather the latents. Without a latent of queries, queries are projected from the residual stream of all tokens, which ranks gather. Then each rank
//! also computes the latents of all tokens.

mod heads;

pub use heads::LatentSizes;

use super::cast::{CastInput, OperandCast, SavedOperand};
use super::columns::{columns, side_by_side};
use super::exchange::{all_tokens, expect_divisible, heads_for_tokens, sum_own_tokens, tokens_for_heads};
use super::sublayer::{BranchOperand, Sublayer, SublayerSaved};
use super::{Adaptable, Linear, LinearConfig, Norm, NormConfig, NormSaved, Rotary, Stream};
use heads::Heads;
use ottava_common::error::Result;
use ottava_recipe::context::{Context, PagedPass, Sequences};
use ottava_recipe::operand::{ResidualGradient, View};
use ottava_recipe::param::{Builder, FolderLayout, Param, Split};
use ottava_tensor::Tensor;
use ottava_tensor::ops::{
    Angles, AttentionInput, AttentionSpec, RopeLayout, Rotation, append_kv, attention, attention_backward,
    paged_attention, rope,
};

/// The sizes and settings of latent attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatentSpec {
    /// The number of heads, `H`.
    pub heads: usize,
    /// The sizes of the parts of heads and latents.
    pub sizes: LatentSizes,
    /// Whether the projections from and to the residual stream have biases.
    pub bias: bool,
    /// The factor of the products of queries and keys. `None` means `1 / √head_dim`.
    pub scale: Option<f64>,
    /// The number of keys that an indexer chooses for each query. A query with at most this many keys sees all of them. `None` without an indexer.
    pub chosen_keys: Option<usize>,
}

/// The epsilon of the norms of latents, in all models.
const EPS: f64 = 1e-6;

/// `y = o_proj(attention(q, k, v))` with `q = up(norm(down(x)))` and `[k | v] = up(norm(down(x)))`.
pub struct LatentAttention {
    name: String,
    /// The heads of this rank.
    heads: Heads,
    /// The projection to three parts: queries or their latent, the latent of keys and values, and the shared part of keys.
    down: Linear,
    query: Option<Up>, /* [H·D, R_q] */
    kv: Up,            /* [H·(plain + D_v), R_kv] */
    output: Linear,    /* [C, H·D_v] */
    rotary: Rotary,
    /// The index among the attention layers of the model, which is also the index in a cache.
    number: usize,
    spec: AttentionSpec,
}

/// The norm of a latent and the projection from it.
struct Up {
    norm: Norm,
    linear: Linear,
}

/// The values that forward of [`Up`] saves.
struct UpSaved {
    norm: NormSaved,
    operand: SavedOperand,
}

/// The values that forward of [`LatentAttention`] saves.
struct LatentSaved {
    attended: Attended,
    output: SavedOperand,
}

/// The values that backward of attention reads.
struct Attended {
    query: Option<UpSaved>,
    kv: UpSaved,
    /// Rotated Q, K and V `[T, 3·H·D]`, the output `[T, H·D]` and the log-sum-exp `[B, H, S]`. If ranks divide sequences, they hold this rank's
    /// heads. `None` in inference, which has no backward.
    rotated: Option<[Tensor; 3]>,
}

impl Up {
    fn forward(&self, latent: &Tensor, context: &mut Context) -> Result<(Tensor, UpSaved)> {
        let (CastInput { rows, saved: operand }, norm) =
            self.norm.forward_for(latent, &self.linear.input(), context)?;
        Ok((self.linear.fprop(&rows, None, context)?, UpSaved { norm, operand }))
    }

    /// Returns the gradient by the latent.
    fn backward(&mut self, dy: Tensor, saved: UpSaved, context: &mut Context) -> Result<Tensor> {
        let UpSaved { norm, operand } = saved;
        let dy = self.linear.cast_gradient(dy.into(), context)?;
        let operand = self.norm.operand_columns(&norm, operand, &self.linear.input(), context)?;
        let dlatent = self.linear.backward_views(dy, operand, None, context)?;
        self.norm.backward(&dlatent, norm)
    }
}

/// Returns the values `[T, H·D_v]` of this rank's tokens, from the output `o` of attention. `heads` are the heads of all ranks that divide sequences.
fn values_of_tokens(name: &str, heads: Heads, o: &Tensor, context: &Context) -> Result<Tensor> {
    let own = heads.of_rank(context.sequences.place).own_values(o)?;
    tokens_for_heads(name, own, &[heads.value_width()], context)
}

impl LatentAttention {
    /// Creates an attention layer called `name` with the settings of `stream`. Projections to and from latents have the same names in all families.
    ///
    /// Errors if ranks cannot divide the heads evenly.
    pub fn new(
        build: &mut Builder,
        name: &str,
        spec: LatentSpec,
        stream: &Stream,
        rotary: Rotary,
    ) -> Result<LatentAttention> {
        let (LatentSpec { heads, sizes, bias, scale, .. }, Stream { channels, names, std, .. }) = (spec, *stream);
        expect_divisible(build, name, "query heads", heads)?;
        let (all, place) = (Heads { heads, sizes }, build.place());
        let LatentSizes { query_rank, kv_rank, rotated, .. } = sizes;
        let [queries, kv] = all.widths();
        let part = |proj: &str, rows| (format!("{name}.{proj}"), rows);
        let mut linear = |stack: &str, parts: &[(String, usize)], inputs, bias, split| {
            let (name, fused, layout, shared_input) = (&format!("{name}.{stack}"), &[][..], FolderLayout::Same, None);
            // Every rank has all rows of the projection to the latent of keys and values.
            let replicas: &[usize] = if parts.len() == 2 { &[1, place.ranks] } else { &[] };
            Linear::new(
                build,
                LinearConfig {
                    name,
                    parts,
                    fused,
                    replicas,
                    inputs,
                    bias,
                    std,
                    layout,
                    split,
                    shared_input,
                    uncast: None,
                },
            )
        };
        let (of_query, split) = match query_rank {
            Some(rank) => (part("q_a_proj", rank), Split::None),
            None => (part(names.qkv[0], queries), Split::Output),
        };
        let from_x = [of_query, part("kv_a_proj_with_mqa", kv_rank + rotated)];
        let down = linear("qkv_a_proj", &from_x, channels, bias, split)?;
        let mut up = |proj: &str, rows, rank| linear(proj, &[part(proj, rows)], rank, false, Split::Output);
        let of_query = query_rank.map(|rank| up("q_b_proj", queries, rank)).transpose()?;
        let mut of_kv = up("kv_b_proj", kv, kv_rank)?;
        if query_rank.is_none() {
            of_kv = of_kv.of_all_tokens();
        }
        let output = [part(names.output, channels)];
        let output = linear(names.output, &output, all.value_width(), bias, Split::Input)?;
        let mut norm = |proj: &str, rank| Norm::new(build, &format!("{name}.{proj}"), rank, NormConfig::rms(EPS));
        let query = match (of_query, query_rank) {
            (Some(linear), Some(rank)) => Some(Up { norm: norm("q_a_layernorm", rank)?, linear }),
            _ => None,
        };
        let kv = Up { norm: norm("kv_a_layernorm", kv_rank)?, linear: of_kv };
        let heads = all.of_rank(place);
        let plain_spec = AttentionSpec::causal(heads.heads, heads.heads, sizes.head_dim());
        let (scale, deterministic) = (scale.unwrap_or(plain_spec.scale), build.recipe.deterministic);
        let kv_dtype = build.recipe.kv_dtype();
        let spec = AttentionSpec { scale, deterministic, kv_dtype, ..plain_spec };
        let number = build.description.add_attention(spec, build.block);
        Ok(LatentAttention { name: name.to_string(), heads, down, query, kv, output, rotary, number, spec })
    }

    /// Returns the number of columns of queries, or of their latent, in the result of `down`.
    fn query_columns(&self) -> usize {
        let [queries, _] = self.heads.widths();
        self.heads.sizes.query_rank.unwrap_or(queries)
    }

    /// Returns whether ranks gather latents, because each rank has computed the latents of its own tokens.
    fn gathers_latents(&self, context: &Context) -> bool {
        self.query.is_some() && context.divides_tokens()
    }

    fn rotation(&self) -> RopeLayout {
        let Heads { heads, sizes } = self.heads;
        RopeLayout { heads: 2 * heads, head_dim: sizes.head_dim(), pairs: self.rotary.pairs }
    }

    /// Returns the heads that this rank computes over `sequences`.
    fn heads_over(&self, sequences: &Sequences) -> Heads {
        self.heads.of_rank(sequences.place)
    }

    /// Returns the spec of attention for [`LatentAttention::heads_over`].
    fn spec_over(&self, sequences: &Sequences) -> AttentionSpec {
        let heads = self.heads_over(sequences).heads;
        AttentionSpec { heads, kv_heads: heads, ..self.spec }
    }

    /// Returns `[q | k | v]` from its parts, and rotates queries and keys.
    fn assemble(&self, parts: [&Tensor; 3], context: &Context) -> Result<Tensor> {
        let mut qkv = self.heads.assemble(parts, self.heads.heads)?;
        rope(&mut qkv, self.angles(context), self.rotation(), Rotation::Forward)?;
        Ok(qkv)
    }

    /// Returns the gradients by the parts that [`LatentAttention::assemble`] takes.
    fn disassemble(&self, mut dqkv: Tensor, context: &Context) -> Result<[Tensor; 3]> {
        rope(&mut dqkv, self.angles(context), self.rotation(), Rotation::Backward)?;
        self.heads.disassemble(&dqkv, self.heads.heads)
    }

    /// Returns `[q | k | v]` of all tokens for the heads that this rank computes, from `[q | k | v]` of this rank's tokens. Ranks send the shared
    /// part of keys only once, and send no padding.
    fn qkv_of_heads(&self, qkv: Tensor, context: &Context) -> Result<Tensor> {
        if !context.sequences.place.is_divided() {
            return Ok(qkv);
        }
        let [queries, kv, shared] = self.heads.disassemble(&qkv, 1)?;
        drop(qkv);
        let ([of_queries, of_kv], heads) = (self.heads.widths(), self.heads_over(context.sequences));
        let queries = heads_for_tokens(&self.name, queries, &[of_queries], context)?;
        let kv = heads_for_tokens(&self.name, kv, &[of_kv], context)?;
        heads.assemble([&queries, &kv, &all_tokens(&self.name, shared, context)?], heads.heads)
    }

    /// Returns the gradient by the input of [`LatentAttention::qkv_of_heads`]. The gradient of the shared part of keys is in the first key.
    fn qkv_of_heads_backward(&self, dqkv: Tensor, context: &Context) -> Result<Tensor> {
        if !context.sequences.place.is_divided() {
            return Ok(dqkv);
        }
        let ([of_queries, of_kv], heads) = (self.heads.widths(), self.heads_over(context.sequences));
        let [queries, kv, shared] = heads.disassemble(&dqkv, heads.heads)?;
        drop(dqkv);
        let queries = tokens_for_heads(&self.name, queries, &[of_queries], context)?;
        let kv = tokens_for_heads(&self.name, kv, &[of_kv], context)?;
        self.heads.assemble([&queries, &kv, &sum_own_tokens(&self.name, shared, context)?], 1)
    }

    /// Returns the gradient by the output of attention, from the gradient by the result of [`values_of_tokens`].
    fn values_of_tokens_backward(&self, d_o: Tensor, context: &Context) -> Result<Tensor> {
        let d_o = heads_for_tokens(&self.name, d_o, &[self.heads.value_width()], context)?;
        self.heads_over(context.sequences).padded_values(&d_o)
    }

    fn angles<'a>(&'a self, context: &Context<'a>) -> Angles<'a> {
        Angles { table: &self.rotary.table, positions: &context.sequences.positions }
    }

    /// Computes attention of an operand `x`. Returns the values for backward, and the output `[T, H·D_v]`.
    fn attend(&self, x: View, context: &mut Context) -> Result<(Attended, Tensor)> {
        let LatentSizes { kv_rank, rotated, .. } = self.heads.sizes;
        let projected = self.down.fprop(&x, None, context)?;
        drop(x);
        let first = self.query_columns();
        let (mut queries, mut of_query) = (columns(&projected, 0, first)?, None);
        let latent = columns(&projected, first, kv_rank)?;
        let mut shared = columns(&projected, first + kv_rank, rotated)?;
        drop(projected);
        if self.gathers_latents(context) {
            shared = context.gather(&self.name, &shared)?;
        }
        if let Some(query) = &self.query {
            let (q, saved) = query.forward(&queries, context)?;
            (queries, of_query) = (q, Some(saved));
        }
        let (kv, of_kv) = self.kv.forward(&latent, context)?;
        drop(latent);
        let parts = [&queries, &kv, &shared];
        let qkv = self.assemble(parts, context)?;
        if let Some(pass) = &mut context.paged {
            let o = self.heads.own_values(&self.attend_paged(qkv, pass, context.sequences)?)?;
            return Ok((Attended { query: of_query, kv: of_kv, rotated: None }, o));
        }
        let qkv = self.qkv_of_heads(qkv, context)?;
        let (Sequences { batch, cu_seqlens, .. }, spec) = (context.sequences, self.spec_over(context.sequences));
        let (o, lse) = attention(AttentionInput::fused(&qkv, &spec, *batch, cu_seqlens.as_ref()), &spec)?;
        let own = values_of_tokens(&self.name, self.heads, &o, context)?;
        Ok((Attended { query: of_query, kv: of_kv, rotated: Some([qkv, o, lse]) }, own))
    }

    /// Computes attention of new tokens, and appends their keys and values to the cache. If the pass has the first tokens of all its sequences, attention
    /// does not read the cache.
    fn attend_paged(&self, mut qkv: Tensor, pass: &mut PagedPass, sequences: &Sequences) -> Result<Tensor> {
        let is_whole = pass.is_whole;
        let (cache, batch) = pass.layer(self.number);
        append_kv(&mut qkv, cache, batch, &self.spec, None)?;
        // `append_kv` has given keys and values the values of the cache.
        let spec = AttentionSpec { kv_dtype: None, ..self.spec };
        let documents = sequences.cu_seqlens.as_ref();
        match is_whole {
            true => Ok(attention(AttentionInput::fused(&qkv, &spec, sequences.batch, documents), &spec)?.0),
            false => Ok(paged_attention(&qkv, cache, batch, &self.spec, None)?),
        }
    }
}

impl Sublayer for LatentAttention {
    fn input(&self) -> OperandCast {
        self.down.input()
    }

    fn gradient(&self) -> OperandCast {
        self.output.gradient()
    }

    fn forward(&self, x: View, residual: Option<&Tensor>, context: &mut Context) -> Result<(Tensor, SublayerSaved)> {
        let (attended, o) = self.attend(x, context)?;
        let (y, output) = self.output.forward(o, residual, context)?;
        Ok((y, SublayerSaved::new(LatentSaved { attended, output })))
    }

    fn save(&self, x: View, context: &mut Context) -> Result<SublayerSaved> {
        let (attended, o) = self.attend(x, context)?;
        let output = self.output.save(o, context)?;
        Ok(SublayerSaved::new(LatentSaved { attended, output }))
    }

    fn backward(
        &mut self,
        dy: ResidualGradient,
        saved: SublayerSaved,
        x: BranchOperand,
        other: Option<Tensor>,
        context: &mut Context,
    ) -> Result<Tensor> {
        let LatentSaved { attended: Attended { query, kv, rotated }, output } = saved.into();
        let ([qkv, o, lse], x) = (rotated.expect("training attends without a cache"), x.columns(context)?);
        let (name, heads) = (&self.name, self.heads);
        let values = |context: &Context| values_of_tokens(name, heads, &o, context);
        let d_o = self.output.backward_recomputing(dy, output, values, context)?;
        let d_o = self.values_of_tokens_backward(d_o, context)?;
        let (Sequences { batch, cu_seqlens, .. }, spec) = (context.sequences, self.spec_over(context.sequences));
        let input = AttentionInput::fused(&qkv, &spec, *batch, cu_seqlens.as_ref());
        let dqkv = attention_backward(&d_o, input, &o, &lse, &spec)?.fused();
        drop((qkv, o, d_o));
        let dqkv = self.qkv_of_heads_backward(dqkv, context)?;
        let [mut dqueries, dkv, mut dshared] = self.disassemble(dqkv, context)?;
        if self.gathers_latents(context) {
            dshared = context.sum(&self.name, dshared, None)?;
        }
        let dlatent = self.kv.backward(dkv, kv, context)?;
        if let (Some(up), Some(saved)) = (&mut self.query, query) {
            dqueries = up.backward(dqueries, saved, context)?;
        }
        let dprojected = side_by_side([&dqueries, &dlatent, &dshared])?;
        drop((dqueries, dlatent, dshared));
        let dprojected = self.down.cast_gradient(dprojected.into(), context)?;
        self.down.backward_views(dprojected, x, other.as_ref(), context)
    }

    fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param)) {
        self.down.parameters(visit);
        for Up { norm, linear } in self.query.iter().chain([&self.kv]) {
            norm.parameters(visit);
            linear.parameters(visit);
        }
        self.output.parameters(visit);
    }

    fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        self.down.parameters_mut(visit);
        for Up { norm, linear } in self.query.iter_mut().chain([&mut self.kv]) {
            norm.parameters_mut(visit);
            linear.parameters_mut(visit);
        }
        self.output.parameters_mut(visit);
    }

    fn linears_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut dyn Adaptable)) {
        visit(&mut self.down);
        self.query.iter_mut().chain([&mut self.kv]).for_each(|up| visit(&mut up.linear));
        visit(&mut self.output);
    }
}
