//! The casts of one pass: they read scales and record what they measure.

use super::histogram::Histogram;
use super::probe::Probe;
use super::routers::RouterSums;
use super::scales::{Scale, Scales, Slot};
use super::values::Values;
use crate::mode::{Mode, Pass};
use crate::operand::FrozenScale;
use ottava_common::error::Result;
use ottava_tensor::comm::Axis;
use ottava_tensor::ops::{self, CastStatistics, CodeCopies, Fp8Output, Groups, Operand, Output, Produced, Routes};
use ottava_tensor::{DType, Device, QuantizedTensor, Tensor};

/// The statistics that casts write.
pub struct Recorder {
    /// The statistics of the run.
    pub(super) statistics: CastStatistics,
    /// The statistics of evaluation and of recomputed operands. They are never read.
    unread: CastStatistics,
    /// Cleared F32 `[1]` tensors, for reuse.
    spare_amaxes: Vec<Tensor>,
    /// The histograms of values that are measured without a cast, by slot, if histograms are recorded.
    pub(super) histograms: Option<Vec<Histogram>>,
    /// The comparisons, in a comparison pass.
    pub(super) probe: Option<Probe>,
    /// The sums of routers. Empty in a recorder of passes that do not measure.
    pub(super) routers: Vec<RouterSums>,
}

impl Recorder {
    /// Returns the recorder with sums of routers, for passes that measure the choices of routers.
    pub(super) fn with_routers(self, routers: Vec<RouterSums>) -> Recorder {
        Recorder { routers, ..self }
    }

    /// Creates a recorder for a model with `n` casts.
    pub fn new(device: &Device, n: usize) -> Result<Recorder> {
        let (statistics, unread) = (CastStatistics::new(device, n)?, CastStatistics::unread(device, n)?);
        let (spare_amaxes, histograms, probe, routers) = (Vec::new(), None, None, Vec::new());
        Ok(Recorder { statistics, unread, spare_amaxes, histograms, probe, routers })
    }

    fn statistics(&mut self, measures: bool) -> &mut CastStatistics {
        if measures { &mut self.statistics } else { &mut self.unread }
    }
}

/// The casts of one pass.
pub struct Casts<'a> {
    /// The scales.
    pub scales: &'a Scales,
    /// The statistics.
    pub recorder: &'a mut Recorder,
    /// The mode of the pass.
    pub mode: Mode,
}

impl Casts<'_> {
    /// Returns the casts in another mode.
    pub fn in_mode(&mut self, mode: Mode) -> Casts<'_> {
        Casts { scales: self.scales, recorder: self.recorder, mode }
    }

    /// Returns whether the products of the linear of `slot` read operands in the compute type.
    pub fn is_high_precision(&self, slot: Slot) -> bool {
        self.mode.is_high_precision() || self.scales.is_high_precision(slot)
    }

    /// Returns whether casts of this pass are compared with the values before the cast. Only casts in the recipe's precision are compared.
    pub fn compares_casts(&self) -> bool {
        self.recorder.probe.as_ref().is_some_and(|probe| !probe.repeats()) && !self.mode.is_high_precision()
    }

    /// Returns whether products of this pass are compared. Products that backward recomputes are not compared.
    pub fn compares(&self) -> bool {
        self.compares_casts() && self.mode.pass == Pass::Comparison
    }

    /// Returns the comparisons of a comparison pass.
    ///
    /// Panics in other passes.
    pub fn probe(&mut self) -> &mut Probe {
        self.recorder.probe.as_mut().expect("a pass that compares has a probe")
    }

    /// Compares `codes`, cast in `slot`, with the matrix before the cast, if this pass compares casts.
    pub fn probe_cast(&mut self, slot: Slot, codes: &QuantizedTensor, x: &Tensor) -> Result<()> {
        if !self.compares_casts() {
            return Ok(());
        }
        let scales = self.scales;
        self.probe().compare_cast(scales.name(slot), codes, x)
    }

    /// Returns the name of the linear whose output gradient is cast in slot `gradient`.
    pub fn linear_name(&self, gradient: Slot) -> String {
        self.scales.name(gradient).trim_end_matches(".grad_output").to_string()
    }

    /// Compares `codes` of a weight with the weight, if this pass compares products. The output gradient of the weight's linear has slot `gradient`.
    pub fn compare_weight(
        &mut self,
        gradient: Slot,
        codes: Operand,
        weight: impl FnOnce() -> Result<Tensor>,
    ) -> Result<()> {
        if !self.compares() {
            return Ok(());
        }
        let name = format!("{}.weight", self.linear_name(gradient));
        self.probe().compare_codes(&name, codes, &weight()?)
    }

    /// Keeps sampled rows of `x`, the operand in `slot`, if this pass compares products.
    pub fn keep_rows(&mut self, slot: Slot, x: &Tensor) -> Result<()> {
        if !self.compares() {
            return Ok(());
        }
        let scales = self.scales;
        self.probe().keep_rows(scales.name(slot), x)
    }

    /// Returns the statistics that casts of this pass write.
    pub fn statistics(&mut self) -> &mut CastStatistics {
        self.recorder.statistics(self.mode.measures())
    }

    /// Runs an op that produces an operand, and lets it write the codes of the cast in `slot`. If the scale depends on the value, the op runs
    /// twice: for the amax, and for the codes. Also returns the op's other results.
    pub fn produce<T>(
        &mut self,
        slot: Slot,
        copies: CodeCopies,
        mut op: impl FnMut(Output) -> ottava_tensor::Result<(Produced, T)>,
    ) -> Result<(QuantizedTensor, FrozenScale, T)> {
        let format = self.scales.format(slot);
        let (scale, frozen) = self.scale_for(slot, |output| Ok(op(output).map(drop)?))?;
        let to =
            Fp8Output { format, scale: scale.of_cast(), copies, statistics: self.statistics(), slot: slot.index() };
        let (codes, rest) = op(Output::Fp8(to))?;
        Ok((codes_of(codes), frozen, rest))
    }

    /// Runs an op that produces an operand for the cast in `slot`, and recomputes another operand as transposed codes, for the cast in
    /// `other` with the scale `frozen`. Returns the op's result (the value if `slot` is `None`) and the transposed codes. Backward uses this
    /// function, which always measures.
    pub fn produce_and_recast(
        &mut self,
        slot: Option<Slot>,
        other: Slot,
        frozen: &FrozenScale,
        mut op: impl FnMut(Output, Option<Fp8Output>) -> Result<(Produced, Option<QuantizedTensor>)>,
    ) -> Result<(Produced, QuantizedTensor)> {
        let other_scale = self.scales.scale(other, frozen)?;
        let own = slot.map(|slot| self.scale_for(slot, |output| op(output, None).map(drop))).transpose()?;
        let Recorder { statistics, unread, .. } = &mut *self.recorder;
        let (format, scale) = (self.scales.format(other), other_scale.of_cast());
        let to_other =
            Fp8Output { format, scale, copies: CodeCopies::Columns, statistics: unread, slot: other.index() };
        let (made, codes) = match (slot, &own) {
            (Some(slot), Some((scale, _))) => {
                let (format, scale) = (self.scales.format(slot), scale.of_cast());
                let to = Fp8Output { format, scale, copies: CodeCopies::Both, statistics, slot: slot.index() };
                op(Output::Fp8(to), Some(to_other))?
            }
            _ => op(Output::Plain, Some(to_other))?,
        };
        Ok((made, codes.expect("it was asked for")))
    }

    /// Returns the scale for the result of an op. `measure` runs the op for the amax, if the scale depends on the amax.
    fn scale_for(&mut self, slot: Slot, measure: impl FnOnce(Output) -> Result<()>) -> Result<(Scale, FrozenScale)> {
        let frozen = match self.amax_for(slot)? {
            None => FrozenScale::default(),
            Some(mut amax) => {
                measure(Output::Amax { amax: &mut amax })?;
                self.own_scale(slot, amax)?
            }
        };
        Ok((self.scales.scale(slot, &frozen)?, frozen))
    }

    /// Recomputes an operand of [`Casts::produce`] with the same scale, without measuring it again.
    pub fn reproduce(
        &mut self,
        slot: Slot,
        frozen: &FrozenScale,
        copies: CodeCopies,
        op: impl FnOnce(Output) -> Result<Produced>,
    ) -> Result<QuantizedTensor> {
        let (format, scale) = (self.scales.format(slot), self.scales.scale(slot, frozen)?);
        let statistics = &mut self.recorder.unread;
        let to = Fp8Output { format, scale: scale.of_cast(), copies, statistics, slot: slot.index() };
        Ok(codes_of(op(Output::Fp8(to))?))
    }

    /// Adds the choices of router number `router` to its sums, if this pass measures. I32 `counts` `[E]` are the choices by expert, and `rows` are
    /// the rows of this rank's experts.
    pub fn record_routes(&mut self, router: usize, routes: &Routes, counts: &Tensor, rows: &Groups) -> Result<()> {
        if self.mode.measures() { self.recorder.routers[router].add(routes, counts, rows) } else { Ok(()) }
    }

    /// Measures a value that is not cast.
    pub fn measure(&mut self, slot: Slot, x: &Tensor) -> Result<()> {
        if let Some(histograms) = &mut self.recorder.histograms {
            histograms[slot.index()].add(x)?;
        }
        Ok(ops::measure(x, self.statistics(), slot.index())?)
    }

    /// Returns a cleared F32 `[1]` for the amax of a value, if the cast in `slot` needs the amax.
    pub fn amax_for(&mut self, slot: Slot) -> Result<Option<Tensor>> {
        if self.scales.known(slot)?.is_some() {
            return Ok(None);
        }
        match self.recorder.spare_amaxes.pop() {
            Some(amax) => Ok(Some(amax)),
            None => Ok(Some(Tensor::zeros(self.recorder.statistics.amax.device(), &[1], DType::F32)?)),
        }
    }

    /// Returns the scale of `x` if it depends on the values of `x`; otherwise returns an empty scale.
    pub fn freeze(&mut self, slot: Slot, x: &Tensor) -> Result<FrozenScale> {
        match self.amax_for(slot)? {
            None => Ok(FrozenScale::default()),
            Some(mut amax) => {
                ops::raise_amax(x, &mut amax)?;
                self.own_scale(slot, amax)
            }
        }
    }

    /// Returns the scale of a tensor from its `amax`, which comes from [`Casts::amax_for`].
    ///
    /// If the amax group includes ranks that divide the tensor, these ranks compute one scale.
    pub fn own_scale(&mut self, slot: Slot, mut amax: Tensor) -> Result<FrozenScale> {
        // The ranks that divide experts include the ranks that divide tensors, so only one axis is reduced.
        let group = self.scales.amax_groups()[slot.index()];
        if let Some(axis) = [Axis::Expert, Axis::Tensor].into_iter().find(|axis| group.spans(*axis)) {
            amax = self.scales.ranks.largest(axis, self.scales.name(slot), amax)?;
        }
        let scale = ops::take_scale(&mut amax, self.scales.format(slot), self.scales.current_scaling(slot))?;
        self.recorder.spare_amaxes.push(amax);
        Ok(FrozenScale::own(scale))
    }

    /// Casts a value with a scale from [`Casts::freeze`], and measures it.
    pub fn quantize(
        &mut self,
        slot: Slot,
        frozen: &FrozenScale,
        x: impl Into<Values>,
        copies: CodeCopies,
    ) -> Result<QuantizedTensor> {
        self.cast(slot, frozen, x.into(), copies, self.mode.measures())
    }

    /// Casts a value again with the scale that it had in this step, without measuring it.
    pub fn requantize(
        &mut self,
        slot: Slot,
        frozen: &FrozenScale,
        x: impl Into<Values>,
        copies: CodeCopies,
    ) -> Result<QuantizedTensor> {
        self.cast(slot, frozen, x.into(), copies, false)
    }

    fn cast(
        &mut self,
        slot: Slot,
        frozen: &FrozenScale,
        x: Values,
        copies: CodeCopies,
        measures: bool,
    ) -> Result<QuantizedTensor> {
        let (format, scale) = (self.scales.format(slot), self.scales.scale(slot, frozen)?);
        let statistics = self.recorder.statistics(measures);
        x.cast(Fp8Output { format, scale: scale.of_cast(), copies, statistics, slot: slot.index() })
    }

    /// Casts F32 values with one scale like [`Casts::quantize_into`]. The values are first rounded to `dtype`.
    pub fn quantize_rounded_into(
        &mut self,
        slot: Slot,
        frozen: &FrozenScale,
        x: &Tensor,
        dtype: DType,
        into: &mut QuantizedTensor,
    ) -> Result<()> {
        match self.scales.scale(slot, frozen)?.of_cast() {
            ops::CastScale::Given(scale) => {
                Ok(ops::quantize_rounded_into(x, dtype, scale, into, self.statistics(), slot.index())?)
            }
            ops::CastScale::Own(..) => unreachable!("a slice is cast by the one scale of its parameter"),
        }
    }

    /// Casts a value like [`Casts::quantize`], into the codes of an earlier cast.
    pub fn quantize_into(
        &mut self,
        slot: Slot,
        frozen: &FrozenScale,
        x: &Tensor,
        into: &mut QuantizedTensor,
    ) -> Result<()> {
        let scale = self.scales.scale(slot, frozen)?;
        Ok(ops::quantize_into(x, scale.of_cast(), into, self.statistics(), slot.index())?)
    }
}

fn codes_of(produced: Produced) -> QuantizedTensor {
    produced.fp8().expect("an FP8 output gives codes")
}
