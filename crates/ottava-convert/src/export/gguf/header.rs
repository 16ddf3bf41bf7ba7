//! Writes the part of a GGUF file before the tensors.

use super::encode::GgufType;
use crate::gguf::{ALIGNMENT, MAGIC, kinds};

/// The version of the format.
const VERSION: u32 = 3;

/// A value of the metadata.
pub enum Entry<'a> {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(&'a str),
    Texts(&'a [String]),
    Integers(&'a [i32]),
    Floats(&'a [f32]),
}

/// The metadata and the positions of tensors.
#[derive(Default)]
pub struct Header {
    metadata: Vec<u8>,
    entries: u64,
    tensors: Vec<u8>,
    count: u64,
    /// The end of the last tensor, relative to the start of the data.
    offset: u64,
}

impl Header {
    /// Adds a key with its value.
    pub fn entry(&mut self, key: &str, value: Entry) {
        let bytes = &mut self.metadata;
        text(bytes, key);
        let mut number = |kind: u32, value: &[u8]| {
            bytes.extend(kind.to_le_bytes());
            bytes.extend(value);
        };
        match value {
            Entry::U32(value) => number(kinds::U32, &value.to_le_bytes()),
            Entry::F32(value) => number(kinds::F32, &value.to_le_bytes()),
            Entry::Bool(value) => number(kinds::BOOL, &[value.into()]),
            Entry::Text(value) => {
                number(kinds::TEXT, &[]);
                text(bytes, value);
            }
            Entry::Texts(values) => {
                number(kinds::ARRAY, &kinds::TEXT.to_le_bytes());
                bytes.extend((values.len() as u64).to_le_bytes());
                values.iter().for_each(|value| text(bytes, value));
            }
            Entry::Integers(values) => {
                number(kinds::ARRAY, &kinds::I32.to_le_bytes());
                bytes.extend((values.len() as u64).to_le_bytes());
                values.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
            }
            Entry::Floats(values) => {
                number(kinds::ARRAY, &kinds::F32.to_le_bytes());
                bytes.extend((values.len() as u64).to_le_bytes());
                values.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
            }
        }
        self.entries += 1;
    }

    /// Adds a tensor of a row-major `shape`. It follows the earlier tensors in the data.
    pub fn tensor(&mut self, name: &str, shape: &[usize], kind: GgufType) {
        let bytes = &mut self.tensors;
        text(bytes, name);
        bytes.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|&n| bytes.extend((n as u64).to_le_bytes()));
        bytes.extend(kind.id().to_le_bytes());
        bytes.extend(self.offset.to_le_bytes());
        self.offset += (kind.bytes(shape.iter().product()) as u64).next_multiple_of(ALIGNMENT);
        self.count += 1;
    }

    /// Returns the bytes before the first tensor.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.count.to_le_bytes());
        bytes.extend(self.entries.to_le_bytes());
        bytes.extend(&self.metadata);
        bytes.extend(&self.tensors);
        bytes.resize((bytes.len() as u64).next_multiple_of(ALIGNMENT) as usize, 0);
        bytes
    }
}

fn text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}
