//! Which ranks share the scale of a cast.

use ottava_tensor::comm::Axis;
use std::fmt;

/// The ranks whose amaxes make the scale of a cast: at least those that divide its tensor, since they read each other's codes or add what
/// they make of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AmaxGroup {
    /// Each rank by itself.
    Own,
    /// The ranks that differ in their coordinates of these axes alone.
    Over(&'static [Axis]),
}

impl AmaxGroup {
    /// Of activations and gradients, whose rows and tokens these axes divide, and of weights, whose slices they divide under ZeRO.
    pub const DATA: AmaxGroup = AmaxGroup::Over(&[Axis::Data, Axis::Context]);
}

impl fmt::Display for AmaxGroup {
    /// As "data x context".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AmaxGroup::Own => f.write_str("each rank by itself"),
            AmaxGroup::Over(axes) => {
                f.write_str(&axes.iter().map(|axis| axis.as_str()).collect::<Vec<_>>().join(" x "))
            }
        }
    }
}
