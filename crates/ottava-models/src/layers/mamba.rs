//! The Mamba-2 layer: a state space in place of attention. Dao and Gu 2024, arXiv:2405.21060.
//!
//! One projection computes the gate `z`, the inputs `x`, `B` and `C` of the state space, and the time steps `dt`. A causal convolution mixes each channel
//! of `x`, `B` and `C` over neighbouring tokens. The state space ([`ssd`]) reads the result, and its output is gated, normalised and projected.
//!
//! Ranks that divide tensors divide the groups of `B` and `C`, with the heads of each group. Ranks that divide sequences divide heads; if there are fewer
//! groups than ranks, several ranks compute heads of the same group. Backward recomputes the convolution and the time steps, which cost no product.

use super::cast::OperandCast;
use super::columns::{columns, side_by_side};
use super::exchange::{OwnRows, share_of};
use super::recurrent::{Conv, ConvValues, Mixer, MixerHeads, Recurrent, head_vector, output_projection};
use super::sublayer::Sublayer;
use super::{Adaptable, Linear, LinearConfig, Stream};
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_recipe::operand::View;
use ottava_recipe::param::{Builder, FolderLayout, FolderTensor, Init, Param, Split};
use ottava_recipe::recurrent::RecurrentSpec;
use ottava_tensor::Tensor;
use ottava_tensor::ops::{
    BoundaryStates, GateFunction, GateOrder, GatedNorm, SsdInput, SsdParameterGradients, SsdSpec, causal_conv,
    gated_norm, gated_norm_backward, output_gate, output_gate_backward, ssd, ssd_backward,
};

/// The sizes and settings of a Mamba-2 layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MambaSpec {
    /// The heads of the state space.
    pub heads: SsdSpec,
    /// The number of taps of the convolution, `K`.
    pub taps: usize,
    /// Whether the convolution has a bias.
    pub conv_bias: bool,
    /// Whether the projection of the input has a bias, and whether the projection of the output has one.
    pub biases: [bool; 2],
    /// The place of the gate beside the norm, which normalises the heads of each group together. `None` for a gate without a norm.
    pub norm: Option<GateOrder>,
    /// The factors of the projected `z`, `x`, `B`, `C` and `dt`.
    pub factors: [f32; 5],
}

impl MambaSpec {
    /// Returns the settings of most families: a norm after the gate, a bias of the convolution alone, and no factors.
    pub fn new(heads: SsdSpec, taps: usize) -> MambaSpec {
        let norm = Some(GateOrder::BeforeNorm);
        MambaSpec { heads, taps, conv_bias: true, biases: [false; 2], norm, factors: [1.0; 5] }
    }
}

/// Returns the numbers of rows of the projection for `z`, `x`, `B`, `C` and `dt`.
fn input_sections(heads: &SsdSpec) -> [usize; 5] {
    let (width, of_group) = (heads.width(), heads.group_width());
    [width, width, of_group, of_group, heads.heads]
}

/// `gated(ssd(conv(xBC), dt), z)`, with `z`, `xBC` and `dt` of `in_proj(x)`.
struct Mamba {
    input: Linear,  /* [2·H·P + 2·G·N + H, C] */
    conv: Conv,     /* H·P + 2·G·N channels */
    a_log: Param,   /* [H] */
    dt_bias: Param, /* [H] */
    d: Param,       /* [H] */
    gate: Gate,
    /// The heads of this rank, unless ranks divide sequences.
    heads: SsdSpec,
    exchange: MixerHeads,
    /// The index among the recurrent layers of the model, which is also the index of the states.
    number: usize,
}

/// The gate of the output.
enum Gate {
    /// A gate before or after a norm with a weight `[H·P]`.
    Norm(Box<Param>, GatedNorm),
    /// A gate without a norm.
    Alone,
}

/// The parts of the projection, or the gradients by them.
struct Parts {
    z: Tensor,   /* [T, H·P] */
    xbc: Tensor, /* [T, H·P + 2·G·N] */
    dt: Tensor,  /* [T, H] */
}

/// The values of the parameters for this rank's heads.
struct Values {
    conv: ConvValues,
    a_log: Tensor,
    dt_bias: Tensor,
    d: Tensor,
}

impl Values {
    fn ssd<'a>(&'a self, xbc: &'a Tensor, dt: &'a Tensor) -> SsdInput<'a> {
        SsdInput { xbc, dt, a_log: &self.a_log, dt_bias: &self.dt_bias, d: &self.d }
    }
}

impl MambaSpec {
    /// Creates the layer called `name` with the settings of `stream`. `shared_input` is the cast of an operand that another sublayer also reads.
    ///
    /// Errors if ranks cannot divide the groups or the heads evenly.
    pub fn sublayer(
        self,
        build: &mut Builder,
        name: &str,
        stream: &Stream,
        shared_input: Option<OperandCast>,
    ) -> Result<Box<dyn Sublayer>> {
        let heads = self.heads;
        MixerHeads::check(build, name, ("groups of heads", heads.groups), ("heads", heads.heads))?;
        let input = input_projection(build, name, &self, stream, shared_input)?;
        let output = output_projection(build, name, heads.width(), self.biases[1], stream)?;
        let sections = [heads.width(), heads.group_width(), heads.group_width()];
        let conv = Conv::new(build, name, sections, self.taps, self.conv_bias, stream.std)?;
        // The largest rate of decay of a new layer is 16, as in the paper's code.
        let a_log = head_vector(build, name, "A_log", heads.heads, Init::LogUniform(16.0))?;
        let dt_bias = head_vector(build, name, "dt_bias", heads.heads, Init::Ones)?;
        let d = head_vector(build, name, "D", heads.heads, Init::Ones)?;
        let mut gate = Gate::Alone;
        if let Some(order) = self.norm {
            let norm = FolderTensor::new(format!("{name}.norm.weight"), vec![heads.width()]);
            let norm = build.shard(norm, Split::Output)?;
            let how = GatedNorm { size: heads.width() / heads.groups, order, eps: stream.norm.eps };
            gate = Gate::Norm(Box::new(Param::new(build, vec![norm], Init::Ones)?), how);
        }
        let ranks = build.place().ranks;
        let own = SsdSpec { heads: heads.heads / ranks, groups: heads.groups / ranks, ..heads };
        let runs: Vec<(usize, f32)> = input_sections(&own).into_iter().zip(self.factors).collect();
        let input = input.multiplied(build.device, &runs)?;
        // One product changes the state, and one is the output.
        let recurrent =
            RecurrentSpec { channels: own.xbc_width(), taps: self.taps, state: own.state_shape(), products: 2 };
        let number = build.description.add_recurrent(recurrent, build.block);
        let (of_heads, of_groups) = ((own.heads, own.head_dim), (own.groups, own.state_dim));
        let channels = [of_heads, of_groups, of_groups];
        let exchange = MixerHeads { name: name.into(), channels, heads: own.heads, width: own.head_dim };
        let mamba = Mamba { input, conv, a_log, dt_bias, d, gate, heads: own, exchange, number };
        Ok(Box::new(Recurrent::new(mamba, output)))
    }
}

impl Mamba {
    fn values(&self, context: &Context) -> Result<Values> {
        let of = |vector| self.exchange.own(vector, context);
        let conv = self.conv.values(&self.exchange, context)?;
        Ok(Values { conv, a_log: of(&self.a_log)?, dt_bias: of(&self.dt_bias)?, d: of(&self.d)? })
    }

    /// Returns the heads that this rank computes for all tokens.
    fn heads_of(&self, context: &Context) -> SsdSpec {
        let [heads, groups] =
            [self.heads.heads, self.heads.groups].map(|heads| share_of(heads, context.sequences.place));
        SsdSpec { heads, groups, ..self.heads }
    }

    /// Returns the widths of `z`, `xBC` and `dt`, and their first columns in the projection.
    fn columns(&self) -> [(usize, usize); 3] {
        let (width, xbc) = (self.heads.width(), self.heads.xbc_width());
        [(width, 0), (xbc, width), (self.heads.heads, width + xbc)]
    }

    fn take_apart(&self, projected: &Tensor) -> Result<Parts> {
        let [z, xbc, dt] = self.columns().map(|(width, first)| columns(projected, first, width));
        Ok(Parts { z: z?, xbc: xbc?, dt: dt? })
    }
}

/// Creates the projection of the input.
fn input_projection(
    build: &mut Builder,
    name: &str,
    spec: &MambaSpec,
    stream: &Stream,
    shared_input: Option<OperandCast>,
) -> Result<Linear> {
    let (sections, name) = (input_sections(&spec.heads), &format!("{name}.in_proj"));
    let config = LinearConfig {
        name,
        parts: &[(name.clone(), sections.iter().sum())],
        fused: &sections,
        replicas: &[],
        inputs: stream.channels,
        bias: spec.biases[0],
        std: stream.std,
        layout: FolderLayout::Same,
        split: Split::Output,
        shared_input,
        uncast: None,
    };
    Linear::new(build, config)
}

impl Gate {
    /// Returns the gated and normalised output.
    fn forward(&self, y: &Tensor, z: &Tensor) -> Result<Tensor> {
        match self {
            Gate::Norm(weight, how) => Ok(gated_norm(y, z, &weight.weights.value()?, *how)?),
            Gate::Alone => Ok(output_gate(GateFunction::Silu, y, z)?),
        }
    }

    /// Returns the gradients by `y` and `z` from the gradient `d` by the result. Adds to the gradient of the weight.
    fn backward(&mut self, d: &Tensor, y: &Tensor, z: &Tensor) -> Result<[Tensor; 2]> {
        match self {
            Gate::Norm(weight, how) => {
                let (value, mut unread) = (weight.weights.value()?, None);
                Ok(gated_norm_backward(d, y, z, &value, *how, weight.grad_or_unread(&mut unread)?)?)
            }
            Gate::Alone => Ok(output_gate_backward(GateFunction::Silu, d, y, z)?),
        }
    }

    fn weight(&self) -> Option<&Param> {
        match self {
            Gate::Norm(weight, _) => Some(weight.as_ref()),
            Gate::Alone => None,
        }
    }

    fn weight_mut(&mut self) -> Option<&mut Param> {
        match self {
            Gate::Norm(weight, _) => Some(weight.as_mut()),
            Gate::Alone => None,
        }
    }
}

impl Mixer for Mamba {
    type Projected = Parts;

    fn input(&self) -> OperandCast {
        self.input.input()
    }

    fn project(&self, x: &View, context: &mut Context) -> Result<Parts> {
        let (Parts { z, xbc, dt }, of) = (self.take_apart(&self.input.fprop(x, None, context)?)?, &self.exchange);
        Ok(Parts { z, xbc: of.exchange_channels(xbc, context)?, dt: of.exchange_heads(dt, context)? })
    }

    fn mix(&self, parts: &Parts, context: &mut Context) -> Result<Tensor> {
        let (values, heads) = (self.values(context)?, self.heads_of(context));
        let Some(pass) = &mut context.paged else {
            let segments = context.sequences.segments();
            let xbc = causal_conv(&parts.xbc, values.conv.weights(), segments, None)?;
            let y = ssd(values.ssd(&xbc, &parts.dt), &heads, segments, None)?;
            return self.exchange.exchange_output(y, context);
        };
        let (states, batch) = pass.states_of(self.number);
        let segments = batch.segments();
        let xbc = causal_conv(&parts.xbc, values.conv.weights(), segments, Some(states.inputs_of(&batch)))?;
        Ok(ssd(values.ssd(&xbc, &parts.dt), &heads, segments, Some(states.matrices_of(&batch)))?)
    }

    fn gate(&self, y: &Tensor, parts: &Parts) -> Result<Tensor> {
        self.gate.forward(y, &parts.z)
    }

    fn gate_backward(&mut self, d: &Tensor, y: &Tensor, parts: &Parts) -> Result<[Tensor; 2]> {
        self.gate.backward(d, y, &parts.z)
    }

    fn mix_backward(&mut self, dy: Tensor, dz: Tensor, parts: Parts, context: &Context) -> Result<Parts> {
        let (values, heads, segments) = (self.values(context)?, self.heads_of(context), context.sequences.segments());
        let xbc = causal_conv(&parts.xbc, values.conv.weights(), segments, None)?;
        let dy = self.exchange.exchange_output_backward(dy, context)?;
        let (of, mut unread) = (&self.exchange, [const { None }; 3]);
        let [of_a, of_dt, of_d] = &mut unread;
        let mut a_log = of.own_gradient(&mut self.a_log, of_a, context)?;
        let mut dt_bias = of.own_gradient(&mut self.dt_bias, of_dt, context)?;
        let mut d = of.own_gradient(&mut self.d, of_d, context)?;
        let parameters = SsdParameterGradients { a_log: a_log.rows(), dt_bias: dt_bias.rows(), d: d.rows() };
        let input = values.ssd(&xbc, &parts.dt);
        let gradient = ssd_backward(&dy, input, &heads, segments, BoundaryStates::default(), parameters)?;
        [a_log, dt_bias, d].into_iter().try_for_each(OwnRows::put_back)?;
        drop((xbc, dy));
        let dxbc = self.conv.backward(&gradient.xbc, &parts.xbc, &self.exchange, context)?;
        Ok(Parts { z: dz, xbc: dxbc, dt: gradient.dt })
    }

    fn project_backward(&mut self, d: Parts, x: &View, other: Option<Tensor>, context: &mut Context) -> Result<Tensor> {
        let (Parts { z, xbc, dt }, of) = (d, &self.exchange);
        let xbc = of.exchange_channels_backward(xbc, context)?;
        let d = side_by_side([&z, &xbc, &of.exchange_heads_backward(dt, context)?])?;
        drop((z, xbc));
        let d = self.input.cast_gradient(d.into(), context)?;
        self.input.backward_views(d, x.clone(), other.as_ref(), context)
    }

    fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param)) {
        self.input.parameters(visit);
        let own = [&self.a_log, &self.dt_bias, &self.d];
        self.conv.parameters().chain(own).chain(self.gate.weight()).for_each(visit);
    }

    fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        self.input.parameters_mut(visit);
        let own = [&mut self.a_log, &mut self.dt_bias, &mut self.d];
        self.conv.parameters_mut().chain(own).chain(self.gate.weight_mut()).for_each(visit);
    }

    fn linears_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut dyn Adaptable)) {
        visit(&mut self.input);
    }
}
