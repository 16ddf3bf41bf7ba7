//! How a parameter keeps its weights and its gradient.

use super::{MASTERS, WEIGHTS};
use crate::error::Result;
use crate::level::{Gradients, Masters};
use crate::scaling::Values;
use ottava_tensor::ops::{
    Accumulation, AdamWWeight, Gradient, Operand, WeightCopy, cast, gemm_nt, gemm_nt_add, real_type, scaled, split,
    unscaled,
};
use ottava_tensor::{DType, Device, Scaled, Tensor};

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
    Scaled(Scaled),
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
        Ok(match (&self.value, &self.master) {
            (Some(value), _) => value.clone(),
            (None, Some(Master::Scaled(master))) => unscaled(master, self.dtype)?,
            (None, _) => unreachable!("only what a master in F16 makes is dropped"),
        })
    }

    /// The weights as casts read them.
    pub fn for_cast(&self) -> Values<'_> {
        match (&self.value, &self.master) {
            (Some(value), _) => Values::Plain(value),
            (None, Some(Master::Scaled(master))) => Values::Scaled(master, self.dtype),
            (None, _) => unreachable!("only what a master in F16 makes is dropped"),
        }
    }

    /// Has layers read `value`, whatever a master has: for finite differences.
    pub fn set_value(&mut self, value: Tensor) {
        self.value = Some(value);
    }

    /// Drops the weights as layers read them, where a master in F16 can make them: products read FP8 codes of them, and whoever casts
    /// them makes them for that.
    pub fn made_when_asked(&mut self) {
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
    pub fn read_mut(&mut self) -> &mut Tensor {
        match (&mut self.value, &mut self.master) {
            (Some(value), _) => value,
            (None, Some(Master::Scaled(master))) => &mut master.values,
            (None, _) => unreachable!("only what a master in F16 makes is dropped"),
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
        let (made, narrow) = (WeightCopy::Made(self.dtype), self.dtype == DType::BF16);
        match (&mut self.master, &mut self.value) {
            (Some(Master::Full(master)), value) => {
                AdamWWeight::Master { master, copy: value.as_mut().map_or(made, WeightCopy::Kept) }
            }
            (Some(Master::Scaled(master)), value) => {
                AdamWWeight::Scaled { master, copy: value.as_mut().map_or(made, WeightCopy::Kept) }
            }
            (Some(Master::Rest(rest)), Some(weight)) => AdamWWeight::Split { weight, rest },
            (None, Some(weight)) => match narrow {
                true => AdamWWeight::Stochastic { weight },
                false => AdamWWeight::Master { master: weight, copy: made },
            },
            (_, None) => unreachable!("only what a master in F16 makes is dropped"),
        }
    }
}

/// The gradient of a parameter.
#[derive(Clone, Debug)]
pub enum Grad {
    /// F64, F32 or BF16.
    Plain(Tensor),
    /// E4M3.
    Scaled(Scaled),
}

/// How a parameter keeps its gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradFormat {
    /// In this type.
    Plain(DType),
    /// In E4M3; products add up in this type, before they are cast.
    Scaled(DType),
}

impl GradFormat {
    /// Of a matrix, in a model that computes in `compute`. Only what 16 bits are enough for is kept in less than F32.
    pub fn of(gradients: Gradients, compute: DType) -> GradFormat {
        match (gradients, compute) {
            (Gradients::Bfloat16, DType::BF16) => GradFormat::Plain(DType::BF16),
            (Gradients::Float8, DType::BF16) => GradFormat::Scaled(DType::BF16),
            (Gradients::Float8, DType::F32 | DType::F16) => GradFormat::Scaled(DType::F32),
            _ => GradFormat::Plain(real_type(compute)),
        }
    }

    /// The type of what is kept.
    pub fn dtype(self) -> DType {
        match self {
            GradFormat::Plain(dtype) => dtype,
            GradFormat::Scaled(_) => DType::E4M3,
        }
    }

    /// The type in which contributions add up.
    pub fn sums(self) -> DType {
        match self {
            GradFormat::Plain(dtype) | GradFormat::Scaled(dtype) => dtype,
        }
    }
}

impl Grad {
    /// As an optimizer reads it.
    pub fn read(&self) -> Gradient<'_> {
        match self {
            Grad::Plain(grad) => Gradient::Plain(grad),
            Grad::Scaled(grad) => Gradient::Scaled(grad),
        }
    }

    /// Its values, in a type that they are kept in or, where they have a scale, in F32.
    pub fn values(&self) -> Result<Tensor> {
        Ok(match self {
            Grad::Plain(grad) => grad.clone(),
            Grad::Scaled(grad) => unscaled(grad, DType::F32)?,
        })
    }

    /// `a · bᵀ`, plus what there is of it; the first contribution of a step is the gradient.
    pub fn plus_product(
        grad: Option<Grad>,
        format: GradFormat,
        a: Operand,
        b: Operand,
        accumulation: Accumulation,
    ) -> Result<Grad> {
        Grad::plus(grad, format, |sum| {
            Ok(match sum {
                Some(mut sum) => {
                    gemm_nt_add(a, b, &mut sum, accumulation)?;
                    sum
                }
                None => gemm_nt(a, b, format.sums(), accumulation)?,
            })
        })
    }

    /// What `add` makes of the gradient that there is, in the type of sums.
    pub fn plus(
        grad: Option<Grad>,
        format: GradFormat,
        add: impl FnOnce(Option<Tensor>) -> Result<Tensor>,
    ) -> Result<Grad> {
        let sum = match grad {
            None => None,
            Some(Grad::Plain(sum)) => Some(sum),
            Some(Grad::Scaled(grad)) => Some(unscaled(&grad, format.sums())?),
        };
        let sum = add(sum)?;
        Ok(match format {
            GradFormat::Plain(_) => Grad::Plain(sum),
            GradFormat::Scaled(_) => Grad::Scaled(scaled(&sum, DType::E4M3)?),
        })
    }
}
