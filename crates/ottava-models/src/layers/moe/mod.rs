//! A mixture of experts: a router chooses some MLPs for each token. A shared MLP may compute all tokens.
//!
//! Rows of tokens are permuted so that the rows of an expert are adjacent. One grouped product computes all experts. No token is
//! dropped: buffers have room for any choices.
//!
//! `MixtureOfExperts` is a sublayer that reads the value of its operand. `Router` computes logits in F32. The op `route` computes the choices. The op
//! `slots` computes where the rows of each expert are, as `Slots` with `Groups`. The counts stay on the device. `gather_to` permutes rows of tokens
//! to rows of experts, and `combine` permutes them back; each is backward of the other. `Experts` multiplies the rows with two `GroupedLinear`s. The
//! weight of a `GroupedLinear` stacks the matrices of all experts, so `Param`, optimizers, slices and checkpoints see one matrix of many shards.
//! `add_grouped_bias` adds the bias of each expert to its rows. A shared expert with a gate is a mixture of one expert. The `Recorder` of casts keeps
//! the sums of choices, as it keeps statistics.

mod adapter;
mod dispatch;
mod experts;
mod input;
mod latent;
mod linear;
mod probe;
mod router;
mod scales;

use super::cast::{CastInput, OperandCast, SavedOperand};
use super::sublayer::{BranchOperand, Sublayer, SublayerSaved};
use super::{Adaptable, ExpertStacks, Mlp, MlpSpec, Names, Stream};
pub use adapter::GroupedAdapter;
use dispatch::{Dispatch, Dispatched, Tokens};
use experts::{ExpertAdapters, Experts, ExpertsLayout, ExpertsSaved};
pub use input::ExpertInput;
use input::{InputLayers, InputSaved};
use latent::UpSaved;
pub use linear::GroupedLinear;
use ottava_common::error::{Error, Result};
use ottava_recipe::ExpertCounts;
use ottava_recipe::context::Context;
use ottava_recipe::layer_ranks::Arriving;
use ottava_recipe::lora::RouterParameter;
use ottava_recipe::operand::{ResidualGradient, View};
use ottava_recipe::param::{Builder, FolderLayout, FolderTensor, Param, StackOrder};
use ottava_tensor::Tensor;
use ottava_tensor::ops::{Activation, RouterScores, Routing, SavedActivation};
use router::{Routed, RouterConfig};
pub use router::{Router, RouterLossFactors};
pub use scales::RouterScales;

/// A mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertsSpec {
    /// The number of experts `E` that a router chooses from.
    pub count: usize,
    /// The width `F` of the activation of an expert.
    pub hidden: usize,
    /// The activation of all MLPs.
    pub activation: Activation,
    /// The rule by which routers choose.
    pub routing: Routing,
    /// The name of the router in the mixture.
    pub router: &'static str,
    /// Whether the router adds a bias to logits, and the linears of experts add biases to their outputs.
    pub biases: bool,
    /// The tensors in which a folder stacks the matrices of all experts of a layer. `None` if a folder has tensors of each expert.
    pub stacks: Option<ExpertStacks>,
    /// The order of the elements of stacked matrices in the memory of transformers, by which PEFT stores adapters of experts.
    pub adapter_order: StackOrder,
    /// Whether PEFT translates names of linears of experts, and the name of the router, to names of parameters.
    pub adapters_by_name: bool,
    /// Whether the weight of a choice multiplies the input of the expert instead of its output.
    pub weighs_inputs: bool,
    /// The vector that the router adds to scores for the choice. `None` without such a vector.
    pub bias: Option<ChoiceBias>,
    /// The MLP that all tokens share, if the mixture has one.
    pub shared: Option<SharedExpert>,
    /// What the routed experts read.
    pub input: ExpertInput,
    /// The learned scales of the router, if it has them.
    pub scales: Option<RouterScales>,
    /// Whether the tensors of the mixture are in the block, beside an MLP.
    pub is_in_block: bool,
    /// The factors of the router's losses in training.
    pub losses: RouterLossFactors,
}

impl ExpertsSpec {
    /// Returns the settings of most families: no biases, no shared expert, and a tensor for each linear of an expert.
    pub fn new(count: usize, hidden: usize, activation: Activation, routing: Routing) -> ExpertsSpec {
        let (router, losses) = ("gate", RouterLossFactors::default());
        ExpertsSpec {
            count,
            hidden,
            activation,
            routing,
            router,
            biases: false,
            stacks: None,
            adapter_order: StackOrder::OutputsFirst,
            adapters_by_name: false,
            weighs_inputs: false,
            bias: None,
            shared: None,
            input: ExpertInput::Tokens,
            scales: None,
            is_in_block: false,
            losses,
        }
    }

    /// Returns the stacks of the mixture called `mixture` in a folder whose tensors have the shapes that `shape` returns. Returns the own stacks if the
    /// folder does not have these experts.
    pub(crate) fn stacks_of(
        &self,
        mixture: &str,
        names: &Names,
        channels: usize,
        shape: impl Fn(&str) -> Option<Vec<usize>>,
    ) -> Option<ExpertStacks> {
        let usual = self.stacks.unwrap_or(ExpertStacks::new(StackOrder::OutputsFirst));
        let stored = usual.names.map(|name| shape(&format!("{mixture}.{name}")));
        if stored.iter().all(Option::is_none) {
            let single = shape(&format!("{mixture}.experts.0.{}.weight", names.down));
            return self.stacks.filter(|_| single.is_none());
        }
        let channels = self.input.width(channels);
        let widths = [[self.hidden * self.activation.inputs(), channels], [channels, self.hidden]];
        let has = |order| {
            let shapes = widths.map(|[outputs, inputs]| match order {
                StackOrder::OutputsFirst => vec![self.count, outputs, inputs],
                StackOrder::InputsFirst | StackOrder::Interleaved => vec![self.count, inputs, outputs],
            });
            stored.iter().zip(shapes).all(|(stored, shape)| *stored == Some(shape))
        };
        // A square matrix has the same shape in both orders, and the other matrix of the experts does not.
        let other = usual.order.exchanged().filter(|other| !has(usual.order) && has(*other));
        Some(ExpertStacks { order: other.unwrap_or(usual.order), ..usual })
    }
}

/// The vector `[E]` that a router adds to scores for the choice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChoiceBias {
    /// The name of the vector in the mixture.
    pub name: &'static str,
    /// The layout of the vector in a folder.
    pub layout: FolderLayout,
}

impl ChoiceBias {
    /// Returns a vector that a folder stores as a vector.
    pub const fn vector(name: &'static str) -> ChoiceBias {
        ChoiceBias { name, layout: FolderLayout::Same }
    }
}

/// An MLP that all tokens share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SharedExpert {
    /// The name of the MLP in the mixture, or in the block.
    pub name: &'static str,
    /// Whether the MLP is a part of the block, beside the mixture.
    pub is_in_block: bool,
    /// The width of the activation.
    pub hidden: usize,
    /// The name of a vector. The sigmoid of its product with a token multiplies the output. `None` for a factor of 1.
    pub gate: Option<&'static str>,
}

/// `y = Σ_k w_k · expert[e_k](x) + shared(x)`, or `y = Σ_k expert[e_k](w_k · x) + shared(x)`.
pub struct MixtureOfExperts {
    /// The mixture of routed experts. A shared expert with a gate is a second mixture, of one expert.
    mixtures: Vec<Mixture>,
    shared: Option<Mlp>,
}

/// A router and its experts.
struct Mixture {
    router: Router,
    dispatch: Dispatch,
    experts: Experts,
    input: InputLayers,
}

/// The values that forward of a [`Mixture`] saves.
struct MixtureSaved {
    routed: Routed,
    choices: Dispatched,
    experts: ExpertsSaved,
    input: InputSaved,
    /// What the linear after the experts saved, if the experts read a latent.
    up: Option<UpSaved>,
}

/// The values that forward of [`MixtureOfExperts`] saves.
struct MixturesSaved {
    mixtures: Vec<MixtureSaved>,
    shared: Option<(SavedOperand, SublayerSaved)>,
}

impl MixtureOfExperts {
    /// Creates the mixture called `name` with the settings of `stream`.
    ///
    /// Errors if the routing does not fit the experts, or if ranks cannot divide the experts.
    pub fn new(build: &mut Builder, name: &str, spec: ExpertsSpec, stream: &Stream) -> Result<MixtureOfExperts> {
        let Stream { channels, names, std, .. } = *stream;
        let ExpertsSpec { count, hidden, activation, routing, router, biases, stacks, bias, shared, .. } = spec;
        let ExpertsSpec { losses, input, scales, is_in_block, adapter_order: order, adapters_by_name: by_name, .. } =
            spec;
        if let Some(problem) = routing.problem(count) {
            return Err(Error::Model(format!("{name}: {problem}")));
        }
        let states = |prefix: String| [names.gate_up_stack, names.down].map(|stack| format!("{prefix}.{stack}"));
        let layout = |dispatch: &Dispatch, counts, hidden, prefix, states| ExpertsLayout {
            counts,
            own: dispatch.own(),
            channels,
            hidden,
            activation,
            prefix,
            biases,
            stacks,
            names,
            states,
            std,
            adapters: None,
        };
        // PEFT translates the name `gate` alone.
        let adapted =
            RouterParameter { name: format!("{name}.{router}"), by_name: by_name && router.starts_with("gate") };
        let config = RouterConfig {
            name: &adapted.name,
            adapted: Some(&adapted),
            experts: count,
            channels,
            logit_bias: biases,
            bias: bias.map(|ChoiceBias { name: of_bias, layout }| FolderTensor {
                layout,
                ..FolderTensor::new(format!("{name}.{of_bias}"), vec![count])
            }),
            routing,
            losses,
            std,
            scales: scales.map(|scales| (name, scales, stream.norm)),
        };
        let router = Router::new(build, config)?;
        let (prefix, all) = (|e: usize| format!("{name}.experts.{e}"), format!("{name}.experts"));
        let adapters = ExpertAdapters { module: &all, order, by_name };
        let dispatch = Dispatch::new(build, &all, count)?.weighing_inputs(spec.weighs_inputs);
        let counts = ExpertCounts { count, chosen: routing.chosen };
        let of_routed = ExpertsLayout {
            channels: input.width(channels),
            adapters: Some(adapters),
            ..layout(&dispatch, counts, hidden, &prefix, states(all.clone()))
        };
        let block = if is_in_block { name } else { name.rsplit_once('.').map_or(name, |(block, _)| block) };
        let input = InputLayers::new(build, [name, block], input, stream)?;
        let mut mixtures = vec![Mixture { router, experts: Experts::new(build, of_routed)?, dispatch, input }];
        let mut plain = None;
        if let Some(SharedExpert { name: of_shared, is_in_block, hidden, gate }) = shared {
            let block = name.strip_suffix(names.mlp).filter(|_| is_in_block);
            let of_shared = block.map_or(format!("{name}.{of_shared}"), |block| format!("{block}{of_shared}"));
            match gate {
                None => {
                    let spec = MlpSpec::new(hidden, activation);
                    plain = Some(Mlp::new(build, &of_shared, spec, stream, None)?);
                }
                Some(gate) => {
                    let sigmoid =
                        Routing { chosen: 1, scores: RouterScores::Sigmoid, normalise: None, scale: 1.0, groups: None };
                    let config = RouterConfig {
                        name: &format!("{name}.{gate}"),
                        adapted: None,
                        experts: 1,
                        channels,
                        logit_bias: false,
                        bias: None,
                        routing: sigmoid,
                        scales: None,
                        losses: RouterLossFactors::default(),
                        std,
                    };
                    let router = Router::new(build, config)?;
                    let prefix = |_| of_shared.clone();
                    let dispatch = Dispatch::undivided(&of_shared, 1);
                    let counts = ExpertCounts { count: 1, chosen: 1 };
                    let one = ExpertsLayout {
                        stacks: None,
                        ..layout(&dispatch, counts, hidden, &prefix, states(of_shared.clone()))
                    };
                    let (experts, input) = (Experts::new(build, one)?, InputLayers::None);
                    mixtures.push(Mixture { router, experts, dispatch, input });
                }
            }
        }
        Ok(MixtureOfExperts { mixtures, shared: plain })
    }

    /// Casts the operand for the shared MLP.
    fn cast_for(shared: &Mlp, x: &Tensor, context: &mut Context) -> Result<CastInput> {
        shared.input().cast_input(x.clone(), context.operand_copies(), context)
    }
}

impl Mixture {
    /// Routes the tokens `x` `[T, C]`. Returns what is saved except the values of the experts, and the tokens on their way to the experts.
    fn route(&self, x: &Tensor, context: &mut Context) -> Result<(Tokens, InputSaved, Routed, Dispatched)> {
        let input = self.input.forward(x, context)?;
        let tokens = self.experts.send(input.read(x), &self.dispatch, context)?;
        let routed = self.router.forward(x, context)?;
        let choices = self.dispatch.choices(&routed, context)?;
        self.router.record(&routed, &choices.slots.groups, context)?;
        Ok((tokens, input, routed, choices))
    }

    /// Returns the sum of the chosen experts of the tokens `x`, plus `residual` if given, and the values for backward.
    fn forward(&self, x: &Tensor, residual: Option<&Tensor>, context: &mut Context) -> Result<(Tensor, MixtureSaved)> {
        let (tokens, input, routed, choices) = self.route(x, context)?;
        let (rows, experts) = self.experts.forward(tokens, &self.dispatch, &choices, context)?;
        let (dispatch, weights) = (&self.dispatch, self.dispatch.output_weights(&choices));
        let (y, up) = self.input.output(residual, context, |residual, context| {
            dispatch.combine(&rows, &choices, weights, residual, context)
        })?;
        Ok((y, MixtureSaved { routed, choices, experts, input, up }))
    }

    /// Returns the values that [`Mixture::forward`] saves. The output is computed only if a linear reads it.
    fn save(&self, x: &Tensor, context: &mut Context) -> Result<MixtureSaved> {
        if self.input.reads_sum() {
            return Ok(self.forward(x, None, context)?.1);
        }
        let (tokens, input, routed, choices) = self.route(x, context)?;
        let experts = self.experts.save(tokens, &self.dispatch, &choices, context)?;
        Ok(MixtureSaved { routed, choices, experts, input, up: None })
    }

    /// Starts to send the gradient by the sum of the experts, from the gradient `dy` by the output.
    fn start_backward(
        &mut self,
        dy: &Tensor,
        saved: MixtureSaved,
        context: &mut Context,
    ) -> Result<(Arriving, SavedOfRows)> {
        let MixtureSaved { routed, choices, experts, input, up } = saved;
        let dsum = self.input.output_backward(dy, up, context)?;
        Ok((self.dispatch.start_gather(&dsum, context)?, SavedOfRows { routed, choices, experts, input }))
    }

    /// Returns the gradient by the tokens `x`, plus `other` if given. Adds to the gradients of the parameters.
    fn backward(
        &mut self,
        dy: Arriving,
        saved: SavedOfRows,
        x: &Tensor,
        other: Option<&Tensor>,
        context: &mut Context,
    ) -> Result<Tensor> {
        let Mixture { router, dispatch, experts, input } = self;
        let SavedOfRows { routed, choices, experts: saved, input: of_input } = saved;
        let of_experts = of_input.read(x);
        let (drows, dots) = experts.backward(dy, of_experts, dispatch, &choices, saved, context)?;
        let dweights = dispatch.weight_gradient([&drows, &dots], of_experts, &choices, context)?;
        let through_router = router.backward(&dweights, routed, x, other, context)?;
        let weights = dispatch.input_weights(&choices);
        input.backward(of_input, x, &through_router, context, |addend, context| {
            dispatch.combine(&drows, &choices, weights, addend, context)
        })
    }
}

/// The values for backward of a [`Mixture`] once the gradient by the sum of its experts is known.
struct SavedOfRows {
    routed: Routed,
    choices: Dispatched,
    experts: ExpertsSaved,
    input: InputSaved,
}

impl Sublayer for MixtureOfExperts {
    /// Returns no cast: routers and experts read the value, and experts cast the rows that they gather.
    fn input(&self) -> OperandCast {
        OperandCast::NONE
    }

    fn gradient(&self) -> OperandCast {
        OperandCast::NONE
    }

    fn forward(&self, x: View, residual: Option<&Tensor>, context: &mut Context) -> Result<(Tensor, SublayerSaved)> {
        let x = x.value()?;
        let (mut sum, mut saved) = (residual.cloned(), MixturesSaved { mixtures: Vec::new(), shared: None });
        for mixture in &self.mixtures {
            let (y, of_mixture) = mixture.forward(x, sum.as_ref(), context)?;
            sum = Some(y);
            saved.mixtures.push(of_mixture);
        }
        if let Some(shared) = &self.shared {
            let CastInput { rows, saved: operand } = MixtureOfExperts::cast_for(shared, x, context)?;
            let (y, of_shared) = shared.forward(rows, sum.as_ref(), context)?;
            sum = Some(y);
            saved.shared = Some((operand, of_shared));
        }
        Ok((sum.expect("a mixture has experts"), SublayerSaved::new(saved)))
    }

    fn save(&self, x: View, context: &mut Context) -> Result<SublayerSaved> {
        let (x, mut saved) = (x.value()?, MixturesSaved { mixtures: Vec::new(), shared: None });
        for mixture in &self.mixtures {
            saved.mixtures.push(mixture.save(x, context)?);
        }
        if let Some(shared) = &self.shared {
            let CastInput { rows, saved: operand } = MixtureOfExperts::cast_for(shared, x, context)?;
            saved.shared = Some((operand, shared.save(rows, context)?));
        }
        Ok(SublayerSaved::new(saved))
    }

    fn backward(
        &mut self,
        dy: ResidualGradient,
        saved: SublayerSaved,
        x: BranchOperand,
        other: Option<Tensor>,
        context: &mut Context,
    ) -> Result<Tensor> {
        let MixturesSaved { mixtures, shared } = saved.into();
        let x = x.columns(context)?;
        let (x, mut dx) = (x.value()?, other);
        // Gathering the output gradients overlaps with backward of shared MLPs.
        let mut arriving = Vec::with_capacity(mixtures.len());
        for (mixture, saved) in self.mixtures.iter_mut().zip(mixtures) {
            arriving.push(mixture.start_backward(&dy.value, saved, context)?);
        }
        if let (Some(mlp), Some((operand, saved))) = (&mut self.shared, shared) {
            let operand = BranchOperand::new(None, Some(SavedActivation::Exact(x.clone())), mlp.input(), operand);
            dx = Some(mlp.backward(dy.value.clone().into(), saved, operand, dx, context)?);
        }
        for (mixture, (dy, saved)) in self.mixtures.iter_mut().zip(arriving).rev() {
            dx = Some(mixture.backward(dy, saved, x, dx.as_ref(), context)?);
        }
        Ok(dx.expect("a mixture has experts"))
    }

    fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param)) {
        for Mixture { router, experts, input, .. } in &self.mixtures {
            router.parameters(visit);
            experts.parameters().for_each(&mut *visit);
            input.parameters(visit);
        }
        self.shared.iter().for_each(|shared| shared.parameters(visit));
    }

    fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        for Mixture { router, experts, input, .. } in &mut self.mixtures {
            router.parameters_mut(visit);
            experts.parameters_mut().for_each(&mut *visit);
            input.parameters_mut(visit);
        }
        self.shared.iter_mut().for_each(|shared| shared.parameters_mut(visit));
    }

    fn linears_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut dyn Adaptable)) {
        for Mixture { router, experts, input, .. } in &mut self.mixtures {
            visit(router);
            experts.linears_mut().for_each(|linear| visit(linear));
            input.linears_mut().for_each(|linear| visit(linear));
        }
        self.shared.iter_mut().for_each(|shared| shared.linears_mut(visit));
    }
}
