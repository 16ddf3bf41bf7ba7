//! Encodes a document as the tokens that are stored.

use std::path::Path;

use super::chat::{ChatTemplate, is_empty_answer};
use super::clock::Clock;
use super::records::Content;
use super::shards::MASKED;
use super::source::{Document, SourceOptions};
use super::tokenizer::Tokenizer;
use crate::{Error, Result};

/// Turns documents into tokens.
pub(super) struct Encoder<'a> {
    pub(super) tokenizer: &'a Tokenizer,
    /// Renders chats.
    template: Option<ChatTemplate>,
    /// Whether all tokens are targets.
    train_on_inputs: bool,
    /// Whether tokens have a bit that says that they are no targets.
    pub(super) loss_mask: bool,
}

/// The tokens of a document.
pub(super) struct Encoded {
    /// Ids, with [`MASKED`] where the loss leaves them out.
    pub(super) tokens: Vec<u32>,
    /// Bytes of the text that contribute to the loss.
    pub(super) bytes: usize,
    /// The content that the template left out.
    pub(super) left_out: LeftOut,
}

/// The content of a chat that its template leaves out.
#[derive(Default)]
pub(super) struct LeftOut {
    /// Fields of messages that the template does not read.
    pub(super) fields: Vec<String>,
    /// Turns of the assistant without content, which are no targets.
    pub(super) empty_answers: usize,
}

impl<'a> Encoder<'a> {
    /// An encoder of documents; with `prompts`, some of them are chats or completions.
    pub(super) fn new(tokenizer: &'a Tokenizer, options: &SourceOptions, prompts: bool) -> Result<Encoder<'a>> {
        let folder = tokenizer.path().parent().unwrap_or(Path::new("."));
        let other = Some(options.chat_template_path.as_path()).filter(|path| !path.as_os_str().is_empty());
        let template = if prompts { ChatTemplate::load(folder, other, Clock::Fixed)? } else { None };
        let loss_mask = prompts && !options.train_on_inputs;
        Ok(Encoder { tokenizer, template, train_on_inputs: options.train_on_inputs, loss_mask })
    }

    /// SHA-256 of the chat template, if there is one.
    pub(super) fn template_sha256(&self) -> Option<&str> {
        self.template.as_ref().map(ChatTemplate::sha256)
    }

    /// The file of the chat template; empty if there is none.
    pub(super) fn template_path(&self) -> &Path {
        self.template.as_ref().map_or(Path::new(""), ChatTemplate::path)
    }

    /// The tokens of `document`. Errors with the reason.
    pub(super) fn encode(&self, document: &Document) -> Result<Encoded> {
        match &document.content {
            Content::Text(text) => Ok(Encoded {
                tokens: self.tokenizer.encode_document(text)?,
                bytes: text.len(),
                left_out: LeftOut::default(),
            }),
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
            Content::Completion { prompt, completion: answer } => {
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
            Content::Chat(chat) => {
                let template = self.template.as_ref().ok_or_else(|| {
                    let folder = self.tokenizer.path().parent().unwrap_or(Path::new("."));
                    Error::Data(format!(
                        "{} has no chat template for this conversation; name a file with one in `data.chat_template_path`",
                        folder.display()
                    ))
                })?;
                if !chat.tools.is_null() && !template.reads_variable("tools", true) {
                    return Err(Error::Data(format!(
                        "the conversation has `tools`, and the chat template {} has no place for them; name another one in \
                         `data.chat_template_path`, or remove them",
                        template.path().display()
                    )));
                }
                let (text, learned) = match self.train_on_inputs {
                    true => template.render(chat, false).map(|text| {
                        let all = 0..text.len();
                        (text, vec![all])
                    }),
                    false => template.render_learned(chat).map(|rendered| (rendered.text, rendered.learned)),
                }
                .map_err(Error::Data)?;
                let bytes = learned.iter().map(ExactSizeIterator::len).sum();
                let learnable = chat.messages.iter().skip(chat.learned_from).filter(|_| !self.train_on_inputs);
                let left_out = LeftOut {
                    fields: template.unread_fields(chat).into_iter().map(str::to_string).collect(),
                    empty_answers: learnable.filter(|message| is_empty_answer(message)).count(),
                };
                Ok(Encoded { left_out, ..self.masked(self.tokenizer.encode_learned(&text, &learned)?, bytes) })
            }
        }
    }

    fn masked(&self, tokens: Vec<(u32, bool)>, bytes: usize) -> Encoded {
        let masked = |(id, learned)| if learned || !self.loss_mask { id } else { id | MASKED };
        Encoded { tokens: tokens.into_iter().map(masked).collect(), bytes, left_out: LeftOut::default() }
    }

    /// Bytes of memory to encode `document`.
    pub(super) fn memory(&self, document: &Document) -> u64 {
        match &document.content {
            Content::Text(text) => self.tokenizer.memory_to_encode(text),
            Content::Tokens { ids, .. } => 16 * ids.len() as u64,
            Content::Chat(_) | Content::Completion { .. } => Tokenizer::memory_to_encode_whole(document.bytes),
        }
    }
}
