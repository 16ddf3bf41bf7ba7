//! CPU work on the texts and constraints of requests. It leaves CPU time for steps of the engine.

use crate::error::{ApiError, Result};
use ottava_common::background::Background;
use std::sync::LazyLock;
use tokio::sync::oneshot;

/// The maximum bytes of a text or body that the thread of the connection processes itself. For so few bytes, another thread would take longer to
/// start.
const TINY_BYTES: usize = 1 << 10;

/// The maximum bytes of a text or body that is processed without waiting for other requests.
pub const SHORT_BYTES: usize = 16 << 10;

/// The threads for work on more bytes. They keep neither steps of the engine nor short requests waiting.
static LONG_WORK: LazyLock<Background> = LazyLock::new(|| Background::new("requests"));

/// The threads that find and open adapters. A download keeps no request waiting.
static OPENING: LazyLock<Background> = LazyLock::new(|| Background::new("adapters"));

/// Returns the number of requests whose texts or constraints wait for [`LONG_WORK`] or are processed by it.
pub fn preparing() -> usize {
    LONG_WORK.undone()
}

/// Runs CPU work on `bytes` bytes: in this thread, in a blocking thread, or in [`LONG_WORK`] if the work takes long.
pub async fn beside<T: Send + 'static>(bytes: usize, work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    if bytes <= TINY_BYTES {
        return work();
    }
    if bytes <= SHORT_BYTES {
        return tokio::task::spawn_blocking(work).await.map_err(|_| failed())?;
    }
    run(&LONG_WORK, work).await?
}

/// Runs work that finds and opens adapters.
pub async fn opening<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    run(&OPENING, work).await
}

async fn run<T: Send + 'static>(threads: &Background, work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    let (sender, result) = oneshot::channel();
    threads.run(move || {
        // If the client has left, the work is not needed.
        if !sender.is_closed() {
            let _ = sender.send(work());
        }
    });
    result.await.map_err(|_| failed())
}

fn failed() -> ApiError {
    ApiError::internal("the request could not be processed")
}
