//! Joins the parts of a preparation. The result equals the tokens that a single process writes.
//!
//! Each part is a folder of tokens, with one more file that lists the number of its documents in each unit of each source. Joining reads the units in
//! the order of the sources, each unit from the part that has it, and writes their documents as if they were tokenized now.

use std::fs::File;
use std::path::{Path, PathBuf};

use tracing::warn;

use crate::encode::{Encoded, LeftOut};
use crate::parts::{Division, Part, SourceUnits};
use crate::shards::{SourceFile, TokenDataset};
use crate::source::{BadRecord, SourceOptions};
use crate::token_writer::TokenWriter;
use ottava_common::hash::unseal;
use ottava_common::{Error, Result, input, interrupt};

/// The name of the file that lists the units of a part.
pub(super) const PART: &str = "part.json";

/// The maximum size of [`PART`], which has about ten bytes for each unit of a megabyte.
const MAX_PART_BYTES: u64 = 1 << 30;

/// The prefix of the names of folders with parts.
const PREFIX: &str = "parts-";

/// A complete part.
pub(super) struct OpenPart {
    pub(super) tokens: TokenDataset,
    sources: Vec<SourceUnits>,
}

/// The folder with the parts of a preparation.
pub(super) struct PartFolder {
    pub(super) folder: PathBuf,
    pub(super) parts: usize,
    key: String,
}

impl PartFolder {
    /// Returns the folder in `cache` for `parts` parts of the preparation with this `key`. The folder need not exist.
    pub(super) fn new(cache: &Path, key: &str, parts: usize) -> PartFolder {
        let folder = cache.join(format!("{PREFIX}{}-of-{parts}", &key[..16]));
        PartFolder { folder, parts, key: key.into() }
    }

    /// Returns the existing folders of this preparation. There are several if it was started with several numbers of parts.
    pub(super) fn all(cache: &Path, key: &str) -> Vec<PartFolder> {
        let prefix = format!("{PREFIX}{}-of-", &key[..16]);
        let parts = names(cache).into_iter().filter_map(|name| name.strip_prefix(&prefix)?.parse().ok());
        parts.map(|parts| PartFolder::new(cache, key, parts)).collect()
    }

    /// Returns the key of a part of the preparation with this `key`.
    pub(super) fn key(key: &str, part: Part) -> String {
        format!("{key}, part {part}")
    }

    /// Returns the folder of part `number`, counted from 1.
    pub(super) fn path(&self, number: usize) -> PathBuf {
        self.folder.join(format!("part-{number:05}"))
    }

    /// Returns the numbers of the parts that do not exist yet.
    pub(super) fn missing(&self) -> Vec<usize> {
        (1..=self.parts).filter(|&number| !self.path(number).exists()).collect()
    }

    /// Returns a sentence that names the missing parts.
    pub(super) fn describe_missing(&self) -> String {
        let missing = self.missing();
        let numbers: Vec<String> = missing.iter().map(usize::to_string).collect();
        let (word, first) = (if missing.len() == 1 { "part" } else { "parts" }, missing.first().unwrap_or(&1));
        format!(
            "{}: {word} {} of {} missing; prepare each with `ottava prepare RUN.toml --part {first}/{}`",
            self.folder.display(),
            numbers.join(", "),
            self.parts,
            self.parts
        )
    }

    /// Opens part `number`, if it exists. A damaged part is removed, with a warning.
    pub(super) fn open(&self, number: usize) -> Option<OpenPart> {
        let path = self.path(number);
        if !path.exists() {
            return None;
        }
        self.open_or_remove(number).inspect_err(|error| warn!("{error}")).ok()
    }

    /// Opens part `number`, which must exist. Errors with [`Error::Data`] if it is damaged or was removed.
    pub(super) fn expect(&self, number: usize) -> Result<OpenPart> {
        let path = self.path(number);
        if !path.exists() {
            return Err(Error::Data(format!("{}: it was removed while it is in use; run again", path.display())));
        }
        self.open_or_remove(number)
    }

    fn open_or_remove(&self, number: usize) -> Result<OpenPart> {
        self.read(number).map_err(|error| {
            // If the part cannot be removed, the next start reports the same error.
            let _ = std::fs::remove_dir_all(self.path(number));
            let of = self.parts;
            Error::Data(format!(
                "{error}; this part was changed or damaged, and is removed; prepare it again with `ottava prepare RUN.toml --part {number}/{of}`"
            ))
        })
    }

    fn read(&self, number: usize) -> Result<OpenPart> {
        let path = self.path(number);
        let tokens = TokenDataset::open_part(&path)?;
        let path = path.join(PART);
        let wrong = |reason: String| Error::Data(format!("{}: {reason}", path.display()));
        let text = input::read(&path, MAX_PART_BYTES).map_err(Error::io(&path))?;
        let mut record = unseal(&text).map_err(wrong)?;
        let sources: Vec<SourceUnits> =
            serde_json::from_value(record["sources"].take()).map_err(|error| wrong(error.to_string()))?;
        let documents = sources.iter().flat_map(|source| &source.documents).map(|(_, count)| count).sum::<u64>();
        let part = Part { number, of: self.parts };
        match documents == tokens.meta().documents && tokens.meta().key == PartFolder::key(&self.key, part) {
            true => Ok(OpenPart { tokens, sources }),
            false => Err(wrong("it belongs to other tokens".into())),
        }
    }

    /// Finds parts among `missing` that exist, but were prepared from earlier contents of the same files. Returns a sentence for each.
    pub(super) fn outdated(&self, missing: &[usize], sources: &[SourceFile]) -> Vec<String> {
        let cache = self.folder.parent().unwrap_or(Path::new("."));
        let ending = format!("-of-{}", self.parts);
        let others: Vec<PathBuf> = names(cache)
            .into_iter()
            .filter(|name| name.starts_with(PREFIX) && name.ends_with(&ending))
            .map(|name| cache.join(name))
            .filter(|folder| *folder != self.folder)
            .collect();
        let find = |&number: &usize| {
            others.iter().find_map(|folder| {
                let other = PartFolder { folder: folder.clone(), parts: self.parts, key: String::new() };
                let tokens = TokenDataset::open_part(&other.path(number)).ok()?;
                let files = &tokens.meta().sources;
                let same_files = files.iter().map(|file| &file.path).eq(sources.iter().map(|file| &file.path));
                let changed = files.iter().zip(sources).find(|(file, now)| same_files && file.sha256 != now.sha256)?;
                let part = Part { number, of: self.parts };
                Some(format!("{} has changed since part {part} was prepared; prepare that part again", changed.1.path))
            })
        };
        missing.iter().filter_map(find).collect()
    }

    /// Locks the parts until the result is dropped; `None` if the file system has no locks.
    pub(super) fn lock(&self) -> Option<File> {
        let folder = File::open(&self.folder).ok()?;
        folder.lock().ok()?;
        Some(folder)
    }

    /// Removes all parts. If this fails, the next opening of the tokens removes the remaining parts.
    pub(super) fn remove(&self) {
        if let Err(error) = std::fs::remove_dir_all(&self.folder) {
            tracing::debug!("{}: {error}", self.folder.display());
        }
    }
}

/// Returns the names of the entries of `folder`.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Writes the documents of all parts in the order of the sources, and stores the numbers of documents in `files`. `divisions` says which parts have
/// the units of each source.
///
/// Errors with [`Error::Data`] if a part is damaged, or if all parts together leave out more records of a file than `options` allow.
pub(super) fn join(
    parts: &PartFolder,
    divisions: &[Division],
    files: &mut [SourceFile],
    options: &SourceOptions,
    writer: &mut TokenWriter,
) -> Result<()> {
    let all = (1..=parts.parts).map(|number| parts.expect(number)).collect::<Result<Vec<_>>>()?;
    let wrong = |number: usize| {
        let path = parts.path(number);
        Error::Data(format!(
            "{}: its units are not those of the other parts; delete it and prepare it again",
            path.display()
        ))
    };
    // The number of the next document of each part.
    let mut next = vec![0; all.len()];
    for (source, (division, file)) in divisions.iter().zip(files).enumerate() {
        let of_part = |number: usize| all[number - 1].sources.get(source).ok_or_else(|| wrong(number));
        let (first, mut bad_records) = (*division.owners().start(), 0);
        let units = of_part(first)?.units;
        let mut unread = Vec::new();
        for number in division.owners() {
            let of_source = of_part(number)?;
            if of_source.units != units {
                return Err(wrong(number));
            }
            bad_records += of_source.bad_records;
            unread.push(of_source.documents.iter().peekable());
        }
        if options.on_bad_record == BadRecord::Skip && bad_records > options.max_bad_records {
            return Err(Error::Data(format!(
                "{}: {bad_records} records cannot be used, and `data.records.max_bad_records` allows {} in a file",
                file.path, options.max_bad_records
            )));
        }
        for unit in 0..units {
            let owner = division.owner(unit);
            let Some((_, count)) = unread[owner - first].next_if(|(of, _)| *of == unit) else { continue };
            file.documents += count;
            for _ in 0..*count {
                interrupt::check("joining parts")?;
                let (tokens, document) = (&all[owner - 1].tokens, next[owner - 1]);
                next[owner - 1] += 1;
                writer.push(&Encoded {
                    tokens: tokens.tokens(document, 0..tokens.document_len(document)?)?,
                    bytes: tokens.document_bytes(document)? as usize,
                    left_out: LeftOut::default(),
                    label: tokens.label(document)?,
                    margin: tokens.margin(document)?,
                    columns: tokens.column_json(document)?,
                })?;
            }
        }
        if let Some(at) = unread.iter_mut().position(|rest| rest.peek().is_some()) {
            return Err(wrong(first + at));
        }
    }
    Ok(())
}
