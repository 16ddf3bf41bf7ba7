//! `ottava chat`.

use super::chat_input::Input;
use super::decoding::Decoding;
use super::inference::{Draws, Inference, InferenceRanks};
use super::newest::{base_of_adapter, with_model};
use super::sampling_flags::GenerationConfig;
use crate::output::{ignore_signals, stop_answers_on_signals};
use crate::ranks::RankArgs;
use clap::Args;
use ottava_checkpoint::Texts;
use ottava_common::{Error, Result, interrupt};
use ottava_data::{Chat, ChatTemplate, Clock, Tokenizer};
use ottava_engine::complete;
use ottava_models::{ConfigFile, DecoderConfig};
use serde_json::{Map, Value, json};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

/// Talk to a chat model. Each line of standard input is a message; on a terminal, pasted lines are one message. The end of input ends the conversation.
#[derive(Args)]
#[command(after_help = "Examples:
  ottava chat model/
  ottava chat runs/chat --system 'Answer in one sentence.' --temperature 0.7 --top-p 0.9
  ottava chat model/ --gpus 2
  echo 'What is an otter?' | ottava chat model/

A line that starts with / is a command: /clear starts a new conversation, /save FILE appends this one to a file as a record of `messages`, /help
lists the commands, and /quit ends the program. On a terminal, lines can be edited, the arrow keys recall earlier messages, and pasted lines are one
message. Ctrl-C stops an answer, and ends the program between answers. If the conversation is longer than --max-length, its oldest turns are dropped.")]
pub struct ChatCommand {
    /// A Hugging Face model folder with a chat template, or the folder of a run (its newest checkpoint is used). An adapter is loaded with the base model
    /// that it names.
    model: PathBuf,
    /// The system message of the conversation.
    #[arg(long)]
    system: Option<String>,
    /// A JSON object with further variables of the chat template, such as {"enable_thinking": false}.
    #[arg(long, value_name = "JSON", value_parser = object)]
    chat_template_kwargs: Option<Map<String, Value>>,
    /// The maximum number of tokens of the whole conversation, limited by the model's context length.
    #[arg(long, default_value_t = 4096, value_parser = super::count)]
    max_length: usize,
    /// The maximum number of tokens of an answer.
    #[arg(long, default_value_t = 512, value_parser = super::positive)]
    max_new_tokens: usize,
    /// The sampling settings that are not given as flags: auto reads them from generation_config.json in the folder of the model, none ignores this
    /// file. If the file suggests none, the most likely token is taken.
    #[arg(long, value_enum, default_value = "auto")]
    generation_config: GenerationConfig,
    #[command(flatten)]
    draws: Draws,
    #[command(flatten)]
    decoding: Decoding,
    #[command(flatten)]
    how: Inference,
    #[command(flatten)]
    ranks: RankArgs,
}

/// The commands of a conversation, and what they do.
const COMMANDS: &str = "/clear starts a new conversation
/save FILE appends the conversation to a file, as a record of `messages`
/help shows these commands
/quit ends the program, as the end of input (Ctrl-D) does";

impl ChatCommand {
    pub fn run(mut self) -> Result<()> {
        if let Some(base) = base_of_adapter(&self.model)?.filter(|_| !self.how.has_adapter()) {
            note!("{} is an adapter of {}", self.model.display(), base.display());
            self.how.set_adapter(std::mem::replace(&mut self.model, base));
        }
        let kwargs = self.chat_template_kwargs.clone().unwrap_or_default();
        let (role, device) = self.how.role(&self.ranks)?;
        if !role.leads() {
            // The terminal sends its signals to all ranks. Rank 0 decides what a signal stops, and ends the other ranks.
            ignore_signals()?;
        }
        let ranks = InferenceRanks::join(role, device)?;
        self.decoding.check(&ranks)?;
        let loaded = with_model(&self.model, |folder| {
            let config = ConfigFile::read(folder)?;
            let sizes = self.how.sizes(&config)?;
            let Texts { tokenizer, template } = self.how.texts(folder, &sizes)?;
            let template = chat_template(&template, kwargs.clone())?;
            let model = self.how.load(folder, &config, self.capacity(&sizes), &ranks)?;
            let draft = self.decoding.draft(&self.how, &tokenizer, self.capacity(&sizes), &ranks)?;
            let sampling = self.generation_config.suggested_for_chat(folder)?;
            Ok(((model, draft), folder.to_path_buf(), tokenizer, template, sizes, sampling))
        });
        let (models, folder, tokenizer, template, sizes, sampling) = ranks.together(loaded)?;
        self.draws.start_from(sampling.unwrap_or_default());
        let capacity = self.capacity(&sizes);
        let options = self.draws.options((&models.0, models.1.as_ref()), &[capacity], capacity)?;
        let engine = self.decoding.engine(&ranks, models, &folder, options)?;
        let Some(mut engine) = ranks.lead(engine)? else { return Ok(()) };
        let mut chat = Chat::default();
        chat.messages.extend(self.system.iter().map(|text| Chat::message("system", text)));
        stop_answers_on_signals()?;
        let input = Input::open()?;
        if input.is_terminal() {
            note!("/help lists the commands; Ctrl-D or /quit ends the conversation");
        }
        for turn in 0.. {
            let Some(line) = input.next()? else { break };
            if let Some(command) = line.trim().strip_prefix('/') {
                match command.split_once(' ').unwrap_or((command, "")) {
                    ("clear", "") => chat.messages.retain(|message| message["role"] == "system"),
                    ("save", path) if !path.is_empty() => save(&chat, Path::new(path.trim())),
                    ("help", "") => note!("{COMMANDS}"),
                    ("quit" | "exit", "") => break,
                    _ => note!("unknown command /{command}; /help lists the commands"),
                }
            } else if !line.trim().is_empty() {
                chat.messages.push(Chat::message("user", &line));
                let ids = self.shorten(&mut chat, &template, &tokenizer, &sizes)?;
                let request = self.draws.request(ids, self.max_new_tokens, turn);
                let mut answer = String::new();
                let mut show = |_, text: &str| {
                    out_part!("{text}");
                    answer += text;
                };
                let answered = complete(&mut engine, &tokenizer, [request], &mut show, &mut |_, _| Ok(()));
                out!();
                if matches!(answered, Err(Error::Cancelled(_))) {
                    interrupt::flag().store(false, Ordering::Relaxed);
                }
                match answered {
                    Err(Error::Cancelled(_)) if answer.is_empty() => {
                        chat.messages.pop();
                        note!("stopped before the answer began; the message is left out of the conversation");
                    }
                    Err(Error::Cancelled(_)) => {
                        chat.messages.push(Chat::message("assistant", &answer));
                        note!("stopped; the conversation has the answer up to here");
                    }
                    answered => {
                        answered?;
                        chat.messages.push(Chat::message("assistant", &answer));
                    }
                }
            }
        }
        drop(input);
        engine.finish()?;
        ranks.into_processes().wait()?;
        match interrupt::flag().load(Ordering::Relaxed) {
            true => std::process::exit(130),
            false => Ok(()),
        }
    }

    /// Removes the oldest turns of `chat` until its prompt fits, and returns the prompt.
    fn shorten(
        &self,
        chat: &mut Chat,
        template: &ChatTemplate,
        tokenizer: &Tokenizer,
        sizes: &DecoderConfig,
    ) -> Result<Vec<u32>> {
        let (capacity, mut left_out) = (self.capacity(sizes), 0);
        loop {
            let ids = template.prompt(tokenizer, chat)?;
            if ids.len() < capacity {
                if left_out > 0 {
                    note!(
                        "the conversation is longer than {capacity} tokens; its oldest {left_out} messages are left out"
                    );
                }
                return Ok(ids);
            }
            // Remove the oldest message of the user with the answers to it. The newest message has no answer yet, and stays.
            let users = (0..chat.messages.len()).filter(|i| chat.messages[*i]["role"] == "user");
            let [first, second] = users.take(2).collect::<Vec<_>>()[..] else {
                return Err(self.too_long(ids.len(), sizes));
            };
            left_out += second - first;
            chat.messages.drain(first..second);
        }
    }

    /// Returns the maximum number of tokens of a conversation, including the answer.
    fn capacity(&self, sizes: &DecoderConfig) -> usize {
        self.max_length.min(sizes.context())
    }

    /// Returns the error that says why a conversation of `tokens` tokens has no room for an answer.
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

/// Parses a JSON object.
pub fn object(text: &str) -> std::result::Result<Map<String, Value>, String> {
    serde_json::from_str(text).map_err(|error| format!("expected a JSON object: {error}"))
}

/// Appends a conversation to a file, as a record of training data.
fn save(chat: &Chat, path: &Path) {
    let file = OpenOptions::new().create(true).append(true).open(path);
    let written = file.and_then(|mut file| writeln!(file, "{}", json!({"messages": chat.messages})));
    match written {
        Ok(()) => note!("appended {} messages to {}", chat.messages.len(), path.display()),
        // The conversation continues.
        Err(error) => note!("{}: {error}", path.display()),
    }
}

/// Loads the chat template of a model folder, with further variables.
pub fn chat_template(folder: &Path, kwargs: Map<String, Value>) -> Result<ChatTemplate> {
    let template = ChatTemplate::load(folder, None, Clock::Now)?.ok_or_else(|| {
        Error::Model(format!(
            "{}: there is no chat template (chat_template.jinja, or `chat_template` in tokenizer_config.json); \
             this may be no chat model",
            folder.display()
        ))
    })?;
    template.with_kwargs(kwargs)
}
