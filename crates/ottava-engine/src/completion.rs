//! Completions as text, with one engine and one tokenizer.

use crate::batching::Engine;
use crate::request::{Event, FinishReason, Request, RequestId};
use crate::text::TextStream;
use ottava_common::error::Result;
use ottava_data::Tokenizer;
use std::collections::HashMap;

/// A request for text.
#[derive(Clone, Debug, Default)]
pub struct TextRequest {
    /// The tokens of the prompt and the sampling. The completion also stops at the tokens that end a text.
    pub request: Request,
    /// The stop strings: the text ends before the first of them.
    pub stop: Vec<String>,
    /// Whether the completion is decoded as a text of its own. A SentencePiece tokenizer then drops the space of its first token, as at the beginning
    /// of any text. Otherwise the completion is decoded as the continuation of its prompt.
    pub decodes_alone: bool,
}

/// A finished completion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The text, without the stop string or stop token.
    pub text: String,
    /// The reason why the completion ended.
    pub reason: FinishReason,
    /// The number of drawn tokens.
    pub tokens: usize,
}

/// A completion in progress.
struct InProgress {
    number: usize,
    stream: TextStream,
    done: Completion,
}

/// Computes all `requests`, as many at once as the engine can. Calls `on_text` with the number of a request and the text that a token completes,
/// which may be empty. Calls `on_end` with finished completions.
///
/// Errors in the same cases as [`Engine::add`] and [`Engine::step`]. Errors with [`Error::Cancelled`](ottava_common::Error::Cancelled) after a
/// signal, and then no request is left in the engine.
pub fn complete(
    engine: &mut Engine,
    tokenizer: &Tokenizer,
    requests: impl IntoIterator<Item = TextRequest>,
    on_text: &mut dyn FnMut(usize, &str),
    on_end: &mut dyn FnMut(usize, Completion) -> Result<()>,
) -> Result<()> {
    let mut requests = requests.into_iter().enumerate();
    let mut live: HashMap<RequestId, InProgress> = HashMap::new();
    loop {
        // Only as many requests wait as can begin at once, so a long list is not in memory twice.
        while engine.stats().waiting < engine.max_batch()
            && let Some((number, TextRequest { mut request, stop, decodes_alone })) = requests.next()
        {
            request.stop_ids.extend(tokenizer.eos_ids());
            let done = Completion { text: String::new(), reason: FinishReason::Cancelled, tokens: 0 };
            let before: &[u32] = if decodes_alone { &[] } else { &request.prompt };
            let stream = TextStream::new(stop).after(tokenizer, before)?;
            live.insert(engine.add(request)?, InProgress { number, stream, done });
        }
        if live.is_empty() {
            return Ok(());
        }
        if let Err(stopped) = engine.check_stop("generating") {
            live.keys().for_each(|id| engine.cancel(*id));
            return Err(stopped);
        }
        for event in engine.step()? {
            match event {
                Event::Token { id, token, .. } => {
                    let Some(at) = live.get_mut(&id) else { continue };
                    at.done.tokens += 1;
                    if tokenizer.eos_ids().contains(&token) {
                        continue;
                    }
                    let piece = at.stream.push(tokenizer, token)?;
                    on_text(at.number, &piece.text);
                    at.done.text += &piece.text;
                    if piece.stopped {
                        engine.cancel(id);
                        let at = live.remove(&id).expect("it is in progress");
                        on_end(at.number, Completion { reason: FinishReason::Stop, ..at.done })?;
                    }
                }
                Event::Finished { id, reason, .. } => {
                    let Some(mut at) = live.remove(&id) else { continue };
                    let rest = at.stream.finish();
                    if !rest.is_empty() {
                        on_text(at.number, &rest);
                    }
                    on_end(at.number, Completion { text: at.done.text + &rest, reason, ..at.done })?;
                }
                Event::Prompt { .. } | Event::Embedding { .. } => {}
            }
        }
    }
}
