//! Adapters on frozen weights, as in PEFT.

pub mod adapter_keys;
pub mod dora;
pub mod experts;
pub mod four_bit;
pub mod lora;
pub mod modules;
pub mod random;
