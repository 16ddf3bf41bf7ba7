//! Sends one request and reads its answer.

use crate::{Fault, Request, Secret, Url, offline, tls};
use ottava_common::{Error, Result};
use std::io::{self, Read};
use std::time::Duration;
use ureq::http::request::Builder;
use ureq::http::response::Parts;
use ureq::http::{HeaderMap, StatusCode};
use ureq::{Agent, Body, Proxy, SendBody};

/// The time limit for opening a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The maximum number of bytes of an answer that an error quotes.
const EXCERPT: usize = 300;

/// A client of one server. Clones and threads share its connections.
#[derive(Clone, Debug)]
pub struct Client {
    agent: Agent,
    url: Url,
    key: Option<Secret>,
    most_bytes: u64,
}

impl Client {
    /// Creates a client that sends requests with this `key` to `url`, and reads answers of at most `most_bytes` bytes. Does not open a connection
    /// yet.
    ///
    /// Errors with [`Error::Config`] if [`offline::reason`] forbids connections, or if this machine does not support HTTPS.
    pub fn new(url: Url, key: Option<Secret>, most_bytes: u64) -> Result<Client> {
        if let Some(reason) = offline::reason() {
            let why = format!("{reason} is set, which forbids connections; unset it or use no server");
            return Err(Error::Config(format!("{url} cannot be reached: {why}")));
        }
        if key.is_some() && !url.is_https() && !url.is_loopback() {
            tracing::warn!("{url} gets its key without encryption; use https:// outside of networks that you trust");
        }
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .user_agent(concat!("ottava/", env!("CARGO_PKG_VERSION")))
            .proxy(if url.is_loopback() { None } else { Proxy::try_from_env() });
        if url.is_https() {
            config = config.tls_config(tls::config()?);
        }
        Ok(Client { agent: config.build().new_agent(), url, key, most_bytes })
    }

    /// Returns the URL of the server.
    pub fn url(&self) -> &Url {
        &self.url
    }

    /// Returns a client of another address `url`. It shares connections and the key if scheme, host and port are equal. A client of another server has
    /// no key, so a redirect cannot carry the key to another server.
    ///
    /// Has the errors of [`Client::new`].
    pub fn at(&self, url: Url) -> Result<Client> {
        match url.origin() == self.url.origin() {
            true => Ok(Client { url, ..self.clone() }),
            false => Client::new(url, None, self.most_bytes),
        }
    }

    /// Sends the JSON text `body` with POST, and returns the body of a successful answer (2xx). `timeout` limits the whole request.
    ///
    /// Statuses 408, 429 and 5xx, lost connections and timeouts are temporary faults. Other statuses and answers that are too large are permanent
    /// faults.
    pub fn post_json(&self, body: &[u8], timeout: Duration) -> Result<Vec<u8>, Fault> {
        self.send(Request::post(body).header("Content-Type", "application/json"), timeout)?.success()?.read()
    }

    /// Sends `request` with the key, unless the request has its own header of this name. Returns its answer with any status before the body of the answer is read. Redirects are not followed. `timeout` limits the
    /// whole request, including the time until the body has been read.
    ///
    /// Lost connections and timeouts are temporary faults.
    pub fn send(&self, request: Request, timeout: Duration) -> Result<Answer<'_>, Fault> {
        let mut built = ureq::http::Request::builder().method(request.method).uri(self.url.as_str());
        for (name, value) in &request.headers {
            built = built.header(name, value);
        }
        if let Some((name, value)) = self.key.as_ref().map(Secret::header).filter(|(name, _)| !request.has(name)) {
            built = built.header(name, value);
        }
        let (head, body) = match request.body {
            Some(mut body) => self.run(built, SendBody::from_reader(&mut *body), timeout)?,
            None => self.run(built, SendBody::none(), timeout)?,
        };
        Ok(Answer { client: self, head, body })
    }

    fn run(&self, request: Builder, body: SendBody, timeout: Duration) -> Result<(Parts, Body), Fault> {
        let request = request.body(body).map_err(|error| Fault::lasting(format!("{}: {error}", self.url)))?;
        let request = self.agent.configure_request(request).timeout_global(Some(timeout)).build();
        Ok(self.agent.run(request).map_err(|error| self.fault(error))?.into_parts())
    }

    /// Returns the fault of a request without a complete answer.
    fn fault(&self, error: ureq::Error) -> Fault {
        let url = &self.url;
        match error {
            ureq::Error::Timeout(_) => Fault::passing(format!("{url} did not answer in time")),
            ureq::Error::BodyExceedsLimit(_) => {
                Fault::lasting(format!("the answer of {url} is larger than {} bytes", self.most_bytes))
            }
            ureq::Error::Io(error) if is_of_tls(&error) => Fault::lasting(format!("{url} is not trusted: {error}")),
            ureq::Error::Io(_)
            | ureq::Error::ConnectionFailed
            | ureq::Error::HostNotFound
            | ureq::Error::Protocol(_)
            | ureq::Error::ConnectProxyFailed(_) => Fault::passing(format!("{url} cannot be reached: {error}")),
            error => Fault::lasting(format!("{url} cannot be reached: {error}")),
        }
    }

    /// Returns the fault of an answer whose status is not a success.
    fn refusal(&self, status: StatusCode, headers: &HeaderMap, body: &[u8]) -> Fault {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let (url, header) = (&self.url, text("location").filter(|_| status.is_redirection()));
        let more = match header {
            Some(location) => format!("a redirect to {}, which is not followed; set the url to it", excerpt(location)),
            None => excerpt(&String::from_utf8_lossy(&body[..body.len().min(EXCERPT * 4)])),
        };
        let more = self.key.as_ref().map_or(more.clone(), |key| key.redact(&more));
        let colon = if more.is_empty() { "" } else { ": " };
        Fault {
            words: format!("{url} answered with status {}{colon}{more}", status.as_u16()),
            may_pass: matches!(status.as_u16(), 408 | 429) || status.is_server_error(),
            pause: text("retry-after").and_then(|seconds| seconds.trim().parse().ok()).map(Duration::from_secs),
            status: Some(status.as_u16()),
        }
    }
}

/// The answer to a request: its status, its headers, and a body that has not been read yet.
pub struct Answer<'a> {
    client: &'a Client,
    head: Parts,
    body: Body,
}

impl<'a> Answer<'a> {
    /// Returns the status, such as 200.
    pub fn status(&self) -> u16 {
        self.head.status.as_u16()
    }

    /// Returns the first header with this name if it is text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.headers.get(name)?.to_str().ok()
    }

    /// Returns the answer if its status is a success (2xx), and otherwise the fault that quotes the status and the beginning of the body.
    pub fn success(self) -> Result<Answer<'a>, Fault> {
        if self.head.status.is_success() {
            return Ok(self);
        }
        let Answer { client, head, body } = self;
        let body = body.into_with_config().limit(client.most_bytes).read_to_vec().map_err(|e| client.fault(e))?;
        Err(client.refusal(head.status, &head.headers, &body))
    }

    /// Reads the body as a whole. Errors if it is larger than the limit of the client.
    pub fn read(self) -> Result<Vec<u8>, Fault> {
        let client = self.client;
        self.body.into_with_config().limit(client.most_bytes).read_to_vec().map_err(|error| client.fault(error))
    }

    /// Returns a reader of the body, without a limit of its size.
    pub fn into_reader(self) -> impl Read {
        self.body.into_reader()
    }
}

/// Whether TLS failed (for example, because a certificate is not trusted) and not the network.
fn is_of_tls(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>())
}

/// Returns the beginning of `text` on one line.
fn excerpt(text: &str) -> String {
    let line: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
    line.chars().filter(|c| !c.is_control()).take(EXCERPT).collect()
}
