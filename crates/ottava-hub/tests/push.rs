//! Tests uploads to a server that fails.

use ottava_common::Error;
use ottava_http::{Retry, Secret, Url};
use ottava_hub::testing::FakeHub;
use ottava_hub::{Content, Hub, Kind, PushOptions, Pushed, RepoId, Watch};
use std::collections::BTreeMap;
use std::time::Duration;

/// Sees the progress of uploads and keeps the last one.
#[derive(Debug, Default)]
struct Seen(u64, u64);

impl Watch for Seen {
    fn at(&mut self, _: &str, done: u64, total: u64) {
        (self.0, self.1) = (done, total);
    }
}

fn push(fake: &FakeHub, token: Option<&str>, files: &BTreeMap<String, Content>) -> Result<(Pushed, Seen), Error> {
    push_as(fake, token, files, true)
}

fn push_as(
    fake: &FakeHub,
    token: Option<&str>,
    files: &BTreeMap<String, Content>,
    private: bool,
) -> Result<(Pushed, Seen), Error> {
    let cache = tempfile::tempdir().unwrap();
    let token = token.and_then(|token| Secret::from_text("HF_TOKEN", token));
    let retry = Retry { attempts: 3, first_pause: Duration::from_millis(1) };
    let hub = Hub::new(Url::new("url", &fake.url()).unwrap(), token, cache.path()).with_retry(retry);
    let (id, mut seen) = (RepoId::parse(Kind::Model, "otter/pushed").unwrap(), Seen::default());
    let options = PushOptions { private, message: "Upload".into() };
    hub.push(&id, files, &options, &mut seen).map(|pushed| (pushed, seen))
}

/// Files of all kinds: small text, Git LFS as a whole and in parts, and a file that the Hub ignores.
fn files(folder: &std::path::Path) -> BTreeMap<String, Content> {
    let weights: Vec<u8> = (0..250_001u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    std::fs::write(folder.join("weights"), weights).unwrap();
    BTreeMap::from([
        ("README.md".to_string(), Content::Bytes("# Ünïcode\n".into())),
        ("empty.txt".to_string(), Content::Bytes(Vec::new())),
        ("model.safetensors".to_string(), Content::File(folder.join("weights"))),
        ("sub folder/small.safetensors".to_string(), Content::Bytes(b"small".to_vec())),
        ("x.ignored".to_string(), Content::Bytes(b"ignored".to_vec())),
    ])
}

#[test]
fn a_push_is_one_commit_and_uploads_nothing_twice() {
    let (fake, folder) = (FakeHub::start(), tempfile::tempdir().unwrap());
    let files = files(folder.path());
    // Two parts are lost at first.
    fake.fail(|faults| (faults.busy, faults.lost_uploads) = (1, 2));
    let (pushed, seen) = push(&fake, Some("write"), &files).unwrap();
    assert_eq!((pushed.uploaded, seen.0, seen.1), (250_006, 250_006, 250_006));
    assert_eq!(pushed.files, 4, "the ignored file is not counted");
    assert_eq!(pushed.url, format!("{}/otter/pushed", fake.url()));
    let stored = fake.files("models/otter/pushed");
    let paths: Vec<&str> = stored.iter().map(|file| file.path.as_str()).collect();
    assert_eq!(paths, ["README.md", "empty.txt", "model.safetensors", "sub folder/small.safetensors"]);
    assert_eq!(stored[2].bytes, std::fs::read(folder.path().join("weights")).unwrap());
    assert_eq!(stored[0].bytes, "# Ünïcode\n".as_bytes());
    let (hub, storage) = fake.received();
    assert!(hub.iter().all(|request| request.header("authorization") == Some("Bearer write")));
    assert!(storage.iter().all(|request| request.header("authorization").is_none()));
    // The repository and the large files exist now.
    let (again, _) = push(&fake, Some("write"), &files).unwrap();
    assert!(again.uploaded == 0 && again.commit != pushed.commit);
    assert_eq!(fake.received().1.len(), storage.len());
}

#[test]
fn a_push_that_fails_commits_nothing_and_says_why() {
    let (fake, folder) = (FakeHub::start(), tempfile::tempdir().unwrap());
    let files = files(folder.path());
    let error = push(&fake, None, &files).unwrap_err();
    assert!(
        matches!(&error, Error::Config(text) if text.contains("/settings/tokens") && text.contains("HF_TOKEN")),
        "{error}"
    );
    assert!(fake.received().0.is_empty());
    fake.fail(|faults| faults.lost_uploads = 100);
    let error = push(&fake, Some("write"), &files).unwrap_err();
    assert!(matches!(&error, Error::External(text) if text.contains("nothing was committed")), "{error}");
    assert!(fake.files("models/otter/pushed").is_empty());
    // The next push goes on.
    fake.fail(|faults| faults.lost_uploads = 0);
    push(&fake, Some("write"), &files).unwrap();
    assert_eq!(fake.files("models/otter/pushed").len(), 4);
}

/// A small file.
fn small() -> BTreeMap<String, Content> {
    BTreeMap::from([("config.json".to_string(), Content::Bytes(b"{}".to_vec()))])
}

fn commits(fake: &FakeHub) -> usize {
    let of_commit = |target: &str| target.contains("/commit/");
    fake.received().0.iter().filter(|request| of_commit(request.target().1)).count()
}

#[test]
fn a_commit_whose_answer_is_lost_is_made_once() {
    let fake = FakeHub::start();
    fake.fail(|faults| faults.lost_commits = 1);
    let (pushed, _) = push(&fake, Some("write"), &small()).unwrap();
    assert_eq!(commits(&fake), 1, "the commit is found on the branch, and is not sent again");
    let (again, _) = push(&fake, Some("write"), &small()).unwrap();
    assert_ne!(pushed.commit, again.commit);
    // Without an answer, and without the commit on the branch, the request is sent again.
    fake.fail(|faults| faults.busy = 1);
    push(&fake, Some("write"), &small()).unwrap();
}

#[test]
fn an_existing_repository_needs_no_right_to_create_one() {
    let fake = FakeHub::start();
    fake.fail(|faults| faults.forbids_creation = true);
    let error = push(&fake, Some("write"), &small()).unwrap_err().to_string();
    assert!(error.contains("You may not create repositories") && error.contains("write access"), "{error}");
    fake.add("models/otter/pushed", &[("a.txt", b"a")]);
    // The repository is public, so it cannot become private.
    let error = push(&fake, Some("write"), &small()).unwrap_err();
    assert!(matches!(&error, Error::Config(text) if text.contains("exists and is public")), "{error}");
    assert_eq!(fake.files("models/otter/pushed").len(), 1);
    push_as(&fake, Some("write"), &small(), false).unwrap();
    assert_eq!(fake.files("models/otter/pushed").len(), 2);
}

#[test]
fn a_file_without_an_answer_is_an_error() {
    let fake = FakeHub::start();
    fake.fail(|faults| faults.forgotten = Some("config.json".into()));
    let error = push(&fake, Some("write"), &small()).unwrap_err().to_string();
    assert!(error.contains("config.json") && error.contains("nothing was committed"), "{error}");
    assert_eq!(commits(&fake), 0);
}

#[test]
fn expired_upload_addresses_are_asked_for_again() {
    let (fake, folder) = (FakeHub::start(), tempfile::tempdir().unwrap());
    fake.fail(|faults| faults.expired_uploads = 1);
    push(&fake, Some("write"), &files(folder.path())).unwrap();
    assert_eq!(fake.files("models/otter/pushed").len(), 4);
    let other = FakeHub::start();
    other.fail(|faults| faults.expired_uploads = 100);
    let error = push(&other, Some("write"), &files(folder.path())).unwrap_err().to_string();
    assert!(error.contains("status 403"), "{error}");
}

#[test]
fn posts_follow_the_redirect_of_a_renamed_repository() {
    let fake = FakeHub::start();
    fake.add("models/otter/new-name", &[("a.txt", b"a")]);
    fake.fail(|faults| faults.renamed = Some(("otter/pushed".into(), "otter/new-name".into())));
    push_as(&fake, Some("write"), &small(), false).unwrap();
    assert_eq!(fake.files("models/otter/new-name").len(), 2);
}
