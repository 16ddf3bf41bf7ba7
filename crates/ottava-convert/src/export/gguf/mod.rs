//! Exports models to llama.cpp: a model and its tokenizer in one GGUF file.

mod encode;
mod header;
#[cfg(test)]
mod tests;
mod vocabulary;

pub use encode::GgufType;

use super::source::Source;
use crate::architecture::{self, Architecture, ROPE_FACTORS};
use crate::gemma::{LOGIT_CAP, SCORE_CAP, WINDOW};
use crate::gguf::{ALIGNMENT, Gguf};
use crate::source::{Weight, neighbours_in_heads};
use header::{Entry, Header};
use ottava_checkpoint::model::expect_new_folder;
use ottava_checkpoint::{CheckpointFile, CheckpointWriter, FolderWeights};
use ottava_common::error::{Error, Result};
use ottava_common::fs::RealFs;
use ottava_common::interrupt;
use ottava_models::{self, DecoderConfig, LayerSpec, RopeKind, Uniform};
use ottava_tensor::ops::Activation;
use serde::Serialize;
use std::collections::BTreeMap;

/// The name of the file.
pub const FILE: &str = "model.gguf";

/// The result of an export to GGUF.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GgufReport {
    /// The value of `general.architecture` in the file.
    pub architecture: &'static str,
    /// The type of matrices.
    pub dtype: GgufType,
    /// The number of values of all weights.
    pub parameters: usize,
    /// The number of bytes of all tensors.
    pub bytes: usize,
    /// The number of tensors of each type.
    pub stored: BTreeMap<&'static str, usize>,
    /// The matrices that have another type because their rows cannot be divided into blocks.
    pub left: Vec<String>,
}

/// Writes the model of `source` and its tokenizer as `model.gguf` to the new folder `output`. Matrices are in `dtype` and vectors in F32.
///
/// The file is read back before the folder gets its name. Memory holds one tensor at a time.
///
/// Errors with [`Error::Config`] if `output` exists or would be inside the source, with [`Error::Model`] if llama.cpp does not support the model or
/// the tokenizer, and with [`Error::NonFinite`] if a weight is not finite in its type. After an error, `output` does not exist.
pub fn export_gguf(source: &Source, dtype: GgufType, output: &std::path::Path) -> Result<GgufReport> {
    expect_new_folder(output, &[&source.path])?;
    let (architecture, layers) = expressible(source)?;
    FolderWeights::check(&source.path, &source.sizes, &source.recipe)?;
    let mut header = Header::default();
    describe(&mut header, architecture, source, layers, dtype);
    vocabulary::write(&mut header, source)?;
    let weights = architecture.weights(&source.sizes)?;
    let types: Vec<_> = weights.iter().map(|weight| dtype.of(&weight.shape)).collect();
    let factors = rope_factors(layers);
    if let Some(factors) = &factors {
        header.tensor(ROPE_FACTORS, &[factors.len()], GgufType::Float32);
    }
    for (weight, kind) in weights.iter().zip(&types) {
        header.tensor(&weight.stored, &weight.shape, *kind);
    }

    let mut writer = CheckpointWriter::begin_folder(&RealFs, output)?;
    writer.file(FILE, |file| {
        file.write(&header.bytes())?;
        if let Some(factors) = &factors {
            append(file, &GgufType::Float32.encode(ROPE_FACTORS, factors)?)?;
        }
        for (weight, kind) in weights.iter().zip(&types) {
            interrupt::check("exporting the model")?;
            append(file, &kind.encode(&weight.name, &values(source, architecture, weight)?)?)?;
        }
        Ok(())
    })?;
    expect_readable(&Gguf::open(&writer.path().join(FILE))?, &source.sizes)?;
    writer.finish_folder()?;

    let mut stored = BTreeMap::new();
    types.iter().for_each(|kind| *stored.entry(kind.name()).or_insert(0) += 1);
    let elements = |weight: &Weight| weight.shape.iter().product::<usize>();
    let left = weights.iter().zip(&types).filter(|(weight, kind)| weight.shape.len() > 1 && **kind != dtype);
    Ok(GgufReport {
        architecture: architecture.name,
        dtype,
        parameters: weights.iter().map(elements).sum(),
        bytes: weights.iter().zip(&types).map(|(weight, kind)| kind.bytes(elements(weight))).sum(),
        stored,
        left: left.map(|(weight, _)| weight.name.clone()).collect(),
    })
}

/// Returns the architecture of llama.cpp that supports all settings of a model, and the settings that its layers share.
fn expressible(source: &Source) -> Result<(&'static Architecture, Uniform<'_>)> {
    let (sizes, family) = (&source.sizes, ottava_models::architecture(&source.config)?);
    let architecture = Architecture::of_family(family)
        .map_err(|known| source.config.error(&format!("{family} is not exported to GGUF; {} are", known.join(", "))))?;
    let layers = Uniform::of(sizes).ok_or_else(|| {
        source.config.error("layers that are not all the same attention and MLP have no place in GGUF files")
    })?;
    let Uniform { heads, mlp, rope } = layers;
    let biases = !architecture.optional_biases && heads.output_bias;
    let is_gemma = architecture.gemma.is_some();
    let has_window = sizes.layers.iter().filter_map(LayerSpec::window).any(|window| window < sizes.max_positions);
    let problem = [
        (has_window && !is_gemma, "the model uses sliding-window attention"),
        (mlp.activation != Activation::SwiGlu && !is_gemma, "the activation is not SiLU"),
        (biases, "attention has biases"),
        (!architecture::has_rope_kind(&rope.kind), "this RoPE scaling is not supported"),
        (rope.partial != 1.0, "RoPE covers only a part of each head"),
    ];
    let of_gemma = architecture.gemma.and_then(|gemma| gemma.problem(sizes, layers));
    match problem.into_iter().find(|(has, _)| *has).map(|(_, what)| what).or(of_gemma) {
        Some(what) => {
            let name = architecture.name;
            Err(source.config.error(&format!("{what}; GGUF files of architecture `{name}` cannot represent this")))
        }
        None => Ok((architecture, layers)),
    }
}

/// Writes the settings of `config.json` to the metadata.
fn describe(header: &mut Header, architecture: &Architecture, source: &Source, layers: Uniform, dtype: GgufType) {
    let (sizes, Uniform { heads, mlp, rope }) = (&source.sizes, layers);
    header.entry("general.architecture", Entry::Text(architecture.name));
    header.entry("general.type", Entry::Text("model"));
    header.entry("general.file_type", Entry::U32(dtype.file_type()));
    header.entry("general.quantization_version", Entry::U32(2));
    for (key, count) in [
        ("vocab_size", sizes.vocabulary),
        ("context_length", sizes.max_positions),
        ("embedding_length", sizes.stream.channels),
        ("block_count", sizes.layers.len()),
        ("feed_forward_length", mlp.hidden),
        ("attention.head_count", heads.heads),
        ("attention.head_count_kv", heads.kv_heads),
        ("attention.key_length", heads.head_dim),
        ("attention.value_length", heads.head_dim),
        ("rope.dimension_count", heads.head_dim),
    ] {
        header.entry(&format!("{}.{key}", architecture.name), Entry::U32(count as u32));
    }
    let mut float = |key: &str, value: f64| {
        header.entry(&format!("{}.{key}", architecture.name), Entry::F32(value as f32));
    };
    float("attention.layer_norm_rms_epsilon", sizes.stream.norm.eps);
    float("rope.freq_base", rope.theta);
    let caps = [(SCORE_CAP, heads.soft_cap), (LOGIT_CAP, sizes.head.cap)];
    caps.into_iter().for_each(|(key, cap)| cap.into_iter().for_each(|cap| float(key, cap)));
    let window = sizes.layers.iter().find_map(LayerSpec::window);
    if let Some(window) = window.filter(|_| architecture.gemma.is_some()) {
        header.entry(&format!("{}.{WINDOW}", architecture.name), Entry::U32(window as u32));
    }
    if let RopeKind::Linear { factor } = rope.kind {
        header.entry(&format!("{}.rope.scaling.factor", architecture.name), Entry::F32(factor as f32));
        header.entry(&format!("{}.rope.scaling.type", architecture.name), Entry::Text("linear"));
    }
}

/// Returns the factors of frequencies by which files describe the rotary positions of Llama 3.1 and later; `None` for other models.
fn rope_factors(Uniform { heads, rope, .. }: Uniform) -> Option<Vec<f32>> {
    let factors = || architecture::rope_factors(&rope.kind, rope.theta, heads.head_dim);
    matches!(rope.kind, RopeKind::Llama3 { .. }).then(|| factors().into_iter().map(|f| f as f32).collect())
}

/// Returns the values of a weight in the order of a GGUF file.
fn values(source: &Source, architecture: &Architecture, weight: &Weight) -> Result<Vec<f32>> {
    let values = source.weights.values(&weight.name)?.to_vec::<f32>()?;
    Ok(match (weight.rotary_heads, architecture.offset(weight)) {
        (Some(heads), _) => neighbours_in_heads(&values, weight.columns(), heads),
        (None, 0.0) => values,
        (None, offset) => values.into_iter().map(|value| value + offset).collect(),
    })
}

/// Appends a tensor, and zeros up to the start of the next tensor.
fn append(file: &mut CheckpointFile, bytes: &[u8]) -> Result<()> {
    file.write(bytes)?;
    let end = (bytes.len() as u64).next_multiple_of(ALIGNMENT) as usize;
    file.write(&vec![0; end - bytes.len()])
}

/// Errors if the file cannot be read back as a model of these sizes with all tensors.
fn expect_readable(gguf: &Gguf, sizes: &DecoderConfig) -> Result<()> {
    let architecture = Architecture::of(gguf)?;
    let (_, found) = architecture.config(gguf)?;
    architecture::weights(gguf, architecture, &found)?;
    // These settings have no place in a file, and a model that only generates text does not need them.
    let mut expected = sizes.clone();
    expected.stream.std = found.stream.std;
    expected.folder.ignored.clone_from(&found.folder.ignored);
    if architecture.gemma.is_none() {
        expected.heads_mut().for_each(|heads| heads.window = None);
    }
    match found == expected {
        true => Ok(()),
        false => Err(Error::Model(format!(
            "the GGUF metadata does not represent this model exactly: wrote {expected:?}, read back {found:?}; the output was removed"
        ))),
    }
}
