//! The scales of the casts of a step. Casts read them, and only the update changes them.

use super::amax_group::AmaxGroup;
use super::routers::RouterSite;
use crate::layer_ranks::AmaxRanks;
use crate::operand::FrozenScale;
use crate::{Cast, FirstStep, Scaling};
use ottava_common::error::Result;
use ottava_tensor::ops::{CastScale, CurrentScaling, DelayedScales, DelayedScaling};
use ottava_tensor::{DType, Device, Granularity, Tensor};
use std::collections::BTreeSet;
use std::rc::Rc;

/// The index of a cast in the scaling state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot(usize);

/// Collects the casts of a model while it is built.
#[derive(Default)]
pub struct Slots {
    casts: Vec<(String, Cast)>,
    amax_groups: Vec<AmaxGroup>,
    /// The input slot of the linear that each slot belongs to, by slot.
    inputs: Vec<Slot>,
    /// The routers of the model.
    pub(super) routers: Vec<RouterSite>,
}

impl Slot {
    /// Returns the index of the slot's entry in statistics.
    pub fn index(self) -> usize {
        self.0
    }
}

impl Slots {
    /// Adds a slot for the cast called `name`, whose amaxes are reduced over `amax_group`. `input` is the slot of the input cast of the same linear,
    /// or `None` if this is the input cast.
    pub fn add(&mut self, name: String, cast: Cast, amax_group: AmaxGroup, input: Option<Slot>) -> Slot {
        let slot = Slot(self.casts.len());
        self.casts.push((name, cast));
        self.amax_groups.push(amax_group);
        self.inputs.push(input.unwrap_or(slot));
        slot
    }

    /// Adds a router, and returns its index.
    pub fn add_router(&mut self, router: RouterSite) -> usize {
        self.routers.push(router);
        self.routers.len() - 1
    }

    /// Returns the name of each cast, and the ranks that share its scale.
    pub fn amax_groups(&self) -> Vec<(String, AmaxGroup)> {
        self.casts.iter().map(|(name, _)| name.clone()).zip(self.amax_groups.iter().copied()).collect()
    }
}

/// The cast of the new weights of an update.
pub enum NextCast {
    /// Casts with a known scale, F32 `[1]`.
    Known(Tensor),
    /// Casts with current scaling, from the amax of the new weights.
    Measured,
    /// Casts with scales per block of 128x128, which the update computes.
    Blocks(CurrentScaling),
    /// Casts after the update, with scales that the cast computes.
    Later,
}

/// The scale of a cast: an owned [`CastScale`].
pub(super) enum Scale {
    Given(Tensor),
    Own(Granularity, CurrentScaling),
}

impl Scale {
    pub(super) fn of_cast(&self) -> CastScale<'_> {
        match self {
            Scale::Given(scale) => CastScale::Given(scale),
            Scale::Own(granularity, how) => CastScale::Own(*granularity, *how),
        }
    }
}

/// The delayed scaling of a run.
pub(super) struct Delayed {
    pub(super) how: DelayedScaling,
    pub(super) first_step: FirstStep,
    /// The number of past updates. Before the first update, scales are not used.
    pub(super) updates: u64,
    /// The casts that have a scale, if scales are set and never updated.
    pub(super) set: Option<Vec<bool>>,
}

impl Delayed {
    /// Returns whether the cast in `slot` has a scale.
    fn has_scale(&self, slot: Slot) -> bool {
        match &self.set {
            Some(set) => set[slot.0],
            None => self.updates > 0 || self.first_step == FirstStep::Unscaled,
        }
    }
}

/// The scales of all casts of a model, constant within a step.
pub struct Scales {
    pub(super) slots: Vec<(String, Cast)>,
    /// The ranks that share a scale, by slot.
    amax_groups: Vec<AmaxGroup>,
    /// The input slot of the linear that each slot belongs to, by slot.
    inputs: Vec<Slot>,
    /// Whether the products of each slot's linear read operands in the compute type, by slot.
    high_precision: Vec<bool>,
    /// Whether all products read operands in the compute type.
    all_high_precision: bool,
    /// The ranks that divide tensors with one scale.
    pub(super) ranks: Rc<dyn AmaxRanks>,
    /// The histories and scales. Without delayed scaling, only infinities are counted. `None` without casts.
    pub(super) arrays: Option<DelayedScales>,
    pub(super) delayed: Option<Delayed>,
}

impl Scales {
    pub(super) fn new(device: &Device, slots: Slots, ranks: Rc<dyn AmaxRanks>) -> Result<Scales> {
        let Slots { casts: slots, amax_groups, inputs, .. } = slots;
        let delayed = slots.iter().find_map(|(_, cast)| match cast.scaling {
            Scaling::Delayed { how, window, first_step } => {
                Some((Delayed { how, first_step, updates: 0, set: None }, window))
            }
            Scaling::Current(_) => None,
        });
        let (delayed, window) = delayed.map_or((None, 1), |(delayed, window)| (Some(delayed), window));
        let largest: Vec<f32> = slots.iter().filter_map(|(_, cast)| cast.format.max_finite()).collect();
        let arrays = (!slots.is_empty()).then(|| DelayedScales::new(device, window, &largest)).transpose()?;
        let high_precision = vec![false; slots.len()];
        Ok(Scales { slots, amax_groups, inputs, high_precision, all_high_precision: false, ranks, arrays, delayed })
    }

    /// Returns the number of casts.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Returns whether the model has no FP8 casts.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Returns the ranks that share the scale of each cast.
    pub fn amax_groups(&self) -> &[AmaxGroup] {
        &self.amax_groups
    }

    /// Returns the name of the cast in `slot`.
    pub fn name(&self, slot: Slot) -> &str {
        &self.slots[slot.0].0
    }

    /// Returns whether the products of the linear of `slot` read operands in the compute type.
    pub fn is_high_precision(&self, slot: Slot) -> bool {
        self.all_high_precision || self.high_precision[slot.0]
    }

    /// Returns whether products read operands in the compute type, by slot.
    pub fn high_precision(&self) -> Vec<bool> {
        self.high_precision.iter().map(|is_high| self.all_high_precision || *is_high).collect()
    }

    /// Sets whether all products read operands in the compute type.
    pub(super) fn set_all_high_precision(&mut self, all: bool) {
        self.all_high_precision = all;
    }

    /// Sets the linears whose products read operands in the compute type, by the names of their slots without suffix. If linears share an
    /// input, all of them are set.
    pub(super) fn set_high_precision(&mut self, linears: &BTreeSet<String>) {
        let named: BTreeSet<usize> = (0..self.slots.len())
            .filter(|&slot| self.slots[slot].0.rsplit_once('.').is_some_and(|(linear, _)| linears.contains(linear)))
            .map(|slot| self.inputs[slot].0)
            .collect();
        self.high_precision = self.inputs.iter().map(|input| named.contains(&input.0)).collect();
    }

    /// Returns which elements share a scale in a cast in `slot`.
    pub fn granularity(&self, slot: Slot) -> Granularity {
        self.slots[slot.0].1.granularity
    }

    /// Returns whether producers can write the codes of a cast in `slot` on every device.
    pub fn is_fused(&self, slot: Slot) -> bool {
        self.granularity(slot).microscaling().is_none()
    }

    /// Returns whether a cast in `slot` has one scale per tensor.
    pub fn is_per_tensor(&self, slot: Slot) -> bool {
        self.slots[slot.0].1.granularity == Granularity::PerTensor
    }

    /// Returns whether the codes of a row depend on other rows of its tensor: some cast has one scale per tensor, from the tensor's own amax, alone or
    /// besides scales of blocks.
    pub fn depend_on_other_rows(&self) -> bool {
        if self.slots.iter().any(|(_, cast)| cast.granularity == Granularity::Nvfp4) {
            return true;
        }
        let is_known = |delayed: &Delayed| delayed.updates > 0 || delayed.first_step == FirstStep::Unscaled;
        let is_own = !self.delayed.as_ref().is_some_and(is_known);
        is_own && self.slots.iter().any(|(_, cast)| cast.granularity == Granularity::PerTensor)
    }

    /// Implements [`ScalingState::scale_rows`](super::ScalingState::scale_rows).
    pub(super) fn scale_rows(&mut self) -> bool {
        let any = self.depend_on_other_rows();
        for (_, cast) in self.slots.iter_mut().filter(|(_, cast)| cast.granularity == Granularity::Nvfp4) {
            cast.granularity = Granularity::Nvfp4Rows;
        }
        for (_, cast) in self.slots.iter_mut().filter(|(_, cast)| any && cast.granularity == Granularity::PerTensor) {
            let how = match cast.scaling {
                Scaling::Current(how) => how,
                Scaling::Delayed { .. } => CurrentScaling::default(),
            };
            *cast = Cast { granularity: Granularity::PerRow, scaling: Scaling::Current(how), ..*cast };
        }
        any
    }

    /// Returns the format of the cast in `slot`.
    pub fn format(&self, slot: Slot) -> DType {
        self.slots[slot.0].1.format
    }

    /// Returns the scale of casts in `slot` in this step, or `None` if the scale depends on the amax of the tensor.
    pub(super) fn known(&self, slot: Slot) -> Result<Option<Scale>> {
        let Cast { granularity, scaling, .. } = self.slots[slot.0].1;
        match (scaling, &self.delayed, &self.arrays) {
            (Scaling::Current(how), ..) if granularity != Granularity::PerTensor => {
                Ok(Some(Scale::Own(granularity, how)))
            }
            (Scaling::Current(_), ..) | (_, None, _) | (_, _, None) => Ok(None),
            (_, Some(delayed), _) if !delayed.has_scale(slot) => Ok(None),
            (_, Some(_), Some(arrays)) => Ok(Some(Scale::Given(arrays.scale.rows(slot.0, slot.0 + 1)?))),
        }
    }

    /// Returns the scale of a cast in `slot`: the scale in `frozen` if `frozen` has one, otherwise the known scale.
    pub(super) fn scale(&self, slot: Slot, frozen: &FrozenScale) -> Result<Scale> {
        match (frozen.scale(), self.known(slot)?) {
            (Some(own), _) => Ok(Scale::Given(own.clone())),
            (None, Some(known)) => Ok(known),
            (None, None) => unreachable!("a cast without a scale of its slot has one of its own"),
        }
    }

    /// Returns how the cast in `slot` will cast the new weights of an update.
    pub fn next_cast(&self, slot: Slot) -> Result<NextCast> {
        Ok(match self.known(slot)? {
            Some(Scale::Given(scale)) => NextCast::Known(scale),
            Some(Scale::Own(Granularity::Blocks128x128, how)) if self.format(slot) == DType::E4M3 => {
                NextCast::Blocks(how)
            }
            Some(Scale::Own(..)) => NextCast::Later,
            None => NextCast::Measured,
        })
    }

    pub(super) fn current_scaling(&self, slot: Slot) -> CurrentScaling {
        match self.slots[slot.0].1.scaling {
            Scaling::Current(how) => how,
            Scaling::Delayed { .. } => CurrentScaling::default(),
        }
    }
}
