//! `ottava generate`.

use super::chat::{chat_prompt, chat_template};
use super::inference::{Draws, Inference, with_model};
use crate::output::{Meter, print_json};
use clap::Args;
use ottava_lm::Result;
use ottava_lm::data::{Chat, Tokenizer};
use ottava_lm::generate::{Sampling, generate};
use ottava_lm::models::{ConfigFile, decoder_config};
use serde_json::json;
use std::path::PathBuf;
use std::time::Instant;

/// Complete a text with a model.
#[derive(Args)]
#[command(after_help = "Examples:
  ottava generate runs/quickstart --prompt 'otter (noun):'
  ottava generate model/ --chat --prompt 'What is an otter?'
  ottava generate model/ --prompt 'Once' --temperature 0.8 --top-p 0.95 --seed 7 --max-new-tokens 200")]
pub struct Generate {
    /// A Hugging Face model folder, as a checkpoint is one; or the folder of a run, for its newest.
    model: PathBuf,
    /// The beginning of the text.
    #[arg(long)]
    prompt: String,
    /// Take the prompt as a message to a chat model, rendered by the chat template of its folder.
    #[arg(long)]
    chat: bool,
    /// Tokens at most.
    #[arg(long, default_value_t = 128)]
    max_new_tokens: usize,
    #[command(flatten)]
    draws: Draws,
    #[command(flatten)]
    how: Inference,
    /// Print one JSON object with `prompt` and `text`.
    #[arg(long)]
    json: bool,
}

impl Generate {
    pub fn run(self) -> Result<()> {
        let (model, tokenizer, ids, capacity) = with_model(&self.model, |folder| {
            let config = ConfigFile::read(folder)?;
            let tokenizer = Tokenizer::load(folder)?;
            let sizes = decoder_config(&config)?;
            let ids = match self.chat {
                true => {
                    let messages = vec![Chat::message("user", &self.prompt)];
                    chat_prompt(&chat_template(folder)?, &tokenizer, &Chat { messages, ..Chat::default() })?
                }
                false => tokenizer.encode_prompt(&self.prompt)?,
            };
            // Positions beyond what is asked for would only cost memory.
            let wanted = ids.len().saturating_add(self.max_new_tokens);
            let capacity = wanted.min(sizes.max_positions).min(sizes.window.unwrap_or(usize::MAX));
            Ok((self.how.load(folder, &config, capacity)?, tokenizer, ids, capacity))
        })?;
        let how = Sampling {
            max_new_tokens: self.max_new_tokens,
            temperature: self.draws.temperature,
            top_p: self.draws.top_p,
            seed: self.draws.seed,
        };
        if self.json {
            let (mut tokens, mut meter) = (0, Meter::new("generated", self.max_new_tokens as u64));
            let text = generate(&model, &tokenizer, ids, capacity, &how, &mut |_| {
                tokens += 1;
                meter.at(tokens);
            })?;
            meter.finish(tokens);
            print_json(&json!({"prompt": self.prompt, "text": text}));
            return Ok(());
        }
        if !self.chat {
            out_part!("{}", self.prompt);
        }
        let (begin, mut tokens) = (Instant::now(), 0);
        generate(&model, &tokenizer, ids, capacity, &how, &mut |text| {
            tokens += 1;
            out_part!("{text}");
        })?;
        out!();
        let seconds = begin.elapsed().as_secs_f64();
        note!("generated {tokens} tokens in {seconds:.1} s, {:.0} tokens/s", f64::from(tokens) / seconds);
        Ok(())
    }
}
