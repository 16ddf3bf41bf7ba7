//! The linear layer, whose three products are what FP8 speeds up.

mod smooth;

pub use smooth::Smooth;

use crate::error::Result;
use crate::layer::{Context, GemmInput, Layer};
use crate::param::{Builder, Init, Param, Part};
use crate::recipe::{LinearSite, ProductPrecision, Products};
use crate::scaling::{Frozen, ScalingState, Slot};
use ottava_tensor::Tensor;
use ottava_tensor::ops::{Accumulation, Copies, Operand, add_bias, bias_gradient, gemm_nt, gemm_nt_plus};

/// `y = x · Wᵀ + b`;  `dx = dy · W`;  `dW += dyᵀ · x`;  `db += Σ dy`.
pub struct Linear {
    weight: Param,       /* [N, K] */
    bias: Option<Param>, /* [N] */
    fp8: Option<Fp8>,
}

/// The FP8 side of a linear layer; the weight's own cast is the parameter's.
struct Fp8 {
    input: Slot,
    grad_output: Slot,
    products: Products,
    /// The cast of a weight that scales of the input's columns go into, which is none of the parameter's.
    smooth_weight: Option<Slot>,
}

impl Fp8 {
    /// What products read in this step.
    fn products(&self, scaling: &ScalingState) -> Products {
        if scaling.is_high_precision() { Products::HIGH } else { self.products }
    }

    /// Casts `x`, as its slot says, for those of `products` that read codes: the one that contracts it along its columns and wgrad,
    /// as far as `copies` are wanted. In its first cast of the step, `frozen` is `None` and it is measured; so wgrad's copy is made
    /// then in any case, where it is the only one.
    fn cast(
        slot: Slot,
        products: [ProductPrecision; 2],
        x: Tensor,
        copies: Copies,
        frozen: Option<Frozen>,
        scaling: &mut ScalingState,
    ) -> Result<GemmInput> {
        let high = |i: usize| products[i] == ProductPrecision::High;
        let first = frozen.is_none();
        let wanted = [copies != Copies::Columns, copies != Copies::Rows || (first && high(0))];
        let Some(copies) = copies_of([0, 1].map(|i| wanted[i] && !high(i))) else {
            if first {
                scaling.measure(slot, &x)?;
            }
            return Ok(GemmInput::Plain(x));
        };
        let (codes, frozen) = match frozen {
            Some(frozen) => (scaling.quantize_again(slot, &frozen, &x, copies)?, frozen),
            None => {
                let frozen = scaling.freeze(slot, &x)?;
                (scaling.quantize_by(slot, &frozen, &x, copies)?, frozen)
            }
        };
        let keeps_value = [0, 1].iter().any(|&i| wanted[i] && high(i));
        Ok(if keeps_value { GemmInput::Both(x, Box::new(codes), frozen) } else { GemmInput::Quantized(codes, frozen) })
    }
}

/// What backward has of the input.
pub enum LinearSaved {
    /// What wgrad reads: the transposed codes of `x`, or `x` `[T, K]` itself.
    Kept(GemmInput),
    /// Nothing but how it was cast: whoever made it makes it again.
    Dropped(Frozen),
}

impl LinearSaved {
    /// What backward has of an operand of which forward wanted `copies`.
    fn of(x: GemmInput, copies: Copies) -> LinearSaved {
        match x.for_wgrad() {
            // Its producer will make the transposed codes by the way.
            GemmInput::Quantized(codes, frozen) if codes.transposed.is_none() => LinearSaved::Dropped(frozen),
            x if copies == Copies::Rows => LinearSaved::Dropped(x.into_frozen()),
            x => LinearSaved::Kept(x),
        }
    }

    /// The operand, which `again` makes if it was dropped.
    pub fn operand(self, again: impl FnOnce(Frozen) -> Result<GemmInput>) -> Result<GemmInput> {
        match self {
            LinearSaved::Kept(x) => Ok(x),
            LinearSaved::Dropped(frozen) => again(frozen),
        }
    }
}

impl Linear {
    /// A linear of the stacked `parts` (name without `.weight`, rows) with `inputs` columns, called `name` in the scaling state.
    pub fn new(
        build: &mut Builder,
        name: &str,
        parts: &[(String, usize)],
        inputs: usize,
        bias: bool,
        std: f32,
    ) -> Result<Linear> {
        Linear::build(build, name, parts, inputs, bias, std, false)
    }

    /// As [`Linear::new`], with an input from SwiGLU, whose columns recipes may scale one by one. Whoever calls it then asks
    /// [`Linear::is_smooth`] first.
    pub fn after_swiglu(
        build: &mut Builder,
        name: &str,
        parts: &[(String, usize)],
        inputs: usize,
        bias: bool,
        std: f32,
    ) -> Result<Linear> {
        Linear::build(build, name, parts, inputs, bias, std, true)
    }

    fn build(
        build: &mut Builder,
        name: &str,
        parts: &[(String, usize)],
        inputs: usize,
        bias: bool,
        std: f32,
        after_swiglu: bool,
    ) -> Result<Linear> {
        let part = |suffix: &str, columns: Option<usize>| -> Vec<Part> {
            let shape = |rows| std::iter::once(rows).chain(columns).collect();
            parts.iter().map(|(name, rows)| Part { name: format!("{name}.{suffix}"), shape: shape(*rows) }).collect()
        };
        let mut weight = Param::matrix(build, part("weight", Some(inputs)), Init::Normal(std))?;
        let bias = bias.then(|| Param::new(build, part("bias", None), Init::Zeros)).transpose()?;
        let site = LinearSite {
            name: name.to_string(),
            parts: parts.iter().map(|(name, _)| name.clone()).collect(),
            outputs: parts.iter().map(|(_, rows)| rows).sum(),
            inputs,
            block: build.block,
            after_swiglu,
        };
        let decision = build.recipe.decide(&site)?;
        let Some((casts, products)) = decision.fp8 else {
            weight.move_home()?;
            return Ok(Linear { weight, bias, fp8: None });
        };
        let input = build.slots.add(format!("{name}.input"), casts.input);
        let reads = [products.fprop, products.dgrad].map(|product| product != ProductPrecision::High);
        let mut smooth_weight = None;
        if let Some(copies) = copies_of(reads) {
            let slot = build.slots.add(format!("{name}.weight"), casts.weight);
            match decision.smooth {
                true => smooth_weight = Some(slot),
                false => weight.cast_in(slot, copies, build.purpose),
            }
        }
        weight.move_home()?;
        let grad_output = build.slots.add(format!("{name}.grad_output"), casts.grad_output);
        Ok(Linear { weight, bias, fp8: Some(Fp8 { input, grad_output, products, smooth_weight }) })
    }

    /// The slot of the cast that a producer of this linear's input should write to, if codes are all that its products read.
    /// One that is smooth reads the input itself first.
    pub fn input_slot(&self, scaling: &ScalingState) -> Option<Slot> {
        let reads_codes = |fp8: &&Fp8| {
            let Products { fprop, wgrad, .. } = fp8.products(scaling);
            fp8.smooth_weight.is_none() && ![fprop, wgrad].contains(&ProductPrecision::High)
        };
        self.fp8.as_ref().filter(reads_codes).map(|fp8| fp8.input)
    }

    /// The slot of the cast that a producer of this linear's output gradient should write to, if codes are all that its products read.
    /// A bias needs the gradient itself.
    pub fn gradient_slot(&self, scaling: &ScalingState) -> Option<Slot> {
        let reads_codes = |fp8: &&Fp8| {
            let Products { dgrad, wgrad, .. } = fp8.products(scaling);
            self.bias.is_none() && ![dgrad, wgrad].contains(&ProductPrecision::High)
        };
        self.fp8.as_ref().filter(reads_codes).map(|fp8| fp8.grad_output)
    }

    /// [`Layer::forward`], plus `residual` `[T, N]` where there is one, which the product adds on its way out.
    pub fn forward_plus(
        &self,
        x: GemmInput,
        residual: Option<&Tensor>,
        context: &mut Context,
    ) -> Result<(Tensor, LinearSaved)> {
        let copies = context.operand_copies();
        let x = self.cast_input(x, copies, None, context.scaling)?;
        let y = self.fprop(&x, residual, context.scaling)?;
        Ok((y, LinearSaved::of(x, copies)))
    }

    /// What [`Linear::forward_plus`] saves, without its output.
    pub fn save(&self, x: GemmInput, context: &mut Context) -> Result<LinearSaved> {
        let copies = context.operand_copies();
        Ok(LinearSaved::of(self.cast_input(x, copies, None, context.scaling)?, copies))
    }

    /// An input in the form that products read, for which `copies` are wanted; `frozen` is the scale of one that is made again.
    pub fn cast_input(
        &self,
        x: GemmInput,
        copies: Copies,
        frozen: Option<Frozen>,
        scaling: &mut ScalingState,
    ) -> Result<GemmInput> {
        match (x, &self.fp8) {
            // In a step of high precision, or it would not come here.
            (GemmInput::Plain(x), Some(Fp8 { smooth_weight: Some(_), .. })) => {
                if frozen.is_none() {
                    self.measure_smooth(&x, scaling)?;
                }
                Ok(GemmInput::Plain(x))
            }
            (GemmInput::Plain(x), Some(fp8)) => {
                let Products { fprop, wgrad, .. } = fp8.products(scaling);
                Fp8::cast(fp8.input, [fprop, wgrad], x, copies, frozen, scaling)
            }
            (x, _) => Ok(x),
        }
    }

    /// `x · Wᵀ + b + residual`, of an operand from [`Linear::cast_input`].
    pub fn fprop(&self, x: &GemmInput, residual: Option<&Tensor>, scaling: &mut ScalingState) -> Result<Tensor> {
        match self.products(scaling).fprop {
            ProductPrecision::Fp8(how) => {
                let weight = self.weight.codes_for_forward(scaling)?;
                self.output(Operand::Rows(x.codes()), Operand::Rows(&weight), residual, how)
            }
            ProductPrecision::High => {
                self.weight.measure_for_forward(scaling)?;
                self.output(Operand::plain(x.value()), Operand::plain(&self.weight.value()?), residual, PLAIN)
            }
        }
    }

    /// `a · bᵀ + bias + residual`.
    fn output(&self, a: Operand, b: Operand, residual: Option<&Tensor>, how: Accumulation) -> Result<Tensor> {
        let mut y = match residual {
            Some(residual) => gemm_nt_plus(a, b, residual, how)?,
            None => gemm_nt(a, b, self.weight.dtype(), how)?,
        };
        if let Some(bias) = &self.bias {
            add_bias(&mut y, &bias.value()?)?;
        }
        Ok(y)
    }

    /// The gradient by the output as dgrad and wgrad read it; adds to the gradient of the bias.
    pub fn cast_gradient(&mut self, dy: GemmInput, scaling: &mut ScalingState) -> Result<GemmInput> {
        if let Some(bias) = &mut self.bias {
            bias_gradient(dy.value(), bias.grad_mut()?)?;
        }
        match (dy, &self.fp8) {
            (GemmInput::Plain(dy), Some(fp8)) => {
                let Products { dgrad, wgrad, .. } = fp8.products(scaling);
                Fp8::cast(fp8.grad_output, [dgrad, wgrad], dy, Copies::Both, None, scaling)
            }
            (GemmInput::Measured(dy, amax), Some(fp8)) => {
                scaling.quantize_measured(fp8.grad_output, &dy, amax, Copies::Both)
            }
            (dy, _) => Ok(dy),
        }
    }

    /// `dy · W`, of a gradient from [`Linear::cast_gradient`].
    pub fn dgrad(&self, dy: &GemmInput, scaling: &mut ScalingState) -> Result<Tensor> {
        let out = self.weight.dtype();
        Ok(match self.products(scaling).dgrad {
            ProductPrecision::Fp8(how) => {
                let weight = self.weight.codes_for_backward(scaling)?;
                gemm_nt(Operand::Rows(dy.codes()), Operand::Columns(&weight), out, how)?
            }
            ProductPrecision::High => {
                gemm_nt(Operand::plain(dy.value()), Operand::plain_transposed(&self.weight.value()?), out, PLAIN)?
            }
        })
    }

    /// Adds `dyᵀ · x` to the gradient of the weight.
    pub fn wgrad(&mut self, dy: &GemmInput, x: &GemmInput, scaling: &ScalingState) -> Result<()> {
        match self.products(scaling).wgrad {
            ProductPrecision::Fp8(how) => {
                let (a, b) = (Operand::Columns(dy.codes()), Operand::Columns(x.codes()));
                self.weight.add_product_to_grad(a, b, how)
            }
            ProductPrecision::High => {
                let (a, b) = (Operand::plain_transposed(dy.value()), Operand::plain_transposed(x.value()));
                self.weight.add_product_to_grad(a, b, PLAIN)
            }
        }
    }

    fn products(&self, scaling: &ScalingState) -> Products {
        self.fp8.as_ref().map_or(Products::HIGH, |fp8| fp8.products(scaling))
    }
}

impl Layer for Linear {
    type Input = GemmInput;
    type Saved = LinearSaved;

    fn forward(&self, x: GemmInput, context: &mut Context) -> Result<(Tensor, LinearSaved)> {
        self.forward_plus(x, None, context)
    }

    fn backward(&mut self, dy: GemmInput, saved: LinearSaved, context: &mut Context) -> Result<Tensor> {
        let x = saved.operand(|_| unreachable!("what a linear alone saves is not dropped"))?;
        let dy = self.cast_gradient(dy, context.scaling)?;
        let dx = self.dgrad(&dy, context.scaling)?;
        self.wgrad(&dy.for_wgrad(), &x, context.scaling)?;
        Ok(dx)
    }

    fn parameters<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        visit(&mut self.weight);
        if let Some(bias) = &mut self.bias {
            visit(bias);
        }
    }
}

/// Wide operands are always added up exactly.
const PLAIN: Accumulation = Accumulation::Exact;

/// The copies that are read along the rows and along the columns, if any is.
fn copies_of(read: [bool; 2]) -> Option<Copies> {
    match read {
        [true, true] => Some(Copies::Both),
        [true, false] => Some(Copies::Rows),
        [false, true] => Some(Copies::Columns),
        [false, false] => None,
    }
}
