//! Sends one request and reads its answer.

use crate::{Fault, Secret, Url, tls};
use ottava_common::{Error, Result};
use std::io;
use std::time::Duration;
use ureq::http::{HeaderMap, StatusCode};
use ureq::{Agent, Proxy};

/// The environment variable that forbids connections.
const OFFLINE: &str = "OTTAVA_OFFLINE";

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
    /// Errors with [`Error::Config`] if `OTTAVA_OFFLINE` is set, or if this machine does not support HTTPS.
    pub fn new(url: Url, key: Option<Secret>, most_bytes: u64) -> Result<Client> {
        if std::env::var(OFFLINE).is_ok_and(|value| !["", "0", "false"].contains(&value.as_str())) {
            let why = format!("{OFFLINE} is set, which forbids connections; unset it or use no server");
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

    /// Sends the JSON text `body` with POST, and returns the body of a successful answer (2xx). `timeout` limits the whole request.
    ///
    /// Statuses 408, 429 and 5xx, lost connections and timeouts are temporary faults. Other statuses and answers that are too large are permanent
    /// faults.
    pub fn post_json(&self, body: &[u8], timeout: Duration) -> Result<Vec<u8>, Fault> {
        let mut request = self.agent.post(self.url.as_str()).header("Content-Type", "application/json");
        if let Some(key) = &self.key {
            request = request.header("Authorization", key.header());
        }
        let answer = request.config().timeout_global(Some(timeout)).build().send(body);
        let answer = answer.map_err(|error| self.fault(error))?;
        let (head, body) = answer.into_parts();
        let body = body.into_with_config().limit(self.most_bytes).read_to_vec().map_err(|error| self.fault(error))?;
        match head.status.is_success() {
            true => Ok(body),
            false => Err(self.refusal(head.status, &head.headers, &body)),
        }
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
        }
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
