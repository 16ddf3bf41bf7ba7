//! The frame of recurrent sublayers: projections of the operand, a mixer of tokens, a gate, and the projection of the output.
//!
//! A [`Mixer`] is a causal convolution and a recurrence over the tokens of a document, which begins with a state of zero. In inference, the states of a
//! sequence are in a slot (`ottava_recipe::recurrent`).
//!
//! Ranks that divide tensors divide the heads of a mixer. Ranks that divide sequences exchange tokens for heads before the convolution, and heads for
//! tokens after the recurrence, so a mixer computes all tokens of some heads with the parameters of these heads ([`MixerHeads`]). The projections and
//! the gate compute all heads of the rank's tokens.

mod conv;

use super::cast::{OperandCast, SavedOperand};
use super::exchange::{HeadSections, OwnRows, expect_divisible, expect_divisible_or_sent};
use super::sublayer::{BranchOperand, Sublayer, SublayerSaved};
use super::{Adaptable, Linear, LinearConfig, RECURRENT_OUTPUT, Stream};
pub(super) use conv::{Conv, ConvValues};
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_recipe::layer_ranks::ShardPlace;
use ottava_recipe::operand::{ResidualGradient, View, Views};
use ottava_recipe::param::{Builder, FolderLayout, FolderTensor, Init, Param, Split};
use ottava_tensor::Tensor;

/// The parts of a recurrent sublayer between its operand and the projection of its output.
pub(super) trait Mixer: 'static {
    /// The results of the projections, or the gradients by them. What the gate reads has all heads of this rank's tokens, and the rest has all tokens of
    /// this rank's heads.
    type Projected: 'static;

    /// Returns the cast of the operand.
    fn input(&self) -> OperandCast;

    /// Projects an operand `x` of [`Mixer::input`].
    fn project(&self, x: &View, context: &mut Context) -> Result<Self::Projected>;

    /// Returns the output of the recurrence for this rank's tokens, `[T, H·P]`. In inference, reads and replaces the states of the sequences.
    fn mix(&self, projected: &Self::Projected, context: &mut Context) -> Result<Tensor>;

    /// Returns the gated output `o` of the recurrence.
    fn gate(&self, o: &Tensor, projected: &Self::Projected) -> Result<Tensor>;

    /// Returns the gradients by `o` and by what [`Mixer::gate`] reads of the projections, from the gradient `d` by the gated output. Adds to the gradients
    /// of the parameters.
    fn gate_backward(&mut self, d: &Tensor, o: &Tensor, projected: &Self::Projected) -> Result<[Tensor; 2]>;

    /// Returns the gradients by the projections from the gradient `d_o` by [`Mixer::mix`], and the gradient `dz` by what the gate reads. Adds to the
    /// gradients of the parameters.
    fn mix_backward(
        &mut self,
        d_o: Tensor,
        dz: Tensor,
        projected: Self::Projected,
        context: &Context,
    ) -> Result<Self::Projected>;

    /// Returns the gradient by the operand, plus `other` if given, from the gradients `d` by the projections. `x` is the view of the operand that wgrad
    /// reads.
    fn project_backward(
        &mut self,
        d: Self::Projected,
        x: &View,
        other: Option<Tensor>,
        context: &mut Context,
    ) -> Result<Tensor>;

    /// Calls `visit` for each parameter, always in the same order.
    fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param));

    /// Calls `visit` for each parameter mutably, in the order of [`Mixer::parameters`].
    fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param));

    /// Calls `visit` for each projection.
    fn linears_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut dyn Adaptable));
}

/// `y = out_proj(gate(mix(project(x))))`.
pub(super) struct Recurrent<M> {
    mixer: M,
    output: Linear, /* [C, H·P] */
}

/// The values that forward of [`Recurrent`] saves.
struct RecurrentSaved<P> {
    /// `None` if the projections are recomputed.
    projected: Option<P>,
    o: Tensor, /* [T, H·P] */
    output: SavedOperand,
}

impl<M: Mixer> Recurrent<M> {
    pub fn new(mixer: M, output: Linear) -> Recurrent<M> {
        Recurrent { mixer, output }
    }

    /// Computes the layer up to the output projection, for an operand `x`. Returns the projections to save, the output of the recurrence, and the operand
    /// of the output projection.
    fn run(&self, x: View, context: &mut Context) -> Result<(Option<M::Projected>, Tensor, Tensor)> {
        let projected = self.mixer.project(&x, context)?;
        drop(x);
        let o = self.mixer.mix(&projected, context)?;
        let gated = self.mixer.gate(&o, &projected)?;
        let keeps = context.paged.is_none() && !context.recompute.qkv();
        Ok((keeps.then_some(projected), o, gated))
    }
}

impl<M: Mixer> Sublayer for Recurrent<M> {
    fn input(&self) -> OperandCast {
        self.mixer.input()
    }

    fn gradient(&self) -> OperandCast {
        self.output.gradient()
    }

    fn forward(&self, x: View, residual: Option<&Tensor>, context: &mut Context) -> Result<(Tensor, SublayerSaved)> {
        let (projected, o, gated) = self.run(x, context)?;
        let (y, output) = self.output.forward(gated, residual, context)?;
        Ok((y, SublayerSaved::new(RecurrentSaved { projected, o, output })))
    }

    fn save(&self, x: View, context: &mut Context) -> Result<SublayerSaved> {
        let (projected, o, gated) = self.run(x, context)?;
        let output = self.output.save(gated, context)?;
        Ok(SublayerSaved::new(RecurrentSaved { projected, o, output }))
    }

    fn backward(
        &mut self,
        dy: ResidualGradient,
        saved: SublayerSaved,
        x: BranchOperand,
        other: Option<Tensor>,
        context: &mut Context,
    ) -> Result<Tensor> {
        let RecurrentSaved::<M::Projected> { projected, o, output } = saved.into();
        let (projected, columns) = match projected {
            Some(projected) => (projected, x.columns(context)?),
            None => {
                let Views { rows, columns } = x.views(context)?;
                (self.mixer.project(&rows, &mut context.recomputation())?, columns)
            }
        };
        let mixer = &self.mixer;
        let gated = |_: &Context| mixer.gate(&o, &projected);
        let dgated = self.output.backward_recomputing(dy, output, gated, context)?;
        let [d_o, dz] = self.mixer.gate_backward(&dgated, &o, &projected)?;
        drop((o, dgated));
        let d = self.mixer.mix_backward(d_o, dz, projected, context)?;
        self.mixer.project_backward(d, &columns, other, context)
    }

    fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param)) {
        self.mixer.parameters(visit);
        self.output.parameters(visit);
    }

    fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        self.mixer.parameters_mut(visit);
        self.output.parameters_mut(visit);
    }

    fn linears_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut dyn Adaptable)) {
        self.mixer.linears_mut(visit);
        visit(&mut self.output);
    }
}

/// Creates the projection of the output, from `inputs` channels of the layer called `name`.
pub(super) fn output_projection(
    build: &mut Builder,
    name: &str,
    inputs: usize,
    bias: bool,
    stream: &Stream,
) -> Result<Linear> {
    let name = &format!("{name}.{RECURRENT_OUTPUT}");
    let config = LinearConfig {
        name,
        parts: &[(name.clone(), stream.channels)],
        fused: &[],
        replicas: &[],
        inputs,
        bias,
        std: stream.std,
        layout: FolderLayout::Same,
        split: Split::Input,
        shared_input: None,
        uncast: None,
    };
    Linear::new(build, config)
}

/// Creates a parameter of the layer called `layer` with a value for each of `heads` heads, in the type of sums.
pub(super) fn head_vector(build: &mut Builder, layer: &str, suffix: &str, heads: usize, init: Init) -> Result<Param> {
    let shard = build.shard(FolderTensor::new(format!("{layer}.{suffix}"), vec![heads]), Split::Output)?;
    Ok(Param::new(build, vec![shard], init)?.in_sums(build))
}

/// The heads of a mixer on this rank, if no ranks divide sequences: how ranks that do divide them by heads.
pub(super) struct MixerHeads {
    /// The name of the layer, for error messages.
    pub name: String,
    /// The numbers of heads, and the channels of a head, of the three sections of the convolution's channels.
    pub channels: [(usize, usize); 3],
    /// The number of heads of the output.
    pub heads: usize,
    /// The channels of a head of the output.
    pub width: usize,
}

impl MixerHeads {
    /// Errors unless ranks can divide `heads` heads evenly, and divide or repeat the heads `what` that they share. `shared` is their number.
    pub fn check(build: &Builder, name: &str, (what, shared): (&str, usize), (of, heads): (&str, usize)) -> Result<()> {
        expect_divisible_or_sent(build, name, what, shared)?;
        expect_divisible(build, name, of, heads)
    }

    fn channel_sections(&self, place: ShardPlace) -> HeadSections<3> {
        HeadSections::new(self.channels, place)
    }

    fn head_sections(&self, place: ShardPlace) -> HeadSections<1> {
        HeadSections::new([(self.heads, 1)], place)
    }

    fn output_sections(&self, place: ShardPlace) -> HeadSections<1> {
        HeadSections::new([(self.heads, self.width)], place)
    }

    /// Returns the channels of the convolution of all tokens for this rank's heads, from all channels of this rank's tokens.
    pub fn exchange_channels(&self, x: Tensor, context: &Context) -> Result<Tensor> {
        self.channel_sections(context.sequences.place).heads_for_tokens(&self.name, x, context)
    }

    /// Returns the gradient by the input of [`MixerHeads::exchange_channels`].
    pub fn exchange_channels_backward(&self, dx: Tensor, context: &Context) -> Result<Tensor> {
        self.channel_sections(context.sequences.place).tokens_for_heads(&self.name, dx, context)
    }

    /// Returns a value for each of this rank's heads of all tokens, from the values of all heads of this rank's tokens.
    pub fn exchange_heads(&self, x: Tensor, context: &Context) -> Result<Tensor> {
        self.head_sections(context.sequences.place).heads_for_tokens(&self.name, x, context)
    }

    /// Returns the gradient by the input of [`MixerHeads::exchange_heads`].
    pub fn exchange_heads_backward(&self, dx: Tensor, context: &Context) -> Result<Tensor> {
        self.head_sections(context.sequences.place).tokens_for_heads(&self.name, dx, context)
    }

    /// Returns the output of all heads for this rank's tokens, from the output of this rank's heads for all tokens.
    pub fn exchange_output(&self, o: Tensor, context: &Context) -> Result<Tensor> {
        self.output_sections(context.sequences.place).tokens_for_heads(&self.name, o, context)
    }

    /// Returns the gradient by the input of [`MixerHeads::exchange_output`].
    pub fn exchange_output_backward(&self, d_o: Tensor, context: &Context) -> Result<Tensor> {
        self.output_sections(context.sequences.place).heads_for_tokens(&self.name, d_o, context)
    }

    /// Returns the values of this rank's heads of a [`head_vector`].
    pub fn own(&self, vector: &Param, context: &Context) -> Result<Tensor> {
        self.head_sections(context.sequences.place).own_rows(vector.weights.value()?)
    }

    /// Returns the gradient of a [`head_vector`] for this rank's heads, or zeros in `unread` if it is frozen.
    pub fn own_gradient<'a>(
        &self,
        vector: &'a mut Param,
        unread: &'a mut Option<Tensor>,
        context: &Context,
    ) -> Result<OwnRows<'a>> {
        self.head_sections(context.sequences.place).lend(vector.grad_or_unread(unread)?)
    }
}
