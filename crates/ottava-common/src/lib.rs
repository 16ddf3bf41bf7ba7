//! Errors, files, hashes and limits that all crates of Ottava share.
#![forbid(unsafe_code)]

pub mod background;
pub mod error;
pub mod fs;
pub mod hash;
pub mod input;
pub mod interrupt;
pub mod launch;
pub mod limits;

pub use error::{Error, Result};
