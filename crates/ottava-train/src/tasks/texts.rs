//! The most likely completions of prompts.

use ottava_common::error::Result;
use ottava_data::Tokenizer;
use ottava_engine::{Engine, Request, Sampling, TextRequest, complete};
use ottava_tasks::Texts;

/// Completes the prompts of `texts` at `places` with `engine`, and returns their completions in this order. Each completion is decoded without its
/// prompt, as in lm-evaluation-harness. Calls `progress` with the number of new tokens so far.
///
/// Errors as [`complete`].
pub fn complete_texts(
    engine: &mut Engine,
    tokenizer: &Tokenizer,
    texts: &Texts,
    places: &[usize],
    progress: &mut dyn FnMut(u64),
) -> Result<Vec<String>> {
    let request = |&place: &usize| {
        let request = Request {
            prompt: texts.prompts[place].clone(),
            sampling: Sampling { temperature: 0.0, ..Sampling::default() },
            max_new_tokens: texts.max_gen_toks,
            ..Request::default()
        };
        let stop = texts.until.iter().filter(|stop| !stop.is_empty()).cloned().collect();
        TextRequest { request, stop, decodes_alone: true }
    };
    complete_all(engine, tokenizer, places.iter().map(request).collect(), progress)
}

/// Completes `requests` with `engine`, and returns their completions in this order. Calls `progress` with the number of new tokens so far.
///
/// Errors as [`complete`].
pub fn complete_all(
    engine: &mut Engine,
    tokenizer: &Tokenizer,
    requests: Vec<TextRequest>,
    progress: &mut dyn FnMut(u64),
) -> Result<Vec<String>> {
    let (mut found, mut done) = (vec![String::new(); requests.len()], 0);
    let mut on_text = |_, _: &str| {
        done += 1;
        progress(done);
    };
    complete(engine, tokenizer, requests, &mut on_text, &mut |number, completion| {
        found[number] = completion.text;
        Ok(())
    })?;
    Ok(found)
}
