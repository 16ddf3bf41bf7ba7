//! Training on several ranks.

mod data;
mod exchange;
mod partition;
mod reduction;
mod replicas;
mod slices;
mod unit;
mod zero;

pub use data::DataParallel;
pub use exchange::Exchange;
pub use partition::{BufferBytes, Partition};
pub use reduction::ReduceFormat;
pub use replicas::DigestedWeights;
pub use slices::{GRANULE, Slices};
pub use zero::Zero;
