//! Saves and restores the recurrent states of running requests, where `StateMarks` says.

use crate::batching::Engine;
use crate::block_pool::BLOCK_SIZE;
use crate::blocks::Pools;
use crate::sequence::Sequence;
use crate::state_marks::Backup;
use ottava_common::error::Result;

impl Sequence {
    /// Returns the place to which the states after the computed tokens must be copied, if they are to be saved.
    fn place_of_states(&mut self, pools: &mut Pools) -> Option<usize> {
        if !self.states.saves_at(self.computed) {
            return None;
        }
        let key = self.key_of_block(self.computed / BLOCK_SIZE - 1);
        self.states.place(self.computed, key, &mut pools.saved)
    }
}

impl Engine {
    /// Saves the states of a running request if they are to be saved after its computed tokens. The pass must have ended with these tokens.
    pub(super) fn save_states(&mut self, at: usize) -> Result<()> {
        let sequence = &mut self.running[at];
        match sequence.place_of_states(&mut self.pools) {
            Some(place) => self.cache.save_states(sequence.blocks.slot(), place),
            None => Ok(()),
        }
    }

    /// Saves the states of a running request before it computes `proposed` proposed tokens. Returns whether there is a place for them. Without recurrent
    /// layers, none is needed.
    pub(super) fn back_up_states(&mut self, at: usize, proposed: usize) -> Result<bool> {
        if !self.pools.has_states() {
            return Ok(true);
        }
        let sequence = &mut self.running[at];
        let Some(place) = self.pools.saved.take() else { return Ok(false) };
        let (before, after) = (sequence.computed, sequence.tokens.len() + proposed);
        sequence.states.backup = Some(Backup { place, before, after });
        self.cache.save_states(sequence.blocks.slot(), place)?;
        Ok(true)
    }

    /// Returns the states of requests with rejected tokens to the token before the pass. These requests compute the later tokens again.
    pub(super) fn settle_states(&mut self) -> Result<()> {
        for at in 0..self.running.len() {
            let sequence = &mut self.running[at];
            let Some(Backup { place, before, after }) = sequence.states.backup.take() else { continue };
            self.pools.saved.put_back(place);
            if sequence.computed == after {
                self.save_states(at)?;
                continue;
            }
            self.cache.restore_states(place, sequence.blocks.slot())?;
            sequence.computed = before;
            sequence.states.repeated = sequence.pending() - 1;
        }
        Ok(())
    }
}
