//! Training on several ranks.

mod data;
mod gradients;
mod partition;
mod slices;

pub use data::DataParallel;
pub use gradients::Reduction;
pub use partition::{Partition, Zero};
pub use slices::{GRANULE, Slices};
