#![no_main]

use ottava_fuzz::{parse, seed};

libfuzzer_sys::fuzz_target!(init: seed("run.toml"), |bytes: &[u8]| parse("run.toml", bytes));
