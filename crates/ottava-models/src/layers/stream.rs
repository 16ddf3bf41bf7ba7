//! The residual stream of a model, and the settings that all of its layers share.

use super::{Names, NormConfig};
use ottava_tensor::Tensor;
use ottava_tensor::ops::RopePairs;

/// The residual stream of a model, and the settings that all of its layers share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stream {
    /// The width `C` of the residual stream.
    pub channels: usize,
    /// The factor that multiplies the output of each branch before it is added to the stream.
    pub residual_scale: f32,
    /// The settings of all norms: norms of branches, of queries and keys, and before the head.
    pub norm: NormConfig,
    /// The names of tensors.
    pub names: &'static Names,
    /// The standard deviation of initial weights.
    pub std: f32,
}

/// The tables of positions that an attention layer reads.
#[derive(Clone, Default)]
pub struct Positions {
    /// The rotary positions. `None` if heads are not rotated.
    pub rotary: Option<Rotary>,
    /// The factors of queries by position ([`factor_table`](ottava_tensor::ops::factor_table)), if they grow. Layers share this table.
    pub growth: Option<Tensor>,
}

/// The rotary positions of an attention layer.
#[derive(Clone)]
pub struct Rotary {
    /// The cosines and sines by position. Layers share this table.
    pub table: Tensor,
    /// The elements of a head that are rotated as a pair.
    pub pairs: RopePairs,
}
