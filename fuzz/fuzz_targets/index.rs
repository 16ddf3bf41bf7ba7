#![no_main]

use ottava_fuzz::{parse, seed};

libfuzzer_sys::fuzz_target!(init: seed("index"), |bytes: &[u8]| parse("index", bytes));
