//! The projections of a gated delta net, which read one operand.

use crate::layers::{Linear, LinearConfig, OperandCast, Stream};
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_recipe::operand::View;
use ottava_recipe::param::{Builder, FolderLayout, Split};
use ottava_tensor::Tensor;
use ottava_tensor::ops::{ColumnRuns, DeltaSpec, move_columns};

/// The tensors of a folder that hold the projections of a gated delta net.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProjectionLayout {
    /// `in_proj_qkvz` has for each key head its query, its key, the values of its value heads and their `z`. `in_proj_ba` has for each key head `b` and
    /// then `a` of its value heads.
    ByKeyHead,
    /// `in_proj_qkv` has all queries, all keys and all values. `in_proj_z`, `in_proj_b` and `in_proj_a` are tensors of their own.
    Flat,
}

/// The results of the projections, or the gradients by them.
pub(super) struct Projected {
    pub qkv: Tensor, /* [T, 2·H_k·D_k + H·D_v] */
    pub z: Tensor,   /* [T, H·D_v] */
    pub b: Tensor,   /* [T, H] */
    pub a: Tensor,   /* [T, H] */
}

/// The reason why `b` and `a` are never cast.
const UNCAST: &str = "gates of a state are computed in the compute type";

/// The linears of the projections.
pub(super) struct Projections {
    /// `[qkvz, ba]`, or `[qkv, z, b, a]`. The first linear owns the cast of the operand.
    linears: Vec<Linear>,
    layout: ProjectionLayout,
    /// The heads of this rank.
    heads: DeltaSpec,
}

/// Columns of a projection that belong to one part, in the order of the part: `count` runs of `width` columns.
struct Run {
    from: ColumnRuns,
    to: ColumnRuns,
    width: usize,
}

impl Projections {
    /// Creates the projections of the gated delta net called `layer` with these `heads`, which a folder stores in `layout`.
    pub fn new(
        build: &mut Builder,
        layer: &str,
        heads: DeltaSpec,
        layout: ProjectionLayout,
        stream: &Stream,
    ) -> Result<Projections> {
        let (of_keys, of_values, of_gates) = (heads.key_width(), heads.value_width(), heads.value_heads);
        let sections = [of_keys, of_keys, of_values];
        let list: &[(&str, usize, &[usize], Option<&str>)] = match layout {
            ProjectionLayout::ByKeyHead => &[
                ("in_proj_qkvz", heads.qkv_width() + of_values, &[], None),
                ("in_proj_ba", 2 * of_gates, &[], Some(UNCAST)),
            ],
            ProjectionLayout::Flat => &[
                ("in_proj_qkv", heads.qkv_width(), &sections, None),
                ("in_proj_z", of_values, &[], None),
                ("in_proj_b", of_gates, &[], Some(UNCAST)),
                ("in_proj_a", of_gates, &[], Some(UNCAST)),
            ],
        };
        let mut linears: Vec<Linear> = Vec::new();
        for &(suffix, rows, fused, uncast) in list {
            let name = &format!("{layer}.{suffix}");
            let config = LinearConfig {
                name,
                parts: &[(name.clone(), rows)],
                fused,
                replicas: &[],
                inputs: stream.channels,
                bias: false,
                std: stream.std,
                layout: FolderLayout::Same,
                split: Split::Output,
                shared_input: linears.first().map(Linear::input).filter(|_| uncast.is_none()),
                uncast,
            };
            if config.shared_input.is_some() {
                build.description.shared_inputs.insert(name.clone(), format!("{layer}.{}", list[0].0));
            }
            let linear = Linear::new(build, config)?;
            linears.push(if linears.is_empty() { linear.of_shared_value() } else { linear });
        }
        let ranks = build.place().ranks;
        let heads = DeltaSpec { key_heads: heads.key_heads / ranks, value_heads: heads.value_heads / ranks, ..heads };
        Ok(Projections { linears, layout, heads })
    }

    /// Returns the cast of the operand. Its view also has the value, which `b` and `a` read.
    pub fn input(&self) -> OperandCast {
        self.linears[0].input()
    }

    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.linears.iter()
    }

    pub fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        self.linears.iter_mut()
    }

    /// Returns the number of linears whose products may be cast. They come first.
    fn cast_count(&self) -> usize {
        self.linears.len() / 2
    }

    /// Projects an operand `x` of [`Projections::input`].
    pub fn fprop(&self, x: &View, context: &mut Context) -> Result<Projected> {
        let mut results = Vec::with_capacity(self.linears.len());
        for (at, linear) in self.linears.iter().enumerate() {
            let value = (at >= self.cast_count()).then(|| x.value().cloned().map(View::Value)).transpose()?;
            results.push(linear.fprop(value.as_ref().unwrap_or(x), None, context)?);
        }
        let mut results = results.into_iter();
        let mut next = || results.next().expect("each linear has a result");
        match self.layout {
            ProjectionLayout::Flat => Ok(Projected { qkv: next(), z: next(), b: next(), a: next() }),
            ProjectionLayout::ByKeyHead => self.take_apart(&next(), &next()),
        }
    }

    /// Returns the gradient by the operand, plus `other` if given, from the gradients `d` by the results. `x` is the view of the operand that wgrad
    /// reads.
    pub fn backward(&mut self, d: Projected, x: &View, other: Option<Tensor>, context: &mut Context) -> Result<Tensor> {
        let gradients = match self.layout {
            ProjectionLayout::Flat => vec![d.qkv, d.z, d.b, d.a],
            ProjectionLayout::ByKeyHead => self.put_together(&d)?.into(),
        };
        let (mut dx, count) = (other, self.cast_count());
        for (at, (linear, dy)) in self.linears.iter_mut().zip(gradients).enumerate().rev() {
            let x = if at < count { x.clone() } else { View::Value(x.value()?.clone()) };
            let dy = linear.cast_gradient(dy.into(), context)?;
            dx = Some(linear.backward_views(dy, x, dx.as_ref(), context)?);
        }
        Ok(dx.expect("there are projections"))
    }

    /// Returns the widths of the parts of a key head: in `qkvz`, and in `ba`.
    fn widths(&self) -> ([usize; 4], [usize; 2]) {
        let DeltaSpec { key_dim, value_dim, .. } = self.heads;
        let (group, values) = (self.heads.group(), self.heads.group() * value_dim);
        ([key_dim, key_dim, values, values], [group, group])
    }

    /// Returns the runs of a part of `width` columns of each key head, from column `first` of the `all` columns of a key head to column `to`.
    fn run(all: usize, first: usize, to: usize, width: usize) -> Run {
        Run { from: ColumnRuns { first, step: all }, to: ColumnRuns { first: to, step: width }, width }
    }

    /// Returns the runs of queries, keys, values, `z`, `b` and `a`.
    fn runs(&self) -> [Run; 6] {
        let ([q, k, v, z], [b, a]) = self.widths();
        let (all, of_keys) = (q + k + v + z, self.heads.key_width());
        [
            Projections::run(all, 0, 0, q),
            Projections::run(all, q, of_keys, k),
            Projections::run(all, q + k, 2 * of_keys, v),
            Projections::run(all, q + k + v, 0, z),
            Projections::run(b + a, 0, 0, b),
            Projections::run(b + a, b, 0, a),
        ]
    }

    /// Returns the parts of the results `qkvz` and `ba`, whose columns are sorted by key heads.
    fn take_apart(&self, qkvz: &Tensor, ba: &Tensor) -> Result<Projected> {
        let mut parts = self.empty(qkvz)?;
        let Projected { qkv, z, b, a } = &mut parts;
        let [of_q, of_k, of_v, of_z, of_b, of_a] = self.runs();
        let take = |from: &Tensor, to: &mut Tensor, run: Run| -> Result<()> {
            Ok(move_columns(from, run.from, to, run.to, self.heads.key_heads, run.width)?)
        };
        for run in [of_q, of_k, of_v] {
            take(qkvz, qkv, run)?;
        }
        take(qkvz, z, of_z)?;
        take(ba, b, of_b)?;
        take(ba, a, of_a)?;
        Ok(parts)
    }

    /// Returns `qkvz` and `ba` from their parts.
    fn put_together(&self, parts: &Projected) -> Result<[Tensor; 2]> {
        let (tokens, Projected { qkv, z, b, a }) = (parts.z.shape()[0], parts);
        let empty = |width| Tensor::empty(z.device(), &[tokens, width], z.dtype());
        let mut qkvz = empty(qkv.shape()[1] + z.shape()[1])?;
        let mut ba = empty(2 * self.heads.value_heads)?;
        let [of_q, of_k, of_v, of_z, of_b, of_a] = self.runs();
        let put = |from: &Tensor, to: &mut Tensor, run: Run| -> Result<()> {
            Ok(move_columns(from, run.to, to, run.from, self.heads.key_heads, run.width)?)
        };
        for run in [of_q, of_k, of_v] {
            put(qkv, &mut qkvz, run)?;
        }
        put(z, &mut qkvz, of_z)?;
        put(b, &mut ba, of_b)?;
        put(a, &mut ba, of_a)?;
        Ok([qkvz, ba])
    }

    fn empty(&self, like: &Tensor) -> Result<Projected> {
        let empty = |width| Tensor::empty(like.device(), &[like.shape()[0], width], like.dtype());
        let (heads, of_gates) = (&self.heads, self.heads.value_heads);
        Ok(Projected {
            qkv: empty(heads.qkv_width())?,
            z: empty(heads.value_width())?,
            b: empty(of_gates)?,
            a: empty(of_gates)?,
        })
    }
}
