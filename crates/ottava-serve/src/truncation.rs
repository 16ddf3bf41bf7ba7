//! Prompts that a request shortens, with vLLM's fields `truncate_prompt_tokens` and `truncation_side`.

use crate::body::Body;
use crate::error::{ApiError, Result};
use crate::served::Encoded;

/// The fields of requests.
pub const FIELDS: &[&str] = &["truncate_prompt_tokens", "truncation_side"];

/// How a request shortens its prompts.
pub struct Truncation {
    /// The maximum number of tokens of a prompt.
    most: usize,
    /// Whether the last tokens are kept, or the first.
    keeps_end: bool,
}

impl Truncation {
    /// Reads the fields of a request. The value -1 shortens prompts to `room` tokens, which is what
    /// `max_tokens` leaves.
    pub fn read(body: &Body, room: usize) -> Result<Truncation> {
        let most = match body.integer("truncate_prompt_tokens")? {
            None => usize::MAX,
            Some(-1) if room == 0 => {
                let message = "`max_tokens` leaves no room for the prompt; ask for fewer tokens";
                return Err(ApiError::too_long("max_tokens", message));
            }
            Some(-1) => room,
            Some(count @ 1..) => count as usize,
            Some(count) => {
                let message = format!(
                    "`truncate_prompt_tokens` is {count}; it is a number of tokens from 1 up, or -1 for all that the model has room for"
                );
                return Err(ApiError::field("truncate_prompt_tokens", message));
            }
        };
        let keeps_end = match body.text("truncation_side")? {
            None | Some("left") => true,
            Some("right") => false,
            Some(other) => {
                let message = format!("`truncation_side` is {other:?}; it is left or right");
                return Err(ApiError::field("truncation_side", message));
            }
        };
        Ok(Truncation { most, keeps_end })
    }

    /// Shortens the tokens of a prompt. Returns the number of tokens that were removed from the beginning.
    pub fn shorten(&self, tokens: &mut Vec<u32>) -> usize {
        let removed = tokens.len().saturating_sub(self.most);
        match self.keeps_end {
            true => tokens.drain(..removed).len(),
            false => {
                tokens.truncate(self.most);
                0
            }
        }
    }

    /// Shortens a prompt. The text of a prompt that was shortened is the text of its tokens.
    pub fn apply(&self, mut prompt: Encoded) -> Encoded {
        let before = prompt.ids.len();
        let removed = self.shorten(&mut prompt.ids);
        match prompt.ids.len() < before {
            true => Encoded { added: prompt.added.saturating_sub(removed).min(prompt.ids.len()), text: None, ..prompt },
            false => prompt,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn prompts_keep_their_last_or_their_first_tokens() {
        let of = |fields: serde_json::Value| Truncation::read(&Body::of(0, fields.as_object().unwrap().clone()), 3);
        let shortened = |fields: serde_json::Value| {
            let prompt = Encoded { ids: vec![1, 2, 3, 4, 5], added: 2, text: Some("a".into()) };
            let Encoded { ids, added, text } = of(fields).unwrap().apply(prompt);
            (ids, added, text)
        };
        assert_eq!(shortened(json!({})), (vec![1, 2, 3, 4, 5], 2, Some("a".into())));
        assert_eq!(shortened(json!({"truncate_prompt_tokens": 5})), (vec![1, 2, 3, 4, 5], 2, Some("a".into())));
        assert_eq!(shortened(json!({"truncate_prompt_tokens": 4})), (vec![2, 3, 4, 5], 1, None));
        assert_eq!(shortened(json!({"truncate_prompt_tokens": -1})), (vec![3, 4, 5], 0, None));
        let right = |count: i64| json!({"truncate_prompt_tokens": count, "truncation_side": "right"});
        assert_eq!(shortened(right(3)), (vec![1, 2, 3], 2, None));
        assert_eq!(shortened(right(1)), (vec![1], 1, None));
        for fields in [
            json!({"truncate_prompt_tokens": 0}),
            json!({"truncate_prompt_tokens": -2}),
            json!({"truncation_side": "up"}),
        ] {
            assert!(of(fields).is_err());
        }
    }
}
