//! `POST /v1/completions`.

use crate::answer::{Answer, Prepared};
use crate::body::{Body, Prompt};
use crate::choice::{Choice, Delta};
use crate::choices::Choices;
use crate::constraint;
use crate::error::{ApiError, Result};
use crate::finish::Finish;
use crate::format::Part;
use crate::json::{self, ObjectText};
use crate::logprobs::{Lists, Place, of_prompt};
use crate::metrics::Timer;
use crate::params::{self, Hidden, Params};
use crate::served::{Encoded, Served};
use crate::token_ids::TokenIds;
use crate::truncation::Truncation;
use ottava_data::{Detokenizer, Tokenizer};
use ottava_engine::{Request, TokenLogprob};
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;

/// Fields that only completions have.
const OWN: &[&str] = &["prompt", "echo", "prompt_logprobs", "add_special_tokens"];
/// As in `params`.
const NOT_IMPLEMENTED: &[(&str, &[&str])] = &[("suffix", &["\"\""])];

/// The fields that a request may have.
pub fn fields() -> Vec<&'static str> {
    params::known(OWN, NOT_IMPLEMENTED)
}

/// Texts, with lists of log-probabilities.
pub struct Texts {
    /// Whether log-probabilities are wanted, and whether log-probabilities of the prompt come before log-probabilities of new tokens.
    logprobs: bool,
    echo: bool,
    /// Whether the log-probabilities of the prompt are a field of their own.
    tells_prompt: bool,
    /// The tokens of each prompt, and how many of them come before its text.
    prompts: Vec<(Vec<u32>, usize)>,
    hidden: Hidden,
    n: usize,
    choices: Vec<Text>,
}

/// A choice, or the part of it since the last piece.
#[derive(Default)]
struct Text {
    place: Place,
    text: String,
    lists: Lists,
    /// JSON.
    prompt_logprobs: Option<String>,
    /// JSON, if they are wanted and the choice has had no piece.
    prompt_token_ids: Option<String>,
    token_ids: TokenIds,
    finish: Option<Finish>,
}

/// Reads a request, and starts its completions.
pub async fn completions(
    served: Arc<Served>,
    permit: OwnedSemaphorePermit,
    mut body: Body,
    timer: Timer,
) -> Result<Answer<Texts>> {
    let model = served.model(&body)?;
    params::expect_implemented(&body, &served, NOT_IMPLEMENTED)?;
    let params = Params::read(&body, &served, model)?;
    let (echo, logprobs) = (body.flag("echo")?, params::logprobs(&body, "logprobs")?);
    let asked = params::logprobs(&body, "prompt_logprobs")?;
    let prompt_logprobs = if echo { asked.max(logprobs) } else { asked };
    let max_tokens = body.count("max_tokens")?.unwrap_or(16);
    let grammar = constraint::grammar(&served, &body, None).await?;
    if max_tokens == 0 && !echo {
        return Err(ApiError::field("max_tokens", "`max_tokens` is 0; without `echo` there is nothing to answer"));
    }
    let special = body.flag_on("add_special_tokens")?;
    let prompt = body.take_prompt().ok_or_else(|| ApiError::field("prompt", "`prompt` is missing"))?;
    params.expect_few(prompt.len())?;
    let (mut requests, mut texts, mut of_prompts) = (Vec::new(), Vec::new(), Vec::new());
    let truncation = Truncation::read(&body, served.max_model_len.saturating_sub(max_tokens.max(1)))?;
    for Encoded { ids, added, text } in prompts(&served, "prompt", prompt, special, &truncation).await? {
        texts.push(match (echo, text) {
            (false, _) => String::new(),
            (true, Some(text)) => text,
            (true, None) => text_of(&ids, &served.tokenizer)?,
        });
        of_prompts.push((if prompt_logprobs.is_some() { ids.clone() } else { Vec::new() }, added));
        // The engine draws one token at least.
        let request = params.request(ids, Some(max_tokens.max(1)), served.max_model_len)?;
        let (logprobs, grammar) = (params.logprobs_of_engine(logprobs), grammar.clone());
        requests.push(Request { logprobs, prompt_logprobs, grammar, ..request });
    }
    params.expect_small_answer(&requests, echo)?;
    let (mut choices, mut form_choices) = (Vec::new(), Vec::new());
    for (request, text) in requests.iter().zip(&texts) {
        for _ in 0..params.n {
            choices.push(Choice::new(&params, &served.tokenizer, &request.prompt, text.clone(), max_tokens == 0)?);
            let place = if echo { Place::default() } else { Place::after(&served.tokenizer, &request.prompt)? };
            let (place, wanted) = (place.spelled(params.spelling), params.return_token_ids);
            let prompt_token_ids = wanted.then(|| json::text(&request.prompt));
            form_choices.push(Text { place, prompt_token_ids, token_ids: TokenIds::new(wanted), ..Text::default() });
        }
    }
    let (n, hidden) = (params.n, params.hidden.clone());
    let (logprobs, prompts) = (logprobs.is_some(), of_prompts);
    let form = Texts { logprobs, echo, tells_prompt: asked.is_some(), prompts, hidden, n, choices: form_choices };
    Answer::start(served, permit, Prepared { params, choices, requests }, form, timer)
}

/// The text of a prompt that came as ids. A character that its end cuts off is left for the completion.
fn text_of(ids: &[u32], tokenizer: &Tokenizer) -> Result<String> {
    let mut detokenizer = Detokenizer::default();
    let texts = ids.iter().map(|&id| Ok(detokenizer.push(tokenizer, id).map_err(ApiError::of_request)?.text));
    texts.collect()
}

/// The tokens of each prompt in `field`, shortened.
pub async fn prompts(
    served: &Served,
    field: &str,
    prompt: Prompt,
    special: bool,
    truncation: &Truncation,
) -> Result<Vec<Encoded>> {
    let prompts: Vec<Encoded> = match prompt {
        Prompt::Ids(lists) => lists.into_iter().map(|ids| Encoded { ids, added: 0, text: None }).collect(),
        Prompt::Texts(texts) => {
            let mut lists = Vec::with_capacity(texts.len());
            for text in texts {
                lists.push(served.encode(field, text, special).await?);
            }
            lists
        }
    };
    if prompts.is_empty() || prompts.iter().any(|prompt| prompt.ids.is_empty()) {
        return Err(ApiError::field(field, format!("`{field}` has a text without tokens; give at least one")));
    }
    prompts.iter().try_for_each(|prompt| served.expect_known(field, &prompt.ids))?;
    Ok(prompts.into_iter().map(|prompt| truncation.apply(prompt)).collect())
}

impl Texts {
    /// Adds the log-probabilities of the prompt of a choice.
    fn add_prompt(&mut self, index: usize, logprobs: &[Option<TokenLogprob>], tokenizer: &Tokenizer) -> Result<()> {
        let (prompt, added) = &self.prompts[index / self.n];
        let Text { place, lists, prompt_logprobs, .. } = &mut self.choices[index];
        if self.tells_prompt {
            *prompt_logprobs = Some(of_prompt(logprobs, prompt, *added, tokenizer)?);
        }
        if !(self.echo && self.logprobs) {
            return Ok(());
        }
        for (number, (logprob, &token)) in logprobs.iter().zip(prompt).enumerate() {
            // What the tokenizer has put before the text is not in the answer.
            lists.push(token, logprob.as_ref(), place, number >= *added, tokenizer)?;
        }
        Ok(())
    }
}

impl Choices for Texts {
    const NAMES: [&'static str; 3] = ["text_completion", "text_completion", "cmpl-"];

    fn add(&mut self, served: &Served, index: usize, part: Delta) -> Result<()> {
        let tokenizer = &served.tokenizer;
        if let Some(logprobs) = &part.prompt_logprobs {
            self.add_prompt(index, logprobs, tokenizer)?;
        }
        let Text { place, text, lists, token_ids, finish, .. } = &mut self.choices[index];
        for part in &part.parts {
            if let Part::Content(content) = part {
                text.push_str(content);
            }
        }
        token_ids.extend(&part.tokens);
        *finish = part.finish.or(finish.take());
        for logprob in part.logprobs.iter().filter(|_| self.logprobs) {
            let is_text = !self.hidden.hides(tokenizer, logprob.token);
            lists.push(logprob.token, Some(logprob), place, is_text, tokenizer)?;
        }
        Ok(())
    }

    fn whole(&mut self, index: usize, number: usize) -> String {
        let choice = &mut self.choices[index];
        let (text, lists) = (std::mem::take(&mut choice.text), std::mem::take(&mut choice.lists));
        let logprobs = if self.logprobs { lists.json() } else { "null".into() };
        let object = ObjectText::new().field("index", &number).field("text", &text).json("logprobs", &logprobs);
        let object = choice.token_ids.write(Finish::write(choice.finish.take(), object));
        let of_prompt =
            [("prompt_logprobs", choice.prompt_logprobs.take()), ("prompt_token_ids", choice.prompt_token_ids.take())];
        let of_prompt = of_prompt.into_iter().filter_map(|(name, value)| Some((name, value?)));
        of_prompt.fold(object, |object, (name, value)| object.json(name, &value)).end()
    }

    fn piece(&mut self, index: usize) -> Option<String> {
        Some(self.whole(index, index))
    }
}
