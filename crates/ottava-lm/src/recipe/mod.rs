//! Recipes: values that say what is cast to which format, interpreted by [`crate::scaling`] and [`crate::layers::Linear`] only.

mod fp8_pays;
mod linears;
mod overrides;
mod precision;
mod steps;
mod types;

pub use fp8_pays::Fp8Pays;
pub(crate) use linears::glob;
pub use linears::{Decision, ExpertCounts, LinearSite};
pub use overrides::PrecisionOverride;
pub use precision::{AccumulationConfig, Delayed, ExceptionsConfig, Fp16, LossScaling, Precision, Sums, WgradBlocks};
pub use steps::Steps;
pub use types::{
    Cast, Exceptions, FirstStep, Fp8Format, LinearCasts, Override, ProductName, ProductPrecision, Products, Recipe,
    RecipeName, Scaling,
};
