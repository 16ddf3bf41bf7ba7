//! FP8 codes of frozen weights that are taken from a model folder, instead of a new cast of their dequantized values.

use super::builder::{FolderCodes, WeightSource};
use super::shard::Shard;
use crate::Cast;
use ottava_common::error::{Error, Result};
use ottava_tensor::{DType, Device, Granularity, QuantizedTensor, Tensor};

/// Whether a frozen weight uses the codes of the folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FolderUse {
    /// The weight uses the folder's codes.
    Kept,
    /// The folder has codes, but their scales do not match the cast, so the dequantized values are cast again.
    Recast,
}

/// Returns the codes of the stacked `shards` from `source`, if the source has them with the scales of `cast`. If dgrad has the same codes, only the
/// scales of its copy are added. Returns `None` if the source has no codes of the shards.
///
/// Errors if a scale is not finite.
pub(super) fn read(
    shards: &[Shard],
    cast: &Cast,
    device: &Device,
    source: &mut dyn WeightSource,
) -> Result<Option<(FolderUse, Option<QuantizedTensor>)>> {
    let granularity = cast.granularity.of_rows();
    let columns = shards[0].shape().last().copied().unwrap_or(0);
    let (mut all_codes, mut all_scales, mut rows, mut fits) = (Vec::new(), Vec::new(), 0, cast.format == DType::E4M3);
    for shard in shards {
        match source.codes(&shard.tensor, granularity)? {
            FolderCodes::None => return Ok(None),
            FolderCodes::Codes { codes, scale_inv } if fits && shard.shape() == shard.tensor.shape => {
                let name = &shard.tensor.name;
                if !scale_inv.iter().all(|scale| scale.is_finite()) {
                    return Err(Error::Model(format!("tensor `{name}` has scales that are not finite")));
                }
                // Blocks are counted from the beginning of a tensor, so each tensor of a stack must begin at a block of the stack.
                fits = granularity != Granularity::Blocks128x128 || rows % 128 == 0;
                rows += shard.shape()[0];
                all_codes.push(if codes.device().same(device) { codes } else { codes.to_device(device)? });
                all_scales.extend(scale_inv);
            }
            FolderCodes::Codes { .. } | FolderCodes::Other => fits = false,
        }
    }
    let is_padded = granularity.codes_shape(rows, columns) != [rows, columns];
    let has_one = all_scales.iter().all(|scale: &f32| scale.to_bits() == all_scales[0].to_bits());
    if !fits || is_padded || (granularity == Granularity::PerTensor && !has_one) {
        return Ok(Some((FolderUse::Recast, None)));
    }
    let scales = |granularity: Granularity, rows, columns, at: &dyn Fn(usize, usize) -> f32| {
        let shape = granularity.scales_shape(rows, columns);
        let values: Vec<f32> = match shape[..] {
            [length, padded] => {
                let used = columns.div_ceil(128);
                (0..length * padded).map(|i| if i % padded < used { at(i / padded, i % padded) } else { 0.0 }).collect()
            }
            _ => all_scales[..shape[0]].to_vec(),
        };
        Tensor::from_slice(device, &shape, &values)
    };
    let blocks = columns.div_ceil(128);
    let scale_inv = scales(granularity, rows, columns, &|row, column| all_scales[row * blocks + column])?;
    let transposed_scale_inv = match granularity == Granularity::Blocks128x128 {
        true => Some(Box::new(scales(granularity, columns, rows, &|row, column| all_scales[column * blocks + row])?)),
        false => None,
    };
    let codes = Some(stack(all_codes, device, [rows, columns])?);
    let (granularity, format) = (cast.granularity, DType::E4M3);
    let codes = QuantizedTensor {
        codes,
        transposed: None,
        scale_inv,
        transposed_scale_inv,
        granularity,
        format,
        rows,
        columns,
    };
    Ok(Some((FolderUse::Kept, Some(codes))))
}

/// Joins the codes of the shards into one tensor of this shape.
fn stack(mut codes: Vec<Tensor>, device: &Device, shape: [usize; 2]) -> Result<Tensor> {
    if codes.len() == 1 {
        return Ok(codes.remove(0));
    }
    let (mut stacked, mut row) = (Tensor::empty(device, &shape, DType::E4M3)?, 0);
    for codes in codes {
        stacked.copy_from(row, &codes)?;
        row += codes.shape()[0];
    }
    Ok(stacked)
}
