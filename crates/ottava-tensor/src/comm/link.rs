//! What a backend does: carries the calls of one rank to its group.

use super::call::Call;
use super::hub::Reply;
use std::sync::mpsc::Receiver;

/// The way from one rank to its group. Dropping it leaves the group.
pub(super) trait Link: Send + Sync {
    /// Starts the rank's collective `number` with the bytes that it contributes. The receiver gets one answer.
    fn start(&self, number: u64, call: Call, bytes: Vec<u8>) -> Receiver<Reply>;
}
