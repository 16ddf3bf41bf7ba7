//! Reads weights of experts in MXFP4 (OCP Microscaling Formats 1.0, 2023), as in the published folders of gpt-oss. `NAME_blocks`, U8
//! `[E, outputs, inputs / 32, 16]`, has the codes of two neighbouring inputs in a byte, the first code in the low bits. `NAME_scales`, U8
//! `[E, outputs, inputs / 32]`, has the exponents of E8M0. Both together are read as the tensor `NAME` `[E, inputs, outputs]`.

use crate::{ModelFiles, TensorInfo};
use ottava_common::error::{Error, Result};
use ottava_tensor::fp8::E8M0;
use ottava_tensor::ops::transpose;
use ottava_tensor::{DType, Device, Tensor, fp4};
use rayon::prelude::*;
use std::ops::Range;

/// The suffix of the names of codes.
const BLOCKS: &str = "_blocks";
/// The suffix of the names of scales.
const SCALES: &str = "_scales";
/// The number of elements that share a scale.
const BLOCK: usize = 32;

/// Returns the name of the weight whose codes are the tensor `name` of a folder in MXFP4. Returns `None` for scales, which are part of the weight.
pub(super) fn weight_name(name: &str) -> Option<&str> {
    match name.ends_with(SCALES) {
        true => None,
        false => Some(name.strip_suffix(BLOCKS).unwrap_or(name)),
    }
}

/// Returns the description that the weight `name` would have in a folder without quantization. Returns `None` if the weight is not in MXFP4.
///
/// Errors if the shapes of codes and scales do not fit each other.
pub(super) fn info(files: &ModelFiles, name: &str) -> Result<Option<TensorInfo>> {
    let codes = format!("{name}{BLOCKS}");
    if !files.has(&codes) {
        return Ok(None);
    }
    let (shape, scales) = (files.shape_of_bytes(&codes)?, files.shape_of_bytes(&format!("{name}{SCALES}"))?);
    match shape[..] {
        [experts, outputs, blocks, 16] if scales == shape[..3] => Ok(Some(TensorInfo {
            name: name.into(),
            dtype: DType::BF16,
            shape: vec![experts, blocks * BLOCK, outputs],
        })),
        _ => Err(Error::Model(format!(
            "tensors `{codes}` and `{name}{SCALES}` have shapes {shape:?} and {scales:?}; MXFP4 has [experts, outputs, blocks, 16] and \
             [experts, outputs, blocks]"
        ))),
    }
}

/// Returns `elements` of the flat weight of `info`, F32 `[n]`, on the CPU.
///
/// Errors if a scale is not finite.
pub(super) fn values_of(files: &ModelFiles, info: &TensorInfo, elements: Range<usize>) -> Result<Tensor> {
    let [experts, inputs, outputs] = info.shape[..] else { unreachable!("`info` has three dimensions") };
    let of_expert = inputs * outputs;
    let mut values = Tensor::empty(&Device::Cpu, &[elements.len()], DType::F32)?;
    for expert in 0..experts {
        let first = expert * of_expert;
        let [start, end] = [elements.start, elements.end].map(|element| element.clamp(first, first + of_expert));
        if start == end {
            continue;
        }
        let rows = dequantized(files, &info.name, expert, [outputs, inputs])?;
        let own = transpose(&rows)?.reshape(&[of_expert])?.rows(start - first, end - first)?;
        values.copy_from(start - elements.start, &own)?;
    }
    Ok(values)
}

/// Returns the dequantized matrix of an expert, F32 `[outputs, inputs]`.
fn dequantized(files: &ModelFiles, name: &str, expert: usize, [outputs, inputs]: [usize; 2]) -> Result<Tensor> {
    let read = |ending: &str, of_row: usize| {
        files.read_bytes(&format!("{name}{ending}"), expert * outputs * of_row..(expert + 1) * outputs * of_row)
    };
    let (codes, scales) = (read(BLOCKS, inputs / 2)?, read(SCALES, inputs / BLOCK)?);
    let mut values = vec![0.0; outputs * inputs];
    let blocks = values.par_chunks_exact_mut(BLOCK).zip(codes.par_chunks_exact(BLOCK / 2)).zip(&scales);
    blocks.for_each(|((values, codes), &scale)| {
        let scale = E8M0(scale).to_f32();
        for (pair, &byte) in values.chunks_exact_mut(2).zip(codes) {
            pair[0] = fp4::value(byte & 0xf) * scale;
            pair[1] = fp4::value(byte >> 4) * scale;
        }
    });
    match values.par_iter().all(|value| value.is_finite()) {
        true => Ok(Tensor::from_slice(&Device::Cpu, &[outputs, inputs], &values)?),
        false => Err(Error::Model(format!("tensor `{name}{SCALES}` has scales that are not finite"))),
    }
}
