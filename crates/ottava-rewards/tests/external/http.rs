//! The reward `http`.

use crate::score;
use ottava_common::Error;
use ottava_http::testing::{Received, Server, reply};
use ottava_rewards::{Deadline, Scored};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Scores six completions in batches of two, with settings after the address.
fn run(server: &Server, more: &str) -> Result<Scored, Error> {
    let settings = format!("type = 'http'\nurl = '{}'\nbatch_size = 2\n{more}", server.url("/score"));
    score(&settings, 6, Deadline::after(Duration::from_secs(30)))
}

/// The answer to a request whose first completion is number i: rewards i and null.
fn answer(request: &Received) -> Vec<u8> {
    let number = |key: &str| {
        let after = request.body.split_once(key).unwrap().1;
        after.split(|c: char| !c.is_ascii_digit()).next().unwrap().to_string()
    };
    let (id, first) = (number("\"id\":"), number("\"completion\":\"c"));
    reply(200, "", &format!("{{\"id\":{id},\"rewards\":[{first},null],\"metrics\":{{\"depth\":{id}}}}}"))
}

#[test]
fn a_server_scores_batches_at_the_same_time() {
    let server = Server::start(|_, request| {
        sleep(Duration::from_millis(250));
        answer(request)
    });
    let scored = run(&server, "concurrency = 2").unwrap();
    assert_eq!(scored.totals, [Some(0.0), None, Some(2.0), None, Some(4.0), None]);
    assert_eq!(scored.metrics["rewards/http/metrics/depth"], 1.0);
    assert_eq!((server.received().len(), server.most_open()), (3, 2));
}

#[test]
fn faults_that_may_pass_are_tried_again() {
    let server = Server::start(|number, request| match number {
        0 => reply(503, "", "busy"),
        1 => reply(429, "Retry-After: 0\r\n", ""),
        2 => reply(200, "", "{\"id\":99,\"rewards\":[]}"),
        3 => Vec::new(),
        _ => answer(request),
    });
    let scored = run(&server, "concurrency = 4\nattempts = 3").unwrap();
    assert_eq!(scored.totals[4], Some(4.0));
    assert_eq!(server.received().len(), 7);
}

#[test]
fn faults_that_last_end_the_run_or_are_settled() {
    let server = Server::start(
        |_, request| if request.body.contains("c2") { reply(400, "", "bad row") } else { answer(request) },
    );
    let error = run(&server, "").unwrap_err();
    assert!(matches!(error, Error::External(_)), "{error:?}");
    assert!(error.to_string().contains("reward `http`: http://127.0.0.1"), "{error}");
    assert!(error.to_string().ends_with("/score answered with status 400: bad row"), "{error}");
    let scored = run(&server, "on_error = 'zero'").unwrap();
    assert_eq!(scored.totals, [Some(0.0), None, Some(0.0), Some(0.0), Some(4.0), None]);
    assert_eq!(scored.metrics["rewards/http/metrics/failed"], 1.0 / 3.0);
}

#[test]
fn hanging_and_endless_servers_end_in_time() {
    let hanging = Server::start(|_, _| {
        sleep(Duration::from_secs(60));
        Vec::new()
    });
    let began = Instant::now();
    let error = run(&hanging, "timeout = 0.1\nattempts = 1").unwrap_err().to_string();
    assert!(error.ends_with("did not answer in time"), "{error}");
    let settings = format!("type = 'http'\nurl = '{}'\non_error = 'skip'", hanging.url("/"));
    let error = score(&settings, 2, Deadline::after(Duration::from_millis(100))).unwrap_err().to_string();
    assert!(error.contains("took longer"), "{error}");
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    let endless = Server::start(|_, _| reply(200, "", &"[".repeat(9 << 20)));
    let error = run(&endless, "").unwrap_err().to_string();
    assert!(error.contains("is larger than 8388608 bytes"), "{error}");
}
