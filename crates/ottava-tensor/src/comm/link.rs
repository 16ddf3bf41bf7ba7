//! What a backend does: carries the calls of one rank to its group.

use super::call::Call;
use super::hub::{Observer, Reply};
use std::sync::mpsc::Receiver;

/// The way from one rank to its group. Dropping it leaves the group.
pub(super) trait Link: Send + Sync {
    /// Starts the rank's collective `number` with the bytes that it contributes. The receiver gets one answer.
    fn start(&self, number: u64, call: Call, bytes: Vec<u8>) -> Receiver<Reply>;

    /// Registers an observer of the first fault, which is told at once if there was one.
    fn observe(&self, observer: Observer);
}
