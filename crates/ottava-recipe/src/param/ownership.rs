//! The elements of a parameter that a process updates: all elements, a slice, or none.

use super::cast::slice::matrix_rows;
use crate::storage::States;
use ottava_tensor::{ExpandedTensor, MemoryKind};
use std::ops::Range;

/// The elements of a parameter that this process updates, and where the weights that layers read are between passes.
pub(super) enum Ownership {
    /// All elements. If they are in host memory, each pass copies the weights to the device.
    Whole(MemoryKind),
    /// A slice. Other ranks update the rest. Each pass gathers the weights.
    Sliced(Slice),
    /// No elements, because the parameter is frozen: it has no gradient, no master weights and no moments. `None` means that ranks have divided the
    /// weights, and that each pass gathers them.
    Frozen(Option<MemoryKind>),
}

/// The elements whose master weights and moments this process has.
pub(super) struct Slice {
    pub(super) elements: Range<usize>,
    /// Whether ranks gather the codes of the slices' cast. Otherwise ranks gather the weights.
    pub(super) codes: bool,
    /// Whether the gathered data is in host memory between passes.
    pub(super) offloads: bool,
    /// Whether an update can also cast the slice.
    pub(super) is_cast_by_update: bool,
}

impl Slice {
    /// Returns whether the weights are stored although they can be computed from a master. Ranks gather offloaded weights from where they are stored.
    pub(super) fn stores_value(&self) -> bool {
        self.offloads && !self.codes
    }

    /// Returns the shape of the slice's master weights and moments. Groups of moments lie within rows.
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
