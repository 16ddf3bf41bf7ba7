//! Texts in addresses (RFC 3986).

/// Escapes the bytes of a text in an address, except letters, digits, `-_.~` and the characters of `kept`.
pub fn escape(text: &str, kept: &str) -> String {
    let is_kept = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) || kept.as_bytes().contains(&byte);
    let escape = |byte: u8| if is_kept(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    text.bytes().map(escape).collect()
}

/// Replaces the escapes of a text. A `%` without two digits stays as it is.
pub fn unescape(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let [first, tail @ ..] = rest {
        let code = std::str::from_utf8(tail.get(..2).unwrap_or_default()).ok();
        let code = code.filter(|_| *first == b'%').and_then(|digits| u8::from_str_radix(digits, 16).ok());
        bytes.push(code.unwrap_or(*first));
        rest = if code.is_some() { &tail[2..] } else { tail };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_undone() {
        assert_eq!(escape("a b/ü#.txt", "/"), "a%20b/%C3%BC%23.txt");
        assert_eq!(escape("refs/pr/1", ""), "refs%2Fpr%2F1");
        assert_eq!(unescape("a%2Fb%3d%"), "a/b=%");
        assert_eq!(unescape(&escape("a b/ü#.txt", "")), "a b/ü#.txt");
    }
}
