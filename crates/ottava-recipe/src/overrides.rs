//! The tables `[[precision.overrides]]`, which give some linears of a run other casts.

use crate::{Fp8Format, ProductName, RecipeName};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A table of `[[precision.overrides]]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PrecisionOverride {
    /// Patterns (`*`, `?`) of names of linears, or of modules around them, as in `high_precision_layers`.
    pub layers: Vec<String>,
    /// The recipe whose formats, granularity and scaling these linears have; the run's recipe if it is not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recipe: Option<RecipeName>,
    /// As the key of the same name of `[precision]`, which is taken where this one is not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fp8_format: Option<Fp8Format>,
    /// As the key of the same name of `[precision]`, which is taken where this one is not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub high_precision_products: Option<Vec<ProductName>>,
}
