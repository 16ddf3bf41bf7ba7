//! What the crate promises, one module per family. Everything runs on the CPU and, where there is a GPU, again on that.

mod accumulation;
mod gradients;
mod recipes;
mod setup;
