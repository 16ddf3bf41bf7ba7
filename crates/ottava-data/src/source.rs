//! Reads documents from files of text, of records and of tokens.
//!
//! A file is streamed, one document at a time. Errors have the form `file:line: reason`; in a file without lines, the number of the record replaces
//! the line. Blank lines and empty texts are skipped.

use std::fmt;
use std::fs::File;
use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};

use ottava_files::{Format, Rows};
use ottava_jinja::json_text;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::compression::unpack;
use crate::content::Content;
use crate::fields::{content, json_content, size};
use crate::files::Kind;
use crate::guard::catch_panics;
use crate::json_values::JsonValues;
use crate::mapping::Mapping;
use crate::megatron::MegatronReader;
use crate::parts::Units;
use crate::records::Formatting;
use ottava_common::hash::HashedFile;
use ottava_common::{Error, Result};

/// The maximum size of a document in bytes.
const MAX_DOCUMENT_BYTES: u64 = 64 << 20;

/// The unit that is one document in a `.txt` or `.md` file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Documents {
    /// Every line that is not blank.
    Line,
    /// The whole file.
    #[default]
    File,
}

/// What to do with a record that cannot be used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum BadRecord {
    /// The run ends with an error.
    #[default]
    Error,
    /// The record is skipped and counted.
    Skip,
}

/// The turns whose end contributes to the loss. The end is the token that ends a generated text; in trained turns, the text after this token too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum TrainOnEos {
    /// All turns that are trained on.
    #[default]
    Turn,
    /// All turns, including turns that are not trained on.
    All,
    /// The last turn that is trained on.
    Last,
    /// No turn.
    None,
}

/// Options for reading files. They are part of the key of cached tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SourceOptions {
    /// The unit that is one document in plain text files.
    pub text_documents: Documents,
    /// The field of a JSON record with the text.
    pub text_field: String,
    /// The fields of JSON records.
    pub formatting: Formatting,
    /// Whether prompts contribute to the loss too.
    pub train_on_inputs: bool,
    /// Other names of fields, in the form `ours=theirs`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub fields: Vec<String>,
    /// Other names of roles, in the form `ours=theirs`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub roles: Vec<String>,
    /// The fields of messages that are ignored because no template reads them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ignored_fields: Vec<String>,
    /// The roles of messages that contribute to the loss.
    #[serde(skip_serializing_if = "is_assistant")]
    pub roles_to_train: Vec<String>,
    /// The turns whose end contributes to the loss.
    #[serde(skip_serializing_if = "is_default")]
    pub train_on_eos: TrainOnEos,
    /// Further variables of the chat template, in the form `name=value`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub chat_template_kwargs: Vec<String>,
    /// What to do with records that cannot be used.
    #[serde(skip_serializing_if = "is_default")]
    pub on_bad_record: BadRecord,
    /// The maximum number of records per file that are skipped; 0 if bad records are errors.
    #[serde(skip_serializing_if = "is_default")]
    pub max_bad_records: u64,
    /// The path of a chat template that replaces the tokenizer's template; empty for the tokenizer's template. Cached tokens depend on the content of
    /// the file.
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
            fields: Vec::new(),
            roles: Vec::new(),
            ignored_fields: Vec::new(),
            roles_to_train: vec!["assistant".into()],
            train_on_eos: TrainOnEos::default(),
            chat_template_kwargs: Vec::new(),
            on_bad_record: BadRecord::default(),
            max_bad_records: 0,
            chat_template_path: PathBuf::new(),
        }
    }
}

fn is_assistant(roles: &[String]) -> bool {
    roles == ["assistant"]
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// One document, and the line on which it starts.
#[derive(Debug, PartialEq)]
pub struct Document {
    /// The content of the document. Lines of a plain text end with `
    /// `.
    pub content: Content,
    /// The number of bytes of its record.
    pub bytes: usize,
    /// The line of the file on which it starts, from 1.
    pub line: u64,
    /// The unit of the file that has the document, counted from 0. Parts of a preparation divide a file by units.
    pub unit: u64,
}

/// Reads the documents of one file in order; see [`documents`].
pub struct DocumentReader {
    path: PathBuf,
    input: Input,
    /// The file that `input` reads.
    file: HashedFile,
    form: Form,
    mapping: Mapping,
    units: Units,
    /// The number of the line or record that was read last, from 1.
    line: u64,
    finished: bool,
}

/// The reader of pieces of a file.
enum Input {
    /// Reads lines, or the whole text.
    Text(Box<dyn BufRead + Send>),
    Json(Box<dyn BufRead + Send>, JsonValues),
    Csv(Box<csv::Reader<Box<dyn BufRead + Send>>>, Vec<String>),
    Table(Rows),
    Tokens(MegatronReader),
}

enum Form {
    Lines,
    Whole,
    Records { field: String, formatting: Formatting },
    Tokens,
}

/// A piece of a file, which is one document.
enum Piece {
    Text(String),
    Object(Map<String, Value>),
    Tokens(Vec<u32>),
}

impl Piece {
    /// Estimates the number of bytes that the piece has in the file.
    fn bytes(&self) -> usize {
        match self {
            Piece::Text(text) => text.len(),
            Piece::Object(record) => size(record),
            Piece::Tokens(ids) => 4 * ids.len(),
        }
    }
}

/// The reason why a document was not read.
pub(super) enum Failure {
    /// The record cannot be used, but the next record may be usable.
    Record(Error),
    /// The rest of the file cannot be read.
    File(Error),
}

impl Failure {
    pub(super) fn into_error(self) -> Error {
        match self {
            Failure::Record(error) | Failure::File(error) => error,
        }
    }
}

/// Returns the formatting of the records of `path`, from its first record. Plain text files have the formatting of plain text.
pub fn formatting(path: &Path, options: &SourceOptions) -> Result<Formatting> {
    if Kind::of(path)?.0 == Kind::Megatron {
        // The index is not read, because its size grows with the data.
        return Ok(Formatting::Tokens);
    }
    let mut reader = documents(path, options)?;
    loop {
        match reader.form {
            Form::Lines | Form::Whole => return Ok(Formatting::Text),
            Form::Tokens => return Ok(Formatting::Tokens),
            Form::Records { formatting, .. } if formatting != Formatting::Auto => return Ok(formatting),
            Form::Records { .. } => {}
        }
        match reader.next_or_failure() {
            Some(Err(Failure::Record(_))) if options.on_bad_record == BadRecord::Skip => {}
            Some(Err(failure)) => return Err(failure.into_error()),
            Some(Ok(_)) => {}
            None => return Ok(Formatting::Text),
        }
    }
}

/// Returns the fields of the first record of `path`, whatever their names are; `None` for a file without records.
pub fn first_record(path: &Path) -> Result<Option<Map<String, Value>>> {
    let mut reader = documents(path, &SourceOptions::default())?;
    if !matches!(reader.form, Form::Records { .. }) {
        return Ok(None);
    }
    loop {
        match reader.piece().map_err(Failure::into_error)? {
            Some(Piece::Text(text)) if text.trim().is_empty() => {}
            Some(Piece::Text(text)) => {
                return Ok(json_text::parse(&text).ok().and_then(|value| value.as_object().cloned()));
            }
            Some(Piece::Object(record)) => return Ok(Some(record)),
            Some(Piece::Tokens(_)) | None => return Ok(None),
        }
    }
}

/// Opens `path` to read its documents. The file name determines the format; unknown names are an error.
pub fn documents(path: &Path, options: &SourceOptions) -> Result<DocumentReader> {
    // If `text_field` is set, the records are texts, even if they have other fields.
    let formatting = match options.formatting {
        Formatting::Auto if options.text_field != SourceOptions::default().text_field => Formatting::Text,
        formatting => formatting,
    };
    documents_in(Units::all(), path, formatting, options)
}

/// Opens only the `units` of a file, with records of this `formatting`; otherwise like [`documents`].
pub(super) fn documents_in(
    units: Units,
    path: &Path,
    formatting: Formatting,
    options: &SourceOptions,
) -> Result<DocumentReader> {
    let (kind, compression) = Kind::of(path)?;
    let unreadable = |reason: String| Error::Data(format!("{}: {reason}", path.display()));
    let mapping = Mapping::parse(&options.fields, &options.roles).map_err(Error::Config)?;
    let file = HashedFile::open(path).map_err(|error| unreadable(error.to_string()))?;
    let bytes = || {
        let size = std::fs::metadata(path).and_then(|found| unpack(file.clone(), found.len(), compression));
        size.map_err(|error| unreadable(error.to_string()))
    };
    let table = |format| {
        let file = File::open(path).map_err(|error| error.to_string());
        file.and_then(|file| catch_panics(|| Rows::open(file, format))).map(Input::Table).map_err(unreadable)
    };
    let records = Form::Records { field: options.text_field.clone(), formatting };
    let (input, form) = match (kind, options.text_documents) {
        (Kind::Text, Documents::Line) => (Input::Text(bytes()?), Form::Lines),
        (Kind::Text, Documents::File) => (Input::Text(bytes()?), Form::Whole),
        (Kind::JsonLines, _) => (Input::Text(bytes()?), records),
        (Kind::Json, _) => (Input::Json(bytes()?, JsonValues::default()), records),
        (Kind::Csv(delimiter), _) => {
            let mut reader = csv::ReaderBuilder::new().delimiter(delimiter).from_reader(bytes()?);
            let header = reader.headers().map_err(|error| unreadable(error.to_string()))?;
            let mut names: Vec<String> = header.iter().map(str::to_string).collect();
            if let Some(first) = names.first_mut() {
                *first = first.trim_start_matches('\u{feff}').to_string();
            }
            (Input::Csv(Box::new(reader), names), records)
        }
        (Kind::Parquet, _) => (table(Format::Parquet)?, records),
        (Kind::Arrow, _) => (table(Format::Arrow)?, records),
        (Kind::Megatron, _) => (Input::Tokens(MegatronReader::open(path)?), Form::Tokens),
    };
    Ok(DocumentReader { path: path.to_path_buf(), input, file, form, mapping, units, line: 0, finished: false })
}

impl DocumentReader {
    /// Returns the number of units that were read so far.
    pub(super) fn units(&self) -> u64 {
        self.units.end()
    }

    /// Returns the size and SHA-256 of the file.
    pub fn finish(self) -> Result<(u64, String)> {
        self.file.finish().map_err(Error::io(&self.path))
    }

    fn wrong(&self, reason: impl fmt::Display) -> Error {
        Error::Data(format!("{}:{}: {reason}", self.path.display(), self.line))
    }

    fn record_failure(&self, reason: impl fmt::Display) -> Failure {
        Failure::Record(self.wrong(reason))
    }

    fn file_failure(&self, reason: impl fmt::Display) -> Failure {
        Failure::File(self.wrong(reason))
    }

    /// Returns the next piece of the file; `None` at its end.
    fn piece(&mut self) -> Result<Option<Piece>, Failure> {
        let line = self.line + 1;
        let failed = |path: &Path, line: u64, reason: &dyn fmt::Display| {
            Failure::File(Error::Data(format!("{}:{line}: {reason}", path.display())))
        };
        match &mut self.input {
            Input::Text(_) => Ok(self.text()?.map(Piece::Text)),
            Input::Json(input, values) => match values.next(input.as_mut(), MAX_DOCUMENT_BYTES) {
                Ok(None) => Ok(None),
                Ok(Some((bytes, line))) => {
                    self.line = line;
                    let text = String::from_utf8(bytes).map_err(|error| self.not_utf8(&error))?;
                    Ok(Some(Piece::Text(text)))
                }
                Err(reason) => Err(failed(&self.path, values.line, &reason)),
            },
            Input::Csv(reader, names) => {
                let mut record = csv::StringRecord::new();
                self.line = reader.position().line();
                match reader.read_record(&mut record) {
                    Ok(false) => Ok(None),
                    Ok(true) => {
                        let fields = names.iter().cloned().zip(record.iter().map(|text| text.into()));
                        Ok(Some(Piece::Object(fields.collect())))
                    }
                    Err(error) if error.is_io_error() => Err(failed(&self.path, line, &error)),
                    Err(error) => Err(self.record_failure(error)),
                }
            }
            Input::Table(rows) => {
                self.line = line;
                match catch_panics(|| rows.next().transpose()) {
                    Ok(record) => Ok(record.map(Piece::Object)),
                    Err(reason) => Err(failed(&self.path, line, &reason)),
                }
            }
            Input::Tokens(reader) => {
                self.line = line;
                reader
                    .next()
                    .map(|found| found.map(|(ids, _)| Piece::Tokens(ids)))
                    .map_err(|reason| failed(&self.path, line, &reason))
            }
        }
    }

    /// Reads up to the end of the line; for [`Form::Whole`], up to the end of the file. Returns `None` at the end of the file.
    fn text(&mut self) -> Result<Option<String>, Failure> {
        let Input::Text(input) = &mut self.input else { unreachable!("only text has lines") };
        self.line += 1;
        let mut bytes = Vec::new();
        let mut limited = input.by_ref().take(MAX_DOCUMENT_BYTES + 1);
        let (read, whole) = match self.form {
            Form::Whole => (limited.read_to_end(&mut bytes), true),
            _ => (limited.read_until(b'\n', &mut bytes), false),
        };
        read.map_err(|e| self.file_failure(format!("cannot be read further: {e}")))?;
        if bytes.is_empty() {
            return Ok(None);
        }
        if bytes.len() as u64 > MAX_DOCUMENT_BYTES {
            let advice = if whole { "; set text_documents = \"line\", or split the file" } else { "" };
            return Err(self.file_failure(format!("a document of more than {} MiB{advice}", MAX_DOCUMENT_BYTES >> 20)));
        }
        if self.line == 1 && bytes.starts_with(b"\xEF\xBB\xBF") {
            bytes.drain(..3);
        }
        let text = String::from_utf8(bytes).map_err(|e| self.not_utf8(&e))?;
        if text.contains('\0') {
            self.line += lines_before(text.as_bytes(), text.find('\0').unwrap_or(0));
            return Err(self.record_failure("a zero byte; the file must be plain UTF-8 text"));
        }
        Ok(Some(if whole {
            text.replace("\r\n", "\n")
        } else {
            let line = text.strip_suffix('\n').unwrap_or(&text);
            line.strip_suffix('\r').unwrap_or(line).to_string()
        }))
    }

    /// Adds the type of a column to `reason`, if the reason says that this column is missing and columns of this type cannot be read.
    fn with_type(&self, reason: String) -> String {
        let Input::Table(rows) = &self.input else { return reason };
        let name =
            reason.split("field `").nth(1).and_then(|rest| rest.split_once("` is missing")).map(|(name, _)| name);
        match name.and_then(|name| rows.unread_type(name)) {
            Some(kind) => format!("{reason}; its column has the type {kind}, which is not read: write it as text"),
            None => reason,
        }
    }

    fn not_utf8(&mut self, error: &std::string::FromUtf8Error) -> Failure {
        let (bytes, at) = (error.as_bytes(), error.utf8_error().valid_up_to());
        self.line += lines_before(bytes, at);
        let column = at - bytes[..at].iter().rposition(|&b| b == b'\n').map_or(0, |newline| newline + 1);
        self.record_failure(format!("byte {} of the line (0x{:02x}) is not UTF-8", column + 1, bytes[at]))
    }

    fn next_document(&mut self) -> Result<Option<Document>, Failure> {
        loop {
            let piece = match self.piece() {
                Ok(Some(piece)) => piece,
                Ok(None) => return Ok(None),
                // The failure is reported by the part that tokenizes this unit.
                Err(Failure::Record(_)) if !self.units.has_next() => continue,
                Err(failure) => return Err(failure),
            };
            let (bytes, line) = (piece.bytes(), self.line);
            let Some(unit) = self.units.take(bytes) else { continue };
            let content = match (piece, &mut self.form) {
                (Piece::Text(text), _) if text.trim().is_empty() => continue,
                (Piece::Text(text), Form::Records { field, formatting }) => {
                    json_content(&text, field, formatting, &self.mapping)
                }
                (Piece::Text(text), _) => Ok(Content::Text(text)),
                (Piece::Object(record), Form::Records { field, formatting }) => {
                    content(record, field, formatting, &self.mapping)
                }
                (Piece::Object(_), _) => unreachable!("a table holds records"),
                (Piece::Tokens(ids), _) => Ok(Content::Tokens { learned: vec![true; ids.len()], ids }),
            };
            match content.map_err(|reason| self.record_failure(self.with_type(reason)))? {
                Content::Text(text) if text.is_empty() => {}
                Content::Tokens { ids, .. } if ids.is_empty() => {}
                content => return Ok(Some(Document { content, bytes, line, unit })),
            }
        }
    }

    /// Returns the next document, or the reason why it cannot be read. After a failure of the file, there are no more documents.
    pub(super) fn next_or_failure(&mut self) -> Option<Result<Document, Failure>> {
        if self.finished {
            return None;
        }
        let next = self.next_document().transpose();
        self.finished = matches!(next, None | Some(Err(Failure::File(_))));
        next
    }
}

impl Iterator for DocumentReader {
    type Item = Result<Document>;

    /// Returns the next document. After an error, there are no more documents.
    fn next(&mut self) -> Option<Self::Item> {
        let next = self.next_or_failure()?.map_err(Failure::into_error);
        self.finished |= next.is_err();
        Some(next)
    }
}

fn lines_before(bytes: &[u8], at: usize) -> u64 {
    bytes[..at].iter().filter(|&&b| b == b'\n').count() as u64
}

#[cfg(test)]
#[path = "source_tests.rs"]
mod tests;
