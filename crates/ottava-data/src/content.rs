//! The content of documents.

use serde_json::{Map, Value};

use crate::chat::Chat;

const SYSTEM_BESIDE_TEXT: &str =
    "field `system` is for conversations, and `prompt` is a text: put its text into `prompt`";

/// The content of a document.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// A text that is not empty.
    Text(String),
    /// A conversation, which a chat template renders.
    Chat(Chat),
    /// A text to complete, and the completion.
    Completion {
        /// The text before the completion.
        prompt: String,
        /// The text that the model is trained to write.
        completion: String,
    },
    /// Tokens, and which of them contribute to the loss.
    Tokens {
        /// The ids of the tokens.
        ids: Vec<u32>,
        /// For each id, whether the model is trained to write it.
        learned: Vec<bool>,
    },
    /// Two completions of one prompt, chats or texts: the chosen completion and the rejected completion.
    Pair {
        /// The chosen and the rejected completion.
        completions: Box<[Content; 2]>,
        /// The difference by which the reward of the chosen completion should be higher than the reward of the rejected completion.
        margin: f32,
    },
    /// A completion of a prompt (a chat or a text), and whether the completion is desirable.
    Labeled(Box<Content>, bool),
    /// A prompt that the model completes, with its columns.
    Prompt(Box<PromptRecord>),
    /// An example of a classifier or of an embedding model.
    Example(Box<ExampleRecord>),
}

/// A prompt with the record that it was read from.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptRecord {
    /// A text or a chat.
    pub prompt: Content,
    /// Further variables of the chat template.
    pub kwargs: Map<String, Value>,
    /// All fields of the record as one object, with the values that were read.
    pub columns: Value,
}

/// An example of a classifier or of an embedding model.
#[derive(Clone, Debug, PartialEq)]
pub struct ExampleRecord {
    /// The texts that the model reads, each by itself. A classifier reads one text.
    pub texts: Vec<ExampleText>,
    /// What is known of the texts, such as the field `label`.
    pub columns: Map<String, Value>,
}

/// A text that a model reads by itself.
#[derive(Clone, Debug, PartialEq)]
pub struct ExampleText {
    /// A text or a chat.
    pub content: Content,
    /// The second text of a pair, such as a document beside a query.
    pub pair: Option<String>,
}

impl ExampleRecord {
    /// Replaces the content of each text.
    fn map(self, change: impl Fn(Content) -> Result<Content, String>) -> Result<Content, String> {
        let ExampleRecord { texts, columns } = self;
        let change = |ExampleText { content, pair }| Ok(ExampleText { content: change(content)?, pair });
        let texts = texts.into_iter().map(change).collect::<Result<_, String>>()?;
        Ok(Content::Example(Box::new(ExampleRecord { texts, columns })))
    }
}

impl Content {
    /// Sets the descriptions of functions in chats.
    pub(super) fn with_tools(self, tools: &Value) -> Content {
        match self {
            Content::Chat(chat) => Content::Chat(Chat { tools: tools.clone(), ..chat }),
            Content::Pair { completions, margin } => {
                Content::Pair { completions: Box::new(completions.map(|content| content.with_tools(tools))), margin }
            }
            Content::Labeled(content, label) => Content::Labeled(Box::new(content.with_tools(tools)), label),
            Content::Prompt(record) => {
                let PromptRecord { prompt, kwargs, columns } = *record;
                Content::Prompt(Box::new(PromptRecord { prompt: prompt.with_tools(tools), kwargs, columns }))
            }
            Content::Example(record) => {
                record.map(|content| Ok(content.with_tools(tools))).expect("tools are set without errors")
            }
            other => other,
        }
    }

    /// Puts `system`, the system message in a separate field of the record, before chats. Errors for texts, and for chats that already have a system
    /// message.
    pub(super) fn with_system(self, system: &str) -> Result<Content, String> {
        Ok(match self {
            Content::Chat(chat) => Content::Chat(chat.with_system(system)?),
            Content::Pair { completions, margin } => {
                let [chosen, rejected] = *completions;
                let completions = [chosen.with_system(system)?, rejected.with_system(system)?];
                Content::Pair { completions: Box::new(completions), margin }
            }
            Content::Labeled(content, label) => Content::Labeled(Box::new(content.with_system(system)?), label),
            Content::Prompt(record) => {
                let PromptRecord { prompt, kwargs, columns } = *record;
                let Content::Chat(chat) = prompt else { return Err(SYSTEM_BESIDE_TEXT.into()) };
                let prompt = Content::Chat(chat.with_system(system)?);
                Content::Prompt(Box::new(PromptRecord { prompt, kwargs, columns }))
            }
            Content::Example(record) => record.map(|content| match content {
                Content::Chat(chat) => Ok(Content::Chat(chat.with_system(system)?)),
                _ => Err(SYSTEM_BESIDE_TEXT.into()),
            })?,
            Content::Completion { .. } => return Err(SYSTEM_BESIDE_TEXT.into()),
            other @ (Content::Text(_) | Content::Tokens { .. }) => other,
        })
    }
}
