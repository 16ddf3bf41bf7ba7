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

/// The metrics of a server.
pub struct Metrics {
    registry: Registry,
    times: Times,
    requests: Family<[(&'static str, String); 2], Counter>,
}

/// The histograms of times of requests.
#[derive(Clone)]
struct Times {
    first_token: Histogram,
    per_token: Histogram,
    whole: Histogram,
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
        let times = Times {
            first_token: time("ottava:time_to_first_token", "From a request to its first token"),
            per_token: time("ottava:request_time_per_output_token", "Mean time of a request's further tokens"),
            whole: time("ottava:e2e_request_latency", "From a request to the end of its answer"),
        };
        let requests = Family::default();
        registry.register("ottava:http_requests", "Requests by path and status", requests.clone());
        registry.register_collector(Box::new(OfEngine(worker)));
        Metrics { registry, times, requests }
    }

    /// Counts an answered request.
    pub fn count(&self, path: &'static str, status: StatusCode) {
        self.requests.get_or_create(&[("path", path.into()), ("status", status.as_u16().to_string())]).inc();
    }

    /// Starts the timer of a request.
    pub fn timer(self: &Arc<Metrics>) -> Timer {
        Timer { times: self.times.clone(), start: Instant::now(), first: None }
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
    times: Times,
    start: Instant,
    first: Option<Instant>,
}

impl Timer {
    /// Records that a token was drawn.
    pub fn token(&mut self) {
        if self.first.is_none() {
            self.first = Some(Instant::now());
            self.times.first_token.observe(self.start.elapsed().as_secs_f64());
        }
    }

    /// Records that the answer, with `tokens` tokens, is complete.
    pub fn end(&self, tokens: usize) {
        self.times.whole.observe(self.start.elapsed().as_secs_f64());
        if let Some(first) = self.first.filter(|_| tokens > 1) {
            self.times.per_token.observe(first.elapsed().as_secs_f64() / (tokens - 1) as f64);
        }
    }
}
