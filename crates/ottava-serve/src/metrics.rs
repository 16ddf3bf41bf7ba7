//! Metrics in the text format of Prometheus: vLLM's metrics, with the prefix `ottava:` instead of `vllm:`.

use crate::preparing::preparing;
use crate::worker::Worker;
use axum::http::StatusCode;
use ottava_engine::EngineStats;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

/// The upper bounds of the buckets of times, in seconds.
const SECONDS: [f64; 14] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 120.0];

/// The upper bounds of the buckets of tokens and of completions.
const TOKENS: [f64; 16] = [
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0, 20_000.0, 50_000.0,
    100_000.0,
];

/// The metrics of a server.
pub struct Metrics {
    registry: Registry,
    of_requests: OfRequests,
    requests: Family<[(&'static str, String); 2], Counter>,
}

/// The metrics that requests for completions observe.
#[derive(Clone)]
struct OfRequests {
    first_token: Histogram,
    between_tokens: Histogram,
    per_token: Histogram,
    decode: Histogram,
    whole: Histogram,
    prompt_tokens: Histogram,
    new_tokens: Histogram,
    most_tokens: Histogram,
    completions: Histogram,
    ended: Family<[(&'static str, &'static str); 1], Counter>,
}

/// A completion that has ended.
pub struct Ended {
    /// The number of tokens of its prompt, its tokens, and its tokens at most.
    pub prompt_tokens: usize,
    pub tokens: usize,
    pub most_tokens: usize,
    pub reason: &'static str,
}

/// The state of the engine, which is read whenever the metrics are read.
struct OfEngine(Worker);

impl fmt::Debug for OfEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OfEngine").field(&self.0.stats()).finish()
    }
}

impl Collector for OfEngine {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        let EngineStats { running, waiting, held, kv_blocks, used_kv_blocks, .. } = self.0.stats();
        let EngineStats { proposals, proposed_tokens, accepted_tokens, .. } = self.0.stats();
        let EngineStats { prompt_tokens, prefix_queries, prefix_hits, generated_tokens, preemptions, .. } =
            self.0.stats();
        let usage = used_kv_blocks as f64 / kv_blocks.max(1) as f64;
        for (name, help, value) in [
            ("ottava:num_requests_running", "Completions that are computed", running as f64),
            (
                "ottava:num_requests_waiting",
                "Completions that wait for a place in the batch, memory or their client",
                (waiting + held) as f64,
            ),
            (
                "ottava:num_requests_preparing",
                "Requests whose long texts are tokenized or whose constraints are compiled",
                preparing() as f64,
            ),
            ("ottava:kv_cache_usage_perc", "Share of the blocks of the KV cache in use; 1 is all", usage),
        ] {
            let metric = ConstGauge::new(value);
            metric.encode(encoder.encode_descriptor(name, help, None, metric.metric_type())?)?;
        }
        for (name, help, value) in [
            ("ottava:prompt_tokens", "Tokens of prompts computed", prompt_tokens),
            ("ottava:prefix_cache_queries", "Tokens of prompts looked for in the KV cache", prefix_queries),
            ("ottava:prefix_cache_hits", "Tokens of prompts found in the KV cache", prefix_hits),
            ("ottava:generation_tokens", "Tokens drawn", generated_tokens),
            ("ottava:num_preemptions", "Completions that were preempted and recomputed", preemptions),
            ("ottava:spec_decode_num_drafts", "Proposals of tokens by speculative decoding", proposals),
            ("ottava:spec_decode_num_draft_tokens", "Tokens proposed by speculative decoding", proposed_tokens),
            ("ottava:spec_decode_num_accepted_tokens", "Proposed tokens that were accepted", accepted_tokens),
        ] {
            let metric = ConstCounter::new(value);
            metric.encode(encoder.encode_descriptor(name, help, None, metric.metric_type())?)?;
        }
        Ok(())
    }
}

impl Metrics {
    /// Creates the metrics, before any request.
    pub fn new(worker: Worker) -> Metrics {
        let mut registry = Registry::default();
        let mut time = |name, help| {
            let histogram = Histogram::new(SECONDS);
            registry.register_with_unit(name, help, Unit::Seconds, histogram.clone());
            histogram
        };
        let first_token = time("ottava:time_to_first_token", "From a request to its first token");
        let between_tokens = time("ottava:inter_token_latency", "From a token of a completion to its next token");
        let per_token = time("ottava:request_time_per_output_token", "Mean time of a request's further tokens");
        let decode = time("ottava:request_decode_time", "From the first token of a request to its last token");
        let whole = time("ottava:e2e_request_latency", "From a request to the end of its answer");
        let mut count = |name, help| {
            let histogram = Histogram::new(TOKENS);
            registry.register(name, help, histogram.clone());
            histogram
        };
        let prompt_tokens = count("ottava:request_prompt_tokens", "Tokens of the prompt of a completion");
        let new_tokens = count("ottava:request_generation_tokens", "Tokens of a completion");
        let most_tokens = count("ottava:request_params_max_tokens", "The maximum number of tokens of a completion");
        let completions = count("ottava:request_params_n", "Completions of a request");
        let ended = Family::default();
        registry.register("ottava:request_success", "Completions by the reason of their end", ended.clone());
        let of_requests = OfRequests {
            first_token,
            between_tokens,
            per_token,
            decode,
            whole,
            prompt_tokens,
            new_tokens,
            most_tokens,
            completions,
            ended,
        };
        let requests = Family::default();
        registry.register("ottava:http_requests", "Requests by path and status", requests.clone());
        registry.register_collector(Box::new(OfEngine(worker)));
        Metrics { registry, of_requests, requests }
    }

    /// Counts an answered request.
    pub fn count(&self, path: &'static str, status: StatusCode) {
        self.requests.get_or_create(&[("path", path.into()), ("status", status.as_u16().to_string())]).inc();
    }

    /// Starts the timer of a request.
    pub fn timer(self: &Arc<Metrics>) -> Timer {
        Timer { metrics: self.of_requests.clone(), start: Instant::now(), first: None, last: Vec::new() }
    }

    /// Returns all metrics as text.
    pub fn text(&self) -> String {
        let mut text = String::new();
        encode(&mut text, &self.registry).expect("a text takes everything");
        text
    }
}

/// The timer of a request.
pub struct Timer {
    metrics: OfRequests,
    start: Instant,
    first: Option<Instant>,
    /// The time of the last token of each completion.
    last: Vec<Option<Instant>>,
}

impl Timer {
    /// Records that a token of a completion was drawn.
    pub fn token(&mut self, completion: usize) {
        let now = Instant::now();
        if self.first.is_none() {
            self.first = Some(now);
            self.metrics.first_token.observe((now - self.start).as_secs_f64());
        }
        if self.last.len() <= completion {
            self.last.resize(completion + 1, None);
        }
        if let Some(before) = self.last[completion].replace(now) {
            self.metrics.between_tokens.observe((now - before).as_secs_f64());
        }
    }

    /// Records that the answer with these completions is complete.
    pub fn end(&self, completions: &[Ended]) {
        let metrics = &self.metrics;
        metrics.whole.observe(self.start.elapsed().as_secs_f64());
        let tokens: usize = completions.iter().map(|ended| ended.tokens).sum();
        if let Some(first) = self.first {
            let seconds = first.elapsed().as_secs_f64();
            metrics.decode.observe(seconds);
            if tokens > 1 {
                metrics.per_token.observe(seconds / (tokens - 1) as f64);
            }
        }
        if !completions.is_empty() {
            metrics.completions.observe(completions.len() as f64);
        }
        for Ended { prompt_tokens, tokens, most_tokens, reason } in completions {
            metrics.prompt_tokens.observe(*prompt_tokens as f64);
            metrics.new_tokens.observe(*tokens as f64);
            metrics.most_tokens.observe(*most_tokens as f64);
            metrics.ended.get_or_create(&[("finished_reason", reason)]).inc();
        }
    }
}
