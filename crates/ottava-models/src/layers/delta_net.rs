//! Gated delta net: a recurrent layer in place of attention. Yang et al. 2024, arXiv:2412.06464.
//!
//! Four projections read the operand: `qkv`, `z`, `b` and `a`. A causal convolution mixes each channel of `qkv` over neighbouring tokens. The gated
//! delta rule reads the result, and its output is normalised, gated by `z` and projected.
//!
//! Ranks that divide tensors or sequences divide the value heads and the key heads. If there are fewer key heads than ranks that divide sequences, several
//! ranks compute value heads of the same key head. Backward recomputes the convolution and the gates, which cost no product.

mod projections;

pub use projections::ProjectionLayout;

use super::cast::OperandCast;
use super::exchange::share_of;
use super::recurrent::{Conv, ConvValues, Mixer, MixerHeads, Recurrent, head_vector, output_projection};
use super::sublayer::Sublayer;
use super::{Adaptable, Stream};
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_recipe::operand::View;
use ottava_recipe::param::{Builder, FolderTensor, Init, Param, Split};
use ottava_recipe::recurrent::RecurrentSpec;
use ottava_tensor::Tensor;
use ottava_tensor::ops::{
    BoundaryStates, DeltaSpec, GateInput, GateOrder, GatedNorm, causal_conv, delta_gates, delta_gates_backward,
    gated_delta_rule, gated_delta_rule_backward, gated_norm, gated_norm_backward,
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

/// `norm(o) · silu(z)`, where `o` is the output of the gated delta rule of `silu(conv(qkv))` with the gates of `b` and `a`.
struct DeltaNet {
    projections: Projections,
    conv: Conv,     /* 2·H_k·D_k + H·D_v channels */
    a_log: Param,   /* [H] */
    dt_bias: Param, /* [H] */
    norm: Param,    /* [D_v] */
    how: GatedNorm,
    /// The heads of this rank, unless ranks divide sequences.
    heads: DeltaSpec,
    exchange: MixerHeads,
    /// The index among the recurrent layers of the model, which is also the index of the states.
    number: usize,
}

/// The values of the parameters for this rank's heads.
struct Values {
    conv: ConvValues,
    a_log: Tensor,
    dt_bias: Tensor,
}

impl Values {
    fn gates<'a>(&'a self, Projected { b, a, .. }: &'a Projected) -> GateInput<'a> {
        GateInput { b, a, a_log: &self.a_log, dt_bias: &self.dt_bias }
    }
}

impl DeltaNetSpec {
    /// Creates the layer called `name` with the settings of `stream`.
    ///
    /// Errors if ranks cannot divide the heads evenly.
    pub fn sublayer(self, build: &mut Builder, name: &str, stream: &Stream) -> Result<Box<dyn Sublayer>> {
        let DeltaNetSpec { heads, taps, layout } = self;
        let (of_keys, of_values) = (("key heads", heads.key_heads), ("value heads", heads.value_heads));
        MixerHeads::check(build, name, of_keys, of_values)?;
        let projections = Projections::new(build, name, heads, layout, stream)?;
        let sections = [heads.key_width(), heads.key_width(), heads.value_width()];
        let conv = Conv::new(build, name, sections, taps, false, stream.std)?;
        // The largest rate of decay of a new layer in transformers.
        let a_log = head_vector(build, name, "A_log", heads.value_heads, Init::LogUniform(16.0))?;
        let dt_bias = head_vector(build, name, "dt_bias", heads.value_heads, Init::Ones)?;
        let of_norm = FolderTensor::new(format!("{name}.norm.weight"), vec![heads.value_dim]);
        let of_norm = build.shard(of_norm, Split::None)?;
        let norm = Param::new(build, vec![of_norm], Init::Ones)?;
        let output = output_projection(build, name, heads.value_width(), false, stream)?;
        let ranks = build.place().ranks;
        let own = DeltaSpec { key_heads: heads.key_heads / ranks, value_heads: heads.value_heads / ranks, ..heads };
        // One product reads the state, one changes it, and one is the output.
        let spec = RecurrentSpec { channels: own.qkv_width(), taps, state: own.state_shape(), products: 3 };
        let number = build.description.add_recurrent(spec, build.block);
        let how = GatedNorm { size: heads.value_dim, order: GateOrder::AfterNorm, eps: stream.norm.eps };
        let (keys, values) = ((own.key_heads, own.key_dim), (own.value_heads, own.value_dim));
        let exchange =
            MixerHeads { name: name.into(), channels: [keys, keys, values], heads: values.0, width: values.1 };
        let net = DeltaNet { projections, conv, a_log, dt_bias, norm, how, heads: own, exchange, number };
        Ok(Box::new(Recurrent::new(net, output)))
    }
}

impl DeltaNet {
    fn values(&self, context: &Context) -> Result<Values> {
        let of = |vector| self.exchange.own(vector, context);
        let conv = self.conv.values(&self.exchange, context)?;
        Ok(Values { conv, a_log: of(&self.a_log)?, dt_bias: of(&self.dt_bias)? })
    }

    /// Returns the heads that this rank computes for all tokens.
    fn heads_of(&self, context: &Context) -> DeltaSpec {
        let [key_heads, value_heads] =
            [self.heads.key_heads, self.heads.value_heads].map(|heads| share_of(heads, context.sequences.place));
        DeltaSpec { key_heads, value_heads, ..self.heads }
    }
}

impl Mixer for DeltaNet {
    type Projected = Projected;

    fn input(&self) -> OperandCast {
        self.projections.input()
    }

    fn project(&self, x: &View, context: &mut Context) -> Result<Projected> {
        let (Projected { qkv, z, b, a }, of) = (self.projections.fprop(x, context)?, &self.exchange);
        let [b, a] = [of.exchange_heads(b, context)?, of.exchange_heads(a, context)?];
        Ok(Projected { qkv: of.exchange_channels(qkv, context)?, z, b, a })
    }

    fn mix(&self, projected: &Projected, context: &mut Context) -> Result<Tensor> {
        let (values, heads) = (self.values(context)?, self.heads_of(context));
        let gates = delta_gates(values.gates(projected))?;
        let Some(pass) = &mut context.paged else {
            let segments = context.sequences.segments();
            let qkv = causal_conv(&projected.qkv, values.conv.weights(), segments, None)?;
            let o = gated_delta_rule(&qkv, &gates, &heads, segments, None)?;
            return self.exchange.exchange_output(o, context);
        };
        let (states, batch) = pass.states_of(self.number);
        let segments = batch.segments();
        let qkv = causal_conv(&projected.qkv, values.conv.weights(), segments, Some(states.inputs_of(&batch)))?;
        Ok(gated_delta_rule(&qkv, &gates, &heads, segments, Some(states.matrices_of(&batch)))?)
    }

    fn gate(&self, o: &Tensor, projected: &Projected) -> Result<Tensor> {
        Ok(gated_norm(o, &projected.z, &self.norm.weights.value()?, self.how)?)
    }

    fn gate_backward(&mut self, d: &Tensor, o: &Tensor, projected: &Projected) -> Result<[Tensor; 2]> {
        let (weight, mut unread) = (self.norm.weights.value()?, None);
        let dnorm = self.norm.grad_or_unread(&mut unread)?;
        Ok(gated_norm_backward(d, o, &projected.z, &weight, self.how, dnorm)?)
    }

    fn mix_backward(&mut self, d_o: Tensor, dz: Tensor, projected: Projected, context: &Context) -> Result<Projected> {
        let (values, heads, segments) = (self.values(context)?, self.heads_of(context), context.sequences.segments());
        let gates = delta_gates(values.gates(&projected))?;
        let qkv = causal_conv(&projected.qkv, values.conv.weights(), segments, None)?;
        let d_o = self.exchange.exchange_output_backward(d_o, context)?;
        let d = gated_delta_rule_backward(&d_o, &qkv, &gates, &heads, segments, BoundaryStates::default())?;
        drop((qkv, d_o));
        let dqkv = self.conv.backward(&d.qkv, &projected.qkv, &self.exchange, context)?;
        let (of, mut unread_a, mut unread_bias) = (&self.exchange, None, None);
        let mut da_log = of.own_gradient(&mut self.a_log, &mut unread_a, context)?;
        let mut ddt_bias = of.own_gradient(&mut self.dt_bias, &mut unread_bias, context)?;
        let input = values.gates(&projected);
        let of_gates = delta_gates_backward(&d.gates, input, &gates, da_log.rows(), ddt_bias.rows())?;
        da_log.put_back()?;
        ddt_bias.put_back()?;
        Ok(Projected { qkv: dqkv, z: dz, b: of_gates.b, a: of_gates.a })
    }

    fn project_backward(
        &mut self,
        d: Projected,
        x: &View,
        other: Option<Tensor>,
        context: &mut Context,
    ) -> Result<Tensor> {
        let (Projected { qkv, z, b, a }, of) = (d, &self.exchange);
        let [b, a] = [of.exchange_heads_backward(b, context)?, of.exchange_heads_backward(a, context)?];
        let d = Projected { qkv: of.exchange_channels_backward(qkv, context)?, z, b, a };
        self.projections.backward(d, x, other, context)
    }

    fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param)) {
        self.projections.linears().for_each(|linear| linear.parameters(visit));
        self.conv.parameters().chain([&self.a_log, &self.dt_bias, &self.norm]).for_each(visit);
    }

    fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        self.projections.linears_mut().for_each(|linear| linear.parameters_mut(visit));
        let own = [&mut self.a_log, &mut self.dt_bias, &mut self.norm];
        self.conv.parameters_mut().chain(own).for_each(visit);
    }

    fn linears_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut dyn Adaptable)) {
        self.projections.linears_mut().for_each(|linear| visit(linear));
    }
}
