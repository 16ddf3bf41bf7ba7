//! `ottava generate`.

use super::chat::chat_template;
use super::decoding::Decoding;
use super::inference::{Draws, Inference};
use super::newest::with_model;
use super::prompts::{Prompt, read_prompts};
use crate::output::{Meter, print_json};
use crate::ranks::RankArgs;
use clap::Args;
use ottava_checkpoint::Texts;
use ottava_common::{Error, Result};
use ottava_data::{Chat, Tokenizer};
use ottava_engine::{Completion, TextRequest, complete};
use ottava_models::ConfigFile;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Complete texts with a model.
#[derive(Args)]
#[command(after_help = "Examples:
  ottava generate runs/quickstart --prompt 'otter (noun):'
  ottava generate model/ --chat --prompt 'What is an otter?'
  ottava generate model/ --prompt 'Once' --gpus 2
  ottava generate model/ --prompt 'Once' --temperature 0.8 --top-p 0.95 --seed 7 --max-new-tokens 200
  ottava generate model/ --input prompts.jsonl --output completions.jsonl --kv-cache-dtype fp8")]
pub struct Generate {
    /// A Hugging Face model folder (such as a checkpoint), or the folder of a run (its newest checkpoint is used).
    model: PathBuf,
    /// The beginning of the text.
    #[arg(long, required_unless_present = "input", conflicts_with = "input")]
    prompt: Option<String>,
    /// A file of prompts, which are completed in one batch: .jsonl with `prompt` or `messages` in each record, or .txt with a prompt on each
    /// line.
    #[arg(long, value_name = "FILE")]
    input: Option<PathBuf>,
    /// Where to write a JSON object for each prompt of --input, in the order of the prompts; by default to standard output. Until all objects are
    /// written, they are in a file with the ending `.partial`; then this file replaces the output file.
    #[arg(long, value_name = "FILE", requires = "input")]
    output: Option<PathBuf>,
    /// Treat prompts as messages to a chat model, rendered by the chat template in the folder of the model.
    #[arg(long)]
    chat: bool,
    /// A JSON object with further variables of the chat template, such as {"enable_thinking": false}.
    #[arg(long, value_name = "JSON", value_parser = super::chat::object)]
    chat_template_kwargs: Option<Map<String, Value>>,
    /// The maximum number of new tokens of each text.
    #[arg(long, default_value_t = 128, value_parser = super::positive)]
    max_new_tokens: usize,
    #[command(flatten)]
    draws: Draws,
    #[command(flatten)]
    decoding: Decoding,
    #[command(flatten)]
    how: Inference,
    #[command(flatten)]
    ranks: RankArgs,
    /// Print a JSON object for each prompt, as for --input.
    #[arg(long)]
    json: bool,
}

/// A prompt with its tokens.
struct Tokenized {
    record: Map<String, Value>,
    ids: Vec<u32>,
}

impl Generate {
    pub fn run(self) -> Result<()> {
        let prompts = match (&self.prompt, &self.input) {
            (Some(prompt), _) => vec![Prompt::of_text(prompt)],
            (None, input) => read_prompts(input.as_deref().expect("one of them is required"))?,
        };
        let ranks = self.how.ranks(&self.ranks)?;
        self.decoding.check(&ranks)?;
        let loaded = with_model(&self.model, |folder| {
            let config = ConfigFile::read(folder)?;
            let sizes = self.how.sizes(&config)?;
            let Texts { tokenizer, template } = self.how.texts(folder, &sizes)?;
            let prompts = self.tokenize(&prompts, &template, &tokenizer)?;
            // Positions beyond the longest request would only cost memory.
            let longest = prompts.iter().map(|prompt| prompt.ids.len()).max().unwrap_or(1);
            let most = sizes.context();
            let capacity = longest.saturating_add(self.max_new_tokens).min(most);
            if let Some(long) = prompts.iter().position(|prompt| prompt.ids.len() >= capacity) {
                let tokens = prompts[long].ids.len();
                let which = if self.input.is_some() { format!(" number {}", long + 1) } else { String::new() };
                return Err(Error::Config(format!(
                    "the prompt{which} has {tokens} tokens; the model has room for {capacity} with its completion{}",
                    if capacity == most { format!(": {}", sizes.context_reason()) } else { String::new() }
                )));
            }
            let model = self.how.load(folder, &config, capacity, &ranks)?;
            let draft = self.decoding.draft(&self.how, &tokenizer, capacity, &ranks)?;
            Ok(((model, draft), folder.to_path_buf(), tokenizer, prompts, capacity))
        });
        let (models, folder, tokenizer, prompts, capacity) = ranks.together(loaded)?;
        let lengths: Vec<usize> =
            prompts.iter().map(|prompt| prompt.ids.len().saturating_add(self.max_new_tokens)).collect();
        let options = self.draws.options((&models.0, models.1.as_ref()), &lengths, capacity)?;
        let engine = self.decoding.engine(&ranks, models, &folder, options)?;
        let Some(mut engine) = ranks.lead(engine)? else { return Ok(()) };
        let requests: Vec<TextRequest> = (0..)
            .zip(&prompts)
            .map(|(number, prompt)| self.draws.request(prompt.ids.clone(), self.max_new_tokens, number))
            .collect();
        if self.input.is_none() && !self.json {
            self.stream(&tokenizer, &mut engine, requests)?;
            engine.finish()?;
            return ranks.into_processes().wait();
        }
        let mut records = Records::to(self.output.as_deref())?;
        let (mut tokens, mut meter) = (0, Meter::new("generated", (requests.len() * self.max_new_tokens) as u64));
        let mut on_text = |_, _: &str| {
            tokens += 1;
            meter.at(tokens);
        };
        complete(&mut engine, &tokenizer, requests, &mut on_text, &mut |number, done| {
            records.add(number, record(&prompts[number], &done))
        })?;
        records.finish()?;
        meter.finish(engine.stats().generated_tokens);
        engine.finish()?;
        ranks.into_processes().wait()
    }

    /// Tokenizes each prompt.
    fn tokenize(&self, prompts: &[Prompt], folder: &Path, tokenizer: &Tokenizer) -> Result<Vec<Tokenized>> {
        let talks = self.chat || prompts.iter().any(|prompt| matches!(prompt, Prompt::Messages { .. }));
        let template =
            talks.then(|| chat_template(folder, self.chat_template_kwargs.clone().unwrap_or_default())).transpose()?;
        let of_chat = |messages: Vec<Value>| match &template {
            Some(template) => template.prompt(tokenizer, &Chat { messages, ..Chat::default() }),
            None => unreachable!("there is a template where a prompt is a chat"),
        };
        let tokenize = |prompt: &Prompt| {
            let (record, ids) = match prompt {
                Prompt::Messages { messages, record } => (record, of_chat(messages.clone())?),
                Prompt::Text { text, record } if self.chat => (record, of_chat(vec![Chat::message("user", text)])?),
                Prompt::Text { text, record } => (record, tokenizer.encode_prompt(text)?),
            };
            if ids.is_empty() {
                return Err(Error::Config(
                    "the prompt is empty and the tokenizer has no token that ends a text; give a prompt".into(),
                ));
            }
            Ok(Tokenized { record: record.clone(), ids })
        };
        prompts.iter().map(tokenize).collect()
    }

    /// Prints one text while it is generated.
    fn stream(
        &self,
        tokenizer: &Tokenizer,
        engine: &mut ottava_engine::Engine,
        requests: Vec<TextRequest>,
    ) -> Result<()> {
        if let Some(prompt) = self.prompt.as_ref().filter(|_| !self.chat) {
            out_part!("{prompt}");
        }
        let (begin, mut tokens) = (Instant::now(), 0);
        complete(engine, tokenizer, requests, &mut |_, text| out_part!("{text}"), &mut |_, done| {
            tokens = done.tokens;
            Ok(())
        })?;
        out!();
        let seconds = begin.elapsed().as_secs_f64();
        note!("generated {tokens} tokens in {seconds:.1} s, {:.0} tokens/s", tokens as f64 / seconds);
        Ok(())
    }
}

/// Returns the fields of the prompt's record with the fields of the completion.
fn record(prompt: &Tokenized, done: &Completion) -> Value {
    let mut record = prompt.record.clone();
    record.insert("text".into(), json!(done.text));
    record.insert("finish_reason".into(), json!(done.reason));
    record.insert("prompt_tokens".into(), json!(prompt.ids.len()));
    record.insert("completion_tokens".into(), json!(done.tokens));
    Value::Object(record)
}

/// Writes records in the order of the prompts, in whatever order they arrive.
struct Records {
    file: Option<RecordFile>,
    next: usize,
    early: BTreeMap<usize, Value>,
}

impl Records {
    /// Creates the writer for a file, or for standard output if `path` is `None`.
    fn to(path: Option<&Path>) -> Result<Records> {
        Ok(Records { file: path.map(RecordFile::create).transpose()?, next: 0, early: BTreeMap::new() })
    }

    fn add(&mut self, number: usize, record: Value) -> Result<()> {
        self.early.insert(number, record);
        while let Some(record) = self.early.remove(&self.next) {
            self.next += 1;
            match &mut self.file {
                Some(file) => file.add(&record)?,
                None => print_json(&record),
            }
        }
        Ok(())
    }

    fn finish(self) -> Result<()> {
        self.file.map_or(Ok(()), RecordFile::finish)
    }
}

/// A file of records. It gets its name when all records are written; until then, the name ends in `.partial`.
struct RecordFile {
    file: BufWriter<File>,
    path: PathBuf,
    /// The path of the file that ends in `.partial`; `None` if `path` is a pipe or a device.
    partial: Option<PathBuf>,
}

impl RecordFile {
    fn create(path: &Path) -> Result<RecordFile> {
        let partial = match std::fs::metadata(path) {
            Ok(found) if found.is_dir() => {
                return Err(Error::Config(format!("--output {}: this is a folder; name a file", path.display())));
            }
            Ok(found) if !found.is_file() => None,
            _ => {
                let mut name = path.file_name().unwrap_or_default().to_os_string();
                name.push(".partial");
                Some(path.with_file_name(name))
            }
        };
        let place = partial.as_deref().unwrap_or(path);
        let file = BufWriter::new(File::create(place).map_err(Error::io(place))?);
        Ok(RecordFile { file, path: path.to_path_buf(), partial })
    }

    fn add(&mut self, record: &Value) -> Result<()> {
        let place = self.partial.as_deref().unwrap_or(&self.path);
        writeln!(self.file, "{record}").and_then(|()| self.file.flush()).map_err(Error::io(place))
    }

    fn finish(mut self) -> Result<()> {
        match self.partial.take() {
            Some(partial) => std::fs::rename(partial, &self.path).map_err(Error::io(&self.path)),
            None => Ok(()),
        }
    }
}

impl Drop for RecordFile {
    /// Handles a failed command, which has not called [`RecordFile::finish`]: an empty file is removed, and a file with completions is kept.
    fn drop(&mut self) {
        let Some(partial) = &self.partial else { return };
        match std::fs::metadata(partial) {
            Ok(found) if found.len() > 0 => note!("the completions so far are in {}", partial.display()),
            _ => drop(std::fs::remove_file(partial)),
        }
    }
}
