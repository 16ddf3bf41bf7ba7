//! Trained tensors, what they are built from, and what a model records of itself while it is built.

mod builder;
mod description;
mod gradient;
mod parameter;
pub mod scopes;
mod units;
mod weights;

pub use builder::{Builder, Init, Layout, MemoryPolicy, Part, Purpose, WeightSource};
pub use description::Description;
pub use gradient::{Grad, GradFormat};
pub use parameter::{Fetched, FetchedWeight, Param};
pub use units::{Direction, Resident, Units};
pub use weights::{Master, Weights};
