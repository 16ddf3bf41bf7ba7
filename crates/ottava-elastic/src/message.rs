//! What the hub and the keepers say to each other.

use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The number of a host, given by the launcher.
pub type HostId = u32;

/// The number of a configuration of the job. It increases with every recovery.
pub type Epoch = u64;

/// The number of an optimizer step.
pub type Step = u64;

/// A digest of the bytes of a share.
pub type Digest = u64;

/// The number of a hub. The launcher starts one hub at a time, and each new hub has a higher number.
pub type Term = u64;

/// The hosts that work in an epoch.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Membership {
    /// The epoch.
    pub epoch: Epoch,
    /// The hosts by place. The ranks of a job are divided among places in order.
    pub hosts: Vec<HostId>,
    /// The step from which the epoch starts.
    pub step: Step,
}

impl Membership {
    /// Returns `place`, and the place whose copies the host at `place` stores.
    pub fn stored_places(&self, place: u32) -> impl Iterator<Item = u32> {
        [Some(place), self.copied_place(place)].into_iter().flatten()
    }

    /// Returns the number of places.
    pub fn places(&self) -> u32 {
        self.hosts.len() as u32
    }

    /// Returns the host that stores the copies of `place`: the host of the next place. Returns `None` if there is one place.
    pub fn copy_host(&self, place: u32) -> Option<HostId> {
        (self.places() > 1).then(|| self.hosts[((place + 1) % self.places()) as usize])
    }

    /// Returns the place whose copies the host at `place` stores; `None` if there is one place.
    pub fn copied_place(&self, place: u32) -> Option<u32> {
        (self.places() > 1).then(|| (place + self.places() - 1) % self.places())
    }
}

/// The snapshot of the slices of the ranks of one place after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Share {
    /// The step.
    pub step: Step,
    /// The epoch that computed the step. Another epoch may compute the same step with other roundings, so shares of two epochs are never combined.
    pub epoch: Epoch,
    /// The number of places among which the state is divided.
    pub places: u32,
    /// The place, from 0.
    pub place: u32,
}

/// A share in the memory of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Stored {
    /// The share.
    pub share: Share,
    /// The digest of its bytes.
    pub digest: Digest,
}

/// A share that a host needs in a new epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Want {
    /// The share, and the digest that its bytes must have.
    pub stored: Stored,
    /// The host from which the share is read. It may be the host that needs the share.
    pub from: HostId,
}

/// Where the state of a new epoch comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Source {
    /// Snapshots in the memory of hosts.
    Memory,
    /// The newest checkpoint on disk.
    Disk,
}

/// The part of a host in a new epoch.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Part {
    /// The hosts of the epoch.
    #[serde(with = "shared")]
    pub members: Arc<Membership>,
    /// The place of the host that receives this.
    pub place: u32,
    /// Where the state comes from.
    pub source: Source,
    /// The shares that the host needs, for its place and for the place whose copies it stores. Empty with [`Source::Disk`].
    pub wants: Vec<Want>,
    /// A share of each place of the snapshot, the same for all hosts. Workers read them all before their first step, since each rank reads weights that
    /// other ranks wrote.
    #[serde(with = "shared")]
    pub all: Arc<Vec<Want>>,
}

/// A message of the hub to a keeper. The connection adds the term of the hub.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ToKeeper {
    /// Stop the workers of all earlier epochs, and report.
    Hold {
        /// The epoch that will follow.
        epoch: Epoch,
    },
    /// Take a place in the new epoch, and fetch its shares.
    Fill(Part),
    /// Start the workers.
    Start {
        /// The epoch.
        epoch: Epoch,
    },
    /// All places have stored and copied their snapshots of a step. Older snapshots may be overwritten.
    Sealed {
        /// The epoch.
        epoch: Epoch,
        /// The step.
        step: Step,
    },
    /// Stop the workers, and exit.
    End {
        /// The exit code.
        code: u8,
    },
}

/// What a keeper knows, in answer to [`ToKeeper::Hold`] or on joining.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Report {
    /// The highest epoch that a hub announced to this keeper.
    pub epoch: Epoch,
    /// The newest epoch in which the host had a part.
    #[serde(with = "shared_option")]
    pub members: Option<Arc<Membership>>,
    /// The last step that its workers completed.
    pub reached: Step,
    /// The shares in its memory.
    pub memory: Vec<Stored>,
}

/// A message of a keeper to the hub.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ToHub {
    /// The workers are stopped. The first message of a connection is a report.
    Report(Report),
    /// The shares of the new epoch are there.
    Ready {
        /// The epoch.
        epoch: Epoch,
    },
    /// The shares of the new epoch could not be fetched, for example because a digest is wrong.
    Failed {
        /// The epoch.
        epoch: Epoch,
        /// The share that failed. The hub reads it from this host no more. `None` if the checkpoint cannot be loaded.
        want: Option<Want>,
    },
    /// The workers run.
    Started {
        /// The epoch.
        epoch: Epoch,
    },
    /// A heartbeat of a host whose workers run.
    Beat {
        /// The epoch.
        epoch: Epoch,
        /// The last completed step.
        step: Step,
    },
    /// The snapshot of the host's place is stored and copied.
    Sealed {
        /// The epoch.
        epoch: Epoch,
        /// The step of the snapshot.
        step: Step,
    },
    /// A worker process ended.
    WorkerLost {
        /// The epoch.
        epoch: Epoch,
    },
    /// All workers of the host ended by themselves.
    WorkersEnded {
        /// The epoch.
        epoch: Epoch,
        /// Their exit code.
        code: u8,
    },
}

/// A message between keepers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ToPeer {
    /// Store a copy of this share.
    Copy {
        /// The epoch.
        epoch: Epoch,
        /// The share with its digest.
        stored: Stored,
    },
    /// The copy is stored. Its digest was computed from the bytes that arrived.
    Copied {
        /// The epoch.
        epoch: Epoch,
        /// The share with its digest.
        stored: Stored,
    },
}

/// Writes a shared value as a plain one.
mod shared {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use std::sync::Arc;

    pub fn serialize<T: Serialize, S: Serializer>(value: &Arc<T>, serializer: S) -> Result<S::Ok, S::Error> {
        value.as_ref().serialize(serializer)
    }

    pub fn deserialize<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<Arc<T>, D::Error> {
        T::deserialize(deserializer).map(Arc::new)
    }
}

/// Writes a shared value as a plain one, if there is one.
mod shared_option {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use std::sync::Arc;

    pub fn serialize<T: Serialize, S: Serializer>(value: &Option<Arc<T>>, serializer: S) -> Result<S::Ok, S::Error> {
        value.as_deref().serialize(serializer)
    }

    pub fn deserialize<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Arc<T>>, D::Error> {
        Ok(Option::<T>::deserialize(deserializer)?.map(Arc::new))
    }
}
