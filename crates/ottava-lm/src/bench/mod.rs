//! Benchmarks of training: products, linear layers, attention, and whole steps.

mod families;
mod gemm;
mod linear;
mod shapes;
mod train;

pub use families::FamilyTime;
pub use gemm::{GemmRow, gemms};
pub use linear::{LinearRow, SweepCell, linears, sweep};
pub use shapes::{attention_layout, model, models};
pub use train::{RankMemory, TrainBench, TrainRow};
