//! The parts of a recipe: casts, products, exceptions.

use crate::KvCacheDtype;
use ottava_common::error::{Error, Result};
use ottava_tensor::ops::{Accumulation, CurrentScaling, DelayedScaling, has_ordered_sums};
use ottava_tensor::{Capability, DType, Device, Granularity};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The origin of a cast's scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scaling {
    /// Delayed scaling: the scale comes from the amaxes of earlier steps.
    Delayed {
        /// The rule that computes a scale from amaxes.
        how: DelayedScaling,
        /// The number of steps in the amax history.
        window: usize,
        /// The scale of the first step, which has no history.
        first_step: FirstStep,
    },
    /// Current scaling: the scale comes from the tensor itself.
    Current(CurrentScaling),
}

/// The scale of the first step, whose history is empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum FirstStep {
    /// Scales by the tensor's own amax.
    Current,
    /// Scales by 1, as Transformer Engine does.
    Unscaled,
}

/// The cast of one operand of the matrix products.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cast {
    /// The FP8 format.
    pub format: DType,
    /// The elements that share a scale.
    pub granularity: Granularity,
    /// The source of the scale.
    pub scaling: Scaling,
}

/// The casts of a linear layer's three operands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearCasts {
    /// `x`, read by fprop and wgrad.
    pub input: Cast,
    /// `W`, read by fprop and dgrad.
    pub weight: Cast,
    /// `dy`, read by dgrad and wgrad.
    pub grad_output: Cast,
}

/// The FP8 formats of the operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Fp8Format {
    /// [`Fp8Format::Hybrid`] if a tensor has one scale. [`Fp8Format::E4m3`] if it has several scales, because then it needs less range.
    Auto,
    /// E4M3 for inputs and weights, E5M2 for gradients.
    Hybrid,
    /// E4M3 everywhere.
    E4m3,
}

/// The products of a linear layer, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ProductName {
    /// `y = x · Wᵀ`.
    Fprop,
    /// `dx = dy · W`.
    Dgrad,
    /// `dW = dyᵀ · x`.
    Wgrad,
}

/// The precision of a product of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProductPrecision {
    /// Operands in the compute type of the recipe.
    High,
    /// FP8 operands, with this kind of accumulation.
    Fp8(Accumulation),
}

impl ProductPrecision {
    /// Returns the accumulation of the product. It is always exact for operands in the compute type.
    pub fn accumulation(self) -> Accumulation {
        match self {
            ProductPrecision::High => Accumulation::Exact,
            ProductPrecision::Fp8(accumulation) => accumulation,
        }
    }
}

/// The precision of each product of a linear layer.
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
    /// All products in the compute type.
    pub const HIGH: Products =
        Products { fprop: ProductPrecision::High, dgrad: ProductPrecision::High, wgrad: ProductPrecision::High };
}

/// The precision of a run. Embedding, norms, attention, head and loss always stay in `compute`.
#[derive(Clone, Debug, PartialEq)]
pub struct Recipe {
    /// The name in configuration files.
    pub name: RecipeName,
    /// The type of activations, and the type of weights outside FP8 products.
    pub compute: DType,
    /// The casts of the blocks' linears. `None` leaves the linears in `compute`.
    pub casts: Option<LinearCasts>,
    /// The precision of the products of the blocks' linears.
    pub products: Products,
    /// The linears that stay in `compute`.
    pub exceptions: Exceptions,
    /// Other casts for some linears. The first override that matches a linear applies.
    pub overrides: Vec<Override>,
    /// Whether linears after SwiGLU scale each column of their input separately, if their casts have one scale per tensor.
    pub smooth_swiglu: bool,
    /// Whether the gradient of attention is summed in a fixed order.
    pub deterministic: bool,
    /// The type in which training reads keys and values, as draws read them from their cache.
    pub kv_cache_dtype: KvCacheDtype,
}

/// The names of recipes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RecipeName {
    /// Everything in float32.
    Fp32,
    /// Activations and products in bfloat16, master weights in float32.
    Bf16,
    /// Activations and products in float16, with a loss scale.
    Fp16,
    /// FP8 products with one scale per tensor, from the amaxes of earlier steps.
    Fp8Delayed,
    /// FP8 products with one scale per tensor, from the tensor itself.
    Fp8Current,
    /// FP8 products with one scale per row, from the row itself.
    Fp8Row,
    /// FP8 products with one scale per block: 1x128 for activations, 128x128 for weights.
    Fp8Block,
    /// FP8 products with one power of two per 32 values, as on Blackwell GPUs; emulated on every device, slower than "bf16".
    Mxfp8,
    /// 4-bit products with one E4M3 scale per 16 values and one scale per tensor, as on Blackwell GPUs; emulated on every device, slower than "bf16".
    Nvfp4,
}

impl Recipe {
    /// Returns the type in which attention of training reads keys and values, if it is not the compute type.
    pub fn kv_dtype(&self) -> Option<DType> {
        Some(self.kv_cache_dtype.resolve(self.compute)).filter(|dtype| *dtype != self.compute)
    }

    /// Returns whether the recipe casts any linear to FP8.
    pub fn casts_to_fp8(&self) -> bool {
        self.casts.is_some() || self.overrides.iter().any(|other| other.casts.is_some())
    }

    /// Returns whether all products of forward on `device` can have sums whose order does not depend on the batch, as [`has_ordered_sums`] says.
    pub fn has_ordered_sums(&self, device: &Device) -> bool {
        let others = self.overrides.iter().map(|other| other.casts);
        std::iter::once(self.casts).chain(others).all(|casts| {
            let casts = casts.map(|casts| [casts.input, casts.weight].map(|cast| (cast.format, cast.granularity)));
            has_ordered_sums(device, self.compute, casts)
        })
    }

    /// Errors if `device` lacks the products of this recipe.
    pub fn expect_on(&self, device: &Device) -> Result<()> {
        self.expect_casts_on(self.name, self.casts.as_ref(), device)?;
        let mut overrides = self.overrides.iter();
        overrides.try_for_each(|other| self.expect_casts_on(other.recipe, other.casts.as_ref(), device))
    }

    fn expect_casts_on(&self, recipe: RecipeName, casts: Option<&LinearCasts>, device: &Device) -> Result<()> {
        let (Device::Cuda(gpu), Some(LinearCasts { input, weight, grad_output })) = (device, casts) else {
            return Ok(());
        };
        let (name, capability) = (recipe.as_str(), Capability::find(gpu.capability())?);
        let refuse = |why: String| {
            let instead = capability.fp8_products.last().map_or("bf16", |scales| match scales {
                Granularity::PerRow => "fp8-row",
                scales if scales.block() == Some(128) => "fp8-block",
                _ => "fp8-current",
            });
            Err(Error::Config(format!(
                "recipe {name} does not run on {}: {why}; use recipe {instead}, or `device = \"cpu\"`, which emulates {name}",
                gpu.name()
            )))
        };
        // Products of formats with small blocks are emulated on every GPU.
        let casts = [input, weight, grad_output].into_iter().filter(|cast| cast.granularity.microscaling().is_none());
        for cast in casts {
            if let Err(error) = capability.expect_fp8_product(cast.granularity) {
                return refuse(error.to_string());
            }
        }
        Ok(())
    }
}

impl RecipeName {
    /// All names, in the order in which they are documented.
    pub const ALL: [RecipeName; 9] = [
        RecipeName::Fp32,
        RecipeName::Bf16,
        RecipeName::Fp16,
        RecipeName::Fp8Delayed,
        RecipeName::Fp8Current,
        RecipeName::Fp8Row,
        RecipeName::Fp8Block,
        RecipeName::Mxfp8,
        RecipeName::Nvfp4,
    ];

    /// The recipes that cast to FP8, or to a narrower format.
    pub const FP8: [RecipeName; 6] = [
        RecipeName::Fp8Delayed,
        RecipeName::Fp8Current,
        RecipeName::Fp8Row,
        RecipeName::Fp8Block,
        RecipeName::Mxfp8,
        RecipeName::Nvfp4,
    ];

    /// Returns the spelling in configuration files.
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
            RecipeName::Nvfp4 => "nvfp4",
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
    /// Patterns of names. `*` matches any characters, and `?` matches one character.
    pub patterns: Vec<String>,
    /// The number of blocks at the start whose linears stay in the compute type.
    pub first: usize,
    /// The number of blocks at the end whose linears stay in the compute type.
    pub last: usize,
    /// The number of tokens of a micro-batch on a GPU. If it is set, linears that FP8 would slow down are exceptions too.
    pub slow_at: Option<usize>,
}

/// Other casts and products for some linears.
#[derive(Clone, Debug, PartialEq)]
pub struct Override {
    /// Patterns of names. `*` matches any characters, and `?` matches one character.
    pub patterns: Vec<String>,
    /// The recipe of the casts.
    pub recipe: RecipeName,
    /// The casts of these linears. `None` leaves the linears in the compute type.
    pub casts: Option<LinearCasts>,
    /// The precision of the products of these linears.
    pub products: Products,
}

impl Override {
    /// Returns the beginning of a reason that names this override. All linears of an override share the text, since linears are counted by reason.
    pub(super) fn reason(&self) -> String {
        match self.patterns.as_slice() {
            [first, _, rest @ ..] => format!("`{first}` and {} more of overrides: ", rest.len() + 1),
            patterns => format!("`{}` of overrides: ", patterns.concat()),
        }
    }
}
