//! Optimizers: what is stored for each parameter, and how a step changes it.

mod adamw;
mod schedule;

pub use adamw::{AdamWConfig, AdamWOptimizer, Moments};
pub use schedule::{Schedule, SchedulerType};
