//! Model folders and checkpoints: loading, saving, exporting and converting.

pub mod convert;
pub mod export;
pub mod export_fp4;
pub mod export_gguf;
pub mod export_sentencepiece;
pub mod export_sources;
pub mod export_vllm;
pub mod folder_codes;
pub mod further;
pub mod layouts;
pub mod loading;
pub mod quantized_folders;
pub mod saves;
pub mod stacked;
pub mod wrapped;
