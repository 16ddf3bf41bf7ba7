//! The averages of weights in the place of the weights.

use crate::optim::{EMA, Optimizer};
use crate::{Partition, Shared};
use ottava_common::error::Result;
use ottava_models::Decoder;
use ottava_tensor::comm::Reduce;
use ottava_tensor::{DType, HostTransfer, Tensor};

impl Partition {
    /// Runs `work` with a `model` whose trained weights are the averages that `optimizer` keeps, and puts the weights back. `work` must not update the
    /// model. All ranks call it together.
    ///
    /// The weights keep their memory, and are cast again as a resumed run casts them, so the model has the same bits as before. Captured steps are no
    /// longer valid, since the gathers of a step depend on the weights that are gathered before.
    pub fn with_averages<T>(
        &self,
        model: &mut Decoder,
        optimizer: &mut dyn Optimizer,
        work: impl FnOnce(&mut Decoder, &mut dyn Optimizer) -> Result<T>,
    ) -> Result<T> {
        let device = model.device().clone();
        let scope = device.scope("average of the weights");
        let mut before = Vec::new();
        for (param, states) in model.parameters().into_iter().zip(optimizer.states()) {
            let average = states.into_iter().find(|state| state.kind == EMA);
            let Some(average) = average else {
                before.push(None);
                continue;
            };
            let mut full = Tensor::empty(&device, &[average.tensor.len()], DType::F32)?;
            HostTransfer::upload_into(&mut full, &[(&*average.tensor, 0)])?.wait()?;
            let stored = param.replace(full.reshape(&param.update_shape())?, &mut |name, amax| {
                Ok(self.ranks().sharing(Shared::Elements).all_reduce(name, Reduce::Max, amax)?.wait()?)
            })?;
            before.push(Some(stored));
        }
        drop(scope);
        self.cast_again(model)?;
        let done = work(model, optimizer);
        for (param, stored) in model.parameters().into_iter().zip(before) {
            stored.into_iter().for_each(|stored| param.put_back(stored));
        }
        self.cast_again(model)?;
        done
    }

    /// Casts all weights, and measures only these casts for the next step.
    fn cast_again(&self, model: &mut Decoder) -> Result<()> {
        model.scaling().forget_amaxes()?;
        self.quantize_weights(model)
    }
}
