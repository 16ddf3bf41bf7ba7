//! The files of a data set: formats by file name, folders, and patterns.

use std::path::{Path, PathBuf};

use crate::splits::{self, SplitUse};
use ottava_common::{Error, Result, input};
use ottava_recipe::glob;

/// The maximum number of files in a folder or of a pattern.
const MAX_FILES: usize = 100_000;

/// The maximum depth of nested folders.
const MAX_DEPTH: usize = 16;

/// The format of a data file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Plain text: `.txt` and `.md`.
    Text,
    /// `.jsonl`: a JSON object in each line.
    JsonLines,
    /// `.json`: a list of objects, or objects one after another.
    Json,
    /// `.csv` and `.tsv`, with the names of the fields in the first line. The value is the byte between fields.
    Csv(u8),
    /// `.parquet`.
    Parquet,
    /// `.arrow`.
    Arrow,
    /// `.bin` with its `.idx`: tokens of Megatron-LM.
    Megatron,
}

/// The compression of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compression {
    None,
    Gzip,
    Zstd,
}

const EXTENSIONS: &[(&str, Kind)] = &[
    ("txt", Kind::Text),
    ("md", Kind::Text),
    ("jsonl", Kind::JsonLines),
    ("ndjson", Kind::JsonLines),
    ("json", Kind::Json),
    ("csv", Kind::Csv(b',')),
    ("tsv", Kind::Csv(b'\t')),
    ("parquet", Kind::Parquet),
    ("arrow", Kind::Arrow),
    ("bin", Kind::Megatron),
    ("idx", Kind::Megatron),
];

/// The names of files in a data set that describe its other files.
const DESCRIPTIONS: &[&str] = &["dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"];

impl Kind {
    /// Returns the format of `path`, from its name.
    pub(super) fn of(path: &Path) -> Result<(Kind, Compression)> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
        let (plain, compression) = match (name.strip_suffix(".gz"), name.strip_suffix(".zst")) {
            (Some(plain), _) => (plain, Compression::Gzip),
            (_, Some(plain)) => (plain, Compression::Zstd),
            _ => (name.as_str(), Compression::None),
        };
        let extension = plain.rsplit_once('.').map_or("", |(_, extension)| extension);
        let kind = EXTENSIONS.iter().find(|(known, _)| *known == extension).map(|(_, kind)| *kind);
        let wrong = |reason: &str| Err(Error::Data(format!("{}: {reason}", path.display())));
        match kind {
            Some(Kind::Parquet | Kind::Arrow | Kind::Megatron) if compression != Compression::None => {
                wrong("such a file is not read compressed as a whole; unpack it")
            }
            Some(kind) => Ok((kind, compression)),
            None => wrong(
                "unknown kind of data; name a .txt, .md, .jsonl, .json, .csv or .tsv file, each also as .gz or .zst, a .parquet or .arrow \
                 file, a .bin with its .idx, a folder, a pattern such as data/*.jsonl, or a data set of the Hugging Face Hub, OWNER/NAME or, for one \
                 of its splits, OWNER/NAME?split=NAME",
            ),
        }
    }

    /// Whether files of this kind hold records with fields.
    fn has_fields(self) -> bool {
        !matches!(self, Kind::Text)
    }
}

/// Returns the files that `sources` name, in the order of `sources`: files, all files of folders, and all files of patterns, sorted by path. If a
/// folder has several splits, only the files for `use_` are returned.
///
/// Errors with [`Error::Data`] if a folder or pattern has no data, or if a folder has several kinds of data.
pub fn expand(sources: &[PathBuf], use_: SplitUse) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for source in sources {
        let wrong = |reason: String| Error::Data(format!("{}: {reason}", source.display()));
        if source.is_dir() {
            files.extend(of_folder(source, use_)?);
        } else if source.to_string_lossy().contains(['*', '?']) && !source.exists() {
            let found = of_pattern(source)?;
            if found.is_empty() {
                return Err(wrong("no file has a name of this pattern".into()));
            }
            files.extend(found);
        } else {
            if !source.exists() && input::is_hub_id(source) && Kind::of(source).is_err() {
                return Err(wrong(format!(
                    "no such file; if this is a data set of the Hugging Face Hub, download it with `ottava download --dataset {}` and name the \
                     folder that it prints",
                    source.display()
                )));
            }
            let (kind, _) = Kind::of(source)?;
            // The pair of files counts once, whichever of the two is named.
            let file = if kind == Kind::Megatron { source.with_extension("bin") } else { source.clone() };
            input::open(&file).map_err(|error| cannot_open(&file, &error))?;
            files.push(file);
        }
    }
    Ok(files)
}

/// Returns the error for a file that cannot be opened.
fn cannot_open(file: &Path, error: &std::io::Error) -> Error {
    let current = std::env::current_dir().ok().filter(|_| !file.exists() && file.is_relative());
    let hint = current.map_or(String::new(), |current| {
        format!("; relative paths start at the folder that the command runs in, {}", current.display())
    });
    Error::Data(format!("{}: {error}{hint}", file.display()))
}

/// Returns the data files of a folder and of the folders in it.
fn of_folder(folder: &Path, use_: SplitUse) -> Result<Vec<PathBuf>> {
    let mut all = Vec::new();
    walk(folder, 0, &mut all)?;
    let wrong = |reason: String| Error::Data(format!("{}: {reason}", folder.display()));
    let is_description =
        |path: &Path| DESCRIPTIONS.iter().any(|name| path.file_name().is_some_and(|file| file == *name));
    let mut found: Vec<(Kind, PathBuf)> = Vec::new();
    for path in all.into_iter().filter(|path| !is_description(path)) {
        let Ok((kind, _)) = Kind::of(&path) else { continue };
        if kind != Kind::Megatron
            || path.extension().is_some_and(|extension| extension == "bin") && path.with_extension("idx").exists()
        {
            found.push((kind, path));
        }
    }
    // A README beside records is not data.
    if found.iter().any(|(kind, _)| kind.has_fields()) {
        found.retain(|(kind, _)| kind.has_fields());
    }
    let chosen = splits::choose(folder, found.iter().map(|(_, path)| path.as_path()).collect(), use_).map_err(wrong)?;
    found.retain(|(_, path)| chosen.contains(path));
    let Some(&(first, _)) = found.first() else { return Err(wrong("the folder holds no file of data".into())) };
    if let Some((_, other)) = found.iter().find(|(kind, _)| *kind != first) {
        let (one, other) = (found[0].1.display(), other.display());
        return Err(wrong(format!(
            "the folder holds several kinds of data, such as {one} and {other}; name a pattern, such as data/*.jsonl"
        )));
    }
    Ok(found.into_iter().map(|(_, path)| path).collect())
}

/// Returns the files whose paths match a pattern. `*` and `?` match characters within a name.
fn of_pattern(pattern: &Path) -> Result<Vec<PathBuf>> {
    let mut found = vec![PathBuf::new()];
    for part in pattern.components() {
        let text = part.as_os_str().to_string_lossy();
        if !text.contains(['*', '?']) {
            found.iter_mut().for_each(|path| path.push(part));
            continue;
        }
        let mut next = Vec::new();
        for folder in found {
            let folder = if folder.as_os_str().is_empty() { PathBuf::from(".") } else { folder };
            let Ok(entries) = std::fs::read_dir(&folder) else { continue };
            let names = entries.flatten().map(|entry| entry.file_name());
            let fitting =
                names.filter(|name| !name.to_string_lossy().starts_with('.') && glob(&text, &name.to_string_lossy()));
            next.extend(fitting.map(|name| folder.join(name)));
            limit(&next, pattern)?;
        }
        found = next;
    }
    found.retain(|path| path.is_file() && path.extension().is_none_or(|extension| extension != "idx"));
    found.sort();
    found.iter().try_for_each(|path| Kind::of(path).map(drop))?;
    Ok(found)
}

fn walk(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) -> Result<()> {
    let entries = std::fs::read_dir(folder).map_err(|error| Error::Data(format!("{}: {error}", folder.display())))?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    // Hidden files are skipped, as in the library `datasets`.
    let is_hidden = |name: &str| name.starts_with('.') || name.starts_with("__");
    paths.retain(|path| !is_hidden(&path.file_name().unwrap_or_default().to_string_lossy()));
    paths.sort();
    for path in paths {
        match path.is_dir() {
            true if depth < MAX_DEPTH => walk(&path, depth + 1, found)?,
            true => {}
            false => found.push(path),
        }
        limit(found, folder)?;
    }
    Ok(())
}

fn limit(found: &[PathBuf], source: &Path) -> Result<()> {
    match found.len() > MAX_FILES {
        true => Err(Error::Data(format!("{}: more than {MAX_FILES} files", source.display()))),
        false => Ok(()),
    }
}

#[cfg(test)]
#[path = "files_tests.rs"]
mod tests;
