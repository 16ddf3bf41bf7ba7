//! A rank's GPU in a group.

use crate::cuda::{Beside, CudaDevice, NcclComm, Peers};
use crate::ops::Inboxes;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The GPU of a rank, and the rank's communicator in a group.
///
/// Each group has its own communicator, created from a new id. `ncclCommSplit` would need all ranks of the parent,
/// including ranks of groups that never send GPU tensors. A rank enqueues the calls of its communicators in one stream,
/// in the order in which it makes them. Groups with a [channel](super::Group::on_channel) have separate streams.
pub(super) struct Gpu {
    pub device: Arc<CudaDevice>,
    /// The work of compute during the calls of the group.
    pub beside: Beside,
    /// The communicator. `None` until the first call.
    communicator: Mutex<Option<Arc<NcclComm>>>,
    meeting: Mutex<Meeting<Arc<Peers>>>,
    /// The memory of one-shot sums.
    inboxes: Mutex<Meeting<Inboxes>>,
}

/// Whether the ranks have determined if their GPUs reach each other's memory in the way that `T` needs.
pub(super) enum Meeting<T> {
    /// The ranks have not determined it yet.
    Due,
    /// The ranks have determined it. `None` if the GPUs do not reach each other's memory in this way.
    Over(Option<T>),
}

impl Gpu {
    pub fn new(device: Arc<CudaDevice>) -> Gpu {
        Gpu {
            device,
            beside: Beside::Kernels,
            communicator: Mutex::default(),
            meeting: Mutex::new(Meeting::Due),
            inboxes: Mutex::new(Meeting::Due),
        }
    }

    /// Returns the GPU for a group that is split from a group with this GPU.
    pub fn of_split(&self) -> Gpu {
        Gpu::new(self.device.clone())
    }

    pub fn communicator(&self) -> MutexGuard<'_, Option<Arc<NcclComm>>> {
        self.communicator.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn meeting(&self) -> MutexGuard<'_, Meeting<Arc<Peers>>> {
        self.meeting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn inboxes(&self) -> MutexGuard<'_, Meeting<Inboxes>> {
        self.inboxes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
