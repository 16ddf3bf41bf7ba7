//! Errors, files, hashes and limits that all crates of Ottava share.
//!
//! ```
//! use ottava_common::Error;
//! use ottava_common::hash::sha256;
//!
//! assert!(sha256(b"otter").starts_with("914cb64a"));
//! // An error is a sentence, and knows the exit code of a program that ends with it.
//! let error = Error::Config("`data.max_length` is 0; set it to 1 or more".into());
//! assert_eq!(error.to_string(), "`data.max_length` is 0; set it to 1 or more");
//! ```
#![forbid(unsafe_code)]

pub mod background;
pub mod ending;
pub mod error;
pub mod fs;
pub mod hash;
pub mod input;
pub mod interrupt;
pub mod launch;
pub mod limits;
pub mod python_json;
pub mod threads;
pub mod utc;
pub mod yaml;

pub use error::{Error, Result};
