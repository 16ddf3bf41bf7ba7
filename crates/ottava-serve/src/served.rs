//! The state that all requests share: the names and limits of the models, the tokenizer, the chat template, and the engine.

use crate::body::Body;
use crate::classifier::Classifier;
use crate::described::described;
use crate::error::{ApiError, Result};
use crate::intake::Intake;
use crate::metrics::Metrics;
use crate::models::{Models, OpenAdapters, ServedModel};
use crate::origin::{Origin, allowed};
use crate::preparing::beside;
use crate::reasoning::{Beginning, ReasoningParser};
use crate::response_store::Store;
use crate::stranger::{Stranger, text_of};
use crate::tolerance::Tolerance;
use crate::tool_calls::ToolCallParser;
use crate::worker::Worker;
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use ottava_common::hash::sha256;
use ottava_data::{Chat, ChatTemplate, PromptForm, Tokenizer};
use ottava_engine::{Grammars, Pooling, Sampling};
use serde_json::{Value, json};
use std::sync::{Arc, OnceLock};

/// The variable of templates with the effort of reasoning.
const EFFORT: &str = "reasoning_effort";

/// The tokens of a prompt.
pub struct Encoded {
    pub ids: Vec<u32>,
    /// The number of tokens that the tokenizer has put before the text.
    pub added: usize,
    /// The text, if the prompt was given as a text.
    pub text: Option<String>,
}

/// What a request asks of the prompt of its conversation.
#[derive(Default)]
pub struct PromptOptions {
    pub form: PromptForm,
    /// The effort of reasoning.
    pub effort: Option<String>,
    /// How reasoning is marked, if the answer may have some.
    pub reasoning: Option<ReasoningParser>,
    /// The text of the message that the answer continues, if it continues one.
    pub continued: Option<String>,
}

/// The prompt of a conversation.
pub struct Rendered {
    pub ids: Vec<u32>,
    /// Where the answer begins.
    pub beginning: Beginning,
    /// Whether a message describes the tools, because the template does not read them.
    pub describes: bool,
}

/// Compiles constraints of texts. The compiler is created when the first request has a constraint. It does not hold the engine, so the engine can end
/// while a constraint is being compiled.
pub struct LazyGrammars {
    tokenizer: Arc<Tokenizer>,
    vocabulary: usize,
    made: OnceLock<Result<Grammars>>,
}

impl LazyGrammars {
    /// Creates the state for a model with `vocabulary` tokens.
    pub fn new(tokenizer: Arc<Tokenizer>, vocabulary: usize) -> LazyGrammars {
        LazyGrammars { tokenizer, vocabulary, made: OnceLock::new() }
    }

    /// Returns the compiler of constraints. The first call takes long.
    pub fn get(&self) -> Result<&Grammars> {
        let make = || {
            Grammars::new(&self.tokenizer, self.vocabulary).map_err(|error| {
                tracing::warn!("requests with constraints are refused: {error}");
                ApiError::invalid("texts cannot be constrained: the tokenizer of the model decodes no bytes")
            })
        };
        self.made.get_or_init(make).as_ref().map_err(Clone::clone)
    }
}

/// The state that all requests share.
pub struct Served {
    /// The models that requests can name. Requests that name no model get the first.
    pub models: Models,
    /// What opens adapters, if requests can load and unload them.
    pub open_adapters: Option<OpenAdapters>,
    /// The maximum number of tokens of prompt and completion together.
    pub max_model_len: usize,
    /// The tokenizer of the model.
    pub tokenizer: Arc<Tokenizer>,
    /// The answer of `/tokenizer_info`, from the first request on.
    pub tokenizer_info: OnceLock<Result<Value>>,
    /// Compiles constraints of texts.
    pub grammars: Arc<LazyGrammars>,
    /// The engine.
    pub worker: Worker,
    /// The chat template, if the model has one.
    pub template: Option<Arc<ChatTemplate>>,
    /// The format in which the model writes tool calls, if it is known.
    pub tool_call_parser: Option<ToolCallParser>,
    /// How the model marks its reasoning, if it is known.
    pub reasoning_parser: Option<ReasoningParser>,
    /// Ignores or refuses fields without effect.
    pub tolerance: Arc<Tolerance>,
    /// The number of rows of the model's embedding.
    pub vocabulary: usize,
    /// The number of values of an embedding of a text.
    pub channels: usize,
    /// How the activations of a text become its embedding.
    pub pooling: Pooling,
    /// Whether the model is an encoder, which writes no text.
    pub is_encoder: bool,
    /// The labels of a classifier; `None` for a language model.
    pub classifier: Option<Classifier>,
    /// The default sampling of requests.
    pub sampling: Sampling,
    /// The responses that later requests can name.
    pub responses: Store,
    /// The values of `/metrics`.
    pub metrics: Arc<Metrics>,
    /// The receiver of bodies.
    pub intake: Intake,
    /// Whether only this machine can connect.
    pub is_local: bool,
    /// The other sites whose pages may send requests.
    pub origins: Vec<Origin>,
    /// SHA-256 of the key. Comparing hashes takes the same time for all wrong keys.
    pub api_key: Option<String>,
    /// When the server started, in seconds since 1970.
    pub created: u64,
}

impl Served {
    /// Returns the model that a request names. Errors if there is no model of this name.
    pub fn model(&self, body: &Body) -> Result<Arc<ServedModel>> {
        body.text("model")?.map_or_else(|| Ok(self.models.first()), |name| self.models.named(name))
    }

    /// Describes a model for `/v1/models`.
    pub fn describe(&self, model: &ServedModel) -> Value {
        let ServedModel { name, root, parent, .. } = model;
        json!({
            "id": name, "object": "model", "created": self.created, "owned_by": "ottava", "root": root, "parent": parent,
            "max_model_len": self.max_model_len,
        })
    }

    /// Tokenizes a prompt of the field `field`. If `special`, the tokenizer puts its special tokens before the text. A text that cannot fit in the
    /// model's room is refused before it is tokenized.
    pub async fn encode(&self, field: &str, text: String, special: bool) -> Result<Encoded> {
        self.expect_may_fit(field, text.len())?;
        let tokenizer = self.tokenizer.clone();
        beside(text.len(), move || {
            let encoded = match special {
                true => tokenizer.encode_prompt_after(&text),
                false => tokenizer.encode(&text).map(|ids| (ids, 0)),
            };
            let (ids, added) = encoded.map_err(ApiError::of_request)?;
            Ok(Encoded { ids, added, text: Some(text) })
        })
        .await
    }

    /// Renders and tokenizes a conversation, which had `bytes` bytes as JSON.
    pub async fn render(&self, bytes: usize, chat: Chat, asked: PromptOptions) -> Result<Rendered> {
        let Some(template) = self.template.clone() else {
            return Err(ApiError::invalid("the model has no chat template; use /v1/completions"));
        };
        let tolerance = self.tolerance.clone();
        let (text, beginning, describes) = beside(bytes, move || {
            // Clients must not see the path of the template.
            let path = format!("chat template {}", template.path().display());
            let failed = |reason: String| ApiError::field("messages", reason.replace(&path, "the chat template"));
            let PromptOptions { mut form, effort, reasoning, continued } = asked;
            let reads = |name: &str| template.reads_variable(name, !chat.tools.is_null());
            for name in form.kwargs.keys().filter(|name| !reads(name)) {
                tolerance
                    .ignore(&format!("chat_template_kwargs.{name}"), "is not read by the chat template of the model")?;
            }
            if let Some(effort) = effort {
                let switches = ["enable_thinking", "thinking"].into_iter().find(|name| reads(name));
                let (name, value) = match switches {
                    _ if reads(EFFORT) => (EFFORT, effort.into()),
                    Some(name) => (name, (effort != "none").into()),
                    None => {
                        tolerance.ignore(EFFORT, "is not read by the chat template of the model")?;
                        (EFFORT, effort.into())
                    }
                };
                form.kwargs.entry(name).or_insert(value);
            }
            let mut text = template.prompt_text(&chat, &form).map_err(failed)?;
            let mut describes = false;
            if chat.tools.as_array().is_some_and(|tools| !tools.is_empty()) {
                let without = Chat { tools: Value::Null, ..chat.clone() };
                if template.prompt_text(&without, &form).is_ok_and(|without| without == text) {
                    describes = true;
                    text = template.prompt_text(&described(&chat), &form).map_err(failed)?;
                }
            }
            let beginning = reasoning.map(|parser| parser.beginning(&text, continued.as_deref())).unwrap_or_default();
            Ok((text, beginning, describes))
        })
        .await?;
        self.expect_may_fit("messages", text.len())?;
        let tokenizer = self.tokenizer.clone();
        let ids = beside(text.len(), move || tokenizer.encode(&text).map_err(ApiError::of_request)).await?;
        Ok(Rendered { ids, beginning, describes })
    }

    /// Errors if `bytes` bytes of text cannot fit in the model's room even with the longest tokens of the vocabulary.
    fn expect_may_fit(&self, field: &str, bytes: usize) -> Result<()> {
        let (room, longest) = (self.max_model_len, self.tokenizer.longest_token());
        match bytes > room.saturating_mul(longest) {
            true => {
                let message = format!(
                    "the text has {bytes} bytes, more than {room} tokens of at most {longest} bytes; the server has room for {room} tokens"
                );
                Err(ApiError::too_long(field, message))
            }
            false => Ok(()),
        }
    }

    /// Errors if a token has no row in the model's embedding.
    pub fn expect_known(&self, field: &str, tokens: &[u32]) -> Result<()> {
        match tokens.iter().find(|&&id| id as usize >= self.vocabulary) {
            Some(&id) => Err(ApiError::no_token(field, id, self.vocabulary)),
            None => Ok(()),
        }
    }

    /// Errors for a request without the key. A server without a key refuses requests that pages of other sites send. Such a request has the `Origin`
    /// of another site that is not among `origins`, or a `Host` that another site lets point to this machine (DNS rebinding).
    pub fn authorize(&self, headers: &HeaderMap) -> Result<()> {
        match &self.api_key {
            Some(expected) => {
                let key = text_of(headers, header::AUTHORIZATION).and_then(|value| value.split_once(' '));
                let key =
                    key.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")).map(|(_, key)| key.trim_start());
                // Anthropic's clients send the key in a header of its own.
                let key = key.or_else(|| text_of(headers, HeaderName::from_static("x-api-key")));
                let right = key.is_some_and(|key| sha256(key.as_bytes()) == *expected);
                if right { Ok(()) } else { Err(ApiError::unauthorized()) }
            }
            None => match Stranger::of(headers, self.is_local) {
                Some(Stranger::Origin) if allowed(&self.origins, headers).is_some() => Ok(()),
                Some(Stranger::Origin) => {
                    let message = "the Origin is another site, and the server has no API key; set --allowed-origin to answer its pages";
                    Err(ApiError::refused(StatusCode::FORBIDDEN, message))
                }
                Some(Stranger::Host) => {
                    let message = "the Host is not this machine, and the server has no API key; set --api-key to answer under other names";
                    Err(ApiError::refused(StatusCode::FORBIDDEN, message))
                }
                None => Ok(()),
            },
        }
    }
}
