//! Reads weights in NF4, as bitsandbytes and transformers write them. `NAME` is U8 `[elements / 2, 1]`, with the codes of two neighbours in a byte, the
//! first code in the high bits. `NAME.absmax` has the amaxes of blocks of 64, in F32, or as codes whose amaxes are `NAME.nested_absmax`.
//! `NAME.quant_state.bitsandbytes__nf4` is JSON with the shape, the type and the sizes of blocks.

use crate::{ModelFiles, TensorInfo};
use ottava_common::error::{Error, Result};
use ottava_tensor::ops::{nf4_amaxes, nf4_levels, nf4_of_parts, nf4_values};
use ottava_tensor::{DType, Device, Nf4Tensor, Tensor};
use serde::Deserialize;
use std::ops::Range;

/// The ending of the name of a weight's settings.
const STATE: &str = ".quant_state.bitsandbytes__nf4";
/// The ending of the name of settings of the format FP4.
const FP4_STATE: &str = ".quant_state.bitsandbytes__fp4";
/// The endings of the names of the values of all codes, and of all codes of scales.
const TABLE: &str = ".quant_map";
const NESTED_TABLE: &str = ".nested_quant_map";
/// The endings of the names of tensors that are parts of a weight.
const PARTS: [&str; 6] = [".absmax", ".nested_absmax", NESTED_TABLE, TABLE, STATE, FP4_STATE];

/// The settings of a weight.
#[derive(Deserialize)]
struct State {
    blocksize: usize,
    dtype: String,
    shape: Vec<usize>,
    nested_blocksize: Option<usize>,
    nested_offset: Option<f32>,
}

/// Returns `name`, or `None` for a tensor that is a part of a weight.
pub(super) fn weight_name(name: &str) -> Option<&str> {
    (!PARTS.iter().any(|part| name.ends_with(part))).then_some(name)
}

/// Returns the description that the weight `name` would have in a folder without quantization. Returns `None` if the weight is not in NF4.
///
/// Errors if the weight has settings that are not implemented, or parts that do not fit its shape.
pub(super) fn info(files: &ModelFiles, name: &str) -> Result<Option<TensorInfo>> {
    if files.has(&format!("{name}{FP4_STATE}")) {
        return Err(Error::Model(format!(
            "tensor `{name}` is in FP4; NF4 is read: save the folder with `bnb_4bit_quant_type=\"nf4\"`"
        )));
    }
    let Some(State { dtype, shape, blocksize, nested_blocksize, .. }) = state(files, name)? else { return Ok(None) };
    let wrong = |reason: String| Err(Error::Model(format!("tensor `{name}` in NF4: {reason}")));
    let dtype = match dtype.as_str() {
        "float32" => DType::F32,
        "float16" => DType::F16,
        "bfloat16" => DType::BF16,
        other => return wrong(format!("its type is `{other}`; float32, float16 and bfloat16 are read")),
    };
    if blocksize != Nf4Tensor::BLOCK || nested_blocksize.is_some_and(|size| size != Nf4Tensor::GROUP) {
        return wrong(format!("it has blocks of {blocksize} and {nested_blocksize:?}; blocks of 64 and 256 are read"));
    }
    let elements = shape.iter().try_fold(1usize, |elements, &size| elements.checked_mul(size));
    let bytes: usize = files.shape_of_bytes(name)?.iter().product();
    match elements {
        Some(elements) if shape.len() == 2 && elements.div_ceil(2) == bytes => {
            Ok(Some(TensorInfo { name: name.into(), dtype, shape }))
        }
        _ => wrong(format!("its shape is {shape:?}, and it has {bytes} bytes of codes")),
    }
}

fn state(files: &ModelFiles, name: &str) -> Result<Option<State>> {
    let of_state = format!("{name}{STATE}");
    if !files.has(&of_state) {
        return Ok(None);
    }
    let state = serde_json::from_slice(&files.read(&of_state)?);
    state.map(Some).map_err(|error| Error::Model(format!("tensor `{of_state}`: {error}")))
}

/// Returns `elements` of the flat weight of `info`, F32 `[n]`, on the CPU.
///
/// Errors if parts are missing, or if an amax is not finite.
pub(super) fn values_of(files: &ModelFiles, info: &TensorInfo, elements: Range<usize>) -> Result<Tensor> {
    let all = info.elements();
    let blocks = elements.start / Nf4Tensor::BLOCK..elements.end.div_ceil(Nf4Tensor::BLOCK);
    let (first, end) = (blocks.start * Nf4Tensor::BLOCK, (blocks.end * Nf4Tensor::BLOCK).min(all));
    let codes = files.read_bytes(&info.name, first / 2..end.div_ceil(2))?;
    let values = nf4_values(&codes, &amaxes(files, info, blocks)?, end - first);
    let values = &values[elements.start - first..elements.end - first];
    match values.iter().all(|value| value.is_finite()) {
        true => Ok(Tensor::from_slice(&Device::Cpu, &[values.len()], values)?),
        false => Err(not_finite(&info.name)),
    }
}

/// Returns the amaxes of `blocks` of a weight.
fn amaxes(files: &ModelFiles, info: &TensorInfo, blocks: Range<usize>) -> Result<Vec<f32>> {
    let scales = format!("{}.absmax", info.name);
    match groups(files, info)? {
        Some((groups, mean)) => {
            let scales = files.read_bytes(&scales, blocks.clone())?;
            Ok(nf4_amaxes(blocks.start, &scales, &groups, mean))
        }
        None => {
            expect_count(&info.name, "absmax", files.info(&scales)?.elements(), blocks_of(info))?;
            Ok(files.values_of(&scales, blocks)?.to_vec::<f32>()?)
        }
    }
}

/// Returns the number of blocks of a weight.
fn blocks_of(info: &TensorInfo) -> usize {
    info.elements().div_ceil(Nf4Tensor::BLOCK)
}

/// Returns the amaxes of groups of blocks, and the mean of the amaxes of blocks. Returns `None` if the amaxes of blocks are not quantized.
fn groups(files: &ModelFiles, info: &TensorInfo) -> Result<Option<(Vec<f32>, f32)>> {
    let Some(mean) = state(files, &info.name)?.and_then(|state| state.nested_offset) else { return Ok(None) };
    let groups = files.values(&format!("{}.nested_absmax", info.name))?.to_vec::<f32>()?;
    let scales = files.shape_of_bytes(&format!("{}.absmax", info.name))?.iter().product();
    expect_count(&info.name, "absmax", scales, blocks_of(info))?;
    expect_count(&info.name, "nested_absmax", groups.len(), scales.div_ceil(Nf4Tensor::GROUP))?;
    match mean.is_finite() && groups.iter().all(|group| group.is_finite()) {
        true => Ok(Some((groups, mean))),
        false => Err(not_finite(&info.name)),
    }
}

/// Returns the weight of `info` in four bits on `device`, if its scales are quantized.
pub(super) fn packed(files: &ModelFiles, info: &TensorInfo, device: &Device) -> Result<Option<Nf4Tensor>> {
    let Some((groups, mean)) = groups(files, info)? else { return Ok(None) };
    let [rows, columns] = info.shape[..] else { unreachable!("`info` has two dimensions") };
    let (codes, scales) = (files.read(&info.name)?, files.read(&format!("{}.absmax", info.name))?);
    if !nf4_amaxes(0, &scales, &groups, mean).iter().all(|amax| amax.is_finite()) {
        return Err(not_finite(&info.name));
    }
    Ok(Some(nf4_of_parts(device, [rows, columns], (&codes, &scales, &groups), mean)?))
}

/// Errors if a table of values beside a weight is not the table of NF4 or of its scales.
pub(super) fn expect_levels(files: &ModelFiles) -> Result<()> {
    let levels = nf4_levels();
    let (values, scales) = levels.split_at(16);
    for table in files.names() {
        let expected = match table {
            name if name.ends_with(NESTED_TABLE) => scales,
            name if name.ends_with(TABLE) => values,
            _ => continue,
        };
        let found = files.values(table)?.to_vec::<f32>()?;
        // Versions of bitsandbytes differ in the last bits of the table of scales.
        let are_near = found.len() == expected.len() && found.iter().zip(expected).all(|(a, b)| (a - b).abs() <= 1e-6);
        if !are_near {
            return Err(Error::Model(format!("tensor `{table}` has other values than NF4 of bitsandbytes")));
        }
    }
    Ok(())
}

fn not_finite(name: &str) -> Error {
    Error::Model(format!("tensor `{name}` has scales that are not finite"))
}

fn expect_count(name: &str, part: &str, found: usize, expected: usize) -> Result<()> {
    match found == expected {
        true => Ok(()),
        false => {
            Err(Error::Model(format!("tensor `{name}.{part}` has {found} values; its weight has {expected} blocks")))
        }
    }
}
