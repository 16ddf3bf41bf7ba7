//! Models of other programs as Hugging Face folders.
//!
//! A source gives its weights, its files (`source.rs`) and the values of a weight; [`convert`] writes them. GGUF is the one source so far.

mod dequantize;
pub mod gguf;
mod llama;
mod source;
mod tokenizer;

use std::collections::BTreeMap;
use std::path::Path;

use half::bf16;
use ottava_tensor::DType;
use serde_json::json;

use crate::checkpoint::fs::RealFs;
use crate::checkpoint::model::as_json;
use crate::checkpoint::safetensors_write::MAX_FILE_BYTES;
use crate::checkpoint::{CheckpointWriter, TensorInfo, write_model};
use crate::{Error, Result, interrupt};
use gguf::Gguf;

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Converted {
    /// Elements of all weights.
    pub parameters: usize,
    /// The types of the source's tensors, with their numbers.
    pub stored: BTreeMap<&'static str, usize>,
}

/// Writes the model in the GGUF file `source` as the new folder `output`, with its weights in `dtype`, BF16 or F32.
///
/// Errors with [`Error::Model`] for a source that cannot be read, and with [`Error::Config`] when `output` exists; nothing is left then.
pub fn convert(source: &Path, output: &Path, dtype: DType) -> Result<Converted> {
    if output.symlink_metadata().is_ok() {
        return Err(Error::Config(format!("{}: this exists already; name a new folder", output.display())));
    }
    let gguf = Gguf::open(source)?;
    let (mut config, sizes) = match gguf.text("general.architecture")? {
        Some("llama") => llama::config(&gguf)?,
        other => {
            let name = other.unwrap_or("none");
            return Err(
                gguf.error(&format!("models of the architecture `{name}` are not converted; those of `llama` are"))
            );
        }
    };
    for key in ["dtype", "torch_dtype"] {
        config.insert(key.into(), json!(dtype.name()));
    }
    let weights = llama::weights(&gguf, &sizes)?;
    let infos = weights.iter().map(|w| TensorInfo { name: w.name.clone(), dtype, shape: w.shape.clone() });
    let infos: Vec<_> = infos.collect();
    let mut files = tokenizer::files(&gguf, sizes.max_positions)?;
    files.push(("config.json", as_json(config.into())));

    let mut writer = CheckpointWriter::begin_folder(&RealFs, output)?;
    for (name, bytes) in files {
        writer.file(name, |file| file.write(&bytes))?;
    }
    write_model(&mut writer, &infos, MAX_FILE_BYTES, |info| {
        interrupt::check("converting the model")?;
        let weight = weights.iter().find(|w| w.name == info.name).expect("each info is that of a weight");
        let mut values = gguf.values(&gguf.tensors()[&weight.stored])?;
        if let Some(bad) = values.iter().find(|value| !value.is_finite()) {
            return Err(gguf.error(&format!("tensor {:?} holds the value {bad}; the file is damaged", weight.stored)));
        }
        if let Some(heads) = weight.rotary_heads {
            values = llama::halves_of_heads(&values, weight.shape[1], heads);
        }
        Ok(to_bytes(&values, dtype))
    })?;
    writer.finish_folder()?;
    let mut stored = BTreeMap::new();
    for tensor in gguf.tensors().values() {
        *stored.entry(tensor.kind.name).or_insert(0) += 1;
    }
    Ok(Converted { parameters: infos.iter().map(TensorInfo::elements).sum(), stored })
}

/// Values in `dtype`, rounded to nearest even.
fn to_bytes(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::BF16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        DType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        other => unreachable!("folders are written in BF16 or F32, not in {other}"),
    }
}

#[cfg(test)]
mod tests;
