//! The scaling state of a run between steps: updates, losses of casts, and checkpoints.

use super::casts::{Casts, Recorder};
use super::histogram::Histogram;
use super::measured::{CastCounts, CastLosses, CastRecord, LastStep, MergeCounts, OneRank};
use super::probe::{Compared, Observer, Probe};
use super::routers::{RouterLoad, RouterSums};
use super::scales::{Delayed, Scales, Slots};
use crate::layer_ranks::AmaxRanks;
use crate::mode::{Mode, StepPrecision};
use crate::{Cast, FirstStep, Scaling};
use ottava_common::error::{Error, Result};
use ottava_tensor::ops::{self, AmaxReducer, CastStatistics, DelayedScaling, NonFinite};
use ottava_tensor::{Device, Tensor};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// The scales, histories and measurements of all casts of a model.
pub struct ScalingState {
    scales: Scales,
    recorder: Recorder,
    last_step: LastStep,
    /// The result of [`ScalingState::counts`] at the last call of [`ScalingState::losses`].
    counted: [Vec<i64>; 3],
    /// The number of updates with an infinity, by slot, at the last call of [`ScalingState::losses`].
    counted_non_finite: Vec<i64>,
}

/// The update of a recipe without delayed scaling: it counts non-finite amaxes and clears amaxes.
const COUNT: DelayedScaling =
    DelayedScaling { reducer: AmaxReducer::MostRecent, margin: 0, interval: 1, non_finite: NonFinite::Quarantine };

impl ScalingState {
    /// Creates a fresh state for `slots` on `device`. `ranks` divide the tensors.
    pub fn new(device: &Device, slots: Slots, ranks: Rc<dyn AmaxRanks>) -> Result<ScalingState> {
        let routers = slots.routers.iter().map(|site| RouterSums::new(device, site.clone())).collect::<Result<_>>()?;
        let scales = Scales::new(device, slots, ranks)?;
        let n = scales.len();
        Ok(ScalingState {
            scales,
            recorder: Recorder::new(device, n)?.with_routers(routers),
            last_step: LastStep::new(device, n)?,
            counted: std::array::from_fn(|_| vec![0; n]),
            counted_non_finite: vec![0; n],
        })
    }

    /// Returns the scales of casts in this step.
    pub fn scales(&self) -> &Scales {
        &self.scales
    }

    /// Replaces scales per tensor that come from the tensor's own amax by scales per row, so that no row depends on another row. Returns whether any
    /// cast had such a scale.
    pub fn scale_rows(&mut self) -> bool {
        self.scales.scale_rows()
    }

    /// Sets the linears, by name, whose products read operands in the compute type in later passes. Their casts still measure. If linears
    /// share an input, all of them are set.
    pub fn set_high_precision(&mut self, linears: &BTreeSet<String>) {
        self.scales.set_high_precision(linears);
    }

    /// Sets whether all products of later passes read operands in the compute type, also in passes whose mode has the recipe's precision, such as draws.
    pub fn set_all_high_precision(&mut self, all: bool) {
        self.scales.set_all_high_precision(all);
    }

    /// Returns the casts of a pass.
    pub fn casts(&mut self, mode: Mode) -> Casts<'_> {
        Casts { scales: &self.scales, recorder: &mut self.recorder, mode }
    }

    /// Ends the casts of an optimizer step: histories roll, and scales are updated. Enqueues work without waiting.
    pub fn update(&mut self) -> Result<()> {
        let Scales { arrays: Some(arrays), delayed, .. } = &mut self.scales else { return Ok(()) };
        let how = delayed.as_ref().map_or(COUNT, |delayed| delayed.how);
        let amax = &mut self.recorder.statistics.amax;
        self.last_step.record(amax, &arrays.scale)?;
        ops::delayed_scaling(amax, arrays, how)?;
        self.count_replayed_update();
        Ok(())
    }

    /// Starts to record comparisons between these precisions, and to copy tensors to `observer`.
    pub fn begin_comparison(&mut self, device: &Device, precisions: [StepPrecision; 2], observer: Option<Observer>) {
        let mut probe = Probe::new(device, precisions);
        probe.observe(observer);
        self.recorder.probe = Some(probe);
    }

    /// Returns the comparisons since [`ScalingState::begin_comparison`], and the observed tensors.
    pub fn end_comparison(&mut self) -> Result<Compared> {
        self.recorder.probe.take().map_or_else(|| Ok(Compared::default()), Probe::read)
    }

    /// Starts to record histograms of the BF16 values that passes in high precision measure.
    pub fn record_histograms(&mut self) {
        self.recorder.histograms = Some(vec![Histogram::default(); self.scales.len()]);
    }

    /// Returns the histograms since [`ScalingState::record_histograms`], by the name of the cast.
    pub fn take_histograms(&mut self) -> Vec<(String, Histogram)> {
        self.names().into_iter().zip(self.recorder.histograms.take().into_iter().flatten()).collect()
    }

    /// Sets scales of casts with delayed scaling, by name, for a model that is not trained. Casts without a given scale use current scaling.
    ///
    /// Errors if a cast whose name ends with `needed` has no scale.
    pub fn set_scales(&mut self, by_name: &BTreeMap<String, f32>, needed: &str) -> Result<()> {
        let Scales { arrays: Some(arrays), delayed: Some(delayed), slots, .. } = &mut self.scales else {
            return Ok(());
        };
        let found: Vec<_> = slots.iter().map(|(name, _)| by_name.get(name).copied()).collect();
        let missing = slots.iter().zip(&found).find(|((name, _), scale)| name.ends_with(needed) && scale.is_none());
        if let Some(((name, _), _)) = missing {
            return Err(Error::Config(format!(
                "there is no scale for the cast `{name}`; measure it with `ottava calibrate`"
            )));
        }
        let values: Vec<f32> = found.iter().map(|scale| scale.unwrap_or(1.0)).collect();
        arrays.scale = Tensor::from_slice(&arrays.scale.device().clone(), &[values.len()], &values)?;
        delayed.set = Some(found.iter().map(Option::is_some).collect());
        Ok(())
    }

    /// Returns the amax of each slot in this step so far, F32 `[slots]`. Ranks reduce it.
    pub fn amaxes_mut(&mut self) -> &mut Tensor {
        &mut self.recorder.statistics.amax
    }

    /// Returns the choices of each router of this process since the last call. Reads from the device.
    pub fn router_loads(&mut self) -> Result<Vec<RouterLoad>> {
        self.recorder.routers.iter_mut().map(RouterSums::take).collect()
    }

    /// Clears the amaxes that casts have measured since the last update.
    pub fn forget_amaxes(&mut self) -> Result<()> {
        Ok(self.amaxes_mut().fill_zero()?)
    }

    /// Returns the bits of amax and scale of each cast in the last finished step, for comparison between ranks. Reads from the device.
    pub fn bits(&self) -> Result<Vec<i64>> {
        let (amax, scale) = (self.last_step.amax.to_vec::<f32>()?, self.last_step.scale.to_vec::<f32>()?);
        Ok(amax
            .iter()
            .zip(&scale)
            .map(|(amax, scale)| i64::from(amax.to_bits()) << 32 | i64::from(scale.to_bits()))
            .collect())
    }

    /// Counts an update that was replayed in a graph.
    pub fn count_replayed_update(&mut self) {
        if let Some(delayed) = &mut self.scales.delayed {
            delayed.updates += 1;
        }
    }

    /// Returns the numbers of saturated, underflowed and cast elements so far in this process, each by slot.
    fn counts(&self) -> Result<[Vec<i64>; 3]> {
        let CastStatistics { saturated, underflowed, elements, .. } = &self.recorder.statistics;
        Ok([saturated.to_vec()?, underflowed.to_vec()?, elements.to_vec()?])
    }

    /// Excludes the counts so far from the next [`ScalingState::losses`].
    pub fn forget_losses(&mut self) -> Result<()> {
        self.losses(&OneRank).map(drop)
    }

    /// Returns the losses of casts since the last call, over all ranks.
    pub fn losses(&mut self, ranks: &dyn MergeCounts) -> Result<CastLosses> {
        let counts = self.counts()?;
        let before = std::mem::replace(&mut self.counted, counts);
        let since = |counter: usize| -> i64 {
            let slots = self.scales.slots.iter().enumerate().filter(|(slot, (name, _))| ranks.counts(*slot, name));
            slots.map(|(slot, _)| self.counted[counter][slot] - before[counter][slot]).sum()
        };
        let since = ranks.sum(&[since(0), since(1), since(2)])?;
        let share = |i: usize| since[i] as f64 / since[2].max(1) as f64;
        let mut non_finite = Vec::new();
        if let Some(arrays) = &self.scales.arrays {
            let now = arrays.non_finite.to_vec::<i64>()?;
            let slots = self.scales.slots.iter().zip(now.iter().zip(&self.counted_non_finite));
            non_finite.extend(slots.filter(|(_, (now, before))| now > before).map(|((name, _), _)| name.clone()));
            self.counted_non_finite = now;
        }
        Ok(CastLosses { saturated: share(0), underflowed: share(1), non_finite })
    }

    /// Returns the measurements of each cast over all ranks, in the order of the slots. Reads from the device.
    pub fn measured(&self, ranks: &dyn MergeCounts) -> Result<Vec<CastRecord>> {
        let Scales { slots, arrays: Some(arrays), delayed, .. } = &self.scales else { return Ok(Vec::new()) };
        let mut counts = Vec::with_capacity(3 * slots.len());
        for counter in self.counts()? {
            let counted = counter.into_iter().zip(slots).enumerate();
            counts.extend(counted.map(|(slot, (count, (name, _)))| if ranks.counts(slot, name) { count } else { 0 }));
        }
        let counts = ranks.sum_by_slot(&counts)?;
        let of = |counter: usize, slot: usize| counts[counter * slots.len() + slot];
        // Non-finite amaxes are counted after amaxes of all ranks are merged, so they are not summed.
        let non_finite = arrays.non_finite.to_vec::<i64>()?;
        let (amax, scale) = (self.last_step.amax.to_vec::<f32>()?, self.last_step.scale.to_vec::<f32>()?);
        // In a first step, casts use current scaling.
        let known = |delayed: &Delayed| delayed.updates > 1 || delayed.first_step == FirstStep::Unscaled;
        let known = delayed.as_ref().is_some_and(known);
        let record = |(i, (name, cast)): (usize, &(String, Cast))| CastRecord {
            name: name.clone(),
            largest: cast.format.max_finite().unwrap_or(f32::MAX),
            amax: amax[i],
            scale: (known && matches!(cast.scaling, Scaling::Delayed { .. })).then_some(scale[i]),
            counts: CastCounts {
                elements: of(2, i),
                saturated: of(0, i),
                underflowed: of(1, i),
                non_finite: non_finite[i],
            },
        };
        Ok(slots.iter().enumerate().map(record).collect())
    }

    /// Returns whether the model has no FP8 casts.
    pub fn is_empty(&self) -> bool {
        self.scales.is_empty()
    }

    /// Returns the names of the slots, in order, for the checkpoint's manifest.
    pub fn names(&self) -> Vec<String> {
        self.scales.slots.iter().map(|(name, _)| name.clone()).collect()
    }

    /// Returns the arrays for a checkpoint, by name. Empty unless scaling is delayed.
    pub fn arrays(&self) -> Result<Vec<(String, Tensor)>> {
        let Scales { arrays: Some(scales), delayed: Some(delayed), .. } = &self.scales else { return Ok(Vec::new()) };
        let updates = Tensor::from_slice(&Device::Cpu, &[1], &[delayed.updates as i64])?;
        let mut arrays = vec![
            ("scaling.amax_history".to_string(), scales.history.clone()),
            ("scaling.scale".to_string(), scales.scale.clone()),
            ("scaling.largest".to_string(), scales.largest.clone()),
            ("scaling.updates".to_string(), updates),
        ];
        if delayed.how.interval > 1 {
            arrays.push(("scaling.wait".to_string(), scales.wait.clone()));
        }
        Ok(arrays)
    }

    /// Restores the arrays of [`ScalingState::arrays`] from a run whose slots are called `names`.
    ///
    /// Each cast takes the state saved under its name. If no state is saved, because the linear was in high precision, the next step is treated like
    /// the first step of the cast. Errors if histories have another length. A recipe without delayed scaling ignores the arrays.
    pub fn restore(&mut self, names: &[String], mut array: impl FnMut(&str) -> Result<Tensor>) -> Result<()> {
        let Scales { arrays: Some(scales), delayed: Some(delayed), slots, .. } = &mut self.scales else {
            return Ok(());
        };
        let [window, n] = scales.history.dims("amax history")?;
        let (history, scale, largest) =
            (array("scaling.amax_history")?, array("scaling.scale")?, array("scaling.largest")?);
        if history.shape() != [window, names.len()] || [&scale, &largest].map(Tensor::len) != [names.len(); 2] {
            return Err(Error::Checkpoint(format!(
                "the checkpoint's amax history has shape {:?} for {} casts, this run's `amax_history_len` makes it {window} rows",
                history.shape(),
                names.len()
            )));
        }
        // With an interval of 1, scales are due after every step.
        let wait = match array("scaling.wait") {
            Ok(wait) => wait.to_vec::<i64>()?,
            Err(_) => vec![0; names.len()],
        };
        let [history, scale, largest] = [history, scale, largest].map(|t| t.to_vec::<f32>());
        let (history, scale, largest, now) = (history?, scale?, largest?, scales.largest.to_vec::<f32>()?);
        let (mut new_history, mut new_scale, mut new_wait) = (vec![0f32; window * n], vec![1f32; n], vec![0i64; n]);
        delayed.updates = array("scaling.updates")?.to_vec::<i64>()?[0] as u64;
        for (i, (name, _)) in slots.iter().enumerate() {
            let Some(old) = names.iter().position(|other| other == name) else {
                delayed.updates = 0;
                continue;
            };
            (0..window).for_each(|row| new_history[row * n + i] = history[row * names.len() + old]);
            // If the format changed, the scale is adjusted to the new range.
            new_scale[i] = (scale[old] * (now[i] / largest[old])).min(f32::MAX);
            new_wait[i] = wait[old].min(i64::from(delayed.how.interval) - 1);
        }
        let device = scales.history.device().clone();
        scales.history = Tensor::from_slice(&device, &[window, n], &new_history)?;
        scales.scale = Tensor::from_slice(&device, &[n], &new_scale)?;
        scales.wait = Tensor::from_slice(&device, &[n], &new_wait)?;
        Ok(())
    }
}
