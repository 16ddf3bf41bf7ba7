#![no_main]

use ottava_fuzz::{parse, seed};

libfuzzer_sys::fuzz_target!(init: seed("chat template"), |bytes: &[u8]| parse("chat template", bytes));
