//! How `generate`, `chat` and `serve` decode: independence of the batch, and speculative decoding.

use super::inference::{Inference, InferenceRanks};
use super::newest::with_model;
use clap::Args;
use ottava_common::{Error, Result};
use ottava_data::Tokenizer;
use ottava_engine::{Draft, Engine, EngineOptions, Ngram, Proposer};
use ottava_models::{ConfigFile, Decoder, decoder_config};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Options of decoding.
#[derive(Args)]
pub struct Decoding {
    /// Make results independent of the batch on a GPU too. Kernels are then selected by the sizes of the model alone. With another number of GPUs, results differ. On a CPU,
    /// results never depend on the batch.
    #[arg(long)]
    batch_invariant: bool,
    /// Launch each decode step only after the host has read the tokens of the step before. By default, a step is launched earlier where the settings of
    /// all requests allow it. Results do not change.
    #[arg(long, overrides_with = "async_scheduling")]
    no_async_scheduling: bool,
    /// The default, which turns off an earlier --no-async-scheduling.
    #[arg(long, hide = true)]
    async_scheduling: bool,
    /// Speculative decoding: propose several tokens and verify them in one step. '{"method": "ngram", "num_speculative_tokens": 4,
    /// "prompt_lookup_max": 4, "prompt_lookup_min": 2}' proposes by prompt lookup, '{"model": "FOLDER", "num_speculative_tokens": 4}' by a draft
    /// model with the same tokenizer (one process only).
    #[arg(long, value_name = "JSON")]
    speculative_config: Option<Speculative>,
}

/// The proposer of tokens.
#[derive(Clone, Debug, PartialEq)]
enum Speculative {
    Ngram(Ngram),
    Draft { folder: PathBuf, tokens: usize },
}

/// The keys of vLLM's speculative configuration.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Keys {
    method: Option<String>,
    model: Option<PathBuf>,
    num_speculative_tokens: Option<usize>,
    prompt_lookup_max: Option<usize>,
    prompt_lookup_min: Option<usize>,
}

/// The default of vLLM's `prompt_lookup_max` and `prompt_lookup_min` if neither is given. If one is given, its value is used for both.
const PROMPT_LOOKUP: usize = 5;

const EXAMPLE: &str = r#"{"method": "ngram", "num_speculative_tokens": 4}"#;

impl FromStr for Speculative {
    type Err = String;
    fn from_str(text: &str) -> std::result::Result<Speculative, String> {
        let Keys { method, model, num_speculative_tokens, prompt_lookup_max, prompt_lookup_min } =
            serde_json::from_str(text).map_err(|error| format!("{error}; write a JSON object such as {EXAMPLE}"))?;
        let tokens = num_speculative_tokens.ok_or("`num_speculative_tokens` is missing; set it to 1 to 32")?;
        match (method.as_deref(), model) {
            (Some("ngram"), None) => {
                let longest = prompt_lookup_max.or(prompt_lookup_min).unwrap_or(PROMPT_LOOKUP);
                let shortest = prompt_lookup_min.or(prompt_lookup_max).unwrap_or(PROMPT_LOOKUP);
                Ok(Speculative::Ngram(Ngram { tokens, shortest, longest }))
            }
            (Some("ngram"), Some(_)) => Err("`ngram` takes no `model`; remove `model` or `method`".into()),
            (None | Some("draft_model"), Some(folder)) => match prompt_lookup_max.or(prompt_lookup_min) {
                Some(_) => Err("`prompt_lookup_max` and `prompt_lookup_min` apply only to `ngram`; remove them".into()),
                None => Ok(Speculative::Draft { folder, tokens }),
            },
            (None | Some("draft_model"), None) => {
                Err("set `method` to `ngram`, or `model` to the folder of a draft model".into())
            }
            (Some(other), _) => Err(format!("there is no method `{other}`; the methods are ngram, draft_model")),
        }
    }
}

impl Decoding {
    /// Errors on all ranks if an option requires a single rank and there are several.
    pub fn check(&self, ranks: &InferenceRanks) -> Result<()> {
        if let Some(Speculative::Draft { .. }) = self.speculative_config {
            ranks.expect_alone("a draft model")?;
        }
        Ok(())
    }

    /// Loads the draft model, for sequences of up to `capacity` tokens of a model with this `tokenizer`.
    ///
    /// Errors with [`Error::Model`] if the tokenizer of the draft model has other tokens.
    pub fn draft(
        &self,
        how: &Inference,
        tokenizer: &Tokenizer,
        capacity: usize,
        ranks: &InferenceRanks,
    ) -> Result<Option<Decoder>> {
        let Some(Speculative::Draft { folder, .. }) = &self.speculative_config else { return Ok(None) };
        let load = |folder: &Path| {
            let config = ConfigFile::read(folder)?;
            let (own, sizes) = (Tokenizer::load(folder)?, decoder_config(&config)?);
            if !own.has_tokens_of(tokenizer) {
                return Err(Error::Model(format!(
                    "{}: the vocabulary of the draft model differs from that of {}; name a draft model with the same tokenizer",
                    own.path().display(),
                    tokenizer.path().display()
                )));
            }
            how.of_folder().load(folder, &config, capacity.min(sizes.context()), ranks)
        };
        with_model(folder, load).map(Some)
    }

    /// Creates the engine of this rank for `model`, which was loaded from `folder`. If there is a `draft` model, it proposes tokens.
    ///
    /// Returns the errors of [`InferenceRanks::engine`] and [`Engine::speculate`].
    pub fn engine(
        &self,
        ranks: &InferenceRanks,
        (model, draft): (Decoder, Option<Decoder>),
        folder: &Path,
        options: EngineOptions,
    ) -> Result<Engine> {
        ranks.expect_equal("the speculative configuration", &format!("{:?}", self.speculative_config))?;
        let Decoding { batch_invariant, no_async_scheduling, .. } = *self;
        let mut options = EngineOptions { batch_invariant, async_scheduling: !no_async_scheduling, ..options };
        if !options.prefix_caching && self.speculative_config.is_none() {
            options.saved_states = 0;
        }
        let mut engine = ranks.engine(model, folder, options)?;
        match (&self.speculative_config, draft) {
            (Some(Speculative::Ngram(ngram)), _) => engine.speculate(Proposer::Ngram(*ngram))?,
            (Some(Speculative::Draft { tokens, .. }), Some(draft)) => {
                let vocabulary = engine.model().config().vocabulary;
                let draft = Draft::new(draft, *tokens, engine.options(), vocabulary)?;
                engine.speculate(Proposer::Draft(Box::new(draft)))?;
            }
            _ => {}
        }
        Ok(engine)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speculative_configurations_are_those_of_vllm() {
        let read = |text: &str| text.parse::<Speculative>();
        let ngram = |tokens, shortest, longest| Ok(Speculative::Ngram(Ngram { tokens, shortest, longest }));
        let of_ngram = |rest: &str| read(&format!(r#"{{"method": "ngram", "num_speculative_tokens": 4{rest}}}"#));
        assert_eq!(of_ngram(r#", "prompt_lookup_max": 4, "prompt_lookup_min": 2"#), ngram(4, 2, 4));
        assert_eq!(of_ngram(r#", "prompt_lookup_max": 3"#), ngram(4, 3, 3));
        assert_eq!(of_ngram(""), ngram(4, 5, 5));
        let draft = Ok(Speculative::Draft { folder: "small".into(), tokens: 3 });
        assert_eq!(read(r#"{"model": "small", "num_speculative_tokens": 3}"#), draft);
        assert_eq!(read(r#"{"method": "draft_model", "model": "small", "num_speculative_tokens": 3}"#), draft);
        for (text, words) in [
            ("ngram", r#"write a JSON object such as {"method": "ngram""#),
            (r#"{"model": "small"}"#, "`num_speculative_tokens` is missing"),
            (
                r#"{"method": "ngram", "num_speculative_tokens": 4, "tokens": 1}"#,
                "unknown field `tokens`, expected one of `method`",
            ),
            (
                r#"{"method": "eagle", "model": "a", "num_speculative_tokens": 4}"#,
                "there is no method `eagle`; the methods are ngram",
            ),
            (r#"{"method": "ngram", "model": "a", "num_speculative_tokens": 4}"#, "`ngram` takes no `model`"),
            (r#"{"num_speculative_tokens": 4}"#, "set `method` to `ngram`, or `model`"),
            (r#"{"model": "a", "num_speculative_tokens": 4, "prompt_lookup_max": 2}"#, "apply only to `ngram`"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
