//! Names of memory in a dry run.

/// The weights that layers read.
pub const WEIGHTS: &str = "weights";
/// Master weights.
pub const MASTERS: &str = "master weights";
/// Codes that FP8 products read.
pub const CODES: &str = "FP8 codes of weights";
/// Gradients of parameters.
pub const GRADIENTS: &str = "gradients";
