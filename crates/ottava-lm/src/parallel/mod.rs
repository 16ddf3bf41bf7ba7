//! Training on several ranks.

mod data;
mod exchange;
mod partition;
mod slices;

pub use data::DataParallel;
pub use exchange::Exchange;
pub use partition::{Partition, Zero};
pub use slices::{GRANULE, Slices};
