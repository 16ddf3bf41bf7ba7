//! The residual stream of a model, and what its layers have in common.

use super::{Names, NormConfig};
use ottava_tensor::Tensor;
use ottava_tensor::ops::RopePairs;

/// The residual stream of a model, and the settings that all of its layers share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stream {
    /// Width `C` of the residual stream.
    pub channels: usize,
    /// The factor of the output of each branch, before it is added to the stream.
    pub residual_scale: f32,
    /// The norms of branches, of queries and keys, and before the head.
    pub norm: NormConfig,
    /// Names of tensors.
    pub names: &'static Names,
    /// Standard deviation of initial weights.
    pub std: f32,
}

/// The rotary positions of an attention layer.
#[derive(Clone)]
pub struct Rotary {
    /// Cosines and sines by position, which layers share.
    pub table: Tensor,
    /// The elements of a head that are rotated together.
    pub pairs: RopePairs,
}
