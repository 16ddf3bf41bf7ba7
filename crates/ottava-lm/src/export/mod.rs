//! Models for other programs: folders with weights in BF16 or with the linears of the blocks in FP8, and GGUF files.
//!
//! Folders with FP8 weights are read by [`WeightFiles`].

mod cast;
mod default_format;
mod finite;
mod format;
pub mod gguf;
mod linears;
mod report;
mod source;

pub use format::{Convention, Fp8Format, Scheme};
pub use report::{Left, LinearReport, Report};
pub use source::Source;

use crate::checkpoint::model::{HEAD, MASKS_AND_ANGLES, as_json, expect_new_folder, write_settings};
use crate::checkpoint::safetensors_write::MAX_FILE_BYTES;
use crate::checkpoint::{CheckpointWriter, FolderWeights, TensorInfo, WeightFiles, write_model};
use crate::error::Result;
use crate::fs::RealFs;
use crate::interrupt;
use cast::Codes;
use finite::{expect_finite, not_finite};
use linears::{Group, Linears};
use ottava_tensor::DType;
use ottava_tensor::ops::cast as convert;
use serde_json::json;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

/// A tensor of the folder that is not a weight as the source has it.
enum Made {
    /// The codes of part `.1` of linear `.0`.
    Codes(usize, usize),
    /// F32 numbers.
    Scales(Vec<f32>),
}

/// Writes the model of `source` as the new folder `output`, with the linears of its blocks in `format`, or all weights in BF16 if that is
/// `None`. `input_scales` are scales of inputs that do not depend on them, by the name of a linear; only formats with such scales read them.
///
/// The folder is read back before it appears, and each weight must be the nearest value of its codes. Memory holds one tensor at a time: of
/// a fused linear the values in F32 and the codes. The source is read three times, for scales, codes and comparison.
///
/// Errors with [`Config`](crate::Error::Config) when `output` exists, would be inside the source, or an input has no scale, with
/// [`Model`](crate::Error::Model) when the weights are not those of the source's `config.json` or no linear can be in FP8, and with
/// [`NonFinite`](crate::Error::NonFinite) for a weight that is not finite, or not in BF16 where that is written; nothing is left then.
pub fn export(
    source: &Source,
    format: Option<Fp8Format>,
    input_scales: &BTreeMap<String, f32>,
    output: &Path,
) -> Result<Report> {
    expect_new_folder(output, &[&source.path])?;
    FolderWeights::check(&source.path, &source.sizes, &source.recipe)?;
    let linears = format.map(|format| Linears::decide(source, format, input_scales).map(|linears| (format, linears)));
    let Some((format, linears)) = linears.transpose()? else { return write(source, None, output) };
    write(source, Some((format, &linears)), output)
}

fn write(source: &Source, fp8: Option<(Fp8Format, &Linears)>, output: &Path) -> Result<Report> {
    let groups = fp8.map_or(&[][..], |(_, linears)| &linears.groups);
    let (mut infos, mut made) = (Vec::new(), HashMap::new());
    if let Some((format, linears)) = fp8 {
        for (at, group) in linears.groups.iter().enumerate() {
            interrupt::check("exporting the model")?;
            let codes = group.cast(&source.weights, format)?;
            list(format, at, group, &codes, &mut infos, &mut made)?;
        }
    }
    let in_fp8: HashSet<String> = infos.iter().map(|info| info.name.clone()).collect();
    for name in source.weights.names().filter(|name| !in_fp8.contains(*name)) {
        let leftover =
            MASKS_AND_ANGLES.iter().any(|end| name.ends_with(end)) || (source.sizes.head.tied && name == HEAD);
        if !leftover {
            infos.push(TensorInfo { dtype: DType::BF16, ..source.weights.info(name)? });
        }
    }

    let mut writer = CheckpointWriter::begin_folder(&RealFs, output)?;
    let mut config = source.config.values().clone();
    for key in ["dtype", "torch_dtype"] {
        config.insert(key.into(), json!(DType::BF16.name()));
    }
    config.shift_remove("quantization_config");
    if let Some((format, linears)) = fp8 {
        let left = linears.left_names();
        config.insert("quantization_config".into(), format.config(&left));
        for (name, value) in format.files(&left) {
            writer.file(name, |file| file.write(&as_json(value)))?;
        }
    }
    write_settings(&mut writer, config, &source.path)?;
    // Parts of a linear follow each other.
    let mut last: Option<(usize, Codes)> = None;
    write_model(&mut writer, &infos, MAX_FILE_BYTES, |info| {
        interrupt::check("exporting the model")?;
        match (made.get(&info.name), fp8) {
            (Some(Made::Scales(scales)), _) => Ok(scales.iter().flat_map(|scale| scale.to_le_bytes()).collect()),
            (Some(Made::Codes(at, part)), Some((format, _))) => {
                let (group, rows) = (&groups[*at], groups[*at].rows()[*part].clone());
                if last.as_ref().is_none_or(|(last, _)| last != at) {
                    last = None;
                    last = Some((*at, group.cast(&source.weights, format)?));
                }
                last.as_ref().expect("it was cast above").1.codes(rows)
            }
            _ => in_bf16(&source.weights, info),
        }
    })?;
    let written = WeightFiles::open(writer.path())?;
    let mut reports = Vec::new();
    for group in groups {
        interrupt::check("reading the exported model")?;
        reports.push(LinearReport::compare(group, &source.weights, &written)?);
    }
    writer.finish_folder()?;
    let weights = infos.iter().filter(|info| !matches!(made.get(&info.name), Some(Made::Scales(_))));
    let blocks = fp8.is_some_and(|(format, _)| format.scheme == Scheme::Block);
    let scales = made.values().filter_map(|made| match made {
        Made::Scales(scales) => Some(scales),
        Made::Codes(..) => None,
    });
    let power_of_two = |scale: &f32| scale.to_bits() & 0x007f_ffff == 0;
    Ok(Report {
        format: fp8.map(|(format, _)| format),
        power_of_two_scales: blocks.then(|| scales.flatten().all(power_of_two)),
        parameters: weights.map(TensorInfo::elements).sum(),
        bytes: infos.iter().map(TensorInfo::bytes).sum(),
        linears: reports,
        left: fp8.map_or(Vec::new(), |(_, linears)| {
            linears.left.iter().map(|(name, reason)| Left { name: name.clone(), reason: reason.clone() }).collect()
        }),
        tensor_parallel: fp8.map(|(format, linears)| linears.tensor_parallel(&source.sizes, format)),
    })
}

/// Lists the tensors of a linear, with its scales.
fn list(
    format: Fp8Format,
    at: usize,
    group: &Group,
    codes: &Codes,
    infos: &mut Vec<TensorInfo>,
    made: &mut HashMap<String, Made>,
) -> Result<()> {
    for (part, ((linear, outputs), rows)) in group.parts.iter().zip(group.rows()).enumerate() {
        let weight = [*outputs, group.inputs];
        let mut add = |name: String, dtype, shape, value| {
            infos.push(TensorInfo { name: name.clone(), dtype, shape });
            made.insert(name, value);
        };
        add(format!("{linear}.weight"), DType::E4M3, weight.to_vec(), Made::Codes(at, part));
        add(format.scale_name(linear), DType::F32, format.scale_shape(weight), Made::Scales(codes.scales(rows)?));
        if let (Some((name, shape)), Some(scale)) = (format.input_scale(linear), group.input_scale) {
            add(name, DType::F32, shape, Made::Scales(vec![scale]));
        }
    }
    Ok(())
}

/// The bytes of a weight in BF16; a weight that is BF16 in the source keeps its bytes.
///
/// Errors with [`Error::NonFinite`] for a value that is infinite or NaN in BF16.
fn in_bf16(weights: &WeightFiles, info: &TensorInfo) -> Result<Vec<u8>> {
    let stored = weights.info(&info.name)?;
    let bytes = match stored.dtype {
        DType::BF16 => weights.bytes(&stored)?,
        _ => {
            let values = weights.values(&info.name)?;
            expect_finite(&info.name, &values.to_vec::<f32>()?)?;
            convert(&values, DType::BF16)?.read_bytes()?
        }
    };
    let finite = |bytes: &[u8]| half::bf16::from_le_bytes([bytes[0], bytes[1]]).is_finite();
    match bytes.chunks_exact(2).position(|value| !finite(value)) {
        Some(element) if stored.dtype == DType::BF16 => Err(not_finite(&info.name, element, "is not finite")),
        Some(element) => Err(not_finite(&info.name, element, "is too large for BF16")),
        None => Ok(bytes),
    }
}
