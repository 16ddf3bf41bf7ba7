//! The kinds of tokens in `tokenizer.ggml.token_type`.

/// A token that merges form.
pub const NORMAL: i64 = 1;
/// The token that replaces characters that are not tokens.
pub const UNKNOWN: i64 = 2;
/// An added token that is not text.
pub const CONTROL: i64 = 3;
/// An added token that is text.
pub const USER_DEFINED: i64 = 4;
/// A row of the embedding without a token.
pub const UNUSED: i64 = 5;
/// A byte of a character that is not a token.
pub const BYTE: i64 = 6;
