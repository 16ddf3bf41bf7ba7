//! A connection between two known ranks. One thread reads. Another thread writes, and sends heartbeats when the queue is empty.

use super::frame::{self, Kind, LIMIT};
use crate::comm::limits::Limits;
use crate::comm::progress::reports;
use std::io::{ErrorKind, Write};
use std::net::{Shutdown, TcpStream};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{io, thread};

/// The maximum time that a rank that leaves waits until the other ranks have read its last messages.
const LINGER: Duration = Duration::from_secs(2);

/// The time between checks whether they have read them.
const POLL: Duration = Duration::from_millis(1);

/// A message to send: its kind, the head of its body, and data that several messages may share.
pub(super) struct Outgoing {
    pub kind: Kind,
    pub head: Vec<u8>,
    pub data: Option<(Arc<Vec<u8>>, Range<usize>)>,
}

impl Outgoing {
    /// Creates a message without shared data.
    pub fn new(kind: Kind, head: Vec<u8>) -> Outgoing {
        Outgoing { kind, head, data: None }
    }
}

/// The reports of the reader about the other rank.
pub(super) enum Event {
    /// The rank sent a message, such as a heartbeat with its reports of progress.
    Message(Kind, Vec<u8>),
    /// The rank ended. This is the last event.
    Ended,
    /// The rank sent nothing for longer than the limit. This is the last event.
    Silent,
}

/// The two threads of a connection. Dropping it closes the connection at once. [`finish`] first sends the queued messages.
pub(super) struct Connection {
    stream: TcpStream,
    queue: Sender<Outgoing>,
    threads: Vec<JoinHandle<()>>,
}

impl Connection {
    /// Starts the threads on a connected stream. `handle` gets each event, and the queue for answers.
    ///
    /// The other rank is lost if it sends nothing for [`Limits::silence`]. This rank sends four heartbeats in this time.
    pub fn open(
        stream: TcpStream,
        limits: Limits,
        mut handle: impl FnMut(Event, &Sender<Outgoing>) + Send + 'static,
    ) -> io::Result<Connection> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(limits.silence))?;
        stream.set_write_timeout(Some(limits.silence))?;
        let (queue, outgoing) = channel();
        let (mut input, output, answers) = (stream.try_clone()?, stream.try_clone()?, queue.clone());
        let reader = thread::Builder::new().name("comm reader".into()).spawn(move || {
            let last = loop {
                match frame::read(&mut input, LIMIT) {
                    Ok((Kind::Bye, _)) => break Event::Ended,
                    Ok((kind, body)) => handle(Event::Message(kind, body), &answers),
                    Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => break Event::Silent,
                    Err(_) => break Event::Ended,
                }
            };
            // After its `Bye`, the other rank waits for the end of the stream, and `handle` may wait for the end of the other rank's process. An
            // error means that the process has already ended.
            let _ = input.shutdown(Shutdown::Both);
            handle(last, &answers);
        })?;
        let writer = thread::Builder::new().name("comm writer".into()).spawn(move || {
            // The reader detects and reports the cause of a failed write.
            let _ = write_all(output, &outgoing, limits.heartbeat());
        })?;
        Ok(Connection { stream, queue, threads: vec![reader, writer] })
    }

    /// Returns the queue of messages to send.
    pub fn queue(&self) -> Sender<Outgoing> {
        self.queue.clone()
    }

    /// Enqueues a message. If the other rank has ended, the reader has reported it.
    pub fn send(&self, message: Outgoing) {
        let _ = self.queue.send(message);
    }
}

/// Sends queued messages and heartbeats until the `Bye`.
fn write_all(mut stream: TcpStream, outgoing: &Receiver<Outgoing>, interval: Duration) -> io::Result<()> {
    loop {
        let message = match outgoing.recv_timeout(interval) {
            Ok(message) => message,
            Err(RecvTimeoutError::Timeout) => Outgoing::new(Kind::Heartbeat, reports().to_le_bytes().to_vec()),
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        };
        let data = message.data.as_ref().map_or(&[][..], |(all, range)| &all[range.clone()]);
        frame::write(&mut stream, message.kind, &[&message.head, data])?;
        stream.flush()?;
        if message.kind == Kind::Bye {
            return stream.shutdown(Shutdown::Write);
        }
    }
}

/// Sends queued messages and a `Bye` on all connections, and waits up to two seconds until the other ranks have read them.
pub(super) fn finish(connections: &[Connection]) {
    for connection in connections {
        connection.send(Outgoing::new(Kind::Bye, Vec::new()));
    }
    let deadline = Instant::now() + LINGER;
    let done = || connections.iter().flat_map(|connection| &connection.threads).all(JoinHandle::is_finished);
    while !done() && Instant::now() < deadline {
        thread::sleep(POLL);
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Both);
        // The writer may sleep until its next heartbeat, so the `Bye` wakes it.
        self.send(Outgoing::new(Kind::Bye, Vec::new()));
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
