//! Optimizers: what is stored for each parameter, and how a step changes it.

mod adamw;
mod lion;
mod loss_scale;
mod momenta;
mod muon;
mod optimizer;
mod schedule;
mod update;

pub use adamw::{AdamWConfig, AdamWOptimizer};
pub use lion::LionOptimizer;
pub use loss_scale::{LossScale, Overflow};
pub use momenta::MomentumConfig;
pub use muon::{AdjustLr, MuonOptimizer};
pub(crate) use optimizer::read_and_optimizer_tensors;
pub use optimizer::{Optimizer, Per, StateTensor, Updated, grad_norm, optimizer_tensors};
pub use schedule::{Decay, PolynomialDecay, Restarts, Schedule, SchedulerType, StableDecay};
pub use update::{Prepared, directions, find_amaxes, update};
