#![no_main]

use ottava_fuzz::{parse, seed};

libfuzzer_sys::fuzz_target!(init: seed("manifest.json resealed"), |bytes: &[u8]| parse("manifest.json resealed", bytes));
