//! Optimizers: what is stored for each parameter, and how a step changes it.

mod adamw;
mod loss_scale;
mod schedule;

pub use adamw::{AdamWConfig, AdamWOptimizer, Kept, Per, optimizer_tensors};
pub use loss_scale::{LossScale, Overflow};
pub use schedule::{Schedule, SchedulerType};
