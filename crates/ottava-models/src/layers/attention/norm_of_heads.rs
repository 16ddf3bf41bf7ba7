//! Norms of heads between the projection and attention.

use ottava_common::error::Result;
use ottava_recipe::layer_ranks::LayerRanks;
use ottava_recipe::param::Param;
use ottava_tensor::Tensor;

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
