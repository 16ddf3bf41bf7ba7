//! The weights of a parameter: the master weights that an optimizer updates, and the weights that layers read.

use super::builder::WeightSource;
use super::identity::Identity;
use super::scopes::{FROZEN_WEIGHTS, MASTERS, WEIGHTS};
use crate::scaling::Values;
use crate::storage::Masters;
use ottava_common::error::Result;
use ottava_tensor::element::Element;
use ottava_tensor::ops::{
    UpdatedWeight, WeightCopy, cast, cast_into, dequantize_nf4, quantize_nf4, scaled_by, split, unscaled,
};
use ottava_tensor::{DType, Device, Nf4Tensor, ScaledTensor, Tensor};
use std::ops::Add;

/// The weights of a parameter: the master weights that an optimizer updates, and the weights that layers read. Both are empty until
/// [`Param::load`](super::Param::load).
pub struct Weights {
    /// The shape of the whole parameter. `value` and `master` may hold a slice.
    shape: Vec<usize>,
    device: Device,
    /// The type in which layers read the weights.
    dtype: DType,
    /// The name of the memory of the weights that layers read.
    scope: &'static str,
    /// The format of the master weights.
    masters: Masters,
    /// Whether the master weights are stored in host memory.
    offloads_master: bool,
    /// Whether `value` is dropped if it can be computed from F16 master weights.
    drops_value: bool,
    /// The weights that layers read. `None` if they are computed from the master weights on demand.
    value: Option<Tensor>,
    /// Whether frozen weights are stored in four bits.
    packs: bool,
    /// The tensors of the weights in four bits, from which layers compute the values that they read. Empty if they are not stored so.
    packed: Vec<Nf4Tensor>,
    /// The master weights. `None` if the optimizer updates `value`, or if the parameter is frozen.
    master: Option<Master>,
}

/// Master weights, which an optimizer updates. They are more precise than the weights that layers read.
pub enum Master {
    /// F32.
    Full(Tensor),
    /// F16 with a power of two as the scale.
    Scaled(ScaledTensor),
    /// I16: the bits that complete a BF16 value to F32.
    Rest(Tensor),
}

/// The stored tensors of weights, which [`Param::replace`](super::Param::replace) returns.
pub struct StoredWeights {
    value: Option<Tensor>,
    master: Option<Master>,
}

impl Weights {
    /// Takes the weights that layers read, and the master weights.
    pub(super) fn take(&mut self) -> StoredWeights {
        StoredWeights { value: self.value.take(), master: self.master.take() }
    }

    /// Stores the weights of [`Weights::take`] again.
    pub(super) fn put(&mut self, StoredWeights { value, master }: StoredWeights) {
        (self.value, self.master) = (value, master);
    }

    /// Creates weights of this shape that layers read in `dtype`, with master weights in the format `masters`.
    pub fn new(device: &Device, shape: &[usize], dtype: DType, masters: Masters) -> Weights {
        Weights {
            shape: shape.to_vec(),
            device: device.clone(),
            dtype,
            scope: WEIGHTS,
            masters,
            offloads_master: false,
            drops_value: false,
            value: None,
            packs: false,
            packed: Vec::new(),
            master: None,
        }
    }

    /// Returns the format of the master weights.
    pub fn masters(&self) -> Masters {
        self.masters
    }

    /// Returns the memory scope of the F32 values that [`Param::load`](super::Param::load) reads. These values may become the master weights.
    pub(super) fn scope_of_full(&self) -> &'static str {
        if self.masters == Masters::Float32 && self.dtype != DType::F32 { MASTERS } else { self.scope }
    }

    /// Stores the F32 values `full` of the whole parameter or of a slice. For a slice of scaled master weights, `amax` is the amax of the whole
    /// parameter. If each update `copies` the weights of a slice to where ranks gather them, weights that can be computed from master weights on the
    /// device are not stored.
    pub(super) fn fill(&mut self, full: Tensor, amax: Option<Tensor>, copies: bool) -> Result<()> {
        let (device, dtype) = (self.device.clone(), self.dtype);
        let _scope = device.scope(self.scope);
        let is_gathered = copies && !self.offloads_master;
        let (value, mut master) = match self.masters {
            Masters::Float16 => {
                let _scope = device.scope(MASTERS);
                let amax = amax.expect("the amax is that of all elements");
                let master = scaled_by(&full, &amax, DType::F16)?;
                drop(full);
                (None, Some(Master::Scaled(master)))
            }
            _ if dtype == DType::F32 => (Some(full), None),
            Masters::None => (Some(cast(&full, dtype)?), None),
            Masters::Float32 if is_gathered => (None, Some(Master::Full(full))),
            Masters::Float32 => (Some(cast(&full, dtype)?), Some(Master::Full(full))),
            Masters::Remainder => {
                let (value, rest) = split(&full)?;
                (Some(value), Some(Master::Rest(rest)))
            }
        };
        self.value = match &master {
            Some(Master::Scaled(master)) if !(is_gathered || self.drops_value) => Some(unscaled(master, dtype)?),
            _ => value,
        };
        if let (true, Some(master)) = (self.offloads_master, &mut master) {
            let tensor = match master {
                Master::Full(tensor) | Master::Rest(tensor) => tensor,
                Master::Scaled(master) => &mut master.values,
            };
            *tensor = tensor.to_host_memory()?;
        }
        self.master = master;
        Ok(())
    }

    /// Returns whether [`Param::load`](super::Param::load) has been called.
    pub(super) fn are_loaded(&self) -> bool {
        self.value.is_some() || self.master.is_some() || !self.packed.is_empty()
    }

    /// Counts the memory of these weights as memory of frozen weights beside adapters.
    pub fn freeze(&mut self) {
        self.scope = FROZEN_WEIGHTS;
    }

    /// Stores the weights in four bits from [`Param::load`](super::Param::load) on. Each read computes their values.
    pub(super) fn pack(&mut self) {
        self.packs = true;
    }

    /// Stores the tensors of a parameter in four bits, each with its own scales. Tensors that the `source` has in four bits keep their codes.
    pub(super) fn fill_packed(&mut self, identity: &Identity, source: &mut dyn WeightSource) -> Result<()> {
        let device = self.device.clone();
        let _scope = device.scope(self.scope);
        for shard in &identity.shards {
            let [tensor, shape] = [&shard.tensor.shape, &shard.shape()].map(Vec::clone);
            let stored = if tensor == shape { source.packed(&shard.tensor, &device)? } else { None };
            let packed = match stored {
                Some(packed) => packed,
                None => {
                    let mut full = Tensor::empty(&device, &[shard.elements()], DType::F32)?;
                    let mut at = 0;
                    for range in shard.folder_ranges(0..shard.elements()) {
                        let values = source.read(&shard.tensor, range, identity.init)?;
                        let values = if values.device().same(&device) { values } else { values.to_device(&device)? };
                        cast_into(&values, &mut full, at)?;
                        at += values.len();
                    }
                    quantize_nf4(&full.reshape(&shape)?)?
                }
            };
            self.packed.push(packed);
        }
        Ok(())
    }

    /// Returns whether the weights are stored in four bits.
    pub fn are_packed(&self) -> bool {
        self.packs
    }

    /// Stores the master weights, if the parameter has them, in host memory from [`Param::load`](super::Param::load) on.
    pub fn offload_master(&mut self) {
        self.offloads_master = true;
    }

    /// Lets the next update write the weights that layers read to `place`, if they are computed from the master weights and not stored. Otherwise
    /// returns `place`.
    pub fn write_value_to(&mut self, place: Tensor) -> Option<Tensor> {
        match (&self.master, &self.value) {
            (Some(Master::Full(_) | Master::Scaled(_)), None) => {
                self.value = Some(place);
                None
            }
            _ => Some(place),
        }
    }

    /// Returns the F32 master weights, if the weights that layers read are computed from them and not stored.
    pub fn unrounded(&self) -> Option<&Tensor> {
        match (&self.master, &self.value) {
            (Some(Master::Full(master)), None) => Some(master),
            _ => None,
        }
    }

    /// Takes the weights that an update wrote to the place of [`Weights::write_value_to`].
    pub fn take_value(&mut self) -> Option<Tensor> {
        self.value.take()
    }

    /// Returns the weights in the compute type, as layers read them.
    pub fn value(&self) -> Result<Tensor> {
        self.values_from(None)?.plain()
    }

    /// Returns whether layers read a stored tensor. Otherwise each forward computes the weights from the master weights.
    pub fn is_stored(&self) -> bool {
        self.value.is_some()
    }

    /// Returns the weights in the form that casts read. If [`Weights::read_from`] is in host memory, `copy` is its device copy.
    pub fn values_from(&self, copy: Option<&Tensor>) -> Result<Values> {
        let read = |own: &Tensor| copy.unwrap_or(own).clone();
        Ok(match (&self.value, &self.master) {
            (Some(value), _) => Values::Plain(read(value)),
            (None, Some(Master::Scaled(ScaledTensor { values, scale_inv }))) => {
                Values::Scaled(ScaledTensor { values: read(values), scale_inv: scale_inv.clone() }, self.dtype)
            }
            (None, Some(Master::Full(master))) => Values::Plain(cast(master, self.dtype)?),
            (None, None) if !self.packed.is_empty() => Values::Plain(dequantize_nf4(&self.packed, self.dtype)?),
            (None, _) => unreachable!("only a value that the master can make is dropped"),
        })
    }

    /// Adds `change` to weights without master weights. Waits for the device.
    pub fn add(&mut self, change: &[f64]) -> Result<()> {
        let value = self.value.as_mut().expect("weights without a master are stored");
        assert_eq!(value.len(), change.len(), "each element has a change");
        match value.dtype() {
            DType::F64 => add_to(value, change.iter().copied()),
            _ => add_to(value, change.iter().map(|dx| *dx as f32)),
        }
    }

    /// Sets the weights that layers read, but not the master weights. Finite differences use it.
    pub fn set_value(&mut self, value: Tensor) {
        self.value = Some(value);
    }

    /// Exchanges the stored weights that layers read with `value`, but not the master weights.
    pub(super) fn exchange_value(&mut self, value: &mut Option<Tensor>) {
        std::mem::swap(&mut self.value, value);
    }

    /// Drops the weights that layers read if they can be computed from F16 master weights: products read FP8 codes, and casts read the master
    /// weights.
    pub fn drop_value(&mut self) {
        self.drops_value = true;
    }

    /// Reverses [`Weights::drop_value`].
    pub fn keep_value(&mut self) {
        self.drops_value = false;
    }

    /// Drops frozen weights that codes replace, because nothing reads the weights any more.
    pub fn drop_frozen(&mut self) {
        self.value = None;
    }

    /// Returns the type in which layers read the weights.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the shape of the whole parameter.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the device of the weights.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the stored weights that layers read, and the master weights.
    pub fn tensors_mut(&mut self) -> (Option<&mut Tensor>, Option<&mut Master>) {
        (self.value.as_mut(), self.master.as_mut())
    }

    /// Returns the weights that layers read, or the master weights from which they are computed.
    fn read_mut(&mut self) -> &mut Tensor {
        match (&mut self.value, &mut self.master) {
            (Some(value), _) => value,
            (None, Some(Master::Scaled(master))) => &mut master.values,
            (None, _) => unreachable!("only a value that an F16 master can make is dropped"),
        }
    }

    /// Returns the weights that layers read, or the master weights from which they are computed.
    pub fn read_from(&self) -> &Tensor {
        match (&self.value, &self.master) {
            (Some(value), _) => value,
            (None, Some(Master::Scaled(master))) => &master.values,
            (None, _) => unreachable!("only a value that an F16 master can make is dropped"),
        }
    }

    /// Moves the weights that layers read, or the master weights from which they are computed, to host memory.
    pub fn offload_read(&mut self) -> Result<()> {
        let read = self.read_mut();
        *read = read.to_host_memory()?;
        Ok(())
    }

    /// Moves the weights that layers read to host memory, if they are stored.
    pub fn offload_value(&mut self) -> Result<()> {
        self.value = self.value.take().map(|value| value.to_host_memory()).transpose()?;
        Ok(())
    }

    /// Returns the weights for an optimizer to update.
    pub fn for_update(&mut self) -> UpdatedWeight<'_> {
        let (made, narrow) = (WeightCopy::OnDemand(self.dtype), self.dtype == DType::BF16);
        match (&mut self.master, &mut self.value) {
            (Some(Master::Full(master)), value) => {
                UpdatedWeight::Master { master, copy: value.as_mut().map_or(made, WeightCopy::Stored) }
            }
            (Some(Master::Scaled(master)), value) => {
                UpdatedWeight::Scaled { master, copy: value.as_mut().map_or(made, WeightCopy::Stored) }
            }
            (Some(Master::Rest(rest)), Some(weight)) => UpdatedWeight::Split { weight, rest },
            (None, Some(weight)) => match narrow {
                true => UpdatedWeight::Stochastic { weight },
                false => UpdatedWeight::Master { master: weight, copy: made },
            },
            (_, None) => unreachable!("only a value that an F16 master can make is dropped"),
        }
    }
}

/// Adds `change` to the elements of `value`, whose type is `T`.
fn add_to<T: Element + Add<Output = T>>(value: &mut Tensor, change: impl Iterator<Item = T>) -> Result<()> {
    let sums: Vec<T> = value.to_vec::<T>()?.into_iter().zip(change).map(|(x, dx)| x + dx).collect();
    Ok(value.write_bytes(bytemuck::cast_slice(&sums))?)
}
