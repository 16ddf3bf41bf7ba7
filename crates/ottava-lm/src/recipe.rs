//! What is cast to what: a recipe is a value, interpreted by [`crate::scaling`] and [`crate::layers::Linear`] alone.

use crate::error::{Error, Result};
use ottava_tensor::ops::{Accumulation, AmaxReducer, CurrentScaling, DelayedScaling};
use ottava_tensor::{DType, Granularity};
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

/// How each product of a linear layer adds up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Products {
    /// `y = x · Wᵀ`.
    pub fprop: Accumulation,
    /// `dx = dy · W`.
    pub dgrad: Accumulation,
    /// `dW = dyᵀ · x`.
    pub wgrad: Accumulation,
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
    /// How FP8 products add up.
    pub products: Products,
}

/// The recipes one can name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RecipeName {
    /// Everything in binary32.
    Fp32,
    /// Activations and products in bfloat16, master weights in binary32.
    Bf16,
    /// FP8 products with scales from earlier steps.
    Fp8Delayed,
    /// FP8 products with scales from the tensors themselves.
    Fp8Current,
}

impl RecipeName {
    /// All names, in the order of the documentation.
    pub const ALL: [RecipeName; 4] =
        [RecipeName::Fp32, RecipeName::Bf16, RecipeName::Fp8Delayed, RecipeName::Fp8Current];

    /// The spelling in configuration files.
    pub const fn as_str(self) -> &'static str {
        match self {
            RecipeName::Fp32 => "fp32",
            RecipeName::Bf16 => "bf16",
            RecipeName::Fp8Delayed => "fp8-delayed",
            RecipeName::Fp8Current => "fp8-current",
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

/// Which FP8 formats the operands have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fp8Format {
    /// E4M3 for inputs and weights, E5M2 for gradients.
    Hybrid,
    /// E4M3 everywhere.
    E4m3,
}

/// The `[precision]` table of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Precision {
    /// The recipe: `fp32`, `bf16`, `fp8-delayed` or `fp8-current`.
    pub recipe: RecipeName,
    /// FP8 formats: `hybrid` (gradients in E5M2) or `e4m3`.
    pub fp8_format: Fp8Format,
    /// Steps of amax history that delayed scaling keeps.
    pub amax_history_len: usize,
    /// How delayed scaling reduces its history: `max` or `most_recent`.
    pub amax_compute_algo: AmaxReducer,
    /// Headroom of delayed scaling in powers of two.
    pub margin: i32,
    /// What delayed scaling does in its first step: `current` or `unscaled`.
    pub first_step: FirstStep,
}

impl Default for Precision {
    fn default() -> Precision {
        Precision {
            recipe: RecipeName::Bf16,
            fp8_format: Fp8Format::Hybrid,
            amax_history_len: 1024,
            amax_compute_algo: AmaxReducer::Max,
            margin: 0,
            first_step: FirstStep::Current,
        }
    }
}

impl Precision {
    /// What is wrong with these settings, a sentence each.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if self.amax_history_len == 0 {
            problems.push("`precision.amax_history_len` is 0; delayed scaling needs at least 1".to_string());
        }
        if !(0..=8).contains(&self.margin) {
            problems
                .push(format!("`precision.margin` is {}; it is a number of powers of two from 0 to 8", self.margin));
        }
        problems
    }

    /// The recipe these settings describe.
    pub fn recipe(&self) -> Recipe {
        let how = DelayedScaling { reducer: self.amax_compute_algo, margin: self.margin };
        let delayed = Scaling::Delayed { how, window: self.amax_history_len, first_step: self.first_step };
        let (compute, scaling) = match self.recipe {
            RecipeName::Fp32 => (DType::F32, None),
            RecipeName::Bf16 => (DType::BF16, None),
            RecipeName::Fp8Delayed => (DType::BF16, Some(delayed)),
            RecipeName::Fp8Current => (DType::BF16, Some(Scaling::Current(CurrentScaling::default()))),
        };
        let gradients = match self.fp8_format {
            Fp8Format::Hybrid => DType::E5M2,
            Fp8Format::E4m3 => DType::E4M3,
        };
        let cast = |format, scaling| Cast { format, granularity: Granularity::PerTensor, scaling };
        Recipe {
            name: self.recipe,
            compute,
            casts: scaling.map(|scaling| Casts {
                input: cast(DType::E4M3, scaling),
                weight: cast(DType::E4M3, scaling),
                grad_output: cast(gradients, scaling),
            }),
            // Fast sums lose digits of long, one-sided sums; only fprop, whose error does not build up, takes them.
            products: Products { fprop: Accumulation::Fast, dgrad: Accumulation::Exact, wgrad: Accumulation::Exact },
        }
    }
}
