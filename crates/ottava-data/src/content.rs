//! The content of documents.

use serde_json::{Map, Value};

use crate::chat::Chat;

const SYSTEM_BESIDE_TEXT: &str =
    "field `system` is for conversations, and `prompt` is a text: put its text into `prompt`";

/// The content of a document.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// A text, never empty.
    Text(String),
    /// A conversation, which a chat template renders.
    Chat(Chat),
    /// A text to complete, and its completion.
    Completion {
        /// The text before.
        prompt: String,
        /// The text that the model is trained to write.
        completion: String,
    },
    /// Tokens, and which of them contribute to the loss.
    Tokens {
        /// Ids.
        ids: Vec<u32>,
        /// For each id, whether the model is trained to write it.
        learned: Vec<bool>,
    },
    /// Completions of one prompt, chats or texts: the chosen one, and the rejected one.
    Pair {
        /// The completions.
        completions: Box<[Content; 2]>,
        /// By how much the reward of the chosen one should be higher.
        margin: f32,
    },
    /// A completion of a prompt, a chat or a text, and whether it is desirable.
    Labeled(Box<Content>, bool),
    /// A prompt, to which the model writes completions, and its columns.
    Prompt(Box<PromptRecord>),
}

/// A prompt with the record that it was read from.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptRecord {
    /// A text or a chat.
    pub prompt: Content,
    /// Further variables of the chat template.
    pub kwargs: Map<String, Value>,
    /// The object of the record with all fields, as they were read.
    pub columns: Value,
}

impl Content {
    /// Gives descriptions of functions to chats.
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
            other => other,
        }
    }

    /// Puts the system message that a record has in a field of its own before chats. Errors where a chat has another one, and for texts.
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
            Content::Completion { .. } => return Err(SYSTEM_BESIDE_TEXT.into()),
            other @ (Content::Text(_) | Content::Tokens { .. }) => other,
        })
    }
}
