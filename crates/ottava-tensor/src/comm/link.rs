//! The interface of a backend, which carries the calls of one rank to its job.

use super::call::Call;
use super::fault::Fault;
use super::hub::Observer;
use super::members::Members;
use super::round::Reply;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

/// The reports that any thread of a rank may send.
pub(super) trait Reporter: Send + Sync {
    /// Forwards a stop request to all ranks of the job.
    fn stop(&self);

    /// Fails the job.
    fn fail(&self, fault: Fault);
}

/// The connection of one rank to its job, for all its groups. Dropping the connection leaves the job.
pub(super) trait Link: Send + Sync {
    /// Starts call `number` of its channel in `group`. `bytes` is the input of this rank. The returned receiver gets one answer.
    fn start(&self, group: &Members, number: u64, call: Call, bytes: Vec<u8>) -> Receiver<Reply>;

    /// Returns whether calls involve no other rank. The rank then numbers its groups itself.
    fn is_alone(&self) -> bool {
        false
    }

    /// Registers an observer of the first fault. If there was a fault, calls the observer at once.
    fn observe(&self, observer: Observer);

    /// Returns a sender of reports. It may outlive this rank's membership, and is then a no-op.
    fn reporter(&self) -> Arc<dyn Reporter>;
}

/// The reporter of a job without other ranks. It does nothing.
pub(super) struct NoReporter;

impl Reporter for NoReporter {
    fn stop(&self) {}

    fn fail(&self, _: Fault) {}
}
