//! Training on several ranks.

mod data;

pub use data::DataParallel;
