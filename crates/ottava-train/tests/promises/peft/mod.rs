//! Adapters beside frozen weights, as PEFT has them.

pub mod adapter_keys;
pub mod dora;
pub mod lora;
