//! Tests that a server neither panics nor leaks under many requests, most of them faulty or aborted, and that it answers each request that it
//! accepts.

use crate::serve::{Server, post_head, request};
use crate::setup::Run;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

/// The number of requests in the test suite; `OTTAVA_SOAK` sets another number.
const REQUESTS: usize = 400;
/// The number of kinds of requests in [`ask`].
const KINDS: usize = 18;
/// The number of concurrent requests.
const CLIENTS: usize = 4;
/// The bytes by which resident memory may grow after the first fifth of the requests, because of fragmentation in the allocator. If 8,000 requests
/// leak 1 KiB each, memory grows by twice as much.
pub const GROWTH: u64 = 4 << 20;
/// The bytes of a body that exceeds the server's limit of 16 MiB.
const OVERSIZED: usize = 17 << 20;

/// Returns the status code and the rest of the answer. The server may close the connection before it has read a faulty request.
pub fn answer(server: &Server, bytes: &[u8]) -> (u16, String) {
    let (mut client, mut answer) = (server.connect(), Vec::new());
    let _ = client.write_all(bytes);
    let _ = client.read_to_end(&mut answer);
    let text = String::from_utf8(answer).unwrap();
    let status = text.strip_prefix("HTTP/1.1 ").and_then(|rest| rest[..3].parse().ok());
    (status.unwrap_or_else(|| panic!("no answer: {text:?}")), text)
}

fn completion(body: &[u8]) -> Vec<u8> {
    request("/v1/completions", body)
}

pub fn greedy() -> Value {
    json!({"prompt": "line 4", "max_tokens": 6, "temperature": 0})
}

/// Returns a request for drawn completions of several kinds. They take longer than most clients wait.
fn drawn(number: usize, stream: bool) -> Value {
    json!({"prompt": ["line", "a"], "n": 1 + number % 3, "max_tokens": 20, "stream": stream, "seed": number, "top_p": 0.9, "top_k": 40,
        "repetition_penalty": 1.1, "logprobs": number % 2, "echo": number.is_multiple_of(5), "ignore_eos": true, "stop": ["zz"]})
}

/// Sends request number `number`, and checks its answer. `expected` is the text of [`greedy`].
fn ask(server: &Server, number: usize, expected: &str) {
    let refused = |bytes: &[u8], expected: u16| {
        let (status, text) = answer(server, bytes);
        assert_eq!(status, expected, "request {number}: {text}");
    };
    match number % KINDS {
        // These requests succeed.
        0 | 1 => {
            let answer = server.post("/v1/completions", greedy());
            assert_eq!(answer["choices"][0]["text"], expected, "request {number}");
        }
        2 => {
            let (status, text) = answer(server, &completion(drawn(number, false).to_string().as_bytes()));
            let (_, body) = text.split_once("\r\n\r\n").unwrap();
            let whole: Value = serde_json::from_str(body).unwrap_or_else(|_| panic!("request {number}: {text}"));
            assert_eq!((status, whole["choices"].as_array().map(Vec::len)), (200, Some(2 * (1 + number % 3))));
        }
        3 => {
            let (status, text) = answer(server, &completion(drawn(number, true).to_string().as_bytes()));
            assert!(status == 200 && text.contains("data: [DONE]"), "request {number}: {text}");
        }
        4 => refused(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 200),
        // The client leaves: during the stream, before the answer, in the middle of its body, or in the middle of its head.
        5 | 6 => {
            let stream = server.send("/v1/completions", &drawn(number, true));
            let begun = BufReader::new(stream).lines().map_while(Result::ok).any(|line| line.starts_with("data: {"));
            assert!(begun, "request {number}: the stream has begun");
        }
        7 | 8 => drop(server.send("/v1/completions", &drawn(number, false))),
        9 | 10 => {
            let bytes = completion(greedy().to_string().as_bytes());
            let end = if number % KINDS == 9 { bytes.len() - 5 } else { 12 };
            server.connect().write_all(&bytes[..end]).unwrap();
        }
        // The body is too large: either the head says so, or the body has chunks, whose sum no head states.
        11 if number.is_multiple_of(5) => {
            let head = post_head("/v1/completions", "Transfer-Encoding: chunked");
            let body =
                [format!("{head}{OVERSIZED:x}\r\n").as_bytes(), &vec![b' '; OVERSIZED], b"\r\n0\r\n\r\n"].concat();
            let mut client = server.connect();
            // If the server closes the connection before it has read all bytes, the connection is reset before the answer is read.
            let _ = client.write_all(&body);
            let mut text = Vec::new();
            let _ = client.read_to_end(&mut text);
            let text = String::from_utf8_lossy(&text);
            assert!(text.is_empty() || text.starts_with("HTTP/1.1 413"), "request {number}: {text}");
        }
        11 => refused(post_head("/v1/completions", "Content-Length: 99999999").as_bytes(), 413),
        // These requests are malformed.
        12 => refused(&completion(b"{\"prompt\": \"a"), 400),
        13 => refused(&completion(&[b'['; 5000]), 400),
        14 => refused(&completion(b"\xff\xfe{}"), 400),
        15 => refused(&completion(b"{\"prompt\": [1e99, {}]}"), 400),
        16 => refused(&request("/v1/chat/completions", b"{\"messages\": [{}]}"), 400),
        _ => refused(b"\x16\x03\x01\x02\r\n\r\n", 400),
    }
}

/// Waits until the server computes no request, and checks that no request holds memory of the KV cache.
fn wait_until_idle(server: &Server) {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let (_, text) = answer(server, b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        let is_zero = |name: &str| text.lines().any(|line| line.strip_prefix(name) == Some(" 0.0"));
        let idle = ["running", "waiting"].iter().all(|name| is_zero(&format!("ottava:num_requests_{name}")));
        if idle && is_zero("ottava:kv_cache_usage_perc") {
            return;
        }
        assert!(Instant::now() < end, "requests that nobody waits for are in work:\n{text}");
        sleep(Duration::from_millis(20));
    }
}

/// Returns the resident memory of the server in bytes and the number of its open files, after clients have left.
pub fn resources(server: &Server) -> (u64, usize) {
    wait_until_idle(server);
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.id())).unwrap();
    let kibibytes =
        status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.parse().ok());
    (kibibytes.map_or(0, |count: u64| count << 10), files(server))
}

fn files(server: &Server) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", server.id())).unwrap().count()
}

#[test]
fn a_server_under_faulty_requests_neither_panics_nor_leaks() {
    let requests = std::env::var("OTTAVA_SOAK").map_or(REQUESTS, |count| count.parse().expect("a number of requests"));
    let run = Run::new();
    let server = Server::start(&run, &["--max-length", "40"]);
    wait_until_idle(&server);
    let files_at_start = files(&server);
    let expected = server.post("/v1/completions", greedy())["choices"][0]["text"].as_str().unwrap().to_string();
    let ask_all = |numbers: std::ops::Range<usize>| {
        let next = AtomicUsize::new(numbers.start);
        scope(|scope| {
            for _ in 0..CLIENTS {
                scope.spawn(|| {
                    let mine = std::iter::repeat_with(|| next.fetch_add(1, Ordering::Relaxed));
                    mine.take_while(|&number| number < numbers.end).for_each(|number| ask(&server, number, &expected));
                });
            }
        });
        resources(&server)
    };
    let (before, _) = ask_all(0..requests / 5);
    let (after, mut open) = ask_all(requests / 5..requests);
    // The server closes a connection some time after its client has left.
    let end = Instant::now() + Duration::from_secs(10);
    while open > files_at_start && Instant::now() < end {
        sleep(Duration::from_millis(20));
        open = files(&server);
    }
    println!(
        "{requests} requests: {before} bytes after the first fifth, {after} at the end; {open} files, {files_at_start} at the start"
    );
    assert!(open <= files_at_start, "{open} open files; {files_at_start} before the first request");
    assert!(after <= before + GROWTH, "resident memory has grown from {before} to {after} bytes");
    server.signal();
    let (code, errors) = server.wait();
    assert!(code == Some(0) && !errors.contains("panicked"), "exit code {code:?}: {errors}");
}
