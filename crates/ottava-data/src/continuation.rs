//! Messages after an answer of the model, as the chat template of a run renders them.
//!
//! The tokens of an answer stay as they were drawn, so only the text after the answer is rendered: from the end of the answer to the start of the next
//! answer. The template renders the prompt, a mark in the place of the answer, and the new messages; the text after the mark is the continuation.

use serde_json::{Map, Value};

use crate::chat::{Chat, ChatTemplate, PromptForm};
use crate::content::Content;
use crate::records::Formatting;

/// The content of the answer, from a block of code points for private use. Templates copy it as they copy words.
const ANSWER: &str = "\u{e0a0}answer\u{e0a0}";

impl ChatTemplate {
    /// Renders `messages`, which follow an answer to the prompt of a record with these `columns`: the text from the end of the answer to the start of the
    /// next answer. With most templates, the text starts with the token that ends an answer.
    ///
    /// Errors with the reason if the prompt is a text, or if the template cannot render the messages.
    pub fn continuation(&self, columns: &Map<String, Value>, messages: &[Value]) -> Result<String, String> {
        let Content::Prompt(record) = Formatting::Prompts.read(&Value::Object(columns.clone()))? else {
            unreachable!("a record of prompts is a prompt")
        };
        let Content::Chat(mut chat) = record.prompt else {
            return Err("the prompt is a text, and no chat template renders what follows a text".into());
        };
        // An answer that the prompt has begun is one message with the answer of the model.
        chat.messages.pop_if(|message| message["role"] == "assistant");
        chat.messages.push(Chat::message("assistant", ANSWER));
        chat.messages.extend_from_slice(messages);
        let text = self.prompt_text(&chat, &PromptForm { kwargs: record.kwargs, ..PromptForm::default() })?;
        let (_, after) =
            text.split_once(ANSWER).ok_or("the chat template leaves out the answer before the messages")?;
        Ok(after.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ottava_jinja::Clock;
    use serde_json::json;

    fn template(text: &str) -> ChatTemplate {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("chat_template.jinja"), text).unwrap();
        ChatTemplate::load(folder.path(), None, Clock::Fixed).unwrap().unwrap()
    }

    #[test]
    fn a_continuation_is_what_follows_an_answer() {
        let columns = json!({"prompt": [{"role": "user", "content": "start"}]}).as_object().unwrap().clone();
        let reply = [Chat::message("user", "a wall")];
        for (text, expected) in [
            (
                include_str!("templates/qwen2_5.jinja"),
                "<|im_end|>\n<|im_start|>user\na wall<|im_end|>\n<|im_start|>assistant\n",
            ),
            (
                include_str!("templates/gemma.jinja"),
                "<end_of_turn>\n<start_of_turn>user\na wall<end_of_turn>\n<start_of_turn>model\n",
            ),
        ] {
            assert_eq!(template(text).continuation(&columns, &reply).unwrap(), expected);
        }
        // The text of a continuation is what the whole conversation has after the answer.
        let qwen = template(include_str!("templates/qwen3.jinja"));
        let continuation = qwen.continuation(&columns, &reply).unwrap();
        let mut chat = Chat { messages: vec![Chat::message("user", "start")], ..Chat::default() };
        chat.messages.extend([Chat::message("assistant", "left"), reply[0].clone()]);
        let whole = qwen.render(&chat, true).unwrap();
        assert_eq!(whole.split_once("left").unwrap().1, continuation);
    }

    #[test]
    fn what_has_no_continuation_is_an_error() {
        let of = |text: &str, prompt: Value| {
            let columns = json!({"prompt": prompt}).as_object().unwrap().clone();
            template(text).continuation(&columns, &[Chat::message("user", "a wall")]).unwrap_err()
        };
        let asked = json!([{"role": "user", "content": "start"}]);
        assert!(of("{{ messages[0].content }}", json!("start")).contains("the prompt is a text"));
        assert!(of("{{ messages[0].content }}", asked.clone()).contains("leaves out the answer"));
        assert!(of("{{ raise_exception('no more turns') }}", asked).contains("no more turns"));
    }
}
