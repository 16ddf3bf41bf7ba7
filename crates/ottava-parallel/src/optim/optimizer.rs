//! The interface of optimizers: states by parameter, and an update of parameters whose tensors are on the device.

use ottava_common::error::Result;
use ottava_recipe::param::{Grad, Master, Param, UpdateCast, Weights};
use ottava_recipe::scaling::Casts;
use ottava_tensor::Tensor;
use ottava_tensor::ops::global_norm;

/// Updates the weights of a model from their gradients.
///
/// Parameters are numbered in the order of the model. A process updates the whole of a parameter or a slice, and has the states of the same
/// elements, with the shape [`Param::update_shape`]. An optimizer does not deal with ranks: its gradients are already reduced.
pub trait Optimizer {
    /// Updates done so far.
    fn steps(&self) -> u64;

    /// Sets the number of updates, from a checkpoint.
    fn set_steps(&mut self, steps: u64);

    /// Counts a step and sets its scalars, before its work is enqueued. Gradients contain the factor `gradient_scale`.
    fn begin_step(&mut self, learning_rate: f64, gradient_scale: f64) -> Result<()>;

    /// Undoes the count of a step that changed nothing because its gradients were not finite.
    fn skip_step(&mut self) {
        self.set_steps(self.steps() - 1);
    }

    /// The states of all parameters, in the order of the model, for checkpoints.
    fn states(&mut self) -> Vec<Vec<StateTensor<'_>>>;

    /// Whether [`Optimizer::update`] casts the new weights as [`Updated::cast`] says. If not, they are cast after it.
    fn fuses_casts(&self) -> bool {
        false
    }

    /// The number of amaxes that the update of a parameter needs before it writes.
    fn amaxes_of(&self, _param: &Param) -> usize {
        0
    }

    /// Computes the amaxes of what [`Optimizer::update`] will store, over the elements that this process updates, and merges them into
    /// [`Updated::amaxes`] by maximum. Changes nothing else.
    fn find_amaxes(&mut self, _group: &mut [Updated], _norm: &Tensor) -> Result<()> {
        Ok(())
    }

    /// Whether the update of `param` transforms whole matrices, which are the tensors of its shards. Such an update has three phases:
    /// [`Optimizer::directions`], [`Optimizer::transform`] of each matrix, and [`Optimizer::update`].
    fn transforms(&self, _param: &Param) -> bool {
        false
    }

    /// Updates the states of `group`, whose updates transform matrices, and sets [`Updated::direction`].
    fn directions(&mut self, _group: &mut [Updated], _norm: &Tensor) -> Result<()> {
        Ok(())
    }

    /// The transform of a whole matrix `[R, C]` of a direction, BF16.
    fn transform(&self, direction: &Tensor) -> Result<Tensor> {
        Ok(direction.clone())
    }

    /// Updates the weights and states of `group`, whose tensors are on the device, from gradients with the global `norm`, F32 `[1]`. A norm
    /// that is not finite changes nothing.
    fn update(&mut self, group: &mut [Updated], casts: &mut Casts, norm: &Tensor) -> Result<()>;
}

/// A parameter in an update.
pub struct Updated<'a, 'p> {
    /// The parameter.
    pub param: &'a mut &'p mut Param,
    /// Its number in the model.
    pub index: usize,
    /// F32 `[n]`, if [`Optimizer::amaxes_of`] is `n` and not 0.
    pub amaxes: Option<&'a mut Tensor>,
    /// How the update casts the new weights.
    pub cast: UpdateCast,
    /// The direction of the update, BF16 in the shape of the update, of a parameter that the optimizer [transforms](Optimizer::transforms):
    /// set by [`Optimizer::directions`], and transformed before [`Optimizer::update`].
    pub direction: Option<Tensor>,
}

/// A tensor of an optimizer for one parameter.
pub struct StateTensor<'a> {
    /// Its name, without the name of the parameter.
    pub kind: &'static str,
    /// What one of its values belongs to.
    pub per: Per,
    /// The values of the parameter, or of a slice of it.
    pub tensor: &'a mut Tensor,
}

/// What one value of an optimizer's tensor belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Per {
    /// An element of the parameter.
    Element,
    /// A group of [`GROUP`](ottava_tensor::ExpandedTensor::GROUP) elements of a row, which has two values.
    Group,
    /// The whole parameter, so all its slices have the same value.
    Parameter,
}

/// The master weights of a parameter, and its `states` from [`Optimizer::states`].
pub fn optimizer_tensors<'a>(weights: &'a mut Weights, states: Vec<StateTensor<'a>>) -> Vec<StateTensor<'a>> {
    read_and_optimizer_tensors(weights, states).1
}

/// The weights that layers read, if they are stored, and [`optimizer_tensors`].
pub fn read_and_optimizer_tensors<'a>(
    weights: &'a mut Weights,
    states: Vec<StateTensor<'a>>,
) -> (Option<&'a mut Tensor>, Vec<StateTensor<'a>>) {
    use Per::{Element, Parameter};
    let (read, master) = weights.tensors_mut();
    let masters = match master {
        None => vec![],
        Some(Master::Full(master)) => vec![("master", Element, master)],
        Some(Master::Scaled(master)) => {
            vec![("master", Element, &mut master.values), ("master_scale_inv", Parameter, &mut master.scale_inv)]
        }
        Some(Master::Rest(rest)) => vec![("master_rest", Element, rest)],
    };
    let masters = masters.into_iter().map(|(kind, per, tensor)| StateTensor { kind, per, tensor });
    (read, masters.chain(states).collect())
}

/// The norm of all gradients as one vector, F32 `[1]`.
pub fn grad_norm(params: &[&mut Param]) -> Result<Tensor> {
    let grads: Vec<_> = params.iter().filter_map(|param| param.gradient.get()).map(Grad::read).collect();
    Ok(global_norm(&grads)?)
}
