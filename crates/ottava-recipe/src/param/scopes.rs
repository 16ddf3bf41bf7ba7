//! The names of memory in a dry run.

/// The weights that layers read.
pub const WEIGHTS: &str = "weights";
/// The frozen weights that layers read, in a model with adapters.
pub const FROZEN_WEIGHTS: &str = "frozen weights";
/// Master weights.
pub const MASTERS: &str = "master weights";
/// Codes that FP8 products read.
pub const CODES: &str = "FP8 codes of weights";
/// The codes of frozen weights, stored only in the layout of fprop.
pub const FROZEN_CODES: &str = "FP8 codes of frozen weights";
/// Gradients of parameters.
pub const GRADIENTS: &str = "gradients";
