//! Tests the page and its data over HTTP, with folders of runs that the tests write.

use super::*;
use page::FILES;
use serde_json::{Value, json};
use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;

/// A server that shows the runs in a folder.
struct Page {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Page {
    fn of(folder: &Path) -> Page {
        let (stop, (sender, address)) = (Arc::new(AtomicBool::new(false)), channel());
        let (stopping, runs) = (stop.clone(), Monitor::new(vec![folder.to_path_buf()]).unwrap());
        let thread = std::thread::spawn(move || {
            let any = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0);
            monitor(runs, any, || stopping.load(Ordering::Relaxed), |address| sender.send(address).unwrap()).unwrap();
        });
        Page { address: address.recv().unwrap(), stop, thread: Some(thread) }
    }

    /// Requests `path`, and returns the status, the header that forbids other origins, and the text of the answer.
    fn get(&self, path: &str, header: (&str, &str)) -> (u16, String, String) {
        let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
        let mut answer = agent.get(format!("http://{}{path}", self.address)).header(header.0, header.1).call().unwrap();
        let policy = answer.headers().get("content-security-policy").map_or("", |value| value.to_str().unwrap());
        (answer.status().as_u16(), policy.to_string(), answer.body_mut().read_to_string().unwrap())
    }

    fn json(&self, path: &str) -> Value {
        let (status, _, text) = self.get(path, ("Accept", "*/*"));
        assert_eq!(status, 200, "{text}");
        serde_json::from_str(&text).unwrap()
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// Returns the places where `text` names another origin, or has markup that the policy forbids.
fn foreign(text: &str) -> Vec<&str> {
    let marks = [
        "http:",
        "https:",
        "ws:",
        "wss:",
        "src=\"//",
        "href=\"//",
        "@import",
        "innerHTML",
        "eval(",
        " style=\"",
        " onclick=",
    ];
    marks.into_iter().filter(|mark| text.contains(mark)).collect()
}

#[test]
fn the_page_names_no_other_origin_and_may_load_from_none() {
    let folder = tempfile::tempdir().unwrap();
    let page = Page::of(folder.path());
    for file in &FILES {
        let (status, policy, text) = page.get(file.path, ("Accept", "*/*"));
        assert_eq!((status, policy.split(';').next()), (200, Some("default-src 'self'")), "{}", file.path);
        // The first line of uPlot is a comment with its origin.
        let code = text.trim_start_matches("/*! https://github.com/leeoniya/uPlot (v1.6.32) */");
        // The XML namespace is only a name: nothing is loaded from this address.
        let code = code.trim_start_matches("<svg xmlns=\"http://www.w3.org/2000/svg\"");
        assert_eq!(foreign(code), Vec::<&str>::new(), "{}", file.path);
        assert_eq!(text, file.bytes);
    }
    assert_eq!(foreign("<script src=\"https://cdn.example/x.js\">"), ["https:"]);
    // Each script and style that the page names must exist.
    let html = FILES[0].bytes;
    let named = html.split(['"']).filter(|word| [".js", ".css", ".svg"].iter().any(|end| word.ends_with(end)));
    assert_eq!(named.filter(|name| FILES.iter().any(|file| file.path[1..] == **name)).count(), 5, "{html}");
}

#[test]
fn pages_of_other_sites_get_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let page = Page::of(folder.path());
    let own = format!("http://{}", page.address);
    for (header, status) in [
        (("Host", "evil.example"), 403),
        (("Origin", "https://evil.example"), 403),
        (("Origin", own.as_str()), 200),
        (("Host", "localhost:8090"), 200),
    ] {
        assert_eq!(page.get("/api/runs", header).0, status, "{header:?}");
    }
    for (path, status) in [
        ("/api/runs?since=x", 400),
        ("/api/runs?since=0:-1", 400),
        ("/api/logs", 400),
        ("/api/logs?run=7", 404),
        ("/api/settings?run=7", 404),
        ("/api/metrics.csv?run=7", 404),
        ("/api/metrics.json", 400),
        ("/../x", 404),
    ] {
        assert_eq!(page.get(path, ("Accept", "*/*")).0, status, "{path}");
    }
}

#[test]
fn a_page_gets_what_it_lacks_and_all_from_a_new_server() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("metrics.jsonl"), "{\"step\":1,\"loss\":2.5}\n").unwrap();
    let page = Page::of(folder.path());
    let first = page.json("/api/runs?epoch=&since=0:0");
    let (epoch, revision) = (first["epoch"].as_str().unwrap(), &first["runs"][0]["revision"]);
    assert_eq!(first["changes"]["0"]["series"]["loss"]["means"], json!([2.5]));
    let again = page.json(&format!("/api/runs?epoch={epoch}&since=0:{revision}"));
    assert_eq!((&again["changes"]["0"]["series"], &again["runs"][0]["state"]), (&json!({}), &json!("ended")));
    let other = page.json(&format!("/api/runs?epoch=older&since=0:{revision}"));
    assert_eq!(
        other["changes"]["0"]["series"]["loss"]["means"],
        json!([2.5]),
        "revisions of another server mean nothing"
    );
    assert_eq!(page.json("/api/runs?since=")["changes"], json!({}), "runs that are not shown send nothing");
}

#[test]
fn settings_and_metrics_of_a_run_are_answered_as_a_whole() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("metrics.jsonl", "{\"step\":1,\"loss\":2.5}\n");
    write("config.toml", "[optimizer]\nlearning_rate = 0.01\n");
    let page = Page::of(folder.path());
    page.json("/api/runs");
    assert_eq!(page.json("/api/settings?run=0"), json!({"optimizer.learning_rate": "0.01"}));
    assert_eq!(page.json("/api/metrics.json?run=0"), json!([{"step": 1, "loss": 2.5}]));
    let csv = page.get("/api/metrics.csv?run=0", ("Accept", "*/*"));
    assert_eq!((csv.0, csv.2.as_str()), (200, "step,loss\r\n1,2.5\r\n"));
    write("config.toml", "[optimizer");
    let (status, _, text) = page.get("/api/settings?run=0", ("Accept", "*/*"));
    assert!(status == 422 && text.contains("not valid TOML"), "{status} {text}");
}

#[test]
fn an_answer_of_a_hundred_thousand_steps_is_small() {
    let folder = tempfile::tempdir().unwrap();
    let line = |step: u64| {
        let noise = ((step * 2_654_435_761) % 1000) as f64 / 1000.0;
        format!(
            "{{\"step\":{step},\"loss\":{},\"grad_norm\":{noise},\"learning_rate\":0.0003,\"tokens\":{},\"tokens_per_second\":{},\
             \"peak_memory_bytes\":52625408,\"fp8_saturated\":{noise},\"fp8_underflowed\":{noise},\"fp8_non_finite\":0}}\n",
            2.0 + noise,
            step * 4096,
            1e5 + noise
        )
    };
    std::fs::write(folder.path().join("metrics.jsonl"), (1..=100_000).map(line).collect::<String>()).unwrap();
    let page = Page::of(folder.path());
    let (_, _, text) = page.get("/api/runs?since=0:0", ("Accept", "*/*"));
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&answer["runs"][0]["step"], &answer["runs"][0]["pending"]), (&json!(100_000), &json!(false)));
    let points = answer["changes"]["0"]["series"]["loss"]["steps"].as_array().unwrap().len();
    assert!((512..=1024).contains(&points), "{points}");
    assert!(text.len() < 500_000, "{} bytes", text.len());
}
