//! Documents from text files: `.txt` and `.md`, `.jsonl`, each also compressed as `.gz`.
//!
//! Files are streamed one document at a time. Errors say `file:line: reason`. Only blank lines and empty texts are skipped.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;
use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

use super::records::{Content, Formatting};
use crate::hash::HashedFile;
use crate::{Error, Result, input};

/// The largest document.
const MAX_DOCUMENT_BYTES: u64 = 64 << 20;

/// A `.gz` may unpack to this many times its size (text seldom passes 20) or to [`GZIP_FREE_BYTES`], and no further.
const GZIP_MAX_RATIO: u64 = 200;

/// Unpacked bytes that are always allowed, so that small files of repeated text pass.
const GZIP_FREE_BYTES: u64 = 16 << 20;

/// The unit that is one document in a `.txt` or `.md` file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Documents {
    /// Every line that is not blank.
    Line,
    /// The whole file.
    #[default]
    File,
}

/// Options for reading files; part of the key of cached tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SourceOptions {
    /// The unit that is one document in plain text files.
    pub text_documents: Documents,
    /// The field of a JSON record that holds its text.
    pub text_field: String,
    /// The fields of JSON records.
    pub formatting: Formatting,
    /// Whether prompts contribute to the loss too.
    pub train_on_inputs: bool,
    /// A chat template instead of the tokenizer's; empty means that. Cached tokens depend on its content.
    #[serde(skip)]
    pub chat_template_path: PathBuf,
}

impl Default for SourceOptions {
    fn default() -> Self {
        SourceOptions {
            text_documents: Documents::default(),
            text_field: "text".into(),
            formatting: Formatting::Auto,
            train_on_inputs: false,
            chat_template_path: PathBuf::new(),
        }
    }
}

/// One document and the line it starts on.
#[derive(Debug, PartialEq)]
pub struct Document {
    /// Its content; a plain text has `\n` line ends.
    pub content: Content,
    /// Bytes of the record that it was read from.
    pub bytes: usize,
    /// The line of the file on which it starts, from 1.
    pub line: u64,
}

/// The documents of one file in order; see [`documents`].
pub struct DocumentReader {
    path: PathBuf,
    input: Box<dyn BufRead + Send>,
    /// The file below `input`.
    file: HashedFile,
    form: Form,
    /// The line read last, from 1.
    line: u64,
    finished: bool,
}

enum Form {
    Lines,
    Whole,
    Json { field: String, formatting: Formatting },
}

/// Errors with [`Error::Data`] unless `path` is a regular file with a supported extension.
pub fn check(path: &Path) -> Result<()> {
    form(path, &SourceOptions::default())?;
    input::open(path).map(|_| ()).map_err(|error| Error::Data(format!("{}: {error}", path.display())))
}

/// The format of a file by its name, and whether it is compressed.
fn form(path: &Path, options: &SourceOptions) -> Result<(Form, bool)> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
    let plain = name.strip_suffix(".gz");
    let form = match plain.unwrap_or(&name).rsplit_once('.').map(|(_, extension)| extension) {
        Some("jsonl") => {
            // An explicit `text_field` has the text, even if other fields are present.
            let formatting = match options.formatting {
                Formatting::Auto if options.text_field != SourceOptions::default().text_field => Formatting::Text,
                formatting => formatting,
            };
            Form::Json { field: options.text_field.clone(), formatting }
        }
        Some("txt" | "md") => match options.text_documents {
            Documents::Line => Form::Lines,
            Documents::File => Form::Whole,
        },
        _ => {
            return Err(Error::Data(format!(
                "{}: unknown kind of data; name a .txt, .md or .jsonl file, each also as .gz",
                path.display()
            )));
        }
    };
    Ok((form, plain.is_some()))
}

/// The formatting of the records of `path`, by the first of them; that of plain text for other files.
pub fn formatting(path: &Path, options: &SourceOptions) -> Result<Formatting> {
    let mut reader = documents(path, options)?;
    match reader.form {
        Form::Lines | Form::Whole => return Ok(Formatting::Text),
        Form::Json { formatting: Formatting::Auto, .. } => reader.next().transpose()?,
        Form::Json { .. } => None,
    };
    match reader.form {
        Form::Json { formatting, .. } if formatting != Formatting::Auto => Ok(formatting),
        _ => Ok(Formatting::Text),
    }
}

/// Opens `path` for reading its documents. The name says what it is; other names are an error.
pub fn documents(path: &Path, options: &SourceOptions) -> Result<DocumentReader> {
    let (form, compressed) = form(path, options)?;
    let unreadable = |error| Error::Data(format!("{}: {error}", path.display()));
    let file = HashedFile::open(path).map_err(unreadable)?;
    let size = std::fs::metadata(path).map_err(unreadable)?;
    let reader = file.clone();
    let input: Box<dyn BufRead + Send> = if compressed {
        let left = GZIP_FREE_BYTES.max(size.len().saturating_mul(GZIP_MAX_RATIO));
        Box::new(BufReader::with_capacity(1 << 18, Capped { inner: MultiGzDecoder::new(BufReader::new(reader)), left }))
    } else {
        Box::new(BufReader::with_capacity(1 << 18, reader))
    };
    Ok(DocumentReader { path: path.to_path_buf(), input, file, form, line: 0, finished: false })
}

impl DocumentReader {
    /// Size and SHA-256 of the bytes read.
    pub fn finish(self) -> Result<(u64, String)> {
        self.file.finish().map_err(Error::io(&self.path))
    }

    fn wrong(&self, reason: impl fmt::Display) -> Error {
        Error::Data(format!("{}:{}: {reason}", self.path.display(), self.line))
    }

    /// Reads up to the end of the line, or of the file for [`Form::Whole`]; `None` at the end of the file.
    fn piece(&mut self) -> Result<Option<String>> {
        self.line += 1;
        let mut bytes = Vec::new();
        let mut limited = self.input.by_ref().take(MAX_DOCUMENT_BYTES + 1);
        let (read, whole) = match self.form {
            Form::Whole => (limited.read_to_end(&mut bytes), true),
            Form::Lines | Form::Json { .. } => (limited.read_until(b'\n', &mut bytes), false),
        };
        read.map_err(|e| self.wrong(format!("cannot be read further: {e}")))?;
        if bytes.is_empty() {
            return Ok(None);
        }
        if bytes.len() as u64 > MAX_DOCUMENT_BYTES {
            let advice = if whole { "; set text_documents = \"line\", or split the file" } else { "" };
            return Err(self.wrong(format!("a document of more than {} MiB{advice}", MAX_DOCUMENT_BYTES >> 20)));
        }
        if self.line == 1 && bytes.starts_with(b"\xEF\xBB\xBF") {
            bytes.drain(..3);
        }
        let text = String::from_utf8(bytes).map_err(|e| self.not_utf8(&e))?;
        if text.contains('\0') {
            self.line += lines_before(text.as_bytes(), text.find('\0').unwrap_or(0));
            return Err(self.wrong("a zero byte; the file must be plain UTF-8 text"));
        }
        Ok(Some(if whole {
            text.replace("\r\n", "\n")
        } else {
            let line = text.strip_suffix('\n').unwrap_or(&text);
            line.strip_suffix('\r').unwrap_or(line).to_string()
        }))
    }

    fn not_utf8(&mut self, error: &std::string::FromUtf8Error) -> Error {
        let (bytes, at) = (error.as_bytes(), error.utf8_error().valid_up_to());
        self.line += lines_before(bytes, at);
        let column = at - bytes[..at].iter().rposition(|&b| b == b'\n').map_or(0, |newline| newline + 1);
        self.wrong(format!("byte {} of the line (0x{:02x}) is not UTF-8", column + 1, bytes[at]))
    }

    fn next_document(&mut self) -> Result<Option<Document>> {
        while let Some(piece) = self.piece()? {
            let line = self.line;
            if piece.trim().is_empty() {
                continue;
            }
            let bytes = piece.len();
            let content = match &mut self.form {
                Form::Lines | Form::Whole => Ok(Content::Text(piece)),
                Form::Json { field, formatting } => json_content(&piece, field, formatting),
            };
            match content.map_err(|reason| self.wrong(reason))? {
                Content::Text(text) if text.is_empty() => {}
                content => return Ok(Some(Document { content, bytes, line })),
            }
        }
        Ok(None)
    }
}

impl Iterator for DocumentReader {
    type Item = Result<Document>;

    /// The next document; after an error there are no more.
    fn next(&mut self) -> Option<Self::Item> {
        if self.finished {
            return None;
        }
        let next = self.next_document().transpose();
        self.finished = !matches!(next, Some(Ok(_)));
        next
    }
}

fn lines_before(bytes: &[u8], at: usize) -> u64 {
    bytes[..at].iter().filter(|&&b| b == b'\n').count() as u64
}

/// The content of one JSON record of a file of this `formatting`, which the first record decides if it is not known.
fn json_content(record: &str, field: &str, formatting: &mut Formatting) -> Result<Content, String> {
    if *formatting == Formatting::Auto {
        *formatting = Formatting::detect(record);
    }
    match *formatting {
        Formatting::Text => Ok(Content::Text(json_text(record, field)?)),
        formatting => {
            let record = serde_json::from_str(record).map_err(|e| unusable(&e))?;
            let content = formatting.read(&record);
            content.map_err(|reason| format!("not a usable record of formatting `{}`: {reason}", formatting.as_str()))
        }
    }
}

/// The message for a record that is not JSON. The parser counts lines within the record; the caller names the line of the file.
fn unusable(error: &serde_json::Error) -> String {
    format!("not a usable record: {}", error.to_string().replace(" at line 1 column ", " at column "))
}

/// The text in `field` of one JSON record.
fn json_text(record: &str, field: &str) -> Result<String, String> {
    let mut parser = serde_json::Deserializer::from_str(record);
    let text = TextField(field).deserialize(&mut parser).and_then(|text| parser.end().map(|()| text));
    text.map_err(|e| unusable(&e))
}

/// Picks one string field out of an object without keeping the rest.
struct TextField<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for TextField<'_> {
    type Value = String;
    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<String, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for TextField<'_> {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "an object with the text in its field `{}`", self.0)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<String, A::Error> {
        let custom = |reason: String| <A::Error as serde::de::Error>::custom(reason);
        let mut found = None;
        while let Some(key) = map.next_key::<String>()? {
            if key != self.0 {
                map.next_value::<IgnoredAny>()?;
            } else if found.is_some() {
                return Err(custom(format!("field `{}` appears twice", self.0)));
            } else {
                found = Some(map.next_value::<String>()?);
            }
        }
        found.ok_or_else(|| custom(format!("field `{}` is missing (set text_field to another)", self.0)))
    }
}

/// Fails after `left` bytes: protects against decompression bombs.
struct Capped<R> {
    inner: R,
    left: u64,
}

impl<R: Read> Read for Capped<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.left = self.left.checked_sub(count as u64).ok_or_else(|| {
            io::Error::other(format!(
                "it unpacks to more than {GZIP_MAX_RATIO} times its size; unpack it yourself if you trust it"
            ))
        })?;
        Ok(count)
    }
}

#[cfg(test)]
#[path = "source_tests.rs"]
mod tests;
