#![no_main]

use ottava_fuzz::{parse, seed};

libfuzzer_sys::fuzz_target!(init: seed("config.json"), |bytes: &[u8]| parse("config.json", bytes));
