//! Reduces the amaxes of a step over the ranks that share scales.

use crate::Ranks;
use ottava_common::error::Result;
use ottava_recipe::scaling::{AmaxGroup, ScalingState};
use ottava_tensor::comm::{Group, Pending, Reduce};
use ottava_tensor::{DType, Tensor};
use std::mem;

#[cfg(test)]
mod tests;

/// The reductions of the amaxes of a step that are in progress.
pub(super) struct Amaxes(Vec<Merge>);

/// The reduction of the slots that the same ranks share.
struct Merge {
    slots: Slots,
    pending: Pending,
}

enum Slots {
    All,
    Some(Vec<usize>),
}

impl Amaxes {
    /// Starts one maximum per group of ranks that share scales. Usually all casts have the same group, and then no copy is needed.
    pub(super) fn merge(scaling: &mut ScalingState, ranks: &Ranks) -> Result<Amaxes> {
        let mut groups: Vec<(&Group, Vec<usize>)> = Vec::new();
        for (slot, group) in scaling.scales().amax_groups().iter().enumerate() {
            let AmaxGroup::Over(axes) = group else { continue };
            let group = ranks.group(axes);
            match groups.iter_mut().find(|(other, _)| std::ptr::eq(*other, group)) {
                Some((_, slots)) => slots.push(slot),
                None => groups.push((group, vec![slot])),
            }
        }
        let amaxes = scaling.amaxes_mut();
        let mut merges = Vec::new();
        for (group, slots) in groups.into_iter().filter(|(group, _)| group.size() > 1) {
            let (slots, buffer) = if slots.len() == amaxes.len() {
                let empty = Tensor::empty(amaxes.device(), &[0], DType::F32)?;
                (Slots::All, mem::replace(amaxes, empty))
            } else {
                let mut buffer = Tensor::empty(amaxes.device(), &[slots.len()], DType::F32)?;
                for (at, &slot) in slots.iter().enumerate() {
                    buffer.copy_from(at, &amaxes.rows(slot, slot + 1)?)?;
                }
                (Slots::Some(slots), buffer)
            };
            merges.push(Merge { slots, pending: group.all_reduce("amaxes of casts", Reduce::Max, buffer)? });
        }
        Ok(Amaxes(merges))
    }

    /// Waits for the reductions, and writes the results back.
    pub(super) fn finish(self, scaling: &mut ScalingState) -> Result<()> {
        let amaxes = scaling.amaxes_mut();
        for Merge { slots, pending } in self.0 {
            let merged = pending.wait()?;
            match slots {
                Slots::All => *amaxes = merged,
                Slots::Some(slots) => {
                    for (at, slot) in slots.into_iter().enumerate() {
                        amaxes.copy_from(slot, &merged.rows(at, at + 1)?)?;
                    }
                }
            }
        }
        Ok(())
    }
}
