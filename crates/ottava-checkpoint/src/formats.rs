//! Master weights and optimizer states of a checkpoint in the formats of another level.
//!
//! Each rank reads whole tensors, since whole matrices have one scale.

use crate::slices::{Regions, SliceFiles};
use ottava_common::error::{Error, Result};
use ottava_recipe::param::{FolderTensor, Shard, Split};
use ottava_tensor::ops::{amax, cast, expanded, scaled_by, unexpanded, unscaled};
use ottava_tensor::{DType, Device, ExpandedTensor, ScaledTensor, Tensor};
use std::collections::HashMap;
use std::path::Path;

/// What a checkpoint has of one parameter.
pub(super) struct SavedStates<'a> {
    /// The folder, for messages.
    pub folder: &'a Path,
    pub files: &'a SliceFiles,
    /// The name of the parameter, which scales have.
    pub parameter: &'a str,
    pub shards: &'a [Shard],
}

/// The values of one kind, such as the first moment, of all tensors of a parameter.
pub(super) struct Values {
    /// By the name of the tensor: the amaxes of this rank.
    by_tensor: HashMap<String, Vec<f32>>,
    /// The amax of all, including the experts of other ranks.
    amax: f32,
}

/// Values of a parameter, or of a slice of it, in a format.
pub(super) struct Encoded {
    /// What the optimizer calls by the name of the kind.
    pub values: Tensor,
    /// The end of the name of the tensor beside it, and that tensor.
    pub beside: Option<(&'static str, Tensor)>,
}

impl SavedStates<'_> {
    /// The values of `kind`, in F32; `None` if the checkpoint has none.
    ///
    /// Errors with [`Error::Checkpoint`] if tensors have other shapes, or a format of an earlier version.
    pub fn values(&self, kind: &str) -> Result<Option<Values>> {
        let (mut by_tensor, mut largest) = (HashMap::new(), 0f32);
        for Shard { tensor, split, .. } in self.shards {
            if !self.files.has(&format!("{kind}.{}", tensor.name)) {
                return Ok(None);
            }
            // The experts of other ranks have the same scale.
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

    /// The tensors of all experts that are like this one.
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
    /// The values in `regions` of the tensors of `kind`.
    pub fn part<'r>(&self, kind: &str, regions: impl Iterator<Item = &'r Regions>) -> Result<Tensor> {
        let mut part = Vec::new();
        for Regions { info, regions } in regions {
            let name = info.name.strip_prefix(kind).and_then(|name| name.strip_prefix('.')).expect("of this kind");
            let ranges = regions.iter().flat_map(|region| region.ranges(&info.shape));
            ranges.for_each(|range| part.extend_from_slice(&self.by_tensor[name][range]));
        }
        Ok(Tensor::from_slice(&Device::Cpu, &[part.len()], &part)?)
    }

    /// `part` of the values, F32, as layers read it in `dtype` if the master weights are F16 with a scale.
    pub fn through_f16(&self, part: &Tensor, dtype: DType) -> Result<Tensor> {
        Ok(unscaled(&scaled_by(part, &self.amax()?, DType::F16)?, dtype)?)
    }

    fn amax(&self) -> Result<Tensor> {
        Ok(Tensor::from_slice(&Device::Cpu, &[1], &[self.amax])?)
    }

    /// `part` of the values, F32, in the format of `like`, which has its shape.
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
