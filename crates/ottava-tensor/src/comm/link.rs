//! What a backend does: carries the calls of one rank to its group.

use super::call::Call;
use super::fault::Fault;
use super::hub::{Observer, Reply};
use std::sync::Arc;
use std::sync::mpsc::Receiver;

/// Reports of a rank that other threads than its main one may send.
pub(super) trait Reporter: Send + Sync {
    /// Passes a request to stop on to all ranks of the group.
    fn stop(&self);

    /// Fails the group.
    fn fail(&self, fault: Fault);
}

/// The way from one rank to its group. Dropping it leaves the group.
pub(super) trait Link: Send + Sync {
    /// Starts the rank's collective `number` with the bytes that it contributes. The receiver gets one answer.
    fn start(&self, number: u64, call: Call, bytes: Vec<u8>) -> Receiver<Reply>;

    /// Registers an observer of the first fault, which is told at once if there was one.
    fn observe(&self, observer: Observer);

    /// Sends reports; lives on when this rank has left its group, and does nothing then.
    fn reporter(&self) -> Arc<dyn Reporter>;
}

/// Of a group without other ranks.
pub(super) struct NoReporter;

impl Reporter for NoReporter {
    fn stop(&self) {}

    fn fail(&self, _: Fault) {}
}
