//! What a process updates of a parameter: all elements, a slice, or none.

use super::cast::slice::matrix_rows;
use crate::storage::States;
use ottava_tensor::{ExpandedTensor, MemoryKind};
use std::ops::Range;

/// The elements of a parameter that this process updates, and where the weights that layers read are between passes.
pub(super) enum Ownership {
    /// All elements. Each pass copies weights in host memory to the device.
    Whole(MemoryKind),
    /// A slice; other ranks update the rest. Each pass gathers the weights.
    Sliced(Slice),
    /// None, since the parameter is frozen: it has no gradient, no master weights and no moments. Without memory, ranks have divided the
    /// weights, and each pass gathers them.
    Frozen(Option<MemoryKind>),
}

/// The elements whose master weights and moments this process has.
pub(super) struct Slice {
    pub(super) elements: Range<usize>,
    /// Whether ranks gather the codes of their cast; otherwise ranks gather the weights.
    pub(super) codes: bool,
    /// Whether what ranks gather is in host memory between passes.
    pub(super) offloads: bool,
    /// Whether an update can cast them in the same pass.
    pub(super) is_cast_by_update: bool,
}

impl Slice {
    /// Whether its weights are stored although they can be computed from a master, since ranks gather them from where they are stored.
    pub(super) fn stores_value(&self) -> bool {
        self.offloads && !self.codes
    }

    /// The shape of its master weights and moments: groups of moments lie within rows.
    pub(super) fn shape(&self, states: States) -> Vec<usize> {
        const GROUP: usize = ExpandedTensor::GROUP;
        let elements = self.elements.len();
        match states {
            // A thread block processes at least one row.
            States::Coat => {
                let width = (0..=8).rev().map(|power| GROUP << power).find(|width| elements.is_multiple_of(*width));
                let width = width.unwrap_or(GROUP);
                vec![elements / width, width]
            }
            _ if self.is_cast_by_update => vec![matrix_rows(elements), elements / matrix_rows(elements)],
            _ => vec![elements],
        }
    }
}
