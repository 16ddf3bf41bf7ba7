//! Reads tensors of a model folder in any format. Weights in FP8 and in four bits are dequantized.

use crate::four_bits::FourBits;
use crate::{ModelFiles, TensorInfo};
use ottava_common::error::{Error, Result};
use ottava_common::hash::sha256;
use ottava_models::{ConfigFile, Quantization, WeightScales};
use ottava_tensor::fp8::{E4M3, E8M0};
use ottava_tensor::ops::cast;
use ottava_tensor::{DType, Device, Granularity, Nf4Tensor, Staging, Tensor};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

/// The number of values of each weight that a fingerprint reads.
const FINGERPRINT_VALUES: usize = 1024;

/// The number of FP8 elements that a thread dequantizes at once.
const PART: usize = 1 << 16;

/// Tensors of a model folder, open for reading in any order.
#[derive(Clone, Debug)]
pub struct DequantizedFiles {
    files: ModelFiles,
    /// The storage format of FP8 weights; `None` if the folder has no FP8 weights.
    quantization: Option<Quantization>,
    /// The format of weights in four bits.
    four_bits: FourBits,
    /// Whether the folder may have scales of a KV cache.
    stated: bool,
}

/// The scales of a weight in FP8. A value is its code times its scale.
#[derive(Debug)]
pub struct StoredScales {
    /// The scales, in the order of their grid.
    scales: Vec<f32>,
    kind: WeightScales,
    grid: [usize; 2],
    /// The number of columns of the weight.
    columns: usize,
    /// The number of neighbours in a row that share a scale.
    width: usize,
}

impl DequantizedFiles {
    /// Opens the safetensors files of `folder`, checks that they are complete, and reads from `config.json` how quantized weights are stored.
    pub fn open(folder: &Path) -> Result<DequantizedFiles> {
        let files = ModelFiles::open(folder)?;
        if !folder.join("config.json").is_file() {
            return Ok(DequantizedFiles { files, quantization: None, four_bits: FourBits::None, stated: false });
        }
        let (quantization, stated) = (Quantization::of_folder(folder)?, Quantization::is_stated_in(folder)?);
        let four_bits = FourBits::of(&ConfigFile::read(folder)?, &files)?;
        Ok(DequantizedFiles { files, quantization, four_bits, stated })
    }

    /// Divides the tensors in two, as [`ModelFiles::divide`].
    pub(super) fn divide(self, name: impl Fn(&str) -> Option<String>) -> Result<[DequantizedFiles; 2]> {
        let DequantizedFiles { files, quantization, four_bits, stated } = self;
        Ok(files.divide(name)?.map(|files| DequantizedFiles { files, quantization, four_bits, stated }))
    }

    /// Returns whether there is a tensor with this name in the files.
    pub(super) fn has(&self, name: &str) -> bool {
        self.files.has(name)
    }

    /// Returns the storage format of FP8 weights. Returns `None` if the folder has no FP8 weights.
    pub fn quantization(&self) -> Option<Quantization> {
        self.quantization
    }

    /// Returns the names of all weights, without scales.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let is_scale =
            |name: &str| self.quantization.is_some() && Quantization::is_scale(name) || self.is_cache_scale(name);
        let weights = self.files.names().filter(move |name| !is_scale(name));
        weights.filter_map(|name| self.four_bits.weight_name(name))
    }

    /// Returns the names of scales of a KV cache, which are not read.
    pub fn cache_scales(&self) -> impl Iterator<Item = &str> {
        self.files.names().filter(|name| self.is_cache_scale(name))
    }

    fn is_cache_scale(&self, name: &str) -> bool {
        self.stated && Quantization::is_cache_scale(name)
    }

    /// Returns the name, the shape and the type of a weight. The type of a weight in FP8 or MXFP4 is BF16.
    pub fn info(&self, name: &str) -> Result<TensorInfo> {
        if let Some(info) = self.four_bits.info(&self.files, name)? {
            return Ok(info);
        }
        let info = self.files.info(name)?;
        Ok(TensorInfo { dtype: if info.dtype == DType::E4M3 { DType::BF16 } else { info.dtype }, ..info })
    }

    /// Returns a weight as the folder stores it in four bits, on `device`. Returns `None` unless it is in NF4 with quantized scales.
    pub fn packed(&self, name: &str, device: &Device) -> Result<Option<Nf4Tensor>> {
        self.four_bits.packed(&self.files, name, device)
    }

    /// Returns whether a weight is stored in FP8.
    pub fn is_fp8(&self, name: &str) -> Result<bool> {
        Ok(self.four_bits.info(&self.files, name)?.is_none() && self.files.info(name)?.dtype == DType::E4M3)
    }

    /// Reads the codes of a weight in FP8 to the device of `staging`. Errors if a code is not finite.
    pub fn codes(&self, staging: &mut Staging, name: &str) -> Result<Tensor> {
        let shape = self.files.info(name)?.shape;
        staging.read(&shape, DType::E4M3, |at, bytes| {
            self.files.read_into(name, at, bytes)?;
            let are_finite = |codes: &[u8]| codes.iter().all(|code| E4M3(*code).to_f32().is_finite());
            expect_finite(name, bytes.par_chunks(PART).all(are_finite))
        })
    }

    /// Reads a weight in F32, on the CPU. A weight in FP8 or in four bits is dequantized as `code · scale`, rounded once.
    pub fn values(&self, name: &str) -> Result<Tensor> {
        let info = self.info(name)?;
        Ok(self.values_of(name, 0..info.elements())?.reshape(&info.shape)?)
    }

    /// Reads `elements` of the flat weight as [`DequantizedFiles::values`] does, `[n]`. Other elements are not read.
    pub fn values_of(&self, name: &str, elements: Range<usize>) -> Result<Tensor> {
        in_f32(self.read_of(&mut Staging::new(&Device::Cpu), name, elements)?)
    }

    /// Reads `elements` of the flat weight in F32, or in the type of the file if that is F16 or BF16. Values of files in F64 and of weights in four
    /// bits are on the CPU, and other values are on the device of `staging`.
    pub fn read_of(&self, staging: &mut Staging, name: &str, elements: Range<usize>) -> Result<Tensor> {
        if let Some(info) = self.four_bits.info(&self.files, name)? {
            return self.four_bits.values_of(&self.files, &info, elements);
        }
        match self.files.info(name)?.dtype {
            DType::E4M3 => self.scaled_codes(staging, name, elements),
            DType::F64 => self.files.values_of(name, elements),
            _ => self.files.floats_of(staging, name, elements),
        }
    }

    /// Dequantizes `elements` of a flat weight in FP8, F32 `[n]`.
    fn scaled_codes(&self, staging: &mut Staging, name: &str, elements: Range<usize>) -> Result<Tensor> {
        let scales = self.scales(name)?;
        staging.read(&[elements.len()], DType::F32, |at, bytes| {
            let (first, values) = (elements.start + at / size_of::<f32>(), bytemuck::cast_slice_mut::<u8, f32>(bytes));
            let codes = self.files.read_bytes(name, first..first + values.len())?;
            let parts = values.par_chunks_mut(PART).zip(codes.par_chunks(PART)).enumerate();
            let are_finite = parts.map(|(part, (values, codes))| {
                scales.multiply(first + part * PART, codes, values);
                values.iter().all(|value| value.is_finite())
            });
            expect_finite(name, are_finite.reduce(|| true, |a, b| a && b))
        })
    }

    /// Returns a hash of `linears`. It covers the names, the shapes and the first values of their weights, rounded to BF16, so a copy in another type
    /// has the same hash.
    pub fn fingerprint<'a>(&self, linears: impl Iterator<Item = &'a String>) -> Result<String> {
        let mut text = Vec::new();
        for linear in linears {
            let name = format!("{linear}.weight");
            if let Some(info) = self.four_bits.info(&self.files, &name)? {
                text.extend(format!("{name} {:?} ", info.shape).bytes());
                let values = self.values_of(&name, 0..info.elements().min(FINGERPRINT_VALUES))?;
                text.extend(cast(&values, DType::BF16)?.read_bytes()?);
                continue;
            }
            let info = self.files.info(&name)?;
            text.extend(format!("{name} {:?} ", info.shape).bytes());
            let count = info.elements().min(FINGERPRINT_VALUES);
            let bytes = self.files.read_bytes(&name, 0..count * info.dtype.size())?;
            text.extend(match info.dtype {
                DType::E4M3 => bytes,
                dtype => {
                    cast(&Tensor::from_bytes(&Device::Cpu, &[count], dtype, &bytes)?, DType::BF16)?.read_bytes()?
                }
            });
        }
        Ok(sha256(&text))
    }

    /// Returns the bytes of a weight in the type of [`DequantizedFiles::info`].
    pub fn bytes(&self, info: &TensorInfo) -> Result<Vec<u8>> {
        match self.four_bits.info(&self.files, &info.name)?.is_some() || self.is_fp8(&info.name)? {
            true => Ok(cast(&self.values(&info.name)?, info.dtype)?.read_bytes()?),
            false => self.files.read(&info.name),
        }
    }

    /// Returns the static scales of inputs by the name of their linear: `code = x / scale`.
    pub fn input_scales(&self) -> Result<BTreeMap<String, f32>> {
        let mut found = BTreeMap::new();
        for name in self.files.names().filter(|_| self.quantization.is_some()) {
            let linear = Quantization::INPUT_SCALES.iter().find_map(|ending| name.strip_suffix(ending));
            let Some(linear) = linear else { continue };
            let scale = self.numbers(name)?;
            match scale[..] {
                [scale] if scale.is_finite() && scale > 0.0 => found.insert(linear.to_string(), scale),
                _ => return Err(Error::Model(format!("tensor `{name}` is {scale:?}; it is one number above 0"))),
            };
        }
        Ok(found)
    }

    /// Returns the scales of a weight in FP8.
    ///
    /// Errors if there are no scales, or if they differ from the description in config.json.
    pub fn scales(&self, name: &str) -> Result<StoredScales> {
        let info = self.files.info(name)?;
        let wrong = |reason: String| Error::Model(format!("tensor `{name}` is {}, {reason}", info.dtype));
        let Some(Quantization { scales: kind, .. }) = self.quantization else {
            return Err(wrong("and config.json has no `quantization_config` that says how it is scaled".into()));
        };
        let [rows, columns] = info.shape[..] else {
            return Err(wrong(format!("and has shape {:?}; weights in FP8 are matrices", info.shape)));
        };
        let linear = name.strip_suffix(".weight").unwrap_or(name);
        let names = Quantization::WEIGHT_SCALES.map(|ending| format!("{linear}{ending}"));
        let Some(stored) = names.iter().find(|name| self.files.info(name).is_ok()) else {
            let [inverse, scale] = &names;
            return Err(wrong(format!("and its scale `{scale}` or `{inverse}` is not in the folder")));
        };
        let (grid, shape) = (kind.grid([rows, columns]), self.files.info(stored)?.shape);
        // Writers differ in axes of length 1: [], [1], [outputs], [outputs, 1], [rows, 1, columns, 1].
        let long = |shape: &[usize]| shape.iter().copied().filter(|&n| n != 1).collect::<Vec<_>>();
        if long(&shape) != long(&grid) {
            return Err(wrong(format!("`{stored}` has shape {shape:?}, config.json makes it {grid:?}")));
        }
        Ok(StoredScales { scales: self.numbers(stored)?, kind, grid, columns, width: kind.width(columns).max(1) })
    }

    /// Reads scales in F32.
    fn numbers(&self, name: &str) -> Result<Vec<f32>> {
        match self.files.info(name)?.dtype {
            DType::E8M0 => Ok(self.files.read(name)?.into_iter().map(|exponent| E8M0(exponent).to_f32()).collect()),
            _ => Ok(self.files.values(name)?.to_vec::<f32>()?),
        }
    }
}

impl StoredScales {
    /// Returns the scale of an element of the flat weight.
    pub fn at(&self, element: usize) -> f32 {
        let (row, column) = (element / self.columns, element % self.columns);
        self.scales[self.kind.index(self.grid, row, column)]
    }

    /// Dequantizes `codes` into `values`. The codes are neighbours in the flat weight, from element `first` on.
    fn multiply(&self, first: usize, codes: &[u8], values: &mut [f32]) {
        let mut at = 0;
        while at < codes.len() {
            // The following neighbours share a scale: they are in the same row and in the same block.
            let column = (first + at) % self.columns;
            let end = (column + self.width - column % self.width).min(self.columns);
            let stop = (at + end - column).min(codes.len());
            let scale = self.at(first + at);
            for (value, code) in values[at..stop].iter_mut().zip(&codes[at..stop]) {
                *value = E4M3(*code).to_f32() * scale;
            }
            at = stop;
        }
    }

    /// Returns the granularity of a cast with such scales. Returns `None` for blocks of other sizes.
    pub fn granularity(&self) -> Option<Granularity> {
        self.kind.granularity()
    }

    /// Returns the scales, in the order of their grid.
    pub fn into_values(self) -> Vec<f32> {
        self.scales
    }
}

impl ModelFiles {
    /// Reads a tensor in F32, on the CPU.
    pub fn values(&self, name: &str) -> Result<Tensor> {
        let info = self.info(name)?;
        Ok(self.values_of(name, 0..info.elements())?.reshape(&info.shape)?)
    }

    /// Reads `elements` of a flat tensor in F32, `[n]`, on the CPU.
    pub fn values_of(&self, name: &str, elements: Range<usize>) -> Result<Tensor> {
        in_f32(self.floats_of(&mut Staging::new(&Device::Cpu), name, elements)?)
    }

    /// Reads `elements` of a flat tensor of floats in the type of the file, `[n]`, to the device of `staging`.
    fn floats_of(&self, staging: &mut Staging, name: &str, elements: Range<usize>) -> Result<Tensor> {
        let info = self.info(name)?;
        if !matches!(info.dtype, DType::F32 | DType::F16 | DType::BF16 | DType::F64) {
            return Err(Error::Model(format!(
                "tensor `{name}` is {}; weights must be floats of 16 bits or more",
                info.dtype
            )));
        }
        let first = elements.start * info.dtype.size();
        staging.read(&[elements.len()], info.dtype, |at, bytes| self.read_into(name, first + at, bytes))
    }
}

fn expect_finite(name: &str, are_finite: bool) -> Result<()> {
    match are_finite {
        true => Ok(()),
        false => Err(Error::Model(format!("tensor `{name}` has codes or scales that are not finite"))),
    }
}

fn in_f32(values: Tensor) -> Result<Tensor> {
    match values.dtype() {
        DType::F32 => Ok(values),
        _ => Ok(cast(&values, DType::F32)?),
    }
}
