//! The interface of optimizers: states by parameter, and an update of parameters whose tensors are on the device.

use ottava_common::error::Result;
use ottava_recipe::param::{Grad, Master, Param, UpdateCast, Weights};
use ottava_recipe::scaling::Casts;
use ottava_tensor::Tensor;
use ottava_tensor::ops::global_norm;

/// Updates the weights of a model from their gradients.
///
/// Parameters are numbered in the order of the model. A process updates a whole parameter or a slice, and has the states of the same
/// elements in the shape [`Param::update_shape`]. An optimizer does not deal with ranks: its gradients are already reduced.
pub trait Optimizer {
    /// Returns the number of past updates.
    fn steps(&self) -> u64;

    /// Sets the number of updates, from a checkpoint.
    fn set_steps(&mut self, steps: u64);

    /// Counts a step and sets its scalars, before the work of the step is enqueued. Gradients contain the factor `gradient_scale`.
    fn begin_step(&mut self, learning_rate: f64, gradient_scale: f64) -> Result<()>;

    /// Undoes the count of a step that changed nothing because its gradients were not finite.
    fn skip_step(&mut self) {
        self.set_steps(self.steps() - 1);
    }

    /// Returns the states of all parameters, in the order of the model, for checkpoints.
    fn states(&mut self) -> Vec<Vec<StateTensor<'_>>>;

    /// Returns whether [`Optimizer::update`] casts the new weights as [`Updated::cast`] describes. If not, they are cast after the update.
    fn fuses_casts(&self) -> bool {
        false
    }

    /// Returns the number of amaxes that the update of a parameter needs before it writes.
    fn amaxes_of(&self, _param: &Param) -> usize {
        0
    }

    /// Computes the amaxes of the values that [`Optimizer::update`] will store, over the elements that this process updates. Merges them into
    /// [`Updated::amaxes`] by maximum, and changes nothing else.
    fn find_amaxes(&mut self, _group: &mut [Updated], _norm: &Tensor) -> Result<()> {
        Ok(())
    }

    /// Returns whether the update of `param` transforms whole matrices, which are the tensors of its shards. Such an update calls
    /// [`Optimizer::directions`], then [`Optimizer::transform`] for each matrix, then [`Optimizer::update`].
    fn transforms(&self, _param: &Param) -> bool {
        false
    }

    /// Updates the states of `group` and sets [`Updated::direction`]. All parameters of `group` have updates that transform matrices.
    fn directions(&mut self, _group: &mut [Updated], _norm: &Tensor) -> Result<()> {
        Ok(())
    }

    /// Returns the transform of a whole matrix `[R, C]` of a direction, BF16.
    fn transform(&self, direction: &Tensor) -> Result<Tensor> {
        Ok(direction.clone())
    }

    /// Updates the weights and states of `group`, whose tensors are on the device, from gradients with the global `norm`, F32 `[1]`. If the norm
    /// is not finite, nothing changes.
    fn update(&mut self, group: &mut [Updated], casts: &mut Casts, norm: &Tensor) -> Result<()>;
}

/// A parameter in an update.
pub struct Updated<'a, 'p> {
    /// The parameter.
    pub param: &'a mut &'p mut Param,
    /// The index of the parameter in the model.
    pub index: usize,
    /// The amaxes, F32 `[n]`. `None` if [`Optimizer::amaxes_of`] is 0, else `n` is this number.
    pub amaxes: Option<&'a mut Tensor>,
    /// The casts of the new weights in the update.
    pub cast: UpdateCast,
    /// The direction of the update, BF16 in the shape of the update, if the optimizer [transforms](Optimizer::transforms) the parameter.
    /// [`Optimizer::directions`] sets it, and it is transformed before [`Optimizer::update`].
    pub direction: Option<Tensor>,
}

/// A tensor of an optimizer for one parameter.
pub struct StateTensor<'a> {
    /// The name of the state, without the name of the parameter.
    pub kind: &'static str,
    /// The elements that one value belongs to.
    pub per: Per,
    /// The values for the parameter or for a slice of the parameter.
    pub tensor: &'a mut Tensor,
}

/// The elements that one value of an optimizer's tensor belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Per {
    /// One element of the parameter.
    Element,
    /// A group of [`GROUP`](ottava_tensor::ExpandedTensor::GROUP) elements of a row. A group has two values.
    Group,
    /// The whole parameter. All its slices have the same value.
    Parameter,
}

/// Returns the master weights of a parameter, and its `states` from [`Optimizer::states`].
pub fn optimizer_tensors<'a>(weights: &'a mut Weights, states: Vec<StateTensor<'a>>) -> Vec<StateTensor<'a>> {
    read_and_optimizer_tensors(weights, states).1
}

/// Returns the weights that layers read, if they are stored, and [`optimizer_tensors`].
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

/// Returns the norm of all gradients as one vector, F32 `[1]`.
pub fn grad_norm(params: &[&mut Param]) -> Result<Tensor> {
    let grads: Vec<_> = params.iter().filter_map(|param| param.gradient.get()).map(Grad::read).collect();
    Ok(global_norm(&grads)?)
}
