//! The keeper of a host: it starts and stops the workers, and stores snapshots that outlive them.

use crate::message::{Digest, Epoch, HostId, Part, Report, Share, Step, Stored, Term, ToHub, ToKeeper, ToPeer, Want};
use std::sync::Arc;

/// Something that happened at a host.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum KeeperEvent {
    /// A connection to a hub is open.
    Connected {
        /// The number of the hub.
        term: Term,
    },
    /// The connection to the hub is closed, or the hub is silent for `silence_timeout`.
    HubLost,
    /// No hub came back in time.
    HubMissing,
    /// A message of a hub.
    FromHub {
        /// The number of the hub.
        term: Term,
        /// The message.
        message: ToKeeper,
    },
    /// A message of another keeper.
    FromPeer {
        /// The other host.
        host: HostId,
        /// The message.
        message: ToPeer,
    },
    /// The shares of [`KeeperAction::Fetch`] are there; if the state comes from a checkpoint or is divided anew, there are no shares, or new ones.
    Fetched {
        /// The epoch.
        epoch: Epoch,
        /// The shares.
        shares: Vec<Stored>,
    },
    /// A share of [`KeeperAction::Fetch`] is missing, or its digest is wrong.
    FetchFailed {
        /// The epoch.
        epoch: Epoch,
        /// The share that failed; `None` if the checkpoint cannot be loaded.
        want: Option<Want>,
    },
    /// The workers are connected and have loaded their state.
    Started {
        /// The epoch.
        epoch: Epoch,
    },
    /// The workers completed a step.
    Stepped {
        /// The epoch of the workers.
        epoch: Epoch,
        /// The step.
        step: Step,
    },
    /// The bytes of a new snapshot of this place are about to be written to the memory of the host.
    Begun {
        /// The epoch of the workers.
        epoch: Epoch,
        /// The place.
        place: u32,
    },
    /// The workers wrote a snapshot of their slices to the memory of the host.
    Snapshot {
        /// The epoch of the workers.
        epoch: Epoch,
        /// The step.
        step: Step,
        /// The digest of the bytes.
        digest: Digest,
    },
    /// A worker process ended.
    WorkerLost {
        /// The epoch of the worker.
        epoch: Epoch,
    },
    /// All workers of the host ended by themselves, for example after the last step.
    WorkersEnded {
        /// The epoch of the workers.
        epoch: Epoch,
        /// Their exit code: the first one that is not 0.
        code: u8,
    },
    /// A check found that the bytes of a share no longer have their digest.
    Damaged {
        /// The share.
        share: Share,
    },
}

/// Something that the process of a keeper must do.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum KeeperAction {
    /// Send a message to the hub.
    Send(ToHub),
    /// Send a message to the keeper of another host.
    SendPeer(HostId, ToPeer),
    /// Stop the workers at once, without their cooperation.
    StopWorkers,
    /// Fetch or load the state of a part, then report [`KeeperEvent::Fetched`] or [`KeeperEvent::FetchFailed`].
    Fetch(Part),
    /// Start the workers of this part from its state.
    StartWorkers(Part),
    /// Exit with this code.
    Exit(u8),
}

/// What the workers of a host do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// There are no workers.
    Stopped,
    /// The state of the next epoch is being fetched. There are no workers.
    Filling,
    /// The state of the next epoch is there. There are no workers.
    Ready,
    /// The workers run.
    Running,
}

/// The state of a keeper.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Keeper {
    host: HostId,
    /// The number of the hub that the keeper follows. Messages of hubs with a lower number are refused.
    term: Term,
    /// The highest epoch that a hub announced. Messages of lower epochs are refused.
    epoch: Epoch,
    part: Option<Part>,
    work: Work,
    reached: Step,
    /// The newest step that all places have sealed.
    sealed: Step,
    memory: Vec<Stored>,
}

impl Keeper {
    /// The exit code when a job ends because of lost hosts, the same as for a lost rank.
    pub const LOST: u8 = 5;

    /// Returns the keeper of a host that has just started.
    pub fn new(host: HostId) -> Keeper {
        Keeper { host, term: 0, epoch: 0, part: None, work: Work::Stopped, reached: 0, sealed: 0, memory: Vec::new() }
    }

    /// Returns the keeper of a host that has just started, with shares that an earlier keeper of this host has left in its memory.
    pub fn with_memory(host: HostId, memory: Vec<Stored>) -> Keeper {
        Keeper { memory, ..Keeper::new(host) }
    }

    /// Returns what the workers do.
    pub fn work(&self) -> Work {
        self.work
    }

    /// Returns the highest epoch that a hub announced.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Returns the newest part of the host.
    pub fn part(&self) -> Option<&Part> {
        self.part.as_ref()
    }

    /// Returns the last step that the workers completed.
    pub fn reached(&self) -> Step {
        self.reached
    }

    /// Returns the shares in the memory of the host.
    pub fn memory(&self) -> &[Stored] {
        &self.memory
    }

    /// Returns whether a further snapshot may be taken: all places have sealed the newest one. The ranks agree on this in the collectives of a step, and
    /// take a snapshot only if all hosts have room. So all places have snapshots of the same steps, and seal them one after the other.
    pub fn has_room(&self) -> bool {
        let place = self.part.as_ref().map(|part| part.place);
        let mut own = self.memory.iter().filter(|stored| Some(stored.share.place) == place);
        own.all(|stored| stored.share.step <= self.sealed)
    }

    /// Returns the next state and what must be done. Depends on nothing but the state and the event.
    pub fn on(&mut self, event: KeeperEvent) -> Vec<KeeperAction> {
        match event {
            KeeperEvent::Connected { term } if term >= self.term => {
                self.term = term;
                self.stop_then(self.report())
            }
            KeeperEvent::Connected { .. } => Vec::new(),
            KeeperEvent::HubLost => self.stop(),
            KeeperEvent::HubMissing => self.stop_then(KeeperAction::Exit(Keeper::LOST)),
            KeeperEvent::FromHub { term, message } if term == self.term => self.on_hub(message),
            KeeperEvent::FromHub { .. } => Vec::new(),
            KeeperEvent::FromPeer { host, message } => self.on_peer(host, message),
            KeeperEvent::Fetched { epoch, shares } if self.is_filling(epoch) => {
                for stored in shares {
                    self.store(stored);
                }
                self.work = Work::Ready;
                vec![KeeperAction::Send(ToHub::Ready { epoch })]
            }
            KeeperEvent::FetchFailed { epoch, want } if self.is_filling(epoch) => {
                vec![KeeperAction::Send(ToHub::Failed { epoch, want })]
            }
            KeeperEvent::Started { epoch } if self.is_running(epoch) => {
                vec![KeeperAction::Send(ToHub::Started { epoch })]
            }
            KeeperEvent::Fetched { .. } | KeeperEvent::FetchFailed { .. } | KeeperEvent::Started { .. } => Vec::new(),
            KeeperEvent::Stepped { epoch, step } if self.is_running(epoch) => {
                self.reached = step;
                vec![KeeperAction::Send(ToHub::Beat { epoch, step })]
            }
            KeeperEvent::Begun { epoch, place } if self.is_running(epoch) => {
                self.generations(place);
                Vec::new()
            }
            KeeperEvent::Snapshot { epoch, step, digest } if self.is_running(epoch) => self.snapshot(step, digest),
            KeeperEvent::WorkerLost { epoch } if self.is_running(epoch) => {
                self.stop_then(KeeperAction::Send(ToHub::WorkerLost { epoch }))
            }
            KeeperEvent::WorkersEnded { epoch, code } if self.is_running(epoch) => {
                vec![KeeperAction::Send(ToHub::WorkersEnded { epoch, code })]
            }
            // Workers of an earlier epoch may have reported before they were stopped.
            KeeperEvent::Stepped { .. }
            | KeeperEvent::Begun { .. }
            | KeeperEvent::Snapshot { .. }
            | KeeperEvent::WorkerLost { .. }
            | KeeperEvent::WorkersEnded { .. } => Vec::new(),
            KeeperEvent::Damaged { share } => {
                self.memory.retain(|stored| stored.share != share);
                Vec::new()
            }
        }
    }

    fn on_hub(&mut self, message: ToKeeper) -> Vec<KeeperAction> {
        match message {
            ToKeeper::Hold { epoch } if epoch >= self.epoch => {
                self.epoch = epoch;
                self.stop_then(self.report())
            }
            ToKeeper::Fill(part) if part.members.epoch == self.epoch && self.work == Work::Stopped => {
                self.part = Some(part.clone());
                self.work = Work::Filling;
                vec![KeeperAction::Fetch(part)]
            }
            ToKeeper::Start { epoch } if epoch == self.epoch && self.work == Work::Ready => self.start(),
            ToKeeper::Sealed { epoch, step } if self.is_running(epoch) => {
                self.sealed = step;
                Vec::new()
            }
            ToKeeper::End { code } => self.stop_then(KeeperAction::Exit(code)),
            ToKeeper::Hold { .. } | ToKeeper::Fill(_) | ToKeeper::Start { .. } | ToKeeper::Sealed { .. } => Vec::new(),
        }
    }

    fn on_peer(&mut self, host: HostId, message: ToPeer) -> Vec<KeeperAction> {
        match message {
            ToPeer::Copy { epoch, stored } if self.is_running(epoch) => {
                self.generations(stored.share.place);
                self.store(stored);
                vec![KeeperAction::SendPeer(host, ToPeer::Copied { epoch, stored })]
            }
            ToPeer::Copied { epoch, stored } if self.is_running(epoch) && self.memory.contains(&stored) => {
                vec![KeeperAction::Send(ToHub::Sealed { epoch, step: stored.share.step })]
            }
            ToPeer::Copy { .. } | ToPeer::Copied { .. } => Vec::new(),
        }
    }

    fn is_filling(&self, epoch: Epoch) -> bool {
        self.work == Work::Filling && self.epoch == epoch
    }

    fn is_running(&self, epoch: Epoch) -> bool {
        self.work == Work::Running && self.epoch == epoch
    }

    fn report(&self) -> KeeperAction {
        let members = self.part.as_ref().map(|part| Arc::clone(&part.members));
        let (epoch, reached, memory) = (self.epoch, self.reached, self.memory.clone());
        KeeperAction::Send(ToHub::Report(Report { epoch, members, reached, memory }))
    }

    fn stop(&mut self) -> Vec<KeeperAction> {
        match std::mem::replace(&mut self.work, Work::Stopped) {
            Work::Running => vec![KeeperAction::StopWorkers],
            Work::Stopped | Work::Filling | Work::Ready => Vec::new(),
        }
    }

    fn stop_then(&mut self, next: KeeperAction) -> Vec<KeeperAction> {
        let mut actions = self.stop();
        actions.push(next);
        actions
    }

    /// Starts the workers. All hosts have the state of the new epoch with its copies, so no other share is needed any more.
    fn start(&mut self) -> Vec<KeeperAction> {
        let Some(part) = self.part.clone() else { return Vec::new() };
        let Part { members, place, wants, .. } = &part;
        let copied = members.copied_place(*place);
        self.memory.retain(|Stored { share, .. }| {
            let is_here = share.place == *place || Some(share.place) == copied;
            let is_divided_anew = share.epoch == members.epoch;
            let is_wanted = wants.iter().any(|want| want.stored.share == *share);
            is_here && share.places == members.places() && (is_divided_anew || is_wanted)
        });
        (self.work, self.reached, self.sealed) = (Work::Running, members.step, members.step);
        vec![KeeperAction::StartWorkers(part)]
    }

    fn snapshot(&mut self, step: Step, digest: Digest) -> Vec<KeeperAction> {
        let Some(Part { members, place, .. }) = self.part.clone() else { return Vec::new() };
        let share = Share { step, epoch: self.epoch, places: members.places(), place };
        let stored = Stored { share, digest };
        self.generations(place);
        self.store(stored);
        match members.copy_host(place) {
            Some(host) => vec![KeeperAction::SendPeer(host, ToPeer::Copy { epoch: self.epoch, stored })],
            None => vec![KeeperAction::Send(ToHub::Sealed { epoch: self.epoch, step })],
        }
    }

    /// Frees the buffer of the oldest generation of `place`, if both buffers are used.
    fn generations(&mut self, place: u32) {
        let of_place = || self.memory.iter().filter(|stored| stored.share.place == place);
        if of_place().count() >= GENERATIONS {
            let oldest = of_place().map(|stored| stored.share).min();
            self.memory.retain(|stored| Some(stored.share) != oldest);
        }
    }

    fn store(&mut self, stored: Stored) {
        if !self.memory.contains(&stored) {
            self.memory.push(stored);
        }
    }
}

/// The number of snapshots of a place that a host stores: one that all places have sealed, and one that is being taken.
const GENERATIONS: usize = 2;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Membership, Source};

    /// Returns a keeper whose workers run in `epoch`.
    fn running(epoch: Epoch) -> Keeper {
        let mut keeper = Keeper::new(0);
        let members = Arc::new(Membership { epoch, hosts: vec![0], step: 0 });
        let part = Part { members, place: 0, source: Source::Disk, wants: Vec::new(), all: Arc::default() };
        keeper.on(KeeperEvent::Connected { term: 1 });
        for message in [ToKeeper::Hold { epoch }, ToKeeper::Fill(part)] {
            keeper.on(KeeperEvent::FromHub { term: 1, message });
        }
        keeper.on(KeeperEvent::Fetched { epoch, shares: Vec::new() });
        keeper.on(KeeperEvent::FromHub { term: 1, message: ToKeeper::Start { epoch } });
        assert_eq!(keeper.work(), Work::Running);
        keeper
    }

    #[test]
    fn reports_of_workers_of_an_earlier_epoch_change_nothing() {
        let events = |epoch| {
            [
                KeeperEvent::Stepped { epoch, step: 5 },
                KeeperEvent::Snapshot { epoch, step: 5, digest: 1 },
                KeeperEvent::WorkerLost { epoch },
                KeeperEvent::WorkersEnded { epoch, code: 0 },
            ]
        };
        for (late, current) in events(6).into_iter().zip(events(7)) {
            let mut keeper = running(7);
            assert_eq!((keeper.on(late), &keeper), (Vec::new(), &running(7)));
            assert!(!keeper.on(current).is_empty());
        }
    }
}
