//! Frozen weights in four bits: NormalFloat4 with scales of blocks, which are quantized too (QLoRA: Dettmers et al. 2023, arXiv:2305.14314). Codes and
//! values are bitsandbytes'.

mod cpu;
pub(super) mod cuda;
mod levels;
#[cfg(test)]
mod tests;

use super::expect_compute;
use crate::ops::dispatch::dispatch;
use crate::stored::Nf4Tensor;
use crate::{DType, Device, Error, Result, Tensor};
use levels::{SCALES, VALUES};

pub use cpu::{nf4_amaxes, nf4_values};

/// Returns the matrix `x` `[R, C]` (F32) in four bits. Blocks are [`Nf4Tensor::BLOCK`] neighbours in memory.
///
/// A code is the number of midpoints between neighbouring values of the format that are below the element divided by the block's amax. The amaxes minus
/// their mean are quantized to 8 bits in groups of [`Nf4Tensor::GROUP`]. The mean is computed in F64, so it may differ from bitsandbytes' in the last
/// bit. The result is bit-identical on every device. Errors if a value is not finite.
pub fn quantize_nf4(x: &Tensor) -> Result<Nf4Tensor> {
    let [rows, columns] = x.dims("quantize_nf4: x")?;
    x.expect_dtype("quantize_nf4: x", &[DType::F32])?;
    let levels = levels_on(x.device())?;
    let mut codes = Tensor::empty(x.device(), &[x.len().div_ceil(2)], DType::U8)?;
    let mut amaxes = Tensor::empty(x.device(), &[x.len().div_ceil(Nf4Tensor::BLOCK)], DType::F32)?;
    dispatch! { x.device(),
        cpu => cpu::quantize(x, &mut codes, &mut amaxes),
        gpu => cuda::quantize(gpu, x, &levels, &mut codes, &mut amaxes)?,
    }
    // The amaxes are a sixty-fourth of the elements, and a frozen weight is quantized once.
    let amaxes = amaxes.to_vec::<f32>()?;
    if !amaxes.iter().all(|amax| amax.is_finite()) {
        return Err(Error::Value("a weight that is stored in four bits has values that are not finite".into()));
    }
    let (scales, groups, mean) = cpu::quantize_amaxes(&amaxes);
    Ok(Nf4Tensor {
        shape: [rows, columns],
        codes,
        scales: Tensor::from_slice(x.device(), &[scales.len()], &scales)?,
        groups: Tensor::from_slice(x.device(), &[groups.len()], &groups)?,
        levels,
        mean,
    })
}

/// Returns the matrix of this `shape` on `device` from the `codes` of its elements, the codes of the amaxes of its blocks (`scales`), the amaxes of
/// `groups` of scales, and the `mean` of the amaxes, in the layout of [`Nf4Tensor`].
///
/// Errors unless each part has the length that follows from the shape.
pub fn nf4_of_parts(
    device: &Device,
    shape: [usize; 2],
    (codes, scales, groups): (&[u8], &[u8], &[f32]),
    mean: f32,
) -> Result<Nf4Tensor> {
    let elements: usize = shape.iter().product();
    let blocks = elements.div_ceil(Nf4Tensor::BLOCK);
    if [codes.len(), scales.len(), groups.len()] != [elements.div_ceil(2), blocks, blocks.div_ceil(Nf4Tensor::GROUP)] {
        let lengths = [codes.len(), scales.len(), groups.len()];
        return Err(Error::Value(format!(
            "nf4: codes, scales and groups of a matrix {shape:?} have the lengths {lengths:?}"
        )));
    }
    Ok(Nf4Tensor {
        shape,
        codes: Tensor::from_slice(device, &[codes.len()], codes)?,
        scales: Tensor::from_slice(device, &[scales.len()], scales)?,
        groups: Tensor::from_slice(device, &[groups.len()], groups)?,
        levels: levels_on(device)?,
        mean,
    })
}

/// Returns the values of the 16 codes, and then the values of the 256 codes of scales.
pub fn nf4_levels() -> Vec<f32> {
    [&VALUES[..], &SCALES[..]].concat()
}

/// Returns [`nf4_levels`] on `device`.
fn levels_on(device: &Device) -> Result<Tensor> {
    let levels = nf4_levels();
    Tensor::from_slice(device, &[levels.len()], &levels)
}

/// Returns the values of the stacked matrices `parts`, `[ΣR, C]` in a compute type: value of the code · amax of the block, in F32 and rounded once. The
/// amax of a block is level of the scale · amax of the group + mean.
///
/// Errors unless there are parts and all have the same number of columns.
pub fn dequantize_nf4(parts: &[Nf4Tensor], dtype: DType) -> Result<Tensor> {
    let columns = parts.first().map_or(0, |part| part.shape[1]);
    if parts.is_empty() || parts.iter().any(|part| part.shape[1] != columns) {
        let shapes: Vec<_> = parts.iter().map(|part| part.shape).collect();
        return Err(Error::Value(format!("dequantize_nf4: matrices of the shapes {shapes:?} are not stacked")));
    }
    let (device, rows) = (parts[0].codes.device(), parts.iter().map(|part| part.shape[0]).sum());
    let y = Tensor::empty(device, &[rows * columns], dtype)?;
    expect_compute("dequantize_nf4: type", &y)?;
    let mut end = 0;
    let ranges = parts.iter().map(|part| {
        end += part.shape[0] * columns;
        end - part.shape[0] * columns..end
    });
    let mut values = y.split(&ranges.collect::<Vec<_>>())?;
    for (part, y) in parts.iter().zip(&mut values) {
        dispatch! { device,
            cpu => cpu::dequantize(part, y),
            gpu => cuda::dequantize(gpu, part, y)?,
        }
    }
    Tensor::join(values)?.reshape(&[rows, columns])
}
