//! The answer to a request for completions: one JSON object at the end, or a stream of events.

use crate::choice::{Choice, Delta};
use crate::error::{ApiError, Result, json_text};
use crate::json::{ListText, ObjectText};
use crate::metrics::Timer;
use crate::params::Params;
use crate::schedule::Job;
use crate::served::Served;
use crate::worker::Running;
use axum::response::sse::{Event as Message, Sse};
use axum::response::{IntoResponse, Response};
use ottava_engine::Request;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::OwnedSemaphorePermit;

/// The format of an answer.
pub trait Form: Send + Sync + 'static {
    /// The object of a whole answer, the object of a piece of an answer, and the start of ids.
    const NAMES: [&'static str; 3];
    /// The field with the id of an answer.
    const ID: &'static str = "id";

    /// Adds a part of a choice.
    fn add(&mut self, served: &Served, index: usize, part: Delta) -> Result<()>;

    /// A choice of a whole answer as JSON, with its number there.
    fn whole(&mut self, index: usize, number: usize) -> String;

    /// What was added to a choice since its last piece, as JSON; `None` if there is nothing to tell yet.
    fn piece(&mut self, index: usize) -> Option<String>;

    /// Fields beside the choices that no object of the answer has had, with their values as JSON.
    fn beside(&mut self) -> Vec<(&'static str, String)> {
        Vec::new()
    }

    /// The pieces before all others.
    fn first(&self) -> Vec<String> {
        Vec::new()
    }
}

/// The completions of a request: `n` of each prompt, prompt after prompt.
pub struct Answer<F> {
    served: Arc<Served>,
    params: Params,
    form: F,
    choices: Vec<Choice>,
    prompt_tokens: usize,
    running: Running,
    timer: Timer,
    id: String,
    created: u64,
}

impl<F: Form> Answer<F> {
    /// Starts `params.n` completions of each of `requests`. Each completion has a choice.
    pub fn start(
        served: Arc<Served>,
        permit: OwnedSemaphorePermit,
        params: Params,
        form: F,
        choices: Vec<Choice>,
        requests: Vec<Request>,
        timer: Timer,
    ) -> Result<Answer<F>> {
        // Tokens of a prompt count once, however many completions it has.
        let prompt_tokens = requests.iter().map(|request| request.prompt.len()).sum();
        let running = served.worker.run(permit, Job { requests, n: params.n })?;
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let id = format!("{}-{:024x}", F::NAMES[2], since.as_nanos());
        Ok(Answer { served, params, form, choices, prompt_tokens, running, timer, id, created: since.as_secs() })
    }

    /// The same answer, with the id that the request gives it.
    pub fn with_id(self, id: Option<String>) -> Answer<F> {
        Answer { id: id.unwrap_or(self.id), ..self }
    }

    /// The response, as the request asks for it.
    pub async fn respond(mut self) -> Result<Response> {
        if self.params.stream {
            return Ok(self.events().into_response());
        }
        while self.goes_on() {
            self.advance().await?;
        }
        let mut choices = Vec::new();
        for (number, index) in self.returned().into_iter().enumerate() {
            choices.push(self.form.whole(index, number));
        }
        self.timer.end(self.completion_tokens());
        Ok(json_text(self.envelope(F::NAMES[0], &choices, true)).into_response())
    }

    /// The completions that are returned: all, or the best of each prompt.
    fn returned(&self) -> Vec<usize> {
        let Params { n, best, .. } = self.params;
        let mut all: Vec<usize> = (0..self.choices.len()).collect();
        if n > best {
            let mean = |index: &usize| self.choices[*index].mean_logprob();
            all.chunks_exact_mut(n).for_each(|of_prompt| of_prompt.sort_by(|a, b| mean(b).total_cmp(&mean(a))));
        }
        all.chunks_exact(n).flat_map(|of_prompt| &of_prompt[..best]).copied().collect()
    }

    fn goes_on(&self) -> bool {
        self.choices.iter().any(|choice| !choice.is_finished())
    }

    /// Waits for an event, and adds what it tells to its choice. Returns which choice has grown, if one has.
    async fn advance(&mut self) -> Result<Option<usize>> {
        let (index, event) = self.running.next().await?;
        if matches!(event, ottava_engine::Event::Token { .. }) {
            self.timer.token();
        }
        if self.choices[index].push(event, &self.params, &self.served.tokenizer)? {
            self.running.cancel(index);
        }
        let part = self.choices[index].take();
        if part.is_empty() {
            return Ok(None);
        }
        match part.prompt_logprobs {
            // A long prompt keeps this thread busy; other requests go on with others.
            Some(_) => tokio::task::block_in_place(|| self.form.add(&self.served, index, part))?,
            None => self.form.add(&self.served, index, part)?,
        }
        Ok(Some(index))
    }

    /// Server-sent events: a piece for each token that completes text, the usage if it was asked for, and `[DONE]`.
    fn events(mut self) -> Response {
        let first = self.form.first().into_iter();
        let first = first.map(|choice| self.envelope(F::NAMES[1], &[choice], false)).collect();
        let state = Stream { answer: self, ready: first, state: State::Running };
        let stream = futures_util::stream::unfold(state, |mut state| async move {
            let message = state.next().await?;
            Some((Ok::<_, std::convert::Infallible>(Message::default().data(message)), state))
        });
        Sse::new(stream).into_response()
    }

    fn envelope(&mut self, object: &str, choices: &[String], with_usage: bool) -> String {
        let mut list = ListText::default();
        choices.iter().for_each(|choice| list.push(choice));
        let answer = ObjectText::new().field(F::ID, &self.id).field("object", &object).field("created", &self.created);
        let answer = answer.field("model", &self.params.model.name).json("choices", &list.json());
        let beside = self.form.beside().into_iter();
        let answer = beside.fold(answer, |answer, (name, value)| answer.json(name, &value));
        if with_usage { answer.field("usage", &self.usage()).end() } else { answer.end() }
    }

    fn completion_tokens(&self) -> usize {
        self.choices.iter().map(|choice| choice.tokens).sum()
    }

    fn usage(&self) -> Value {
        let (prompt, completion) = (self.prompt_tokens, self.completion_tokens());
        json!({"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion})
    }
}

enum State {
    Running,
    Done,
    Closed,
}

/// A streamed answer. It is dropped when the client disconnects, which cancels the completions.
struct Stream<F> {
    answer: Answer<F>,
    ready: VecDeque<String>,
    state: State,
}

impl<F: Form> Stream<F> {
    /// The next message; `None` after the last.
    async fn next(&mut self) -> Option<String> {
        loop {
            if let Some(piece) = self.ready.pop_front() {
                return Some(piece);
            }
            match self.state {
                State::Closed => return None,
                State::Done => {
                    self.state = State::Closed;
                    return Some("[DONE]".into());
                }
                State::Running if self.answer.goes_on() => {
                    if let Err(error) = self.piece().await {
                        // The status was sent long ago; clients find an object with `error`.
                        self.state = State::Done;
                        return Some(error.json().to_string());
                    }
                }
                State::Running => {
                    self.state = State::Done;
                    self.answer.timer.end(self.answer.completion_tokens());
                    if self.answer.params.include_usage {
                        self.ready.push_back(self.answer.envelope(F::NAMES[1], &[], true));
                    }
                }
            }
        }
    }

    async fn piece(&mut self) -> std::result::Result<(), ApiError> {
        let answer = &mut self.answer;
        let piece = answer.advance().await?.and_then(|index| answer.form.piece(index));
        let piece = piece.map(|piece| answer.envelope(F::NAMES[1], &[piece], false));
        self.ready.extend(piece);
        Ok(())
    }
}
