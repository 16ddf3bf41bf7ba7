//! Whole weights on each rank while a model draws completions. Ranks draw independently, so no pass of a draw can gather weights. All weights are
//! gathered before the draws.
//!
//! In ZeRO stages 1 and 2, ranks keep the buffers of gathered weights, and draws read these buffers. Two kinds of weights are copied: weights of
//! stage 3, because the next gather overwrites their buffers, and FP8 codes of weights that ranks gather as values. Between draws, steps use the
//! memory of the copies. A copy keeps its address, so CUDA graphs of draws stay valid.

use crate::{Exchange, Partition};
use ottava_common::error::Result;
use ottava_models::Decoder;
use ottava_recipe::mode::Mode;
use ottava_recipe::param::{Direction, ForwardWeight, Param, ParamId, Units};
use ottava_tensor::{Suspended, Tensor};
use std::collections::HashMap;

/// The copies of whole weights, for the parameters that ranks divide.
#[derive(Default)]
pub struct WholeWeights {
    /// The memory of the tensors of each copied weight.
    copies: HashMap<ParamId, Vec<Suspended>>,
}

/// A whole weight. While the model is lent, the weight that the parameter held before.
struct Whole {
    weight: ForwardWeight,
    is_copy: bool,
}

impl WholeWeights {
    /// Runs `work` with a `model` whose forward reads whole weights without a gather. `work` must not update the model. All ranks of `partition` call
    /// `lend` together.
    pub fn lend<T>(
        &mut self,
        model: &mut Decoder,
        partition: &Partition,
        work: impl FnOnce(&mut Decoder) -> Result<T>,
    ) -> Result<T> {
        if !partition.divides() {
            return work(model);
        }
        let mut whole = self.gather(model, partition)?;
        exchange(model, &mut whole);
        let done = work(model);
        exchange(model, &mut whole);
        for (param, whole) in whole.into_iter().filter(|(_, whole)| whole.is_copy) {
            self.copies.insert(param, whole.weight.into_tensors().map(Tensor::suspend).collect());
        }
        done
    }

    /// Gathers the weights unit by unit. The gather of the next unit overlaps with the copy of a unit.
    fn gather(&mut self, model: &mut Decoder, partition: &Partition) -> Result<HashMap<ParamId, Whole>> {
        let device = model.device().clone();
        let _scope = device.whole_scope("whole weights");
        let (units, scaling) = model.units_and_scaling();
        let shared = |unit: Vec<_>| unit.into_iter().map(|param: &mut Param| &*param).collect::<Vec<_>>();
        let units: Vec<_> = units.into_iter().map(shared).filter(|unit| !unit.is_empty()).collect();
        let (mut casts, mut gathers) = (scaling.casts(Mode::INFERENCE), Exchange::of_weights(partition));
        let mut all = HashMap::new();
        units.first().map_or(Ok(()), |first| gathers.start(first))?;
        for (at, unit) in units.iter().enumerate() {
            units.get(at + 1).map_or(Ok(()), |next| gathers.start(next))?;
            let loan = gathers.fetch(unit, Direction::Forward)?;
            for param in unit.iter().filter(|param| loan.has(param.identity.id)) {
                let mut weight = param.for_forward(&loan, &mut casts)?;
                let is_copy = !partition.keeps_gathered(param, weight.codes.is_some());
                if is_copy {
                    self.copy(param.identity.id, &mut weight)?;
                }
                all.insert(param.identity.id, Whole { weight, is_copy });
            }
        }
        Ok(all)
    }

    /// Replaces the tensors of `weight` by copies. Copies reuse the memory of the earlier copy of the weight, if there is one.
    fn copy(&self, param: ParamId, weight: &mut ForwardWeight) -> Result<()> {
        let earlier = self.copies.get(&param);
        for (number, tensor) in weight.tensors().enumerate() {
            let mut copy = match earlier.map(|copies| &copies[number]) {
                Some(earlier) => earlier.resume()?,
                None => Tensor::empty(tensor.device(), tensor.shape(), tensor.dtype())?,
            };
            copy.copy_from(0, tensor)?;
            *tensor = copy;
        }
        Ok(())
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
