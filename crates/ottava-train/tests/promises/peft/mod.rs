//! Adapters on frozen weights, as in PEFT.

pub mod adapter_keys;
pub mod dora;
pub mod lora;
pub mod random;
