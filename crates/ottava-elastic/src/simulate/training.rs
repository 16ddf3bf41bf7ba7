//! The position of training in a simulated job, and the steps after which it saves.

use super::inputs::Inputs;
use crate::message::{Membership, Part, Share, Step, Stored};
use std::sync::Arc;

/// Training from the start of an epoch, at one speed.
#[derive(Clone, Debug)]
pub(super) struct Training {
    pub members: Arc<Membership>,
    /// The time since which training has this speed.
    pub since: f64,
    /// The position at this time, in seconds of work of all hosts.
    pub from: f64,
    /// The seconds of work per second.
    pub speed: f64,
    /// The last step that the state machines know.
    pub told: Step,
}

impl Training {
    /// Returns the shares of the place of `part`, and of the place whose copies its host stores, after the state was divided anew.
    pub fn shares(part: &Part) -> impl Iterator<Item = Stored> {
        let members = Arc::clone(&part.members);
        let places = [Some(part.place), members.copied_place(part.place)];
        places.into_iter().flatten().map(move |place| {
            let share = Share { step: members.step, epoch: members.epoch, places: members.places(), place };
            Stored { share, digest: digest(share.step, place) }
        })
    }

    pub fn position(&self, now: f64) -> f64 {
        self.from + (now - self.since) * self.speed
    }

    /// Returns the time at which training reaches `position`.
    pub fn time_of(&self, position: f64) -> f64 {
        self.since + (position - self.from) / self.speed
    }
}

/// The digest of a share. The simulator has no bytes.
pub(super) fn digest(step: Step, place: u32) -> u64 {
    step << 32 | u64::from(place)
}

/// Returns the number of steps between two checkpoints, at least one.
pub(super) fn save_steps(inputs: &Inputs) -> Step {
    ((inputs.saves.interval / inputs.step).round() as Step).max(1)
}

/// Returns the number of steps between two snapshots. A snapshot starts only after the one before is sealed.
pub(super) fn snapshot_steps(inputs: &Inputs) -> Option<Step> {
    let snapshots = inputs.snapshots?;
    let between = snapshots.every as f64 * inputs.step;
    Some(snapshots.every * ((snapshots.seal / between).ceil() as Step).max(1))
}

/// Returns the last two steps up to `done` after which a snapshot was taken, without the steps up to `told`.
pub(super) fn rounds(inputs: &Inputs, told: Step, done: Step) -> impl Iterator<Item = Step> + use<> {
    let steps = snapshot_steps(inputs).unwrap_or(done + 1);
    let last = done / steps * steps;
    [last.saturating_sub(steps), last].into_iter().filter(move |step| *step > told)
}
