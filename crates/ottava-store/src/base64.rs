//! Base64 (RFC 4648).

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Encodes bytes, with padding.
pub(crate) fn encode(bytes: &[u8]) -> String {
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let value = group.iter().fold(0u32, |value, byte| value << 8 | u32::from(*byte)) << (8 * (3 - group.len()));
        for place in 0..4 {
            let digit = (value >> (18 - 6 * place)) & 63;
            text.push(if place <= group.len() { char::from(ALPHABET[digit as usize]) } else { '=' });
        }
    }
    text
}

/// Decodes a text with or without padding. Returns `None` for other characters or a wrong length.
pub(crate) fn decode(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    for group in text.trim_end_matches('=').as_bytes().chunks(4) {
        let mut value = 0u32;
        for byte in group {
            value = value << 6 | ALPHABET.iter().position(|known| known == byte)? as u32;
        }
        let count = [None, Some(1), Some(2), Some(3)][group.len() - 1]?;
        value <<= 6 * (4 - group.len());
        bytes.extend(&value.to_be_bytes()[1..1 + count]);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_agree_with_rfc_4648() {
        for (bytes, text) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg=="), ("fooba", "Zm9vYmE=")]
        {
            assert_eq!(encode(bytes.as_bytes()), text);
            assert_eq!(decode(text).unwrap(), bytes.as_bytes());
        }
        assert_eq!(decode("+/+/").unwrap(), [0xfb, 0xff, 0xbf]);
        assert_eq!((decode("a b="), decode("abcde")), (None, None));
    }
}
