//! Exports models for other programs: folders with weights in BF16, folders with the linears of the blocks in FP8 or in four bits, and GGUF files.
//!
//! [`WeightFiles`] reads folders with FP8 weights.
//!
//! `Fp8Format::default_for` selects the format if `--format` is missing. `Linears::decide` selects the linears in FP8 from the run's recipe and the
//! format. `Group::cast` casts the weights of a checkpoint like training, and `LinearReport::compare` reads the files back. Static input scales come
//! from delayed scaling or from `Calibration::measure`, which collects a histogram (`Histogram`) of the values that casts would get in high
//! precision. `ScalingState::set_scales` sets static scales. `docs/export.md` describes the formats.
//!
//! To add a format, extend `Convention`, `Scheme` and the methods of `Fp8Format` in `format.rs`. To read the format back, extend `Quantization::read`
//! in `models/quantization.rs`.

mod cast;
mod default_format;
mod finite;
mod format;
mod fp4;
pub mod gguf;
mod linears;
mod report;
mod source;

pub use format::{Convention, Fp8Format, Scheme};
pub use report::{Left, LinearReport, Report};
pub use source::Source;

use cast::{Codes, scales};
use finite::{expect_finite, not_finite};
use linears::{Group, Linears};
use ottava_checkpoint::model::{MASKS_AND_ANGLES, as_json, expect_new_folder};
use ottava_checkpoint::safetensors_write::MAX_FILE_BYTES;
use ottava_checkpoint::template::write_settings;
use ottava_checkpoint::{CheckpointWriter, FolderWeights, TensorInfo, WeightFiles, write_model};
use ottava_common::error::Result;
use ottava_common::fs::RealFs;
use ottava_common::interrupt;
use ottava_tensor::DType;
use ottava_tensor::ops::cast as convert;
use serde_json::json;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

/// A tensor of the folder that is computed, unlike a weight that is copied from the source.
enum Made {
    /// The codes of part `.1` of the group `.0` of linears.
    Codes(usize, usize),
    /// Scales in F32.
    Scales(Vec<f32>),
    /// Scales in one byte each.
    Bytes(Vec<u8>),
}

/// Writes the model of `source` to the new folder `output`. The linears of its blocks are in `format`; if `format` is `None`, all weights are in
/// BF16. `input_scales` are static scales of inputs, by the name of a linear. Only formats with static input scales read them.
///
/// The folder is read back before it gets its name, and each weight must be the nearest value of its codes. Memory holds one tensor at a time; for a
/// fused linear, the values in F32 and the codes. The source is read three times: for scales, for codes, and for the comparison.
///
/// Errors with [`Config`](ottava_common::Error::Config) if `output` exists or would be inside the source, or if an input has no scale. Errors with
/// [`Model`](ottava_common::Error::Model) if the weights do not fit the source's `config.json`, or if no linear can be in FP8. Errors with
/// [`NonFinite`](ottava_common::Error::NonFinite) if a weight is not finite, or is written in BF16 and not finite there. After an error, `output`
/// does not exist.
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
    let parts = groups.iter().flat_map(|group| &group.parts);
    let in_fp8: HashSet<String> = parts.map(|(linear, _)| format!("{linear}.weight")).collect();
    let head = format!("{}.weight", source.sizes.stream.names.head);
    for name in source.weights.names().filter(|name| !in_fp8.contains(*name)) {
        let leftover =
            MASKS_AND_ANGLES.iter().any(|end| name.ends_with(end)) || (source.sizes.head.tied && name == head);
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
    // The parts of a fused linear are consecutive, so their codes are cast once.
    let mut last: Option<(usize, Codes)> = None;
    write_model(&mut writer, &infos, source.weights.carried(), MAX_FILE_BYTES, |info| {
        interrupt::check("exporting the model")?;
        match (made.get(&info.name), fp8) {
            (Some(Made::Scales(scales)), _) => Ok(scales.iter().flat_map(|scale| scale.to_le_bytes()).collect()),
            (Some(Made::Bytes(scales)), _) => Ok(scales.clone()),
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
        reports.push(match fp8.filter(|(format, _)| format.fp4().is_some()) {
            Some((format, _)) => LinearReport::compare_fp4(group, format, &source.weights, &written)?,
            None => LinearReport::compare(group, &source.weights, &written)?,
        });
    }
    writer.finish_folder()?;
    // A byte has one code in FP8, and two codes in four bits.
    let codes_per_byte = if fp8.is_some_and(|(format, _)| format.fp4().is_some()) { 2 } else { 1 };
    let parameters = infos.iter().map(|info| match made.get(&info.name) {
        Some(Made::Scales(_) | Made::Bytes(_)) => 0,
        Some(Made::Codes(..)) => info.elements() * codes_per_byte,
        None => info.elements(),
    });
    let blocks = fp8.is_some_and(|(format, _)| format.scheme == Scheme::Block);
    let scales = made.values().filter_map(|made| match made {
        Made::Scales(scales) => Some(scales),
        Made::Codes(..) | Made::Bytes(_) => None,
    });
    let power_of_two = |scale: &f32| scale.to_bits() & 0x007f_ffff == 0;
    Ok(Report {
        format: fp8.map(|(format, _)| format),
        power_of_two_scales: blocks.then(|| scales.flatten().all(power_of_two)),
        parameters: parameters.sum(),
        bytes: infos.iter().map(TensorInfo::bytes).sum(),
        linears: reports,
        left: fp8.map_or(Vec::new(), |(_, linears)| {
            linears.left.iter().map(|(name, reason)| Left { name: name.clone(), reason: reason.clone() }).collect()
        }),
        tensor_parallel: fp8.map(|(format, linears)| linears.tensor_parallel(&source.sizes, format)),
    })
}

/// Lists the tensors of a linear, including its scales.
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
        let (scale_name, scale_shape) = (format.scale_name(linear), format.scale_shape(weight));
        match codes {
            Codes::Fp8(cast) => {
                add(format!("{linear}.weight"), DType::E4M3, weight.to_vec(), Made::Codes(at, part));
                add(scale_name, DType::F32, scale_shape, Made::Scales(scales(cast, rows)?));
            }
            Codes::Fp4(packed) => {
                let [outputs, inputs] = weight;
                add(format!("{linear}.weight_packed"), DType::U8, vec![outputs, inputs / 2], Made::Codes(at, part));
                let dtype = if packed.global_scale.is_some() { DType::E4M3 } else { DType::U8 };
                add(scale_name, dtype, scale_shape, Made::Bytes(packed.scales(rows)));
                if let Some(scale) = packed.global_scale {
                    add(format!("{linear}.weight_global_scale"), DType::F32, vec![1], Made::Scales(vec![scale]));
                }
            }
        }
        if let (Some((name, shape)), Some(scale)) = (format.input_scale(linear), group.input_scale) {
            add(name, DType::F32, shape, Made::Scales(vec![scale]));
        }
    }
    Ok(())
}

/// Returns the bytes of a weight in BF16. If the weight is BF16 in the source, the bytes are copied.
///
/// Errors with [`Error::NonFinite`] if a value is infinite or NaN in BF16.
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
