//! Comparisons of a recipe with BF16, and the decisions that follow from them.

pub mod comparisons;
pub mod devices;
pub mod long;
pub mod metrics;
pub mod runs;
