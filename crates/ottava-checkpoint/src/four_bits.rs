//! The four-bit formats of model folders.

use crate::{ModelFiles, TensorInfo, mxfp4, nf4, packed_fp4};
use ottava_common::error::Result;
use ottava_models::{ConfigFile, Fp4Pack, Quantization};
use ottava_tensor::{Device, Nf4Tensor, Tensor};
use std::ops::Range;

/// The four-bit format of some weights of a folder. A weight has several tensors in the folder, and is read as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FourBits {
    /// No weight is in four bits.
    None,
    /// Stacks of experts in MXFP4, as in gpt-oss.
    Mxfp4,
    /// Matrices in NF4, as bitsandbytes writes them.
    Nf4,
    /// Matrices in NVFP4 or MXFP4, as compressed-tensors writes them.
    Packed(Fp4Pack),
}

impl FourBits {
    /// Returns the format that `config.json` declares. Errors if `files` have tables of values of another format.
    pub fn of(config: &ConfigFile, files: &ModelFiles) -> Result<FourBits> {
        if let Some(format) = Quantization::fp4_pack(config)? {
            return Ok(FourBits::Packed(format));
        }
        Ok(match (Quantization::is_mxfp4(config)?, Quantization::is_nf4(config)?) {
            (true, _) => FourBits::Mxfp4,
            (false, true) => {
                nf4::expect_levels(files)?;
                FourBits::Nf4
            }
            (false, false) => FourBits::None,
        })
    }

    /// Returns the name of the weight whose codes or values the tensor `name` holds. Returns `None` for the other tensors of a weight.
    pub fn weight_name(self, name: &str) -> Option<&str> {
        match self {
            FourBits::None => Some(name),
            FourBits::Mxfp4 => mxfp4::weight_name(name),
            FourBits::Nf4 => nf4::weight_name(name),
            FourBits::Packed(_) => packed_fp4::weight_name(name),
        }
    }

    /// Returns the description that the weight `name` would have in a folder without quantization. Returns `None` if the weight is not in four bits.
    pub fn info(self, files: &ModelFiles, name: &str) -> Result<Option<TensorInfo>> {
        match self {
            FourBits::None => Ok(None),
            FourBits::Mxfp4 => mxfp4::info(files, name),
            FourBits::Nf4 => nf4::info(files, name),
            FourBits::Packed(format) => packed_fp4::info(files, format, name),
        }
    }

    /// Returns `elements` of the flat weight of [`FourBits::info`], F32 `[n]`, on the CPU.
    pub fn values_of(self, files: &ModelFiles, info: &TensorInfo, elements: Range<usize>) -> Result<Tensor> {
        match self {
            FourBits::None => unreachable!("no weight has information"),
            FourBits::Mxfp4 => mxfp4::values_of(files, info, elements),
            FourBits::Nf4 => nf4::values_of(files, info, elements),
            FourBits::Packed(format) => packed_fp4::values_of(files, format, info, elements),
        }
    }

    /// Returns the weight `name` with the codes and scales of the folder, if the folder has the weight in NF4 with quantized scales.
    pub fn packed(self, files: &ModelFiles, name: &str, device: &Device) -> Result<Option<Nf4Tensor>> {
        match self {
            FourBits::Nf4 => nf4::info(files, name)?.map_or(Ok(None), |info| nf4::packed(files, &info, device)),
            FourBits::None | FourBits::Mxfp4 | FourBits::Packed(_) => Ok(None),
        }
    }
}
