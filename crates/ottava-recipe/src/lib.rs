//! Recipes: values that describe which tensors are cast to which format. Only [`crate::scaling`] and linear layers interpret them.
//!
//! ```
//! use ottava_recipe::{Precision, RecipeName};
//! use ottava_tensor::DType;
//!
//! // FP8 products with one scale per 128 values. Other work is in BF16.
//! let recipe = Precision { recipe: RecipeName::Fp8Block, ..Precision::default() }.recipe();
//! assert_eq!(recipe.compute, DType::BF16);
//! ```
//!
//! No layer and no model branches on the name of a recipe. `Recipe::decide` decides for each linear, while it is built, whether and how the linear
//! is cast; `scaling/` computes the scales; `layers/cast.rs` decides what each product reads. A new recipe is therefore a value in `precision.rs`,
//! and a name in `types.rs`.
//!
//! Precision never changes silently: recipe, shape and device decide the format of each product, and `ottava plan` prints the decisions with their
//! reasons.
#![forbid(unsafe_code)]

pub mod capture;
pub mod context;
pub mod layer_ranks;
pub mod lora;
pub mod mode;
pub mod operand;
pub mod param;
pub mod recompute;
pub mod recurrent;
pub mod scaling;
pub mod shared_values;
pub mod storage;

mod fp8_pays;
mod kv_cache;
mod linears;
mod overrides;
mod precision;
mod steps;
mod types;

pub use fp8_pays::Fp8Pays;
pub use kv_cache::KvCacheDtype;
pub use linears::glob;
pub use linears::{Decision, ExpertCounts, LinearSite};
pub use overrides::PrecisionOverride;
pub use precision::{AccumulationConfig, Delayed, ExceptionsConfig, Fp16, LossScaling, Precision, Sums, WgradBlocks};
pub use steps::Steps;
pub use types::{
    Cast, Exceptions, FirstStep, Fp8Format, LinearCasts, Override, ProductName, ProductPrecision, Products, Recipe,
    RecipeName, Scaling,
};
