//! Names of repositories on the Hub.

use ottava_common::{Error, Result};
use std::fmt;
use std::path::{Path, PathBuf};

/// The beginning of an address of a data set.
const DATASETS: &str = "hf://datasets/";

/// The kind of a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A model or an adapter.
    Model,
    /// A data set.
    Dataset,
}

impl Kind {
    /// Returns the name of the kind in addresses of the Hub's API, and in folders of the cache.
    pub fn plural(self) -> &'static str {
        match self {
            Kind::Model => "models",
            Kind::Dataset => "datasets",
        }
    }

    /// Returns what is before the name in addresses of pages and files.
    pub(crate) fn prefix(self) -> &'static str {
        match self {
            Kind::Model => "",
            Kind::Dataset => "datasets/",
        }
    }

    /// Returns the words of messages.
    pub fn words(self) -> &'static str {
        match self {
            Kind::Model => "model",
            Kind::Dataset => "data set",
        }
    }
}

/// The name of a repository, with a revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepoId {
    /// Whether it is a model or a data set.
    pub kind: Kind,
    /// The name, `OWNER/NAME`, or `NAME` for an old repository.
    pub name: String,
    /// The branch, tag or commit that the user named.
    named: Option<String>,
    /// Whether the name was read where a path may stand too.
    or_path: bool,
}

/// Whether `text` can be the name of an owner, or a name without its owner.
fn is_word(text: &str) -> bool {
    let is_known = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    !text.is_empty() && text.len() <= 96 && !text.starts_with(['.', '-']) && text.chars().all(is_known)
}

/// Whether `text` is the name of a repository, `OWNER/NAME`.
pub fn is_name(text: &str) -> bool {
    text.split_once('/').is_some_and(|(owner, name)| is_word(owner) && is_word(name))
}

/// Whether `text` can be the name of a branch, tag or commit.
fn is_revision(text: &str) -> bool {
    let is_known = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
    !text.is_empty() && text.chars().all(is_known) && !text.contains("..") && !text.starts_with('/')
}

impl RepoId {
    /// Reads `OWNER/NAME` or `OWNER/NAME@REVISION`. Old repositories have a name without an owner, such as `gpt2`. Returns `None` for other texts.
    pub fn parse(kind: Kind, text: &str) -> Option<RepoId> {
        let (name, revision) = text.split_once('@').map_or((text, None), |(name, revision)| (name, Some(revision)));
        let is_valid = (is_name(name) || is_word(name)) && revision.is_none_or(is_revision);
        is_valid.then(|| RepoId { kind, name: name.to_string(), named: revision.map(str::to_string), or_path: false })
    }

    /// Reads the name that `path` is, unless a file or folder has this path. A path is also no name if a folder with the owner's name exists, so that
    /// a misspelled path is not looked up on the Hub.
    pub fn of_path(kind: Kind, path: &Path) -> Option<RepoId> {
        let id = RepoId::parse(kind, path.to_str()?)?;
        let owner = id.name.split('/').next().unwrap_or_default();
        let is_file = !id.name.contains('/') && has_ending_of_file(&id.name);
        (!is_file && !path.exists() && !Path::new(owner).exists()).then_some(RepoId { or_path: true, ..id })
    }

    /// Returns the name of the repository whose page has the address `text`; `None` for other texts, and for the address of a file.
    pub fn name_of_page(text: &str) -> Option<String> {
        let rest = text.strip_prefix("https://huggingface.co/").or(text.strip_prefix("https://hf.co/"))?;
        let rest = rest.strip_prefix("datasets/").unwrap_or(rest);
        let parts: Vec<&str> = rest.split(['/', '?', '#']).filter(|part| !part.is_empty()).collect();
        let is_page = !matches!(parts.get(2), Some(&"resolve" | &"raw" | &"blob"));
        let name = format!("{}/{}", parts.first()?, parts.get(1)?);
        (is_page && is_name(&name)).then_some(name)
    }

    /// Returns the repository of the other kind with this name.
    pub(crate) fn of_other_kind(&self) -> RepoId {
        RepoId { kind: if self.kind == Kind::Model { Kind::Dataset } else { Kind::Model }, ..self.clone() }
    }

    /// Returns the end of a message about a name that cannot be read: the name may be a misspelled path. Empty where no path may stand.
    pub(crate) fn path_hint(&self) -> String {
        let folder = std::env::current_dir().unwrap_or_default();
        match self.or_path {
            true => format!(
                "; if {self} is meant as a path: it does not exist in {}, the folder that the command runs in",
                folder.display()
            ),
            false => String::new(),
        }
    }

    /// Returns the revision: the one that the user named, or `main`.
    pub fn revision(&self) -> &str {
        self.named.as_deref().unwrap_or("main")
    }

    /// Returns the name with this `revision`, if the user named none.
    pub fn pinned(self, revision: Option<&str>) -> RepoId {
        RepoId { named: self.named.or(revision.map(str::to_string)), ..self }
    }

    /// Returns the name with the revision `commit`.
    pub(crate) fn at(self, commit: &str) -> RepoId {
        RepoId { named: Some(commit.to_string()), ..self }
    }

    /// Whether the revision is a commit, whose files never change.
    pub fn is_commit(&self) -> bool {
        is_commit(self.revision())
    }

    /// Returns the folder of the repository in the cache.
    pub fn folder(&self) -> PathBuf {
        PathBuf::from(format!("{}--{}", self.kind.plural(), self.name.replace('/', "--")))
    }

    /// Returns the repository and the commit of a file or folder in the cache; `None` for other paths.
    pub fn of_snapshot(path: &Path) -> Option<(RepoId, String)> {
        let parts: Vec<&str> = path.iter().filter_map(|part| part.to_str()).collect();
        let found = |at: usize| {
            let (folder, commit) = (parts.get(at.checked_sub(1)?)?, parts.get(at + 1)?);
            let kind = [Kind::Model, Kind::Dataset].into_iter().find(|kind| folder.starts_with(kind.plural()))?;
            let name = folder.strip_prefix(kind.plural())?.strip_prefix("--")?.replacen("--", "/", 1);
            Some((RepoId::parse(kind, &name).filter(|_| is_commit(commit))?, commit.to_string()))
        };
        // Folders above the cache and folders of the repository may have the same name.
        (0..parts.len()).rev().filter(|at| parts[*at] == "snapshots").find_map(found)
    }
}

impl fmt::Display for RepoId {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let revision = self.named.as_ref().map_or(String::new(), |revision| format!("@{revision}"));
        write!(f, "{}{revision}", self.name)
    }
}

/// Whether `text` is the SHA-1 of a commit.
pub(crate) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.chars().all(|c| c.is_ascii_hexdigit())
}

/// Files of a data set on the Hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataId {
    /// The data set.
    pub repo: RepoId,
    /// A path or pattern of files; empty for the files of a split.
    pub pattern: String,
    /// The configuration of the data set.
    pub config: Option<String>,
    /// The split.
    pub split: Option<String>,
}

impl DataId {
    /// Reads a data set in settings: `hf://datasets/OWNER/NAME@REVISION/PATTERN`, or `OWNER/NAME@REVISION?config=NAME&split=NAME`, where revision,
    /// pattern and query may be missing. In the first form, `/` in a revision is written `%2F`. Returns `None` for paths, which are neither.
    ///
    /// Errors with [`Error::Config`] for an address of another form.
    pub fn of_path(path: &Path) -> Result<Option<DataId>> {
        let Some(text) = path.to_str() else { return Ok(None) };
        let wrong = |why: &str| Error::Config(format!("{text}: {why}"));
        let Some(rest) = text.strip_prefix(DATASETS) else {
            if text.starts_with("hf://") {
                return Err(wrong("write a data set of the Hub as hf://datasets/OWNER/NAME@REVISION/PATTERN"));
            }
            let (name, query) = text.split_once('?').unwrap_or((text, ""));
            return match RepoId::of_path(Kind::Dataset, Path::new(name)).filter(|_| !has_data_ending(name)) {
                Some(repo) => DataId::with_query(repo, "", query).map(Some).map_err(|why| wrong(&why)),
                None => Ok(None),
            };
        };
        let (path, query) = rest
            .split_once("?config=")
            .map_or((rest, String::new()), |(path, query)| (path, format!("config={query}")));
        let (path, query) = match path.split_once("?split=") {
            Some((path, split)) if query.is_empty() => (path, format!("split={split}")),
            _ => (path, query),
        };
        let mut parts = path.splitn(3, '/');
        let (owner, name) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let pattern = parts.next().unwrap_or_default();
        let written = if name.is_empty() { owner.to_string() } else { format!("{owner}/{name}") };
        let repo = RepoId::parse(Kind::Dataset, &written.replace("%2F", "/"))
            .ok_or_else(|| wrong("a data set of the Hub is hf://datasets/OWNER/NAME@REVISION/PATTERN"))?;
        DataId::with_query(repo, pattern, &query).map(Some).map_err(|why| wrong(&why))
    }

    fn with_query(repo: RepoId, pattern: &str, query: &str) -> Result<DataId, String> {
        let mut id = DataId { repo, pattern: pattern.to_string(), config: None, split: None };
        for part in query.split('&').filter(|part| !part.is_empty()) {
            match part.split_once('=') {
                Some(("config", value)) => id.config = Some(value.to_string()),
                Some(("split", value)) if value.contains('[') => {
                    return Err(format!(
                        "`{value}` is a slice of a split, which is not supported; name the split alone"
                    ));
                }
                Some(("split", value)) => id.split = Some(value.to_string()),
                _ => return Err(format!("`{part}` is unknown; there are ?config=NAME and &split=NAME")),
            }
        }
        if !id.pattern.is_empty() && (id.config.is_some() || id.split.is_some()) {
            return Err("files are named, so `config` and `split` have no effect; remove them".into());
        }
        Ok(id)
    }
}

/// Whether `name` ends like a file with data.
fn has_data_ending(name: &str) -> bool {
    const ENDINGS: [&str; 11] =
        [".txt", ".md", ".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".bin", ".gz", ".zst"];
    ENDINGS.iter().any(|ending| name.to_ascii_lowercase().ends_with(ending))
}

/// Whether `name` ends like a file of a model, of data or of settings.
fn has_ending_of_file(name: &str) -> bool {
    const ENDINGS: [&str; 7] = [".safetensors", ".gguf", ".pt", ".pth", ".toml", ".yaml", ".yml"];
    has_data_ending(name) || ENDINGS.iter().any(|ending| name.to_ascii_lowercase().ends_with(ending))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_from_paths() {
        let id = |text| RepoId::parse(Kind::Model, text);
        assert_eq!(id("Qwen/Qwen3-0.6B@refs/pr/1").unwrap().revision(), "refs/pr/1");
        assert_eq!(id("gpt2@main").unwrap().folder(), Path::new("models--gpt2"));
        for text in ["a/b/c", "/a/b", "./a", "../a", "a/", "a/b@", "a/b@../c", "a b/c", "~/x"] {
            assert_eq!(id(text), None, "{text}");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        assert_eq!(RepoId::of_path(Kind::Model, &path), None);
        assert_eq!(RepoId::of_path(Kind::Model, Path::new("gpt2")).unwrap().name, "gpt2");
        // A folder of this crate, and files.
        for text in ["src", "model.gguf", "config.json", "a.jsonl"] {
            assert_eq!(RepoId::of_path(Kind::Model, Path::new(text)), None, "{text}");
        }
        // The sources of this crate: a misspelled file of an existing folder is no name.
        assert_eq!(RepoId::of_path(Kind::Model, Path::new("src/no-such")), None);
    }

    #[test]
    fn an_address_of_a_page_has_a_name() {
        let name = RepoId::name_of_page;
        for text in
            ["https://huggingface.co/a/b", "https://hf.co/datasets/a/b/", "https://huggingface.co/a/b/tree/main"]
        {
            assert_eq!(name(text).as_deref(), Some("a/b"), "{text}");
        }
        for text in
            ["https://huggingface.co/a", "https://other.org/a/b", "a/b", "https://huggingface.co/a/b/resolve/main/x"]
        {
            assert_eq!(name(text), None, "{text}");
        }
    }

    #[test]
    fn snapshots_name_their_commit() {
        let commit = "0123456789abcdef0123456789abcdef01234567";
        let path = format!("/cache/hub/models--Qwen--Qwen3--x/snapshots/{commit}/config.json");
        let (id, found) = RepoId::of_snapshot(Path::new(&path)).unwrap();
        assert_eq!((id.name.as_str(), found.as_str()), ("Qwen/Qwen3--x", commit));
        assert!(id.pinned(Some(commit)).is_commit());
        let below = format!("/backup/snapshots/2026/hub/datasets--a--b/snapshots/{commit}/snapshots/x.csv");
        assert_eq!(RepoId::of_snapshot(Path::new(&below)).unwrap().0.name, "a/b");
        let nested = format!("/models--x--y/snapshots/{commit}/hub/datasets--a--b/snapshots/{commit}/x.csv");
        assert_eq!(RepoId::of_snapshot(Path::new(&nested)).unwrap().0.name, "a/b");
        assert_eq!(RepoId::of_snapshot(Path::new("/snapshots/x")), None);
    }

    #[test]
    fn data_sets_have_a_revision_and_a_pattern_or_a_split() {
        let id = |text: &str| DataId::of_path(Path::new(text));
        let found = id("hf://datasets/a/b@v1/data/*.parquet").unwrap().unwrap();
        assert_eq!((found.repo.revision(), found.pattern.as_str()), ("v1", "data/*.parquet"));
        let found = id("a/b@v1?config=en&split=test").unwrap().unwrap();
        assert_eq!((found.config.as_deref(), found.split.as_deref()), (Some("en"), Some("test")));
        assert_eq!(id("hf://datasets/a/b?split=test").unwrap().unwrap().split.as_deref(), Some("test"));
        // A file keeps being a file, also if it does not exist.
        assert_eq!(id("a/b.jsonl").unwrap(), None);
        assert_eq!(id("squad?split=test").unwrap().unwrap().repo.name, "squad");
        assert_eq!(id("hf://datasets/squad").unwrap().unwrap().repo.name, "squad");
        for text in
            ["hf://a/b", "hf://datasets/", "a/b?rows=3", "a/b?split=train[:10]", "hf://datasets/a/b/x.csv?split=train"]
        {
            assert!(matches!(id(text), Err(Error::Config(_))), "{text}");
        }
    }
}
