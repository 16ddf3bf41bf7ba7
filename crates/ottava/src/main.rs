//! The command line of Ottava.
#![forbid(unsafe_code)]

fn main() {}
