//! What a recipe is: casts, products, exceptions.

use crate::error::{Error, Result};
use ottava_tensor::ops::{Accumulation, CurrentScaling, DelayedScaling};
use ottava_tensor::{DType, Device, Granularity};
use serde::{Deserialize, Serialize};

/// How a cast finds its scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scaling {
    /// From the amaxes of earlier steps.
    Delayed {
        /// How amaxes become a scale.
        how: DelayedScaling,
        /// Steps that are remembered.
        window: usize,
        /// What the first step does, before anything is remembered.
        first_step: FirstStep,
    },
    /// From the tensor itself.
    Current(CurrentScaling),
}

/// What delayed scaling does while its history is empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FirstStep {
    /// Scales by the tensor's own amax.
    Current,
    /// Scales by 1, as Transformer Engine does.
    Unscaled,
}

/// How one operand of the matrix products is cast.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cast {
    /// The FP8 format.
    pub format: DType,
    /// What shares a scale.
    pub granularity: Granularity,
    /// Where the scale comes from.
    pub scaling: Scaling,
}

/// The casts of a linear layer's three operands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Casts {
    /// `x`, read by fprop and wgrad.
    pub input: Cast,
    /// `W`, read by fprop and dgrad.
    pub weight: Cast,
    /// `dy`, read by dgrad and wgrad.
    pub grad_output: Cast,
}

/// What a product of a linear layer reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProductPrecision {
    /// Operands in the recipe's compute type.
    High,
    /// FP8 operands, whose products add up so.
    Fp8(Accumulation),
}

impl ProductPrecision {
    /// How the product adds up; wide operands always add up exactly.
    pub fn accumulation(self) -> Accumulation {
        match self {
            ProductPrecision::High => Accumulation::Exact,
            ProductPrecision::Fp8(accumulation) => accumulation,
        }
    }
}

/// What each product of a linear layer reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Products {
    /// `y = x · Wᵀ`.
    pub fprop: ProductPrecision,
    /// `dx = dy · W`.
    pub dgrad: ProductPrecision,
    /// `dW = dyᵀ · x`.
    pub wgrad: ProductPrecision,
}

impl Products {
    /// All operands in the compute type.
    pub const HIGH: Products =
        Products { fprop: ProductPrecision::High, dgrad: ProductPrecision::High, wgrad: ProductPrecision::High };
}

/// The precision of a run. Embedding, norms, attention, head and loss always stay in `compute`.
#[derive(Clone, Debug, PartialEq)]
pub struct Recipe {
    /// Its name in configuration files.
    pub name: RecipeName,
    /// Type of activations, and of weights outside FP8 products.
    pub compute: DType,
    /// The casts of the blocks' linears; `None` leaves them in `compute`.
    pub casts: Option<Casts>,
    /// What the products of those linears read.
    pub products: Products,
    /// Linears that stay in `compute` all the same; [`Recipe::decide`] tells for each.
    pub exceptions: Exceptions,
    /// Whether linears after SwiGLU scale the columns of their input one by one, where casts have one scale per tensor.
    pub smooth_swiglu: bool,
    /// Whether attention's gradient adds up in one order, whatever that costs.
    pub deterministic: bool,
}

/// The recipes one can name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RecipeName {
    /// Everything in binary32.
    Fp32,
    /// Activations and products in bfloat16, master weights in binary32.
    Bf16,
    /// The same in float16, with a loss scale.
    Fp16,
    /// FP8 products with scales from earlier steps.
    Fp8Delayed,
    /// FP8 products with scales from the tensors themselves.
    Fp8Current,
    /// FP8 products with a scale for each row of an operand, from the row itself.
    Fp8Row,
    /// FP8 products with a scale for each block of an operand, from the block itself.
    Fp8Block,
    /// The same with MX's blocks of 32 and scales that are powers of two: what Blackwell computes, emulated on the CPU.
    Mxfp8,
}

impl Recipe {
    /// Checks that `device` has the products of this recipe.
    pub fn expect_on(&self, device: &Device) -> Result<()> {
        match (device, self.name) {
            (Device::Cuda(_), RecipeName::Mxfp8) => Err(Error::Config(
                "recipe mxfp8 needs products that Hopper GPUs do not have; it is emulated with `device = \"cpu\"`, and recipe fp8-block is its like on this GPU".into(),
            )),
            _ => Ok(()),
        }
    }
}

impl RecipeName {
    /// All names, in the order of the documentation.
    pub const ALL: [RecipeName; 8] = [
        RecipeName::Fp32,
        RecipeName::Bf16,
        RecipeName::Fp16,
        RecipeName::Fp8Delayed,
        RecipeName::Fp8Current,
        RecipeName::Fp8Row,
        RecipeName::Fp8Block,
        RecipeName::Mxfp8,
    ];

    /// The spelling in configuration files.
    pub const fn as_str(self) -> &'static str {
        match self {
            RecipeName::Fp32 => "fp32",
            RecipeName::Bf16 => "bf16",
            RecipeName::Fp16 => "fp16",
            RecipeName::Fp8Delayed => "fp8-delayed",
            RecipeName::Fp8Current => "fp8-current",
            RecipeName::Fp8Row => "fp8-row",
            RecipeName::Fp8Block => "fp8-block",
            RecipeName::Mxfp8 => "mxfp8",
        }
    }
}

impl std::str::FromStr for RecipeName {
    type Err = Error;
    fn from_str(text: &str) -> Result<RecipeName> {
        RecipeName::ALL.into_iter().find(|name| name.as_str() == text).ok_or_else(|| {
            let names = RecipeName::ALL.map(RecipeName::as_str).join(", ");
            Error::Config(format!("there is no recipe `{text}`; the recipes are {names}"))
        })
    }
}

/// Linears that stay in the compute type of a recipe that casts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Exceptions {
    /// Patterns of names: `*` stands for any characters, `?` for one.
    pub patterns: Vec<String>,
    /// Blocks at the start.
    pub first: usize,
    /// Blocks at the end.
    pub last: usize,
    /// Tokens of a micro-batch, where linears that FP8 would make slower are exceptions too.
    pub slow_at: Option<usize>,
}
