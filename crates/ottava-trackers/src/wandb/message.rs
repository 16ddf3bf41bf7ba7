//! Messages of Protocol Buffers, as far as records of runs need them.

/// A message that is being written. Numbers are varints.
#[derive(Default)]
pub(super) struct Message(Vec<u8>);

impl Message {
    /// Adds a number. Zero is the default of a field, so it is left out.
    pub(super) fn number(mut self, field: u32, value: u64) -> Message {
        if value != 0 {
            self.varint(u64::from(field) << 3);
            self.varint(value);
        }
        self
    }

    /// Adds a text.
    pub(super) fn text(self, field: u32, text: &str) -> Message {
        self.delimited(field, text.as_bytes())
    }

    /// Adds a message.
    pub(super) fn message(self, field: u32, content: Message) -> Message {
        self.delimited(field, &content.0)
    }

    /// Returns the bytes of the message.
    pub(super) fn bytes(self) -> Vec<u8> {
        self.0
    }

    fn delimited(mut self, field: u32, bytes: &[u8]) -> Message {
        self.varint(u64::from(field) << 3 | 2);
        self.varint(bytes.len() as u64);
        self.0.extend(bytes);
        self
    }

    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

#[cfg(test)]
mod tests {
    use super::Message;

    #[test]
    fn messages_are_encoded_as_the_guide_of_protocol_buffers_shows() {
        assert_eq!(Message::default().number(1, 150).bytes(), [0x08, 0x96, 0x01]);
        assert_eq!(Message::default().text(2, "testing").bytes(), [b"\x12\x07".as_slice(), b"testing"].concat());
        assert_eq!(Message::default().message(3, Message::default().number(1, 150)).bytes(), [0x1a, 3, 8, 0x96, 1]);
        assert_eq!(Message::default().number(16, 1).bytes(), [0x80, 0x01, 0x01]);
    }
}
