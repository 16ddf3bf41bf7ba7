//! Reads GGUF files of llama.cpp: metadata, then quantized tensors.
//!
//! Supports versions 2 and 3, little-endian (<https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>). Memory is never allocated by a count in
//! the file; it grows only with the bytes that were read. Tensors are read one at a time, with positioned reads.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::dequantize::{BlockType, block_type};
use ottava_common::{Error, Result, input};

/// The first bytes of a file.
pub const MAGIC: &[u8; 4] = b"GGUF";

/// The maximum number of bytes before the tensors. A vocabulary of 256,000 tokens takes about 20 MB.
const MAX_HEADER_BYTES: u64 = 256 << 20;

/// The maximum depth of nested arrays. Common files have no nested arrays.
const MAX_DEPTH: usize = 4;

/// The maximum number of axes of a tensor, which the format limits.
const MAX_AXES: u32 = 4;

/// The default alignment of tensors in bytes, if the metadata do not set another.
pub const ALIGNMENT: u64 = 32;

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Any integer type.
    Integer(i128),
    /// F32 or F64. An F32 becomes the number of its shortest decimal representation: 1e-5, not 9.999999747378752e-6.
    Float(f64),
    /// True or false.
    Bool(bool),
    /// Text.
    Text(String),
    /// An array of integers of up to 32 bits.
    Integers(Vec<i64>),
    /// An array of texts.
    Texts(Vec<String>),
    /// An array of F32.
    Floats(Vec<f32>),
    /// An array of other elements. No supported model or tokenizer needs it.
    Other,
}

/// A tensor of a file.
#[derive(Clone, Debug)]
pub struct GgufTensor {
    /// The name of the tensor.
    pub name: String,
    /// The shape, row-major. The file stores the axes in reverse order.
    pub shape: Vec<usize>,
    /// The storage format of its elements.
    pub kind: &'static BlockType,
    /// The position of its first byte in the file.
    start: u64,
    /// The number of its bytes in the file.
    bytes: usize,
}

/// An open file.
#[derive(Debug)]
pub struct Gguf {
    path: PathBuf,
    file: File,
    metadata: BTreeMap<String, Value>,
    tensors: BTreeMap<String, GgufTensor>,
}

impl Gguf {
    /// Reads the metadata of the file at `path`, and the names, shapes and positions of its tensors.
    ///
    /// Errors with [`Error::Model`] if the file is damaged, has another version, or has a tensor of an unsupported type.
    pub fn open(path: &Path) -> Result<Gguf> {
        let wrong = |reason: String| Error::Model(format!("{}: {reason}", path.display()));
        let (file, size) = input::open(path).map_err(Error::io(path))?;
        let again = file.try_clone().map_err(Error::io(path))?;
        let mut header = Header { bytes: BufReader::new(again), at: 0, end: size.min(MAX_HEADER_BYTES) };
        let (metadata, infos) = header.read().map_err(wrong)?;
        let alignment = match metadata.get("general.alignment") {
            None => ALIGNMENT,
            Some(Value::Integer(n)) if (1..=1 << 20).contains(n) => *n as u64,
            Some(other) => return Err(wrong(format!("`general.alignment` is {other:?}; it is 1 to 2^20 bytes"))),
        };
        let data = header.at.next_multiple_of(alignment);
        let mut tensors = BTreeMap::new();
        for info in infos {
            let name = info.name.clone();
            let tensor = info.place(data, size).map_err(|reason| wrong(format!("tensor {name:?} {reason}")))?;
            if tensors.insert(name.clone(), tensor).is_some() {
                return Err(wrong(format!("there are two tensors {name:?}")));
            }
        }
        Ok(Gguf { path: path.to_path_buf(), file, metadata, tensors })
    }

    /// Returns an error about this file.
    pub fn error(&self, text: &str) -> Error {
        Error::Model(format!("{}: {text}", self.path.display()))
    }

    /// Returns all tensors, by name.
    pub fn tensors(&self) -> &BTreeMap<String, GgufTensor> {
        &self.tensors
    }

    /// Returns all keys, with their values.
    pub fn metadata(&self) -> &BTreeMap<String, Value> {
        &self.metadata
    }

    /// Returns the value of a key, if the file has the key.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    /// Returns a text, if the file has the key.
    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        self.typed(key, "a text", |value| if let Value::Text(text) = value { Some(text.as_str()) } else { None })
    }

    /// Returns true or false, if the file has the key.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", |value| if let Value::Bool(flag) = value { Some(*flag) } else { None })
    }

    /// Returns a number that is at least 0, if the file has the key.
    pub fn count(&self, key: &str) -> Result<Option<usize>> {
        self.typed(key, "a number from 0 up", |value| match value {
            Value::Integer(n) => usize::try_from(*n).ok(),
            _ => None,
        })
    }

    /// Returns a finite floating-point number, if the file has the key.
    pub fn float(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a finite floating-point number", |value| match value {
            Value::Float(n) if n.is_finite() => Some(*n),
            _ => None,
        })
    }

    /// Returns a list of texts, if the file has the key.
    pub fn texts(&self, key: &str) -> Result<Option<&[String]>> {
        self.typed(key, "a list of texts", |value| if let Value::Texts(list) = value { Some(&list[..]) } else { None })
    }

    /// Returns a list of integers, if the file has the key.
    pub fn integers(&self, key: &str) -> Result<Option<&[i64]>> {
        self.typed(key, "a list of integers", |value| match value {
            Value::Integers(list) => Some(&list[..]),
            _ => None,
        })
    }

    /// Returns a list of F32, if the file has the key.
    pub fn floats(&self, key: &str) -> Result<Option<&[f32]>> {
        self.typed(key, "a list of F32", |value| if let Value::Floats(list) = value { Some(&list[..]) } else { None })
    }

    fn typed<'a, T>(&'a self, key: &str, kind: &str, get: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.metadata.get(key) else { return Ok(None) };
        get(value).map(Some).ok_or_else(|| self.error(&format!("`{key}` is not {kind}")))
    }

    /// Returns the values of a tensor in row-major order.
    pub fn values(&self, tensor: &GgufTensor) -> Result<Vec<f32>> {
        let mut bytes = vec![0; tensor.bytes];
        self.file
            .read_exact_at(&mut bytes, tensor.start)
            .map_err(|e| self.error(&format!("tensor {:?} cannot be read: {e}", tensor.name)))?;
        Ok(tensor.kind.values(&bytes))
    }
}

/// A tensor in the header.
struct Info {
    name: String,
    /// The number of elements along each axis, the fastest axis first.
    axes: Vec<u64>,
    kind: u32,
    /// The position of its first byte, relative to the start of the data.
    offset: u64,
}

impl Info {
    /// Returns the tensor in a file of `size` bytes whose data begin at `data`. Errors with a description.
    fn place(self, data: u64, size: u64) -> Result<GgufTensor, String> {
        let kind = block_type(self.kind)?;
        let too_large = || format!("has the shape {:?}, more than fits a file", self.axes);
        let elements = self.axes.iter().try_fold(1_u64, |product, n| product.checked_mul(*n)).ok_or_else(too_large)?;
        let row = self.axes.first().copied().unwrap_or(1);
        if !row.is_multiple_of(kind.elements as u64) {
            return Err(format!(
                "has rows of {row}, which is not a multiple of the {} of a {}",
                kind.elements, kind.name
            ));
        }
        let bytes = (elements / kind.elements as u64).checked_mul(kind.bytes as u64).ok_or_else(too_large)?;
        let start = data.checked_add(self.offset);
        match start.and_then(|start| start.checked_add(bytes)) {
            Some(end) if end <= size => {}
            _ => {
                return Err(format!(
                    "has {bytes} bytes from {} on, beyond the end of the file of {size}: it is incomplete or damaged",
                    data.saturating_add(self.offset)
                ));
            }
        }
        let shape = self.axes.iter().rev().map(|&n| n as usize).collect();
        Ok(GgufTensor { name: self.name, shape, kind, start: data + self.offset, bytes: bytes as usize })
    }
}

/// Reads the part of a file before the tensors.
struct Header {
    bytes: BufReader<File>,
    /// The number of bytes read so far.
    at: u64,
    /// The maximum number of bytes to read.
    end: u64,
}

/// The numbers of the types of metadata.
pub mod kinds {
    /// 8 bits.
    pub const U8: u32 = 0;
    /// 8 bits with a sign.
    pub const I8: u32 = 1;
    /// 16 bits.
    pub const U16: u32 = 2;
    /// 16 bits with a sign.
    pub const I16: u32 = 3;
    /// 32 bits.
    pub const U32: u32 = 4;
    /// 32 bits with a sign.
    pub const I32: u32 = 5;
    /// F32.
    pub const F32: u32 = 6;
    /// A byte, 0 or 1.
    pub const BOOL: u32 = 7;
    /// A length of 64 bits, and UTF-8.
    pub const TEXT: u32 = 8;
    /// A type, a length of 64 bits, and elements.
    pub const ARRAY: u32 = 9;
    /// 64 bits.
    pub const U64: u32 = 10;
    /// 64 bits with a sign.
    pub const I64: u32 = 11;
    /// F64.
    pub const F64: u32 = 12;
}

impl Header {
    fn read(&mut self) -> Result<(BTreeMap<String, Value>, Vec<Info>), String> {
        if self.array::<4>()? != *MAGIC {
            return Err("this is not a GGUF file, which starts with the letters GGUF".into());
        }
        match self.u32()? {
            2 | 3 => {}
            version if version.swap_bytes() <= 3 => return Err("the file is big endian, which is not read".into()),
            version => return Err(format!("GGUF version {version} is not read; versions 2 and 3 are")),
        }
        let (tensors, entries) = (self.u64()?, self.u64()?);
        let mut metadata = BTreeMap::new();
        for _ in 0..entries {
            let key = self.text()?;
            let kind = self.u32()?;
            let value = self.value(kind, 0).map_err(|reason| format!("the value of {key:?}: {reason}"))?;
            if metadata.insert(key.clone(), value).is_some() {
                return Err(format!("there are two values of {key:?}"));
            }
        }
        let mut infos = Vec::new();
        for _ in 0..tensors {
            let name = self.text()?;
            let count = self.u32()?;
            if count > MAX_AXES {
                return Err(format!("tensor {name:?} has {count} axes, the format allows {MAX_AXES}"));
            }
            let axes = (0..count).map(|_| self.u64()).collect::<Result<_, _>>()?;
            infos.push(Info { name, axes, kind: self.u32()?, offset: self.u64()? });
        }
        Ok((metadata, infos))
    }

    fn value(&mut self, kind: u32, depth: usize) -> Result<Value, String> {
        Ok(match kind {
            kinds::U8 => Value::Integer(u8::from_le_bytes(self.array()?).into()),
            kinds::I8 => Value::Integer(i8::from_le_bytes(self.array()?).into()),
            kinds::U16 => Value::Integer(u16::from_le_bytes(self.array()?).into()),
            kinds::I16 => Value::Integer(i16::from_le_bytes(self.array()?).into()),
            kinds::U32 => Value::Integer(self.u32()?.into()),
            kinds::I32 => Value::Integer(i32::from_le_bytes(self.array()?).into()),
            kinds::U64 => Value::Integer(self.u64()?.into()),
            kinds::I64 => Value::Integer(i64::from_le_bytes(self.array()?).into()),
            kinds::F32 => {
                let value = f32::from_le_bytes(self.array()?);
                Value::Float(value.to_string().parse().expect("the decimals of a number are a number"))
            }
            kinds::F64 => Value::Float(f64::from_le_bytes(self.array()?)),
            kinds::BOOL => Value::Bool(self.array::<1>()? != [0]),
            kinds::TEXT => Value::Text(self.text()?),
            kinds::ARRAY if depth == MAX_DEPTH => {
                return Err(format!("more than {MAX_DEPTH} arrays within one another"));
            }
            kinds::ARRAY => self.list(depth)?,
            other => return Err(format!("there is no type {other} of metadata")),
        })
    }

    fn list(&mut self, depth: usize) -> Result<Value, String> {
        let (kind, count) = (self.u32()?, self.u64()?);
        Ok(match kind {
            kinds::TEXT => {
                let mut texts = Vec::new();
                for _ in 0..count {
                    texts.push(self.text()?);
                }
                Value::Texts(texts)
            }
            kinds::U32 | kinds::I32 => {
                let mut integers = Vec::new();
                for _ in 0..count {
                    let Value::Integer(n) = self.value(kind, depth)? else { unreachable!("an integer was asked for") };
                    integers.push(n as i64);
                }
                Value::Integers(integers)
            }
            kinds::F32 => {
                let mut floats = Vec::new();
                for _ in 0..count {
                    floats.push(f32::from_le_bytes(self.array()?));
                }
                Value::Floats(floats)
            }
            _ => {
                for _ in 0..count {
                    self.value(kind, depth + 1)?;
                }
                Value::Other
            }
        })
    }

    fn text(&mut self) -> Result<String, String> {
        let (at, length) = (self.at, self.u64()?);
        self.reserve(length)?;
        let mut bytes = vec![0; length as usize];
        self.fill(&mut bytes)?;
        String::from_utf8(bytes).map_err(|_| format!("the text at byte {at} is not UTF-8"))
    }

    fn u32(&mut self) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut bytes = [0; N];
        self.reserve(N as u64)?;
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    /// Errors if fewer than `count` bytes are left.
    fn reserve(&self, count: u64) -> Result<(), String> {
        if count <= self.end - self.at {
            return Ok(());
        }
        let (at, end) = (self.at, self.end);
        Err(format!(
            "{count} bytes are to follow byte {at}, and the header ends at {end} at most: the file is incomplete or damaged"
        ))
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), String> {
        self.at += bytes.len() as u64;
        self.bytes.read_exact(bytes).map_err(|e| e.to_string())
    }
}

#[cfg(test)]
#[path = "gguf_tests.rs"]
pub(super) mod tests;
