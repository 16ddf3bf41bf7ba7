//! The scaling state of a run: one slot per cast, kept in a few plain tensors with names.
//!
//! Casts measure into their slots as they go; histories roll and scales change once per optimizer step, in [`ScalingState::update`],
//! so micro-batches merge by maximum and every cast of a step reads the same scales.

use crate::error::{Error, Result};
use crate::layer::GemmInput;
use crate::recipe::{Cast, FirstStep, Scaling};
use ottava_tensor::ops::{self, CastStatistics, Copies, CurrentScaling, DelayedScaling, Fp8Output, Output, Produced};
use ottava_tensor::{DType, Device, QuantizedTensor, Tensor};

/// Index of one cast in the scaling state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot(usize);

/// Collects the casts of a model while it is built.
#[derive(Default)]
pub struct Slots(Vec<(String, Cast)>);

impl Slots {
    /// A slot for the cast called `name`.
    pub fn add(&mut self, name: String, cast: Cast) -> Slot {
        self.0.push((name, cast));
        Slot(self.0.len() - 1)
    }
}

/// How often casts lost something, over all casts since the last update.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CastLosses {
    /// Share of elements beyond the largest finite value.
    pub saturated: f64,
    /// Share of elements that became zero.
    pub underflowed: f64,
}

/// The scales, histories and measurements of all casts of a model.
pub struct ScalingState {
    slots: Vec<(String, Cast)>,
    statistics: CastStatistics,
    /// Where casts outside training measure: nothing that they see may change a run.
    unobserved: CastStatistics,
    delayed: Option<DelayedState>,
    observing: bool,
}

struct DelayedState {
    how: DelayedScaling,
    first_step: FirstStep,
    /// F32 `[window, slots]`, newest last; row 0 is a staging row.
    history: Tensor,
    /// F32 `[slots]`.
    scale: Tensor,
    /// Largest finite value of each slot's format, F32 `[slots]`.
    largest: Tensor,
    /// Updates so far; before the first, scales mean nothing.
    updates: u64,
}

impl ScalingState {
    /// Fresh state for `slots` on `device`.
    pub fn new(device: &Device, slots: Slots) -> Result<ScalingState> {
        let slots = slots.0;
        let n = slots.len();
        let delayed = slots.iter().find_map(|(_, cast)| match cast.scaling {
            Scaling::Delayed { how, window, first_step } => Some((how, window, first_step)),
            Scaling::Current(_) => None,
        });
        let delayed = match delayed {
            None => None,
            Some((how, window, first_step)) => {
                let largest: Vec<f32> = slots.iter().filter_map(|(_, cast)| cast.format.max_finite()).collect();
                Some(DelayedState {
                    how,
                    first_step,
                    history: Tensor::zeros(device, &[window, n], DType::F32)?,
                    scale: Tensor::from_slice(device, &[n], &vec![1f32; n])?,
                    largest: Tensor::from_slice(device, &[n], &largest)?,
                    updates: 0,
                })
            }
        };
        let (statistics, unobserved) = (CastStatistics::new(device, n)?, CastStatistics::new(device, n)?);
        Ok(ScalingState { slots, statistics, unobserved, delayed, observing: true })
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
            return Ok((GemmInput::Plain(value.plain().expect("a plain output gives a value")), rest));
        };
        let format = self.format(slot);
        let scale = match self.known_scale(slot)? {
            Some(scale) => scale,
            None => {
                let mut amax = Tensor::zeros(self.statistics.amax.device(), &[1], DType::F32)?;
                op(Output::Amax { amax: &mut amax })?;
                ops::current_scale(&amax, format, self.current_scaling(slot))?
            }
        };
        let to = Fp8Output { format, scale: &scale, copies, statistics: self.statistics_mut(), slot: slot.0 };
        let (codes, rest) = op(Output::Fp8(to))?;
        Ok((GemmInput::Quantized(codes.fp8().expect("an FP8 output gives codes")), rest))
    }

    /// Casts a value that exists already, as its slot says, and measures it.
    pub fn quantize(&mut self, slot: Slot, x: &Tensor, copies: Copies) -> Result<QuantizedTensor> {
        let scale = match self.known_scale(slot)? {
            Some(scale) => scale,
            None => ops::current_scale(&ops::amax(x)?, self.format(slot), self.current_scaling(slot))?,
        };
        self.cast(slot, x, &scale, copies)
    }

    fn cast(&mut self, slot: Slot, x: &Tensor, scale: &Tensor, copies: Copies) -> Result<QuantizedTensor> {
        Ok(ops::quantize(x, self.format(slot), scale, copies, self.statistics_mut(), slot.0)?)
    }

    fn format(&self, slot: Slot) -> DType {
        self.slots[slot.0].1.format
    }

    /// Where casts measure now.
    fn statistics_mut(&mut self) -> &mut CastStatistics {
        if self.observing { &mut self.statistics } else { &mut self.unobserved }
    }

    /// The scale of `slot` for this step, unless it depends on the very tensor.
    fn known_scale(&self, slot: Slot) -> Result<Option<Tensor>> {
        match (self.slots[slot.0].1.scaling, &self.delayed) {
            (Scaling::Current(_), _) | (_, None) => Ok(None),
            (_, Some(state)) if state.updates == 0 && state.first_step == FirstStep::Current => Ok(None),
            (_, Some(state)) => Ok(Some(state.scale.rows(slot.0, slot.0 + 1)?)),
        }
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

    /// Ends an optimizer step: histories roll and scales follow. Returns what the casts of the step lost.
    pub fn update(&mut self) -> Result<CastLosses> {
        let sum = |t: &Tensor| -> Result<f64> { Ok(t.to_vec::<i64>()?.iter().sum::<i64>() as f64) };
        let elements = sum(&self.statistics.elements)?.max(1.0);
        let losses = CastLosses {
            saturated: sum(&self.statistics.saturated)? / elements,
            underflowed: sum(&self.statistics.underflowed)? / elements,
        };
        self.statistics.clear_counters()?;
        match &mut self.delayed {
            Some(state) => {
                let amax = &mut self.statistics.amax;
                ops::delayed_scaling(amax, &mut state.history, &mut state.scale, &state.largest, state.how)?;
                state.updates += 1;
            }
            None => self.statistics.amax.fill_zero()?,
        }
        Ok(losses)
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
        let Some(state) = &self.delayed else { return Ok(Vec::new()) };
        let updates = Tensor::from_slice(&Device::Cpu, &[1], &[state.updates as i64])?;
        Ok(vec![
            ("scaling.amax_history".to_string(), state.history.clone()),
            ("scaling.scale".to_string(), state.scale.clone()),
            ("scaling.largest".to_string(), state.largest.clone()),
            ("scaling.updates".to_string(), updates),
        ])
    }

    /// Takes over arrays that [`ScalingState::arrays`] gave, in a run whose slots are called `names`.
    ///
    /// Errors when the casts of the two runs are not the same ones; a recipe without delayed scaling takes nothing.
    pub fn restore(&mut self, names: &[String], mut array: impl FnMut(&str) -> Result<Tensor>) -> Result<()> {
        let own = self.names();
        let Some(state) = &mut self.delayed else { return Ok(()) };
        if names != own {
            return Err(Error::Checkpoint(format!(
                "the checkpoint has the FP8 scales of {} casts and this model needs those of {}; resume with the same recipe",
                names.len(),
                own.len()
            )));
        }
        let (history, scale) = (array("scaling.amax_history")?, array("scaling.scale")?);
        let shape = state.history.shape().to_vec();
        if history.shape() != shape || scale.shape() != state.scale.shape() {
            return Err(Error::Checkpoint(format!(
                "the checkpoint's amax history has shape {:?}, this run's `amax_history_len` makes it {shape:?}",
                history.shape()
            )));
        }
        let device = state.history.device().clone();
        state.history = history.to_device(&device)?;
        // A cast may have another format than it had; its scale keeps the same tensor within the range.
        let largest = [&array("scaling.largest")?, &state.largest].map(|t| t.to_vec::<f32>());
        let [before, now] = largest;
        let factors = before?.into_iter().zip(now?).map(|(before, now)| now / before);
        let scale: Vec<f32> =
            scale.to_vec::<f32>()?.into_iter().zip(factors).map(|(s, f)| (s * f).min(f32::MAX)).collect();
        state.scale = Tensor::from_slice(&device, &[scale.len()], &scale)?;
        state.updates = array("scaling.updates")?.to_vec::<i64>()?[0] as u64;
        Ok(())
    }
}
