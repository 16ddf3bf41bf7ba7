//! Benchmarks: products, linear layers, attention, whole steps of training and of reinforcement learning, and decoding.

mod decode;
mod families;
mod gemm;
mod linear;
mod rollouts;
mod shapes;
mod train;

pub use decode::{DecodeBench, DecodeRow, random_decoder};
pub use families::FamilyTime;
pub use gemm::{GemmRow, gemms};
pub use linear::{LinearRow, SweepCell, linears, sweep};
pub use rollouts::{RolloutBench, RolloutRow};
pub use shapes::{attention, model, models};
pub use train::{RankMemory, TrainBench, TrainRow};
