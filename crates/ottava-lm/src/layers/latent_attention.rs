//! Latent attention: keys and values are projected up from a small latent, and part of each key, with the rotary position, is shared by all
//! heads. DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.

use super::cast::{CastInput, OperandCast, SavedOperand};
use super::sublayer::{BranchOperand, Sublayer, SublayerSaved};
use super::{Linear, LinearConfig, Names, Norm, NormConfig, NormSaved};
use crate::context::{Context, PagedPass};
use crate::error::{Error, Result};
use crate::operand::{ResidualGradient, View, Views};
use crate::param::{Builder, Param, Split};
use ottava_tensor::Tensor;
use ottava_tensor::comm::Axis;
use ottava_tensor::ops::{
    Angles, AttentionInput, AttentionSpec, ColumnRuns, RopeLayout, RopePairs, Rotation, append_kv, attention,
    attention_backward, move_columns, paged_attention, rope, sum_columns,
};

/// Sizes of the parts of heads in latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentSizes {
    /// Size of the latent of queries; `None` if they are projected from the residual stream.
    pub query_rank: Option<usize>,
    /// Size of the latent of keys and values.
    pub kv_rank: usize,
    /// The part of a query or key without rotary position.
    pub plain: usize,
    /// The part with it, which keys share.
    pub rotated: usize,
    /// Size of a value head.
    pub value: usize,
}

impl LatentSizes {
    /// Size of a query or key head.
    pub fn head_dim(self) -> usize {
        self.plain + self.rotated
    }
}

/// Sizes of a latent attention layer.
#[derive(Clone, Copy, Debug)]
pub struct LatentAttentionConfig {
    /// Width `C` of the residual stream.
    pub channels: usize,
    /// Heads `H`.
    pub heads: usize,
    /// The parts of heads.
    pub sizes: LatentSizes,
    /// Whether the projections from and to the residual stream have biases.
    pub bias: bool,
    /// The factor of products of queries and keys; `None` for `1 / √head_dim`.
    pub scale: Option<f64>,
    /// The pairs of rotary positions.
    pub pairs: RopePairs,
    /// Names of its tensors; those of projections from and to latents are the same in all families.
    pub names: &'static Names,
    /// Standard deviation of initial weights.
    pub std: f32,
}

/// The epsilon of the norms of latents, in all models.
const EPS: f64 = 1e-6;

/// `y = o_proj(attention(q, k, v))` with `q = up(norm(down(x)))` and `[k | v] = up(norm(down(x)))`. In memory, the rotated part of a head is
/// before the plain one, which leaves the products of queries and keys as they are, and values are padded with zeros to the size of keys: the
/// fast kernels take heads of one size.
pub struct LatentAttention {
    config: LatentAttentionConfig,
    /// Queries or their latent, the latent of keys and values, and the shared part of keys.
    down: Linear,
    query: Option<Up>, /* [H·D, R_q] */
    kv: Up,            /* [H·(plain + D_v), R_kv] */
    output: Linear,    /* [C, H·D_v] */
    rope_table: Tensor,
    /// Its number among the attention layers of the model, which is its index in a cache.
    number: usize,
    spec: AttentionSpec,
}

/// The norm of a latent and the projection from it.
struct Up {
    norm: Norm,
    linear: Linear,
}

/// Saved by [`Up`].
struct UpSaved {
    norm: NormSaved,
    operand: SavedOperand,
}

/// Saved by [`LatentAttention`].
struct LatentSaved {
    attended: Attended,
    output: SavedOperand,
}

/// What backward of attention needs.
struct Attended {
    query: Option<UpSaved>,
    kv: UpSaved,
    /// `[T, 3·H·D]`, rotated, the output `[T, H·D]` and the log-sum-exp `[B, H, S]`; `None` in inference, which has no backward.
    rotated: Option<[Tensor; 3]>,
}

impl Up {
    fn forward(&self, latent: &Tensor, context: &mut Context) -> Result<(Tensor, UpSaved)> {
        let (CastInput { rows, saved: operand }, norm) =
            self.norm.forward_for(latent, &self.linear.input(), context)?;
        Ok((self.linear.fprop(&rows, None, context)?, UpSaved { norm, operand }))
    }

    /// The gradient by the latent.
    fn backward(&mut self, dy: Tensor, saved: UpSaved, context: &mut Context) -> Result<Tensor> {
        let UpSaved { norm, operand } = saved;
        let dy = self.linear.cast_gradient(dy.into(), context)?;
        let operand = self.norm.operand_columns(&norm, operand, &self.linear.input(), context)?;
        let dlatent = self.linear.backward_views(dy, operand, None, context)?;
        self.norm.backward(&dlatent, norm)
    }
}

/// A copy of the columns from `first` on.
fn columns(x: &Tensor, first: usize, width: usize) -> Result<Tensor> {
    let mut y = Tensor::empty(x.device(), &[x.shape()[0], width], x.dtype())?;
    move_columns(x, ColumnRuns { first, step: 0 }, &mut y, ColumnRuns { first: 0, step: 0 }, 1, width)?;
    Ok(y)
}

impl LatentAttention {
    /// An attention layer called `name`.
    ///
    /// Errors if ranks divide tensors or sequences.
    pub fn new(
        build: &mut Builder,
        name: &str,
        config: LatentAttentionConfig,
        rope_table: Tensor,
    ) -> Result<LatentAttention> {
        let LatentAttentionConfig { channels, heads, sizes, bias, scale, names, std, .. } = config;
        if build.place().is_divided() || build.place_on(Axis::Context).is_divided() {
            return Err(Error::Config(
                "`parallel.tensor` and `parallel.context` do not divide latent attention; use `parallel.data` with a ZeRO stage, or \
                 `parallel.pipeline`"
                    .into(),
            ));
        }
        let LatentSizes { query_rank, kv_rank, plain, rotated, value } = sizes;
        let queries = heads * sizes.head_dim();
        let part = |proj: &str, rows| (format!("{name}.{proj}"), rows);
        let mut linear = |stack: &str, parts: &[(String, usize)], inputs, bias| {
            let (name, split, transposed) = (&format!("{name}.{stack}"), Split::None, false);
            let (fused, shared_input) = (&[][..], None);
            let replicas = &[][..];
            Linear::new(
                build,
                LinearConfig { name, parts, fused, replicas, inputs, bias, std, transposed, split, shared_input },
            )
        };
        let from_x = [
            match query_rank {
                Some(rank) => part("q_a_proj", rank),
                None => part(names.qkv[0], queries),
            },
            part("kv_a_proj_with_mqa", kv_rank + rotated),
        ];
        let down = linear("qkv_a_proj", &from_x, channels, bias)?;
        let of_query = query_rank.map(|rank| linear("q_b_proj", &[part("q_b_proj", queries)], rank, false));
        let of_query = of_query.transpose()?;
        let of_kv = linear("kv_b_proj", &[part("kv_b_proj", heads * (plain + value))], kv_rank, false)?;
        let output = linear(names.output, &[part(names.output, channels)], heads * value, bias)?;
        let mut norm = |proj: &str, rank| Norm::new(build, &format!("{name}.{proj}"), rank, NormConfig::rms(EPS));
        let query = match (of_query, query_rank) {
            (Some(linear), Some(rank)) => Some(Up { norm: norm("q_a_layernorm", rank)?, linear }),
            _ => None,
        };
        let kv = Up { norm: norm("kv_a_layernorm", kv_rank)?, linear: of_kv };
        let plain_spec = AttentionSpec::causal(heads, heads, sizes.head_dim());
        let (scale, deterministic) = (scale.unwrap_or(plain_spec.scale), build.recipe.deterministic);
        let spec = AttentionSpec { scale, deterministic, ..plain_spec };
        let number = build.description.attention.len();
        build.description.attention.push(spec);
        Ok(LatentAttention { config, down, query, kv, output, rope_table, number, spec })
    }

    /// Columns of queries or of their latent in the result of `down`.
    fn query_columns(&self) -> usize {
        let LatentAttentionConfig { heads, sizes, .. } = self.config;
        sizes.query_rank.unwrap_or(heads * sizes.head_dim())
    }

    fn rotation(&self) -> RopeLayout {
        let LatentAttentionConfig { heads, sizes, pairs, .. } = self.config;
        RopeLayout { heads: 2 * heads, head_dim: sizes.head_dim(), pairs }
    }

    /// Calls `move_part` for each part of `[q | k | v]`: the source (0: queries, 1: keys and values, 2: the shared part of keys), its runs there,
    /// its runs in the result, and its width.
    fn each_part(&self, mut move_part: impl FnMut(usize, ColumnRuns, ColumnRuns, usize) -> Result<()>) -> Result<()> {
        let LatentAttentionConfig { heads, sizes, .. } = self.config;
        let LatentSizes { plain, rotated, value, .. } = sizes;
        let (dim, of_kv) = (sizes.head_dim(), plain + value);
        let runs = |first, step| ColumnRuns { first, step };
        move_part(0, runs(plain, dim), runs(0, dim), rotated)?;
        move_part(0, runs(0, dim), runs(rotated, dim), plain)?;
        move_part(2, runs(0, 0), runs(heads * dim, dim), rotated)?;
        move_part(1, runs(0, of_kv), runs(heads * dim + rotated, dim), plain)?;
        move_part(1, runs(plain, of_kv), runs(2 * heads * dim, dim), value)
    }

    /// `[q | k | v]`, rotated, from its parts.
    fn assemble(&self, parts: [&Tensor; 3], context: &Context) -> Result<Tensor> {
        let heads = self.config.heads;
        let mut qkv =
            Tensor::zeros(parts[0].device(), &[parts[0].shape()[0], self.spec.qkv_width()], parts[0].dtype())?;
        self.each_part(|source, from, to, width| Ok(move_columns(parts[source], from, &mut qkv, to, heads, width)?))?;
        rope(&mut qkv, self.angles(context), self.rotation(), Rotation::Forward)?;
        Ok(qkv)
    }

    /// The values `[T, H·D_v]` of the output of attention, without padding.
    fn own_values(&self, o: &Tensor) -> Result<Tensor> {
        let LatentAttentionConfig { heads, sizes, .. } = self.config;
        let mut own = Tensor::empty(o.device(), &[o.shape()[0], heads * sizes.value], o.dtype())?;
        let [from, to] = [sizes.head_dim(), sizes.value].map(|step| ColumnRuns { first: 0, step });
        move_columns(o, from, &mut own, to, heads, sizes.value)?;
        Ok(own)
    }

    /// The gradient by the output of attention from that by [`LatentAttention::own_values`].
    fn padded_values(&self, d_o: &Tensor) -> Result<Tensor> {
        let LatentAttentionConfig { heads, sizes, .. } = self.config;
        let mut padded = Tensor::zeros(d_o.device(), &[d_o.shape()[0], self.spec.output_width()], d_o.dtype())?;
        let [from, to] = [sizes.value, sizes.head_dim()].map(|step| ColumnRuns { first: 0, step });
        move_columns(d_o, from, &mut padded, to, heads, sizes.value)?;
        Ok(padded)
    }

    fn angles<'a>(&'a self, context: &Context<'a>) -> Angles<'a> {
        Angles { table: &self.rope_table, positions: &context.sequences.positions }
    }

    /// The gradients by the parts of [`LatentAttention::assemble`].
    fn disassemble(&self, mut dqkv: Tensor, context: &Context) -> Result<[Tensor; 3]> {
        let LatentAttentionConfig { heads, sizes, .. } = self.config;
        rope(&mut dqkv, self.angles(context), self.rotation(), Rotation::Backward)?;
        let empty = |width| Tensor::empty(dqkv.device(), &[dqkv.shape()[0], width], dqkv.dtype());
        let mut parts = [empty(heads * sizes.head_dim())?, empty(heads * (sizes.plain + sizes.value))?];
        let mut shared = None;
        self.each_part(|source, of_part, of_qkv, width| {
            match parts.get_mut(source) {
                Some(part) => move_columns(&dqkv, of_qkv, part, of_part, heads, width)?,
                None => shared = Some(sum_columns(&dqkv, of_qkv, heads, width)?),
            }
            Ok(())
        })?;
        let [queries, kv] = parts;
        Ok([queries, kv, shared.expect("keys share a part")])
    }

    /// Attention of an operand `x`: what backward needs, and the output `[T, H·D_v]`.
    fn attend(&self, x: View, context: &mut Context) -> Result<(Attended, Tensor)> {
        let LatentSizes { kv_rank, rotated, .. } = self.config.sizes;
        let projected = self.down.fprop(&x, None, context)?;
        drop(x);
        let first = self.query_columns();
        let (mut queries, mut of_query) = (columns(&projected, 0, first)?, None);
        let latent = columns(&projected, first, kv_rank)?;
        let shared = columns(&projected, first + kv_rank, rotated)?;
        drop(projected);
        if let Some(query) = &self.query {
            let (q, saved) = query.forward(&queries, context)?;
            (queries, of_query) = (q, Some(saved));
        }
        let (kv, of_kv) = self.kv.forward(&latent, context)?;
        drop(latent);
        let parts = [&queries, &kv, &shared];
        let qkv = self.assemble(parts, context)?;
        if let Some(pass) = &mut context.paged {
            let o = self.own_values(&self.attend_paged(qkv, pass)?)?;
            return Ok((Attended { query: of_query, kv: of_kv, rotated: None }, o));
        }
        let sequences = context.sequences;
        let input = AttentionInput::fused(&qkv, &self.spec, sequences.batch, sequences.cu_seqlens.as_ref());
        let (o, lse) = attention(input, &self.spec)?;
        let own = self.own_values(&o)?;
        Ok((Attended { query: of_query, kv: of_kv, rotated: Some([qkv, o, lse]) }, own))
    }

    /// Attention of new tokens of many sequences over a cache, to which their keys and values are appended; or of all tokens of one
    /// sequence.
    fn attend_paged(&self, mut qkv: Tensor, pass: &mut PagedPass) -> Result<Tensor> {
        let is_whole = pass.is_whole;
        let (cache, batch) = pass.layer(self.number);
        append_kv(&mut qkv, cache, batch, &self.spec, None)?;
        match is_whole {
            true => Ok(attention(AttentionInput::fused(&qkv, &self.spec, 1, None), &self.spec)?.0),
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
        let Views { rows, columns: dy } = self.output.cast_gradient(dy, context)?;
        let d_o = self.output.dgrad(&rows, None, context)?;
        drop(rows);
        let operand = match output.into_columns() {
            Ok(operand) => operand,
            Err(frozen) => self.output.input().recast_columns(self.own_values(&o)?, &frozen, &mut context.casts)?,
        };
        self.output.wgrad(&dy, &operand, context)?;
        drop((dy, operand));
        let d_o = self.padded_values(&d_o)?;
        let sequences = context.sequences;
        let input = AttentionInput::fused(&qkv, &self.spec, sequences.batch, sequences.cu_seqlens.as_ref());
        let dqkv = attention_backward(&d_o, input, &o, &lse, &self.spec)?.fused();
        drop((qkv, o, d_o));
        let [mut dqueries, dkv, dshared] = self.disassemble(dqkv, context)?;
        let dlatent = self.kv.backward(dkv, kv, context)?;
        if let (Some(up), Some(saved)) = (&mut self.query, query) {
            dqueries = up.backward(dqueries, saved, context)?;
        }
        let parts = [dqueries, dlatent, dshared];
        let widths = parts.each_ref().map(|part| part.shape()[1]);
        let mut dprojected =
            Tensor::empty(parts[0].device(), &[parts[0].shape()[0], widths.iter().sum()], parts[0].dtype())?;
        let mut first = 0;
        for (part, width) in parts.iter().zip(widths) {
            let (from, to) = (ColumnRuns { first: 0, step: 0 }, ColumnRuns { first, step: 0 });
            move_columns(part, from, &mut dprojected, to, 1, width)?;
            first += width;
        }
        drop(parts);
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

    fn linears_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Linear)) {
        visit(&mut self.down);
        self.query.iter_mut().chain([&mut self.kv]).for_each(|up| visit(&mut up.linear));
        visit(&mut self.output);
    }
}
