//! Records of columnar files, Parquet and Arrow, as JSON objects.
//!
//! A crate of its own: `arrow` and `parquet` are large and generic, and nothing else of Ottava instantiates them, so a change elsewhere
//! compiles none of their code again.
#![forbid(unsafe_code)]

mod arrow;
mod bomb;
mod rows;
mod value;

pub use bomb::{bomb, most_unpacked_bytes};
pub use rows::{Format, Rows};
