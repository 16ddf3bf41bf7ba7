//! Messages between ranks. A message has a header of fixed size and a body of limited length. Numbers are little-endian.

use std::io::{self, ErrorKind, Read, Write};

/// The start of each header. Its last byte is the version of this protocol.
const MAGIC: [u8; 7] = *b"OTVCMM\x04";

/// The number of bytes of a header: magic, kind, and length of the body.
const HEADER: usize = MAGIC.len() + 1 + 8;

/// The maximum number of bytes of a body during the rendezvous, when the sender is not known yet.
pub(super) const HANDSHAKE_LIMIT: u64 = 64 << 10;

/// The maximum number of bytes of a body from a known rank.
pub(super) const LIMIT: u64 = 64 << 30;

/// The number of bytes that are reserved before the first byte of a body arrives.
const RESERVED: u64 = 1 << 20;

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The challenge that rank 0 sends to a new connection.
    Challenge,
    /// The answer to the challenge: the rank, its identity and its proof.
    Hello,
    /// Rank 0's proof of the secret.
    Accepted,
    /// Rank 0 rejects the proof.
    Denied,
    /// All ranks have joined.
    Welcome,
    /// The group cannot be formed. The body has the reason.
    Refused,
    /// The sender is alive. The body has the number of its progress reports.
    Heartbeat,
    /// A call of the sender.
    Call,
    /// The result of a call.
    Result,
    /// The job has failed.
    Fault,
    /// A rank was asked to stop.
    Stop,
    /// The last message of a sender that ends.
    Bye,
}

const KINDS: [Kind; 12] = [
    Kind::Challenge,
    Kind::Hello,
    Kind::Accepted,
    Kind::Denied,
    Kind::Welcome,
    Kind::Refused,
    Kind::Heartbeat,
    Kind::Call,
    Kind::Result,
    Kind::Fault,
    Kind::Stop,
    Kind::Bye,
];

/// Writes a message whose body is the concatenation of `parts`.
pub(super) fn write(stream: &mut impl Write, kind: Kind, parts: &[&[u8]]) -> io::Result<()> {
    let length = parts.iter().map(|part| part.len() as u64).sum::<u64>();
    let mut header = [0; HEADER];
    header[..MAGIC.len()].copy_from_slice(&MAGIC);
    header[MAGIC.len()] = kind as u8;
    header[MAGIC.len() + 1..].copy_from_slice(&length.to_le_bytes());
    stream.write_all(&header)?;
    parts.iter().try_for_each(|part| stream.write_all(part))
}

/// Reads a message. Errors with [`ErrorKind::InvalidData`] if the message is malformed, or if its body is longer than `limit`.
pub(super) fn read(stream: &mut impl Read, limit: u64) -> io::Result<(Kind, Vec<u8>)> {
    let invalid = |message: &str| io::Error::new(ErrorKind::InvalidData, message);
    let mut header = [0; HEADER];
    stream.read_exact(&mut header)?;
    let (magic, rest) = header.split_at(MAGIC.len());
    let kind = KINDS.into_iter().find(|kind| *kind as u8 == rest[0]);
    let (true, Some(kind)) = (magic == MAGIC, kind) else {
        return Err(invalid("not a message of this version"));
    };
    let length = u64::from_le_bytes(rest[1..].try_into().expect("eight bytes"));
    if length > limit {
        return Err(invalid("the message is too long"));
    }
    let mut body = Vec::with_capacity(length.min(RESERVED) as usize);
    if stream.take(length).read_to_end(&mut body)? as u64 != length {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok((kind, body))
}

/// Appends a text, preceded by its length.
pub(super) fn put_text(body: &mut Vec<u8>, text: &str) {
    body.extend((text.len() as u32).to_le_bytes());
    body.extend(text.as_bytes());
}

/// Reads fields from the front of a body. A field is `None` if the body is too short or malformed.
pub(super) struct Fields<'a>(pub &'a [u8]);

impl Fields<'_> {
    pub fn bytes<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    pub fn byte(&mut self) -> Option<u8> {
        self.bytes::<1>().map(|[byte]| byte)
    }

    pub fn number(&mut self) -> Option<u64> {
        self.bytes().map(u64::from_le_bytes)
    }

    pub fn index(&mut self) -> Option<usize> {
        usize::try_from(self.number()?).ok()
    }

    pub fn text(&mut self) -> Option<String> {
        let length = u32::from_le_bytes(self.bytes()?) as usize;
        let (text, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        String::from_utf8(text.to_vec()).ok()
    }
}
