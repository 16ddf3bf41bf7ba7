//! The linear layer, whose three products are what FP8 speeds up.

use crate::error::Result;
use crate::layer::{Context, GemmInput, Layer};
use crate::param::{Builder, Init, Param, Part, Purpose};
use crate::recipe::Products;
use crate::scaling::{ScalingState, Slot};
use ottava_tensor::ops::{Copies, Operand, add_bias, bias_gradient, gemm_nt};
use ottava_tensor::{QuantizedTensor, Tensor};

/// `y = x · Wᵀ + b`;  `dx = dy · W`;  `dW += dyᵀ · x`;  `db += Σ dy`.
pub struct Linear {
    weight: Param,       /* [N, K] */
    bias: Option<Param>, /* [N] */
    fp8: Option<Fp8>,
}

/// The FP8 side of a linear layer.
struct Fp8 {
    input: Slot,
    weight_slot: Slot,
    grad_output: Slot,
    products: Products,
    purpose: Purpose,
    /// The weight's codes, made once per optimizer step by [`Linear::quantize_weight`].
    weight: Option<QuantizedTensor>,
}

/// What backward reads of the input: the FP8 codes, contracted over tokens, or the input itself.
pub enum LinearSaved {
    /// `x` `[T, K]`.
    Plain(Tensor),
    /// The transposed codes of `x`.
    Quantized(QuantizedTensor),
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
        let weight = Param::matrix(build, part("weight", Some(inputs)), Init::Normal(std))?;
        let bias = bias.then(|| Param::new(build, part("bias", None), Init::Zeros)).transpose()?;
        let fp8 = build.recipe.casts.map(|casts| Fp8 {
            input: build.slots.add(format!("{name}.input"), casts.input),
            weight_slot: build.slots.add(format!("{name}.weight"), casts.weight),
            grad_output: build.slots.add(format!("{name}.grad_output"), casts.grad_output),
            products: build.recipe.products,
            purpose: build.purpose,
            weight: None,
        });
        Ok(Linear { weight, bias, fp8 })
    }

    /// Casts the weight for the coming step; to be called whenever weights or scales have changed.
    pub fn quantize_weight(&mut self, scaling: &mut ScalingState) -> Result<()> {
        if let Some(fp8) = &mut self.fp8 {
            let copies = if fp8.purpose.trains() { Copies::Both } else { Copies::Rows };
            // The old codes go first, so that at no time two copies are alive.
            fp8.weight = None;
            fp8.weight = Some(scaling.quantize(fp8.weight_slot, &self.weight.value, copies)?);
        }
        Ok(())
    }
}

impl Fp8 {
    fn weight(&self) -> &QuantizedTensor {
        self.weight.as_ref().expect("weights are quantized before the first forward")
    }
}

impl Linear {
    /// The slot of the cast that a producer of this linear's input should write to, if there is one.
    pub fn input_slot(&self) -> Option<Slot> {
        self.fp8.as_ref().map(|fp8| fp8.input)
    }

    /// The slot of the cast that a producer of this linear's output gradient should write to. A bias needs the gradient itself.
    pub fn gradient_slot(&self) -> Option<Slot> {
        self.fp8.as_ref().filter(|_| self.bias.is_none()).map(|fp8| fp8.grad_output)
    }
}

impl Layer for Linear {
    type Input = GemmInput;
    type Saved = LinearSaved;

    fn forward(&self, x: GemmInput, context: &mut Context) -> Result<(Tensor, LinearSaved)> {
        let out = self.weight.value.dtype();
        let (mut y, saved) = match (x, &self.fp8) {
            (GemmInput::Plain(x), None) => {
                let (a, b) = (Operand::plain(&x), Operand::plain(&self.weight.value));
                (gemm_nt(a, b, out, PLAIN)?, LinearSaved::Plain(x))
            }
            (x, Some(fp8)) => {
                let input = match x {
                    GemmInput::Plain(x) => context.scaling.quantize(fp8.input, &x, context.input_copies())?,
                    GemmInput::Quantized(input) => input,
                };
                let (a, b) = (Operand::Rows(&input), Operand::Rows(fp8.weight()));
                let y = gemm_nt(a, b, out, fp8.products.fprop)?;
                (y, LinearSaved::Quantized(input.only_transposed()))
            }
            (GemmInput::Quantized(_), None) => unreachable!("nobody casts for a linear without a slot"),
        };
        if let Some(bias) = &self.bias {
            add_bias(&mut y, &bias.value)?;
        }
        Ok((y, saved))
    }

    fn backward(&mut self, dy: GemmInput, saved: LinearSaved, context: &mut Context) -> Result<Tensor> {
        if let Some(bias) = &mut self.bias {
            let GemmInput::Plain(dy) = &dy else { unreachable!("a linear with a bias has no gradient slot") };
            bias_gradient(dy, bias.grad_mut()?)?;
        }
        let out = self.weight.value.dtype();
        match (saved, &self.fp8) {
            (LinearSaved::Quantized(input), Some(fp8)) => {
                let cast = match dy {
                    GemmInput::Plain(dy) => context.scaling.quantize(fp8.grad_output, &dy, Copies::Both)?,
                    GemmInput::Quantized(cast) => cast,
                };
                let (a, b) = (Operand::Columns(&cast), Operand::Columns(&input));
                self.weight.add_product_to_grad(a, b, fp8.products.wgrad)?;
                let (a, b) = (Operand::Rows(&cast), Operand::Columns(fp8.weight()));
                Ok(gemm_nt(a, b, out, fp8.products.dgrad)?)
            }
            (LinearSaved::Plain(x), None) => {
                let GemmInput::Plain(dy) = dy else { unreachable!("nobody casts for a linear without a slot") };
                let (a, b) = (Operand::plain_transposed(&dy), Operand::plain_transposed(&x));
                self.weight.add_product_to_grad(a, b, PLAIN)?;
                let (a, b) = (Operand::plain(&dy), Operand::plain_transposed(&self.weight.value));
                Ok(gemm_nt(a, b, out, PLAIN)?)
            }
            _ => unreachable!("a linear saves what its recipe makes it"),
        }
    }

    fn parameters<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        visit(&mut self.weight);
        if let Some(bias) = &mut self.bias {
            visit(bias);
        }
    }
}

/// Wide operands are always added up exactly.
const PLAIN: ottava_tensor::ops::Accumulation = ottava_tensor::ops::Accumulation::Exact;
