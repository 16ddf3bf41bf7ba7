#![no_main]

use ottava_fuzz::{parse, seed};

libfuzzer_sys::fuzz_target!(init: seed("torch metadata"), |bytes: &[u8]| parse("torch metadata", bytes));
