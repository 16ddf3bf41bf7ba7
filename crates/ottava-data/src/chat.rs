//! Chats, and the chat templates that convert them to text. Templates are rendered like in transformers.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::{Path, PathBuf};

use ottava_jinja::{Clock, MARKS, Template, value_of_json};
use serde_json::{Map, Value};

use crate::chat_files::{self, Found};
use crate::marked::marked;
use crate::reads::{Parts, Reads};
use crate::tokenizer::Tokenizer;
use ottava_common::hash::sha256;
use ottava_common::{Error, Result};

/// The version of chat rendering. It is increased when the rendered text or the targets of the same chat change.
const RENDERING: u32 = 4;

/// The variables that a conversation sets in every rendering.
const OWN_VARIABLES: [&str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];

/// A conversation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chat {
    /// Objects with a `role`, and `content` or other fields that the template reads.
    pub messages: Vec<Value>,
    /// The descriptions of functions; `null` if there are no functions.
    pub tools: Value,
    /// The number of the first message that contributes to the loss.
    pub learned_from: usize,
}

impl Chat {
    /// Creates a message in the form that templates read.
    pub fn message(role: &str, content: &str) -> Value {
        serde_json::json!({"role": role, "content": content})
    }
}

/// Options for rendering a conversation as a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptForm {
    /// Whether the text ends at the start of an answer of the assistant.
    pub add_generation_prompt: bool,
    /// Whether the text ends within the last message, so that the model continues it, instead of closing its turn.
    pub continue_final_message: bool,
    /// Further variables of the template, such as `enable_thinking`.
    pub kwargs: Map<String, Value>,
}

impl Default for PromptForm {
    fn default() -> PromptForm {
        PromptForm { add_generation_prompt: true, continue_final_message: false, kwargs: Map::new() }
    }
}

/// A rendered text, with the ranges of bytes that a model is trained to write.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rendered {
    /// The text.
    pub text: String,
    /// The ranges that the model is trained to write, in order.
    pub learned: Vec<Range<usize>>,
}

/// A chat template, with the special tokens that it writes.
pub struct ChatTemplate {
    /// The templates by name: `default`, and optionally `tool_use` for conversations with tools.
    templates: Vec<(String, Template)>,
    /// The templates that are used in training.
    in_training: Vec<(String, Template)>,
    path: PathBuf,
    source: String,
    clock: Clock,
    /// Whether the template marks the turns of the assistant, or is replaced in training by a template that marks them.
    pub(super) generation: bool,
    /// Whether another template replaces this template in training.
    replaced: bool,
    /// Further variables of the template.
    kwargs: Map<String, Value>,
    /// The fields of messages that the templates read.
    reads: Reads,
    /// The fields of messages that the templates read in training.
    reads_in_training: Reads,
    special_tokens: Map<String, Value>,
    sha256: String,
}

impl ChatTemplate {
    /// Loads the template of the file `other`, or the template of `folder` from the files that docs/data.md lists.
    ///
    /// Returns `None` if there is no template. Errors with [`Error::Model`] if a template cannot be parsed.
    pub fn load(folder: &Path, other: Option<&Path>, clock: Clock) -> Result<Option<ChatTemplate>> {
        let Some(Found { path, templates }) = chat_files::find(folder, other)? else { return Ok(None) };
        let special_tokens = chat_files::special_tokens(folder)?;
        let replaced = templates.iter().any(|(_, text)| marked(text).is_some());
        let generation = replaced || templates.iter().any(|(_, text)| text.contains("endgeneration"));
        let sha256 = sha256(serde_json::json!([RENDERING, templates, special_tokens]).to_string().as_bytes());
        let default = templates.iter().find(|(name, _)| name == "default");
        let source = default.map_or(String::new(), |(_, text)| text.clone());
        let parse = |name: &String, text: &str| match Template::parse(text) {
            Ok(template) => Ok((name.clone(), template)),
            Err(failure) => Err(Error::Model(format!("{}: {failure}", path.display()))),
        };
        let in_training = templates.iter().map(|(name, text)| parse(name, marked(text).unwrap_or(text)));
        let in_training = in_training.collect::<Result<Vec<_>>>()?;
        let parsed = templates.iter().map(|(name, text)| parse(name, text)).collect::<Result<Vec<_>>>()?;
        let takes_parts = |parsed: &[(String, Template)]| parsed.iter().any(|(_, template)| template.takes_parts());
        let reads = Reads::of(templates.iter().map(|(_, text)| text.as_str()), takes_parts(&parsed));
        let sources = templates.iter().map(|(_, text)| marked(text).unwrap_or(text));
        let reads_in_training = Reads::of(sources, takes_parts(&in_training));
        Ok(Some(ChatTemplate {
            templates: parsed,
            in_training,
            path,
            source,
            clock,
            generation,
            replaced,
            kwargs: Map::new(),
            reads,
            reads_in_training,
            special_tokens,
            sha256,
        }))
    }

    /// Sets further variables, such as `enable_thinking`, for every rendering.
    ///
    /// Errors with [`Error::Config`] for variables that the conversation sets.
    pub fn with_kwargs(mut self, kwargs: Map<String, Value>) -> Result<ChatTemplate> {
        check_kwargs(&kwargs).map_err(Error::Config)?;
        self.sha256 = sha256(serde_json::json!([self.sha256, kwargs]).to_string().as_bytes());
        self.kwargs = kwargs;
        Ok(self)
    }

    /// Whether a template with marked turns replaces this template in training.
    pub(super) fn is_replaced(&self) -> bool {
        self.replaced
    }

    /// Returns the path of the file that the template was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the text of the template.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Returns SHA-256 of the template and its special tokens.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }

    /// Returns the fields in messages of `chat` that the template does not read.
    pub(super) fn unread_fields(&self, chat: &Chat) -> BTreeSet<String> {
        let messages = chat.messages.iter().map(|message| self.reads.settle(message, Parts::Listed));
        let fields = messages
            .filter_map(Result::ok)
            .filter_map(|message| message.as_object().map(|message| message.keys().cloned().collect::<Vec<_>>()));
        fields.flatten().filter(|field| !self.reads.has(field)).collect()
    }

    /// Renders `chat`. With `prompt`, the text ends at the start of an answer of the assistant. Errors with the reason.
    pub fn render(&self, chat: &Chat, prompt: bool) -> Result<String, String> {
        self.render_marked(&chat.messages, &chat.tools, prompt).map(|rendered| rendered.text)
    }

    /// Renders `chat` with the options `form`. Errors with the reason.
    pub fn prompt_text(&self, chat: &Chat, form: &PromptForm) -> Result<String, String> {
        let rendered = self.render_with(&chat.messages, &chat.tools, form.add_generation_prompt, &form.kwargs)?;
        if !form.continue_final_message {
            return Ok(rendered.text);
        }
        let content = chat.messages.last().map(|message| &message["content"]);
        let text = |value: &'_ Value| value.as_str().or_else(|| value.get("text")?.as_str()).map(str::to_string);
        let last = match content {
            Some(Value::Array(parts)) => parts.iter().rev().find_map(text),
            content => content.and_then(text),
        };
        let last = last.unwrap_or_default();
        if last.trim().is_empty() {
            return Err("the last message has no text to continue".into());
        }
        // Templates may strip white space around the content of a message.
        let (mut text, stripped) = (rendered.text, last.trim());
        let start = text.rfind(stripped).ok_or("the chat template changes the text of the last message")?;
        let kept = if text[start..].starts_with(last.trim_start()) { last.trim_start() } else { stripped };
        text.truncate(start + kept.len());
        Ok(text)
    }

    /// Whether the template for conversations with or without tools reads the variable `name`.
    pub fn reads_variable(&self, name: &str, tools: bool) -> bool {
        named(&self.templates, tools).reads(name)
    }

    /// Renders and tokenizes `chat`, up to the start of an answer of the assistant.
    ///
    /// Errors with [`Error::Config`] if the template cannot render the chat, and with the errors of [`Tokenizer::encode`].
    pub fn prompt(&self, tokenizer: &Tokenizer, chat: &Chat) -> Result<Vec<u32>> {
        tokenizer.encode(&self.render(chat, true).map_err(Error::Config)?)
    }

    fn render_marked(&self, messages: &[Value], tools: &Value, prompt: bool) -> Result<Rendered, String> {
        self.render_with(messages, tools, prompt, &Map::new())
    }

    /// Renders `chat` with the template that is used in training, and returns the ranges of its `{% generation %}` blocks.
    pub(super) fn render_in_training(&self, chat: &Chat) -> Result<Rendered, String> {
        let template = named(&self.in_training, !chat.tools.is_null());
        self.render_by(template, &self.reads_in_training, &chat.messages, &chat.tools, false, &Map::new())
    }

    fn render_with(
        &self,
        messages: &[Value],
        tools: &Value,
        prompt: bool,
        kwargs: &Map<String, Value>,
    ) -> Result<Rendered, String> {
        self.render_by(named(&self.templates, !tools.is_null()), &self.reads, messages, tools, prompt, kwargs)
    }

    /// Renders by `template`. Tries the forms of content that templates may accept; if all fail, errors with the reason for the first form.
    fn render_by(
        &self,
        template: &Template,
        reads: &Reads,
        messages: &[Value],
        tools: &Value,
        prompt: bool,
        kwargs: &Map<String, Value>,
    ) -> Result<Rendered, String> {
        let mut failure = None;
        let mut tried = Vec::new();
        for &content in reads.forms() {
            let settled = messages.iter().enumerate().map(|(i, message)| {
                reads.settle(message, content).map_err(|reason| format!("message {}: {reason}", i + 1))
            });
            let rendered = settled.collect::<Result<Vec<_>, _>>().and_then(|messages| {
                if tried.contains(&messages) {
                    return Err(String::new());
                }
                let variables = self.variables(&messages, tools, prompt, kwargs)?;
                tried.push(messages);
                let rendered = template.render(variables, self.clock);
                rendered.map_err(|failure| format!("chat template {}: {failure}", self.path.display()))
            });
            match rendered {
                Ok(text) => return Ok(unmark(&text)),
                Err(reason) => failure = failure.or(Some(reason)),
            }
        }
        Err(failure.unwrap_or_default())
    }

    /// Returns the variables of a rendering. If several variables have the same name, the first one is used.
    fn variables(
        &self,
        messages: &[Value],
        tools: &Value,
        prompt: bool,
        kwargs: &Map<String, Value>,
    ) -> Result<Vec<(String, ottava_jinja::Value)>, String> {
        if serde_json::to_string(messages).is_ok_and(|text| text.contains(MARKS)) {
            return Err("a message has a code point that Unicode keeps for internal use (U+FDD0 or U+FDD1)".into());
        }
        let messages = Value::Array(messages.to_vec());
        let own = [&messages, tools, &Value::Null, &Value::Bool(prompt)];
        let mut variables: Vec<(String, ottava_jinja::Value)> =
            OWN_VARIABLES.iter().zip(own).map(|(name, value)| (name.to_string(), value_of_json(value))).collect();
        for more in [kwargs, &self.kwargs, &self.special_tokens] {
            variables.extend(more.iter().map(|(name, value)| (name.clone(), value_of_json(value))));
        }
        Ok(variables)
    }
}

/// Errors with the reason if `kwargs` has variables that the conversation sets.
pub(super) fn check_kwargs(kwargs: &Map<String, Value>) -> Result<(), String> {
    match kwargs.keys().find(|name| OWN_VARIABLES.contains(&name.as_str())) {
        Some(name) => Err(format!("`chat_template_kwargs` has `{name}`, which the conversation gives")),
        None => Ok(()),
    }
}

/// Returns the template for conversations with or without tools.
fn named(templates: &[(String, Template)], tools: bool) -> &Template {
    let find = |name: &str| templates.iter().find(|(known, _)| known == name).map(|(_, template)| template);
    let tool_use = if tools { find("tool_use") } else { None };
    tool_use.or_else(|| find("default")).expect("a template named `default` was found")
}

/// Whether `message` is a turn of the assistant that has no content, no thinking and no calls.
pub(super) fn is_empty_answer(message: &Value) -> bool {
    let is_empty = |field: &str| match message.get(field) {
        None | Some(Value::Null) => true,
        Some(Value::String(text)) => text.trim().is_empty(),
        Some(Value::Array(list)) => list.is_empty(),
        Some(_) => false,
    };
    message["role"] == "assistant"
        && ["content", "tool_calls", "thinking", "reasoning_content"].into_iter().all(is_empty)
}

/// Removes the marks from a text, and returns the marked ranges.
fn unmark(marked: &str) -> Rendered {
    let mut rendered = Rendered::default();
    let mut start = 0;
    for part in marked.split_inclusive(MARKS) {
        rendered.text.push_str(part.trim_end_matches(MARKS));
        match part.chars().next_back() {
            Some(mark) if mark == MARKS[0] => start = rendered.text.len(),
            Some(mark) if mark == MARKS[1] => rendered.learned.push(start..rendered.text.len()),
            _ => {}
        }
    }
    rendered
}

#[cfg(test)]
#[path = "chat_tests.rs"]
mod tests;
