#![no_main]

use ottava_fuzz::{parse, seed};

libfuzzer_sys::fuzz_target!(init: seed("safetensors header"), |bytes: &[u8]| parse("safetensors header", bytes));
