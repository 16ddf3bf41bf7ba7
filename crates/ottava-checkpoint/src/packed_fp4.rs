//! Reads matrices in NVFP4 and MXFP4, as compressed-tensors stores them. For a linear `NAME`, `NAME.weight_packed`, U8 `[outputs, inputs / 2]`, has the
//! codes of two neighbouring inputs in a byte, the first code in the low bits. `NAME.weight_scale` has the scales of blocks: E4M3 `[outputs, inputs / 16]`
//! in NVFP4, or exponents of E8M0, U8 `[outputs, inputs / 32]`, in MXFP4. Scales of NVFP4 are divided by `NAME.weight_global_scale`, F32 `[1]`. These
//! tensors together are read as the tensor `NAME.weight` `[outputs, inputs]`.

use crate::{ModelFiles, TensorInfo};
use ottava_common::error::{Error, Result};
use ottava_models::Fp4Pack;
use ottava_tensor::fp8::{E4M3, E8M0};
use ottava_tensor::{DType, Device, Tensor, fp4};
use rayon::prelude::*;
use std::ops::Range;

/// The suffix of the name of codes, after the name of the weight.
const CODES: &str = "_packed";
/// The suffix of the name of the scales of blocks, and of the scale of the tensor.
const SCALES: &str = "_scale";
const GLOBAL: &str = "_global_scale";
/// The endings of the names of tensors that are parts of a weight, or scales of inputs. In Ottava, the recipe decides the casts of inputs.
const PARTS: [&str; 3] = [".weight_scale", ".weight_global_scale", ".input_global_scale"];

/// Returns the name of the weight whose codes or values the tensor `name` holds. Returns `None` for the other tensors of a weight.
pub(super) fn weight_name(name: &str) -> Option<&str> {
    match PARTS.iter().any(|part| name.ends_with(part)) {
        true => None,
        false => Some(name.strip_suffix(CODES).filter(|weight| weight.ends_with(".weight")).unwrap_or(name)),
    }
}

/// Returns the description that the weight `name` would have in a folder without quantization. Returns `None` if the weight is not in this format.
///
/// Errors if the shapes of codes and scales do not fit each other.
pub(super) fn info(files: &ModelFiles, format: Fp4Pack, name: &str) -> Result<Option<TensorInfo>> {
    let (codes, scales) = (format!("{name}{CODES}"), format!("{name}{SCALES}"));
    if !files.has(&codes) {
        return Ok(None);
    }
    let shape = files.shape_of_bytes(&codes)?;
    let of_scales = match format {
        Fp4Pack::Nvfp4 => {
            let TensorInfo { dtype, shape, .. } = files.info(&scales)?;
            if dtype != DType::E4M3 {
                return Err(Error::Model(format!("tensor `{scales}` is {dtype}; scales of NVFP4 are E4M3")));
            }
            let global = files.info(&format!("{name}{GLOBAL}"))?;
            if global.elements() != 1 {
                return Err(Error::Model(format!(
                    "tensor `{}` has shape {:?}; it is one number",
                    global.name, global.shape
                )));
            }
            shape
        }
        Fp4Pack::Mxfp4 => files.shape_of_bytes(&scales)?,
    };
    match shape[..] {
        [outputs, half]
            if of_scales == [outputs, 2 * half / format.block()] && (2 * half).is_multiple_of(format.block()) =>
        {
            Ok(Some(TensorInfo { name: name.into(), dtype: DType::BF16, shape: vec![outputs, 2 * half] }))
        }
        _ => Err(Error::Model(format!(
            "tensors `{codes}` and `{scales}` have shapes {shape:?} and {of_scales:?}; this format has [outputs, inputs / 2] and [outputs, inputs / {}]",
            format.block()
        ))),
    }
}

/// Returns `elements` of the flat weight of `info`, F32 `[n]`, on the CPU.
///
/// Errors if a scale is not finite.
pub(super) fn values_of(
    files: &ModelFiles,
    format: Fp4Pack,
    info: &TensorInfo,
    elements: Range<usize>,
) -> Result<Tensor> {
    let [_, inputs] = info.shape[..] else { unreachable!("`info` has two dimensions") };
    let (name, block) = (&info.name, format.block());
    let blocks = elements.start / block..elements.end.div_ceil(block);
    let codes = files.read_bytes(&format!("{name}{CODES}"), blocks.start * block / 2..blocks.end * block / 2)?;
    let scales = files.read_bytes(&format!("{name}{SCALES}"), blocks.clone())?;
    debug_assert!(inputs.is_multiple_of(block), "blocks do not cross rows");
    let global = match format {
        Fp4Pack::Nvfp4 => files.values(&format!("{name}{GLOBAL}"))?.to_vec::<f32>()?[0],
        Fp4Pack::Mxfp4 => 1.0,
    };
    let mut values = vec![0.0; codes.len() * 2];
    values.par_chunks_exact_mut(block).zip(codes.par_chunks_exact(block / 2)).zip(&scales).for_each(
        |((values, codes), &scale)| {
            let scale = scale_of(format, scale, global);
            for (pair, &byte) in values.chunks_exact_mut(2).zip(codes) {
                (pair[0], pair[1]) = (fp4::value(byte & 0xf) * scale, fp4::value(byte >> 4) * scale);
            }
        },
    );
    let first = blocks.start * block;
    let values = &values[elements.start - first..elements.end - first];
    match values.par_iter().all(|value| value.is_finite()) {
        true => Ok(Tensor::from_slice(&Device::Cpu, &[values.len()], values)?),
        false => Err(Error::Model(format!("tensor `{name}` has scales that are not finite"))),
    }
}

/// Returns the factor of the values of a block.
fn scale_of(format: Fp4Pack, scale: u8, global: f32) -> f32 {
    match format {
        Fp4Pack::Nvfp4 => E4M3(scale).to_f32() / global,
        Fp4Pack::Mxfp4 => E8M0(scale).to_f32(),
    }
}
