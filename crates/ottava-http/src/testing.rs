//! A small HTTP server on the loopback address for tests of clients. It counts requests, and can send any answer or no answer.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// A request that the server has received.
#[derive(Clone, Debug)]
pub struct Received {
    /// The request line and the headers.
    pub head: String,
    /// The body as text.
    pub body: String,
    /// The body.
    pub bytes: Vec<u8>,
}

impl Received {
    /// Returns the method and the path with its query.
    pub fn target(&self) -> (&str, &str) {
        let mut words = self.head.split(' ');
        (words.next().unwrap_or_default(), words.next().unwrap_or_default())
    }

    /// Returns the value of a header. `name` has lower-case letters.
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.lines().filter_map(|line| line.split_once(':'));
        lines.find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
    }
}

/// The server. It ends when it is dropped.
pub struct Server {
    address: SocketAddr,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    received: Mutex<Vec<Received>>,
    open: AtomicUsize,
    most_open: AtomicUsize,
    ended: AtomicBool,
}

impl Server {
    /// Starts a server that sends the result of `answer` for each request (with its number, from 0) and then closes the connection. [`reply`] creates
    /// complete answers.
    ///
    /// # Panics
    /// Panics if the system has no free port.
    pub fn start(answer: impl Fn(usize, &Received) -> Vec<u8> + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("the address of the listener");
        let (state, answer) = (Arc::new(State::default()), Arc::new(answer));
        let serving = state.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if serving.ended.load(Ordering::Relaxed) {
                    break;
                }
                let (state, answer) = (serving.clone(), answer.clone());
                thread::spawn(move || state.serve(stream, &*answer));
            }
        });
        Server { address, state }
    }

    /// Returns the URL of this path on the server.
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Returns all requests so far.
    pub fn received(&self) -> Vec<Received> {
        self.state.received.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the maximum number of requests that were answered at the same time.
    pub fn most_open(&self) -> usize {
        self.state.most_open.load(Ordering::Relaxed)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.state.ended.store(true, Ordering::Relaxed);
        // This connection wakes the thread that waits for connections.
        drop(TcpStream::connect(self.address));
    }
}

impl State {
    fn serve(&self, mut stream: TcpStream, answer: &(impl Fn(usize, &Received) -> Vec<u8> + ?Sized)) {
        let Some(request) = read(&stream) else { return };
        let open = self.open.fetch_add(1, Ordering::Relaxed) + 1;
        self.most_open.fetch_max(open, Ordering::Relaxed);
        let number = {
            let mut received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
            received.push(request.clone());
            received.len() - 1
        };
        let answer = answer(number, &request);
        self.open.fetch_sub(1, Ordering::Relaxed);
        // In some tests, the client has given up before.
        stream.write_all(&answer).ok();
    }
}

/// Reads one request with a `Content-Length`.
fn read(stream: &TcpStream) -> Option<Received> {
    let (mut reader, mut head) = (BufReader::new(stream), String::new());
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head).ok()? == 0 {
            return None;
        }
    }
    let header =
        |name: &str| head.to_ascii_lowercase().lines().find_map(|line| Some(line.strip_prefix(name)?.to_string()));
    let length = header("content-length: ").and_then(|length| length.parse().ok());
    if header("expect: 100-continue").is_some() {
        (&mut &*stream).write_all(b"HTTP/1.1 100 Continue\r\n\r\n").ok()?;
    }
    let mut body = vec![0; length.unwrap_or(0)];
    reader.read_exact(&mut body).ok()?;
    if header("transfer-encoding: chunked").is_some() {
        body = chunks(&mut reader)?;
    }
    Some(Received { head, body: String::from_utf8_lossy(&body).into_owned(), bytes: body })
}

/// Reads a body in chunks.
fn chunks(reader: &mut impl BufRead) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let length = usize::from_str_radix(line.trim(), 16).ok()?;
        let mut chunk = vec![0; length + 2];
        reader.read_exact(&mut chunk).ok()?;
        if length == 0 {
            return Some(body);
        }
        body.extend(&chunk[..length]);
    }
}

/// Creates a complete answer. Each line of `headers` must end with `\r
/// `.
pub fn reply(status: u16, headers: &str, body: &str) -> Vec<u8> {
    reply_bytes(status, headers, body.as_bytes())
}

/// Creates a complete answer with bytes, like [`reply`].
pub fn reply_bytes(status: u16, headers: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let head = format!("HTTP/1.1 {status} x\r\n{headers}Connection: close\r\nContent-Length: {length}\r\n\r\n");
    [head.as_bytes(), body].concat()
}
