//! Receives bodies of requests, within limits of time and memory.

use crate::error::{ApiError, Result};
use axum::body::Body;
use axum::http::StatusCode;
use futures_util::StreamExt;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep_until, timeout};

/// The maximum size of a body in bytes. It fits a prompt of a million tokens as a list of ids.
pub const MAX_BODY_BYTES: usize = 16 << 20;
/// The maximum size of a body that is received without delay. Larger bodies share [`LARGE_KIBIBYTES`].
pub const SMALL_BYTES: usize = 256 << 10;
/// The memory for bodies that are larger than [`SMALL_BYTES`], in KiB.
const LARGE_KIBIBYTES: usize = 64 << 10;
/// The maximum rate at which large bodies are received, in bytes per second. The limit leaves CPU time to other requests.
const LARGE_RATE: f64 = 48e6;
/// The number of large bodies that are parsed and tokenized at a time. Parsing takes several times the memory of a body.
const LARGE_AT_ONCE: usize = 1;

/// Receives bodies.
pub struct Intake {
    /// The time limit for receiving a body.
    client_timeout: Duration,
    memory: Arc<Semaphore>,
    turns: Arc<Semaphore>,
    /// The time from which the next bytes of a large body may be received.
    next: Mutex<Instant>,
}

/// A received body.
pub struct Received {
    pub bytes: Vec<u8>,
    /// The permit for the memory of a large body.
    _memory: Option<OwnedSemaphorePermit>,
}

impl Intake {
    pub fn new(client_timeout: Duration) -> Intake {
        let (memory, turns) = (Semaphore::new(LARGE_KIBIBYTES), Semaphore::new(LARGE_AT_ONCE));
        Intake { client_timeout, memory: Arc::new(memory), turns: Arc::new(turns), next: Mutex::new(Instant::now()) }
    }

    /// Receives a body. Errors if the body is too large, takes too long, or ends early, or if there is not enough memory for it now.
    pub async fn receive(&self, body: Body) -> Result<Received> {
        let late = |_| {
            let seconds = self.client_timeout.as_secs_f64();
            let message = format!("the body was not received within {seconds} seconds; send it at once");
            ApiError::refused(StatusCode::REQUEST_TIMEOUT, message)
        };
        timeout(self.client_timeout, self.receive_all(body)).await.map_err(late)?
    }

    async fn receive_all(&self, body: Body) -> Result<Received> {
        let (mut bytes, mut memory) = (Vec::new(), None::<OwnedSemaphorePermit>);
        let mut chunks = body.into_data_stream();
        while let Some(chunk) = chunks.next().await {
            let broken =
                |error| ApiError::refused(StatusCode::BAD_REQUEST, format!("the body has ended early: {error}"));
            let chunk = chunk.map_err(broken)?;
            if bytes.len() + chunk.len() > MAX_BODY_BYTES {
                return Err(ApiError::too_large("more", MAX_BODY_BYTES));
            }
            bytes.extend_from_slice(&chunk);
            let held = memory.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
            let missing = bytes.len().saturating_sub(SMALL_BYTES).div_ceil(1024).saturating_sub(held);
            if missing > 0 {
                let more = self.memory.clone().try_acquire_many_owned(missing as u32).map_err(|_| {
                    let message = format!(
                        "requests of more than {SMALL_BYTES} bytes take all {} MiB for them; try again later",
                        LARGE_KIBIBYTES >> 10
                    );
                    ApiError::refused(StatusCode::TOO_MANY_REQUESTS, message)
                })?;
                match &mut memory {
                    Some(memory) => memory.merge(more),
                    None => memory = Some(more),
                }
                sleep_until(self.reserve(chunk.len())).await;
            }
        }
        Ok(Received { bytes, _memory: memory })
    }

    /// Reserves the time to receive `bytes` bytes of large bodies. Returns the end of this time.
    fn reserve(&self, bytes: usize) -> Instant {
        let mut next = self.next.lock().expect("no thread panics with it");
        *next = Instant::now().max(*next) + Duration::from_secs_f64(bytes as f64 / LARGE_RATE);
        *next
    }

    /// Waits until a large body may be parsed and tokenized. A small body need not wait.
    pub async fn turn(&self, received: &Received) -> Option<OwnedSemaphorePermit> {
        match received.bytes.len() > SMALL_BYTES {
            true => Some(self.turns.clone().acquire_owned().await.expect("it is never closed")),
            false => None,
        }
    }
}
