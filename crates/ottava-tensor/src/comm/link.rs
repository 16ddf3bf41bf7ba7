//! What a backend does: carries the calls of one rank to its job.

use super::call::Call;
use super::fault::Fault;
use super::hub::Observer;
use super::members::Members;
use super::round::Reply;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

/// Reports of a rank that other threads than its main one may send.
pub(super) trait Reporter: Send + Sync {
    /// Passes a request to stop on to all ranks of the job.
    fn stop(&self);

    /// Fails the job.
    fn fail(&self, fault: Fault);
}

/// The way from one rank to its job, for all its groups. Dropping it leaves the job.
pub(super) trait Link: Send + Sync {
    /// Starts call `number` of its channel in `group` with the bytes that the rank contributes. The receiver gets one answer.
    fn start(&self, group: &Members, number: u64, call: Call, bytes: Vec<u8>) -> Receiver<Reply>;

    /// Whether all calls end on this rank, which then numbers its groups.
    fn is_alone(&self) -> bool {
        false
    }

    /// Registers an observer of the first fault, which is told at once if there was one.
    fn observe(&self, observer: Observer);

    /// Sends reports; lives on when this rank has left its job, and does nothing then.
    fn reporter(&self) -> Arc<dyn Reporter>;
}

/// Of a job without other ranks.
pub(super) struct NoReporter;

impl Reporter for NoReporter {
    fn stop(&self) {}

    fn fail(&self, _: Fault) {}
}
