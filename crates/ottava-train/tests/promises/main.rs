//! What the crate promises, one module per family. Everything runs on the CPU and, where there is a GPU, again on that.

mod folders;
mod inference;
mod models;
mod objectives;
mod parallel;
mod peft;
mod precision;
mod runs;
mod sentinel;
mod setup;
mod step;
