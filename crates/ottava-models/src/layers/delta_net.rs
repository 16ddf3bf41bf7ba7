//! Gated delta net: a recurrent layer in place of attention. Yang et al. 2024, arXiv:2412.06464.
//!
//! Four projections read the operand: `qkv`, `z`, `b` and `a`. A causal convolution mixes each channel of `qkv` over neighbouring tokens. The gated
//! delta rule reads the result, and its output is normalised, gated by `z` and projected. Each document begins with a state of zero. In inference, the
//! states of a sequence are in a slot (`ottava_recipe::recurrent`).
//!
//! Ranks that divide tensors divide the key heads and the value heads. Backward recomputes the convolution and the gates, which cost no product.

mod projections;

pub use projections::ProjectionLayout;

use super::cast::{OperandCast, SavedOperand};
use super::exchange::{expect_divisible, expect_whole_sequences};
use super::sublayer::{BranchOperand, Sublayer, SublayerSaved};
use super::{Linear, LinearConfig, RECURRENT_OUTPUT, Stream};
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_recipe::operand::{ResidualGradient, View, Views};
use ottava_recipe::param::{Builder, FolderLayout, FolderTensor, Init, Param, Split};
use ottava_recipe::recurrent::RecurrentSpec;
use ottava_tensor::Tensor;
use ottava_tensor::ops::{
    BoundaryStates, ConvWeights, DeltaSpec, GateInput, GateOrder, GatedNorm, causal_conv, causal_conv_backward,
    delta_gates, delta_gates_backward, gated_delta_rule, gated_delta_rule_backward, gated_norm, gated_norm_backward,
};
use projections::{Projected, Projections};

/// The sizes and settings of a gated delta net.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaNetSpec {
    /// The heads.
    pub heads: DeltaSpec,
    /// The number of taps of the convolution, `K`.
    pub taps: usize,
    /// The tensors of a folder that hold the projections.
    pub layout: ProjectionLayout,
}

/// `y = out_proj(norm(o) · silu(z))`, where `o` is the output of the gated delta rule of `silu(conv(qkv))` with the gates of `b` and `a`.
pub struct DeltaNet {
    projections: Projections,
    conv: Param,    /* [2·H_k·D_k + H·D_v, 1, K] */
    a_log: Param,   /* [H] */
    dt_bias: Param, /* [H] */
    norm: Param,    /* [D_v] */
    how: GatedNorm,
    output: Linear, /* [C, H·D_v] */
    /// The heads of this rank.
    heads: DeltaSpec,
    /// The index among the recurrent layers of the model, which is also the index of the states.
    number: usize,
}

/// The values that forward of [`DeltaNet`] saves.
struct DeltaNetSaved {
    /// `None` if the projections are recomputed.
    projected: Option<Projected>,
    o: Tensor, /* [T, H·D_v] */
    output: SavedOperand,
}

/// The values of the parameters between the projections.
struct Values {
    conv: Tensor, /* [2·H_k·D_k + H·D_v, 1, K] */
    a_log: Tensor,
    dt_bias: Tensor,
}

impl Values {
    fn conv(&self) -> ConvWeights<'_> {
        ConvWeights { weight: &self.conv, bias: None }
    }

    fn gates<'a>(&'a self, Projected { b, a, .. }: &'a Projected) -> GateInput<'a> {
        GateInput { b, a, a_log: &self.a_log, dt_bias: &self.dt_bias }
    }
}

impl DeltaNet {
    /// Creates the layer called `name` with the settings of `stream`.
    ///
    /// Errors if ranks cannot divide the heads evenly, or if they divide sequences.
    pub fn new(build: &mut Builder, name: &str, spec: DeltaNetSpec, stream: &Stream) -> Result<DeltaNet> {
        let (DeltaNetSpec { heads, taps, layout }, Stream { channels, std, .. }) = (spec, *stream);
        expect_whole_sequences(build, name, "gated delta net")?;
        for (what, heads) in [("key heads", heads.key_heads), ("value heads", heads.value_heads)] {
            expect_divisible(build, name, what, heads)?;
        }
        let projections = Projections::new(build, name, heads, layout, stream)?;
        let (of_keys, of_values) = (heads.key_width(), heads.value_width());
        let tensor = |suffix: &str, shape: Vec<usize>| FolderTensor::new(format!("{name}.{suffix}"), shape);
        let of_conv = tensor("conv1d.weight", vec![heads.qkv_width(), 1, taps]);
        let of_conv = build.shards(of_conv, &[of_keys, of_keys, of_values], &[], Split::Output)?;
        let conv = Param::new(build, of_conv, Init::Normal(std))?;
        let mut vector = |suffix: &str, init| -> Result<Param> {
            let shard = build.shard(tensor(suffix, vec![heads.value_heads]), Split::Output)?;
            Ok(Param::new(build, vec![shard], init)?.in_sums(build))
        };
        // The largest rate of decay of a new layer in transformers.
        let (a_log, dt_bias) = (vector("A_log", Init::LogUniform(16.0))?, vector("dt_bias", Init::Ones)?);
        let of_norm = build.shard(tensor("norm.weight", vec![heads.value_dim]), Split::None)?;
        let norm = Param::new(build, vec![of_norm], Init::Ones)?;
        let output = LinearConfig {
            name: &format!("{name}.{RECURRENT_OUTPUT}"),
            parts: &[(format!("{name}.{RECURRENT_OUTPUT}"), channels)],
            fused: &[],
            replicas: &[],
            inputs: of_values,
            bias: false,
            std,
            layout: FolderLayout::Same,
            split: Split::Input,
            shared_input: None,
            uncast: None,
        };
        let output = Linear::new(build, output)?;
        let ranks = build.place().ranks;
        let own = DeltaSpec { key_heads: heads.key_heads / ranks, value_heads: heads.value_heads / ranks, ..heads };
        // One product reads the state, one changes it, and one is the output.
        let spec = RecurrentSpec { channels: own.qkv_width(), taps, state: own.state_shape(), products: 3 };
        let number = build.description.add_recurrent(spec, build.block);
        let how = GatedNorm { size: heads.value_dim, order: GateOrder::AfterNorm, eps: stream.norm.eps };
        Ok(DeltaNet { projections, conv, a_log, dt_bias, norm, how, output, heads: own, number })
    }

    fn values(&self, context: &Context) -> Result<Values> {
        let conv = self.conv.read(context.loan)?;
        Ok(Values { conv, a_log: self.a_log.weights.value()?, dt_bias: self.dt_bias.weights.value()? })
    }

    /// Returns the output of the gated delta rule. In inference, reads and replaces the states of the sequences.
    fn mix(&self, projected: &Projected, context: &mut Context) -> Result<Tensor> {
        let (values, heads) = (self.values(context)?, &self.heads);
        let gates = delta_gates(values.gates(projected))?;
        let Some(pass) = &mut context.paged else {
            let segments = context.sequences.segments();
            let qkv = causal_conv(&projected.qkv, values.conv(), segments, None)?;
            return Ok(gated_delta_rule(&qkv, &gates, heads, segments, None)?);
        };
        let (states, batch) = pass.states_of(self.number);
        let segments = batch.segments();
        let qkv = causal_conv(&projected.qkv, values.conv(), segments, Some(states.inputs_of(&batch)))?;
        Ok(gated_delta_rule(&qkv, &gates, heads, segments, Some(states.matrices_of(&batch)))?)
    }

    /// Computes the layer up to the output projection, for an operand `x`. Returns the values to save, and the operand of the output projection.
    fn run(&self, x: View, context: &mut Context) -> Result<(Option<Projected>, Tensor, Tensor)> {
        let projected = self.projections.fprop(&x, context)?;
        drop(x);
        let o = self.mix(&projected, context)?;
        let normed = gated_norm(&o, &projected.z, &self.norm.weights.value()?, self.how)?;
        let keeps = context.paged.is_none() && !context.recompute.qkv();
        Ok((keeps.then_some(projected), o, normed))
    }

    /// Returns the gradient by the projections from the gradient `d_o` by the output of the gated delta rule, and `dz`. Adds to the gradients of the
    /// parameters between them.
    fn mix_backward(
        &mut self,
        d_o: &Tensor,
        dz: Tensor,
        projected: &Projected,
        context: &Context,
    ) -> Result<Projected> {
        let (values, segments) = (self.values(context)?, context.sequences.segments());
        let gates = delta_gates(values.gates(projected))?;
        let qkv = causal_conv(&projected.qkv, values.conv(), segments, None)?;
        let d = gated_delta_rule_backward(d_o, &qkv, &gates, &self.heads, segments, BoundaryStates::default())?;
        drop(qkv);
        let (mut unread, mut unread_a, mut unread_bias) = (None, None, None);
        let dconv = self.conv.grad_or_unread(&mut unread)?;
        let dqkv = causal_conv_backward(&d.qkv, &projected.qkv, values.conv(), segments, dconv, None)?;
        let (da_log, ddt_bias) =
            (self.a_log.grad_or_unread(&mut unread_a)?, self.dt_bias.grad_or_unread(&mut unread_bias)?);
        let of_gates = delta_gates_backward(&d.gates, values.gates(projected), &gates, da_log, ddt_bias)?;
        Ok(Projected { qkv: dqkv, z: dz, b: of_gates.b, a: of_gates.a })
    }
}

impl Sublayer for DeltaNet {
    fn input(&self) -> OperandCast {
        self.projections.input()
    }

    fn gradient(&self) -> OperandCast {
        self.output.gradient()
    }

    fn forward(&self, x: View, residual: Option<&Tensor>, context: &mut Context) -> Result<(Tensor, SublayerSaved)> {
        let (projected, o, normed) = self.run(x, context)?;
        let (y, output) = self.output.forward(normed, residual, context)?;
        Ok((y, SublayerSaved::new(DeltaNetSaved { projected, o, output })))
    }

    fn save(&self, x: View, context: &mut Context) -> Result<SublayerSaved> {
        let (projected, o, normed) = self.run(x, context)?;
        let output = self.output.save(normed, context)?;
        Ok(SublayerSaved::new(DeltaNetSaved { projected, o, output }))
    }

    fn backward(
        &mut self,
        dy: ResidualGradient,
        saved: SublayerSaved,
        x: BranchOperand,
        other: Option<Tensor>,
        context: &mut Context,
    ) -> Result<Tensor> {
        let DeltaNetSaved { projected, o, output } = saved.into();
        let (projected, columns) = match projected {
            Some(projected) => (projected, x.columns(context)?),
            None => {
                let Views { rows, columns } = x.views(context)?;
                (self.projections.fprop(&rows, &mut context.recomputation())?, columns)
            }
        };
        let (weight, how) = (self.norm.weights.value()?, self.how);
        let normed = |_: &Context| Ok(gated_norm(&o, &projected.z, &weight, how)?);
        let dnormed = self.output.backward_recomputing(dy, output, normed, context)?;
        let mut unread = None;
        let dnorm = self.norm.grad_or_unread(&mut unread)?;
        let [d_o, dz] = gated_norm_backward(&dnormed, &o, &projected.z, &weight, how, dnorm)?;
        drop((o, dnormed));
        let d = self.mix_backward(&d_o, dz, &projected, context)?;
        drop(projected);
        self.projections.backward(d, &columns, other, context)
    }

    fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param)) {
        self.projections.linears().for_each(|linear| linear.parameters(visit));
        [&self.conv, &self.a_log, &self.dt_bias, &self.norm].into_iter().for_each(&mut *visit);
        self.output.parameters(visit);
    }

    fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        self.projections.linears_mut().for_each(|linear| linear.parameters_mut(visit));
        [&mut self.conv, &mut self.a_log, &mut self.dt_bias, &mut self.norm].into_iter().for_each(&mut *visit);
        self.output.parameters_mut(visit);
    }

    fn linears_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Linear)) {
        self.projections.linears_mut().for_each(&mut *visit);
        visit(&mut self.output);
    }
}
