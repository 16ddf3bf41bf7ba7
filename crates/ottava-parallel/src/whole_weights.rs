//! Weights that a model reads while it draws completions: whole on each rank, and cast.
//!
//! Ranks draw independently, so no pass of a draw can gather weights. All weights are gathered before the draws. In ZeRO stages 1 and 2, ranks keep the
//! buffers of gathered weights, and draws read these buffers. Two kinds of weights are copied: weights of stage 3, because the next gather overwrites
//! their buffers, and FP8 codes of weights that ranks gather as values.
//!
//! If no codes are stored (`memory.weight_codes`), each product of a step casts the weight that it reads. A draw reads each weight once for each token,
//! so weights are cast before the draws.
//!
//! Between draws, steps use the memory of copies and codes. They keep their addresses if nothing else lies there, so that CUDA graphs of draws stay valid.

use crate::{Exchange, Partition};
use ottava_common::error::Result;
use ottava_models::Decoder;
use ottava_recipe::mode::Mode;
use ottava_recipe::param::scopes::CODES;
use ottava_recipe::param::{Direction, ForwardWeight, Param, ParamId, SuspendedWeight, Units};
use std::collections::HashMap;

/// The name of copies in a dry run.
const WHOLE: &str = "whole weights";

/// What draws read in addition to the weights of a model, between draws.
#[derive(Default)]
pub struct WholeWeights {
    /// The memory of copies and codes, in the order of the parameters.
    suspended: Vec<(ParamId, SuspendedWeight)>,
    /// The products of the last draws that read values, as [`Scales::high_precision`](ottava_recipe::scaling::Scales::high_precision).
    high_precision: Vec<bool>,
}

/// A weight for draws. While the model is lent, the weight that the parameter held before.
struct Whole {
    weight: ForwardWeight,
    memory: Memory,
}

/// The memory of a weight for draws.
#[derive(Clone, Copy)]
enum Memory {
    /// Buffers that ranks keep.
    Gathered,
    /// A copy.
    Copied,
    /// Codes beside the values of the parameter.
    Cast,
}

/// The weights of one call of [`WholeWeights::lend`].
#[derive(Default)]
struct Lending {
    whole: HashMap<ParamId, Whole>,
    /// Memory of the last call that no weight has taken yet.
    memory: HashMap<ParamId, ForwardWeight>,
    /// Whether forward reads other tensors than in the last call.
    reads_others: bool,
}

impl WholeWeights {
    /// Runs `work` with a `model` whose forward reads whole weights without a gather, and stored codes. `work` also receives whether forward reads
    /// other tensors than in the last call, so that graphs of forward are no longer valid. `work` must not update the model. All ranks of `partition`
    /// call `lend` together.
    pub fn lend<T>(
        &mut self,
        model: &mut Decoder,
        partition: &Partition,
        work: impl FnOnce(&mut Decoder, bool) -> Result<T>,
    ) -> Result<T> {
        let high_precision = model.scaling().scales().high_precision();
        let mut lending = Lending { reads_others: high_precision != self.high_precision, ..Lending::default() };
        self.high_precision = high_precision;
        let device = model.device().clone();
        let scope = match partition.divides() {
            true => device.whole_scope(WHOLE),
            false => device.scope(CODES),
        };
        // All memory is taken before other tensors can lie there.
        for (param, suspended) in self.suspended.drain(..) {
            let (memory, has_moved) = suspended.resume()?;
            lending.memory.insert(param, memory);
            lending.reads_others |= has_moved;
        }
        drop(scope);
        if partition.divides() {
            lending.gather(model, partition)?;
        }
        lending.cast(model)?;
        let Lending { mut whole, reads_others, memory } = lending;
        // No weight has taken this memory.
        drop(memory);
        exchange(model, &mut whole);
        let done = work(model, reads_others);
        exchange(model, &mut whole);
        for param in model.all_parameters() {
            let id = param.identity.id;
            let own = match whole.remove(&id) {
                None | Some(Whole { memory: Memory::Gathered, .. }) => continue,
                Some(Whole { weight, memory: Memory::Copied }) => weight,
                Some(Whole { weight, memory: Memory::Cast }) => ForwardWeight { value: None, ..weight },
            };
            self.suspended.push((id, own.suspend()));
        }
        done
    }
}

impl Lending {
    /// Gathers the weights unit by unit. The gather of the next unit overlaps with the copy of a unit.
    fn gather(&mut self, model: &mut Decoder, partition: &Partition) -> Result<()> {
        let device = model.device().clone();
        let _scope = device.whole_scope(WHOLE);
        let (units, scaling) = model.units_and_scaling();
        let shared = |unit: Vec<_>| unit.into_iter().map(|param: &mut Param| &*param).collect::<Vec<_>>();
        let units: Vec<_> = units.into_iter().map(shared).filter(|unit| !unit.is_empty()).collect();
        let (mut casts, mut gathers) = (scaling.casts(Mode::INFERENCE), Exchange::of_weights(partition));
        units.first().map_or(Ok(()), |first| gathers.start(first))?;
        for (at, unit) in units.iter().enumerate() {
            units.get(at + 1).map_or(Ok(()), |next| gathers.start(next))?;
            let loan = gathers.fetch(unit, Direction::Forward)?;
            for param in unit.iter().filter(|param| loan.has(param.identity.id)) {
                let (id, weight) = (param.identity.id, param.for_forward(&loan, &mut casts)?);
                let whole = match partition.keeps_gathered(param, weight.codes.is_some()) {
                    true => Whole { weight, memory: Memory::Gathered },
                    false => Whole { weight: self.copy(id, &weight)?, memory: Memory::Copied },
                };
                self.whole.insert(id, whole);
            }
        }
        Ok(())
    }

    /// Casts the weights that each forward would cast.
    fn cast(&mut self, model: &mut Decoder) -> Result<()> {
        let (units, scaling) = model.units_and_scaling();
        let mut casts = scaling.casts(Mode::INFERENCE);
        for param in units.into_iter().flatten() {
            let id = param.identity.id;
            if !self.whole.contains_key(&id) && param.is_cast_by_forward(&casts) {
                let weight = param.cast_for_passes(self.take(id), &mut casts)?;
                self.whole.insert(id, Whole { weight, memory: Memory::Cast });
            }
        }
        Ok(())
    }

    /// Copies a weight into memory of the last call, if there is memory for such a weight.
    fn copy(&mut self, param: ParamId, weight: &ForwardWeight) -> Result<ForwardWeight> {
        let mut copy = match self.take(param).filter(|memory| memory.has_parts_of(weight)) {
            Some(memory) => memory,
            None => weight.empty_like()?,
        };
        for (to, from) in copy.tensors_mut().zip(weight.tensors()) {
            to.copy_from(0, from)?;
        }
        Ok(copy)
    }

    /// Takes the memory of the last call for a weight.
    fn take(&mut self, param: ParamId) -> Option<ForwardWeight> {
        let memory = self.memory.remove(&param);
        self.reads_others |= memory.is_none();
        memory
    }
}

/// Swaps the weights that forward reads with the weights in `whole`.
fn exchange(model: &mut Decoder, whole: &mut HashMap<ParamId, Whole>) {
    for param in model.all_parameters() {
        if let Some(whole) = whole.get_mut(&param.identity.id) {
            param.exchange(&mut whole.weight);
        }
    }
}
