//! The commits that names of the Hub stand for, so that all ranks of a run and a resumed run read the same files.

use crate::RepoId;
use crate::id::is_commit;
use std::collections::BTreeMap;

/// The commit of each name with its revision, such as `models/OWNER/NAME@main`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pins(BTreeMap<String, String>);

impl Pins {
    /// Reads what [`Pins::to_json`] has written. Returns `None` for other texts.
    pub fn from_json(text: &str) -> Option<Pins> {
        let commits: BTreeMap<String, String> = serde_json::from_str(text).ok()?;
        commits.values().all(|commit| is_commit(commit)).then_some(Pins(commits))
    }

    /// Returns the commits as JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(&self.0).expect("texts are JSON") + "\n"
    }

    /// Whether there are no commits.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn get(&self, id: &RepoId) -> Option<String> {
        self.0.get(&key(id)).cloned()
    }

    pub(crate) fn set(&mut self, id: &RepoId, commit: &str) {
        self.0.insert(key(id), commit.to_string());
    }
}

fn key(id: &RepoId) -> String {
    format!("{}/{}@{}", id.kind.plural(), id.name, id.revision())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kind;

    #[test]
    fn commits_are_of_a_kind_a_name_and_a_revision() {
        let (mut pins, commit) = (Pins::default(), "0123456789abcdef0123456789abcdef01234567");
        let id = |kind, text| RepoId::parse(kind, text).unwrap();
        pins.set(&id(Kind::Dataset, "a/b@v1"), commit);
        let pins = Pins::from_json(&pins.to_json()).unwrap();
        assert_eq!(pins.get(&id(Kind::Dataset, "a/b@v1")).as_deref(), Some(commit));
        for (kind, text) in [(Kind::Model, "a/b@v1"), (Kind::Dataset, "a/b"), (Kind::Dataset, "a/b@v2")] {
            assert_eq!(pins.get(&id(kind, text)), None, "{text}");
        }
        assert!(Pins::from_json("{\"models/a/b@main\": \"../x\"}").is_none() && Pins::from_json("[").is_none());
    }
}
