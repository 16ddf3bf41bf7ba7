//! Optimizers: the states that an optimizer stores for each parameter, and the change of the parameter in a step.
//!
//! An `Optimizer` has a step counter, the states of each parameter, and a function that updates a group of parameters whose tensors are on the
//! device. It sees the part of each parameter that this process updates: the whole parameter or a slice. It does not deal with ranks,
//! scales or the norm of gradients. Only `RunConfig::new_optimizer` selects an optimizer. Checkpoints and checksums read `Optimizer::states`.
//!
//! If an optimizer `transforms` whole matrices, as Muon does, its update has three phases. `Optimizer::directions` updates the states and
//! computes a direction element by element, `Optimizer::transform` gets each matrix whole, and `Optimizer::update` changes the weights. One process
//! runs the phases for one parameter after the other. Ranks with slices run them for parts of the model (`Partition::prepare`): `MatrixPlan`
//! (`parallel/matrices.rs`) assigns each matrix to a rank by cost, sends the slices of the matrix's direction there, and sends the result back.
//!
//! To add an optimizer, implement `Optimizer` in a file of this folder. An optimizer with a momentum adds a `Direction` to the op `momentum`. An
//! optimizer with other states has an op folder like `ops/adamw/`. `Sgd` in `tests/promises/step/optimizers.rs` is the smallest optimizer, and
//! `lion.rs` is the smallest optimizer that users can choose.

mod adamw;
mod ema;
mod lion;
mod loss_scale;
mod momenta;
mod muon;
mod optimizer;
mod rates;
mod schedule;
mod update;

pub use adamw::{AdamWConfig, AdamWOptimizer};
pub use ema::{EMA, EmaConfig, EmaOptimizer};
pub use lion::LionOptimizer;
pub use loss_scale::{LossScale, Overflow};
pub use momenta::MomentumConfig;
pub use muon::{AdjustLr, MuonOptimizer};
pub use optimizer::read_and_optimizer_tensors;
pub use optimizer::{Optimizer, Per, StateTensor, Updated, grad_norm, optimizer_tensors};
pub use schedule::{Decay, PolynomialDecay, Restarts, Schedule, SchedulerType, StableDecay};
pub use update::{Prepared, directions, find_amaxes, update};
