//! Converts models of other programs to Hugging Face folders: files of llama.cpp, and checkpoints of Megatron-LM.
//!
//! A source provides its files, the names and shapes of its weights, and the values of each weight; [`convert`] writes them.
//!
//! ```
//! use ottava_convert::dequantize::named;
//!
//! // A block of Q8_0: an F16 scale of 0.5, and 32 codes.
//! let block: Vec<u8> = 0x3800u16.to_le_bytes().into_iter().chain((0..32).map(|code| code as u8)).collect();
//! let values = named("Q8_0").values(&block);
//! assert_eq!((values.len(), values[6]), (32, 3.0));
//! ```
//!
//! `Architecture` (`architecture.rs`) has what reading (this folder) and writing (`export/gguf/`) of GGUF have in common: names of tensors, the order
//! of rows, and keys of sizes. `Gemma` (`gemma.rs`) has the differences of Gemma. `PreTokenizer` (`tokenizer.rs`) has the ways in which byte-level
//! BPE splits text, and `SentencePiece` (`sentencepiece.rs`) the scores of merges. `export_gguf` writes a file and reads it back. `Pickle::read`
//! (`torch/pickle.rs`) reads the pickles of Megatron-LM as data, and does not call anything in them.
//!
//! To add an architecture of llama.cpp, add a row to `ARCHITECTURES` and extend `module_of` in `architecture.rs`, extend `describe` in
//! `export/gguf/mod.rs` for new keys, and add its pre-tokenizer to `PRE_TOKENIZERS` in `tokenizer.rs`. To read a block type, add a row to `TYPES` in
//! `dequantize.rs`; to write it, extend `GgufType` in `export/gguf/encode.rs`.
#![forbid(unsafe_code)]

pub mod export;

pub mod architecture;
pub mod dequantize;
pub mod gemma;
pub mod gguf;
pub mod megatron;
mod metadata;
pub mod sentencepiece;
pub mod source;
pub mod token_kinds;
pub mod tokenizer;
pub mod torch;

use std::collections::BTreeMap;
use std::path::Path;

use half::bf16;
use ottava_tensor::DType;
use serde_json::json;

use architecture::Architecture;
use gguf::Gguf;
use megatron::Megatron;
use ottava_checkpoint::model::{as_json, expect_new_folder};
use ottava_checkpoint::safetensors_write::MAX_FILE_BYTES;
use ottava_checkpoint::template::write_settings;
use ottava_checkpoint::{Carried, CheckpointWriter, TensorInfo, write_model};
use ottava_common::fs::RealFs;
use ottava_common::{Error, Result, interrupt};
use ottava_models::{ConfigFile, language_model_config};
use source::{Model, halves_of_heads};

/// The result of a conversion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Converted {
    /// The number of elements of all weights.
    pub parameters: usize,
    /// The number of the source's tensors of each type.
    pub stored: BTreeMap<&'static str, usize>,
    /// Sentences about properties of the source that could not be checked.
    pub warnings: Vec<String>,
}

/// Converts the model in `source` to the new folder `output`. `source` is a GGUF file or the folder of a Megatron-LM checkpoint. Weights are written
/// in `dtype`, BF16 or F32. A Megatron model gets the sizes and the tokenizer of the Hugging Face folder `like`; without `like`, the sizes come from
/// its arguments.
///
/// Errors with [`Error::Model`] if the source cannot be read or does not match the model, and with [`Error::Config`] if `output` exists or would be
/// inside a source. After an error, `output` does not exist.
pub fn convert(source: &Path, like: Option<&Path>, output: &Path, dtype: DType) -> Result<Converted> {
    expect_new_folder(output, &like.into_iter().collect::<Vec<_>>())?;
    if source.is_dir() {
        let megatron = Megatron::open(source)?;
        expect_new_folder(output, &[megatron.path()])?;
        return write(from_megatron(&megatron, like)?, like, output, dtype);
    }
    if like.is_some() {
        return Err(Error::Config(
            "--like is for checkpoints of Megatron-LM; a GGUF file has sizes and tokenizer itself".into(),
        ));
    }
    let gguf = Gguf::open(source)?;
    write(from_gguf(&gguf)?, None, output, dtype)
}

fn from_gguf(gguf: &Gguf) -> Result<Model<'_>> {
    metadata::expect_whole(gguf)?;
    let architecture = Architecture::of(gguf)?;
    metadata::expect_known(gguf, architecture)?;
    let (config, sizes) = architecture.config(gguf)?;
    let weights = architecture::weights(gguf, architecture, &sizes)?;
    let mut stored = BTreeMap::new();
    for tensor in gguf.tensors().values() {
        *stored.entry(tensor.kind.name).or_insert(0) += 1;
    }
    let names = weights.iter().map(|weight| (weight.name.clone(), weight.shape.clone())).collect();
    let values = move |name: &str| {
        let weight = weights.iter().find(|w| w.name == name).expect("each name is that of a weight");
        let values = gguf.values(&gguf.tensors()[&weight.stored])?;
        if let Some(bad) = values.iter().find(|value| !value.is_finite()) {
            return Err(gguf.error(&format!("tensor {:?} holds the value {bad}; the file is damaged", weight.stored)));
        }
        Ok(match (weight.rotary_heads, architecture.offset(weight)) {
            (Some(heads), _) => halves_of_heads(&values, weight.columns(), heads),
            (None, 0.0) => values,
            (None, offset) => values.into_iter().map(|value| value - offset).collect(),
        })
    };
    let files = tokenizer::files(gguf, sizes.max_positions)?;
    Ok(Model { config, files, weights: names, stored, values: Box::new(values), warnings: Vec::new() })
}

fn from_megatron<'a>(megatron: &'a Megatron, like: Option<&Path>) -> Result<Model<'a>> {
    let config = match like {
        Some(like) => ConfigFile::read(like)?,
        None => ConfigFile::from_values("the arguments of the checkpoint", megatron.config()?),
    };
    if config.is_wrapper()? {
        return Err(config.error(
            "this describes a vision-language model, and a checkpoint of Megatron-LM has only the text model: make a folder with a config.json of `text_config` alone",
        ));
    }
    let sizes = language_model_config(&config)?;
    let warnings = megatron.check_args(&sizes, like.is_some())?;
    let weights = megatron.weights(&sizes)?;
    let names = weights.iter().map(|weight| (weight.name.clone(), weight.shape.clone())).collect();
    let values = move |name: &str| {
        let weight = weights.iter().find(|w| w.name == name).expect("each name is that of a weight");
        megatron.values(weight, &sizes)
    };
    let mut config = config.values().clone();
    config.shift_remove("quantization_config");
    let (files, stored) = (Vec::new(), megatron.types()?);
    Ok(Model { config, files, weights: names, stored, values: Box::new(values), warnings })
}

/// Writes a model. If there is a folder `like`, its files are copied.
fn write(model: Model, like: Option<&Path>, output: &Path, dtype: DType) -> Result<Converted> {
    let Model { mut config, files, weights, stored, values, warnings } = model;
    for key in ["dtype", "torch_dtype"] {
        config.insert(key.into(), json!(dtype.name()));
    }
    let infos = weights.into_iter().map(|(name, shape)| TensorInfo { name, dtype, shape });
    let infos: Vec<_> = infos.collect();
    let mut writer = CheckpointWriter::begin_folder(&RealFs, output)?;
    match like {
        Some(like) => write_settings(&mut writer, config, like)?,
        None => writer.file("config.json", |file| file.write(&as_json(config.into())))?,
    }
    for (name, bytes) in files {
        writer.file(&name, |file| file.write(&bytes))?;
    }
    write_model(&mut writer, &infos, &Carried::default(), MAX_FILE_BYTES, |info| {
        interrupt::check("converting the model")?;
        Ok(to_bytes(&values(&info.name)?, dtype))
    })?;
    writer.finish_folder()?;
    Ok(Converted { parameters: infos.iter().map(TensorInfo::elements).sum(), stored, warnings })
}

/// Converts values to bytes in `dtype`, rounded to nearest even.
fn to_bytes(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::BF16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        DType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        other => unreachable!("folders are written in BF16 or F32, not in {other}"),
    }
}

#[cfg(test)]
mod tests;
