//! Work of the CPU on the texts and constraints of requests, which leaves time for steps of the engine.

use crate::error::{ApiError, Result};
use ottava_common::background::Background;
use std::sync::LazyLock;
use tokio::sync::oneshot;

/// The most bytes of a text or body that the thread of its connection works on: a thread of its own would take longer than the work.
const TINY_BYTES: usize = 1 << 10;

/// The most bytes of a text or body that is worked on at once.
pub const SHORT_BYTES: usize = 16 << 10;

/// Threads for work on more bytes, which keeps neither steps of the engine nor short requests waiting.
static LONG_WORK: LazyLock<Background> = LazyLock::new(|| Background::new("requests"));

/// Requests whose texts or constraints wait for [`LONG_WORK`], or are worked on there.
pub fn preparing() -> usize {
    LONG_WORK.undone()
}

/// Runs work of the CPU on so many `bytes`: at once, beside the connections, or in its turn if it takes long.
pub async fn beside<T: Send + 'static>(bytes: usize, work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let failed = || ApiError::internal("the request could not be read");
    if bytes <= TINY_BYTES {
        return work();
    }
    if bytes <= SHORT_BYTES {
        return tokio::task::spawn_blocking(work).await.map_err(|_| failed())?;
    }
    let (sender, result) = oneshot::channel();
    LONG_WORK.run(move || {
        // A client that has left needs no answer.
        if !sender.is_closed() {
            let _ = sender.send(work());
        }
    });
    result.await.map_err(|_| failed())?
}
