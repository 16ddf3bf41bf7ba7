//! `POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`, in the form of vLLM's.

use crate::body::{Body, MOST_VALUES, Prompt};
use crate::chat_request::{conversation, prompt_form};
use crate::error::{ApiError, Result};
use crate::logprobs::Place;
use crate::served::{PromptOptions, Served};
use ottava_common::input;
use ottava_data::parse_json;
use serde_json::{Value, json};

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

/// The content of `tokenizer_config.json`, with the chat template. Clients such as lm-eval read special tokens and the template here.
pub fn tokenizer_info(served: &Served) -> Value {
    let path = served.tokenizer.path().with_file_name("tokenizer_config.json");
    // Some tokenizers have no such file.
    let text = input::read_text(&path, MOST_CONFIG_BYTES).unwrap_or_default();
    let mut info = parse_json(&text).ok().filter(Value::is_object).unwrap_or_else(|| json!({}));
    if info["tokenizer_class"].is_null() {
        info["tokenizer_class"] = "PreTrainedTokenizerFast".into();
    }
    if let Some(template) = &served.template {
        info["chat_template"] = template.source().into();
    }
    info
}

/// The text of tokens, with special ones.
pub fn detokenize(served: &Served, body: &Body) -> Result<Value> {
    served.model(body)?;
    let tokens = body.ids("tokens", MOST_VALUES)?;
    served.expect_known("tokens", &tokens)?;
    let text = served.tokenizer.decode(&tokens).map_err(ApiError::of_request)?;
    Ok(json!({"prompt": text}))
}
