//! The Mamba-2 layer: a state space in place of attention. Dao and Gu 2024, arXiv:2405.21060.
//!
//! One projection computes the gate `z`, the inputs `x`, `B` and `C` of the state space, and the time steps `dt`. A causal convolution mixes each channel
//! of `x`, `B` and `C` over neighbouring tokens. The state space ([`ssd`]) reads the result, and its output is gated, normalised and projected. Each
//! document begins with a state of zero. In inference, the states of a sequence are in a slot (`ottava_recipe::recurrent`).
//!
//! Ranks that divide tensors divide the groups of `B` and `C`, with the heads of each group. Backward recomputes the convolution and the time steps,
//! which cost no product.

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
    BoundaryStates, ColumnRuns, ConvWeights, GateFunction, GateOrder, GatedNorm, SsdInput, SsdParameterGradients,
    SsdSpec, causal_conv, causal_conv_backward, gated_norm, gated_norm_backward, move_columns, output_gate,
    output_gate_backward, ssd, ssd_backward,
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
fn sections(heads: &SsdSpec) -> [usize; 5] {
    let (width, of_group) = (heads.width(), heads.group_width());
    [width, width, of_group, of_group, heads.heads]
}

/// `y = out_proj(gated(ssd(conv(xBC), dt), z))`, with `z`, `xBC` and `dt` of `in_proj(x)`.
pub struct Mamba {
    input: Linear,            /* [2·H·P + 2·G·N + H, C] */
    conv: Param,              /* [H·P + 2·G·N, 1, K] */
    conv_bias: Option<Param>, /* [H·P + 2·G·N] */
    a_log: Param,             /* [H] */
    dt_bias: Param,           /* [H] */
    d: Param,                 /* [H] */
    gate: Gate,
    output: Linear, /* [C, H·P] */
    /// The heads of this rank.
    heads: SsdSpec,
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

/// The values that forward of [`Mamba`] saves.
struct MambaSaved {
    /// `None` if the projection is recomputed.
    projected: Option<Tensor>,
    y: Tensor, /* [T, H·P] */
    output: SavedOperand,
}

/// The values of the parameters between the projections.
struct Values {
    conv: Tensor,
    conv_bias: Option<Tensor>,
    a_log: Tensor,
    dt_bias: Tensor,
    d: Tensor,
}

impl Values {
    fn conv(&self) -> ConvWeights<'_> {
        ConvWeights { weight: &self.conv, bias: self.conv_bias.as_ref() }
    }

    fn ssd<'a>(&'a self, xbc: &'a Tensor, dt: &'a Tensor) -> SsdInput<'a> {
        SsdInput { xbc, dt, a_log: &self.a_log, dt_bias: &self.dt_bias, d: &self.d }
    }
}

impl Mamba {
    /// Creates the layer called `name` with the settings of `stream`. `shared_input` is the cast of an operand that another sublayer also reads.
    ///
    /// Errors if ranks cannot divide the groups evenly, or if they divide sequences.
    pub fn new(
        build: &mut Builder,
        name: &str,
        spec: MambaSpec,
        stream: &Stream,
        shared_input: Option<OperandCast>,
    ) -> Result<Mamba> {
        expect_whole_sequences(build, name, "Mamba-2 layer")?;
        expect_divisible(build, name, "groups of heads", spec.heads.groups)?;
        let (heads, [input, output]) = (spec.heads, projections(build, name, &spec, stream, shared_input)?);
        let tensor = |suffix: &str, shape: Vec<usize>| FolderTensor::new(format!("{name}.{suffix}"), shape);
        let of_conv = [heads.width(), heads.group_width(), heads.group_width()];
        let weight = tensor("conv1d.weight", vec![heads.xbc_width(), 1, spec.taps]);
        let weight = build.shards(weight, &of_conv, &[], Split::Output)?;
        let conv = Param::new(build, weight, Init::Normal(stream.std))?;
        let mut conv_bias = None;
        if spec.conv_bias {
            let bias = build.shards(tensor("conv1d.bias", vec![heads.xbc_width()]), &of_conv, &[], Split::Output)?;
            conv_bias = Some(Param::new(build, bias, Init::Zeros)?);
        }
        let mut vector = |suffix: &str, init| -> Result<Param> {
            let shard = build.shard(tensor(suffix, vec![heads.heads]), Split::Output)?;
            Ok(Param::new(build, vec![shard], init)?.in_sums(build))
        };
        // The largest rate of decay of a new layer is 16, as in the paper's code.
        let (a_log, dt_bias) = (vector("A_log", Init::LogUniform(16.0))?, vector("dt_bias", Init::Ones)?);
        let d = vector("D", Init::Ones)?;
        let mut gate = Gate::Alone;
        if let Some(order) = spec.norm {
            let shard = build.shard(tensor("norm.weight", vec![heads.width()]), Split::Output)?;
            let how = GatedNorm { size: heads.width() / heads.groups, order, eps: stream.norm.eps };
            gate = Gate::Norm(Box::new(Param::new(build, vec![shard], Init::Ones)?), how);
        }
        let ranks = build.place().ranks;
        let own = SsdSpec { heads: heads.heads / ranks, groups: heads.groups / ranks, ..heads };
        let runs: Vec<(usize, f32)> = sections(&own).into_iter().zip(spec.factors).collect();
        let input = input.multiplied(build.device, &runs)?;
        // One product changes the state, and one is the output.
        let recurrent =
            RecurrentSpec { channels: own.xbc_width(), taps: spec.taps, state: own.state_shape(), products: 2 };
        let number = build.description.add_recurrent(recurrent, build.block);
        Ok(Mamba { input, conv, conv_bias, a_log, dt_bias, d, gate, output, heads: own, number })
    }

    fn values(&self, context: &Context) -> Result<Values> {
        Ok(Values {
            conv: self.conv.read(context.loan)?,
            conv_bias: self.conv_bias.as_ref().map(|bias| bias.read(context.loan)).transpose()?,
            a_log: self.a_log.weights.value()?,
            dt_bias: self.dt_bias.weights.value()?,
            d: self.d.weights.value()?,
        })
    }

    /// Returns the widths of `z`, `xBC` and `dt`, and their first columns in the projection.
    fn columns(&self) -> [(usize, usize); 3] {
        let (width, xbc) = (self.heads.width(), self.heads.xbc_width());
        [(width, 0), (xbc, width), (self.heads.heads, width + xbc)]
    }

    fn take_apart(&self, projected: &Tensor) -> Result<Parts> {
        let take = |(width, first): (usize, usize)| -> Result<Tensor> {
            let mut part = Tensor::empty(projected.device(), &[projected.shape()[0], width], projected.dtype())?;
            let [from, to] = [first, 0].map(|first| ColumnRuns { first, step: 0 });
            move_columns(projected, from, &mut part, to, 1, width)?;
            Ok(part)
        };
        let [z, xbc, dt] = self.columns();
        Ok(Parts { z: take(z)?, xbc: take(xbc)?, dt: take(dt)? })
    }

    fn put_together(&self, Parts { z, xbc, dt }: &Parts) -> Result<Tensor> {
        let width = self.columns().iter().map(|(width, _)| width).sum();
        let mut projected = Tensor::empty(z.device(), &[z.shape()[0], width], z.dtype())?;
        for (part, (width, first)) in [z, xbc, dt].into_iter().zip(self.columns()) {
            let [from, to] = [0, first].map(|first| ColumnRuns { first, step: 0 });
            move_columns(part, from, &mut projected, to, 1, width)?;
        }
        Ok(projected)
    }

    /// Returns the output of the state space. In inference, reads and replaces the states of the sequences.
    fn mix(&self, parts: &Parts, context: &mut Context) -> Result<Tensor> {
        let values = self.values(context)?;
        let Some(pass) = &mut context.paged else {
            let segments = context.sequences.segments();
            let xbc = causal_conv(&parts.xbc, values.conv(), segments, None)?;
            return Ok(ssd(values.ssd(&xbc, &parts.dt), &self.heads, segments, None)?);
        };
        let (states, batch) = pass.states_of(self.number);
        let segments = batch.segments();
        let xbc = causal_conv(&parts.xbc, values.conv(), segments, Some(states.inputs_of(&batch)))?;
        Ok(ssd(values.ssd(&xbc, &parts.dt), &self.heads, segments, Some(states.matrices_of(&batch)))?)
    }

    /// Computes the layer up to the output projection, for an operand `x`. Returns the projection to save, the output of the state space, and the
    /// operand of the output projection.
    fn run(&self, x: View, context: &mut Context) -> Result<(Option<Tensor>, Tensor, Tensor)> {
        let projected = self.input.fprop(&x, None, context)?;
        drop(x);
        let parts = self.take_apart(&projected)?;
        let keeps = context.paged.is_none() && !context.recompute.qkv();
        let projected = keeps.then_some(projected);
        let y = self.mix(&parts, context)?;
        let gated = self.gate.forward(&y, &parts.z)?;
        Ok((projected, y, gated))
    }

    /// Returns the gradient by the projection from the gradient `dy` by the output of the state space, and `dz`. Adds to the gradients of the parameters
    /// between the projections.
    fn mix_backward(&mut self, dy: &Tensor, dz: Tensor, parts: &Parts, context: &Context) -> Result<Tensor> {
        let (values, segments) = (self.values(context)?, context.sequences.segments());
        let xbc = causal_conv(&parts.xbc, values.conv(), segments, None)?;
        let mut unread = [const { None }; 5];
        let [of_a, of_dt, of_d, of_conv, of_bias] = &mut unread;
        let parameters = SsdParameterGradients {
            a_log: self.a_log.grad_or_unread(of_a)?,
            dt_bias: self.dt_bias.grad_or_unread(of_dt)?,
            d: self.d.grad_or_unread(of_d)?,
        };
        let input = values.ssd(&xbc, &parts.dt);
        let d = ssd_backward(dy, input, &self.heads, segments, BoundaryStates::default(), parameters)?;
        drop(xbc);
        let dconv = self.conv.grad_or_unread(of_conv)?;
        let dbias = self.conv_bias.as_mut().map(|bias| bias.grad_or_unread(of_bias)).transpose()?;
        let dxbc = causal_conv_backward(&d.xbc, &parts.xbc, values.conv(), segments, dconv, dbias)?;
        self.put_together(&Parts { z: dz, xbc: dxbc, dt: d.dt })
    }

    /// Returns the parameters between the projections.
    fn inner(&self) -> impl Iterator<Item = &Param> {
        let own = [&self.a_log, &self.dt_bias, &self.d];
        std::iter::once(&self.conv).chain(&self.conv_bias).chain(own).chain(self.gate.weight())
    }
}

/// Creates the projections of the input and of the output.
fn projections(
    build: &mut Builder,
    name: &str,
    spec: &MambaSpec,
    stream: &Stream,
    shared_input: Option<OperandCast>,
) -> Result<[Linear; 2]> {
    let (sections, [of_input, of_output]) = (sections(&spec.heads), spec.biases);
    let [input, output] = ["in_proj", RECURRENT_OUTPUT].map(|suffix| format!("{name}.{suffix}"));
    let config = LinearConfig {
        name: &input,
        parts: &[(input.clone(), sections.iter().sum())],
        fused: &sections,
        replicas: &[],
        inputs: stream.channels,
        bias: of_input,
        std: stream.std,
        layout: FolderLayout::Same,
        split: Split::Output,
        shared_input,
        uncast: None,
    };
    let first = Linear::new(build, config)?;
    let config = LinearConfig {
        name: &output,
        parts: &[(output.clone(), stream.channels)],
        fused: &[],
        inputs: spec.heads.width(),
        bias: of_output,
        split: Split::Input,
        shared_input: None,
        ..config
    };
    Ok([first, Linear::new(build, config)?])
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

impl Sublayer for Mamba {
    fn input(&self) -> OperandCast {
        self.input.input()
    }

    fn gradient(&self) -> OperandCast {
        self.output.gradient()
    }

    fn forward(&self, x: View, residual: Option<&Tensor>, context: &mut Context) -> Result<(Tensor, SublayerSaved)> {
        let (projected, y, gated) = self.run(x, context)?;
        let (result, output) = self.output.forward(gated, residual, context)?;
        Ok((result, SublayerSaved::new(MambaSaved { projected, y, output })))
    }

    fn save(&self, x: View, context: &mut Context) -> Result<SublayerSaved> {
        let (projected, y, gated) = self.run(x, context)?;
        let output = self.output.save(gated, context)?;
        Ok(SublayerSaved::new(MambaSaved { projected, y, output }))
    }

    fn backward(
        &mut self,
        dy: ResidualGradient,
        saved: SublayerSaved,
        x: BranchOperand,
        other: Option<Tensor>,
        context: &mut Context,
    ) -> Result<Tensor> {
        let MambaSaved { projected, y, output } = saved.into();
        let (projected, columns) = match projected {
            Some(projected) => (projected, x.columns(context)?),
            None => {
                let Views { rows, columns } = x.views(context)?;
                (self.input.fprop(&rows, None, &mut context.recomputation())?, columns)
            }
        };
        let parts = self.take_apart(&projected)?;
        drop(projected);
        let gate = &self.gate;
        let gated = |_: &Context| gate.forward(&y, &parts.z);
        let dgated = self.output.backward_recomputing(dy, output, gated, context)?;
        let [dy, dz] = self.gate.backward(&dgated, &y, &parts.z)?;
        drop((y, dgated));
        let d = self.mix_backward(&dy, dz, &parts, context)?;
        drop((dy, parts));
        let d = self.input.cast_gradient(d.into(), context)?;
        self.input.backward_views(d, columns, other.as_ref(), context)
    }

    fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param)) {
        self.input.parameters(visit);
        self.inner().for_each(&mut *visit);
        self.output.parameters(visit);
    }

    fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        self.input.parameters_mut(visit);
        let own = [&mut self.a_log, &mut self.dt_bias, &mut self.d];
        let inner = std::iter::once(&mut self.conv).chain(&mut self.conv_bias).chain(own).chain(self.gate.weight_mut());
        inner.for_each(&mut *visit);
        self.output.parameters_mut(visit);
    }

    fn linears_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Linear)) {
        visit(&mut self.input);
        visit(&mut self.output);
    }
}
