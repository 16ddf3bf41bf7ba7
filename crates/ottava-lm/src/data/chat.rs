//! Chats, and the templates that turn them into text, rendered as transformers renders them.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::{Path, PathBuf};

use minijinja::value::{Kwargs, Value as Template};
use minijinja::{Environment, ErrorKind, Output, State, context};
use minijinja_contrib::pycompat;
use serde_json::{Map, Value};

use super::clock::Clock;
use super::edges::read_json;
use super::marked::marked;
use super::python::{self, Json};
use super::reads::Reads;
use super::tokenizer::Tokenizer;
use crate::hash::sha256;
use crate::{Error, Result, input};

/// The largest template file.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Instructions of a template per rendering; a conversation takes some tens per message.
const FUEL: u64 = 20_000_000;

/// Calls within calls of a template.
const RECURSION: usize = 100;

/// The largest text that a template may render, in bytes.
const MAX_TEXT_BYTES: usize = 64 << 20;

/// Mark the text of `{% generation %}` blocks: two code points that Unicode keeps for internal use, which no text contains.
const MARKS: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];

/// Version of chat rendering, increased when the rendered text or the targets of the same chat change.
const RENDERING: u32 = 3;

/// Variables that conversations and files give to templates.
const OWN_VARIABLES: [&str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];

/// Ends the name of a template in training.
const IN_TRAINING: &str = ".in_training";

/// The tokens of `tokenizer_config.json` that templates write by name.
const SPECIAL_TOKENS: [&str; 8] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
    "additional_special_tokens",
];

/// A conversation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chat {
    /// Objects with a `role`, and `content` or other fields that the template reads.
    pub messages: Vec<Value>,
    /// Descriptions of functions; `null` for none.
    pub tools: Value,
    /// Messages from this one on contribute to the loss.
    pub learned_from: usize,
}

impl Chat {
    /// A message as templates read it.
    pub fn message(role: &str, content: &str) -> Value {
        serde_json::json!({"role": role, "content": content})
    }
}

/// Options for rendering a conversation as a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptForm {
    /// Whether the text ends where the assistant begins to write.
    pub add_generation_prompt: bool,
    /// Whether the text ends within the last message, which the model continues, instead of closing its turn.
    pub continue_final_message: bool,
    /// Further variables of the template, such as `enable_thinking`.
    pub kwargs: Map<String, Value>,
}

impl Default for PromptForm {
    fn default() -> PromptForm {
        PromptForm { add_generation_prompt: true, continue_final_message: false, kwargs: Map::new() }
    }
}

/// A text with the ranges of bytes that a model is trained to write.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rendered {
    /// The text.
    pub text: String,
    /// Ranges of it, in order.
    pub learned: Vec<Range<usize>>,
}

/// A chat template with the special tokens that it writes.
pub struct ChatTemplate {
    environment: Environment<'static>,
    path: PathBuf,
    source: String,
    /// Whether the template marks the turns of the assistant, or another one replaces it in training that does.
    pub(super) generation: bool,
    /// Whether another one replaces it in training.
    replaced: bool,
    /// Further variables.
    kwargs: Map<String, Value>,
    /// The fields of messages that the templates read.
    reads: Reads,
    /// Those that they read in training.
    reads_in_training: Reads,
    special_tokens: Map<String, Value>,
    sha256: String,
}

impl ChatTemplate {
    /// Reads the template of `folder`: `chat_template.jinja`, or `chat_template` of `tokenizer_config.json`, a text or a list of named
    /// ones, of which `default` is taken, and `tool_use` for conversations with tools. `other` is a file to take instead.
    ///
    /// Returns `None` if there is no template. Errors with [`Error::Model`] for one that cannot be parsed.
    pub fn load(folder: &Path, other: Option<&Path>, clock: Clock) -> Result<Option<ChatTemplate>> {
        let config_path = folder.join("tokenizer_config.json");
        let config = read_json(&config_path)?;
        let own = folder.join("chat_template.jinja");
        let file = other.map(Path::to_path_buf).or_else(|| own.exists().then_some(own));
        let wrong = |path: &Path, reason: String| Error::Model(format!("{}: {reason}", path.display()));
        let (path, templates) = match (file, config.get("chat_template")) {
            (Some(path), _) => {
                let bytes = input::read(&path, MAX_FILE_BYTES).map_err(|e| wrong(&path, e.to_string()))?;
                let text = String::from_utf8(bytes).map_err(|_| wrong(&path, "it is not UTF-8".into()))?;
                (path, vec![("default".to_string(), text)])
            }
            (None, None | Some(Value::Null)) => return Ok(None),
            (None, Some(Value::String(text))) => (config_path, vec![("default".to_string(), text.clone())]),
            (None, Some(Value::Array(list))) => {
                let named = |entry: &Value| Some((entry["name"].as_str()?.into(), entry["template"].as_str()?.into()));
                let named: Option<Vec<(String, String)>> = list.iter().map(named).collect();
                (config_path, named.unwrap_or_default())
            }
            (None, Some(_)) => (config_path, Vec::new()),
        };
        if !templates.iter().any(|(name, _)| name == "default") {
            return Err(wrong(
                &path,
                "`chat_template` is neither a text nor a list with a template named `default`".into(),
            ));
        }
        let mut special_tokens = Map::new();
        for source in [config, read_json(&folder.join("special_tokens_map.json"))?] {
            for key in SPECIAL_TOKENS {
                let value = source.get(key).map(|value| value.get("content").unwrap_or(value));
                if let Some(value) = value.filter(|value| !value.is_null() && !special_tokens.contains_key(key)) {
                    special_tokens.insert(key.into(), value.clone());
                }
            }
        }
        let mut environment = environment(clock);
        let replaced = templates.iter().any(|(_, text)| marked(text).is_some());
        let generation = replaced || templates.iter().any(|(_, text)| text.contains("endgeneration"));
        let reads = Reads::of(templates.iter().map(|(_, text)| text.as_str()));
        let reads_in_training = Reads::of(templates.iter().map(|(_, text)| marked(text).unwrap_or(text)));
        let sha256 = sha256(serde_json::json!([RENDERING, templates, special_tokens]).to_string().as_bytes());
        let default = templates.iter().find(|(name, _)| name == "default");
        let source = default.map_or(String::new(), |(_, text)| text.clone());
        for (name, text) in templates {
            let in_training = mark_generation(marked(&text).unwrap_or(&text));
            let failed = |e: minijinja::Error| wrong(&path, describe(&e));
            environment.add_template_owned(format!("{name}{IN_TRAINING}"), in_training).map_err(failed)?;
            environment.add_template_owned(name, mark_generation(&text)).map_err(|e| wrong(&path, describe(&e)))?;
        }
        let kwargs = Map::new();
        Ok(Some(ChatTemplate {
            environment,
            path,
            source,
            generation,
            replaced,
            kwargs,
            reads,
            reads_in_training,
            special_tokens,
            sha256,
        }))
    }

    /// Gives further variables to the template in every rendering, such as `enable_thinking`.
    ///
    /// Errors with [`Error::Config`] for the names of others.
    pub fn with_kwargs(mut self, kwargs: Map<String, Value>) -> Result<ChatTemplate> {
        if let Some(name) = kwargs.keys().find(|name| OWN_VARIABLES.contains(&name.as_str())) {
            return Err(Error::Config(format!("`chat_template_kwargs` has `{name}`, which the conversation gives")));
        }
        self.sha256 = sha256(serde_json::json!([self.sha256, kwargs]).to_string().as_bytes());
        self.kwargs = kwargs;
        Ok(self)
    }

    /// Whether another template, with marked turns, replaces it in training.
    pub(super) fn is_replaced(&self) -> bool {
        self.replaced
    }

    /// The file that it was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The text of the template.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// SHA-256 of template and special tokens.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }

    /// The fields of the messages of `chat` that the template does not read.
    pub(super) fn unread_fields(&self, chat: &Chat) -> BTreeSet<String> {
        let messages = chat.messages.iter().map(|message| self.reads.settle(message));
        let fields = messages
            .filter_map(|message| message.as_object().map(|message| message.keys().cloned().collect::<Vec<_>>()));
        fields.flatten().filter(|field| !self.reads.has(field)).collect()
    }

    /// Renders `chat`; with `prompt`, up to where the assistant begins to write. Errors with the reason.
    pub fn render(&self, chat: &Chat, prompt: bool) -> Result<String, String> {
        self.render_marked(&chat.messages, &chat.tools, prompt).map(|rendered| rendered.text)
    }

    /// Renders `chat` as `form` says. Errors with the reason.
    pub fn prompt_text(&self, chat: &Chat, form: &PromptForm) -> Result<String, String> {
        let rendered = self.render_with(&chat.messages, &chat.tools, form.add_generation_prompt, &form.kwargs)?;
        if !form.continue_final_message {
            return Ok(rendered.text);
        }
        let last = chat.messages.last().and_then(|message| message["content"].as_str()).unwrap_or_default();
        if last.trim().is_empty() {
            return Err("the last message has no text to continue".into());
        }
        // Templates may strip white space around a message.
        let (mut text, stripped) = (rendered.text, last.trim());
        let start = text.rfind(stripped).ok_or("the chat template changes the text of the last message")?;
        let kept = if text[start..].starts_with(last.trim_start()) { last.trim_start() } else { stripped };
        text.truncate(start + kept.len());
        Ok(text)
    }

    /// Whether the template for conversations with or without tools reads the variable `name`.
    pub fn reads_variable(&self, name: &str, tools: bool) -> bool {
        let template = self.environment.get_template(self.name(tools));
        template.is_ok_and(|template| template.undeclared_variables(false).contains(name))
    }

    /// The ids of `chat` up to where the assistant begins to write.
    ///
    /// Errors with [`Error::Config`] for a chat that the template does not render, and as [`Tokenizer::encode`].
    pub fn prompt(&self, tokenizer: &Tokenizer, chat: &Chat) -> Result<Vec<u32>> {
        tokenizer.encode(&self.render(chat, true).map_err(Error::Config)?)
    }

    /// The name of the template for conversations with or without tools.
    fn name(&self, tools: bool) -> &'static str {
        match tools && self.environment.get_template("tool_use").is_ok() {
            true => "tool_use",
            false => "default",
        }
    }

    fn render_marked(&self, messages: &[Value], tools: &Value, prompt: bool) -> Result<Rendered, String> {
        self.render_with(messages, tools, prompt, &Map::new())
    }

    /// Renders `chat` by the template that replaces this one in training, with the ranges of its `{% generation %}` blocks.
    pub(super) fn render_in_training(&self, chat: &Chat) -> Result<Rendered, String> {
        let name = format!("{}{IN_TRAINING}", self.name(!chat.tools.is_null()));
        self.render_by(&name, &chat.messages, &chat.tools, false, &Map::new())
    }

    fn render_with(
        &self,
        messages: &[Value],
        tools: &Value,
        prompt: bool,
        kwargs: &Map<String, Value>,
    ) -> Result<Rendered, String> {
        self.render_by(self.name(!tools.is_null()), messages, tools, prompt, kwargs)
    }

    fn render_by(
        &self,
        name: &str,
        messages: &[Value],
        tools: &Value,
        prompt: bool,
        kwargs: &Map<String, Value>,
    ) -> Result<Rendered, String> {
        if serde_json::to_string(messages).is_ok_and(|text| text.contains(MARKS)) {
            return Err("a message has a code point that Unicode keeps for internal use (U+FDD0 or U+FDD1)".into());
        }
        let reads = if name.ends_with(IN_TRAINING) { &self.reads_in_training } else { &self.reads };
        let messages: Vec<Value> = messages.iter().map(|message| reads.settle(message)).collect();
        let failed = |error: minijinja::Error| format!("chat template {}: {}", self.path.display(), describe(&error));
        let template = self.environment.get_template(name).map_err(failed)?;
        let chat = context! { messages, tools, documents => (), add_generation_prompt => prompt };
        let kwargs = [kwargs, &self.kwargs, &self.special_tokens].map(Template::from_serialize);
        let [of_request, of_template, special] = kwargs;
        let context = context! { ..chat, ..of_request, ..of_template, ..special };
        let mut text = Text(Vec::new());
        template.render_captured_to(context, &mut text).map_err(failed)?;
        Ok(unmark(&String::from_utf8(text.0).expect("a template renders text")))
    }
}

/// Whether `message` is a turn of the assistant without content and calls.
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

/// A text of at most [`MAX_TEXT_BYTES`].
struct Text(Vec<u8>);

impl std::io::Write for Text {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_TEXT_BYTES {
            return Err(std::io::Error::other(format!("it renders more than {} MiB", MAX_TEXT_BYTES >> 20)));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// The settings, functions and filters that transformers gives a template.
fn environment(clock: Clock) -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_fuel(Some(FUEL));
    environment.set_recursion_limit(RECURSION);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(pycompat::unknown_method_callback);
    environment.set_formatter(|out: &mut Output, state: &State, value: &Template| match python::text(value) {
        Some(text) => Ok(out.write_str(&text)?),
        None => minijinja::escape_formatter(out, state, value),
    });
    environment.add_function("raise_exception", |message: String| -> Result<String, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", move |format: String| {
        clock.format(&format).map_err(|reason| minijinja::Error::new(ErrorKind::InvalidOperation, reason))
    });
    environment.add_filter("tojson", to_json);
    environment.add_filter("trim", trim);
    environment.add_test("iterable", |value: &Template| {
        !value.is_none() && (value.as_str().is_some() || value.try_iter().is_ok())
    });
    environment.add_filter("generation", |text: String| format!("{}{text}{}", MARKS[0], MARKS[1]));
    environment
}

/// Jinja trims the text of any value: `None`, and the representation of a list.
fn trim(value: Template, chars: Option<String>) -> String {
    let text = match value.as_str() {
        Some(text) => text.to_string(),
        None => python::text(&value).unwrap_or_else(|| value.to_string()),
    };
    match chars {
        Some(chars) => text.trim_matches(|c| chars.contains(c)).to_string(),
        None => text.trim().to_string(),
    }
}

fn to_json(value: Template, kwargs: Kwargs) -> Result<String, minijinja::Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    let ensure_ascii: Option<bool> = kwargs.get("ensure_ascii")?;
    let separators: Option<Vec<String>> = kwargs.get("separators")?;
    kwargs.assert_all_used()?;
    let comma = if indent.is_some() { "," } else { ", " };
    let separators = separators.unwrap_or_else(|| vec![comma.into(), ": ".into()]);
    let separators = separators
        .try_into()
        .map_err(|_| minijinja::Error::new(ErrorKind::InvalidOperation, "tojson: `separators` are two texts"))?;
    Ok(Json { indent, ensure_ascii: ensure_ascii.unwrap_or_default(), separators }.write(&value))
}

/// Writes `{% generation %}` blocks as blocks of the filter that marks them.
fn mark_generation(template: &str) -> String {
    // Jinja reads every end of a line as this one.
    let template = template.replace("\r\n", "\n").replace('\r', "\n");
    let (mut out, mut rest) = (String::new(), template.as_str());
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        out.push_str(before);
        let name = tag.trim_start_matches(['-', '+']).trim_start();
        let lead = &tag[..tag.len() - name.len()];
        let ends = |word: &str| {
            let after = name.strip_prefix(word)?;
            after.trim_start().trim_start_matches(['-', '+']).starts_with("%}").then_some(after)
        };
        out.push_str(lead);
        rest = match (ends("generation"), ends("endgeneration")) {
            (Some(after), _) => {
                out.push_str("filter generation");
                after
            }
            (_, Some(after)) => {
                out.push_str("endfilter");
                after
            }
            _ => name,
        };
    }
    out + rest
}

/// Takes the marks out of a text.
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

/// An error of a template with its line.
fn describe(error: &minijinja::Error) -> String {
    let detail = error.detail().map_or_else(|| error.kind().to_string(), str::to_string);
    let line = error.line().map_or(String::new(), |line| format!(" (line {line})"));
    let source = std::error::Error::source(error).map_or(String::new(), |source| format!(": {source}"));
    format!("{detail}{line}{source}")
}

#[cfg(test)]
#[path = "chat_tests.rs"]
mod tests;
