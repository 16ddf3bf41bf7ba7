//! The records of a file that cannot be used, and the content that templates leave out. Neither is trained on.

use std::collections::BTreeMap;
use std::path::Path;

use tracing::warn;

use crate::encode::{Encoder, LeftOut};
use crate::source::{BadRecord, SourceOptions};
use ottava_common::{Error, Result};

/// The records of a file that are skipped because they cannot be used.
pub(super) struct BadRecords {
    skips: bool,
    most: u64,
    count: u64,
    first: Option<Error>,
}

impl BadRecords {
    pub(super) fn new(options: &SourceOptions) -> BadRecords {
        let skips = options.on_bad_record == BadRecord::Skip;
        BadRecords { skips, most: options.max_bad_records, count: 0, first: None }
    }

    /// Counts a bad record. Returns its error if bad records are errors, or if the file has too many of them.
    pub(super) fn skip(&mut self, error: Error) -> Result<()> {
        if !self.skips {
            return Err(error);
        }
        self.count += 1;
        if self.count > self.most {
            return Err(Error::Data(format!(
                "{error}; it is one bad record more than the {} that `data.records.max_bad_records` allows in a file",
                self.most
            )));
        }
        self.first.get_or_insert(error);
        Ok(())
    }

    /// Returns the number of skipped records.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    pub(super) fn warn(&self, source: &Path) {
        if let Some(first) = &self.first {
            warn!("{}: {} records cannot be used and are left out; the first: {first}", source.display(), self.count);
        }
    }
}

/// The content of a file's chats that templates leave out. Each entry has the number of records and the line of the first.
#[derive(Default)]
pub(super) struct LeftOutOfFile {
    fields: BTreeMap<String, (usize, u64)>,
    empty_answers: Option<(usize, u64)>,
    /// The number of chats whose turns are separate documents, and the line and message of the first such chat.
    split: Option<(usize, u64, usize)>,
}

impl LeftOutOfFile {
    pub(super) fn add(&mut self, left_out: &LeftOut, line: u64) {
        for field in &left_out.fields {
            self.fields.entry(field.clone()).or_insert((0, line)).0 += 1;
        }
        if let Some(message) = left_out.rewrites {
            self.split.get_or_insert((0, line, message)).0 += 1;
        }
        if left_out.empty_answers > 0 {
            self.empty_answers.get_or_insert((0, line)).0 += left_out.empty_answers;
        }
    }

    pub(super) fn warn(&self, source: &Path, encoder: &Encoder) {
        let source = source.display();
        for (field, (records, line)) in &self.fields {
            warn!(
                "{source}:{line}: the chat template {} does not read the field `{field}` of messages, so it is left out; \
                 {records} records have it",
                encoder.template_path().display()
            );
        }
        if let Some((count, line, message)) = self.split {
            warn!(
                "{source}:{line}: the chat template {} renders what precedes message {message} differently once more messages follow, so each \
                 turn that is trained on is a document with the messages before it; this is the first of {count} such conversations",
                encoder.template_path().display()
            );
        }
        if let Some((count, line)) = self.empty_answers {
            warn!(
                "{source}:{line}: {count} messages of the assistant are empty, and are no targets; this is the first"
            );
        }
    }
}
