//! Norms of heads between the projection and attention, and their weights.

use ottava_common::error::Result;
use ottava_recipe::layer_ranks::LayerRanks;
use ottava_recipe::param::{Builder, Param};
use ottava_tensor::Tensor;
use ottava_tensor::ops::{cast, real_type};

/// A norm of heads between the projection and attention.
pub(super) trait NormOfHeads {
    /// Returns the normalised heads of projected rows.
    fn forward(&self, qkv: &Tensor, ranks: &dyn LayerRanks) -> Result<Tensor>;

    /// Returns the gradient by the input `qkv` of [`NormOfHeads::forward`]. Adds to the gradients of the weights.
    fn backward(&mut self, dy: &Tensor, qkv: &Tensor, ranks: &dyn LayerRanks) -> Result<Tensor>;

    /// Calls `visit` for each parameter, always in the same order.
    fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param));

    /// Calls `visit` for each parameter mutably, in the order of [`NormOfHeads::parameters`].
    fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param));
}

/// The weight of the norm of neighbouring heads.
pub(super) enum Weight {
    /// `[D]`, or `[H·D]` for heads with weights of their own.
    Trained(Box<Param>),
    /// Ones `[D]`, for a norm without weights.
    Ones(Tensor),
}

impl Weight {
    /// Returns the weight of a norm without weights.
    pub fn ones(build: &Builder, head_dim: usize) -> Result<Weight> {
        let ones = Tensor::from_slice(build.device, &[head_dim], &vec![1f32; head_dim])?;
        Ok(Weight::Ones(cast(&ones, build.recipe.compute)?))
    }

    pub fn value(&self) -> Result<Tensor> {
        match self {
            Weight::Trained(param) => Ok(param.weights.value()?),
            Weight::Ones(ones) => Ok(ones.clone()),
        }
    }

    /// Returns the gradient of the weight. The gradient of a weight that is not trained is zeros in `unread`.
    pub fn gradient<'a>(&'a mut self, unread: &'a mut Option<Tensor>) -> Result<&'a mut Tensor> {
        match self {
            Weight::Trained(param) => param.grad_or_unread(unread),
            Weight::Ones(ones) => {
                Ok(unread.insert(Tensor::zeros(ones.device(), ones.shape(), real_type(ones.dtype()))?))
            }
        }
    }

    pub fn param(&self) -> Option<&Param> {
        match self {
            Weight::Trained(param) => Some(param.as_ref()),
            Weight::Ones(_) => None,
        }
    }

    pub fn param_mut(&mut self) -> Option<&mut Param> {
        match self {
            Weight::Trained(param) => Some(param.as_mut()),
            Weight::Ones(_) => None,
        }
    }
}
