//! Exchanges tokens with the experts of all ranks.
//!
//! The ranks of expert x tensor divide experts. Each rank has different tokens and different experts. All ranks gather the tokens of all ranks, and
//! each rank computes its experts for the tokens that have chosen them. The outputs of all experts for a rank's tokens are sent to this rank and
//! added. All buffers have fixed sizes that suffice for any choices, so the host never reads counts. With `R` ranks, each rank sends its tokens to
//! `R - 1` ranks. With many choices per token, few of these transfers are unnecessary: if tokens choose 8 of 128 experts at random, 0.3 % of the
//! tokens have chosen no expert of one of two ranks.
//!
//! Tokens are sent while the router computes. In backward they are sent again for wgrad, while the preceding products run.
//!
//! In inference each rank has all tokens. Nothing is gathered, and the sums of all ranks are added.

use super::router::Routed;
use crate::layers::cast::{CastInput, OperandCast, SavedOperand, plain};
use ottava_common::error::{Error, Result};
use ottava_recipe::context::Context;
use ottava_recipe::layer_ranks::{Arriving, ShardPlace};
use ottava_recipe::mode::Pass;
use ottava_recipe::operand::{FrozenScale, View};
use ottava_recipe::param::Builder;
use ottava_recipe::scaling::Slot;
use ottava_tensor::comm::Axis;
use ottava_tensor::ops::{
    CodeCopies, Output, Slots, combine, gather_quantized, gather_to, gathered_weight_gradient, join_columns, slots,
    weight_gradient,
};
use ottava_tensor::{Granularity, QuantizedTensor, Tensor};
use std::ops::Range;

/// The division of the experts of a mixture among ranks.
pub struct Dispatch {
    name: String,
    place: ShardPlace,
    experts: usize,
    /// Whether the weight of a choice multiplies the input of the expert instead of its output.
    weighs_inputs: bool,
}

/// The choices of the tokens that this rank's experts read. With `R` ranks, these are `R · T` tokens in the order of the ranks. In inference, these
/// are the `T` tokens that all ranks have.
pub struct Dispatched {
    /// The positions of the rows of this rank's experts.
    pub slots: Slots,
    /// The weights of the choices, `[R · T, K]`.
    pub weights: Tensor,
}

/// The tokens of all ranks, in the order of the ranks, on their way to the experts of this rank.
pub struct Tokens {
    /// The values or codes that are being gathered.
    arriving: Arriving,
    /// If codes are sent: the codes of this rank's tokens, and whether wgrad reads the transpose of the same codes.
    cast: Option<(QuantizedTensor, bool)>,
    /// The scale of the tokens' cast, if codes are sent.
    frozen: FrozenScale,
}

impl Dispatch {
    /// Creates the division of the `experts` of the mixture called `name`.
    ///
    /// Errors with [`Error::Config`] if the number of ranks does not divide the number of experts.
    pub fn new(build: &Builder, name: &str, experts: usize) -> Result<Dispatch> {
        let place = build.place_on(Axis::Expert);
        if !experts.is_multiple_of(place.ranks) {
            let what = match (place.ranks / build.place().ranks, build.place().ranks) {
                (_, 1) => "`parallel.expert`",
                (1, _) => "`parallel.tensor` (in inference --gpus or --ranks)",
                _ => "the product of `parallel.expert` and `parallel.tensor`",
            };
            return Err(Error::Config(format!(
                "{what} is {}, which does not divide the {experts} experts of `{name}`; set it to a divisor",
                place.ranks
            )));
        }
        Ok(Dispatch { name: name.to_string(), place, experts, weighs_inputs: false })
    }

    /// Creates a mixture without division: each rank has all of the `experts`.
    pub fn undivided(name: &str, experts: usize) -> Dispatch {
        Dispatch { name: name.to_string(), place: ShardPlace::ALONE, experts, weighs_inputs: false }
    }

    /// Returns the mixture whose weights of choices multiply inputs of experts if `weighs_inputs`, and else outputs.
    pub fn weighing_inputs(self, weighs_inputs: bool) -> Dispatch {
        Dispatch { weighs_inputs, ..self }
    }

    /// Returns the factors of the inputs of experts. `None` if the inputs have no factors.
    pub fn input_weights<'a>(&self, choices: &'a Dispatched) -> Option<&'a Tensor> {
        self.weighs_inputs.then_some(&choices.weights)
    }

    /// Returns the factors of the outputs of experts. `None` if the outputs have no factors.
    pub fn output_weights<'a>(&self, choices: &'a Dispatched) -> Option<&'a Tensor> {
        (!self.weighs_inputs).then_some(&choices.weights)
    }

    /// Returns whether ranks divide the experts.
    fn is_divided(&self) -> bool {
        self.place.is_divided()
    }

    /// Returns whether ranks divide the experts and have different tokens.
    fn exchanges_tokens(&self, context: &Context) -> bool {
        self.is_divided() && context.casts.mode.pass != Pass::Inference
    }

    /// Returns the experts of this rank.
    pub fn own(&self) -> Range<usize> {
        self.place.range(self.experts)
    }

    /// Starts to gather the rows of all ranks, in the order of the ranks, from this rank's `rows` `[T, …]`. In inference each rank has all rows
    /// already.
    pub fn start_gather(&self, rows: &Tensor, context: &Context) -> Result<Arriving> {
        match self.exchanges_tokens(context) {
            true => context.ranks.start_gather(Axis::Expert, &self.name, rows),
            false => Ok(Arriving::Here(rows.clone())),
        }
    }

    fn gather(&self, rows: &Tensor, context: &Context) -> Result<Tensor> {
        self.start_gather(rows, context)?.wait()
    }

    /// Starts to send the tokens of this rank, `x` `[T, C]`, to the experts of all ranks, for the `copies` that `reader` reads. Codes are sent if
    /// they equal the codes that the receiving rank would cast: with one scale per tensor, or with scales along rows if no copy for wgrad is made.
    pub fn send(&self, x: &Tensor, reader: OperandCast, copies: CodeCopies, context: &mut Context) -> Result<Tokens> {
        let (frozen, cast) = match self.sends_codes(x, reader, copies == CodeCopies::Both, context) {
            None => (FrozenScale::default(), None),
            Some((slot, transposes)) => {
                let frozen = context.casts.freeze(slot, x)?;
                let own = context.casts.quantize(slot, &frozen, x, CodeCopies::Rows)?;
                (frozen, Some((own, transposes)))
            }
        };
        self.start(x, cast, frozen, context)
    }

    /// Sends the tokens like [`Dispatch::send`] again in backward, for wgrad, with the scale of forward.
    pub fn send_again(
        &self,
        x: &Tensor,
        reader: OperandCast,
        frozen: FrozenScale,
        context: &mut Context,
    ) -> Result<Tokens> {
        let cast = match self.sends_codes(x, reader, true, context) {
            None => None,
            Some((slot, _)) => Some((context.casts.requantize(slot, &frozen, x, CodeCopies::Rows)?, true)),
        };
        self.start(x, cast, frozen, context)
    }

    fn start(
        &self,
        x: &Tensor,
        cast: Option<(QuantizedTensor, bool)>,
        frozen: FrozenScale,
        context: &Context,
    ) -> Result<Tokens> {
        let codes = cast.as_ref().and_then(|(own, _)| own.codes.as_ref());
        Ok(Tokens { arriving: self.start_gather(codes.unwrap_or(x), context)?, cast, frozen })
    }

    /// Returns the rows of this rank's experts, cast for `reader`, and the values for backward.
    pub fn rows_of_tokens(
        &self,
        tokens: Tokens,
        choices: &Dispatched,
        reader: OperandCast,
        copies: CodeCopies,
        context: &mut Context,
    ) -> Result<CastInput> {
        let Tokens { arriving, cast, frozen } = tokens;
        let tokens = arriving.wait()?;
        let Some((own, transposes)) = cast else {
            let weights = self.input_weights(choices);
            let gather = |output: Output<'_>| {
                let rows = gather_to(&tokens, &choices.slots, weights, output)?;
                Ok((reader.of_groups(rows, &choices.slots.groups)?, ()))
            };
            return Ok(reader.produce_input(copies, context, gather)?.0);
        };
        let rows = gather_quantized(&self.join_codes(tokens, own, context)?, &choices.slots, transposes)?;
        let columns = transposes.then(|| View::Codes(rows.clone().only_transposed()));
        Ok(CastInput { rows: View::Codes(rows.only_rows()), saved: SavedOperand::new(columns, frozen) })
    }

    /// Returns the view that wgrad reads, if [`Dispatch::rows_of_tokens`] did not save it. `tokens` come from [`Dispatch::send_again`].
    pub fn columns_of_tokens(
        &self,
        tokens: Tokens,
        choices: &Dispatched,
        reader: OperandCast,
        context: &mut Context,
    ) -> Result<View> {
        let Tokens { arriving, cast, frozen } = tokens;
        let tokens = arriving.wait()?;
        let Some((own, _)) = cast else {
            let weights = self.input_weights(choices);
            let gather = |output: Output<'_>| {
                let rows = gather_to(&tokens, &choices.slots, weights, output)?;
                Ok(reader.of_groups(rows, &choices.slots.groups)?)
            };
            return reader.reproduce_columns(&frozen, context, gather);
        };
        let rows = gather_quantized(&self.join_codes(tokens, own, context)?, &choices.slots, true)?;
        Ok(View::Codes(rows.only_transposed()))
    }

    /// Returns the slot of the cast before the exchange, and whether wgrad reads the transpose of the same codes. Returns `None` if values are sent.
    fn sends_codes(&self, x: &Tensor, reader: OperandCast, for_wgrad: bool, context: &Context) -> Option<(Slot, bool)> {
        // Values are multiplied by weights before they are cast.
        if self.weighs_inputs {
            return None;
        }
        let has_whole_rows = x.shape()[0].is_multiple_of(QuantizedTensor::PAD);
        let slot = reader.fused(&context.casts).filter(|_| self.exchanges_tokens(context) && has_whole_rows)?;
        match context.casts.scales.granularity(slot).of_rows() {
            Granularity::PerTensor => Some((slot, for_wgrad)),
            Granularity::Blocks128x128 => None,
            _ => (!for_wgrad).then_some((slot, false)),
        }
    }

    /// Returns the `codes` of all ranks with the scales of all ranks. This rank's scales are in `own`.
    fn join_codes(&self, codes: Tensor, own: QuantizedTensor, context: &Context) -> Result<QuantizedTensor> {
        let (ranks, rows) = (self.place.ranks, codes.shape()[0]);
        let scale_inv = match own.granularity.of_rows() {
            Granularity::PerTensor => own.scale_inv.clone(),
            _ => {
                let blocks = own.scale_inv.len() / own.rows;
                let all = self.gather(&own.scale_inv.reshape(&[own.scale_inv.len()])?, context)?;
                // Reorders from rank, block, row to block, rank, row.
                let all = join_columns(&all.reshape(&[ranks, blocks, own.rows])?, &[rows])?;
                let mut shape = own.scale_inv.shape().to_vec();
                *shape.last_mut().expect("scales by row") = rows;
                all.reshape(&shape)?
            }
        };
        Ok(QuantizedTensor { codes: Some(codes), scale_inv, rows, ..own })
    }

    /// Returns the number of this rank's tokens.
    pub fn own_tokens(&self, choices: &Dispatched, context: &Context) -> usize {
        let all = choices.weights.shape()[0];
        if self.exchanges_tokens(context) { all / self.place.ranks } else { all }
    }

    /// Returns the rows `[P, …]` of this rank's experts from the `values` `[T, …]` of this rank's tokens.
    pub fn rows_of_values(&self, values: &Tensor, choices: &Dispatched, context: &Context) -> Result<Tensor> {
        let all = self.gather(values, context)?;
        Ok(plain(gather_to(&all, &choices.slots, None, Output::Plain)?))
    }

    /// Returns the choices of all ranks, from the choices of this rank's tokens.
    pub fn choices(&self, routed: &Routed, context: &Context) -> Result<Dispatched> {
        if !self.is_divided() {
            return Ok(Dispatched { slots: routed.slots.clone(), weights: routed.weights().clone() });
        }
        let ids = self.gather(routed.ids(), context)?;
        Ok(Dispatched { slots: slots(&ids, self.own())?, weights: self.gather(routed.weights(), context)? })
    }

    /// Returns `addend[t] + Σ_k weights[t, k] · row(t, k)` for this rank's tokens `t`, over the rows of all ranks. `rows` `[P, C]` are the rows of
    /// this rank's experts. `weights` are the weights of the choices of all tokens. Without `weights`, each weight is 1. The sum over a rank's
    /// experts is sent in the type of `rows`. The sums of all ranks are added in F32, in the order of the ranks, and rounded once.
    pub fn combine(
        &self,
        rows: &Tensor,
        choices: &Dispatched,
        weights: Option<&Tensor>,
        addend: Option<&Tensor>,
        context: &Context,
    ) -> Result<Tensor> {
        if !self.is_divided() {
            return Ok(combine(rows, &choices.slots, weights, addend)?);
        }
        let partial = |tokens: Range<usize>| -> Result<Tensor> {
            let weights = weights.map(|weights| weights.rows(tokens.start, tokens.end)).transpose()?;
            Ok(combine(rows, &choices.slots.of_tokens(tokens)?, weights.as_ref(), None)?)
        };
        let (ranks, tokens) = (context.ranks, choices.weights.shape()[0]);
        if self.exchanges_tokens(context) {
            return ranks.sum_computed_rows(Axis::Expert, &self.name, tokens, &mut { partial }, addend);
        }
        ranks.sum(Axis::Expert, &self.name, &partial(0..tokens)?, addend)
    }

    /// Returns the gradient by the weights of the choices of this rank's tokens `x`, `[T, K]`, from the results of backward of this rank's experts: the
    /// gradients `drows` `[P, C]` by their inputs, and `dots` `[P]`, the products from which [`weight_gradient`] computes the gradient by weights of
    /// outputs.
    pub fn weight_gradient(
        &self,
        [drows, dots]: [&Tensor; 2],
        x: &Tensor,
        choices: &Dispatched,
        context: &Context,
    ) -> Result<Tensor> {
        let all = match self.weighs_inputs {
            true => gathered_weight_gradient(drows, &self.gather(x, context)?, &choices.slots)?,
            false => weight_gradient(dots, &choices.slots, &choices.weights)?,
        };
        match self.exchanges_tokens(context) {
            true => context.ranks.sum_own_rows(Axis::Expert, &self.name, all, None),
            false => Ok(all),
        }
    }
}
