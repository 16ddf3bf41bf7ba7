//! Training of language models in FP8.
#![forbid(unsafe_code)]

pub mod bench;
pub mod calibrate;
pub mod evaluate;
pub mod monitor;
pub mod objective;
pub mod phase;
pub mod plan;
pub mod report;
pub mod run;
pub mod step;
pub mod trainer;
