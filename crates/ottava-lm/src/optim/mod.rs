//! Optimizers: what is stored for each parameter, and how a step changes it.

mod adamw;
mod loss_scale;
mod optimizer;
mod schedule;
mod update;

pub use adamw::{AdamWConfig, AdamWOptimizer};
pub use loss_scale::{LossScale, Overflow};
pub use optimizer::{Optimizer, Per, StateTensor, Updated, grad_norm, optimizer_tensors};
pub use schedule::{Schedule, SchedulerType};
pub use update::{find_amaxes, update};
