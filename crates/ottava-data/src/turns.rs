//! The turns of a conversation that a model is trained to write.

use std::ops::Range;

use serde_json::Value;

use crate::chat::{Chat, ChatTemplate, Rendered, is_empty_answer};

/// The content that replaces an answer while the position of the answer is searched.
const PROBE: &str = "\u{e000}";

/// A rendered conversation, with the parts that are trained on.
#[derive(Debug, PartialEq)]
pub struct Learned {
    /// The whole conversation, or one text for each trained turn.
    pub texts: Vec<Rendered>,
    /// If there are several texts: the number of a message whose turn changes how the template renders earlier messages.
    pub rewrites: Option<usize>,
}

impl ChatTemplate {
    /// Renders `chat` with the ranges of the trained turns. These are the turns of `roles`, unless the field `train` of a message overrides the role.
    ///
    /// The ranges are the `{% generation %}` blocks of the template. If the template has no such blocks, a range is the text that a turn adds to the
    /// rendering of the turns before it. If a turn changes how earlier turns are rendered, for example by leaving out their thinking, each turn is a
    /// separate text with the messages before it. A turn without content and without tool calls has no range, because the model would learn to answer
    /// nothing.
    pub fn render_learned(&self, chat: &Chat, roles: &[String]) -> Result<Learned, String> {
        let choice = Choice::of(chat, roles);
        let chat = &choice.chat;
        if choice.turns.is_empty() {
            return Err(match choice.has_answers {
                true => "no turn of the conversation is trained on: see `train`, `data.chat.roles_to_train`".into(),
                false => no_answers(&chat.messages),
            });
        }
        if self.generation
            && let Some(rendered) = self.marked_turns(chat, &choice.turns)?
        {
            return Ok(Learned { texts: vec![rendered], rewrites: None });
        }
        let whole = self.render(chat, false)?;
        let mut learned = Vec::new();
        for &turn in choice.turns.iter().filter(|turn| !is_empty_answer(&chat.messages[**turn])) {
            let through = match turn + 1 == chat.messages.len() {
                true => whole.clone(),
                false => self.render(&first(chat, turn + 1), false)?,
            };
            let before = match self.before(chat, turn) {
                // Templates may reject a conversation without messages.
                Err(_) if turn == 0 => self.same_as_probe(chat, turn, &through)?,
                before => before?,
            };
            if !(whole.starts_with(&through) && through.starts_with(&before)) {
                return Ok(Learned { texts: self.single_turns(chat, &choice.turns)?, rewrites: Some(turn + 1) });
            }
            learned.push(range(turn, before.len(), &through)?);
        }
        Ok(Learned { texts: vec![Rendered { text: whole, learned }], rewrites: None })
    }

    /// Renders `chat` with one range: everything after its first `learned_from` messages, which are the prompt. If the prompt alone is rendered
    /// differently, the range begins at the first difference.
    pub(super) fn render_completion(&self, chat: &Chat) -> Result<Rendered, String> {
        let (text, prompt) = (self.render(chat, false)?, self.render(&first(chat, chat.learned_from), true)?);
        let same: usize = text.chars().zip(prompt.chars()).take_while(|(a, b)| a == b).map(|(c, _)| c.len_utf8()).sum();
        let learned = vec![range(chat.learned_from, same, &text)?];
        Ok(Rendered { text, learned })
    }

    /// Renders the whole conversation, with the ranges of the `turns` that the template marks. Returns `None` if marks and turns cannot be matched.
    fn marked_turns(&self, chat: &Chat, turns: &[usize]) -> Result<Option<Rendered>, String> {
        let mut rendered = self.render_in_training(chat)?;
        // A mark directly after another one, such as around the end of a turn, belongs to the same turn.
        let mut joined: Vec<Range<usize>> = Vec::new();
        for range in rendered.learned.drain(..).filter(|range| !range.is_empty()) {
            match joined.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => joined.push(range),
            }
        }
        if joined.is_empty() {
            return Err("the chat template marks no turn of the assistant in this conversation".into());
        }
        let answers: Vec<usize> =
            (0..chat.messages.len()).filter(|i| chat.messages[*i]["role"] == "assistant").collect();
        let is_learned = |turn: &usize| turns.contains(turn) && !is_empty_answer(&chat.messages[*turn]);
        rendered.learned = match () {
            () if answers.len() == joined.len() => {
                answers.iter().zip(joined).filter(|(turn, _)| is_learned(turn)).map(|(_, range)| range).collect()
            }
            () if answers.iter().all(is_learned) => joined,
            () => return Ok(None),
        };
        let all = turns.iter().all(|turn| answers.contains(turn));
        Ok(all.then_some(rendered))
    }

    /// Renders a text for each of `turns`, with the messages before it.
    fn single_turns(&self, chat: &Chat, turns: &[usize]) -> Result<Vec<Rendered>, String> {
        let mut texts = Vec::new();
        for &turn in turns.iter().filter(|turn| !is_empty_answer(&chat.messages[**turn])) {
            let text = self.render(&first(chat, turn + 1), false)?;
            let mut before = match self.before(chat, turn) {
                Err(_) if turn == 0 => self.same_as_probe(chat, turn, &text)?,
                before => before?,
            };
            if !text.starts_with(&before) {
                // The prompt has text that a complete turn does not have, such as the start of thinking.
                before = self.same_as_probe(chat, turn, &before)?;
            }
            if !text.starts_with(&before) && !self.cut_to_common(chat, turn, &text, &mut before) {
                return Err(format!(
                    "the chat template renders what precedes message {} differently once it follows, so the text of that turn cannot be \
                     found; mark turns with {{% generation %}} in a template of `data.chat.chat_template_path`, or set `data.train_on_inputs = true`",
                    turn + 1
                ));
            }
            let learned = vec![range(turn, before.len(), &text)?];
            texts.push(Rendered { text, learned });
        }
        Ok(texts)
    }

    /// Truncates the prompt `before` to its common beginning with `text`, if the rendering of the earlier messages begins both. For example, the
    /// prompt may begin the thinking of the turn with other white space.
    fn cut_to_common(&self, chat: &Chat, turn: usize, text: &str, before: &mut String) -> bool {
        let Ok(messages) = self.render(&first(chat, turn), false) else { return false };
        let Ok(prompt) = self.before(chat, turn) else { return false };
        if !(text.starts_with(&messages) && prompt.starts_with(&messages)) {
            return false;
        }
        let same: usize = text.chars().zip(prompt.chars()).take_while(|(a, b)| a == b).map(|(c, _)| c.len_utf8()).sum();
        *before = text[..same].to_string();
        true
    }

    /// Returns the beginning of `text` that stays the same if message `turn` is replaced by another answer.
    fn same_as_probe(&self, chat: &Chat, turn: usize, text: &str) -> Result<String, String> {
        let mut probed = first(chat, turn + 1);
        probed.messages[turn] = Chat::message("assistant", PROBE);
        let probed = self.render(&probed, false)?;
        let same = text.chars().zip(probed.chars()).take_while(|(a, b)| a == b).map(|(c, _)| c.len_utf8()).sum();
        Ok(text[..same].to_string())
    }

    /// Renders the conversation up to the beginning of message `turn`.
    fn before(&self, chat: &Chat, turn: usize) -> Result<String, String> {
        self.render(&first(chat, turn), chat.messages[turn]["role"] == "assistant")
    }
}

/// Returns the message for a conversation without a turn of the assistant.
fn no_answers(messages: &[Value]) -> String {
    let mut roles: Vec<&str> = messages.iter().filter_map(|message| message["role"].as_str()).collect();
    roles.sort_unstable();
    roles.dedup();
    let listed: Vec<String> = roles.iter().map(|role| format!("`{role}`")).collect();
    let known = ["system", "developer", "user", "tool", "assistant"];
    let hint = roles.iter().find(|role| !known.contains(role)).map_or(String::new(), |role| {
        format!("; if `{role}` is the assistant, set data.records.roles = {{ assistant = \"{role}\" }}")
    });
    format!(
        "the conversation has no turn of the assistant, so there is nothing to learn; its roles are {}{hint}",
        listed.join(", ")
    )
}

/// Returns `chat` with only its first `count` messages.
fn first(chat: &Chat, count: usize) -> Chat {
    Chat { messages: chat.messages[..count].to_vec(), ..chat.clone() }
}

fn range(turn: usize, start: usize, text: &str) -> Result<Range<usize>, String> {
    match start < text.len() {
        true => Ok(start..text.len()),
        false => Err(format!("the chat template writes nothing for message {}, which is trained on", turn + 1)),
    }
}

/// The turns of a conversation that are trained on.
struct Choice {
    /// The conversation without the field `train`.
    chat: Chat,
    turns: Vec<usize>,
    has_answers: bool,
}

impl Choice {
    fn of(chat: &Chat, roles: &[String]) -> Choice {
        let mut chat = chat.clone();
        let mut turns = Vec::new();
        for (i, message) in chat.messages.iter_mut().enumerate() {
            let says =
                message.as_object_mut().and_then(|fields| fields.shift_remove("train")).and_then(|says| says.as_bool());
            let of_role = || roles.iter().any(|role| message["role"] == role.as_str());
            if i >= chat.learned_from && says.unwrap_or_else(of_role) {
                turns.push(i);
            }
        }
        let has_answers = chat.messages.iter().any(|message: &Value| message["role"] == "assistant");
        Choice { chat, turns, has_answers }
    }
}
