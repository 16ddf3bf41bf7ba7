//! `ottava chat`.

use super::inference::{Draws, Inference, with_model};
use clap::Args;
use ottava_lm::data::{Chat, ChatTemplate, Clock, Tokenizer};
use ottava_lm::engine::complete;
use ottava_lm::models::{ConfigFile, DecoderConfig, decoder_config};
use ottava_lm::{Error, Result};
use serde_json::{Map, Value};
use std::io::{self, BufRead, IsTerminal};
use std::path::{Path, PathBuf};

/// Talk to a chat model: a line of standard input is a message, and the end of input ends the conversation.
#[derive(Args)]
#[command(after_help = "Examples:
  ottava chat model/
  ottava chat runs/chat --system 'Answer in one sentence.' --temperature 0.7 --top-p 0.9
  echo 'What is an otter?' | ottava chat model/")]
pub struct ChatCommand {
    /// A Hugging Face model folder with a chat template, or the folder of a run, whose newest checkpoint is used.
    model: PathBuf,
    /// The system message of the conversation.
    #[arg(long)]
    system: Option<String>,
    /// A JSON object with further variables of the chat template, such as {"enable_thinking": false}.
    #[arg(long, value_name = "JSON", value_parser = object)]
    chat_template_kwargs: Option<Map<String, Value>>,
    /// Maximum number of tokens of the whole conversation, up to the model's positions.
    #[arg(long, default_value_t = 4096, value_parser = super::count)]
    max_length: usize,
    /// Maximum number of tokens of an answer.
    #[arg(long, default_value_t = 512, value_parser = super::positive)]
    max_new_tokens: usize,
    #[command(flatten)]
    draws: Draws,
    #[command(flatten)]
    how: Inference,
}

impl ChatCommand {
    pub fn run(self) -> Result<()> {
        let kwargs = self.chat_template_kwargs.clone().unwrap_or_default();
        let (model, tokenizer, template, sizes) = with_model(&self.model, |folder| {
            let config = ConfigFile::read(folder)?;
            let (tokenizer, template) = (Tokenizer::load(folder)?, chat_template(folder)?.with_kwargs(kwargs.clone())?);
            let sizes = decoder_config(&config)?;
            Ok((self.how.load(folder, &config, self.capacity(&sizes))?, tokenizer, template, sizes))
        })?;
        let capacity = self.capacity(&sizes);
        let mut engine = self.draws.engine(model, &[capacity], capacity)?;
        let mut chat = Chat::default();
        chat.messages.extend(self.system.iter().map(|text| Chat::message("system", text)));
        let asks = io::stdin().is_terminal() && io::stdout().is_terminal();
        let ask = || {
            if asks {
                out_part!("> ");
            }
        };
        ask();
        for (turn, line) in (0..).zip(io::stdin().lock().lines()) {
            let line = line.map_err(Error::io("standard input"))?;
            if !line.trim().is_empty() {
                chat.messages.push(Chat::message("user", &line));
                let ids = template.prompt(&tokenizer, &chat)?;
                if ids.len() >= capacity {
                    return Err(self.too_long(ids.len(), &sizes));
                }
                let request = self.draws.request(ids, self.max_new_tokens, turn);
                let mut answer = String::new();
                complete(&mut engine, &tokenizer, [request], &mut |_, text| out_part!("{text}"), &mut |_, done| {
                    answer = done.text;
                    Ok(())
                })?;
                out!();
                chat.messages.push(Chat::message("assistant", &answer));
            }
            ask();
        }
        Ok(())
    }

    /// Tokens of a conversation with an answer.
    fn capacity(&self, sizes: &DecoderConfig) -> usize {
        self.max_length.min(sizes.context())
    }

    /// Why there is no room for an answer to a conversation of `tokens`.
    fn too_long(&self, tokens: usize, sizes: &DecoderConfig) -> Error {
        let capacity = self.capacity(sizes);
        let limit = match capacity == self.max_length {
            true => format!("--max-length is {capacity}"),
            false => format!("the model has {capacity} positions"),
        };
        Error::Config(format!(
            "the conversation has {tokens} tokens, and {limit}, with at least one token of an answer; start a new conversation{}",
            if capacity == self.max_length { ", or raise --max-length" } else { "" }
        ))
    }
}

fn object(text: &str) -> std::result::Result<Map<String, Value>, String> {
    serde_json::from_str(text).map_err(|error| format!("expected a JSON object: {error}"))
}

/// The chat template of a model folder.
pub fn chat_template(folder: &Path) -> Result<ChatTemplate> {
    ChatTemplate::load(folder, None, Clock::Now)?.ok_or_else(|| {
        Error::Model(format!(
            "{}: there is no chat template (chat_template.jinja, or `chat_template` in tokenizer_config.json); \
             this may be no chat model",
            folder.display()
        ))
    })
}
