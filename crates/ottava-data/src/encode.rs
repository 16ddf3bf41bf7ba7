//! Encodes documents as the tokens that are stored.

use std::path::Path;

use ottava_jinja::{Clock, json_text};
use serde_json::{Map, Value};

use crate::chat::{Chat, ChatTemplate, PromptForm, Rendered, check_kwargs, is_empty_answer};
use crate::columns::MAX_COLUMN_BYTES;
use crate::content::{Content, ExampleRecord, ExampleText, PromptRecord};
use crate::example_records::LENGTHS;
use crate::fields::size;
use crate::messages::{is_of_messages, unknown_fields};
use crate::records::Formatting;
use crate::shards::{MASKED, RecordKind};
use crate::source::{Document, SourceOptions, TrainOnEos};
use crate::tokenizer::Tokenizer;
use ottava_common::{Error, Result};

/// Converts documents to tokens.
pub(super) struct Encoder<'a> {
    pub(super) tokenizer: &'a Tokenizer,
    /// The template that renders chats.
    template: Option<ChatTemplate>,
    /// Whether all tokens are targets.
    train_on_inputs: bool,
    /// The roles of the messages that are targets.
    roles_to_train: Vec<String>,
    /// The fields of messages that are ignored.
    ignored_fields: Vec<String>,
    /// The turns whose end is a target.
    train_on_eos: TrainOnEos,
    /// Whether a bit of each stored token says if the token is a target.
    pub(super) loss_mask: bool,
}

/// The tokens of a document.
#[derive(Default)]
pub(super) struct Encoded {
    /// The ids. [`MASKED`] is set if the token is not a target.
    pub(super) tokens: Vec<u32>,
    /// The number of text bytes that contribute to the loss.
    pub(super) bytes: usize,
    /// The content that the template leaves out.
    pub(super) left_out: LeftOut,
    /// Whether the completion is desirable; `None` for documents without labels.
    pub(super) label: Option<bool>,
    /// The margin of a pair, stored with the chosen completion.
    pub(super) margin: f32,
    /// The JSON of the columns of a prompt or an example.
    pub(super) columns: Option<String>,
}

/// The content of a chat that its template leaves out.
#[derive(Default)]
pub(super) struct LeftOut {
    /// Fields of messages that the template does not read.
    pub(super) fields: Vec<String>,
    /// The number of turns of the assistant without content. They are not targets.
    pub(super) empty_answers: usize,
    /// The number of a message whose turn changes how the template renders earlier messages. Each turn of such a chat is a separate text.
    pub(super) rewrites: Option<usize>,
}

impl<'a> Encoder<'a> {
    /// Creates an encoder for the documents of files with these `formattings`.
    pub(super) fn new(
        tokenizer: &'a Tokenizer,
        options: &SourceOptions,
        formattings: &[Formatting],
    ) -> Result<Encoder<'a>> {
        let prompts = formattings.iter().any(|formatting| formatting.has_prompts());
        let learns = formattings.iter().any(|formatting| !formatting.kind().has_columns());
        let template = match prompts {
            true => ChatTemplate::of_options(tokenizer, options)?,
            false => kwargs(&options.chat_template_kwargs).map(|_| None)?,
        };
        let replaced = template.as_ref().filter(|template| template.is_replaced());
        if let Some(template) = replaced.filter(|_| learns && !options.train_on_inputs) {
            tracing::info!(
                "{}: a published chat template; training renders it by one of the same texts that marks the turns of the assistant and keeps \
                 their thinking",
                template.path().display()
            );
        }
        // No token of an example is predicted, so no mask is stored.
        let examples = formattings.iter().any(|formatting| formatting.kind() == RecordKind::Examples);
        let loss_mask = prompts && !examples && !options.train_on_inputs;
        let (train_on_inputs, train_on_eos) = (options.train_on_inputs, options.train_on_eos);
        let (roles_to_train, ignored_fields) = (options.roles_to_train.clone(), options.ignored_fields.clone());
        Ok(Encoder { tokenizer, template, train_on_inputs, roles_to_train, ignored_fields, train_on_eos, loss_mask })
    }

    /// Returns SHA-256 of the chat template, if there is one.
    pub(super) fn template_sha256(&self) -> Option<&str> {
        self.template.as_ref().map(ChatTemplate::sha256)
    }

    /// Returns the path of the chat template; empty if there is none.
    pub(super) fn template_path(&self) -> &Path {
        self.template.as_ref().map_or(Path::new(""), ChatTemplate::path)
    }

    /// Encodes `document`. If the turns of a chat are separate documents, returns the tokens of each turn. Errors with the reason.
    pub(super) fn encode(&self, document: &Document) -> Result<Vec<Encoded>> {
        let one: Result<Encoded> = match &document.content {
            Content::Text(text) => {
                Ok(Encoded { tokens: self.tokenizer.encode_document(text)?, bytes: text.len(), ..Encoded::default() })
            }
            Content::Tokens { ids, learned } => {
                if let Some(id) = ids.iter().find(|id| **id as usize >= self.tokenizer.vocab_size()) {
                    let most = self.tokenizer.vocab_size();
                    return Err(Error::Data(format!("{id} is no token of this tokenizer, which has {most}")));
                }
                let targets: Vec<u32> =
                    ids.iter().zip(learned).filter(|(_, learned)| **learned).map(|(id, _)| *id).collect();
                let bytes = self.tokenizer.decode(&targets)?.len();
                let learned = learned.iter().map(|learned| *learned || self.train_on_inputs);
                Ok(self.masked(ids.iter().copied().zip(learned).collect(), bytes))
            }
            Content::Completion { prompt, completion } => self.encode_text_completion(prompt, completion),
            Content::Chat(chat) => return self.encode_chat(chat),
            Content::Pair { completions, margin } => {
                let [chosen, rejected] = &**completions;
                let chosen = Encoded { margin: *margin, ..self.encode_completion(chosen)? };
                return Ok(vec![chosen, self.encode_completion(rejected)?]);
            }
            Content::Labeled(content, label) => {
                self.encode_completion(content).map(|encoded| Encoded { label: Some(*label), ..encoded })
            }
            Content::Prompt(record) => self.encode_prompt(record),
            Content::Example(record) => self.encode_example(record),
        };
        Ok(vec![one?])
    }

    fn encode_text_completion(&self, prompt: &str, answer: &str) -> Result<Encoded> {
        let text = format!("{prompt}{answer}");
        let learned = if self.train_on_inputs { 0 } else { prompt.len() };
        let completion = learned..text.len();
        let mut tokens = self.tokenizer.encode_learned(&text, std::slice::from_ref(&completion))?;
        let start = self.tokenizer.start_ids();
        if !tokens.iter().map(|token| &token.0).take(start.len()).eq(start) {
            tokens.splice(0..0, start.iter().map(|&id| (id, self.train_on_inputs)));
        }
        let end = self.tokenizer.eos_id().filter(|&end| tokens.last().is_none_or(|last| last.0 != end));
        tokens.extend(end.map(|end| (end, true)));
        Ok(self.masked(tokens, completion.len()))
    }

    /// Encodes a text or a chat of preferences. The whole completion is a target.
    fn encode_completion(&self, content: &Content) -> Result<Encoded> {
        let chat = match content {
            Content::Completion { prompt, completion } => return self.encode_text_completion(prompt, completion),
            Content::Chat(chat) => chat,
            _ => unreachable!("preferences are about texts or chats"),
        };
        expect_no_train(chat, "of preferences, the whole completion counts")?;
        let template = self.template_of(chat)?;
        let Rendered { text, learned } = template.render_completion(chat).map_err(Error::Data)?;
        let bytes = learned.iter().map(ExactSizeIterator::len).sum();
        let fields = template.unread_fields(chat).into_iter().collect();
        let encoded = self.masked(self.tokenizer.encode_learned(&text, &learned)?, bytes);
        Ok(Encoded { left_out: LeftOut { fields, ..LeftOut::default() }, ..encoded })
    }

    /// Encodes a prompt with its columns. Its tokens are not targets.
    fn encode_prompt(&self, record: &PromptRecord) -> Result<Encoded> {
        let (ids, fields) = match &record.prompt {
            Content::Text(text) => (self.tokenizer.encode_prompt(text)?, Vec::new()),
            Content::Chat(chat) => {
                let template = self.template_of(chat)?;
                let text = prompt_text(template, chat, &record.kwargs)?;
                (self.tokenizer.encode(&text)?, self.unread_fields(template, chat)?)
            }
            _ => unreachable!("a prompt is a text or a chat"),
        };
        if ids.is_empty() {
            return Err(Error::Data("the chat template writes nothing for this prompt".into()));
        }
        self.with_columns(ids, fields, &record.columns)
    }

    /// Encodes the texts of an example one after another. The columns get the number of tokens of each text.
    fn encode_example(&self, record: &ExampleRecord) -> Result<Encoded> {
        let (mut all, mut lengths, mut fields) = (Vec::new(), Vec::new(), Vec::new());
        for ExampleText { content, pair } in &record.texts {
            let ids = match content {
                Content::Text(text) => self.tokenizer.encode_example(text, pair.as_deref())?,
                Content::Chat(chat) => {
                    expect_no_train(chat, "nothing of an example is predicted")?;
                    let template = self.template_of(chat)?;
                    fields.extend(self.unread_fields(template, chat)?);
                    self.tokenizer.encode(&template.render(chat, false).map_err(Error::Data)?)?
                }
                _ => unreachable!("an example has texts or chats"),
            };
            if ids.is_empty() {
                return Err(Error::Data("a text of this example is empty".into()));
            }
            lengths.push(ids.len());
            all.extend(ids);
        }
        let mut columns = record.columns.clone();
        columns.insert(LENGTHS.into(), lengths.into());
        self.with_columns(all, fields, &Value::Object(columns))
    }

    /// Returns tokens that are not targets, with `columns`. The template does not read `fields`.
    fn with_columns(&self, ids: Vec<u32>, fields: Vec<String>, columns: &Value) -> Result<Encoded> {
        let columns = json_text::write(columns);
        if columns.len() as u64 > MAX_COLUMN_BYTES {
            let most = MAX_COLUMN_BYTES >> 20;
            return Err(Error::Data(format!("the fields of this record have more than {most} MiB as JSON")));
        }
        let encoded = self.masked(ids.into_iter().map(|id| (id, false)).collect(), 0);
        let left_out = LeftOut { fields, ..LeftOut::default() };
        Ok(Encoded { left_out, columns: Some(columns), ..encoded })
    }

    /// Returns the known fields of messages that `template` does not read. Errors if it does not read an unknown field.
    fn unread_fields(&self, template: &ChatTemplate, chat: &Chat) -> Result<Vec<String>> {
        let unread = template.unread_fields(chat).into_iter();
        let unread = unread.filter(|field| field != "train" && !self.ignored_fields.contains(field));
        let (known, unknown): (Vec<_>, Vec<_>) = unread.partition(|field| is_of_messages(field));
        match unknown.is_empty() {
            true => Ok(known),
            false => Err(Error::Data(unknown_fields(&unknown, template.path()))),
        }
    }

    /// Returns the chat template. Errors if it cannot be used for `chat`.
    fn template_of(&self, chat: &Chat) -> Result<&ChatTemplate> {
        let template = self.template.as_ref().ok_or_else(|| {
            let folder = self.tokenizer.path().parent().unwrap_or(Path::new("."));
            Error::Data(format!(
                "{} has no chat template for this conversation; name a file with one in `data.chat.chat_template_path`",
                folder.display()
            ))
        })?;
        let has_tools = chat.tools.as_array().is_some_and(|tools| !tools.is_empty());
        if has_tools && !template.reads_variable("tools", true) {
            return Err(Error::Data(format!(
                "the conversation has `tools`, and the chat template {} has no place for them; name another one in \
                 `data.chat.chat_template_path`, or remove them",
                template.path().display()
            )));
        }
        Ok(template)
    }

    fn encode_chat(&self, chat: &Chat) -> Result<Vec<Encoded>> {
        let template = self.template_of(chat)?;
        let mut left_out = LeftOut::default();
        let texts = match self.train_on_inputs {
            true => template.render(chat, false).map(|text| {
                let all = 0..text.len();
                vec![Rendered { text, learned: vec![all] }]
            }),
            false => template.render_learned(chat, &self.roles_to_train).map(|learned| {
                left_out.rewrites = learned.rewrites;
                learned.texts
            }),
        }
        .map_err(Error::Data)?;
        let learnable = chat.messages.iter().skip(chat.learned_from).filter(|_| !self.train_on_inputs);
        left_out.empty_answers = learnable.filter(|message| is_empty_answer(message)).count();
        left_out.fields = self.unread_fields(template, chat)?;
        let mut encoded = Vec::new();
        for Rendered { text, learned } in texts {
            let bytes: usize = learned.iter().map(ExactSizeIterator::len).sum();
            let mut tokens = self.tokenizer.encode_learned(&text, &learned)?;
            let decoded = |ends: &[u32]| self.tokenizer.decode(ends).map(|text| text.len());
            let bytes = match self.train_on_eos {
                _ if self.train_on_inputs => bytes,
                TrainOnEos::All => bytes + decoded(&self.learn_ends(&mut tokens))?,
                _ => bytes.saturating_sub(decoded(&self.unlearn_ends(&mut tokens))?),
            };
            encoded.push(Encoded { left_out: std::mem::take(&mut left_out), ..self.masked(tokens, bytes) });
        }
        Ok(encoded)
    }

    /// Makes the ends of all turns targets. Returns the end tokens that were not targets before.
    fn learn_ends(&self, tokens: &mut [(u32, bool)]) -> Vec<u32> {
        let is_end = |(id, learned): &&mut (u32, bool)| !*learned && self.tokenizer.eos_ids().contains(id);
        let learn = |token: &mut (u32, bool)| {
            token.1 = true;
            token.0
        };
        tokens.iter_mut().filter(is_end).map(learn).collect()
    }

    /// Removes the ends of turns from the targets, as far as `train_on_eos` demands. Returns the removed tokens.
    fn unlearn_ends(&self, tokens: &mut [(u32, bool)]) -> Vec<u32> {
        let mut ends = Vec::new();
        let mut kept = match self.train_on_eos {
            TrainOnEos::Turn | TrainOnEos::All => return ends,
            TrainOnEos::Last => 1,
            TrainOnEos::None => 0,
        };
        for turn in tokens.chunk_by_mut(|a, b| a.1 == b.1).rev().filter(|turn| turn[0].1) {
            let Some(end) = turn.iter().rposition(|(id, _)| self.tokenizer.eos_ids().contains(id)) else { continue };
            if kept > 0 {
                kept -= 1;
                continue;
            }
            for token in &mut turn[end..] {
                token.1 = false;
                ends.push(token.0);
            }
        }
        ends
    }

    fn masked(&self, tokens: Vec<(u32, bool)>, bytes: usize) -> Encoded {
        let masked = |(id, learned)| if learned || !self.loss_mask { id } else { id | MASKED };
        let tokens = tokens.into_iter().map(masked).collect();
        Encoded { tokens, bytes, ..Encoded::default() }
    }

    /// Returns the bytes of memory that encoding `document` takes.
    pub(super) fn memory(&self, document: &Document) -> u64 {
        match &document.content {
            Content::Text(text) => self.tokenizer.memory_to_encode(text),
            Content::Tokens { ids, .. } => 16 * ids.len() as u64,
            Content::Chat(_)
            | Content::Completion { .. }
            | Content::Pair { .. }
            | Content::Labeled(..)
            | Content::Example(_) => Tokenizer::memory_to_encode_whole(document.bytes),
            // Columns are copied, but not tokenized.
            Content::Prompt(record) => {
                document.bytes as u64
                    + match &record.prompt {
                        Content::Chat(chat) => {
                            let objects = chat.messages.iter().chain(chat.tools.as_array().into_iter().flatten());
                            Tokenizer::memory_to_encode_whole(objects.filter_map(Value::as_object).map(size).sum())
                        }
                        Content::Text(text) => self.tokenizer.memory_to_encode(text),
                        _ => unreachable!("a prompt is a text or a chat"),
                    }
            }
        }
    }
}

/// Renders a prompt, with further variables from its record. If the last message is an answer of the assistant, the model continues it, as in TRL.
fn prompt_text(template: &ChatTemplate, chat: &Chat, kwargs: &Map<String, Value>) -> Result<String> {
    expect_no_train(chat, "nothing of a prompt is trained on")?;
    check_kwargs(kwargs).map_err(Error::Data)?;
    if let Some(name) = kwargs.keys().find(|name| !template.reads_variable(name, !chat.tools.is_null())) {
        return Err(Error::Data(format!(
            "`chat_template_kwargs` has `{name}`, which the chat template {} does not read; remove it",
            template.path().display()
        )));
    }
    let continues = chat.messages.last().is_some_and(|message| message["role"] == "assistant");
    let form =
        PromptForm { add_generation_prompt: !continues, continue_final_message: continues, kwargs: kwargs.clone() };
    template.prompt_text(chat, &form).map_err(Error::Data)
}

/// Errors if a message has the field `train`. `reason` says why the field has no meaning here.
fn expect_no_train(chat: &Chat, reason: &str) -> Result<()> {
    match chat.messages.iter().any(|message| message.get("train").is_some()) {
        true => Err(Error::Data(format!("a message has the field `train`; {reason}: remove the field"))),
        false => Ok(()),
    }
}

impl ChatTemplate {
    /// Returns the chat template of data that are read with `options`, with the variables of the options; `None` if there is no template.
    ///
    /// Errors with [`Error::Config`] for a variable that is not of the form `name=value`, and with the errors of [`ChatTemplate::load`] and
    /// [`ChatTemplate::with_kwargs`].
    pub fn of_options(tokenizer: &Tokenizer, options: &SourceOptions) -> Result<Option<ChatTemplate>> {
        let folder = tokenizer.path().parent().unwrap_or(Path::new("."));
        let other = Some(options.chat_template_path.as_path()).filter(|path| !path.as_os_str().is_empty());
        let kwargs = kwargs(&options.chat_template_kwargs)?;
        let template = ChatTemplate::load(folder, other, Clock::Fixed)?;
        template.map(|template| if kwargs.is_empty() { Ok(template) } else { template.with_kwargs(kwargs) }).transpose()
    }
}

/// Reads a list of `name=value`. A value that is not JSON is a text.
fn kwargs(list: &[String]) -> Result<Map<String, Value>> {
    let read = |entry: &String| {
        let (name, text) = entry.split_once('=').ok_or_else(|| {
            Error::Config(format!("`data.chat.chat_template_kwargs` has the entry {entry:?}; write \"name=value\", such as \"enable_thinking=false\""))
        })?;
        let value = serde_json::from_str(text.trim()).unwrap_or_else(|_| text.trim().into());
        Ok((name.trim().to_string(), value))
    };
    list.iter().map(read).collect()
}
