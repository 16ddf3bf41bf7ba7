//! Self-attention, causal or in both directions, with shared key and value heads, and rotary positions unless positions are learned.

mod exchange;
mod growth;
mod head_norm;
mod norm_of_heads;
mod output_gate;
mod part_norm;
mod sharing;
mod source;

pub use growth::QueryGrowth;
pub use head_norm::NormScope;
pub use source::KeysAndValues;

use super::cast::{OperandCast, SavedOperand};
use super::exchange::{expect_divisible, expect_divisible_or_sent, heads_for_tokens, replicas, tokens_for_heads};
use super::sublayer::{BranchOperand, Sublayer, SublayerSaved};
use super::{Adaptable, Linear, LinearConfig, Positions, Rotary, Stream};
use head_norm::{HeadNorm, Heads};
use norm_of_heads::NormOfHeads;
use ottava_common::error::Result;
use ottava_recipe::context::{Context, Sequences};
use ottava_recipe::layer_ranks::LayerRanks;
use ottava_recipe::operand::{ResidualGradient, View, Views};
use ottava_recipe::param::{Builder, FolderLayout, FolderTensor, Init, Param, Split};
use ottava_tensor::Tensor;
use ottava_tensor::ops::{
    Angles, AttentionSpec, GateFunction, RopeLayout, RopePairs, Rotation, append_kv, attention_backward,
    attention_sink_backward, attention_with_sinks, output_gate, paged_attention, rope, rope_to,
};
use part_norm::PartNorm;

/// The sizes and settings of attention whose heads are projected from the residual stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadsSpec {
    /// The number of query heads, `H`.
    pub heads: usize,
    /// The number of key and value heads.
    pub kv_heads: usize,
    /// The size `D` of a head.
    pub head_dim: usize,
    /// Whether the projections to Q, K and V have biases.
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    pub output_bias: bool,
    /// The norm of queries and keys, if the layer has one.
    pub qk_norm: Option<NormScope>,
    /// Whether queries and keys are rotated before their norm.
    pub rotates_first: bool,
    /// The source of keys and values.
    pub source: KeysAndValues,
    /// Whether layers of later blocks read the keys and values.
    pub is_shared: bool,
    /// Whether a sigmoid gates each element of the output. The projection to queries has, for each head, the query and then the gate.
    pub output_gate: bool,
    /// Whether each query head has a sink: a learned logit that takes part in the softmax, and whose probability is dropped.
    pub sinks: bool,
    /// Whether queries see later keys too, as in encoders.
    pub both_directions: bool,
    /// The maximum number of keys that a query sees, its own included; in both directions, the maximum to each side. `None` means all keys.
    pub window: Option<usize>,
    /// The number of positions of a chunk: a query sees only keys of its own chunk. `None` means one chunk.
    pub chunk: Option<usize>,
    /// The growth of queries with their position, if they grow.
    pub growth: Option<QueryGrowth>,
    /// The bound of the absolute values of scores.
    pub soft_cap: Option<f64>,
    /// The factor of the products of queries and keys. `None` means `1 / √head_dim`.
    pub scale: Option<f64>,
}

impl HeadsSpec {
    /// Returns the settings of Llama's attention: no biases, norms, sinks, window or soft cap.
    pub const fn new(heads: usize, kv_heads: usize, head_dim: usize) -> HeadsSpec {
        HeadsSpec {
            heads,
            kv_heads,
            head_dim,
            qkv_bias: false,
            output_bias: false,
            qk_norm: None,
            rotates_first: false,
            source: KeysAndValues::Projections,
            is_shared: false,
            output_gate: false,
            sinks: false,
            both_directions: false,
            window: None,
            chunk: None,
            growth: None,
            soft_cap: None,
            scale: None,
        }
    }

    /// Returns the settings with the numbers of heads of this rank, if ranks divide heads.
    fn of_rank(self, build: &Builder, name: &str) -> Result<HeadsSpec> {
        let ranks = build.place().ranks;
        let replicas = replicas(self.kv_heads, ranks);
        expect_divisible(build, name, "query heads", self.heads)?;
        expect_divisible_or_sent(build, name, "key and value heads", self.kv_heads * replicas)?;
        Ok(HeadsSpec { heads: self.heads / ranks, kv_heads: self.kv_heads * replicas / ranks, ..self })
    }
}

/// `y = o_proj(attention(rope(norm(qkv_proj(x)))))`, with Q, K and V in one product. Most families have no norm of heads.
pub struct Attention {
    name: String,
    /// The heads of this rank that are projected: no key and value heads if another layer has them.
    heads: HeadsSpec,
    qkv: Linear, /* [(H + 2·H_kv)·D, C], or without values, or without keys and values */
    norm: Option<Box<dyn NormOfHeads>>,
    output: Linear,       /* [C, H·D] */
    sinks: Option<Param>, /* [H] */
    positions: Positions,
    /// The index among the attention layers of the model, which is also the index in a cache.
    number: usize,
    /// The index of the block.
    block: usize,
    spec: AttentionSpec,
}

/// The values that forward of [`Attention`] saves.
struct AttentionSaved {
    /// `[T, (H + 2·H_kv)·D]`, rotated and exchanged, or unrotated if the layer has a norm of heads. `None` if it is recomputed.
    qkv: Option<Tensor>,
    o: Tensor, /* [T, H·D], of this rank's heads if ranks divide sequences */
    /// The gate of the output, `[T, H·D]`, if the layer has a gate. Backward of the output reads it before Q, K and V are recomputed.
    gate: Option<Tensor>,
    /// `[B, H, S]`. `None` in inference, which has no backward.
    lse: Option<Tensor>,
    output: SavedOperand,
}

/// The results of attention.
struct Attended {
    /// Q, K and V to save.
    qkv: Option<Tensor>,
    o: Tensor,
    gate: Option<Tensor>,
    lse: Option<Tensor>,
}

/// The source of Q, K and V in backward: the saved tensor, or the operand.
enum Qkv {
    Saved(Tensor),
    OfOperand(View),
}

impl Attention {
    /// Creates an attention layer called `name` with the settings of `stream`. `shared_input` is the cast of an operand that another sublayer also
    /// reads.
    pub fn new(
        build: &mut Builder,
        name: &str,
        c: HeadsSpec,
        stream: &Stream,
        positions: Positions,
        shared_input: Option<OperandCast>,
    ) -> Result<Attention> {
        let Stream { channels, names, std, .. } = *stream;
        let own = c.of_rank(build, name)?;
        let part = |proj: &str, rows| (format!("{name}.{proj}"), rows);
        let q = c.heads * c.head_dim;
        let mut rows: Vec<usize> = c.source.projected(c.heads, c.kv_heads);
        rows.iter_mut().for_each(|heads| *heads *= c.head_dim);
        if c.output_gate {
            rows[0] *= 2;
        }
        let qkv: Vec<_> = match names.qkv {
            [one] => vec![part(one, rows.iter().sum())],
            names => names.iter().zip(&rows).map(|(name, rows)| part(name, *rows)).collect(),
        };
        let output = [part(names.output, channels)];
        let deterministic = build.recipe.deterministic;
        let plain = AttentionSpec::causal(own.heads, own.kv_heads, c.head_dim);
        let scale = c.scale.unwrap_or(plain.scale);
        let (causal, kv_dtype) = (!c.both_directions, build.recipe.kv_dtype());
        let spec =
            AttentionSpec { causal, deterministic, window: c.window, soft_cap: c.soft_cap, scale, kv_dtype, ..plain };
        let lender = source::lender(build, name, c.source)?;
        let number = build.description.add_attention(spec, build.block);
        let number = lender.map_or(number, |lender| build.description.share_cache(number, lender));
        let kv_replicas = replicas(c.kv_heads, build.place().ranks);
        let mut linear = |proj: &str, parts: &[(String, usize)], inputs, bias, split, shared_input| {
            let name = &format!("{name}.{proj}");
            let is_by_head = split == Split::Output && names.qkv_by_head;
            let layout = if is_by_head { FolderLayout::ByHead(c.heads) } else { names.layout() };
            let is_fused = split == Split::Output && names.qkv.len() == 1;
            let fused: &[usize] = if is_fused { &rows } else { &[] };
            let replicas: &[usize] = if split == Split::Output { &[1, kv_replicas, kv_replicas] } else { &[] };
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
        let qkv = linear(names.qkv_stack, &qkv, channels, c.qkv_bias, Split::Output, shared_input)?;
        let output = linear(names.output, &output, q, c.output_bias, Split::Input, None)?;
        let own = HeadsSpec { kv_heads: if lender.is_some() { 0 } else { own.kv_heads }, ..own };
        let of = Heads { heads: own.heads, kv_heads: own.kv_heads, head_dim: c.head_dim, kv_replicas };
        let norm: Option<Box<dyn NormOfHeads>> = match c.qk_norm {
            None => None,
            Some(NormScope::HeadAndValues) => {
                Some(Box::new(PartNorm::new(build, name, names.head_norms, of, stream.norm)?))
            }
            Some(scope) => Some(Box::new(HeadNorm::new(build, name, names.head_norms, of, scope, stream.norm)?)),
        };
        let of_sinks = FolderTensor::new(format!("{name}.sinks"), vec![c.heads]);
        let of_sinks = c.sinks.then(|| build.shard(of_sinks, Split::Output)).transpose()?;
        let sinks = of_sinks.map(|shard| Param::new(build, vec![shard], Init::Normal(std))).transpose()?;
        let (name, block) = (name.to_string(), build.block.map_or(0, |(block, _)| block));
        Ok(Attention { name, heads: own, qkv, norm, output, sinks, positions, number, block, spec })
    }

    /// Normalises projected Q and K, if the layer has a norm of heads.
    fn normalise(&self, qkv: Tensor, ranks: &dyn LayerRanks) -> Result<Tensor> {
        match &self.norm {
            Some(norm) => norm.forward(&qkv, ranks),
            None => Ok(qkv),
        }
    }

    /// Normalises and rotates projected Q, K and V.
    fn rotate(&self, mut qkv: Tensor, context: &Context) -> Result<Tensor> {
        qkv = match self.heads.rotates_first {
            // Backward of the projection's norm reads what is rotated here.
            true => qkv.duplicate()?,
            false => self.normalise(qkv, context.ranks)?,
        };
        turn(&mut qkv, rotation(&self.positions.rotary, self.heads, context.sequences), Rotation::Forward)?;
        if self.heads.rotates_first {
            qkv = self.normalise(qkv, context.ranks)?;
        }
        self.grow_queries(&mut qkv, context.sequences)?;
        Ok(qkv)
    }

    /// Multiplies queries, or the gradients of queries, by the factors of their positions, if queries grow.
    fn grow_queries(&self, qkv: &mut Tensor, sequences: &Sequences) -> Result<()> {
        let Some(table) = &self.positions.growth else { return Ok(()) };
        let layout =
            RopeLayout { heads: self.heads.heads, head_dim: self.heads.head_dim, pairs: RopePairs::Neighbours };
        let angles = Angles { table, positions: &sequences.positions };
        // The sines of the table are zero, so both directions and both kinds of pairs are the same product.
        Ok(rope(qkv, angles, layout, Rotation::Forward)?)
    }

    /// Computes attention of an operand `x`.
    fn attend(&self, x: View, context: &mut Context) -> Result<Attended> {
        let projected = self.qkv.fprop(&x, None, context)?;
        drop(x);
        let (projected, gate) = self.take_gate(self.complete(projected)?)?;
        if context.paged.is_some() {
            let o = self.attend_paged(projected, context)?;
            return Ok(Attended { qkv: None, o, gate, lse: None });
        }
        let sequences = context.sequences;
        let unrotated = self.norm.as_ref().map(|_| projected.clone());
        let qkv = self.qkv_of_heads(self.rotate(projected, context)?, context)?;
        let spec = self.spec_of_rank(sequences);
        let kv = self.share(&qkv, &spec, context)?;
        let input = Attention::input_of(&qkv, kv.as_ref(), &spec, sequences);
        let (o, lse) = attention_with_sinks(input, &spec, self.sinks_of_rank(sequences)?.as_ref())?;
        let qkv = (!context.recompute.qkv()).then(|| unrotated.unwrap_or(qkv));
        Ok(Attended { qkv, o, gate, lse: Some(lse) })
    }

    /// Computes attention of new tokens, and appends their keys and values to the cache. If the pass has the first tokens of all its sequences, attention
    /// does not read the cache.
    fn attend_paged(&self, mut qkv: Tensor, context: &mut Context) -> Result<Tensor> {
        let (rotates_first, sequences, ranks) = (self.heads.rotates_first, context.sequences, context.ranks);
        if !rotates_first {
            qkv = self.normalise(qkv, ranks)?;
        }
        let pass = context.paged.as_mut().expect("a pass with a cache");
        let is_whole = pass.is_whole;
        let (cache, batch) = pass.layer(self.number);
        // Nothing reads the cache of an encoder, whose passes have whole texts.
        let has_own_keys = self.heads.kv_heads > 0 && !self.heads.both_directions;
        let mut rotation = rotation(&self.positions.rotary, self.heads, sequences);
        // `append_kv` can rotate only whole heads.
        let is_apart =
            |angles: &Angles, of: &RopeLayout| rotates_first || !has_own_keys || angles.table.shape()[1] < of.head_dim;
        turn(&mut qkv, rotation.take_if(|(angles, of)| is_apart(angles, of)), Rotation::Forward)?;
        if rotates_first {
            qkv = self.normalise(qkv, ranks)?;
        }
        if has_own_keys {
            append_kv(&mut qkv, cache, batch, &self.spec, rotation.map(|(angles, layout)| (angles, layout.pairs)))?;
        }
        self.grow_queries(&mut qkv, sequences)?;
        let sinks = self.sinks.as_ref().map(|sinks| sinks.weights.value()).transpose()?;
        if !is_whole {
            let qkv = if has_own_keys { qkv } else { self.beside_cache(qkv)? };
            return Ok(paged_attention(&qkv, cache, batch, &self.spec, sinks.as_ref())?);
        }
        // `append_kv` has given keys and values the values of the cache.
        let spec = AttentionSpec { kv_dtype: None, ..self.spec };
        let kv = self.share(&qkv, &spec, context)?;
        let input = Attention::input_of(&qkv, kv.as_ref(), &spec, context.sequences);
        Ok(attention_with_sinks(input, &spec, sinks.as_ref())?.0)
    }

    /// Returns the sinks of the heads that this rank computes over `sequences`, if the layer has sinks.
    fn sinks_of_rank(&self, Sequences { place, .. }: &Sequences) -> Result<Option<Tensor>> {
        let Some(sinks) = &self.sinks else { return Ok(None) };
        let own = place.range(self.spec.heads);
        Ok(Some(sinks.weights.value()?.rows(own.start, own.end)?))
    }

    /// Adds to the gradient of the sinks. `o` and `lse` are the results of forward, and `d_o` is the gradient by `o`.
    fn add_sink_gradient(&mut self, d_o: &Tensor, o: &Tensor, lse: &Tensor, sequences: &Sequences) -> Result<()> {
        let Some(sinks) = self.sinks_of_rank(sequences)? else { return Ok(()) };
        let own = sequences.place.range(self.spec.heads);
        let Some(param) = self.sinks.as_mut().filter(|param| param.is_trained()) else { return Ok(()) };
        let gradient = param.gradient.sum_mut()?;
        let mut of_rank = gradient.rows(own.start, own.end)?.duplicate()?;
        attention_sink_backward(d_o, o, lse, &sinks, &mut of_rank)?;
        Ok(gradient.copy_from(own.start, &of_rank)?)
    }

    /// Returns Q, K and V for backward: as projected, if the layer has a norm of heads, and as attention read them.
    fn restore(&self, qkv: Qkv, context: &mut Context) -> Result<(Option<Tensor>, Tensor)> {
        let projected = match (qkv, &self.norm) {
            (Qkv::Saved(rotated), None) => return Ok((None, rotated)),
            (Qkv::Saved(projected), Some(_)) => projected,
            (Qkv::OfOperand(x), _) => {
                let projected = self.qkv.fprop(&x, None, &mut context.recomputation())?;
                self.take_gate(self.complete(projected)?)?.0
            }
        };
        let unrotated = self.norm.as_ref().map(|_| projected.clone());
        let rotated = self.rotate(projected, context)?;
        Ok((unrotated, self.qkv_of_heads(rotated, context)?))
    }
}

/// Returns the angles of queries and keys, and the layout of the heads. Returns `None` without rotary positions.
fn rotation<'a>(
    rotary: &'a Option<Rotary>,
    HeadsSpec { heads, kv_heads, head_dim, .. }: HeadsSpec,
    sequences: &'a Sequences,
) -> Option<(Angles<'a>, RopeLayout)> {
    let Rotary { table, pairs } = rotary.as_ref()?;
    let layout = RopeLayout { heads: heads + kv_heads, head_dim, pairs: *pairs };
    Some((Angles { table, positions: &sequences.positions }, layout))
}

/// Rotates Q and K, if the layer has rotary positions.
fn turn(qkv: &mut Tensor, rotation: Option<(Angles, RopeLayout)>, direction: Rotation) -> Result<()> {
    match rotation {
        Some((angles, layout)) => Ok(rope(qkv, angles, layout, direction)?),
        None => Ok(()),
    }
}

/// Returns the output of attention for this rank's tokens, from the output `o` of this rank's heads, multiplied by the gate if there is one.
fn gated(name: &str, widths: &[usize], o: &Tensor, gate: Option<&Tensor>, context: &Context) -> Result<Tensor> {
    let o = tokens_for_heads(name, o.clone(), widths, context)?;
    gate.map_or(Ok(o.clone()), |gate| Ok(output_gate(GateFunction::Sigmoid, &o, gate)?))
}

impl Sublayer for Attention {
    fn input(&self) -> OperandCast {
        self.qkv.input()
    }

    fn gradient(&self) -> OperandCast {
        self.output.gradient()
    }

    fn forward(&self, x: View, residual: Option<&Tensor>, context: &mut Context) -> Result<(Tensor, SublayerSaved)> {
        let Attended { qkv, o, gate, lse } = self.attend(x, context)?;
        let (y, output) = self.output.forward(self.gated_output(&o, gate.as_ref(), context)?, residual, context)?;
        Ok((y, SublayerSaved::new(AttentionSaved { qkv, o, gate, lse, output })))
    }

    fn save(&self, x: View, context: &mut Context) -> Result<SublayerSaved> {
        let Attended { qkv, o, gate, lse } = self.attend(x, context)?;
        let output = self.output.save(self.gated_output(&o, gate.as_ref(), context)?, context)?;
        Ok(SublayerSaved::new(AttentionSaved { qkv, o, gate, lse, output }))
    }

    fn backward(
        &mut self,
        dy: ResidualGradient,
        saved: SublayerSaved,
        x: BranchOperand,
        other: Option<Tensor>,
        context: &mut Context,
    ) -> Result<Tensor> {
        let AttentionSaved { qkv, o, gate, lse, output } = saved.into();
        let lse = lse.expect("training attends without a cache");
        // Q, K and V that were not saved are recomputed after backward of `o`, which lowers the peak memory.
        let (qkv, columns) = match qkv {
            Some(qkv) => (Qkv::Saved(qkv), x.columns(context)?),
            None => {
                let Views { rows, columns } = x.views(context)?;
                (Qkv::OfOperand(rows), columns)
            }
        };
        let (name, widths) = (&self.name, &self.output_widths());
        let of_tokens = |context: &Context| gated(name, widths, &o, gate.as_ref(), context);
        let d_o = self.output.backward_recomputing(dy, output, of_tokens, context)?;
        let (d_o, dgate) = self.gated_output_backward(d_o, &o, gate, context)?;
        let d_o = heads_for_tokens(&self.name, d_o, &self.output_widths(), context)?;
        self.add_sink_gradient(&d_o, &o, &lse, context.sequences)?;
        let (unrotated, qkv) = self.restore(qkv, context)?;
        let (sequences, spec) = (context.sequences, self.spec_of_rank(context.sequences));
        let kv = self.borrowed(context)?;
        let input = Attention::input_of(&qkv, kv.as_ref(), &spec, sequences);
        let mut gradients = attention_backward(&d_o, input, &o, &lse, &spec)?.tensors().into_iter();
        drop((qkv, kv, o, d_o));
        let dqkv = gradients.next().expect("queries have a gradient");
        let dqkv = self.share_backward(dqkv, gradients.next(), &spec, context)?;
        let mut dqkv = self.qkv_of_heads_backward(dqkv, context)?;
        self.grow_queries(&mut dqkv, context.sequences)?;
        let rotation = rotation(&self.positions.rotary, self.heads, context.sequences);
        let has_one_projection = self.has_one_projection();
        let dqkv = match (&mut self.norm, unrotated, rotation) {
            (Some(norm), Some(unrotated), rotation) => {
                let dqkv = if self.heads.rotates_first {
                    let mut rotated = unrotated.duplicate()?;
                    turn(&mut rotated, rotation, Rotation::Forward)?;
                    let mut dqkv = norm.backward(&dqkv, &rotated, context.ranks)?;
                    turn(&mut dqkv, rotation, Rotation::Backward)?;
                    dqkv
                } else {
                    let mut dqkv = dqkv;
                    turn(&mut dqkv, rotation, Rotation::Backward)?;
                    norm.backward(&dqkv, &unrotated, context.ranks)?
                };
                let dqkv = self.complete_backward(self.put_gate(dqkv, dgate)?)?;
                self.qkv.cast_gradient(dqkv.into(), context)?
            }
            (_, _, Some((angles, layout))) if dgate.is_none() && !has_one_projection => self
                .qkv
                .produce_gradient(context, |output| rope_to(&dqkv, angles, layout, Rotation::Backward, output))?,
            (_, _, rotation) => {
                let mut dqkv = dqkv;
                turn(&mut dqkv, rotation, Rotation::Backward)?;
                let dqkv = self.complete_backward(self.put_gate(dqkv, dgate)?)?;
                self.qkv.cast_gradient(dqkv.into(), context)?
            }
        };
        self.qkv.backward_views(dqkv, columns, other.as_ref(), context)
    }

    fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param)) {
        self.qkv.parameters(visit);
        self.norm.iter().for_each(|norm| norm.parameters(visit));
        self.output.parameters(visit);
        self.sinks.iter().for_each(visit);
    }

    fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        self.qkv.parameters_mut(visit);
        self.norm.iter_mut().for_each(|norm| norm.parameters_mut(visit));
        self.output.parameters_mut(visit);
        self.sinks.iter_mut().for_each(visit);
    }

    fn linears_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut dyn Adaptable)) {
        visit(&mut self.qkv);
        visit(&mut self.output);
    }
}
