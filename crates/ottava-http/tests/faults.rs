//! Tests a client with servers that fail in many ways.

use ottava_http::testing::{Server, reply};
use ottava_http::{Client, Fault, Request, Secret, Url};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

/// Returns the result of one request to a server that sends `answer`.
fn post(answer: Vec<u8>) -> Result<String, Fault> {
    let server = Server::start(move |_, _| answer.clone());
    let client = Client::new(Url::new("url", &server.url("/score")).unwrap(), None, 1000).unwrap();
    client.post_json(b"{}", Duration::from_secs(20)).map(|body| String::from_utf8(body).unwrap())
}

#[test]
fn an_answer_is_returned_and_the_request_is_json() {
    let server = Server::start(|_, _| reply(200, "", "[1]"));
    let client = Client::new(Url::new("url", &server.url("/score")).unwrap(), None, 1000).unwrap();
    assert_eq!(client.post_json(b"{\"id\":1}", Duration::from_secs(20)).unwrap(), b"[1]");
    let request = server.received().remove(0);
    assert!(request.head.starts_with("POST /score HTTP/1.1"), "{}", request.head);
    assert!(request.head.to_lowercase().contains("content-type: application/json"), "{}", request.head);
    assert_eq!(request.body, "{\"id\":1}");
}

#[test]
fn a_header_of_a_request_is_sent_once() {
    let server = Server::start(|_, _| reply(200, "", ""));
    let key = Secret::from_text("KEY", "of-the-server");
    let client = Client::new(Url::new("url", &server.url("/")).unwrap(), key, 1000).unwrap();
    let request = || Request::post(b"{}").header("Content-Type", "text/plain").header("content-type", "text/csv");
    let send = |request: Request| drop(client.send(request, Duration::from_secs(20)).unwrap().success().unwrap());
    send(request());
    send(request().header("Authorization", "Basic of-the-address"));
    for (received, key) in server.received().iter().zip(["Bearer of-the-server", "Basic of-the-address"]) {
        let head = received.head.to_lowercase();
        assert_eq!(head.matches("content-type:").count(), 1, "{head}");
        assert_eq!(head.matches("authorization:").count(), 1, "{head}");
        assert_eq!((received.header("content-type"), received.header("authorization")), (Some("text/csv"), Some(key)));
    }
}

#[test]
fn faults_say_whether_they_may_pass() {
    let endless = b"HTTP/1.1 200 x\r\nTransfer-Encoding: chunked\r\n\r\n".iter().copied();
    let chunk = [b"1000\r\n".as_slice(), &[b'a'; 0x1000], b"\r\n"].concat();
    for (answer, words, may_pass) in [
        (reply(503, "", "busy\n  now"), "answered with status 503: busy now", true),
        (reply(429, "", ""), "answered with status 429", true),
        (reply(404, "", "none"), "answered with status 404: none", false),
        (
            reply(302, "Location: file:///etc/passwd\r\n", ""),
            "a redirect to file:///etc/passwd, which is not followed",
            false,
        ),
        (reply(200, "", &"a".repeat(1001)), "larger than 1000 bytes", false),
        (endless.chain(chunk.repeat(100)).collect(), "larger than 1000 bytes", false),
        (b"HTTP/1.1 200 x\r\nContent-Length: 50\r\n\r\nshort".to_vec(), "cannot be reached", true),
        (Vec::new(), "cannot be reached", true),
        (b"SSH-2.0-OpenSSH\r\n\r\n".to_vec(), "cannot be reached", true),
    ] {
        let fault = post(answer.clone()).unwrap_err();
        let answer = String::from_utf8_lossy(&answer[..answer.len().min(80)]).into_owned();
        assert!(fault.words.contains(words) && fault.may_pass == may_pass, "{answer}: {fault:?}");
    }
    assert_eq!(post(reply(429, "Retry-After: 7\r\n", "")).unwrap_err().pause, Some(Duration::from_secs(7)));
}

#[test]
fn a_server_that_hangs_or_is_gone_ends_in_time() {
    let server = Server::start(|_, _| {
        sleep(Duration::from_secs(60));
        Vec::new()
    });
    let url = Url::new("url", &server.url("/")).unwrap();
    let (client, began) = (Client::new(url, None, 1000).unwrap(), Instant::now());
    let fault = client.post_json(b"{}", Duration::from_millis(200)).unwrap_err();
    assert!(fault.words.ends_with("did not answer in time") && fault.may_pass, "{fault:?}");
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    // Nothing listens at port 1 of this loopback address.
    let client = Client::new(Url::new("url", "http://127.9.9.9:1/").unwrap(), None, 1000).unwrap();
    assert!(client.post_json(b"{}", Duration::from_secs(20)).unwrap_err().may_pass);
}

#[test]
fn a_server_without_tls_is_no_https_server() {
    let server = Server::start(|_, _| reply(200, "", ""));
    let url = Url::new("url", &server.url("/").replace("http://", "https://")).unwrap();
    let client = Client::new(url, None, 1000).expect("root certificates of the system");
    client.post_json(b"{}", Duration::from_millis(500)).unwrap_err();
    assert_eq!(server.received().len(), 0);
}

/// Runs the test `name` of this program with these environment variables.
fn rerun(name: &str, variables: &[(&str, &str)]) {
    let program = std::env::current_exe().unwrap();
    let variables = variables.iter().copied();
    let run = Command::new(program).args(["--exact", name, "--nocapture"]).envs(variables).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
}

#[test]
fn offline_refuses_every_connection() {
    let server = Server::start(|_, _| reply(200, "", "1"));
    let client = Client::new(Url::new("url", &server.url("/")).unwrap(), None, 1000);
    match std::env::var("OTTAVA_OFFLINE").as_deref() {
        Ok("1") => assert!(client.unwrap_err().to_string().contains("OTTAVA_OFFLINE is set")),
        Ok(_) => assert!(client.is_ok()),
        Err(_) => {
            ["1", "0"].iter().for_each(|value| rerun("offline_refuses_every_connection", &[("OTTAVA_OFFLINE", value)]))
        }
    }
}

#[test]
fn a_key_is_sent_and_never_shown() {
    if std::env::var("OTTAVA_TEST_KEY").is_err() {
        return rerun("a_key_is_sent_and_never_shown", &[("OTTAVA_TEST_KEY", "hunter2")]);
    }
    let server = Server::start(|_, request| reply(401, "", &format!("wrong: {}", request.head)));
    let key = Secret::from_env("api_key_env", "OTTAVA_TEST_KEY").unwrap();
    let client = Client::new(Url::new("url", &server.url("/")).unwrap(), Some(key), 1000).unwrap();
    let fault = client.post_json(b"{}", Duration::from_secs(20)).unwrap_err();
    assert!(server.received()[0].head.to_lowercase().contains("authorization: bearer hunter2"));
    let shown = format!("{fault:?} {client:?}");
    assert!(shown.contains("status 401") && !shown.contains("hunter2"), "{shown}");
}

/// Creates a certificate for 127.0.0.1 and its key in these files. Returns false if openssl is missing.
fn make_certificate(certificate: &Path, key: &Path) -> bool {
    let subject = [
        "-subj",
        "/CN=ottava",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-addext",
        "basicConstraints=CA:FALSE",
        "-days",
        "2",
    ];
    let kind = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];
    let run =
        Command::new("openssl").args(kind).args(subject).arg("-out").arg(certificate).arg("-keyout").arg(key).output();
    run.is_ok_and(|run| run.status.success())
}

/// Starts a server with TLS that answers one request with `1`. Returns its address.
fn serve_tls(certificate: &Path, key: &Path) -> String {
    let certificates = vec![CertificateDer::from_pem_file(certificate).unwrap()];
    let config = ServerConfig::builder_with_provider(Arc::new(rustls_graviola::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(certificates, PrivateKeyDer::from_pem_file(key).unwrap())
        .unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("https://{}/", listener.local_addr().unwrap());
    thread::spawn(move || {
        let mut stream =
            StreamOwned::new(ServerConnection::new(Arc::new(config)).unwrap(), listener.accept().unwrap().0);
        let mut request = Vec::new();
        while !request.ends_with(b"{}")
            && Read::by_ref(&mut stream).take(1).read_to_end(&mut request).is_ok_and(|length| length > 0)
        {}
        stream.write_all(&reply(200, "", "1")).ok();
    });
    url
}

#[test]
fn https_trusts_the_certificates_of_the_system_alone() {
    const NAME: &str = "https_trusts_the_certificates_of_the_system_alone";
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let file = |name: &str| folder.join(name);
    let (certificate, key) = (file("certificate.pem"), file("key.pem"));
    let Ok(trusted) = std::env::var("OTTAVA_TEST_TRUSTED") else {
        if !make_certificate(&certificate, &key) || !make_certificate(&file("other.pem"), &file("other-key.pem")) {
            return println!("skipped: there is no openssl");
        }
        for name in ["certificate.pem", "other.pem"] {
            rerun(NAME, &[("OTTAVA_TEST_TRUSTED", name), ("SSL_CERT_FILE", file(name).to_str().unwrap())]);
        }
        return;
    };
    let url = Url::new("url", &serve_tls(&certificate, &key)).unwrap();
    let answer = Client::new(url, None, 1000).unwrap().post_json(b"{}", Duration::from_secs(20));
    match trusted == "other.pem" {
        false => assert_eq!(answer.unwrap(), b"1"),
        true => {
            let fault = answer.unwrap_err();
            assert!(fault.words.contains("certificate") && !fault.may_pass, "{fault:?}");
        }
    }
}
