//! Trained tensors, what they are built from, and what a model records of itself while it is built.

mod builder;
mod description;
mod gradient;
mod parameter;
mod sink;
mod weights;

pub use builder::{Builder, Init, MemoryPolicy, Part, Purpose, WeightSource};
pub use description::Description;
pub use gradient::{Grad, GradFormat};
pub use parameter::{Fetched, Param};
pub use sink::{GradientSink, KeepGradients};
pub use weights::{Master, Weights};
