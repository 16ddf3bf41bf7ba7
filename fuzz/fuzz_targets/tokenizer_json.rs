#![no_main]

use ottava_fuzz::{parse, seed};

libfuzzer_sys::fuzz_target!(init: seed("tokenizer.json"), |bytes: &[u8]| parse("tokenizer.json", bytes));
