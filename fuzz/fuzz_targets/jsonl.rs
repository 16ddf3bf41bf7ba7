#![no_main]

use ottava_fuzz::{parse, seed};

libfuzzer_sys::fuzz_target!(init: seed("jsonl"), |bytes: &[u8]| parse("jsonl", bytes));
