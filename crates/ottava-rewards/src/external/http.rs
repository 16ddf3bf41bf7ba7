//! The reward `http`.

use super::MAX_ANSWER;
use super::failure::{Failure, OnError};
use super::parallel::in_parallel;
use super::program::seconds;
use super::protocol::{self, Kind};
use crate::deadline::Deadline;
use crate::reward::{Reward, Scores};
use crate::sample::{Place, Sample};
use ottava_common::{Error, Result};
use ottava_http::{Client, Fault, Retry, Secret, Url};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The pause before the second attempt.
const FIRST_PAUSE: Duration = Duration::from_millis(500);

/// A server that scores completions: each request is a POST with the JSON of a command's line, and so is the answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HttpConfig {
    /// The address, with https:// or http://. Redirects are not followed.
    pub url: String,
    /// The name of an environment variable with a key, which is sent as `Authorization: Bearer KEY`; empty sends none.
    #[serde(default)]
    pub api_key_env: String,
    /// The most completions of a request.
    #[serde(default = "batch_size")]
    pub batch_size: usize,
    /// Requests at the same time.
    #[serde(default = "concurrency")]
    pub concurrency: usize,
    /// Seconds in which a request must be answered.
    #[serde(default = "timeout")]
    pub timeout: f64,
    /// Attempts for each request. Statuses 408, 429 and 5xx, timeouts, lost connections and wrong answers are tried again, after pauses that double
    /// from half a second.
    #[serde(default = "attempts")]
    pub attempts: u32,
    /// What happens to the completions of a request after its last attempt: "stop" ends the run with the error, "zero" scores them 0, and "skip" does
    /// not score them.
    #[serde(default)]
    pub on_error: OnError,
}

fn batch_size() -> usize {
    64
}

pub(super) fn concurrency() -> usize {
    4
}

pub(super) fn timeout() -> f64 {
    60.0
}

pub(super) fn attempts() -> u32 {
    5
}

impl HttpConfig {
    /// The reward. Errors with [`Error::Config`] if the address, the key or a number is wrong, or connections are forbidden.
    pub(crate) fn reward(&self) -> Result<Http> {
        let remote = Remote::new("url", Url::new("url", &self.url)?, &self.api_key_env, self.timeout, self.attempts)?;
        if self.batch_size == 0 || self.concurrency == 0 {
            return Err(Error::Config("`batch_size` or `concurrency` is 0; both have to be at least 1".into()));
        }
        Ok(Http { config: self.clone(), remote })
    }
}

/// The server of a reward, with timeouts and attempts.
#[derive(Clone)]
pub(super) struct Remote {
    client: Client,
    timeout: Duration,
    retry: Retry,
}

impl Remote {
    pub(super) fn new(setting: &str, url: Url, key: &str, timeout: f64, attempts: u32) -> Result<Remote> {
        if attempts == 0 {
            return Err(Error::Config("`attempts` is 0; it has to be at least 1".into()));
        }
        let key = if key.is_empty() { None } else { Some(Secret::from_env("api_key_env", key)?) };
        let client = Client::new(url, key, MAX_ANSWER as u64);
        let client = client.map_err(|error| Error::Config(format!("`{setting}`: {error}")))?;
        let retry = Retry { attempts, first_pause: FIRST_PAUSE };
        Ok(Remote { client, timeout: seconds("timeout", timeout)?, retry })
    }

    /// Sends `body`, and reads the answer by `read`, which errors with a sentence.
    pub(super) fn ask<T>(
        &self,
        body: &[u8],
        deadline: Deadline,
        read: impl Fn(&[u8]) -> Result<T, String>,
    ) -> Result<T, Failure> {
        let attempt = || {
            let answer = self.client.post_json(body, self.timeout.min(deadline.left()))?;
            read(&answer).map_err(|words| Fault::passing(format!("{}: {words}", self.client.url())))
        };
        let result = self.retry.run(|pause| deadline.sleep(pause), attempt);
        result.map_err(|fault| deadline.check().map_or_else(Failure::Ended, |()| Failure::Failed(fault.words)))
    }
}

/// The running reward.
pub(crate) struct Http {
    config: HttpConfig,
    remote: Remote,
}

/// A request for the samples at `places`.
struct Request {
    id: u64,
    places: Vec<Place>,
    body: Vec<u8>,
}

impl Reward for Http {
    fn score(&mut self, samples: &[Sample], deadline: Deadline) -> Result<Scores> {
        let batches: Vec<_> = samples.chunks(self.config.batch_size).collect();
        let request = |(id, batch): (usize, &&[Sample])| Request {
            id: id as u64,
            places: batch.iter().map(Sample::place).collect(),
            body: protocol::request(id as u64, Kind::Score, batch),
        };
        let requests = batches.iter().enumerate().map(request).collect();
        let remote = self.remote.clone();
        let ask = move |request: &Request| {
            remote.ask(&request.body, deadline, |answer| protocol::scores(answer, request.id, &request.places))
        };
        let answers = in_parallel(requests, self.config.concurrency, deadline, ask)?;
        self.config.on_error.scores(&batches, answers)
    }
}
