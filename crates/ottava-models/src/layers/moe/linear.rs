//! The linear of experts. The matrices of all experts are stacked in one weight, and each matrix multiplies the rows of its expert.

use super::adapter::{GroupedAdapter, GroupedAdapterConfig, Rows};
use super::dispatch::{Dispatch, Dispatched};
use crate::layers::cast::{OperandCast, copies_of, plain};
use crate::layers::linear::amax_group;
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_recipe::lora::{ExpertParameter, Lora};
use ottava_recipe::operand::{FrozenScale, View, Views};
use ottava_recipe::param::{Builder, FolderLayout, FolderTensor, Init, Param, Shard, Split, StackOrder, Stacked};
use ottava_recipe::scaling::{AmaxGroup, Casts, Quantity, Slot};
use ottava_recipe::{ExpertCounts, LinearSite, ProductPrecision, Products};
use ottava_tensor::ops::{
    CodeCopies, Fp8Output, Groups, Operand, Output, Produced, add_grouped_bias, grouped_bias_dots,
    grouped_bias_gradient, grouped_gemm_nt, real_type,
};
use ottava_tensor::{QuantizedTensor, Tensor};
use std::ops::Range;

/// `y = x · W[e]ᵀ + b[e]`; `dx = dy · W[e]`; `dW[e] += dyᵀ · x`, over the rows of each expert `e`. Most models have no bias `b`. An adapter adds to `y`
/// and `dx`.
pub struct GroupedLinear {
    weight: Param,       /* [E · N, K] */
    bias: Option<Param>, /* [E · N] */
    adapter: Option<GroupedAdapter>,
    products: Products,
    input: OperandCast,
    gradient: OperandCast,
}

/// The configuration of a grouped linear.
pub struct GroupedLinearConfig<'a> {
    /// The name of the linear in the scaling state.
    pub name: &'a str,
    /// The numbers of experts and of choices per token.
    pub experts: ExpertCounts,
    /// The experts of this rank.
    pub own: Range<usize>,
    /// The tensors that are stacked, expert after expert: the name in the model folder, without `.weight`, and the number of rows.
    pub parts: Vec<(String, usize)>,
    /// The name in the mixture and the order of the tensor in which a folder stacks all experts. `None` if a folder has a tensor for each part.
    pub stack: Option<(&'static str, StackOrder)>,
    /// The number of columns of the weight.
    pub inputs: usize,
    /// Whether each expert has a bias.
    pub bias: bool,
    /// The standard deviation of initial weights.
    pub std: f32,
    /// The parameter of transformers whose adapter the linear may have. `None` if the linear has no adapter.
    pub adapted: Option<Adapted>,
}

/// The parameter of transformers that has the matrices of a [`GroupedLinear`].
pub struct Adapted {
    /// The parameter.
    pub parameter: ExpertParameter,
    /// The order of its elements in the memory of transformers.
    pub order: StackOrder,
    /// Whether PEFT adapts another parameter of the same experts after this one.
    pub is_inner: bool,
}

impl GroupedLinear {
    /// Creates a linear with weights from the builder.
    pub fn new(build: &mut Builder, config: GroupedLinearConfig) -> Result<GroupedLinear> {
        let GroupedLinearConfig { name, experts, own, parts, stack, inputs, bias, std, adapted } = config;
        let is_divided = own.len() < experts.count;
        let (split, group) = match is_divided {
            true => (Split::Expert, AmaxGroup::EXPERTS),
            false => (Split::None, amax_group(build)),
        };
        let linears = parts.len() / experts.count;
        let layout = |at: usize| match stack {
            Some((name, order)) => {
                let (expert, linear) = (at / linears, at % linears);
                FolderLayout::Stacked(Stacked { name, order, expert, experts: experts.count, linear, linears })
            }
            None => FolderLayout::Same,
        };
        let shards = |build: &Builder, ending: &str, inputs: &[usize]| -> Result<Vec<Shard>> {
            let shard = |at: usize| {
                let (name, rows) = (format!("{}.{ending}", parts[at].0), parts[at].1);
                let shape = [&[rows], inputs].concat();
                build.shard(FolderTensor { name, shape, layout: layout(at) }, split)
            };
            (own.start * linears..own.end * linears).map(shard).collect()
        };
        let within = |param: Param, ending: &str| match is_divided {
            true => param.within_stack(format!("{}.{ending}", parts[0].0)),
            false => param,
        };
        let of_weight = shards(build, "weight", &[inputs])?;
        let mut weight = within(Param::matrix(build, of_weight, Init::Normal(std))?, "weight");
        let of_bias = bias.then(|| shards(build, "bias", &[])).transpose()?;
        let bias = of_bias.map(|shards| Param::new(build, shards, Init::Zeros)).transpose()?;
        let bias = bias.map(|bias| within(bias, "bias"));
        let outputs = weight.weights.shape()[0] / own.len();
        let adapter = match &adapted {
            Some(Adapted { parameter, order, is_inner }) => {
                build.description.experts.push(parameter.clone());
                let sizes = [outputs, inputs];
                let (order, is_inner) = (*order, *is_inner);
                GroupedAdapter::new(
                    build,
                    GroupedAdapterConfig { parameter, order, is_inner, experts, own: own.clone(), sizes },
                )?
            }
            None => None,
        };
        let site = LinearSite {
            name: name.to_string(),
            parts: parts.into_iter().map(|(name, _)| name).collect(),
            outputs,
            inputs,
            block: build.block,
            after_swiglu: false,
            divides_inputs: false,
            experts: Some(experts),
        };
        let mut decision = build.recipe.decide(&site)?;
        // A model whose adapters are loaded later has no adapter yet.
        let has_adapter = adapter.is_some() || adapted.is_some() && build.lora == Some(&Lora::of_no_linear());
        match weight.is_trained() {
            true => {}
            false if has_adapter => decision.beside_adapters(),
            false => decision.frozen(),
        }
        let (mut input, mut gradient, mut products) = (OperandCast::NONE, OperandCast::NONE, Products::HIGH);
        if let Some((casts, how)) = decision.fp8 {
            products = how;
            let Products { fprop, dgrad, wgrad } = products;
            let of_input = build.slots.add(format!("{name}.input"), casts.input, group, None);
            input = OperandCast::new(of_input, [fprop, wgrad], false);
            let reads = [fprop, dgrad].map(|product| product != ProductPrecision::High);
            if let Some(copies) = copies_of(reads) {
                let slot = build.slots.add(format!("{name}.weight"), casts.weight, group, Some(of_input));
                weight.cast_in(slot, casts.weight, copies, build.purpose);
            }
            let slot = build.slots.add(format!("{name}.grad_output"), casts.grad_output, group, Some(of_input));
            // The gradient of a bias sums unquantized values.
            gradient = OperandCast::new(slot, [dgrad, wgrad], bias.is_some());
            if has_adapter {
                (input, gradient) = (input.for_adapter(), gradient.for_adapter());
            }
        }
        build.description.linears.push((site, decision));
        Ok(GroupedLinear { weight, bias, adapter, products, input, gradient })
    }

    /// Returns the adapter, if the linear has one.
    pub fn adapter_mut(&mut self) -> &mut Option<GroupedAdapter> {
        &mut self.adapter
    }

    /// Returns the factors of the inputs of the adapter ([`GroupedAdapter::mask`]).
    pub fn mask(&self, dispatch: &Dispatch, choices: &Dispatched, context: &Context) -> Result<Option<Tensor>> {
        let mask = self.adapter.as_ref().map(|adapter| adapter.mask(dispatch, choices, context));
        Ok(mask.transpose()?.flatten())
    }

    /// Returns whether backward reads the input: for the gradient of the weight, or of the adapter.
    pub fn reads_input(&self) -> bool {
        self.weight.is_trained() || self.adapter.is_some()
    }

    /// Returns the cast of the input.
    pub fn input(&self) -> OperandCast {
        self.input
    }

    /// Returns the cast of the gradient by the output.
    pub fn gradient(&self) -> OperandCast {
        self.gradient
    }

    /// Returns the copies of an input that forward writes. Only a trained weight and an adapter have a wgrad, so only then a copy for backward is written.
    pub fn input_copies(&self, copies: CodeCopies) -> CodeCopies {
        if self.reads_input() { copies } else { CodeCopies::Rows }
    }

    fn products(&self, casts: &Casts) -> Products {
        if self.gradient.is_cast(casts) { self.products } else { Products::HIGH }
    }

    /// Returns `x · W[e]ᵀ + b[e]` of an input cast by [`GroupedLinear::input`], plus the product of the adapter.
    pub fn fprop(&self, x: &View, rows: Rows, context: &mut Context) -> Result<Tensor> {
        let y = self.fprop_of_weight(x, rows.groups, context)?;
        match self.adapter.as_ref().filter(|_| context.mode().adapts()) {
            Some(adapter) => adapter.add_to(&y, x.value()?, rows, context),
            None => Ok(y),
        }
    }

    fn fprop_of_weight(&self, x: &View, groups: &Groups, context: &mut Context) -> Result<Tensor> {
        let (Context { casts, loan, .. }, dtype) = (context, self.weight.weights.dtype());
        let mut y = match self.products(casts).fprop {
            ProductPrecision::Fp8(how) => {
                let weight = self.weight.codes_for_forward(loan, casts)?;
                let weight = Operand::Rows(&weight);
                self.compare_weight(weight, loan, casts)?;
                let y = grouped_gemm_nt(x.rows()?, weight, groups, dtype, how)?;
                self.compare_product(Quantity::Fprop, &y, [x.rows()?, weight], groups, casts)?;
                y
            }
            high => {
                self.weight.measure_for_forward(loan, casts)?;
                let weight = self.weight.read(loan)?;
                grouped_gemm_nt(x.rows()?, Operand::plain(&weight), groups, dtype, high.accumulation())?
            }
        };
        if let Some(bias) = self.bias_by_expert(groups)? {
            add_grouped_bias(&mut y, &bias, groups)?;
        }
        Ok(y)
    }

    /// Returns the bias as `[E, N]`.
    fn bias_by_expert(&self, groups: &Groups) -> Result<Option<Tensor>> {
        let by_expert = |bias: &Param| {
            let bias = bias.weights.value()?;
            Ok(bias.reshape(&[groups.len(), bias.len() / groups.len()])?)
        };
        self.bias.as_ref().map(by_expert).transpose()
    }

    /// Adds to the gradient of the bias.
    fn add_bias_gradient(&mut self, dy: &Tensor, groups: &Groups) -> Result<()> {
        let Some(bias) = self.bias.as_mut().filter(|bias| bias.is_trained()) else { return Ok(()) };
        let sums = bias.gradient.sum_mut()?;
        let mut own = sums.duplicate()?.reshape(&[groups.len(), dy.shape()[1]])?;
        grouped_bias_gradient(dy, groups, &mut own)?;
        Ok(sums.copy_from(0, &own.reshape(&[own.len()])?)?)
    }

    /// Adds to the gradient of the bias, and casts the gradient by the output.
    fn cast_gradient(&mut self, dy: &Tensor, groups: &Groups, context: &mut Context) -> Result<Views> {
        self.add_bias_gradient(dy, groups)?;
        self.gradient.cast_gradient(dy, None, context)
    }

    /// Adds to the gradient of the bias, and returns the views of the output gradient that `op` produces.
    pub fn produce_gradient(
        &mut self,
        groups: &Groups,
        context: &mut Context,
        mut op: impl FnMut(Output) -> ottava_tensor::Result<Produced>,
    ) -> Result<Views> {
        let gradient = self.gradient;
        let mut op = |output: Output<'_>| gradient.of_groups(op(output)?, groups);
        match self.bias {
            None => gradient.produce_gradient(context, op),
            Some(_) => self.cast_gradient(&plain(op(Output::Plain)?), groups, context),
        }
    }

    /// Runs [`GroupedLinear::produce_gradient`]. With a bias, also returns the dot product of each row's gradient with its expert's bias, `[P]`.
    pub fn produce_gradient_and_dots(
        &mut self,
        groups: &Groups,
        context: &mut Context,
        mut op: impl FnMut(Output) -> ottava_tensor::Result<Produced>,
    ) -> Result<(Views, Option<Tensor>)> {
        let gradient = self.gradient;
        let mut op = |output: Output<'_>| gradient.of_groups(op(output)?, groups);
        let Some(bias) = self.bias_by_expert(groups)? else {
            return Ok((gradient.produce_gradient(context, op)?, None));
        };
        let dy = plain(op(Output::Plain)?);
        let mut dots = Tensor::zeros(dy.device(), &dy.shape()[..1], real_type(dy.dtype()))?;
        grouped_bias_dots(&dy, &bias, groups, &mut dots)?;
        Ok((self.cast_gradient(&dy, groups, context)?, Some(dots)))
    }

    /// Returns `dy · W[e]`, plus the product of the adapter.
    pub fn dgrad(&self, dy: &View, rows: Rows, context: &mut Context) -> Result<Tensor> {
        let dx = self.dgrad_of_weight(dy, rows.groups, context)?;
        match &self.adapter {
            Some(adapter) => adapter.add_dgrad(&dx, dy.value()?, rows, context),
            None => Ok(dx),
        }
    }

    fn dgrad_of_weight(&self, dy: &View, groups: &Groups, context: &mut Context) -> Result<Tensor> {
        let (Context { casts, loan, .. }, dtype) = (context, self.weight.weights.dtype());
        Ok(match self.products(casts).dgrad {
            ProductPrecision::Fp8(how) => {
                let weight = self.weight.codes_for_backward(loan, casts)?;
                let weight = Operand::Columns(&weight);
                self.compare_weight(weight, loan, casts)?;
                let dx = grouped_gemm_nt(dy.rows()?, weight, groups, dtype, how)?;
                self.compare_product(Quantity::Dgrad, &dx, [dy.rows()?, weight], groups, casts)?;
                dx
            }
            high => {
                let weight = self.weight.read(loan)?;
                grouped_gemm_nt(dy.rows()?, Operand::plain_transposed(&weight), groups, dtype, high.accumulation())?
            }
        })
    }

    /// Adds `dyᵀ · x` of each expert to the gradient of its matrix if the weight is trained, and to the gradients of the adapter. Calls `x` only if
    /// [`GroupedLinear::reads_input`].
    pub fn wgrad(
        &mut self,
        dy: &View,
        x: impl FnOnce(&mut Context) -> Result<View>,
        rows: Rows,
        context: &mut Context,
    ) -> Result<()> {
        if !self.reads_input() {
            return Ok(());
        }
        let (precision, groups) = (self.products(&context.casts).wgrad, rows.groups);
        let x = x(context)?;
        if let Some(adapter) = &mut self.adapter {
            adapter.wgrad(dy.value()?, x.value()?, rows, context)?;
        }
        if !self.weight.is_trained() {
            return Ok(());
        }
        let computed = context.add_wgrad(&mut self.weight, dy, &x, Some(groups), precision.accumulation())?;
        if computed && precision != ProductPrecision::High {
            self.compare_wgrad(dy, &x, groups, &mut context.casts)?;
        }
        Ok(())
    }

    /// Runs [`GroupedLinear::produce_gradient`] with an op that also recomputes the operand of slot `other` as transposed codes with the scale
    /// `frozen`. Returns the views of the gradient and the view of the operand.
    pub fn produce_gradient_and_recast(
        &mut self,
        other: Slot,
        frozen: &FrozenScale,
        groups: &Groups,
        context: &mut Context,
        op: impl FnMut(Output, Option<Fp8Output>) -> Result<(Produced, Option<QuantizedTensor>)>,
    ) -> Result<(Views, View)> {
        let (made, codes) = context.casts.produce_and_recast(self.gradient.fused(&context.casts), other, frozen, op)?;
        let gradient = match made {
            Produced::Fp8(codes) => Views::of_codes(codes),
            value => self.cast_gradient(&plain(self.gradient.of_groups(value, groups)?), groups, context)?,
        };
        Ok((gradient, View::Codes(codes)))
    }

    /// Returns the weight.
    pub fn weight(&self) -> &Param {
        &self.weight
    }

    /// Returns the parameters.
    pub fn parameters(&self) -> impl Iterator<Item = &Param> {
        let own = std::iter::once(&self.weight).chain(&self.bias);
        own.chain(self.adapter.iter().flat_map(GroupedAdapter::parameters))
    }

    /// Returns the parameters mutably.
    pub fn parameters_mut(&mut self) -> impl Iterator<Item = &mut Param> {
        let own = std::iter::once(&mut self.weight).chain(&mut self.bias);
        own.chain(self.adapter.iter_mut().flat_map(GroupedAdapter::parameters_mut))
    }
}
