//! The scaling state of a run: one slot per cast, kept in a few plain tensors with names.
//!
//! Casts measure into their slots as they go; histories roll and scales change once per optimizer step, in [`ScalingState::update`],
//! so micro-batches merge by maximum and every cast of a step reads the same scales.

mod measured;
mod values;

pub use measured::{CastCounts, CastRecord};
pub use values::Values;

use self::measured::LastStep;
use crate::error::{Error, Result};
use crate::layer::GemmInput;
use crate::recipe::{Cast, FirstStep, Scaling};
use ottava_tensor::ops::{
    self, AmaxReducer, CastScale, CastStatistics, Copies, CurrentScaling, DelayedScales, DelayedScaling, Fp8Output,
    NonFinite, Output, Produced,
};
use ottava_tensor::{DType, Device, Granularity, QuantizedTensor, Tensor};

/// Index of one cast in the scaling state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot(usize);

/// Collects the casts of a model while it is built.
#[derive(Default)]
pub struct Slots(Vec<(String, Cast)>);

impl Slot {
    /// Its entry in statistics.
    pub fn index(self) -> usize {
        self.0
    }
}

impl Slots {
    /// A slot for the cast called `name`.
    pub fn add(&mut self, name: String, cast: Cast) -> Slot {
        self.0.push((name, cast));
        Slot(self.0.len() - 1)
    }
}

/// The scale of an operand that may be made and cast again: its own; or nothing where its slot has one for the whole step, or where
/// its rows or blocks find theirs again.
#[derive(Clone, Default)]
pub struct Frozen(Option<Tensor>);

impl Frozen {
    /// Takes over another scale, in the memory of this one where there is some.
    pub fn replace(&mut self, by: Frozen) -> Result<()> {
        match (&mut self.0, by.0) {
            (Some(old), Some(new)) => old.copy_from(0, &new)?,
            (old, new) => *old = new,
        }
        Ok(())
    }
}

/// How the weights that an update is about to make will be cast.
pub enum NextCast {
    /// By a scale, F32 `[1]`, that is known.
    Known(Tensor),
    /// By a scale of their own, from their amax.
    Measured,
    /// By scales of their blocks of 128x128, which the update finds.
    Blocks(CurrentScaling),
    /// By scales that a cast finds once they are there.
    Later,
}

/// What scales a cast of a slot: an owned [`CastScale`].
enum Scale {
    Given(Tensor),
    Own(Granularity, CurrentScaling),
}

impl Scale {
    fn of_cast(&self) -> CastScale<'_> {
        match self {
            Scale::Given(scale) => CastScale::Given(scale),
            Scale::Own(granularity, how) => CastScale::Own(*granularity, *how),
        }
    }
}

/// How often casts lost something.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CastLosses {
    /// Share of elements beyond the largest finite value.
    pub saturated: f64,
    /// Share of elements that became zero.
    pub underflowed: f64,
    /// The casts that met an infinity.
    pub non_finite: Vec<String>,
}

/// The scales, histories and measurements of all casts of a model.
pub struct ScalingState {
    slots: Vec<(String, Cast)>,
    statistics: CastStatistics,
    /// Where casts outside training measure: nothing that they see may change a run.
    unobserved: CastStatistics,
    /// F32 `[1]` each, zero.
    spare_amaxes: Vec<Tensor>,
    /// Histories and scales; where no scale is delayed, what counts infinities. `None` without casts.
    scales: Option<DelayedScales>,
    delayed: Option<Delayed>,
    observing: bool,
    high_precision: bool,
    last_step: LastStep,
    /// Saturated, underflowed and all elements when losses were last asked for.
    counted: [i64; 3],
    /// Updates with an infinity, by slot, when losses were last asked for.
    counted_non_finite: Vec<i64>,
}

struct Delayed {
    how: DelayedScaling,
    first_step: FirstStep,
    /// Updates so far; before the first, scales mean nothing.
    updates: u64,
}

/// The update where no scale is delayed: amaxes are counted and cleared.
const COUNT: DelayedScaling =
    DelayedScaling { reducer: AmaxReducer::MostRecent, margin: 0, interval: 1, non_finite: NonFinite::Quarantine };

impl ScalingState {
    /// Fresh state for `slots` on `device`.
    pub fn new(device: &Device, slots: Slots) -> Result<ScalingState> {
        let slots = slots.0;
        let n = slots.len();
        let delayed = slots.iter().find_map(|(_, cast)| match cast.scaling {
            Scaling::Delayed { how, window, first_step } => Some((Delayed { how, first_step, updates: 0 }, window)),
            Scaling::Current(_) => None,
        });
        let (delayed, window) = delayed.map_or((None, 1), |(delayed, window)| (Some(delayed), window));
        let largest: Vec<f32> = slots.iter().filter_map(|(_, cast)| cast.format.max_finite()).collect();
        let scales = (n > 0).then(|| DelayedScales::new(device, window, &largest)).transpose()?;
        let (statistics, unobserved) = (CastStatistics::new(device, n)?, CastStatistics::new(device, n)?);
        let (counted, counted_non_finite) = ([0; 3], vec![0; n]);
        Ok(ScalingState {
            slots,
            statistics,
            unobserved,
            spare_amaxes: Vec::new(),
            scales,
            delayed,
            observing: true,
            high_precision: false,
            last_step: LastStep::new(device, n)?,
            counted,
            counted_non_finite,
        })
    }

    /// Runs an op that produces the operand of a linear, and has it write what the cast in `slot` asks for: the value itself where
    /// there is no cast; codes in the same pass where the scale is known; where the scale depends on the value, its amax alone, and
    /// then, by the op run again, its codes. The op's other results come along.
    pub fn produce<T>(
        &mut self,
        slot: Option<Slot>,
        copies: Copies,
        mut op: impl FnMut(Output) -> ottava_tensor::Result<(Produced, T)>,
    ) -> Result<(GemmInput, T)> {
        let Some(slot) = slot else {
            let (value, rest) = op(Output::Plain)?;
            return Ok((GemmInput::Plain(plain(value)), rest));
        };
        let format = self.format(slot);
        let (scale, frozen) = self.scale_for(slot, |output| Ok(op(output).map(drop)?))?;
        let scale = scale.of_cast();
        let to = Fp8Output { format, scale, copies, statistics: self.statistics_mut(), slot: slot.0 };
        let (codes, rest) = op(Output::Fp8(to))?;
        Ok((quantized(codes, frozen), rest))
    }

    /// As [`ScalingState::produce`], for an op that can also cast `again`, transposed, an operand that was cast in `again` before.
    pub fn produce_beside(
        &mut self,
        slot: Option<Slot>,
        again: Slot,
        frozen: &Frozen,
        mut op: impl FnMut(Output, Option<Fp8Output>) -> Result<(Produced, Option<QuantizedTensor>)>,
    ) -> Result<(GemmInput, GemmInput)> {
        let scale_again = self.frozen_scale(again, frozen)?;
        let own = slot.map(|slot| self.scale_for(slot, |output| op(output, None).map(drop))).transpose()?;
        let beside = Fp8Output {
            format: self.slots[again.0].1.format,
            scale: scale_again.of_cast(),
            copies: Copies::Columns,
            statistics: &mut self.unobserved,
            slot: again.0,
        };
        let (made, codes) = match (slot, &own) {
            (Some(slot), Some((scale, _))) => {
                let (format, statistics) = (self.slots[slot.0].1.format, &mut self.statistics);
                let scale = scale.of_cast();
                let to = Fp8Output { format, scale, copies: Copies::Both, statistics, slot: slot.0 };
                op(Output::Fp8(to), Some(beside))?
            }
            _ => op(Output::Plain, Some(beside))?,
        };
        let made = match own {
            Some((_, frozen)) => quantized(made, frozen),
            None => GemmInput::Plain(plain(made)),
        };
        Ok((made, GemmInput::Quantized(codes.expect("it was asked for"), frozen.clone())))
    }

    /// The scale of what an op is about to produce; where it needs the amax, `measure` has the op tell that first.
    fn scale_for(&mut self, slot: Slot, measure: impl FnOnce(Output) -> Result<()>) -> Result<(Scale, Frozen)> {
        let frozen = match self.amax_for(Some(slot))? {
            None => Frozen(None),
            Some(mut amax) => {
                measure(Output::Amax { amax: &mut amax })?;
                self.own_scale(slot, amax)?
            }
        };
        Ok((self.frozen_scale(slot, &frozen)?, frozen))
    }

    /// Runs once more an op of [`ScalingState::produce`], by the scale that it had; nothing is measured a second time.
    pub fn again(
        &mut self,
        slot: Option<Slot>,
        frozen: &Frozen,
        copies: Copies,
        op: impl FnOnce(Output) -> Result<Produced>,
    ) -> Result<GemmInput> {
        let Some(slot) = slot else { return Ok(GemmInput::Plain(plain(op(Output::Plain)?))) };
        let (format, scale) = (self.format(slot), self.frozen_scale(slot, frozen)?);
        let scale = scale.of_cast();
        let to = Fp8Output { format, scale, copies, statistics: &mut self.unobserved, slot: slot.0 };
        Ok(quantized(op(Output::Fp8(to))?, frozen.clone()))
    }

    /// Casts once more a value that was cast before in this step, by the scale that it had; nothing is measured a second time.
    pub fn quantize_again<'a>(
        &mut self,
        slot: Slot,
        frozen: &Frozen,
        x: impl Into<Values<'a>>,
        copies: Copies,
    ) -> Result<QuantizedTensor> {
        self.cast(slot, frozen, x.into(), copies, false)
    }

    /// Measures a value that nobody casts.
    pub fn measure(&mut self, slot: Slot, x: &Tensor) -> Result<()> {
        Ok(ops::measure(x, self.statistics_mut(), slot.0)?)
    }

    /// A cleared F32 `[1]` for whoever makes a value that the cast in `slot` will want the amax of; `None` where it does not.
    pub fn amax_for(&mut self, slot: Option<Slot>) -> Result<Option<Tensor>> {
        match slot {
            Some(slot) if self.known_scale(slot)?.is_none() => match self.spare_amaxes.pop() {
                Some(amax) => Ok(Some(amax)),
                None => Ok(Some(Tensor::zeros(self.statistics.amax.device(), &[1], DType::F32)?)),
            },
            _ => Ok(None),
        }
    }

    /// Casts and measures a value with a scale of its own whose amax is known.
    pub fn quantize_measured(&mut self, slot: Slot, x: &Tensor, amax: Tensor, copies: Copies) -> Result<GemmInput> {
        let frozen = self.own_scale(slot, amax)?;
        Ok(GemmInput::Quantized(self.quantize_by(slot, &frozen, x, copies)?, frozen))
    }

    /// The scale that `x` has in this step, where it is its own.
    pub fn freeze(&mut self, slot: Slot, x: &Tensor) -> Result<Frozen> {
        match self.amax_for(Some(slot))? {
            None => Ok(Frozen(None)),
            Some(mut amax) => {
                ops::raise_amax(x, &mut amax)?;
                self.own_scale(slot, amax)
            }
        }
    }

    /// The scale of a tensor with an `amax` from [`ScalingState::amax_for`].
    pub fn own_scale(&mut self, slot: Slot, mut amax: Tensor) -> Result<Frozen> {
        let scale = ops::take_scale(&mut amax, self.format(slot), self.current_scaling(slot))?;
        self.spare_amaxes.push(amax);
        Ok(Frozen(Some(scale)))
    }

    /// Casts a value by a scale from [`ScalingState::freeze`] and measures it.
    pub fn quantize_by<'a>(
        &mut self,
        slot: Slot,
        frozen: &Frozen,
        x: impl Into<Values<'a>>,
        copies: Copies,
    ) -> Result<QuantizedTensor> {
        self.cast(slot, frozen, x.into(), copies, true)
    }

    fn cast(
        &mut self,
        slot: Slot,
        frozen: &Frozen,
        x: Values,
        copies: Copies,
        measures: bool,
    ) -> Result<QuantizedTensor> {
        let (format, scale) = (self.format(slot), self.frozen_scale(slot, frozen)?);
        let scale = scale.of_cast();
        let statistics = if measures { self.statistics_mut() } else { &mut self.unobserved };
        x.cast(Fp8Output { format, scale, copies, statistics, slot: slot.0 })
    }

    /// As [`ScalingState::quantize_by`], into the codes that there are.
    pub fn quantize_into(&mut self, slot: Slot, frozen: &Frozen, x: &Tensor, into: &mut QuantizedTensor) -> Result<()> {
        let scale = self.frozen_scale(slot, frozen)?;
        Ok(ops::quantize_into(x, scale.of_cast(), into, self.statistics_mut(), slot.0)?)
    }

    fn frozen_scale(&self, slot: Slot, frozen: &Frozen) -> Result<Scale> {
        match (&frozen.0, self.known_scale(slot)?) {
            (Some(own), _) => Ok(Scale::Given(own.clone())),
            (None, Some(known)) => Ok(known),
            (None, None) => unreachable!("a cast without a scale of its slot has one of its own"),
        }
    }

    fn format(&self, slot: Slot) -> DType {
        self.slots[slot.0].1.format
    }

    /// Where casts measure now.
    pub(crate) fn statistics_mut(&mut self) -> &mut CastStatistics {
        if self.observing { &mut self.statistics } else { &mut self.unobserved }
    }

    /// What scales casts of `slot` in this step, unless it depends on the amax of the very tensor.
    fn known_scale(&self, slot: Slot) -> Result<Option<Scale>> {
        let Cast { granularity, scaling, .. } = self.slots[slot.0].1;
        match (scaling, &self.delayed, &self.scales) {
            (Scaling::Current(how), ..) if granularity != Granularity::PerTensor => {
                Ok(Some(Scale::Own(granularity, how)))
            }
            (Scaling::Current(_), ..) | (_, None, _) | (_, _, None) => Ok(None),
            (_, Some(delayed), _) if delayed.updates == 0 && delayed.first_step == FirstStep::Current => Ok(None),
            (_, Some(_), Some(scales)) => Ok(Some(Scale::Given(scales.scale.rows(slot.0, slot.0 + 1)?))),
        }
    }

    /// How weights that an update is about to make will be cast by the cast in `slot`.
    pub fn next_cast(&self, slot: Slot) -> Result<NextCast> {
        Ok(match self.known_scale(slot)? {
            Some(Scale::Given(scale)) => NextCast::Known(scale),
            Some(Scale::Own(Granularity::Blocks128x128, how)) if self.format(slot) == DType::E4M3 => {
                NextCast::Blocks(how)
            }
            Some(Scale::Own(..)) => NextCast::Later,
            None => NextCast::Measured,
        })
    }

    fn current_scaling(&self, slot: Slot) -> CurrentScaling {
        match self.slots[slot.0].1.scaling {
            Scaling::Current(how) => how,
            Scaling::Delayed { .. } => CurrentScaling::default(),
        }
    }

    /// Whether casts count: true in training, false in evaluation.
    pub fn observe(&mut self, observing: bool) {
        self.observing = observing;
    }

    /// Has all products read operands in the compute type until it is told otherwise, while all that would be cast is measured:
    /// histories roll and scales follow as if it were.
    pub fn set_high_precision(&mut self, high_precision: bool) {
        self.high_precision = high_precision;
    }

    /// Whether products read operands in the compute type for now.
    pub fn is_high_precision(&self) -> bool {
        self.high_precision
    }

    /// Ends the casts of an optimizer step: histories roll and scales follow. Enqueues work and waits for nothing.
    pub fn update(&mut self) -> Result<()> {
        let Some(scales) = &mut self.scales else { return Ok(()) };
        let how = self.delayed.as_ref().map_or(COUNT, |delayed| delayed.how);
        self.last_step.keep(&self.statistics.amax, &scales.scale)?;
        ops::delayed_scaling(&mut self.statistics.amax, scales, how)?;
        self.count_replayed_update();
        Ok(())
    }

    /// Counts an update whose work was recorded and is enqueued again.
    pub fn count_replayed_update(&mut self) {
        if let Some(delayed) = &mut self.delayed {
            delayed.updates += 1;
        }
    }

    /// What casts have lost since this was last asked.
    pub fn losses(&mut self) -> Result<CastLosses> {
        let sum = |t: &Tensor| -> Result<i64> { Ok(t.to_vec::<i64>()?.iter().sum()) };
        let CastStatistics { saturated, underflowed, elements, .. } = &self.statistics;
        let counts = [sum(saturated)?, sum(underflowed)?, sum(elements)?];
        let before = std::mem::replace(&mut self.counted, counts);
        let since = |i: usize| (counts[i] - before[i]) as f64;
        let share = |i: usize| since(i) / since(2).max(1.0);
        let mut non_finite = Vec::new();
        if let Some(scales) = &self.scales {
            let now = scales.non_finite.to_vec::<i64>()?;
            let slots = self.slots.iter().zip(now.iter().zip(&self.counted_non_finite));
            non_finite.extend(slots.filter(|(_, (now, before))| now > before).map(|((name, _), _)| name.clone()));
            self.counted_non_finite = now;
        }
        Ok(CastLosses { saturated: share(0), underflowed: share(1), non_finite })
    }

    /// True when the model has no FP8 casts.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Names of the slots, in order, for the checkpoint's manifest.
    pub fn names(&self) -> Vec<String> {
        self.slots.iter().map(|(name, _)| name.clone()).collect()
    }

    /// The arrays that a checkpoint keeps, by name. Empty unless scaling is delayed.
    pub fn arrays(&self) -> Result<Vec<(String, Tensor)>> {
        let (Some(delayed), Some(scales)) = (&self.delayed, &self.scales) else { return Ok(Vec::new()) };
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

    /// Takes over arrays that [`ScalingState::arrays`] gave, in a run whose slots are called `names`.
    ///
    /// Each cast takes over what its namesake had. Where there is none, because its linear was in high precision, the coming step is
    /// a first step once more. Errors when histories have another length; a recipe without delayed scaling takes nothing.
    pub fn restore(&mut self, names: &[String], mut array: impl FnMut(&str) -> Result<Tensor>) -> Result<()> {
        let (Some(delayed), Some(scales)) = (&mut self.delayed, &mut self.scales) else { return Ok(()) };
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
        // A run that computes scales after every step has nothing to wait for.
        let wait = match array("scaling.wait") {
            Ok(wait) => wait.to_vec::<i64>()?,
            Err(_) => vec![0; names.len()],
        };
        let [history, scale, largest] = [history, scale, largest].map(|t| t.to_vec::<f32>());
        let (history, scale, largest, now) = (history?, scale?, largest?, scales.largest.to_vec::<f32>()?);
        let (mut new_history, mut new_scale, mut new_wait) = (vec![0f32; window * n], vec![1f32; n], vec![0i64; n]);
        delayed.updates = array("scaling.updates")?.to_vec::<i64>()?[0] as u64;
        for (i, (name, _)) in self.slots.iter().enumerate() {
            let Some(old) = names.iter().position(|other| other == name) else {
                delayed.updates = 0;
                continue;
            };
            (0..window).for_each(|row| new_history[row * n + i] = history[row * names.len() + old]);
            // A cast may have another format than it had; its scale keeps the same tensor within the range.
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

fn quantized(codes: Produced, frozen: Frozen) -> GemmInput {
    GemmInput::Quantized(codes.fp8().expect("an FP8 output gives codes"), frozen)
}

fn plain(value: Produced) -> Tensor {
    value.plain().expect("a plain output gives a value")
}
