//! The weights of a parameter: those that an optimizer updates, and those that layers read.

use crate::error::Result;
use crate::level::Masters;
use crate::scaling::Values;
use ottava_tensor::ops::{AdamWWeight, WeightCopy, cast, scaled, split, unscaled};
use ottava_tensor::{DType, Device, ScaledTensor, Tensor};

/// The names of their memory in a dry run.
pub(super) const WEIGHTS: &str = "weights";
pub(super) const MASTERS: &str = "master weights";

/// The weights of a parameter: those that an optimizer updates, and those that layers read.
pub struct Weights {
    shape: Vec<usize>,
    device: Device,
    /// The type in which layers read them.
    dtype: DType,
    /// As layers read them; `None` where they are made of the master when they are asked for.
    value: Option<Tensor>,
    /// `None` where `value` is updated, or nothing is trained.
    master: Option<Master>,
}

/// Weights that are updated, more precise than those that layers read.
pub enum Master {
    /// F32.
    Full(Tensor),
    /// F16 with a power of two.
    Scaled(ScaledTensor),
    /// I16: what the value lacks to the bits of an F32.
    Rest(Tensor),
}

impl Weights {
    /// Of `full` values in F32, read in `dtype`, with a master if there is a way to keep one.
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

    /// Moves what is updated, where layers read something else, to the host's memory.
    pub fn offload_master(&mut self) -> Result<()> {
        let tensor = match &mut self.master {
            None => return Ok(()),
            Some(Master::Full(tensor) | Master::Rest(tensor)) => tensor,
            Some(Master::Scaled(master)) => &mut master.values,
        };
        *tensor = tensor.to_host_memory()?;
        Ok(())
    }

    /// The weights as layers read them.
    pub fn value(&self) -> Result<Tensor> {
        self.value_from(None)
    }

    /// The weights as layers read them; `copy` stands for what lies in the host's memory.
    pub fn value_from(&self, copy: Option<&Tensor>) -> Result<Tensor> {
        match self.values_from(copy) {
            Values::Plain(value) => Ok(value),
            Values::Scaled(master, dtype) => Ok(unscaled(&master, dtype)?),
        }
    }

    /// The weights as casts read them; `copy` stands for what lies in the host's memory.
    pub fn values_from(&self, copy: Option<&Tensor>) -> Values {
        let read = |own: &Tensor| copy.unwrap_or(own).clone();
        match (&self.value, &self.master) {
            (Some(value), _) => Values::Plain(read(value)),
            (None, Some(Master::Scaled(ScaledTensor { values, scale_inv }))) => {
                Values::Scaled(ScaledTensor { values: read(values), scale_inv: scale_inv.clone() }, self.dtype)
            }
            (None, _) => unreachable!("only a value that an F16 master can make is dropped"),
        }
    }

    /// Has layers read `value`, whatever a master has: for finite differences.
    pub fn set_value(&mut self, value: Tensor) {
        self.value = Some(value);
    }

    /// Drops the weights as layers read them where an F16 master can make them: products read FP8 codes, and casts read the master.
    pub fn drop_value(&mut self) {
        if matches!(self.master, Some(Master::Scaled(_))) {
            self.value = None;
        }
    }

    /// The type in which layers read them.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Of all tensors.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Where they lie.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The weights as layers read them, where they are kept, and those that are updated, where those are others.
    pub fn tensors_mut(&mut self) -> (Option<&mut Tensor>, Option<&mut Master>) {
        (self.value.as_mut(), self.master.as_mut())
    }

    /// What layers read, or make what they read of.
    fn read_mut(&mut self) -> &mut Tensor {
        match (&mut self.value, &mut self.master) {
            (Some(value), _) => value,
            (None, Some(Master::Scaled(master))) => &mut master.values,
            (None, _) => unreachable!("only a value that an F16 master can make is dropped"),
        }
    }

    /// [`Weights::read_mut`], to look at.
    pub fn read_from(&self) -> &Tensor {
        match (&self.value, &self.master) {
            (Some(value), _) => value,
            (None, Some(Master::Scaled(master))) => &master.values,
            (None, _) => unreachable!("only a value that an F16 master can make is dropped"),
        }
    }

    /// Moves what layers read to the host's memory.
    pub fn offload_read(&mut self) -> Result<()> {
        let read = self.read_mut();
        *read = read.to_host_memory()?;
        Ok(())
    }

    /// What an optimizer updates.
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
