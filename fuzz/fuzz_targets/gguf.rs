#![no_main]

use ottava_fuzz::{parse, seed};

libfuzzer_sys::fuzz_target!(init: seed("gguf"), |bytes: &[u8]| parse("gguf", bytes));
