//! The answer to a request for completions: one JSON object at the end, or a stream of events. The form of both is a [`Form`].

use crate::choice::{Choice, Delta};
use crate::error::{ApiError, Result, json_text};
use crate::metrics::{Ended, Timer};
use crate::params::Params;
use crate::schedule::Job;
use crate::served::Served;
use crate::worker::Running;
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use ottava_engine::Request;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::OwnedSemaphorePermit;

/// The format of an answer.
pub trait Form: Send + Sync + 'static {
    /// The start of ids.
    const ID: &'static str;

    /// Adds a part of a choice.
    fn add(&mut self, served: &Served, index: usize, part: Delta) -> Result<()>;

    /// The whole answer as JSON, with these choices.
    fn whole(&mut self, work: &Work, choices: &[usize]) -> String;

    /// The messages before all others.
    fn first(&mut self, work: &Work) -> Vec<Message>;

    /// The messages for what was added to a choice since its last messages.
    fn piece(&mut self, work: &Work, index: usize) -> Vec<Message>;

    /// The messages at the end of a stream.
    fn last(&mut self, work: &Work) -> Vec<Message>;

    /// The messages at the end of a stream that fails. Its status was sent long ago, so clients look for an object with an error.
    fn failed(&mut self, work: &Work, error: &ApiError) -> Vec<Message>;
}

/// A message of a stream.
pub struct Message {
    /// The name of the event, if it has one.
    pub event: Option<&'static str>,
    pub data: String,
}

impl Message {
    /// A message without a name.
    pub fn data(data: String) -> Message {
        Message { event: None, data }
    }
}

/// The number of tokens of an answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Usage {
    pub prompt: usize,
    /// Tokens of `prompt` that were in the cache, for the first completion of each prompt, if they are known.
    pub cached: Option<usize>,
    pub completion: usize,
    /// Tokens of `completion` that are reasoning.
    pub reasoning: usize,
}

/// The completions of a request: `n` of each prompt, prompt after prompt.
pub struct Answer<F> {
    form: F,
    work: Work,
}

/// A request in progress.
pub struct Work {
    pub served: Arc<Served>,
    pub params: Params,
    choices: Vec<Choice>,
    /// The number of tokens of each prompt, and the maximum number of tokens of its completions.
    lengths: Vec<(usize, usize)>,
    running: Running,
    timer: Timer,
    /// The id of the answer.
    pub id: String,
    /// When the answer has begun, in seconds since 1970.
    pub created: u64,
}

/// What a request asks for, before it has a form.
pub struct Prepared {
    pub params: Params,
    pub choices: Vec<Choice>,
    pub requests: Vec<Request>,
}

impl<F: Form> Answer<F> {
    /// Starts `params.n` completions of each of the requests. Each completion has a choice.
    pub fn start(
        served: Arc<Served>,
        permit: OwnedSemaphorePermit,
        prepared: Prepared,
        form: F,
        timer: Timer,
    ) -> Result<Answer<F>> {
        let Prepared { params, choices, requests } = prepared;
        let lengths = requests.iter().map(|request| (request.prompt.len(), request.max_new_tokens)).collect();
        let running = served.worker.run(permit, Job { requests, n: params.n })?;
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let id = new_id(F::ID);
        let created = since.as_secs();
        Ok(Answer { form, work: Work { served, params, choices, lengths, running, timer, id, created } })
    }

    /// The same answer, with the id that the request gives it.
    pub fn with_id(mut self, id: Option<String>) -> Answer<F> {
        self.work.id = id.unwrap_or(self.work.id);
        self
    }

    /// The response, as the request asks for it.
    pub async fn respond(mut self) -> Result<Response> {
        if self.work.params.stream {
            return Ok(self.events());
        }
        while self.work.goes_on() {
            self.advance().await?;
        }
        let returned = self.work.returned();
        self.work.timer.end(&self.work.ended());
        Ok(json_text(self.form.whole(&self.work, &returned)).into_response())
    }

    /// Waits for an event, and adds what it tells to its choice. Returns which choice has grown, if one has.
    async fn advance(&mut self) -> Result<Option<usize>> {
        let Answer { form, work } = self;
        let (index, event) = work.running.next().await?;
        if matches!(event, ottava_engine::Event::Token { .. }) {
            work.timer.token(index);
        }
        if work.choices[index].push(event, &work.params, &work.served.tokenizer)? {
            work.running.cancel(index);
        }
        let part = work.choices[index].take();
        if part.is_empty() {
            return Ok(None);
        }
        match part.prompt_logprobs {
            // A long prompt keeps this thread busy; other requests go on with others.
            Some(_) => tokio::task::block_in_place(|| form.add(&work.served, index, part))?,
            None => form.add(&work.served, index, part)?,
        }
        Ok(Some(index))
    }

    /// Server-sent events: the first messages, a piece for each token that completes text, and the last messages.
    fn events(mut self) -> Response {
        let first = self.form.first(&self.work).into();
        let state = Stream { answer: self, ready: first, state: State::Running };
        let stream = futures_util::stream::unfold(state, |mut state| async move {
            let Message { event, data } = state.next().await?;
            let message = event.map_or_else(Event::default, |name| Event::default().event(name));
            Some((Ok::<_, std::convert::Infallible>(message.data(data)), state))
        });
        Sse::new(stream).into_response()
    }
}

/// A new id that begins with `start`.
pub fn new_id(start: &str) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    // Several ids may be made within the resolution of the clock.
    format!("{start}{:020x}{:04x}", since, COUNT.fetch_add(1, Ordering::Relaxed) & 0xffff)
}

impl Work {
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

    /// The completions, for the metrics.
    fn ended(&self) -> Vec<Ended> {
        let ended = |(index, choice): (usize, &Choice)| {
            let (prompt_tokens, most_tokens) = self.lengths[index / self.params.n];
            Ended { prompt_tokens, tokens: choice.tokens, most_tokens, reason: choice.reason.unwrap_or("abort") }
        };
        self.choices.iter().enumerate().map(ended).collect()
    }

    /// The number of tokens so far.
    pub fn usage(&self) -> Usage {
        Usage {
            // Tokens of a prompt count once, however many completions it has.
            prompt: self.lengths.iter().map(|(prompt, _)| prompt).sum(),
            cached: self.choices.iter().step_by(self.params.n).map(|choice| choice.cached_tokens).sum(),
            completion: self.choices.iter().map(|choice| choice.tokens).sum(),
            reasoning: self.choices.iter().map(|choice| choice.reasoning_tokens).sum(),
        }
    }
}

enum State {
    Running,
    Closed,
}

/// A streamed answer. It is dropped when the client disconnects, which cancels the completions.
struct Stream<F> {
    answer: Answer<F>,
    ready: VecDeque<Message>,
    state: State,
}

impl<F: Form> Stream<F> {
    /// The next message; `None` after the last.
    async fn next(&mut self) -> Option<Message> {
        loop {
            if let Some(piece) = self.ready.pop_front() {
                return Some(piece);
            }
            match self.state {
                State::Closed => return None,
                State::Running if self.answer.work.goes_on() => match self.answer.advance().await {
                    Ok(grown) => {
                        let Answer { form, work } = &mut self.answer;
                        self.ready.extend(grown.map(|index| form.piece(work, index)).into_iter().flatten());
                    }
                    Err(error) => {
                        self.state = State::Closed;
                        self.ready.extend(self.answer.form.failed(&self.answer.work, &error));
                    }
                },
                State::Running => {
                    self.state = State::Closed;
                    let Answer { form, work } = &mut self.answer;
                    work.timer.end(&work.ended());
                    self.ready.extend(form.last(work));
                }
            }
        }
    }
}
