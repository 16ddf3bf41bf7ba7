//! The experts of a mixture: MLPs. Each MLP computes the rows of the tokens that have chosen it.

use super::adapter::Rows;
use super::dispatch::{Dispatch, Dispatched, Tokens};
use super::linear::{Adapted, GroupedLinear, GroupedLinearConfig};
use crate::layers::cast::{CastInput, SavedOperand, copies_without_transpose, plain};
use crate::layers::{EXPERT_PARAMETERS, ExpertStacks, Names};
use ottava_common::error::Result;
use ottava_recipe::ExpertCounts;
use ottava_recipe::context::Context;
use ottava_recipe::layer_ranks::Arriving;
use ottava_recipe::lora::ExpertParameter;
use ottava_recipe::operand::{View, Views};
use ottava_recipe::param::{Builder, Param, StackOrder};
use ottava_tensor::Tensor;
use ottava_tensor::ops::{
    Activation, Output, SavedActivation, activation_backward_to, activation_compressing, activation_dots,
    activation_to, add, gather_to,
};
use std::ops::Range;

/// `row(t, k) = down[e_k](activation(gate_up[e_k](x[t])))` for each choice `e_k` of a token `t`.
pub struct Experts {
    activation: Activation,
    gate_up: GroupedLinear, /* [E · 2F, C], or [E · F, C] without a gate */
    down: GroupedLinear,    /* [E · C, F] */
}

/// The sizes and names of experts.
pub struct ExpertsLayout<'a> {
    /// The numbers of experts and of choices per token.
    pub counts: ExpertCounts,
    /// The experts of this rank.
    pub own: Range<usize>,
    /// The width `C` of the residual stream.
    pub channels: usize,
    /// The width `F` of the activation of an expert.
    pub hidden: usize,
    /// The activation between the linears.
    pub activation: Activation,
    /// Returns the prefix of the names of an expert's tensors.
    pub prefix: &'a dyn Fn(usize) -> String,
    /// Whether the linears have biases.
    pub biases: bool,
    /// The tensors in which a folder stacks the matrices of all experts.
    pub stacks: Option<ExpertStacks>,
    /// The names of an expert's linears.
    pub names: &'static Names,
    /// The names of the two linears of all experts in the scaling state.
    pub states: [String; 2],
    /// The standard deviation of initial weights.
    pub std: f32,
    /// How the experts have adapters. `None` if they cannot have adapters.
    pub adapters: Option<ExpertAdapters<'a>>,
}

/// How experts have adapters in PEFT.
#[derive(Clone, Copy)]
pub struct ExpertAdapters<'a> {
    /// The name of the module of all experts, such as `model.layers.0.mlp.experts`.
    pub module: &'a str,
    /// The order of the elements of the parameters in the memory of transformers.
    pub order: StackOrder,
    /// Whether PEFT translates names of linears of experts.
    pub by_name: bool,
}

impl ExpertAdapters<'_> {
    /// Returns the parameters of transformers with the matrices of the two linears. PEFT adapts the first one before the second one.
    fn parameters(&self, build: &Builder, names: &'static Names, experts: usize, gated: bool) -> Result<[Adapted; 2]> {
        let ExpertAdapters { module, order, by_name } = *self;
        let [with_gate, without_gate, second] = EXPERT_PARAMETERS;
        let first = if gated { with_gate } else { without_gate };
        let of = |name: &str, linears| ExpertParameter { name: format!("{module}.{name}"), linears, experts, by_name };
        let [first, second] = [of(first, names.gate_up), of(second, std::slice::from_ref(&names.down))];
        let is_inner = build.lora.map_or(Ok(None), |lora| lora.of_experts(&second))?.is_some();
        Ok([Adapted { parameter: first, order, is_inner }, Adapted { parameter: second, order, is_inner: false }])
    }
}

/// The values that forward of [`Experts`] saves.
pub struct ExpertsSaved {
    /// The gathered rows `[P, C]`.
    input: SavedOperand,
    hidden: SavedActivation, /* [P, 2F], or [P, F] without a gate */
    activated: SavedOperand,
}

impl Experts {
    /// Creates experts with weights from the builder.
    pub fn new(build: &mut Builder, layout: ExpertsLayout) -> Result<Experts> {
        let ExpertsLayout { counts, own, channels, hidden, activation, prefix, biases: bias, .. } = layout;
        let ExpertsLayout { stacks, names, states, std, adapters, .. } = layout;
        let adapted = adapters.map(|it| it.parameters(build, names, counts.count, activation.inputs() == 2));
        let [of_gate_up, of_down] = adapted.transpose()?.map_or([None, None], |it| it.map(Some));
        let of_each = |names: &[&str], rows: usize| -> Vec<(String, usize)> {
            let of =
                |e: usize| names.iter().map(move |name| (format!("{}.{name}", prefix(e)), rows)).collect::<Vec<_>>();
            (0..counts.count).flat_map(of).collect()
        };
        let stack = |which: usize| stacks.map(|ExpertStacks { names, order }| (names[which], order));
        let config = GroupedLinearConfig {
            name: &states[0],
            experts: counts,
            own: own.clone(),
            parts: of_each(names.gate_up, hidden * activation.inputs() / names.gate_up.len()),
            stack: stack(0),
            inputs: channels,
            bias,
            std,
            adapted: of_gate_up,
        };
        let gate_up = GroupedLinear::new(build, config)?;
        let parts = of_each(&[names.down], channels);
        let config = GroupedLinearConfig {
            name: &states[1],
            experts: counts,
            own,
            parts,
            stack: stack(1),
            inputs: hidden,
            bias,
            std,
            adapted: of_down,
        };
        Ok(Experts { activation, gate_up, down: GroupedLinear::new(build, config)? })
    }

    /// Starts to send the tokens `x` `[T, C]` of this rank to the experts of all ranks.
    pub fn send(&self, x: &Tensor, dispatch: &Dispatch, context: &mut Context) -> Result<Tokens> {
        let copies = self.gate_up.input_copies(context.operand_copies());
        dispatch.send(x, self.gate_up.input(), copies, context)
    }

    /// Returns the output rows `[P, C]` for the `choices` of the tokens, and the values for backward.
    pub fn forward(
        &self,
        tokens: Tokens,
        dispatch: &Dispatch,
        choices: &Dispatched,
        context: &mut Context,
    ) -> Result<(Tensor, ExpertsSaved)> {
        let (activated, saved) = self.activated(tokens, dispatch, choices, context)?;
        let mask = self.down.mask(dispatch, choices, context)?;
        let rows = Rows { groups: &choices.slots.groups, mask: mask.as_ref() };
        Ok((self.down.fprop(&activated, rows, context)?, saved))
    }

    /// Returns the values that [`Experts::forward`] saves, without computing its output.
    pub fn save(
        &self,
        tokens: Tokens,
        dispatch: &Dispatch,
        choices: &Dispatched,
        context: &mut Context,
    ) -> Result<ExpertsSaved> {
        Ok(self.activated(tokens, dispatch, choices, context)?.1)
    }

    /// Returns the operand of the second product, and the values for backward.
    fn activated(
        &self,
        tokens: Tokens,
        dispatch: &Dispatch,
        choices: &Dispatched,
        context: &mut Context,
    ) -> Result<(View, ExpertsSaved)> {
        let slots = &choices.slots;
        let copies = self.gate_up.input_copies(context.operand_copies());
        let CastInput { rows, saved: input } =
            dispatch.rows_of_tokens(tokens, choices, self.gate_up.input(), copies, context)?;
        let mask = self.gate_up.mask(dispatch, choices, context)?;
        let of_experts = Rows { groups: &slots.groups, mask: mask.as_ref() };
        let hidden = self.gate_up.fprop(&rows, of_experts, context)?;
        drop((rows, mask));
        let operand = self.down.input();
        // The backward kernel of the activation writes the transposed codes, so forward does not.
        let copies = self.down.input_copies(copies_without_transpose(context, &operand));
        let compresses = context.compresses();
        let (CastInput { rows, saved: activated }, compressed) = operand.produce_input(copies, context, |output| {
            let hidden = slots.groups.rows(&hidden);
            let (activated, hidden) = match compresses && !matches!(output, Output::Amax { .. }) {
                true => {
                    let (activated, hidden) = activation_compressing(self.activation, hidden, output)?;
                    (activated, Some(hidden))
                }
                false => (activation_to(self.activation, hidden, output)?, None),
            };
            Ok((operand.of_groups(activated, &slots.groups)?, hidden))
        })?;
        let hidden = compressed.map_or_else(|| SavedActivation::Exact(hidden), SavedActivation::Compressed);
        Ok((rows, ExpertsSaved { input, hidden, activated }))
    }

    /// Returns the gradient by the gathered rows, `[P, C]`, and the products `[P]` from which the gradient by the weights of outputs is computed.
    /// Adds to the gradients of the parameters. `dy` are the rows of [`Dispatch::start_gather`]. `x` `[T, C]` are the tokens of this rank.
    pub fn backward(
        &mut self,
        dy: Arriving,
        x: &Tensor,
        dispatch: &Dispatch,
        choices: &Dispatched,
        saved: ExpertsSaved,
        context: &mut Context,
    ) -> Result<(Tensor, Tensor)> {
        let ExpertsSaved { input, hidden, activated } = saved;
        let slots = &choices.slots;
        let (how, groups, weights) = (self.activation, &slots.groups, dispatch.output_weights(choices));
        // Gathering the tokens for wgrad overlaps with the products before wgrad.
        let (reader, reads_input) = (self.gate_up.input(), self.gate_up.reads_input());
        let input = match input.into_columns() {
            Ok(columns) => Ok(columns),
            Err(frozen) => Err(reads_input.then(|| dispatch.send_again(x, reader, frozen, context)).transpose()?),
        };
        let dy = dy.wait()?;
        // The output gradient is multiplied by the weights of outputs here, so all later gradients have these weights as a factor.
        let (Views { rows, columns: dz }, of_bias) =
            self.down.produce_gradient_and_dots(groups, context, |output| gather_to(&dy, slots, weights, output))?;
        drop(dy);
        let mask = self.down.mask(dispatch, choices, context)?;
        let of_down = Rows { groups, mask: mask.as_ref() };
        let dactivated = self.down.dgrad(&rows, of_down, context)?;
        drop(rows);
        let mut dots = activation_dots(how, groups.rows(&dactivated), &hidden)?;
        if let Some(of_bias) = of_bias {
            dots = add(&dots, &of_bias)?;
        }
        let operand = self.down.input();
        let (gate_up, trained) = (&mut self.gate_up, self.down.weight().is_trained());
        let (dhidden, activated) = match (activated.into_columns(), operand.fused(&context.casts)) {
            // The backward kernel of the activation reads `hidden`, so it can also write the transposed codes. This path always measures.
            (Err(frozen), Some(slot)) if trained && context.mode().measures() => {
                let (dhidden, codes) =
                    gate_up.produce_gradient_and_recast(slot, &frozen, groups, context, |output, activated| {
                        Ok(activation_backward_to(how, groups.rows(&dactivated), &hidden, output, activated)?)
                    })?;
                (dhidden, Ok(codes))
            }
            (activated, _) => {
                let dhidden = gate_up.produce_gradient(groups, context, |output| {
                    Ok(activation_backward_to(how, groups.rows(&dactivated), &hidden, output, None)?.0)
                })?;
                (dhidden, activated)
            }
        };
        drop(dactivated);
        let recast = |context: &mut Context| {
            activated.or_else(|frozen| {
                let activated = activation_to(how, groups.rows(&hidden.value()?), Output::Plain)?;
                operand.recast_columns(plain(operand.of_groups(activated, groups)?), &frozen, context)
            })
        };
        self.down.wgrad(&dz, recast, of_down, context)?;
        drop((dz, hidden, mask));
        let Views { rows, columns: dhidden } = dhidden;
        let mask = self.gate_up.mask(dispatch, choices, context)?;
        let of_gate_up = Rows { groups, mask: mask.as_ref() };
        let dgathered = self.gate_up.dgrad(&rows, of_gate_up, context)?;
        drop(rows);
        let gather = |context: &mut Context| match input {
            Ok(columns) => Ok(columns),
            Err(tokens) => {
                let tokens = tokens.expect("only wgrad of a weight or an adapter reads tokens");
                dispatch.columns_of_tokens(tokens, choices, reader, context)
            }
        };
        self.gate_up.wgrad(&dhidden, gather, of_gate_up, context)?;
        Ok((dgathered, dots))
    }

    /// Returns the linears mutably.
    pub fn linears_mut(&mut self) -> impl Iterator<Item = &mut GroupedLinear> {
        [&mut self.gate_up, &mut self.down].into_iter()
    }

    /// Returns the parameters of both linears.
    pub fn parameters(&self) -> impl Iterator<Item = &Param> {
        [&self.gate_up, &self.down].into_iter().flat_map(GroupedLinear::parameters)
    }

    /// Returns the parameters of both linears mutably.
    pub fn parameters_mut(&mut self) -> impl Iterator<Item = &mut Param> {
        [&mut self.gate_up, &mut self.down].into_iter().flat_map(GroupedLinear::parameters_mut)
    }
}
