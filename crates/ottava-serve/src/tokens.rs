//! `POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`, in the form of vLLM's.

use crate::body::{Body, MOST_VALUES, Prompt};
use crate::chat_request::{conversation, prompt_form};
use crate::error::{ApiError, Result};
use crate::logprobs::Place;
use crate::served::{PromptOptions, Served};
use ottava_common::input;
use ottava_data::parse_json;
use serde_json::{Value, json};
use std::io::ErrorKind;

/// The fields of `/tokenize`: a text or a conversation.
pub const TOKENIZE: &[&str] = &[
    "model",
    "prompt",
    "add_special_tokens",
    "return_token_strs",
    "messages",
    "tools",
    "tool_choice",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
];
/// The maximum size of a `tokenizer_config.json`.
const MOST_CONFIG_BYTES: u64 = 16 << 20;
/// The fields of `/detokenize`.
pub const DETOKENIZE: &[&str] = &["model", "tokens"];

/// The tokens of a text, or of a conversation rendered by the template, as the model would get them.
pub async fn tokenize(served: &Served, body: &mut Body) -> Result<Value> {
    served.model(body)?;
    let tokens = match (body.take_prompt(), body.get("messages")) {
        (Some(Prompt::Texts(texts)), None) if texts.len() == 1 => {
            served.encode("prompt", texts.concat(), body.flag_on("add_special_tokens")?).await?.ids
        }
        (None, Some(_)) if body.flag("add_special_tokens")? => {
            let message = "`add_special_tokens` is for `prompt`: the chat template writes special tokens itself";
            return Err(ApiError::field("add_special_tokens", message));
        }
        (None, Some(_)) => {
            let asked = PromptOptions { form: prompt_form(body)?, ..PromptOptions::default() };
            served.render(body.bytes, conversation(body)?, asked).await?.ids
        }
        _ => return Err(ApiError::field("prompt", "give either `prompt`, a text, or `messages`")),
    };
    let mut place = Place::default();
    let text = |&id: &u32| {
        let text = place.text(&served.tokenizer, id)?;
        place.push(&served.tokenizer, id)?;
        Ok(text)
    };
    let texts = match body.flag("return_token_strs")? {
        true => Some(tokens.iter().map(text).collect::<Result<Vec<String>>>()?),
        false => None,
    };
    Ok(json!({
        "count": tokens.len(), "max_model_len": served.max_model_len, "tokens": tokens, "token_strs": texts,
    }))
}

/// The content of `tokenizer_config.json`, with the chat template. Clients such as lm-eval read special tokens and the template here. Errors if the file
/// cannot be read. The first call reads it.
pub fn tokenizer_info(served: &Served) -> Result<&Value> {
    served.tokenizer_info.get_or_init(|| read_info(served)).as_ref().map_err(Clone::clone)
}

fn read_info(served: &Served) -> Result<Value> {
    let path = served.tokenizer.path().with_file_name("tokenizer_config.json");
    // Clients must not see the path.
    let failed = |reason: String| {
        tracing::warn!("{} cannot be read: {reason}", path.display());
        ApiError::internal(
            "the `tokenizer_config.json` of the model cannot be read; the log of the server has the reason",
        )
    };
    let mut info = match input::read_text(&path, MOST_CONFIG_BYTES) {
        Ok(text) => parse_json(&text).map_err(failed)?,
        // Some tokenizers have no such file.
        Err(error) if error.kind() == ErrorKind::NotFound => json!({}),
        Err(error) => return Err(failed(error.to_string())),
    };
    if !info.is_object() {
        return Err(failed("it is no JSON object".into()));
    }
    if info["tokenizer_class"].is_null() {
        info["tokenizer_class"] = "PreTrainedTokenizerFast".into();
    }
    if let Some(template) = &served.template {
        info["chat_template"] = template.source().into();
    }
    Ok(info)
}

/// The text of tokens, with special ones.
pub fn detokenize(served: &Served, body: &Body) -> Result<Value> {
    served.model(body)?;
    let tokens = body.ids("tokens", MOST_VALUES)?;
    served.expect_known("tokens", &tokens)?;
    let text = served.tokenizer.decode(&tokens).map_err(ApiError::of_request)?;
    Ok(json!({"prompt": text}))
}
