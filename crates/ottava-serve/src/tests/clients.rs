//! Tests clients that leave and clients that send or read slowly or never, their effect on other clients, and the end of a server.

use super::*;
use std::io::{BufRead, BufReader, Read};
use std::sync::atomic::{AtomicBool, Ordering};

const COMPLETIONS: &str = "/v1/completions";

/// Returns a request for a stream of 10 MB, more than the operating system buffers for a client that does not read.
fn long_stream() -> Value {
    json!({"prompt": TEXT, "n": 128, "max_tokens": 150, "logprobs": 3, "stream": true, "temperature": 0})
}

/// Returns the text of choice 5 in a stream, and whether the stream ended with `[DONE]`.
fn text_of(stream: &str) -> (String, bool) {
    // Chunked transfer encoding adds a line with a length before each event.
    let events = stream.lines().filter_map(|line| line.strip_prefix("data: {")).map(|rest| format!("{{{rest}"));
    let events = events.map(|event| serde_json::from_str::<Value>(&event).unwrap()["choices"][0].clone());
    let text = events.filter(|choice| choice["index"] == 5).map(|choice| choice["text"].as_str().unwrap().to_string());
    (text.collect(), stream.contains("data: [DONE]"))
}

#[test]
fn a_client_that_leaves_ends_its_work() {
    let server = start(|_, parrot| parrot.pause = Duration::from_millis(10));
    for stream in [true, false] {
        let client =
            server.send(&server.request(COMPLETIONS, &json!({"prompt": TEXT, "max_tokens": 150, "stream": stream})));
        if stream {
            let mut lines = BufReader::new(&client).lines();
            let begun = lines.by_ref().map_while(Result::ok).any(|line| line.starts_with("data: {"));
            assert!(begun, "the answer has begun");
        } else {
            server.log.wait("it is in work", |log| log.requests.len() == 2);
        }
        drop(client);
        let expected = if stream { 1 } else { 2 };
        server.log.wait("the engine goes on for nobody", |log| log.cancelled.len() >= expected);
        assert!(server.log.get(|log| log.steps[0] < 140));
    }
}

#[test]
fn streams_that_nobody_reads_are_held_and_keep_no_permit() {
    let server = start(|options, _| (options.max_requests, options.client_timeout) = (2, Duration::from_secs(2)));
    let unread: Vec<TcpStream> = (0..2).map(|_| server.send(&server.request(COMPLETIONS, &long_stream()))).collect();
    server.log.wait("both are held", |log| log.holds >= 256);
    assert_eq!(server.call(COMPLETIONS, Some(&json!({"prompt": "a"})), None).0, 200, "no permit is kept");
    // Completions are cancelled at the deadline.
    server.log.wait("they are cancelled", |log| log.cancelled.len() == 256);
    drop(unread);
}

#[test]
fn a_slow_client_gets_the_whole_answer() {
    let server = start(|_, _| {});
    let mut slow = server.send(&server.request(COMPLETIONS, &long_stream()));
    server.log.wait("it is held", |log| log.holds > 0);
    let mut whole = json!({"prompt": TEXT, "max_tokens": 150, "temperature": 0});
    let expected = server.post(COMPLETIONS, whole.take())["choices"][0]["text"].as_str().unwrap().to_string();
    let (mut bytes, mut buffer) = (Vec::new(), vec![0; 1 << 16]);
    while !bytes.ends_with(b"0\r\n\r\n") {
        let count = slow.read(&mut buffer).unwrap();
        assert!(count > 0, "the stream goes on to its end");
        bytes.extend_from_slice(&buffer[..count]);
    }
    assert_eq!(text_of(&String::from_utf8(bytes).unwrap()), (expected, true));
}

#[test]
fn a_request_with_many_completions_does_not_delay_one_with_few() {
    let server = start(|_, parrot| (parrot.max_batch, parrot.pause) = (4, Duration::from_millis(2)));
    let many = server.send(&server.request(COMPLETIONS, &json!({"prompt": TEXT, "n": 100, "max_tokens": 20})));
    server.log.wait("it has all places", |log| log.requests.len() == 4);
    server.post(COMPLETIONS, json!({"prompt": "a stone", "max_tokens": 3}));
    let stone = tokenizer().encode_prompt("a stone").unwrap();
    let before = server.log.get(|log| log.requests.iter().position(|request| request.prompt == stone).unwrap());
    assert!(before < 12, "it has had its turn after {before} others");
    drop(many);
}

#[test]
fn long_requests_give_their_place_to_short_ones_and_get_it_back() {
    let server = start(|_, parrot| (parrot.max_batch, parrot.pause) = (2, Duration::from_micros(300)));
    let long = json!({"prompt": TEXT, "n": 20, "max_tokens": 150, "temperature": 0});
    let (first, second, held) = std::thread::scope(|scope| {
        let ask = || scope.spawn(|| server.post(COMPLETIONS, long.clone()));
        let (first, second) = (ask(), ask());
        // By now, each of these requests has computed some hundred tokens, and has one of the two places.
        server.log.wait("both run", |log| log.requests.len() >= 18);
        server.post(COMPLETIONS, json!({"prompt": "a stone", "max_tokens": 3}));
        let held = server.log.get(|log| log.holds);
        (first.join().unwrap(), second.join().unwrap(), held)
    });
    assert!(held > 0, "it has got a place in the middle of a completion");
    let alone = server.post(COMPLETIONS, json!({"prompt": TEXT, "max_tokens": 150, "temperature": 0}));
    for answer in [first, second] {
        let choices = answer["choices"].as_array().unwrap();
        assert_eq!(choices.len(), 20);
        assert!(choices.iter().all(|choice| choice["text"] == alone["choices"][0]["text"]), "{answer}");
    }
}

#[test]
fn a_short_request_does_not_wait_for_the_end_of_long_ones() {
    let server = start(|_, parrot| (parrot.max_batch, parrot.pause) = (2, Duration::from_millis(5)));
    let long = json!({"prompt": TEXT, "max_tokens": 190, "temperature": 0});
    std::thread::scope(|scope| {
        let both = [0, 1].map(|_| scope.spawn(|| server.post(COMPLETIONS, long.clone())));
        server.log.wait("both run", |log| log.requests.len() == 2);
        // The work takes a second. By now, the requests have got more tokens than a slice.
        sleep(Duration::from_millis(300));
        server.post(COMPLETIONS, json!({"prompt": "a stone", "max_tokens": 3}));
        assert_eq!(server.log.get(|log| log.holds), 1, "it has taken the place of one of them");
        let [first, second] = both.map(|long| long.join().unwrap()["choices"].clone());
        assert_eq!(first, second, "the other goes on where it was");
    });
}

/// Sends `count` requests whose answers are never read, and waits until the server has received all of them.
fn send_all(server: &Server, count: usize, body: &Value) -> Vec<TcpStream> {
    let clients = (0..count).map(|_| server.send(&server.request(COMPLETIONS, body))).collect();
    let end = Instant::now() + Duration::from_secs(10);
    let has_all = || {
        let health: Value = serde_json::from_str(&server.call("/health", None, None).1).unwrap();
        health["in_flight"] == count
    };
    while !has_all() {
        assert!(Instant::now() < end, "the server gets all requests");
        sleep(Duration::from_millis(2));
    }
    clients
}

#[test]
fn short_requests_do_not_wait_behind_long_ones_that_wait() {
    let server = start(|options, parrot| {
        (options.max_requests, parrot.max_batch, parrot.pause) = (20, 2, Duration::from_millis(2));
    });
    let long = send_all(&server, 12, &json!({"prompt": TEXT, "max_tokens": 150}));
    server.post(COMPLETIONS, json!({"prompt": "a stone", "max_tokens": 3}));
    let stone = tokenizer().encode_prompt("a stone").unwrap();
    let before = server.log.get(|log| log.requests.iter().position(|request| request.prompt == stone).unwrap());
    assert!(before < 8, "it has had its turn after {before} long requests");
    drop(long);
}

#[test]
fn a_long_request_goes_on_beside_any_number_of_short_ones() {
    let server = start(|_, parrot| (parrot.max_batch, parrot.pause) = (2, Duration::from_millis(2)));
    let is_done = AtomicBool::new(false);
    let unanswered = std::thread::scope(|scope| {
        let short = || {
            let goes_on = |_: &usize| !is_done.load(Ordering::Relaxed);
            let ask = |_: &usize| drop(server.post(COMPLETIONS, json!({"prompt": "a stone", "max_tokens": 3})));
            (0..200).take_while(goes_on).inspect(ask).count()
        };
        let others = [0; 5].map(|_| scope.spawn(short));
        server.log.wait("the places are taken", |log| log.requests.len() >= 10);
        server.post(COMPLETIONS, json!({"prompt": TEXT, "max_tokens": 100}));
        is_done.store(true, Ordering::Relaxed);
        others.map(|short| short.join().unwrap())
    });
    assert!(unanswered.iter().all(|&count| count < 200), "it ends before the short ones: {unanswered:?}");
}

#[test]
fn completions_of_a_request_begin_in_one_step() {
    let server = start(|_, parrot| parrot.pause = Duration::from_millis(2));
    let answer = server.post(COMPLETIONS, json!({"prompt": vec![TEXT; 16], "n": 4, "max_tokens": 3}));
    assert_eq!(answer["choices"].as_array().unwrap().len(), 64);
    assert_eq!(server.log.get(|log| log.steps.clone()), vec![0; 64]);
}

#[test]
fn clients_that_do_not_send_are_cut_off() {
    let server = start(|options, _| options.client_timeout = Duration::from_millis(300));
    let request = server.request(COMPLETIONS, &json!({"prompt": "a"}));
    let answers = [&request[..0], &request[..20], &request[..request.len() - 4]].map(|part| {
        let (mut client, mut answer) = (server.send(part), Vec::new());
        let _ = client.read_to_end(&mut answer);
        String::from_utf8(answer).unwrap()
    });
    assert_eq!((answers[0].as_str(), answers[1].as_str()), ("", ""), "without a request, there is no answer");
    assert!(answers[2].starts_with("HTTP/1.1 408"), "{}", answers[2]);
}

#[test]
fn idle_connections_make_room() {
    let server = start(|options, _| options.max_connections = 4);
    let request = server.request(COMPLETIONS, &json!({"prompt": "a", "max_tokens": 2}));
    // This connection has had an answer, so the other connections are closed first.
    let mut kept = server.send(&request);
    assert!(kept.read(&mut [0; 4096]).unwrap() > 0);
    let idle: Vec<TcpStream> =
        (0..30).map(|number| server.send(&request[..[0, 20, request.len() - 4][number % 3]])).collect();
    for _ in 0..8 {
        server.post(COMPLETIONS, json!({"prompt": "a", "max_tokens": 2}));
    }
    kept.write_all(&request).unwrap();
    let mut answer = [0; 12];
    kept.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200");
    drop(idle);
}

#[test]
fn a_text_that_its_constraint_ends_too_early_is_an_error() {
    let server = start(|_, parrot| parrot.fails = Some(Failure::Stuck));
    let request = |stream: bool| json!({"prompt": "a", "guided_regex": "a+", "max_tokens": 9, "stream": stream});
    let (status, error) = server.refused(COMPLETIONS, &request(false));
    assert!(
        status == 400 && error["message"].as_str().unwrap().starts_with("after 1 tokens, the constraint"),
        "{error}"
    );
    let streamed = server.send(&server.request(COMPLETIONS, &request(true)));
    let events = BufReader::new(streamed).lines().map_while(Result::ok);
    let error = events.take_while(|line| line != "data: [DONE]").find(|line| line.contains("invalid_request_error"));
    assert!(error.is_some_and(|line| line.contains("the constraint")));
}

#[test]
fn a_failed_engine_ends_the_server() {
    for (failure, words) in [(Failure::Error, "a logit is NaN"), (Failure::Panic, "the parrot has flown")] {
        let server = start(|options, parrot| {
            (parrot.fails, parrot.pause) = (Some(failure), Duration::from_millis(50));
            options.shutdown_timeout = Duration::from_secs(60);
        });
        // A request that is sent only in part must not delay the end.
        let half = server.request(COMPLETIONS, &json!({"prompt": "a"}));
        let half = server.send(&half[..half.len() - 4]);
        let streamed = server.send(&server.request(COMPLETIONS, &json!({"prompt": "a", "stream": true})));
        let (status, error) = server.refused(COMPLETIONS, &json!({"prompt": "a"}));
        assert!(status == 500 && error["message"].as_str().unwrap().contains(words), "{error}");
        let streamed: String = BufReader::new(streamed).lines().map_while(Result::ok).collect();
        assert!(streamed.contains("server_error") && streamed.contains(words), "{streamed}");
        let started = Instant::now();
        assert!(server.thread.join().unwrap().unwrap_err().to_string().contains(words));
        assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
        drop(half);
    }
}

#[test]
fn the_page_needs_no_key_and_loads_nothing_from_elsewhere() {
    let server = start(|options, _| options.api_key = Some("secret".into()));
    let mut response = agent().get(format!("http://{}/", server.address)).call().unwrap();
    let header = |name: &str| response.headers()[name].to_str().unwrap().to_string();
    assert_eq!((response.status().as_u16(), header("content-type").as_str()), (200, "text/html; charset=utf-8"));
    assert!(header("content-security-policy").contains("default-src 'none'"));
    let text = response.body_mut().read_to_string().unwrap();
    for path in ["v1/models", "v1/chat/completions"] {
        assert!(text.contains(&format!("fetch(\"{path}\"")), "{path}");
    }
    assert!(!["http://", "https://", "src=", "@import", "url("].iter().any(|word| text.contains(word)));
    assert_eq!(server.call("/v1/models", None, None).0, 401);
}
