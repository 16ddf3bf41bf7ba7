//! Starts and stops the training of a simulated job, and tells keepers and hub what they would have learned since.

use super::job::{Event, Job};
use super::training::{Training, digest, rounds, save_steps, snapshot_steps};
use crate::hub::HubEvent;
use crate::keeper::KeeperEvent;
use crate::message::{HostId, Membership, Step};
use crate::policy::Straggler;
use std::sync::Arc;

impl Job<'_> {
    pub(super) fn start_training(&mut self) {
        let Some(members) = self.hub.as_ref().and_then(|hub| hub.members().cloned()) else { return };
        self.note_start();
        let step = members.step;
        let lost = self.position - step as f64 * self.inputs.step;
        self.outcome.lost += lost.max(0.0);
        let lost_steps = (self.position / self.inputs.step) as Step;
        self.outcome.most_lost_steps = self.outcome.most_lost_steps.max(lost_steps.saturating_sub(step));
        self.position = step as f64 * self.inputs.step;
        self.starts += 1;
        let (since, from, speed) = (self.clock.now, self.position, self.speed(&members));
        self.training = Some(Training { members, since, from, speed, told: step });
        self.await_seal();
    }

    /// Returns the seconds of work per second: fewer with fewer hosts, with a slow host, and with the pauses of checkpoints.
    fn speed(&self, members: &Membership) -> f64 {
        let inputs = self.inputs;
        let is_slow = |host: &HostId| self.is_slow[*host as usize];
        let slowdown = inputs.stragglers.filter(|_| members.hosts.iter().any(is_slow)).map_or(1.0, |s| s.slowdown);
        let share = f64::from(members.places()) / f64::from(inputs.hosts) / slowdown;
        let cost = inputs.snapshots.map_or(0.0, |snapshots| snapshots.cost);
        let work = save_steps(inputs) as f64 * inputs.step;
        work / (work / (share * (1.0 - cost)) + inputs.saves.pause)
    }

    pub(super) fn change_speed(&mut self) {
        if let Some(mut training) = self.training.take() {
            training.from = training.position(self.clock.now);
            training.since = self.clock.now;
            training.speed = self.speed(&training.members);
            self.training = Some(training);
        }
    }

    /// Stops training: a worker, a host or the hub is lost, or the hub holds the job.
    pub(super) fn stop_training(&mut self) {
        if self.training.is_some() {
            self.report_progress();
        }
        if let Some(training) = self.training.take() {
            self.position = training.position(self.clock.now);
            self.note_stop();
        }
    }

    /// Schedules [`Event::Sealed`] when the next snapshot is sealed, or the next checkpoint is complete, if hosts could change then.
    pub(super) fn await_seal(&mut self) {
        let Some(training) = &self.training else { return };
        let swaps = self.inputs.policy == Straggler::Swap;
        let has_slow = || swaps && training.members.hosts.iter().any(|host| self.is_slow[*host as usize]);
        if training.members.places() == self.inputs.hosts && !has_slow() {
            return;
        }
        let (steps, delay) = match (snapshot_steps(self.inputs), self.inputs.snapshots) {
            (Some(steps), Some(snapshots)) => (steps, snapshots.seal),
            _ => (save_steps(self.inputs), self.inputs.saves.write),
        };
        let done = (training.position(self.clock.now) / self.inputs.step) as Step;
        let next = (done / steps + 1) * steps;
        let at = training.time_of(next as f64 * self.inputs.step) + delay;
        // The time is rounded, and the snapshot must be sealed when the event comes.
        self.clock.after((at - self.clock.now) * (1.0 + 1e-9) + 1e-6, Event::Sealed(self.starts));
    }

    /// Tells the state machines what happened since training started: the newest checkpoint, and the last two snapshots. The hub may then change the
    /// hosts.
    pub(super) fn report_progress(&mut self) {
        let Some(training) = &mut self.training else { return };
        let (now, step_time) = (self.clock.now, self.inputs.step);
        let done = (training.position(now) / step_time) as Step;
        let members = Arc::clone(&training.members);
        let is_complete = |step: Step, delay: f64| training.time_of(step as f64 * step_time) + delay <= now;
        let (saves, disk) = (save_steps(self.inputs), self.disk);
        let saved = (0..=done / saves).rev().map(|count| count * saves).take_while(|step| *step > disk);
        let saved = saved.into_iter().find(|step| is_complete(*step, self.inputs.saves.write));
        let seal = self.inputs.snapshots.map_or(0.0, |snapshots| snapshots.seal);
        let rounds: Vec<_> =
            rounds(self.inputs, training.told, done).map(|step| (step, is_complete(step, seal))).collect();
        for (step, _) in rounds.iter().filter(|(_, is_sealed)| *is_sealed) {
            training.told = *step;
        }
        for host in &members.hosts {
            if let Some(keeper) = &mut self.keepers[*host as usize] {
                keeper.on(KeeperEvent::Stepped { epoch: members.epoch, step: done });
            }
        }
        for (step, is_sealed) in rounds {
            self.snapshot(&members, step, is_sealed);
        }
        if let Some(step) = saved {
            self.disk = step;
            self.tell_hub(HubEvent::Saved(step));
        }
    }

    /// Takes a snapshot at all members. If it is not sealed, no copy arrives.
    fn snapshot(&mut self, members: &Membership, step: Step, is_sealed: bool) {
        for (place, host) in (0..).zip(&members.hosts) {
            let event = KeeperEvent::Snapshot { epoch: members.epoch, step, digest: digest(step, place) };
            if is_sealed {
                for event in self.settle(*host, event) {
                    self.tell_hub(event);
                }
            } else if let Some(keeper) = &mut self.keepers[*host as usize] {
                keeper.on(event);
            }
        }
    }
}
