//! The linear layer, whose three products are what FP8 speeds up.

use crate::error::Result;
use crate::layer::{Context, GemmInput, Layer};
use crate::param::{Builder, Init, Param, Part};
use crate::recipe::{LinearSite, Products};
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
}

/// What backward has of the input.
pub enum LinearSaved {
    /// What wgrad reads: the transposed codes of `x`, or `x` `[T, K]` itself.
    Kept(GemmInput),
    /// Nothing but how it was cast: whoever made it makes it again.
    Dropped(Frozen),
}

impl LinearSaved {
    /// Forgets the operand.
    pub fn drop_operand(&mut self) {
        if let LinearSaved::Kept(x) = self {
            *self = LinearSaved::Dropped(match x {
                GemmInput::Plain(_) | GemmInput::Measured(..) => Frozen::default(),
                GemmInput::Quantized(_, frozen) => std::mem::take(frozen),
            });
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
        };
        let Some((casts, products)) = build.recipe.decide(&site)?.fp8 else {
            return Ok(Linear { weight, bias, fp8: None });
        };
        let input = build.slots.add(format!("{name}.input"), casts.input);
        weight.cast_in(build.slots.add(format!("{name}.weight"), casts.weight), build.purpose);
        let grad_output = build.slots.add(format!("{name}.grad_output"), casts.grad_output);
        Ok(Linear { weight, bias, fp8: Some(Fp8 { input, grad_output, products }) })
    }

    /// The slot of the cast that a producer of this linear's input should write to, if there is one.
    pub fn input_slot(&self) -> Option<Slot> {
        self.fp8.as_ref().map(|fp8| fp8.input)
    }

    /// The slot of the cast that a producer of this linear's output gradient should write to. A bias needs the gradient itself.
    pub fn gradient_slot(&self) -> Option<Slot> {
        self.fp8.as_ref().filter(|_| self.bias.is_none()).map(|fp8| fp8.grad_output)
    }

    /// [`Layer::forward`], plus `residual` `[T, N]` where there is one, which the product adds on its way out.
    pub fn forward_plus(
        &self,
        x: GemmInput,
        residual: Option<&Tensor>,
        context: &mut Context,
    ) -> Result<(Tensor, LinearSaved)> {
        let copies = context.operand_copies();
        let x = self.cast_input(x, copies, context.scaling)?;
        let y = self.fprop(&x, residual, context.scaling)?;
        let saved = match x {
            GemmInput::Quantized(codes, frozen) if codes.transposed.is_none() => LinearSaved::Dropped(frozen),
            x => LinearSaved::Kept(x.only_transposed()),
        };
        Ok((y, saved))
    }

    fn cast_input(&self, x: GemmInput, copies: Copies, scaling: &mut ScalingState) -> Result<GemmInput> {
        match (x, &self.fp8) {
            (GemmInput::Plain(x), Some(fp8)) => scaling.quantize(fp8.input, &x, copies),
            (x, _) => Ok(x),
        }
    }

    /// `x · Wᵀ + b + residual`, of an operand that has been cast.
    pub fn fprop(&self, x: &GemmInput, residual: Option<&Tensor>, scaling: &mut ScalingState) -> Result<Tensor> {
        let out = self.weight.value.dtype();
        let product = |a, b, how| match residual {
            Some(residual) => gemm_nt_plus(a, b, residual, how),
            None => gemm_nt(a, b, out, how),
        };
        let mut y = match (x, &self.fp8) {
            (GemmInput::Plain(x), None) => product(Operand::plain(x), Operand::plain(&self.weight.value), PLAIN)?,
            (GemmInput::Quantized(x, _), Some(fp8)) => {
                let weight = self.weight.codes_for_forward(scaling)?;
                product(Operand::Rows(x), Operand::Rows(&weight), fp8.products.fprop)?
            }
            _ => unreachable!("an operand is cast where its linear is"),
        };
        if let Some(bias) = &self.bias {
            add_bias(&mut y, &bias.value)?;
        }
        Ok(y)
    }

    /// The gradient by the output as dgrad and wgrad read it; adds to the gradient of the bias.
    pub fn cast_gradient(&mut self, dy: GemmInput, scaling: &mut ScalingState) -> Result<GemmInput> {
        if let Some(bias) = &mut self.bias {
            let (GemmInput::Plain(dy) | GemmInput::Measured(dy, _)) = &dy else {
                unreachable!("a linear with a bias has no gradient slot")
            };
            bias_gradient(dy, bias.grad_mut()?)?;
        }
        match (dy, &self.fp8) {
            (GemmInput::Plain(dy), Some(fp8)) => scaling.quantize(fp8.grad_output, &dy, Copies::Both),
            (GemmInput::Measured(dy, amax), Some(fp8)) => {
                scaling.quantize_measured(fp8.grad_output, &dy, amax, Copies::Both)
            }
            (dy, _) => Ok(dy),
        }
    }

    /// `dy · W`, of a gradient that has been cast.
    pub fn dgrad(&self, dy: &GemmInput, scaling: &mut ScalingState) -> Result<Tensor> {
        let out = self.weight.value.dtype();
        Ok(match (dy, &self.fp8) {
            (GemmInput::Quantized(dy, _), Some(fp8)) => {
                let weight = self.weight.codes_for_backward(scaling)?;
                gemm_nt(Operand::Rows(dy), Operand::Columns(&weight), out, fp8.products.dgrad)?
            }
            (GemmInput::Plain(dy), None) => {
                gemm_nt(Operand::plain(dy), Operand::plain_transposed(&self.weight.value), out, PLAIN)?
            }
            _ => unreachable!("a gradient is cast where its linear is"),
        })
    }

    /// Adds `dyᵀ · x` to the gradient of the weight.
    pub fn wgrad(&mut self, dy: &GemmInput, x: &GemmInput) -> Result<()> {
        match (dy, x, &self.fp8) {
            (GemmInput::Quantized(dy, _), GemmInput::Quantized(x, _), Some(fp8)) => {
                let (a, b) = (Operand::Columns(dy), Operand::Columns(x));
                self.weight.add_product_to_grad(a, b, fp8.products.wgrad)
            }
            (GemmInput::Plain(dy), GemmInput::Plain(x), None) => {
                let (a, b) = (Operand::plain_transposed(dy), Operand::plain_transposed(x));
                self.weight.add_product_to_grad(a, b, PLAIN)
            }
            _ => unreachable!("gradient and input are cast alike"),
        }
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
        self.wgrad(&dy.only_transposed(), &x)?;
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
