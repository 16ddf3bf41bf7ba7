//! Dishonest clients: thirteen kinds break the protocol or waste connections, and six kinds request much work.

use crate::serve::{Server, post_head, request};
use serde_json::{Map, Value, json};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

/// The bytes of a body that exceeds the server's limit of 16 MiB.
const OVERSIZED: usize = 17 << 20;
/// The time for which a client that wastes its connection keeps it.
const HELD: Duration = Duration::from_secs(3);
/// The pause of a client between two requests.
const PAUSE: Duration = Duration::from_millis(200);

/// The behaviour of a kind of client, which is repeated.
pub struct Kind {
    name: &'static str,
    attack: fn(&Client),
}

/// A dishonest client.
pub struct Client<'a> {
    server: &'a Server,
    stop: &'a AtomicBool,
    bodies: &'a [Vec<u8>],
}

/// All kinds of dishonest clients.
pub const KINDS: [Kind; 19] = [
    Kind { name: "streams that are never read", attack: |client| client.hold(client.begin(&client.bodies[0])) },
    Kind { name: "answers that are never read", attack: |client| client.hold(client.begin(&client.bodies[1])) },
    Kind { name: "half a head", attack: |client| client.hold(client.begin(&client.bodies[2][..20])) },
    Kind { name: "half a body", attack: |client| client.hold(client.begin(short_by(&client.bodies[2], 3))) },
    Kind { name: "nothing", attack: |client| client.hold(client.begin(b"")) },
    Kind { name: "a head byte by byte", attack: |client| client.drip(&client.bodies[2], 0) },
    Kind { name: "a body byte by byte", attack: |client| client.drip(&client.bodies[2], client.bodies[2].len() - 40) },
    Kind { name: "no HTTP", attack: |client| client.whole(b"\x16\x03\x01\x02\r\n\r\n", &[400]) },
    Kind { name: "a length that is too large", attack: |client| client.whole(&oversized_head(), &[413]) },
    Kind { name: "chunks that are too large", attack: |client| client.careless(&oversized_chunks()) },
    Kind { name: "a list of a million entries", attack: |client| client.whole(&client.bodies[3], &[400, 408, 429]) },
    Kind { name: "a client that leaves before the answer", attack: |client| drop(client.begin(&client.bodies[1])) },
    Kind { name: "nested JSON", attack: |client| client.whole(&client.bodies[4], &[400]) },
    Kind { name: "many log-probabilities", attack: |client| client.whole(&client.bodies[5], &[200, 429]) },
    Kind { name: "log-probabilities of a long prompt", attack: |client| client.whole(&client.bodies[6], &[200, 429]) },
    Kind { name: "a chat with huge tools", attack: |client| client.whole(&client.bodies[7], &[200, 400, 429]) },
    Kind { name: "a grammar that recurs and is long", attack: |client| client.grammars() },
    Kind { name: "long lists of stops and biases", attack: |client| client.whole(&client.bodies[9], &[200, 429]) },
    Kind { name: "a client that leaves within the answer", attack: |client| client.leave(&client.bodies[10]) },
];

fn short_by(bytes: &[u8], count: usize) -> &[u8] {
    &bytes[..bytes.len() - count]
}

fn oversized_head() -> Vec<u8> {
    post_head("/v1/completions", "Content-Length: 99999999").into_bytes()
}

fn oversized_chunks() -> Vec<u8> {
    let head = format!("{}{OVERSIZED:x}\r\n", post_head("/v1/completions", "Transfer-Encoding: chunked"));
    [head.as_bytes(), &vec![b' '; OVERSIZED], b"\r\n0\r\n\r\n"].concat()
}

/// Returns tools whose parameters are nested and refer to themselves.
fn huge_tools() -> Value {
    let node = |depth: usize| {
        (0..depth).fold(json!({"type": "string"}), |inner, _| json!({"type": "object", "properties": {"x": inner}}))
    };
    let tool = |number: usize| json!({"type": "function", "function": {"name": format!("tool{number}"), "description": "d".repeat(500), "parameters": node(20)}});
    (0..100).map(tool).collect()
}

/// Returns a schema of recursive trees, and a schema with many properties.
fn schemas() -> [Value; 2] {
    let tree = json!({"$defs": {"tree": {"type": "object", "properties": {
        "a": {"$ref": "#/$defs/tree"}, "b": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "array", "items": {"$ref": "#/$defs/tree"}}]}}}},
        "$ref": "#/$defs/tree"});
    let pattern = |number: usize| {
        (format!("p{number}"), json!({"type": "string", "pattern": format!("^(a|b{number}){{1,50}}$")}))
    };
    let wide: Map<String, Value> = (0..300).map(pattern).collect();
    [tree, json!({"type": "object", "properties": wide})]
}

/// Returns the bytes of the requests of [`KINDS`].
pub fn bodies() -> Vec<Vec<u8>> {
    let completion = |body: Value| request("/v1/completions", body.to_string().as_bytes());
    let many = |stream: bool| json!({"prompt": vec!["line"; 4], "n": 32, "max_tokens": 200, "logprobs": 9, "ignore_eos": true, "stream": stream});
    let long: String = "the line of the text ".repeat(60);
    let tokens: Vec<u32> = (0..1000).map(|token| token % 4000).collect();
    let chat =
        json!({"messages": vec![json!({"role": "user", "content": long}); 50], "tools": huge_tools(), "max_tokens": 4});
    let [tree, wide] = schemas();
    let constrained =
        |schema: Value| completion(json!({"prompt": "a", "max_tokens": 30, "guided_json": schema, "n": 4}));
    let biases: Map<String, Value> = (0..1024).map(|id| (id.to_string(), 1.into())).collect();
    let stops: Vec<String> = (0..16).map(|number| format!("{number}{}", "a".repeat(1000))).collect();
    let listed = json!({"prompt": "aaaa", "stop": stops, "logit_bias": biases, "max_tokens": 100, "n": 8, "ignore_eos": true,
        "stop_token_ids": (0..128).collect::<Vec<u32>>(), "presence_penalty": 1.5, "repetition_penalty": 1.2});
    vec![
        completion(many(true)),
        completion(many(false)),
        completion(json!({"prompt": "line 4", "max_tokens": 6, "temperature": 0})),
        completion(json!({"prompt": "a", "stop": vec!["x"; 1_500_000]})),
        request("/v1/completions", &[b'['; 100_000]),
        completion(json!({"prompt": "a", "max_tokens": 200, "n": 32, "ignore_eos": true, "logprobs": 1})),
        completion(json!({"prompt": tokens, "max_tokens": 1, "echo": true, "logprobs": 100})),
        request("/v1/chat/completions", chat.to_string().as_bytes()),
        constrained(tree),
        completion(listed),
        completion(many(true)),
        constrained(wide),
        completion(json!({"prompt": "a", "max_tokens": 30, "guided_regex": "((a{1,90}|b){1,90}c?){1,90}"})),
    ]
}

impl Client<'_> {
    fn stops(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Connects and sends `bytes`.
    fn begin(&self, bytes: &[u8]) -> TcpStream {
        let mut client = self.server.connect();
        // An error is ignored, because the server may have closed the connection.
        let _ = client.write_all(bytes);
        client
    }

    /// Keeps a connection open for [`HELD`].
    fn hold(&self, client: TcpStream) {
        let end = Instant::now() + HELD;
        while !self.stops() && Instant::now() < end {
            sleep(Duration::from_millis(20));
        }
        drop(client);
    }

    /// Sends `bytes[..from]` at once, and the other bytes one by one.
    fn drip(&self, bytes: &[u8], from: usize) {
        let mut client = self.begin(&bytes[..from]);
        for byte in &bytes[from..] {
            if self.stops() || client.write_all(&[*byte]).is_err() {
                return;
            }
            sleep(Duration::from_millis(50));
        }
    }

    /// Sends a request, and expects an answer with one of these status codes, unless the test ends before.
    fn whole(&self, bytes: &[u8], expected: &[u16]) {
        let (mut client, mut answer, mut part) = (self.begin(bytes), Vec::new(), [0; 1 << 16]);
        client.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        while !self.stops() {
            match client.read(&mut part) {
                Ok(0) => break,
                Ok(count) => answer.extend(&part[..count]),
                Err(error) if [ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&error.kind()) => {}
                Err(_) => break,
            }
        }
        let text = String::from_utf8_lossy(&answer);
        let status = text.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)?.parse().ok());
        let is_right = status.map_or(self.stops(), |status| expected.contains(&status));
        assert!(is_right, "{}", text.chars().take(500).collect::<String>());
    }

    /// Sends a request. The server may close the connection at any time.
    fn careless(&self, bytes: &[u8]) {
        let mut text = Vec::new();
        let _ = self.begin(bytes).read_to_end(&mut text);
    }

    fn grammars(&self) {
        [8, 11, 12].iter().filter(|_| !self.stops()).for_each(|&body| self.whole(&self.bodies[body], &[200, 400, 429]));
    }

    /// Reads the beginning of a stream, and then closes the connection.
    fn leave(&self, bytes: &[u8]) {
        let lines = BufReader::new(self.begin(bytes)).lines().map_while(Result::ok);
        let _ = lines.take_while(|_| !self.stops()).take(40).count();
    }
}

/// Runs `work` while `count` clients of all kinds in turn attack the server.
pub fn beside<T>(server: &Server, bodies: &[Vec<u8>], count: usize, work: impl FnOnce() -> T) -> T {
    let stop = AtomicBool::new(false);
    scope(|scope| {
        for kind in KINDS.iter().cycle().take(count) {
            let client = Client { server, stop: &stop, bodies };
            let attack = move || {
                while !client.stops() {
                    (kind.attack)(&client);
                    sleep(PAUSE);
                }
            };
            // The name of the thread says for which kind the server gave an unexpected answer.
            std::thread::Builder::new().name(kind.name.into()).spawn_scoped(scope, attack).unwrap();
        }
        let done = work();
        stop.store(true, Ordering::Relaxed);
        done
    })
}
