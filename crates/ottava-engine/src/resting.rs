//! Resting requests: the next step does not draw a token of them. A request rests while its mask is not computed, so a slow grammar delays only its
//! own requests.

use crate::batching::Engine;
use crate::masks::PATIENCE;
use crate::request::RequestId;
use crate::sequence::Sequence;
use crate::update::Call;
use std::time::Instant;

impl Engine {
    /// Lets these requests rest in the next step. They keep their memory and their places in the batch.
    pub(super) fn rest(&mut self, ids: Vec<RequestId>) {
        for sequence in self.running.iter_mut().chain(&mut self.waiting) {
            sequence.rests |= ids.contains(&sequence.id);
        }
        self.part.tell(|| Call::Rest(ids));
    }

    /// Takes the computed masks, and lets requests without a mask rest. Waits at most [`PATIENCE`], and only if a quick mask is expected or no
    /// running request can continue.
    pub(super) fn await_masks(&mut self) {
        for sequence in self.running.iter_mut().chain(&mut self.waiting) {
            if let Some(constraint) = &mut sequence.constraint {
                self.masks.begin(sequence.id, constraint);
            }
        }
        let start = Instant::now();
        while let Some((id, mask)) = self.masks.next(self.mask_deadline(start)) {
            let mut all = self.running.iter_mut().chain(&mut self.waiting).chain(&mut self.held);
            // The request may have ended in the meantime.
            if let Some(constraint) = all.find(|sequence| sequence.id == id).and_then(|of| of.constraint.as_mut()) {
                constraint.set(mask);
            }
        }
        let all = self.running.iter().chain(&self.waiting);
        let resting: Vec<RequestId> =
            all.filter(|sequence| sequence.awaits_mask()).map(|sequence| sequence.id).collect();
        if !resting.is_empty() {
            self.rest(resting);
        }
    }

    /// Returns the deadline for the masks of a step that begins at `start`.
    fn mask_deadline(&self, start: Instant) -> Instant {
        let goes_on = |sequence: &Sequence| !sequence.awaits_mask() || sequence.pending() > 1;
        let is_idle = match self.running.is_empty() {
            true => !self.waiting.is_empty() && !self.waiting.iter().any(goes_on),
            false => !self.running.iter().any(goes_on),
        };
        let is_quick = |sequence: &Sequence| sequence.awaits_mask() && sequence.has_quick_masks();
        if is_idle || self.running.iter().any(is_quick) { start + PATIENCE } else { start }
    }
}
