//! The weights of a model folder as values, whatever their type: FP8 weights are multiplied by their scales.

use super::{ModelFiles, TensorInfo};
use crate::error::{Error, Result};
use crate::hash::sha256;
use crate::models::{Quantization, WeightScales};
use ottava_tensor::fp8::{E4M3, E8M0};
use ottava_tensor::ops::cast;
use ottava_tensor::{DType, Device, Granularity, Tensor};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

/// Values of each weight that a fingerprint reads.
const FINGERPRINT_VALUES: usize = 1024;

/// The weights of a model folder, open for reading in any order.
#[derive(Debug)]
pub struct WeightFiles {
    files: ModelFiles,
    /// The storage format of FP8 weights, if the folder has any.
    quantization: Option<Quantization>,
    /// Whether the folder may have scales of a cache of keys and values.
    stated: bool,
}

/// The scales of a weight in FP8: values are codes times these.
#[derive(Debug)]
pub struct StoredScales {
    /// In the order of their grid.
    scales: Vec<f32>,
    kind: WeightScales,
    grid: [usize; 2],
    /// Columns of the weight.
    columns: usize,
    /// Neighbours in a row that share a scale.
    width: usize,
}

impl WeightFiles {
    /// Opens the safetensors files of `folder`, checks that they are whole, and reads in `config.json` how weights in FP8 are stored.
    pub fn open(folder: &Path) -> Result<WeightFiles> {
        let files = ModelFiles::open(folder)?;
        let (quantization, stated) = match folder.join("config.json").is_file() {
            true => (Quantization::of_folder(folder)?, Quantization::is_stated_in(folder)?),
            false => (None, false),
        };
        Ok(WeightFiles { files, quantization, stated })
    }

    /// The storage format of FP8 weights, if the folder has any.
    pub fn quantization(&self) -> Option<Quantization> {
        self.quantization
    }

    /// The names of all weights, sorted; scales of FP8 weights are none.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.files
            .names()
            .filter(|name| !(self.quantization.is_some() && Quantization::is_scale(name) || self.is_cache_scale(name)))
    }

    /// The names of scales of a cache of keys and values, which nothing reads.
    pub fn cache_scales(&self) -> impl Iterator<Item = &str> {
        self.files.names().filter(|name| self.is_cache_scale(name))
    }

    fn is_cache_scale(&self, name: &str) -> bool {
        self.stated && Quantization::is_cache_scale(name)
    }

    /// Name, shape and type of a weight: BF16 for one in FP8.
    pub fn info(&self, name: &str) -> Result<TensorInfo> {
        let info = self.files.info(name)?;
        Ok(TensorInfo { dtype: if info.dtype == DType::E4M3 { DType::BF16 } else { info.dtype }, ..info })
    }

    /// Whether a weight is stored in FP8.
    pub fn is_fp8(&self, name: &str) -> Result<bool> {
        Ok(self.files.info(name)?.dtype == DType::E4M3)
    }

    /// The codes of a weight in FP8.
    pub fn codes(&self, name: &str) -> Result<Vec<u8>> {
        self.files.read(name)
    }

    /// A weight in F32, on the CPU; one in FP8 as `code · scale`, rounded once.
    pub fn values(&self, name: &str) -> Result<Tensor> {
        let info = self.files.info(name)?;
        Ok(self.values_of(name, 0..info.elements())?.reshape(&info.shape)?)
    }

    /// [`WeightFiles::values`] of `elements` of the flat weight, `[n]`. Only those are read.
    pub fn values_of(&self, name: &str, elements: Range<usize>) -> Result<Tensor> {
        if self.files.info(name)?.dtype != DType::E4M3 {
            return self.files.values_of(name, elements);
        }
        let scales = self.scales(name)?;
        let codes = self.files.read_bytes(name, elements.clone())?;
        let (mut values, mut at) = (Vec::with_capacity(codes.len()), elements.start);
        while at < elements.end {
            // Neighbours with one scale: of one row, and of one block in it.
            let column = at % scales.columns;
            let end = (column + scales.width - column % scales.width).min(scales.columns);
            let stop = (at + end - column).min(elements.end);
            let scale = scales.at(at);
            let codes = &codes[at - elements.start..stop - elements.start];
            values.extend(codes.iter().map(|code| E4M3(*code).to_f32() * scale));
            at = stop;
        }
        if values.iter().any(|value| !value.is_finite()) {
            return Err(Error::Model(format!("tensor `{name}` has codes or scales that are not finite")));
        }
        Ok(Tensor::from_slice(&Device::Cpu, &[values.len()], &values)?)
    }

    /// A hash of `linears`: of the names, shapes and first values of their weights, rounded to BF16, so that a copy in another type has the
    /// same one.
    pub fn fingerprint<'a>(&self, linears: impl Iterator<Item = &'a String>) -> Result<String> {
        let mut text = Vec::new();
        for linear in linears {
            let name = format!("{linear}.weight");
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

    /// The bytes of a weight in the type of [`WeightFiles::info`].
    pub fn bytes(&self, info: &TensorInfo) -> Result<Vec<u8>> {
        match self.files.info(&info.name)?.dtype {
            DType::E4M3 => Ok(cast(&self.values(&info.name)?, info.dtype)?.read_bytes()?),
            _ => self.files.read(&info.name),
        }
    }

    /// Scales of inputs that do not depend on the input, by the name of their linear: `code = x / scale`.
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

    /// The scales of a weight in FP8.
    ///
    /// Errors when there are none, or others than config.json says.
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

    /// Scales in F32.
    fn numbers(&self, name: &str) -> Result<Vec<f32>> {
        match self.files.info(name)?.dtype {
            DType::E8M0 => Ok(self.files.read(name)?.into_iter().map(|exponent| E8M0(exponent).to_f32()).collect()),
            _ => Ok(self.files.values(name)?.to_vec::<f32>()?),
        }
    }
}

impl StoredScales {
    /// The scale of an element of the flat weight.
    pub fn at(&self, element: usize) -> f32 {
        let (row, column) = (element / self.columns, element % self.columns);
        self.scales[self.kind.index(self.grid, row, column)]
    }

    /// The granularity of a cast with such scales; `None` for blocks of other sizes.
    pub fn granularity(&self) -> Option<Granularity> {
        self.kind.granularity()
    }

    /// The scales, in the order of their grid.
    pub fn into_values(self) -> Vec<f32> {
        self.scales
    }
}

impl ModelFiles {
    /// A tensor in F32, on the CPU.
    pub fn values(&self, name: &str) -> Result<Tensor> {
        let info = self.info(name)?;
        Ok(self.values_of(name, 0..info.elements())?.reshape(&info.shape)?)
    }

    /// `elements` of a flat tensor in F32, `[n]`, on the CPU.
    pub fn values_of(&self, name: &str, elements: Range<usize>) -> Result<Tensor> {
        let info = self.info(name)?;
        if !matches!(info.dtype, DType::F32 | DType::F16 | DType::BF16 | DType::F64) {
            return Err(Error::Model(format!(
                "tensor `{name}` is {}; weights must be floats of 16 bits or more",
                info.dtype
            )));
        }
        let (size, shape) = (info.dtype.size(), [elements.len()]);
        let bytes = self.read_bytes(name, elements.start * size..elements.end * size)?;
        let stored = Tensor::from_bytes(&Device::Cpu, &shape, info.dtype, &bytes)?;
        Ok(cast(&stored, DType::F32)?)
    }
}
