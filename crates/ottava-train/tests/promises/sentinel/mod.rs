//! Comparisons of a recipe with BF16, and decisions that follow.

pub mod comparisons;
pub mod devices;
pub mod long;
pub mod runs;
