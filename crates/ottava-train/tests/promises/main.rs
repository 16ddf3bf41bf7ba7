//! The promises of the crate, one module per family. Everything runs on the CPU, and also on the GPU if there is one.

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
