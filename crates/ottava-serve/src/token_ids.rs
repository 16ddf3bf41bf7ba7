//! The ids of tokens in answers, for clients that ask for them (`return_token_ids`).

use crate::json::{ListText, ObjectText, text};

/// The new tokens of a choice since its last piece.
#[derive(Default)]
pub struct TokenIds(Option<ListText>);

impl TokenIds {
    /// No tokens yet; none at all unless they are `wanted`.
    pub fn new(wanted: bool) -> TokenIds {
        TokenIds(wanted.then(ListText::default))
    }

    /// Adds tokens.
    pub fn extend(&mut self, tokens: &[u32]) {
        let Some(list) = &mut self.0 else { return };
        tokens.iter().for_each(|token| list.push(&text(token)));
    }

    /// Whether there is none to tell.
    pub fn is_empty(&self) -> bool {
        self.0.as_ref().is_none_or(ListText::is_empty)
    }

    /// Moves the tokens into the field `token_ids` of a choice, if they are wanted.
    pub fn write(&mut self, object: ObjectText) -> ObjectText {
        match &mut self.0 {
            Some(list) => object.json("token_ids", &std::mem::take(list).json()),
            None => object,
        }
    }
}
