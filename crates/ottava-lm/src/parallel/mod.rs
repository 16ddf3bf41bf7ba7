//! Training on several ranks.

mod amaxes;
mod bucket;
mod data;
mod exchange;
mod load;
mod partition;
mod reduction;
mod replicas;
mod slices;
mod zero;

pub use data::{DataParallel, Shared};
pub use exchange::Exchange;
pub use partition::{BufferBytes, Partition};
pub use reduction::ReduceFormat;
pub use slices::{GRANULE, Slices};
pub use zero::Zero;
