//! Tests honest clients together with dishonest clients of all kinds in [`attack`](crate::attack): honest clients lose nothing, and memory stays
//! bounded.

use crate::attack::{KINDS, beside, bodies};
use crate::serve::Server;
use crate::setup::Run;
use crate::soak::{GROWTH, greedy, resources};
use std::path::Path;
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

/// The numbers of honest clients, of requests of each, and of dishonest clients: in the test suite, and with `OTTAVA_SOAK`.
const HONEST: [usize; 2] = [8, 64];
const REQUESTS: [usize; 2] = [1, 120];
const OTHERS: [usize; 2] = [KINDS.len(), 200];
/// The number of attacks. At least one of them must not increase the memory.
const ATTACKS: usize = 4;
/// The number of rows of the model's embedding.
const VOCABULARY: &str = "32768";

/// Starts a server whose model has a large vocabulary, a byte-level tokenizer and a chat template.
fn server(run: &Run) -> Server {
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tokenizer/tokenizer.json");
    run.write("model/tokenizer.json", &std::fs::read(tokenizer).unwrap());
    run.replace("model/config.json", "\"vocab_size\": 100", &format!("\"vocab_size\": {VOCABULARY}"));
    run.replace("model/config.json", "\"max_position_embeddings\": 64", "\"max_position_embeddings\": 2048");
    let template =
        "{% for m in messages %}{{ m.content }}\n{% endfor %}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}";
    run.write("model/chat_template.jinja", template.as_bytes());
    Server::start(run, &["--client-timeout", "5", "--max-length", "2048"])
}

/// Returns the largest resident memory of the server so far, in bytes.
fn peak(server: &Server) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.id())).unwrap();
    let line =
        status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    line.expect("the system tells it") << 10
}

/// Returns the memory in bytes that docs/serving.md ("Memory") allows for `clients` honest clients and `others` dishonest clients of all kinds in
/// turn.
fn bound(clients: usize, others: usize) -> u64 {
    let (all, of_kind) = ((clients + others) as u64, others.div_ceil(KINDS.len()) as u64);
    let bodies = (64 << 20) + all * (256 << 10);
    let connections = all * (128 << 10);
    // The tokens of a request of [`bodies`] with many completions: 4 prompts with 32 completions of 200 tokens each.
    let many = 4 * 32 * 200;
    let texts = 3 * bodies + 16 * all * many;
    // Two kinds request answers with 9 log-probabilities in addition to the drawn token's. Other kinds request one log-probability.
    let answers = 4 * 35 * of_kind * (2 * 10 * many + 2 * many / 4);
    let streams = 2 * of_kind * 4096 * (64 + 8 * 9);
    let prompts = of_kind * 1000 * (24 + 8 * 100);
    let logits = 4 * VOCABULARY.parse::<u64>().unwrap() * 256 + (32 << 20);
    bodies + connections + texts + answers + streams + prompts + logits
}

/// Sends `count` requests of each honest client. Returns their times in ascending order.
fn honest(server: &Server, clients: usize, count: usize, expected: &str) -> Vec<Duration> {
    let ask = || {
        let start = Instant::now();
        let answer = server.post("/v1/completions", greedy());
        assert_eq!(answer["choices"][0]["text"], expected);
        start.elapsed()
    };
    let mut times: Vec<Duration> = scope(|scope| {
        let clients: Vec<_> =
            (0..clients).map(|_| scope.spawn(|| (0..count).map(|_| ask()).collect::<Vec<_>>())).collect();
        clients.into_iter().flat_map(|client| client.join().expect("no request of it fails")).collect()
    });
    times.sort_unstable();
    times
}

#[test]
fn honest_clients_lose_nothing_to_others() {
    let is_long = std::env::var_os("OTTAVA_SOAK").is_some();
    let [clients, count, others] = [HONEST, REQUESTS, OTHERS].map(|of| of[usize::from(is_long)]);
    let run = Run::new();
    let server = server(&run);
    let expected = server.post("/v1/completions", greedy())["choices"][0]["text"].as_str().unwrap().to_string();
    let bodies = bodies();
    let alone = honest(&server, clients, count, &expected);
    let (idle, _) = resources(&server);
    let attacked = beside(&server, &bodies, others, || honest(&server, clients, count, &expected));
    let (peak, most) = (peak(&server), idle + bound(clients, others));
    // The first attacks leave a few MB of unknown origin. If there were a leak, every attack would leave more.
    let (mut before, mut after) = (0, resources(&server).0);
    for _ in 0..ATTACKS {
        beside(&server, &bodies, others.min(2 * KINDS.len()), || honest(&server, clients, 1, &expected));
        // Unread streams are cut off, and the allocator returns memory.
        let end = Instant::now() + Duration::from_secs(10);
        (before, after) = (after, resources(&server).0);
        while after > before + GROWTH && Instant::now() < end {
            sleep(Duration::from_millis(100));
            after = resources(&server).0;
        }
        if after <= before + GROWTH {
            break;
        }
    }
    let percentiles = |times: &[Duration]| [50, 90, 99].map(|percent| times[times.len() * percent / 100].as_secs_f64());
    let (alone, attacked) = (percentiles(&alone), percentiles(&attacked));
    println!(
        "{clients} clients, {count} requests each; seconds at the 50th, 90th and 99th percentile: {alone:.3?} alone, {attacked:.3?} beside \
         {others} others; {idle} bytes idle, {peak} at the peak of at most {most}, {before} before the last attack, {after} after it"
    );
    assert!(peak <= most, "the server has taken {peak} bytes; its documentation allows {most}");
    if is_long {
        assert!(attacked[2] <= 2.0 * alone[2], "others slow honest clients down");
    }
    assert!(after <= before + GROWTH, "each attack leaves memory, the last {before} to {after} bytes");
    server.signal();
    let (code, errors) = server.wait();
    assert!(code == Some(0) && !errors.contains("panicked"), "exit code {code:?}: {errors}");
}
