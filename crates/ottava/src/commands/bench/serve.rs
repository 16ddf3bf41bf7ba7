//! `ottava bench serve`: streams completions from a server to many clients, and measures throughput and latencies.

use crate::output::print_json;
use clap::Args;
use ottava_common::hash::mix;
use ottava_common::{Error, Result};
use ottava_http::{Client, Request, Secret, Url};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The time limit of a request.
const TIMEOUT: Duration = Duration::from_secs(3600);

/// The maximum size of an answer that is not streamed, in bytes.
const MOST_BYTES: u64 = 1 << 20;

/// Load a running server: clients stream completions of random prompts one after the other. The server can be any server with OpenAI's
/// /v1/completions that takes prompts as lists of token ids. Flags and results have the names of `vllm bench serve`.
#[derive(Args)]
pub(super) struct Serve {
    /// The address of the server.
    #[arg(long, default_value = "http://127.0.0.1:8000")]
    base_url: String,
    /// The name of the model; by default the first model that the server lists.
    #[arg(long)]
    model: Option<String>,
    /// The environment variable that has the server's key.
    #[arg(long, value_name = "NAME")]
    api_key_env: Option<String>,
    /// The number of requests.
    #[arg(long, default_value_t = 256, value_parser = crate::commands::count)]
    num_prompts: usize,
    /// The number of clients, which is the maximum number of requests in progress.
    #[arg(long, default_value_t = 64, value_parser = crate::commands::count)]
    max_concurrency: usize,
    /// The mean number of requests that begin per second, at random times (a Poisson process); by default, each client sends its next request at once.
    #[arg(long)]
    request_rate: Option<f64>,
    /// The number of requests before the measurement, which are sent to all clients together.
    #[arg(long, default_value_t = 0)]
    num_warmups: usize,
    /// The number of tokens of a prompt.
    #[arg(long, default_value_t = 512, value_parser = crate::commands::count)]
    random_input_len: usize,
    /// The number of new tokens of a request.
    #[arg(long, default_value_t = 128, value_parser = crate::commands::count)]
    random_output_len: usize,
    /// The token ids of prompts are random numbers below this number, which is at most the size of the vocabulary.
    #[arg(long, default_value_t = 4000, value_parser = crate::commands::count)]
    random_vocab: usize,
    /// The seed of prompts and of times of requests.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// The times of a request that has succeeded, in seconds after its beginning.
#[derive(Clone)]
struct Times {
    /// The time of each event with text. The first one is the time to the first token.
    events: Vec<f64>,
    end: f64,
    /// The number of tokens that the server has counted.
    prompt_tokens: usize,
    new_tokens: usize,
}

/// An event of a streamed completion.
#[derive(Deserialize)]
struct Streamed {
    #[serde(default)]
    choices: Vec<IgnoredAny>,
    usage: Option<Usage>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
}

/// The distribution of a time over requests, in milliseconds.
struct Latency {
    mean: f64,
    median: f64,
    p99: f64,
}

impl Latency {
    /// Returns the distribution of `seconds`, or zeros if there are none.
    fn of(mut seconds: Vec<f64>) -> Latency {
        seconds.sort_by(f64::total_cmp);
        let last = seconds.len().saturating_sub(1);
        let at = |share: f64| 1e3 * seconds.get((share * last as f64).round() as usize).copied().unwrap_or(0.0);
        let mean = 1e3 * seconds.iter().sum::<f64>() / seconds.len().max(1) as f64;
        Latency { mean, median: at(0.5), p99: at(0.99) }
    }
}

/// The requests of a load that have succeeded, and the others.
struct Loaded {
    times: Vec<Times>,
    /// The seconds from the first beginning to the last end.
    seconds: f64,
    /// The reasons why requests have failed.
    failures: Vec<String>,
}

impl Serve {
    pub(super) fn run(self) -> Result<()> {
        if self.request_rate.is_some_and(|rate| !(rate > 0.0 && rate.is_finite())) {
            return Err(Error::Config("--request-rate is a number of requests per second above 0".into()));
        }
        let url = Url::new("--base-url", &self.base_url)?;
        let key = self.api_key_env.as_deref().map(|name| Secret::from_env("--api-key-env", name)).transpose()?;
        let open = |path: &str| Client::new(url.join(path), key.clone(), MOST_BYTES);
        let model = match &self.model {
            Some(model) => model.clone(),
            None => first_model(&open("v1/models")?)?,
        };
        let clients = (0..self.max_concurrency).map(|_| open("v1/completions")).collect::<Result<Vec<_>>>()?;
        let mut loaded = self.load(&clients, &model, self.num_warmups, 1);
        if loaded.failures.is_empty() {
            loaded = self.load(&clients, &model, self.num_prompts, 0);
            self.report(&loaded);
        }
        let (failed, all) = (loaded.failures.len(), loaded.failures.len() + loaded.times.len());
        match loaded.failures.first() {
            Some(reason) => {
                Err(Error::External(format!("{failed} of {all} requests to {url} failed; one of them: {reason}")))
            }
            None => Ok(()),
        }
    }

    /// Sends `requests` requests by `clients`, and waits for their ends. Loads with different numbers `part` have different prompts.
    fn load(&self, clients: &[Client], model: &str, requests: usize, part: u64) -> Loaded {
        let seed = mix(self.seed ^ mix(part));
        let (starts, next, begin) = (self.starts(requests, seed), AtomicUsize::new(0), Instant::now());
        let work = |client: &Client| {
            let (mut times, mut failures) = (Vec::new(), Vec::new());
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let Some(&start) = starts.get(number) else { return (times, failures) };
                thread::sleep(start.saturating_sub(begin.elapsed()));
                match stream(client, &self.body(model, seed, number)) {
                    Ok(request) => times.push(request),
                    Err(reason) => failures.push(reason),
                }
            }
        };
        let results: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = clients.iter().take(requests).map(|client| scope.spawn(|| work(client))).collect();
            threads.into_iter().map(|thread| thread.join().expect("a client does not panic")).collect()
        });
        let seconds = begin.elapsed().as_secs_f64();
        let (times, failures): (Vec<_>, Vec<_>) = results.into_iter().unzip();
        Loaded { times: times.concat(), seconds, failures: failures.concat() }
    }

    /// Returns the earliest time of each request after the beginning of the load. With a rate, the times between requests have an exponential
    /// distribution.
    fn starts(&self, requests: usize, seed: u64) -> Vec<Duration> {
        let Some(rate) = self.request_rate else { return vec![Duration::ZERO; requests] };
        let mut at = 0.0;
        let mut start = |number: usize| {
            let start = Duration::from_secs_f64(at);
            // A uniform number above 0, and at most 1.
            let uniform = ((mix(seed ^ mix(number as u64)) >> 11) + 1) as f64 / 2f64.powi(53);
            at -= uniform.ln() / rate;
            start
        };
        (0..requests).map(&mut start).collect()
    }

    /// Returns the JSON text of request `number`.
    fn body(&self, model: &str, seed: u64, number: usize) -> Vec<u8> {
        let seed = mix(seed ^ mix(!(number as u64)));
        let prompt: Vec<u64> =
            (0..self.random_input_len as u64).map(|at| mix(seed ^ mix(at)) % self.random_vocab as u64).collect();
        let body = json!({
            "model": model,
            "prompt": prompt,
            "max_tokens": self.random_output_len,
            "temperature": 0,
            "ignore_eos": true,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        body.to_string().into_bytes()
    }

    /// Prints the results of a load.
    fn report(&self, Loaded { times, seconds, failures }: &Loaded) {
        let first = |of: &Times| of.events.first().copied().unwrap_or(of.end);
        let per_token =
            |of: &Times| Some((of.end - first(of)) / of.new_tokens.checked_sub(1).filter(|&more| more > 0)? as f64);
        let latencies = [
            ("ttft", "time to the first token", Latency::of(times.iter().map(first).collect())),
            ("tpot", "time per token after the first", Latency::of(times.iter().filter_map(per_token).collect())),
            ("itl", "time between two events", Latency::of(times.iter().flat_map(Times::gaps).collect())),
            ("e2el", "time of a request", Latency::of(times.iter().map(|of| of.end).collect())),
        ];
        let total = |count: fn(&Times) -> usize| times.iter().map(count).sum::<usize>();
        let (input, output) = (total(|of| of.prompt_tokens), total(|of| of.new_tokens));
        let rate = |count: usize| count as f64 / seconds;
        if self.json {
            let mut report = json!({
                "completed": times.len(),
                "failed": failures.len(),
                "duration": seconds,
                "max_concurrency": self.max_concurrency,
                "total_input_tokens": input,
                "total_output_tokens": output,
                "request_throughput": rate(times.len()),
                "output_throughput": rate(output),
                "total_token_throughput": rate(input + output),
            });
            for (name, _, Latency { mean, median, p99 }) in &latencies {
                report[format!("mean_{name}_ms")] = json!(mean);
                report[format!("median_{name}_ms")] = json!(median);
                report[format!("p99_{name}_ms")] = json!(p99);
            }
            return print_json(&report);
        }
        out!(
            "{} requests by {} clients in {seconds:.2} s; {} failed",
            times.len(),
            self.max_concurrency,
            failures.len()
        );
        out!("{input} tokens of prompts, {output} new tokens");
        out!(
            "{:.2} requests/s, {:.0} new tokens/s, {:.0} tokens/s",
            rate(times.len()),
            rate(output),
            rate(input + output)
        );
        out!("{:<32} {:>10} {:>10} {:>10}", "ms", "mean", "median", "p99");
        for (_, name, Latency { mean, median, p99 }) in &latencies {
            out!("{name:<32} {mean:>10.2} {median:>10.2} {p99:>10.2}");
        }
    }
}

impl Times {
    /// Returns the seconds between events.
    fn gaps(&self) -> impl Iterator<Item = f64> {
        self.events.windows(2).map(|pair| pair[1] - pair[0])
    }
}

/// Returns the name of the first model that the server lists.
fn first_model(client: &Client) -> Result<String> {
    let url = client.url();
    let answer = client.send(Request::get(), TIMEOUT).and_then(|answer| answer.success()?.read());
    let answer = answer.map_err(|fault| Error::External(fault.words))?;
    let models: Value = serde_json::from_slice(&answer).unwrap_or_default();
    let name = models["data"][0]["id"].as_str();
    name.map(String::from).ok_or_else(|| Error::External(format!("{url} lists no model; name it with --model")))
}

/// Sends a request, and reads its events. Errors with the reason why it has failed.
fn stream(client: &Client, body: &[u8]) -> std::result::Result<Times, String> {
    let begin = Instant::now();
    let request = Request::post(body).header("Content-Type", "application/json");
    let answer = client.send(request, TIMEOUT).and_then(|answer| answer.success()).map_err(|fault| fault.words)?;
    let (mut reader, mut line) = (BufReader::new(answer.into_reader()), Vec::new());
    let (mut events, mut usage) = (Vec::new(), None);
    loop {
        line.clear();
        let read = reader.read_until(b'\n', &mut line).map_err(|error| format!("the stream broke off: {error}"))?;
        if read == 0 {
            return Err("the stream ended before [DONE]".into());
        }
        let Some(data) = line.strip_prefix(b"data:").map(<[u8]>::trim_ascii) else { continue };
        if data == b"[DONE]" {
            break;
        }
        let event: Streamed =
            serde_json::from_slice(data).map_err(|error| format!("an event is not readable: {error}"))?;
        if let Some(error) = event.error {
            return Err(error["message"].as_str().map_or_else(|| error.to_string(), String::from));
        }
        if !event.choices.is_empty() {
            events.push(begin.elapsed().as_secs_f64());
        }
        usage = event.usage.or(usage);
    }
    let Usage { prompt_tokens, completion_tokens } = usage.ok_or("the server has sent no usage of the request")?;
    Ok(Times { events, end: begin.elapsed().as_secs_f64(), prompt_tokens, new_tokens: completion_tokens })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ottava_http::testing::{Server, reply};

    #[test]
    fn latencies_are_of_sorted_times() {
        let Latency { mean, median, p99 } = Latency::of((1..=101).rev().map(f64::from).collect());
        assert_eq!([mean, median, p99], [51e3, 51e3, 100e3]);
        let none = Latency::of(Vec::new());
        assert_eq!([none.mean, none.median, none.p99], [0.0; 3]);
    }

    #[test]
    fn a_stream_has_its_times_or_the_reason_why_it_failed() {
        let usage = r#"{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}"#;
        let token = r#"{"choices": [{"text": "a"}]}"#;
        let whole = format!("data: {token}\n\ndata: {token}\n\ndata: {usage}\n\ndata: [DONE]\n\n");
        let read = |text: &str| {
            let text = text.to_string();
            let server = Server::start(move |_, _| reply(200, "", &text));
            let client = Client::new(Url::new("url", &server.url("")).unwrap(), None, MOST_BYTES).unwrap();
            stream(&client, b"{}")
        };
        let times = read(&whole).map_err(|_| ()).unwrap();
        assert_eq!((times.events.len(), times.prompt_tokens, times.new_tokens), (2, 3, 2));
        assert!(times.events[0] <= times.events[1] && times.events[1] <= times.end);
        for (text, reason) in [
            (whole.replace("data: [DONE]", ""), "before [DONE]"),
            (whole.replace(usage, token), "no usage"),
            (whole.replace(token, r#"{"error": {"message": "no memory"}}"#), "no memory"),
            (whole.replace(token, "{"), "not readable"),
        ] {
            assert!(read(&text).err().is_some_and(|found| found.contains(reason)), "{reason}");
        }
    }
}
