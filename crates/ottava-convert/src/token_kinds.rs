//! Kinds of tokens in `tokenizer.ggml.token_type`.

/// Made by merges.
pub const NORMAL: i64 = 1;
/// What stands for characters that are no tokens.
pub const UNKNOWN: i64 = 2;
/// Added, and no text.
pub const CONTROL: i64 = 3;
/// Added text.
pub const USER_DEFINED: i64 = 4;
/// A row of the embedding without a token.
pub const UNUSED: i64 = 5;
/// A byte of a character that is no token.
pub const BYTE: i64 = 6;
