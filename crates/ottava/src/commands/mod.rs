//! One file per command: its arguments, its help, and the few lines that call the library.

pub mod bench;
pub mod doctor;
pub mod eval;
pub mod generate;
mod inference;
pub mod inspect;
pub mod plan;
pub mod prepare;
pub mod train;
