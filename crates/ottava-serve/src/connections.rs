//! Connections: their number, the time limits of clients, and the end of connections.
//!
//! A connection waits for a request, works on a request, or finishes: the answer is complete, but not all of it is sent. If there are too many
//! connections, the connection that has waited longest is closed. Connections that never sent a whole request are closed first. So clients that
//! connect and send nothing, or half a request, cannot keep other clients out.

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Sleep, sleep, sleep_until, timeout};

/// The interval between checks for free slots and for the end of work.
const POLL: Duration = Duration::from_millis(25);
/// The time in which the first request of a new connection may still arrive when the server begins to stop.
const ARRIVAL: Duration = Duration::from_secs(1);
/// The maximum bytes of an answer that wait for a client inside a connection, and the maximum bytes of the head of a request.
const BUFFER_BYTES: usize = 64 << 10;

/// The number of connections that the operating system holds until the server accepts them, as many as Linux allows by default. Further clients try
/// again after a second.
const BACKLOG: u32 = 4096;

/// Listens at `address`.
pub fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // Lets a restarted server listen at an address whose connections have just ended.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// All connections of a server.
pub struct Connections {
    /// The permits, one for each connection.
    slots: Arc<Semaphore>,
    /// The time limit for a client to send the head of its next request, and to read any part of an answer.
    client_timeout: Duration,
    open: Mutex<BTreeMap<u64, Arc<Connection>>>,
    draining: watch::Sender<bool>,
}

/// One connection.
pub struct Connection {
    state: Mutex<State>,
    close: Notify,
}

struct State {
    phase: Phase,
    /// When the connection began to wait.
    since: Instant,
    /// Whether the connection has received a whole request before.
    answered: bool,
    /// Whether the connection was told to end.
    closing: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Waiting,
    Working,
    Finishing,
}

impl Connections {
    /// Creates the state for at most `most` connections.
    pub fn new(most: usize, client_timeout: Duration) -> Arc<Connections> {
        let (slots, draining) = (Arc::new(Semaphore::new(most)), watch::Sender::new(false));
        Arc::new(Connections { slots, client_timeout, open: Mutex::default(), draining })
    }

    /// Accepts connections forever. `app` answers their requests.
    pub async fn accept(self: &Arc<Self>, listener: TcpListener, app: Router) {
        let app = TowerToHyperService::new(app);
        for id in 0.. {
            let stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                // No file descriptor is free for the connection, or the client has left.
                Err(error) => {
                    tracing::warn!("a connection is not accepted: {error}");
                    self.close_longest_waiting();
                    sleep(POLL).await;
                    continue;
                }
            };
            let slot = self.slot().await;
            let waiting = State { phase: Phase::Waiting, since: Instant::now(), answered: false, closing: false };
            let connection = Arc::new(Connection { state: Mutex::new(waiting), close: Notify::new() });
            self.open().insert(id, connection.clone());
            tokio::spawn(self.clone().serve(id, connection, stream, slot, app.clone()));
        }
    }

    /// Waits for a slot for a connection: a free slot, or the slot of the connection that has waited longest for a request.
    async fn slot(&self) -> OwnedSemaphorePermit {
        loop {
            if let Ok(slot) = self.slots.clone().try_acquire_owned() {
                return slot;
            }
            self.close_longest_waiting();
            if let Ok(Ok(slot)) = timeout(POLL, self.slots.clone().acquire_owned()).await {
                return slot;
            }
        }
    }

    fn close_longest_waiting(&self) {
        let open = self.open();
        let waiting = open.values().filter_map(|connection| {
            let state = connection.state();
            (state.phase == Phase::Waiting && !state.closing).then_some(((state.answered, state.since), connection))
        });
        if let Some((_, connection)) = waiting.min_by_key(|(key, _)| *key) {
            connection.state().closing = true;
            connection.close.notify_one();
        }
    }

    /// Answers the requests of a connection until its client or the server ends it.
    async fn serve(
        self: Arc<Self>,
        id: u64,
        connection: Arc<Connection>,
        stream: TcpStream,
        _slot: OwnedSemaphorePermit,
        app: TowerToHyperService<Router>,
    ) {
        // An answer has small pieces; each piece is sent without a delay.
        let _ = stream.set_nodelay(true);
        let socket = Socket { stream, connection: connection.clone(), timeout: self.client_timeout, stalled: None };
        let of_requests = connection.clone();
        let service = service_fn(move |mut request: hyper::Request<Incoming>| {
            request.extensions_mut().insert(of_requests.clone());
            app.call(request)
        });
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(self.client_timeout).max_buf_size(BUFFER_BYTES);
        let mut running = pin!(http.serve_connection(TokioIo::new(socket), service));
        // A connection that is accepted while the server drains ends after the answer to its request.
        let mut draining = self.draining.subscribe();
        // The time at which a connection that was accepted before is told to end.
        let mut end: Option<Instant> = None;
        loop {
            tokio::select! {
                ended = running.as_mut() => {
                    if let Err(error) = ended {
                        tracing::debug!("a connection has ended: {error}");
                    }
                    break;
                }
                () = connection.close.notified() => break,
                Ok(()) = draining.changed(), if end.is_none() => end = Some(connection.end_of_arrival()),
                () = sleep_until(end.unwrap_or_else(Instant::now).into()), if end.is_some() && !connection.is_closing() => {
                    connection.state().closing = true;
                    running.as_mut().graceful_shutdown();
                }
            }
        }
        self.open().remove(&id);
    }

    /// Waits until no connection works on a request, but at most `grace`. Each connection ends after its answer. Returns whether no connection is
    /// left.
    pub async fn drain(&self, grace: Duration) -> bool {
        self.draining.send_replace(true);
        let (end, mut idle) = (Instant::now() + grace, 0);
        // Checks twice, so that a request that has just arrived is answered.
        while idle < 2 {
            if Instant::now() >= end {
                return false;
            }
            sleep(POLL).await;
            let works = self.open().values().any(|connection| connection.state().phase != Phase::Waiting);
            idle = if works { 0 } else { idle + 1 };
        }
        true
    }

    fn open(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Connection>>> {
        self.open.lock().expect("no thread panics with it")
    }
}

impl Connection {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics with it")
    }

    /// Returns the time until which the first request of a new connection may still arrive, or the current time.
    fn end_of_arrival(&self) -> Instant {
        let state = self.state();
        match state.phase == Phase::Waiting && !state.answered {
            true => state.since + ARRIVAL,
            false => Instant::now(),
        }
    }

    fn is_closing(&self) -> bool {
        self.state().closing
    }

    /// Records that a whole request has arrived.
    pub fn work(&self) {
        let mut state = self.state();
        (state.phase, state.answered) = (Phase::Working, true);
    }

    /// Wraps the body of an answer. The end of the body is the end of the work.
    pub fn track(self: Arc<Self>, body: Body) -> Body {
        Body::new(Tracked { body, connection: self })
    }

    fn finish(&self) {
        let mut state = self.state();
        if state.phase == Phase::Working {
            state.phase = Phase::Finishing;
        }
    }

    /// Records that the operating system has all bytes that were written.
    fn flushed(&self) {
        let mut state = self.state();
        if state.phase == Phase::Finishing {
            (state.phase, state.since) = (Phase::Waiting, Instant::now());
        }
    }
}

/// A body that tells its connection when it ends.
struct Tracked {
    body: Body,
    connection: Arc<Connection>,
}

impl HttpBody for Tracked {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }
    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Tracked {
    fn drop(&mut self) {
        self.connection.finish();
    }
}

/// A stream whose writes fail if the client has read nothing for `timeout`.
struct Socket {
    stream: TcpStream,
    connection: Arc<Connection>,
    timeout: Duration,
    /// The timer that runs while a write waits for the client.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl Socket {
    fn in_time<T>(&mut self, context: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep(self.timeout)));
        stalled.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.in_time(context, written)
    }
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        self.in_time(context, written)
    }
    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        if flushed.is_ready() {
            self.connection.flushed();
        }
        flushed
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
