//! The encoding of bytes in the tokens of a vocabulary, read from the decoder of a tokenizer.

use tokenizers::DecoderWrapper;

/// The encoding of bytes in the tokens of a vocabulary.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum ByteForm {
    /// Each character of a token is a byte (GPT-2's alphabet).
    Alphabet,
    /// Some tokens are single bytes, written `<0xC1>`; others are text.
    Fallback,
    /// All tokens are text.
    Text,
}

impl ByteForm {
    pub(super) fn of(decoder: Option<&DecoderWrapper>) -> ByteForm {
        match decoder {
            Some(DecoderWrapper::ByteLevel(_)) => ByteForm::Alphabet,
            Some(DecoderWrapper::ByteFallback(_)) => ByteForm::Fallback,
            Some(DecoderWrapper::Sequence(steps)) => {
                let forms = steps.get_decoders().iter().map(|step| ByteForm::of(Some(step)));
                forms.reduce(|a, b| if a == ByteForm::Text { b } else { a }).unwrap_or(ByteForm::Text)
            }
            _ => ByteForm::Text,
        }
    }
}

/// Returns the byte of a character of GPT-2's alphabet. Printable characters of Latin-1 are their own bytes; characters from U+0100 on are the other
/// bytes, in ascending order.
fn byte_of(c: char) -> Option<u8> {
    match (c, u32::from(c)) {
        ('!'..='~' | '¡'..='¬' | '®'..='ÿ', code) => Some(code as u8),
        (_, code @ 0x100..=0x120) => Some((code - 0x100) as u8),
        (_, code @ 0x121..=0x142) => Some((code - 0x121) as u8 + 0x7f),
        (_, 0x143) => Some(0xad),
        _ => None,
    }
}

/// Returns the characters of GPT-2's alphabet, by byte.
pub(super) fn alphabet() -> [char; 256] {
    let mut all = ['\0'; 256];
    for c in '!'..='\u{143}' {
        if let Some(byte) = byte_of(c) {
            all[usize::from(byte)] = c;
        }
    }
    all
}

impl ByteForm {
    /// Returns the bytes of `token`, or `None` if they depend on the tokens around it.
    pub(super) fn bytes(self, token: &str) -> Option<Vec<u8>> {
        match self {
            ByteForm::Alphabet => {
                let bytes = token.chars().map(byte_of).collect::<Option<Vec<u8>>>();
                Some(bytes.unwrap_or_else(|| token.into()))
            }
            ByteForm::Fallback => fallback_byte(token).map(|byte| vec![byte]),
            ByteForm::Text => None,
        }
    }
}

/// Returns the byte of a token such as `<0xC1>`.
fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>').filter(|digits| digits.len() == 2)?;
    u8::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;

    #[test]
    fn gpt2s_alphabet_has_each_byte_once() {
        let mut bytes: Vec<u8> = ByteLevel::alphabet().into_iter().map(|c| byte_of(c).unwrap()).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        let of = |text: &str| byte_of(text.chars().next().unwrap());
        assert_eq!(["Ġ", "Ċ", "Ã", "ł"].map(of), [0x20, 0x0a, 0xc3, 0xa0].map(Some));
        assert_eq!(of("▁"), None);
    }

    #[test]
    fn single_bytes_are_written_in_hexadecimal() {
        let of = |token| ByteForm::Fallback.bytes(token);
        assert_eq!(
            ["<0xC1>", "<0x0a>", "<0xC>", "<0xCCC>", "<0xZZ>", "C1"].map(of),
            [Some(vec![0xc1]), Some(vec![0x0a]), None, None, None, None]
        );
    }
}
