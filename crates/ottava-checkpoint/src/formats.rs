//! Converts master weights and optimizer states of a checkpoint to the formats of another storage.
//!
//! Each rank reads whole tensors, since a matrix has one scale.

use crate::slices::{Regions, SliceFiles};
use ottava_common::error::{Error, Result};
use ottava_recipe::param::{FolderTensor, Shard, Split};
use ottava_tensor::ops::{amax, cast, expanded, scaled_by, unexpanded, unscaled};
use ottava_tensor::{DType, Device, ExpandedTensor, ScaledTensor, Tensor};
use std::collections::HashMap;
use std::path::Path;

/// The saved states of one parameter.
pub(super) struct SavedStates<'a> {
    /// The folder of the checkpoint, for messages.
    pub folder: &'a Path,
    pub files: &'a SliceFiles,
    /// The name of the parameter. The names of scales contain it.
    pub parameter: &'a str,
    pub shards: &'a [Shard],
}

/// The values of one kind, such as the first moment, of all tensors of a parameter.
pub(super) struct Values {
    /// The values of each tensor of this rank, by name.
    by_tensor: HashMap<String, Vec<f32>>,
    /// The amax of all values, including the experts of other ranks.
    amax: f32,
}

/// The values of a parameter, or of a slice of it, in a format.
pub(super) struct Encoded {
    /// The tensor that the optimizer calls by the name of the kind.
    pub values: Tensor,
    /// The accompanying tensor, such as the scale, with the suffix of its name.
    pub beside: Option<(&'static str, Tensor)>,
}

impl SavedStates<'_> {
    /// Reads the values of `kind` in F32. Returns `None` if the checkpoint does not have them.
    ///
    /// Errors with [`Error::Checkpoint`] if tensors have other shapes, or a format of an earlier version.
    pub fn values(&self, kind: &str) -> Result<Option<Values>> {
        let (mut by_tensor, mut largest) = (HashMap::new(), 0f32);
        for Shard { tensor, split, .. } in self.shards {
            if !self.files.has(&format!("{kind}.{}", tensor.name)) {
                return Ok(None);
            }
            // The experts of other ranks share the scale, so they are also read.
            let alike = if *split == Split::Expert { self.experts_of(kind, tensor) } else { vec![tensor.clone()] };
            for tensor in alike {
                if by_tensor.contains_key(&tensor.name) {
                    continue;
                }
                let values = self.whole(kind, &tensor)?;
                largest = largest.max(amax(&values)?.to_vec::<f32>()?[0]);
                by_tensor.insert(tensor.name, values.to_vec()?);
            }
        }
        by_tensor.retain(|name, _| self.shards.iter().any(|shard| shard.tensor.name == *name));
        Ok(Some(Values { by_tensor, amax: largest }))
    }

    /// Returns the tensors of all experts that correspond to `tensor`.
    fn experts_of(&self, kind: &str, tensor: &FolderTensor) -> Vec<FolderTensor> {
        let split =
            tensor.name.split_once(".experts.").and_then(|(before, after)| Some((before, after.split_once('.')?.1)));
        // A shared expert has no number.
        let Some((before, part)) = split else { return vec![tensor.clone()] };
        let names = (0..).map(|expert| format!("{before}.experts.{expert}.{part}"));
        let names = names.take_while(|name| self.files.has(&format!("{kind}.{name}")));
        names.map(|name| FolderTensor { name, ..tensor.clone() }).collect()
    }

    fn whole(&self, kind: &str, tensor: &FolderTensor) -> Result<Tensor> {
        let name = format!("{kind}.{}", tensor.name);
        let read = |name: &str| {
            let info = self.files.info(name)?;
            Ok::<_, Error>(Tensor::from_bytes(&Device::Cpu, &info.shape, info.dtype, &self.files.read(name)?)?)
        };
        let values = read(&name)?;
        if values.shape() != tensor.shape {
            let (shape, expected) = (values.shape(), &tensor.shape);
            let folder = self.folder.display();
            return Err(Error::Checkpoint(format!(
                "{folder}: `{name}` has shape {shape:?}, this run makes it {expected:?}"
            )));
        }
        let groups = format!("{kind}_groups.{}", tensor.name);
        Ok(match values.dtype() {
            DType::F32 => values,
            DType::BF16 => cast(&values, DType::F32)?,
            DType::U8 => unexpanded(&ExpandedTensor { codes: values, groups: read(&groups)? })?,
            DType::E4M3 if self.files.has(&groups) => {
                return Err(Error::Checkpoint(format!(
                    "{}: `{name}` has a format of level `coat` that an earlier version wrote; start a new run with `model.path` set to the checkpoint",
                    self.folder.display()
                )));
            }
            DType::F16 | DType::E4M3 => {
                let scale_inv = read(&format!("{kind}_scale_inv.{}", self.parameter))?;
                unscaled(&ScaledTensor { values, scale_inv }, DType::F32)?
            }
            other => return Err(Error::Checkpoint(format!("{}: `{name}` has type {other}", self.folder.display()))),
        })
    }
}

impl Values {
    /// Returns the values in `regions` of the tensors of `kind`.
    pub fn part<'r>(&self, kind: &str, regions: impl Iterator<Item = &'r Regions>) -> Result<Tensor> {
        let mut part = Vec::new();
        for Regions { info, regions } in regions {
            let name = info.name.strip_prefix(kind).and_then(|name| name.strip_prefix('.')).expect("of this kind");
            let ranges = regions.iter().flat_map(|region| region.ranges(&info.shape));
            ranges.for_each(|range| part.extend_from_slice(&self.by_tensor[name][range]));
        }
        Ok(Tensor::from_slice(&Device::Cpu, &[part.len()], &part)?)
    }

    /// Rounds `part` of the values, F32, as F16 master weights with a scale would be rounded, and returns the weights that layers read in `dtype`.
    pub fn through_f16(&self, part: &Tensor, dtype: DType) -> Result<Tensor> {
        Ok(unscaled(&scaled_by(part, &self.amax()?, DType::F16)?, dtype)?)
    }

    fn amax(&self) -> Result<Tensor> {
        Ok(Tensor::from_slice(&Device::Cpu, &[1], &[self.amax])?)
    }

    /// Converts `part` of the values, F32, to the format and the shape of `like`.
    pub fn encode(&self, part: &Tensor, like: &Tensor) -> Result<Encoded> {
        let part = part.reshape(like.shape())?;
        Ok(match like.dtype() {
            DType::F32 => Encoded { values: part, beside: None },
            DType::U8 => {
                let ExpandedTensor { codes, groups } = expanded(&part)?;
                Encoded { values: codes, beside: Some(("groups", groups)) }
            }
            dtype @ (DType::F16 | DType::E4M3) => {
                let ScaledTensor { values, scale_inv } = scaled_by(&part, &self.amax()?, dtype)?;
                Encoded { values, beside: Some(("scale_inv", scale_inv)) }
            }
            dtype => Encoded { values: cast(&part, dtype)?, beside: None },
        })
    }
}
