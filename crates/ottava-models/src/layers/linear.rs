//! The linear layer. FP8 speeds up its three products.

mod adapter;
mod config;
mod core;
mod exchange;
mod magnitudes;
mod plan;
mod probe;
mod smooth;

pub use self::core::ReadWeight;
pub use adapter::Adapter;
pub use config::LinearConfig;
pub use smooth::{ColumnScales, SmoothCasts};

use self::core::{Core, WeightProduct};
use super::cast::{OperandCast, SavedOperand, copies_of};
use exchange::Exchange;
use ottava_common::error::{Error, Result};
use ottava_recipe::context::Context;
use ottava_recipe::operand::{FrozenScale, ResidualGradient, View, Views};
use ottava_recipe::param::{Builder, FolderTensor, Init, Param, Shard, Split};
use ottava_recipe::scaling::{AmaxGroup, Slot};
use ottava_recipe::{Decision, LinearCasts, LinearSite, ProductPrecision, Products};
use ottava_tensor::ops::{Fp8Output, Output, Produced, add, bias_gradient, scale_columns};
use ottava_tensor::{DType, Device, QuantizedTensor, Tensor};

/// `y = x · Wᵀ + b`; `dx = dy · W`; `dW += dyᵀ · x`; `db += Σ dy`. An adapter adds to `y` and `dx`. Constant factors may multiply `y`.
pub struct Linear {
    core: Core,
    bias: Option<Param>, /* [N] */
    adapter: Option<Adapter>,
    /// The constant factors of the outputs, F32 `[N]`. `None` for factors of 1.
    constants: Option<Tensor>,
    exchange: Exchange,
}

/// The parts of a linear and the recipe's decision.
struct Parts {
    weight: Param,
    bias: Option<Param>,
    adapter: Option<Adapter>,
    fp8: Option<(LinearCasts, Products)>,
    smooth: bool,
}

impl LinearConfig<'_> {
    /// Creates weight and bias, applies the recipe's decision, and records the linear in the description.
    fn build(&self, build: &mut Builder, after_swiglu: bool) -> Result<Parts> {
        let LinearConfig { name, parts, fused, inputs, bias, std, split, .. } = *self;
        let shards = |build: &Builder, suffix: &str, columns: Option<usize>, split| -> Result<Vec<Shard>> {
            let tensor = |(name, rows): &(String, usize)| FolderTensor {
                name: format!("{name}.{suffix}"),
                shape: std::iter::once(*rows).chain(columns).collect(),
                layout: if columns.is_some() { self.layout } else { self.layout_of_outputs() },
            };
            let of = |at: usize| self.replicas_of(at);
            let shards = parts.iter().enumerate().map(|(at, part)| build.shards(tensor(part), fused, of(at), split));
            Ok(shards.collect::<Result<Vec<_>>>()?.concat())
        };
        let weight = shards(build, "weight", Some(inputs), split)?;
        let weight = Param::matrix(build, weight, Init::Normal(std))?;
        // If ranks divide the inputs, the products of all ranks are summed before the bias is added.
        let bias_split = if split == Split::Input { Split::None } else { split };
        let bias =
            bias.then(|| Param::new(build, shards(build, "bias", None, bias_split)?, Init::Zeros)).transpose()?;
        let site = LinearSite {
            name: name.to_string(),
            parts: parts.iter().map(|(name, _)| name.clone()).collect(),
            outputs: weight.weights.shape()[0],
            inputs: weight.weights.shape()[1],
            block: build.block,
            after_swiglu,
            divides_inputs: split == Split::Input,
            experts: None,
        };
        let mut decision = match self.uncast {
            Some(reason) => {
                build.description.fixed.push(name.to_string());
                Decision::uncast(reason)
            }
            None => build.recipe.decide(&site)?,
        };
        if build.lora.is_some() {
            decision.beside_adapters();
        }
        let adapter = Adapter::new(build, self)?;
        let parts = Parts { weight, bias, adapter, fp8: decision.fp8, smooth: decision.smooth };
        build.description.linears.push((site, decision));
        Ok(parts)
    }
}

/// Returns the ranks that share the scale of a cast. Ranks that gather codes need one scale. All other divided tensors have one scale as well, so
/// that codes do not depend on the number of ranks.
pub(super) fn amax_group(build: &Builder) -> AmaxGroup {
    if build.place().is_divided() { AmaxGroup::TENSOR } else { AmaxGroup::DATA }
}

impl Linear {
    /// Creates a linear with weights from the builder.
    ///
    /// Errors if the linear shares its input with a linear that is cast differently.
    pub fn new(build: &mut Builder, config: LinearConfig) -> Result<Linear> {
        let parts = config.build(build, false)?;
        Linear::from_parts(build, config, parts)
    }

    fn from_parts(build: &mut Builder, config: LinearConfig, parts: Parts) -> Result<Linear> {
        let LinearConfig { name, shared_input, .. } = config;
        let Parts { mut weight, bias, adapter, fp8, .. } = parts;
        let (mut input, mut gradient) = (OperandCast::NONE, OperandCast::NONE);
        let products = fp8.map_or(Products::HIGH, |(_, products)| products);
        let Products { fprop, dgrad, wgrad } = products;
        if let Some((casts, _)) = fp8 {
            let group = amax_group(build);
            input = match shared_input {
                Some(shared) => shared,
                None => {
                    let slot = build.slots.add(format!("{name}.input"), casts.input, group, None);
                    let cast = OperandCast::new(slot, [fprop, wgrad], false);
                    if build.lora.is_some() { cast.for_adapter() } else { cast }
                }
            };
            let of_input = input.slot();
            let reads = [fprop, dgrad].map(|product| product != ProductPrecision::High);
            if let Some(copies) = copies_of(reads) {
                let slot = build.slots.add(format!("{name}.weight"), casts.weight, group, of_input);
                weight.cast_in(slot, casts.weight, copies, build.purpose);
            }
            let slot = build.slots.add(format!("{name}.grad_output"), casts.grad_output, group, of_input);
            // The gradient of a bias sums unquantized values.
            gradient = OperandCast::new(slot, [dgrad, wgrad], bias.is_some());
            if build.lora.is_some() {
                gradient = gradient.for_adapter();
            }
        }
        // Ranks divide tokens between sublayers.
        match config.split {
            Split::Output => input = input.gathering(),
            Split::Input => gradient = gradient.gathering(),
            Split::None | Split::Vocabulary | Split::Expert => {}
        }
        if shared_input.is_some_and(|shared| shared != input || !input.has_products([fprop, wgrad])) {
            return Err(Error::Config(format!(
                "`precision`: {name} reads the same input as another linear and is not cast like it; name both in `high_precision_layers`, or neither"
            )));
        }
        let exchange = Exchange::new(config.split, build.place());
        Ok(Linear { core: Core { weight, products, input, gradient }, bias, adapter, constants: None, exchange })
    }

    /// Returns the same linear for an input that ranks do not divide by tokens. Its dgrad is the gradient by the input from this rank's outputs only.
    /// The caller adds the gradients of all ranks.
    pub fn of_all_tokens(self) -> Linear {
        let core = Core { input: self.core.input.of_all_rows(), ..self.core };
        Linear { core, exchange: Exchange::Nothing, ..self }
    }

    /// Returns the same linear for an input whose value other linears read. Without a cast, the operand is its value anyway.
    pub fn of_shared_value(self) -> Linear {
        match self.core.input.slot() {
            Some(_) => Linear { core: Core { input: self.core.input.for_adapter(), ..self.core }, ..self },
            None => self,
        }
    }

    /// Returns the same linear with constant factors of this rank's outputs. `runs` are numbers of neighbouring rows with their factor.
    ///
    /// Errors if the device has too little memory.
    pub fn multiplied(self, device: &Device, runs: &[(usize, f32)]) -> Result<Linear> {
        if runs.iter().all(|(_, factor)| *factor == 1.0) {
            return Ok(self);
        }
        let factors: Vec<f32> = runs.iter().flat_map(|&(rows, factor)| std::iter::repeat_n(factor, rows)).collect();
        Ok(Linear { constants: Some(Tensor::from_slice(device, &[factors.len()], &factors)?), ..self })
    }

    /// Returns the cast of the input.
    pub fn input(&self) -> OperandCast {
        self.core.input
    }

    /// Returns the type of the output.
    pub fn dtype(&self) -> DType {
        self.core.weight.weights.dtype()
    }

    /// Returns the adapter, if the linear has one.
    pub fn adapter_mut(&mut self) -> &mut Option<Adapter> {
        &mut self.adapter
    }

    /// Returns the cast of the gradient by the output.
    pub fn gradient(&self) -> OperandCast {
        self.core.gradient
    }

    /// Returns `x · Wᵀ + b`, plus `residual` `[T, N]` if given. The product adds `residual` before rounding.
    pub fn forward(
        &self,
        x: Tensor,
        residual: Option<&Tensor>,
        context: &mut Context,
    ) -> Result<(Tensor, SavedOperand)> {
        let x = self.core.input.cast_input(x, context.operand_copies(), context)?;
        Ok((self.fprop(&x.rows, residual, context)?, x.saved))
    }

    /// Returns the values that [`Linear::forward`] saves, without computing its output.
    pub fn save(&self, x: Tensor, context: &mut Context) -> Result<SavedOperand> {
        Ok(self.core.input.cast_input(x, context.operand_copies(), context)?.saved)
    }

    /// Returns `x · Wᵀ + b + residual` of an input cast by [`Linear::input`]. If ranks divide the inputs, the products of all ranks are added.
    pub fn fprop(&self, x: &View, residual: Option<&Tensor>, context: &mut Context) -> Result<Tensor> {
        let Some(constants) = &self.constants else {
            return self.multiply(WeightProduct::Fprop, x, residual, context);
        };
        let y = scale_columns(&self.multiply(WeightProduct::Fprop, x, None, context)?, constants)?;
        Ok(residual.map_or_else(|| Ok(y.clone()), |residual| add(residual, &y))?)
    }

    /// Returns the weight that fprop reads if fprop is a single product of codes `x` in inference, without bias, adapter or comparison.
    pub fn sole_weight(&self, x: &View, context: &mut Context) -> Result<Option<ReadWeight>> {
        let is_alone = context.paged.is_some()
            && matches!(x, View::Codes(_))
            && self.bias.is_none()
            && self.adapter.is_none()
            && self.constants.is_none()
            && !context.casts.compares();
        is_alone.then(|| self.core.weight_for(WeightProduct::Fprop, context)).transpose()
    }

    /// Adds to the gradient of the bias, and returns the views of the output gradient that dgrad and wgrad read.
    pub fn cast_gradient(&mut self, dy: ResidualGradient, context: &mut Context) -> Result<Views> {
        let dy = match &self.constants {
            Some(constants) => scale_columns(&dy.value, constants)?.into(),
            None => dy,
        };
        if let Some(bias) = self.bias.as_mut().filter(|bias| bias.is_trained()) {
            bias_gradient(&dy.value, bias.gradient.sum_mut()?)?;
        }
        if let Some(factors) = self.factors(context)? {
            // Adapters read the same gradient, and its amax is the amax of the scaled gradient.
            let scaled = scale_columns(&dy.value, &factors)?;
            return self.core.gradient.cast_gradient(&scaled, None, context);
        }
        self.core.gradient.cast_gradient(&dy.value, dy.amax, context)
    }

    /// Runs [`Linear::cast_gradient`] on a gradient that `op` produces.
    pub fn produce_gradient(
        &mut self,
        context: &mut Context,
        mut op: impl FnMut(Output) -> ottava_tensor::Result<Produced>,
    ) -> Result<Views> {
        if self.bias.is_some() || self.has_magnitudes() || self.constants.is_some() {
            let dy = op(Output::Plain)?.plain().expect("a plain output gives a value");
            return self.cast_gradient(dy.into(), context);
        }
        self.core.gradient.produce_gradient(context, op)
    }

    /// Runs [`Linear::produce_gradient`] with an op that also recomputes the operand of slot `other` as transposed codes with the scale `frozen`.
    /// Returns the views of the gradient and the view of the operand.
    pub fn produce_gradient_and_recast(
        &mut self,
        other: Slot,
        frozen: &FrozenScale,
        context: &mut Context,
        op: impl FnMut(Output, Option<Fp8Output>) -> Result<(Produced, Option<QuantizedTensor>)>,
    ) -> Result<(Views, View)> {
        let slot = self.core.gradient.fused(&context.casts).filter(|_| self.constants.is_none());
        let (made, codes) = context.casts.produce_and_recast(slot, other, frozen, op)?;
        let gradient = match made {
            Produced::Fp8(codes) => Views::of_codes(codes),
            value => self.cast_gradient(value.plain().expect("a plain output gives a value").into(), context)?,
        };
        Ok((gradient, View::Codes(codes)))
    }

    /// Returns `dy · W`, plus `other` `[T, K]` if given. If ranks divide the outputs, the products of all ranks are added.
    pub fn dgrad(&self, dy: &View, other: Option<&Tensor>, context: &mut Context) -> Result<Tensor> {
        self.core.compare_loss_cost(dy, &mut context.casts)?;
        self.multiply(WeightProduct::Dgrad, dy, other, context)
    }

    /// Adds `dyᵀ · x` to the gradient of the weight if the weight is trained, or defers the product. Adds to the gradients of the adapter.
    pub fn wgrad(&mut self, dy: &View, x: &View, context: &mut Context) -> Result<()> {
        if self.has_magnitudes() {
            let y = self.recompute_unscaled(x.value()?, context)?;
            self.adapter.as_mut().expect("it has magnitudes").magnitude_wgrad(dy.value()?, &y)?;
        }
        if let Some(adapter) = &mut self.adapter {
            adapter.wgrad(dy.value()?, x.value()?, context)?;
        }
        self.core.wgrad(dy, x, context)
    }

    /// Returns the gradient by the input, plus `other`, from views of the gradient `dy` and of the input `x`. Adds to the gradient of the weight.
    pub fn backward_views(
        &mut self,
        dy: Views,
        x: View,
        other: Option<&Tensor>,
        context: &mut Context,
    ) -> Result<Tensor> {
        let Views { rows, columns } = dy;
        let dx = self.dgrad(&rows, other, context)?;
        drop(rows);
        self.wgrad(&columns, &x, context)?;
        Ok(dx)
    }

    /// Returns the gradient by the input of [`Linear::forward`] from the gradient `dy`. Adds to the gradient of the weight. `input` recomputes the
    /// input if forward did not save it.
    pub fn backward_recomputing(
        &mut self,
        dy: ResidualGradient,
        saved: SavedOperand,
        input: impl FnOnce(&Context) -> Result<Tensor>,
        context: &mut Context,
    ) -> Result<Tensor> {
        let Views { rows, columns: dy } = self.cast_gradient(dy, context)?;
        let dx = self.dgrad(&rows, None, context)?;
        drop(rows);
        let x = match saved.into_columns() {
            Ok(x) => x,
            Err(frozen) => self.core.input.recast_columns(input(context)?, &frozen, context)?,
        };
        self.wgrad(&dy, &x, context)?;
        Ok(dx)
    }

    /// Returns the gradient by the input of [`Linear::forward`]. The input must have been saved.
    ///
    /// Errors if the input must be recomputed, because a linear does not save the data for the recomputation.
    pub fn backward(&mut self, dy: Tensor, saved: SavedOperand, context: &mut Context) -> Result<Tensor> {
        let x = saved.into_columns().map_err(|_| {
            Error::Config("linear: its input must be recomputed, which only the layer around it can do".into())
        })?;
        let dy = self.cast_gradient(dy.into(), context)?;
        self.backward_views(dy, x, None, context)
    }

    /// Calls `visit` for each parameter, always in the same order.
    pub fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param)) {
        visit(&self.core.weight);
        self.bias.iter().for_each(&mut *visit);
        self.adapter.iter().for_each(|adapter| adapter.parameters(visit));
    }

    /// Calls `visit` for each parameter mutably, in the order of [`Linear::parameters`].
    pub fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        visit(&mut self.core.weight);
        self.bias.iter_mut().for_each(&mut *visit);
        self.adapter.iter_mut().for_each(|adapter| adapter.parameters_mut(visit));
    }
}
