//! The linear of experts: a matrix for each, stacked in one weight, times the rows that belong to it.

use crate::context::Context;
use crate::error::Result;
use crate::layers::cast::{OperandCast, copies_of};
use crate::operand::{FrozenScale, View, Views};
use crate::param::{Builder, FolderTensor, Init, Param, Split};
use crate::recipe::{ExpertCounts, LinearSite, ProductPrecision, Products};
use crate::scaling::{AmaxGroup, Casts, Quantity, Slot};
use ottava_tensor::ops::{CodeCopies, Fp8Output, Groups, Operand, Output, Produced, grouped_gemm_nt};
use ottava_tensor::{QuantizedTensor, Tensor};
use std::ops::Range;

/// `y = x · W[e]ᵀ`; `dx = dy · W[e]`; `dW[e] += dyᵀ · x`, over the rows of each expert `e`.
pub struct GroupedLinear {
    weight: Param, /* [E · N, K] */
    products: Products,
    input: OperandCast,
    gradient: OperandCast,
}

/// The configuration of a grouped linear.
pub struct GroupedLinearConfig<'a> {
    /// Its name in the scaling state.
    pub name: &'a str,
    /// The experts.
    pub experts: ExpertCounts,
    /// Which of them this rank has.
    pub own: Range<usize>,
    /// The tensors of each expert that are stacked: name in the model folder, without `.weight`, and rows. Experts one after the other.
    pub parts: Vec<(String, usize)>,
    /// Columns of the weight.
    pub inputs: usize,
    /// Standard deviation of initial weights.
    pub std: f32,
}

impl GroupedLinear {
    /// A linear with weights from the builder.
    pub fn new(build: &mut Builder, config: GroupedLinearConfig) -> Result<GroupedLinear> {
        let GroupedLinearConfig { name, experts, own, parts, inputs, std } = config;
        let is_divided = own.len() < experts.count;
        let (split, group) = match is_divided {
            true => (Split::Expert, AmaxGroup::EXPERTS),
            false => (Split::None, AmaxGroup::DATA),
        };
        let tensor = |name: &str| format!("{name}.weight");
        let shard =
            |(name, rows): &(String, usize)| build.shard(FolderTensor::new(tensor(name), vec![*rows, inputs]), split);
        let of_each = parts.len() / experts.count;
        let stacked = &parts[own.start * of_each..own.end * of_each];
        let shards = stacked.iter().map(shard).collect::<Result<_>>()?;
        let mut weight = Param::matrix(build, shards, Init::Normal(std))?;
        let outputs = weight.weights.shape()[0] / own.len();
        if is_divided {
            weight = weight.within_stack(tensor(&parts[0].0));
        }
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
        if !weight.is_trained() {
            decision.frozen();
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
            gradient = OperandCast::new(slot, [dgrad, wgrad], false);
        }
        build.description.linears.push((site, decision));
        Ok(GroupedLinear { weight, products, input, gradient })
    }

    /// The cast of its input.
    pub fn input(&self) -> OperandCast {
        self.input
    }

    /// The cast of the gradient by its output.
    pub fn gradient(&self) -> OperandCast {
        self.gradient
    }

    /// The copies of an input that forward makes: only a trained weight has a wgrad.
    pub fn input_copies(&self, copies: CodeCopies) -> CodeCopies {
        if self.weight.is_trained() { copies } else { CodeCopies::Rows }
    }

    fn products(&self, casts: &Casts) -> Products {
        if self.gradient.is_cast(casts) { self.products } else { Products::HIGH }
    }

    /// `x · W[e]ᵀ` of an input cast by [`GroupedLinear::input`].
    pub fn fprop(&self, x: &View, groups: &Groups, context: &mut Context) -> Result<Tensor> {
        let (Context { casts, loan, .. }, dtype) = (context, self.weight.dtype());
        Ok(match self.products(casts).fprop {
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
        })
    }

    /// `dy · W[e]`.
    pub fn dgrad(&self, dy: &View, groups: &Groups, context: &mut Context) -> Result<Tensor> {
        let (Context { casts, loan, .. }, dtype) = (context, self.weight.dtype());
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

    /// Adds `dyᵀ · x` of each expert to the gradient of its matrix, if the weight is trained; `x` runs only then.
    pub fn wgrad(
        &mut self,
        dy: &View,
        x: impl FnOnce(&mut Context) -> Result<View>,
        groups: &Groups,
        context: &mut Context,
    ) -> Result<()> {
        if !self.weight.is_trained() {
            return Ok(());
        }
        let precision = self.products(&context.casts).wgrad;
        let x = x(context)?;
        let computed = context.add_wgrad(&mut self.weight, dy, &x, Some(groups), precision.accumulation())?;
        if computed && precision != ProductPrecision::High {
            self.compare_wgrad(dy, &x, groups, &mut context.casts)?;
        }
        Ok(())
    }

    /// The views of the gradient by the output that `op` produces; `op` also recomputes the operand of slot `other`: transposed codes with the
    /// scale `frozen`. Returns both.
    pub fn produce_gradient_and_recast(
        &self,
        other: Slot,
        frozen: &FrozenScale,
        casts: &mut Casts,
        op: impl FnMut(Output, Option<Fp8Output>) -> Result<(Produced, Option<QuantizedTensor>)>,
    ) -> Result<(Views, View)> {
        let (made, codes) = casts.produce_and_recast(self.gradient.fused(casts), other, frozen, op)?;
        let gradient = match made {
            Produced::Fp8(codes) => Views::of_codes(codes),
            value => self.gradient.cast_gradient(&value.plain().expect("a plain output gives a value"), None, casts)?,
        };
        Ok((gradient, View::Codes(codes)))
    }

    /// Its parameter.
    pub fn weight(&self) -> &Param {
        &self.weight
    }

    /// Its parameter, mutably.
    pub fn weight_mut(&mut self) -> &mut Param {
        &mut self.weight
    }
}
