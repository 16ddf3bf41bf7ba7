//! The ranks that share the scale of a cast.

use ottava_tensor::comm::Axis;
use std::fmt;

/// The ranks that reduce their amaxes to one scale. They include the ranks that divide the tensor, because these ranks read each other's codes or
/// add products of the codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AmaxGroup {
    /// Each rank has its own scale.
    Own,
    /// The ranks that differ only in their coordinates of these axes.
    Over(&'static [Axis]),
}

impl AmaxGroup {
    /// The group for activations and gradients, whose rows and tokens these axes divide, and for weights, which ZeRO divides over these axes.
    pub const DATA: AmaxGroup = AmaxGroup::Over(&[Axis::Data, Axis::Context]);
    /// The group for the same tensors if ranks also divide the tensor itself. The scale belongs to the whole tensor.
    pub const TENSOR: AmaxGroup = AmaxGroup::Over(&[Axis::Data, Axis::Context, Axis::Tensor]);

    /// The group for the casts of experts that the ranks of expert x tensor divide. All experts share one scale.
    pub const EXPERTS: AmaxGroup = AmaxGroup::Over(&[Axis::Data, Axis::Context, Axis::Expert, Axis::Tensor]);

    /// Returns whether the ranks of `axis` share the scale.
    pub fn spans(self, axis: Axis) -> bool {
        matches!(self, AmaxGroup::Over(axes) if axes.contains(&axis))
    }
}

impl fmt::Display for AmaxGroup {
    /// Writes the axes, for example "data x context".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AmaxGroup::Own => f.write_str("no other ranks"),
            AmaxGroup::Over(axes) => {
                f.write_str(&axes.iter().map(|axis| axis.as_str()).collect::<Vec<_>>().join(" x "))
            }
        }
    }
}
