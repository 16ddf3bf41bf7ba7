//! The norm of all gradients, if ranks divide the model.
//!
//! `Partition::grad_norm` adds the squares in the order of the model. A tied head in another stage has a copy of the embedding's table
//! (`HeadWeight::Copy`). Before this sum, `SumTied` adds the copy's gradient to the table's gradient. `tests/promises/parallel/pipeline.rs` compares
//! the bits with one rank.

use crate::pipeline::StagePlaces;
use crate::{Partition, Shared, optim};
use ottava_common::error::Result;
use ottava_models::Decoder;
use ottava_recipe::param::{Grad, Param, ParamId};
use ottava_tensor::comm::{Axis, Reduce};
use ottava_tensor::ops::{Gradient, root_of_sum, sum_of_squares, sums_of_squares};
use ottava_tensor::{DType, Tensor};

impl Partition {
    /// Returns the global norm of the reduced gradients of `model` on all ranks, F32 `[1]`.
    ///
    /// Squares are added in F64. Without slices they are added in the order of the model, so the number of ranks changes no bit on the CPU.
    pub fn grad_norm(&self, model: &mut Decoder) -> Result<Tensor> {
        let divides = self.divides() || self.ranks().group(&[Axis::Tensor, Axis::Expert]).size() > 1;
        match (divides, self.ranks().pipeline().size()) {
            (false, 1) => optim::grad_norm(&model.parameters()),
            (false, _) => self.norm_of_stages(model),
            (true, _) => self.norm_of_parts(model),
        }
    }

    /// Adds the squares of each rank's slices and parts of tensors, and then the sums of the ranks in the order of the ranks.
    fn norm_of_parts(&self, model: &mut Decoder) -> Result<Tensor> {
        let (ranks, copy) = (self.ranks().sharing(Shared::Model), model.copy());
        let is_first_of_tensors = self.ranks().group(&[Axis::Tensor]).rank() == 0;
        let mut sums = Tensor::zeros(model.device(), &[ranks.size()], DType::F64)?;
        let params = model.parameters();
        // Elements that several ranks have are counted once.
        let is_first = |param: &Param| match param.is_sliced() {
            true => self.ranks().slice_replicas().rank() == 0,
            false => self.ranks().replicas(param).rank() == 0,
        };
        let counts = |param: &&&mut Param| is_first(param) && (!param.identity.is_whole() || is_first_of_tensors);
        let counted: Vec<_> = params.iter().filter(counts).collect();
        let (replicated, counted): (Vec<_>, Vec<_>) =
            counted.into_iter().partition(|param| param.identity.replicas() > 1);
        let mut pieces = Vec::new();
        for param in replicated {
            let Some(grad) = param.gradient.get() else { continue };
            let grad = grad.values()?;
            let grad = grad.reshape(&[grad.len()])?;
            for piece in param.identity.elements_of(param.slice(), |shard| shard.replica.rank == 0) {
                pieces.push(grad.rows(piece.start, piece.end)?);
            }
        }
        let mut grads = gradients(counted.into_iter().map(|param| &**param), copy);
        grads.extend(pieces.iter().map(Gradient::Plain));
        if !grads.is_empty() {
            sums.copy_from(ranks.rank(), &sum_of_squares(&grads)?)?;
        }
        Ok(root_of_sum(&ranks.all_gather("gradient norm", sums)?.wait()?)?)
    }

    /// Writes each rank's partial sums into a vector for all stages, and adds the vectors.
    fn norm_of_stages(&self, model: &mut Decoder) -> Result<Tensor> {
        let (device, copy) = (model.device().clone(), model.copy());
        let stages = model.parameters_by_stage();
        let of_stage = |params: &Vec<&mut Param>| {
            let grads = gradients(params.iter().map(|param| &**param), copy);
            (!grads.is_empty()).then(|| sums_of_squares(&grads)).transpose()
        };
        let partial = stages.iter().map(of_stage).collect::<Result<Vec<_>, _>>()?;
        let mut places = self.norm_places().borrow_mut();
        let StagePlaces { starts, total } = match &mut *places {
            Some(places) => places,
            // The first step is not captured, so ranks can exchange counts.
            none => {
                let counts: Vec<usize> = partial.iter().map(|sums| sums.as_ref().map_or(0, Tensor::len)).collect();
                none.insert(self.ranks().stage_places("partial sums of the norm", &counts)?)
            }
        };
        let mut sums = Tensor::zeros(&device, &[*total], DType::F64)?;
        for (start, partial) in starts.iter().zip(&partial) {
            partial.iter().try_for_each(|partial| sums.copy_from(*start, partial))?;
        }
        // Other ranks have zeros in the places of this rank's stages.
        let group = self.ranks().group(&[Axis::Pipeline]);
        Ok(root_of_sum(&group.all_reduce("gradient norm", Reduce::Sum, sums)?.wait()?)?)
    }
}

/// Returns the gradients of `params`. The head's `copy` of the embedding's table is left out, because its gradient is counted with the table.
fn gradients<'a>(params: impl Iterator<Item = &'a Param>, copy: Option<ParamId>) -> Vec<Gradient<'a>> {
    let counted = params.filter(|param| Some(param.identity.id) != copy);
    counted.filter_map(|param| param.gradient.get()).map(Grad::read).collect()
}
