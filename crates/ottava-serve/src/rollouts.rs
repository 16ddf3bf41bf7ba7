//! `POST /v1/rollouts` and `GET /v1/training`: clients of a training run return completions, and see which completions the run waits for.

use crate::connections::Connection;
use crate::error::{ApiError, Result, json_body};
use crate::preparing::beside;
use crate::served::Served;
use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use ottava_train::objective::rollout::{End, Returned, Sample, Wanted};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The completions that clients of a run have returned.
pub struct Rollouts {
    /// The number of rows of the model's embedding.
    vocabulary: usize,
    /// The maximum number of tokens of prompt and completion together.
    max_length: usize,
    /// The maximum age of the weights that drew a completion, in steps.
    max_staleness: u64,
    state: Mutex<Collected>,
}

/// The completions of a generation.
#[derive(Default)]
struct Collected {
    /// The completions of the generation; `None` while the run computes steps.
    wanted: Option<Wanted>,
    /// Completions by the number of their group.
    groups: BTreeMap<u64, Vec<Returned>>,
}

/// The body of a request.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    weight_version: u64,
    samples: Vec<PostedSample>,
}

/// A completion as a client writes it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PostedSample {
    prompt_ids: Vec<u32>,
    completion_ids: Vec<u32>,
    /// 1 for tokens that the model drew, 0 for other tokens.
    completion_mask: Vec<u8>,
    /// The log-probability of each token; of tokens that the model did not draw, any number.
    completion_logprobs: Vec<f64>,
    reward: Option<f64>,
    group: u64,
    /// Whether the completion was cut at its greatest length.
    #[serde(default)]
    truncated: bool,
}

impl Rollouts {
    pub fn new(vocabulary: usize, max_length: usize, max_staleness: u64) -> Rollouts {
        Rollouts { vocabulary, max_length, max_staleness, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, Collected> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accepts completions, until [`Rollouts::close`].
    pub fn open(&self, wanted: Wanted) {
        *self.state() = Collected { wanted: Some(wanted), groups: BTreeMap::new() };
    }

    /// Whether all completions have arrived.
    pub fn is_full(&self) -> bool {
        self.state().missing() == 0
    }

    /// Accepts no more completions, and returns the groups in the order of their numbers.
    pub fn close(&self) -> Vec<Vec<Returned>> {
        std::mem::take(&mut *self.state()).groups.into_values().collect()
    }

    /// Adds all completions of a body, or none. Returns what the client is told.
    fn add(&self, body: &[u8]) -> Result<Value> {
        let Body { weight_version, samples } = serde_json::from_slice(body)
            .map_err(|error| ApiError::invalid(format!("the body is no JSON object with rollouts: {error}")))?;
        let read = |(at, sample): (usize, PostedSample)| {
            let group = sample.group;
            self.read(sample)
                .map(|returned| (group, returned))
                .map_err(|reason| ApiError::field("samples", format!("`samples[{at}]`: {reason}")))
        };
        let samples: Vec<(u64, Returned)> = samples.into_iter().enumerate().map(read).collect::<Result<_>>()?;
        if samples.is_empty() {
            return Err(ApiError::field("samples", "`samples` is empty; it has at least one completion"));
        }
        let mut state = self.state();
        let Some(wanted) = state.waits_for() else {
            let message =
                "the run computes steps and waits for no completions; wait until GET /v1/training says that it waits";
            return Err(ApiError::refused(StatusCode::CONFLICT, message));
        };
        self.expect_fresh(weight_version, wanted.step)?;
        state.add(wanted, samples)?;
        Ok(state.describe())
    }

    fn expect_fresh(&self, version: u64, step: u64) -> Result<()> {
        if version > step {
            let message = format!("`weight_version` is {version}, and the weights of today have the version {step}");
            return Err(ApiError::field("weight_version", message));
        }
        if step - version > self.max_staleness {
            let message = format!(
                "the completions were drawn at the weights of version {version}, and the weights of today have the version {step}; \
                 `reinforcement.endpoint.max_staleness` allows {} steps between them. Draw them again",
                self.max_staleness
            );
            return Err(ApiError::field("weight_version", message));
        }
        Ok(())
    }

    /// Checks a completion. Errors with the reason.
    fn read(&self, sample: PostedSample) -> std::result::Result<Returned, String> {
        let PostedSample {
            prompt_ids, completion_ids, completion_mask, completion_logprobs, reward, truncated, ..
        } = sample;
        let count = completion_ids.len();
        if prompt_ids.is_empty() || count == 0 {
            return Err("`prompt_ids` and `completion_ids` have at least one token each".into());
        }
        for (name, length) in
            [("completion_mask", completion_mask.len()), ("completion_logprobs", completion_logprobs.len())]
        {
            if length != count {
                return Err(format!("`{name}` has {length} entries, and `completion_ids` has {count}"));
            }
        }
        if let Some(id) = prompt_ids.iter().chain(&completion_ids).find(|&&id| id as usize >= self.vocabulary) {
            return Err(format!("there is no token {id}; the vocabulary ends at {}", self.vocabulary));
        }
        let length = prompt_ids.len() + count;
        if length > self.max_length {
            return Err(format!("it has {length} tokens; `data.max_length` of the run is {}", self.max_length));
        }
        if let Some(mark) = completion_mask.iter().find(|mark| **mark > 1) {
            return Err(format!("`completion_mask` has the entry {mark}; entries are 0 or 1"));
        }
        let turns = turns_of(&completion_mask);
        if turns.is_empty() {
            return Err("`completion_mask` marks no token that the model drew; write 1 for each of them".into());
        }
        let drawn = turns.iter().flat_map(Clone::clone).map(|at| completion_logprobs[at]);
        let logprobs: Vec<f32> = drawn.map(|logprob| logprob as f32).collect();
        if let Some(logprob) = logprobs.iter().find(|logprob| !logprob.is_finite() || **logprob > 0.0) {
            return Err(format!(
                "`completion_logprobs` has {logprob}; the log-probability of a drawn token is finite and at most 0"
            ));
        }
        if reward.is_some_and(|reward| !reward.is_finite()) {
            return Err("`reward` is no finite number".into());
        }
        let end = if truncated { End::Length } else { End::Text };
        Ok(Returned { sample: Sample { prompt: prompt_ids, tokens: completion_ids, logprobs, turns, end }, reward })
    }

    /// What clients are told of the run.
    fn describe(&self) -> Value {
        self.state().describe()
    }
}

impl Collected {
    /// What the run waits for; `None` from the last completion on until it has new weights.
    fn waits_for(&self) -> Option<Wanted> {
        self.wanted.filter(|_| self.missing() > 0)
    }

    /// The number of completions that have not arrived.
    fn missing(&self) -> usize {
        let arrived: usize = self.groups.values().map(Vec::len).sum();
        self.wanted.map_or(0, |wanted| wanted.groups * wanted.of_group - arrived)
    }

    /// Adds all of `samples`, or none if a group or the generation would have too many.
    fn add(&mut self, wanted: Wanted, samples: Vec<(u64, Returned)>) -> Result<()> {
        let mut counts: BTreeMap<u64, usize> = self.groups.iter().map(|(group, all)| (*group, all.len())).collect();
        samples.iter().for_each(|(group, _)| *counts.entry(*group).or_default() += 1);
        if let Some((group, count)) = counts.iter().find(|(_, count)| **count > wanted.of_group) {
            let message = format!(
                "group {group} would have {count} completions, and `reinforcement.num_generations` is {}; give each prompt a group of its own",
                wanted.of_group
            );
            return Err(ApiError::field("samples", message));
        }
        if counts.len() > wanted.groups {
            let message = format!(
                "there would be {} groups, and the run waits for {} of {} completions each; return the others after its next steps",
                counts.len(),
                wanted.groups,
                wanted.of_group
            );
            return Err(ApiError::field("samples", message));
        }
        samples.into_iter().for_each(|(group, returned)| self.groups.entry(group).or_default().push(returned));
        Ok(())
    }

    fn describe(&self) -> Value {
        match self.waits_for() {
            Some(Wanted { step, groups, of_group }) => json!({
                "state": "waiting", "weight_version": step, "groups": groups, "num_generations": of_group, "missing": self.missing(),
            }),
            None => json!({"state": "training"}),
        }
    }
}

/// The ranges of tokens with the mark 1.
fn turns_of(mask: &[u8]) -> Vec<Range<usize>> {
    let mut start = 0;
    let mut turns = Vec::new();
    for run in mask.chunk_by(|a, b| a == b) {
        let end = start + run.len();
        turns.extend((run[0] == 1).then_some(start..end));
        start = end;
    }
    turns
}

/// The state of the routes.
type Shared = (Arc<Served>, Arc<Rollouts>);

/// The routes of a training run.
pub fn routes(served: Arc<Served>, rollouts: Arc<Rollouts>) -> Router {
    Router::new()
        .route("/v1/rollouts", post(post_rollouts))
        .route("/v1/training", get(training))
        .with_state((served, rollouts))
}

async fn post_rollouts(State((served, rollouts)): State<Shared>, request: Request) -> Result<Response> {
    let connection = request.extensions().get::<Arc<Connection>>().cloned();
    let received = served.intake.receive(request.into_body()).await?;
    if let Some(connection) = connection {
        connection.work();
    }
    let _permit = served.worker.permit()?;
    let _turn = served.intake.turn(&received).await;
    let told = beside(received.bytes.len(), move || rollouts.add(&received.bytes)).await?;
    Ok(json_body(&told).into_response())
}

async fn training(State((_, rollouts)): State<Shared>) -> Response {
    json_body(&rollouts.describe()).into_response()
}
