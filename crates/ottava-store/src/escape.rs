//! Texts in addresses.

/// Escapes the bytes of a text in an address, except letters, digits, `-_.~` and the characters of `kept`.
pub(crate) fn escape(text: &str, kept: &str) -> String {
    let is_kept = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) || kept.as_bytes().contains(&byte);
    let escape = |byte: u8| if is_kept(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    text.bytes().map(escape).collect()
}
