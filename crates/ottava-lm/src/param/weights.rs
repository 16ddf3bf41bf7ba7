//! The weights of a parameter: those that an optimizer updates, and those that layers read.

use super::scopes::{MASTERS, WEIGHTS};
use crate::error::Result;
use crate::level::Masters;
use crate::scaling::Values;
use ottava_tensor::ops::{AdamWWeight, WeightCopy, cast, scaled, split, unscaled};
use ottava_tensor::{DType, Device, MemoryKind, ScaledTensor, Tensor};
use std::ops::Range;

/// The weights of a parameter: those that an optimizer updates, and those that layers read.
pub struct Weights {
    shape: Vec<usize>,
    device: Device,
    /// The type in which layers read the weights.
    dtype: DType,
    /// The weights that layers read; `None` if they are computed from the master on demand.
    value: Option<Tensor>,
    /// `None` if `value` is updated, or nothing is trained.
    master: Option<Master>,
}

/// Master weights: what an optimizer updates, more precise than what layers read.
pub enum Master {
    /// F32.
    Full(Tensor),
    /// F16 with a power of two as scale.
    Scaled(ScaledTensor),
    /// I16: the bits that complete a BF16 value to F32.
    Rest(Tensor),
}

impl Weights {
    /// Weights of F32 values `full`, read in `dtype`, with a master if `masters` asks for one.
    pub fn new(full: Tensor, dtype: DType, masters: Masters) -> Result<Weights> {
        let (shape, device) = (full.shape().to_vec(), full.device().clone());
        let _scope = device.scope(WEIGHTS);
        let (value, master) = match masters {
            Masters::Float16 => {
                let masters = device.scope(MASTERS);
                let master = scaled(&full, DType::F16)?;
                drop(masters);
                (unscaled(&master, dtype)?, Some(Master::Scaled(master)))
            }
            _ if dtype == DType::F32 => (full, None),
            Masters::None => (cast(&full, dtype)?, None),
            Masters::Float32 => (cast(&full, dtype)?, Some(Master::Full(full))),
            Masters::Remainder => {
                let (value, rest) = split(&full)?;
                (value, Some(Master::Rest(rest)))
            }
        };
        Ok(Weights { shape, device, dtype, value: Some(value), master })
    }

    /// Moves the master, if there is one, to host memory.
    pub fn offload_master(&mut self) -> Result<()> {
        let tensor = match &mut self.master {
            None => return Ok(()),
            Some(Master::Full(tensor) | Master::Rest(tensor)) => tensor,
            Some(Master::Scaled(master)) => &mut master.values,
        };
        *tensor = tensor.to_host_memory()?;
        Ok(())
    }

    /// Keeps `elements` of the flat tensors, in this shape. Weights that a master can make are dropped.
    pub fn keep_slice(&mut self, elements: Range<usize>, shape: &[usize]) -> Result<()> {
        let keep = |tensor: &mut Tensor, scope| -> Result<()> {
            let _scope = tensor.device().scope(scope);
            let kept = tensor.reshape(&[tensor.len()])?.rows(elements.start, elements.end)?;
            let mut slice = Tensor::zeros_in(tensor.device(), shape, tensor.dtype(), tensor.memory_kind())?;
            match tensor.memory_kind() {
                MemoryKind::Device => slice.copy_from(0, &kept.reshape(shape)?)?,
                MemoryKind::Host => slice.write_bytes(&kept.read_bytes()?)?,
            }
            *tensor = slice;
            Ok(())
        };
        match &mut self.master {
            Some(Master::Full(master) | Master::Scaled(ScaledTensor { values: master, .. })) => {
                if master.memory_kind() == MemoryKind::Device {
                    self.value = None;
                }
                keep(master, MASTERS)?;
            }
            Some(Master::Rest(rest)) => keep(rest, WEIGHTS)?,
            None => {}
        }
        self.value.as_mut().map_or(Ok(()), |value| keep(value, WEIGHTS))
    }

    /// Stores the weights that layers read in `place` from the coming update on, if the master makes them and they are not stored; else
    /// gives it back.
    pub fn lend_value(&mut self, place: Tensor) -> Option<Tensor> {
        match (&self.master, &self.value) {
            (Some(Master::Full(_) | Master::Scaled(_)), None) => {
                self.value = Some(place);
                None
            }
            _ => Some(place),
        }
    }

    /// The F32 master that makes the weights that layers read, where those are not stored.
    pub fn unrounded(&self) -> Option<&Tensor> {
        match (&self.master, &self.value) {
            (Some(Master::Full(master)), None) => Some(master),
            _ => None,
        }
    }

    /// Takes what was lent by [`Weights::lend_value`].
    pub fn take_value(&mut self) -> Option<Tensor> {
        self.value.take()
    }

    /// The weights in the compute type, as layers read them.
    pub fn value(&self) -> Result<Tensor> {
        self.values_from(None)?.plain()
    }

    /// Whether layers read a stored tensor, and not one that each forward makes of the master.
    pub fn is_stored(&self) -> bool {
        self.value.is_some()
    }

    /// The weights as casts read them, with the device `copy` of [`Weights::read_from`] where that is in host memory.
    pub fn values_from(&self, copy: Option<&Tensor>) -> Result<Values> {
        let read = |own: &Tensor| copy.unwrap_or(own).clone();
        Ok(match (&self.value, &self.master) {
            (Some(value), _) => Values::Plain(read(value)),
            (None, Some(Master::Scaled(ScaledTensor { values, scale_inv }))) => {
                Values::Scaled(ScaledTensor { values: read(values), scale_inv: scale_inv.clone() }, self.dtype)
            }
            (None, Some(Master::Full(master))) => Values::Plain(cast(master, self.dtype)?),
            (None, _) => unreachable!("only a value that the master can make is dropped"),
        })
    }

    /// Sets the weights that layers read and leaves the master: for finite differences.
    pub fn set_value(&mut self, value: Tensor) {
        self.value = Some(value);
    }

    /// Drops the weights that layers read if an F16 master can give them: products read FP8 codes, and casts read the master.
    pub fn drop_value(&mut self) {
        if matches!(self.master, Some(Master::Scaled(_))) {
            self.value = None;
        }
    }

    /// Drops frozen weights that codes replace: nothing reads them any more.
    pub fn drop_frozen(&mut self) {
        self.value = None;
    }

    /// The type in which layers read the weights.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The shape of all tensors.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The stored weights that layers read, and the master.
    pub fn tensors_mut(&mut self) -> (Option<&mut Tensor>, Option<&mut Master>) {
        (self.value.as_mut(), self.master.as_mut())
    }

    /// The weights that layers read, or the master that gives them.
    fn read_mut(&mut self) -> &mut Tensor {
        match (&mut self.value, &mut self.master) {
            (Some(value), _) => value,
            (None, Some(Master::Scaled(master))) => &mut master.values,
            (None, _) => unreachable!("only a value that an F16 master can make is dropped"),
        }
    }

    /// The weights that layers read, or the master that gives them.
    pub fn read_from(&self) -> &Tensor {
        match (&self.value, &self.master) {
            (Some(value), _) => value,
            (None, Some(Master::Scaled(master))) => &master.values,
            (None, _) => unreachable!("only a value that an F16 master can make is dropped"),
        }
    }

    /// Moves the weights that layers read, or the master that gives them, to host memory.
    pub fn offload_read(&mut self) -> Result<()> {
        let read = self.read_mut();
        *read = read.to_host_memory()?;
        Ok(())
    }

    /// The weights for an optimizer to update.
    pub fn for_update(&mut self) -> AdamWWeight<'_> {
        let (made, narrow) = (WeightCopy::OnDemand(self.dtype), self.dtype == DType::BF16);
        match (&mut self.master, &mut self.value) {
            (Some(Master::Full(master)), value) => {
                AdamWWeight::Master { master, copy: value.as_mut().map_or(made, WeightCopy::Stored) }
            }
            (Some(Master::Scaled(master)), value) => {
                AdamWWeight::Scaled { master, copy: value.as_mut().map_or(made, WeightCopy::Stored) }
            }
            (Some(Master::Rest(rest)), Some(weight)) => AdamWWeight::Split { weight, rest },
            (None, Some(weight)) => match narrow {
                true => AdamWWeight::Stochastic { weight },
                false => AdamWWeight::Master { master: weight, copy: made },
            },
            (_, None) => unreachable!("only a value that an F16 master can make is dropped"),
        }
    }
}
