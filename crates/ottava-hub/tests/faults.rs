//! Tests downloads from a server that fails in many ways.

use ottava_common::Error;
use ottava_http::{Retry, Secret, Url};
use ottava_hub::testing::FakeHub;
use ottava_hub::{DataId, Hub, Kind, RepoId, Watch};
use std::fs;
use std::path::Path;
use std::time::Duration;

/// Sees the progress of downloads and keeps the last one.
#[derive(Default)]
struct Seen(u64, u64);

impl Watch for Seen {
    fn at(&mut self, _: &str, done: u64, total: u64) {
        assert!(done <= total);
        assert!(done < total || (done, total) != (self.0, self.1), "the end of a transfer is told once");
        (self.0, self.1) = (done, total);
    }
}

const MODEL: &str = "models/otter/tiny";

/// Bytes that repeat late, so that a range in a wrong place is noticed.
fn bytes(count: usize) -> Vec<u8> {
    (0..count as u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

/// A server with a model, and an empty cache.
struct Setup {
    fake: FakeHub,
    cache: tempfile::TempDir,
    weights: Vec<u8>,
}

impl Setup {
    fn new() -> Setup {
        Setup::of_size(200_000)
    }

    fn of_size(size: usize) -> Setup {
        let (fake, weights) = (FakeHub::start(), bytes(size));
        fake.add(
            MODEL,
            &[
                ("config.json", b"{}"),
                ("model.safetensors", &weights),
                ("pytorch_model.bin", b"pickle"),
                ("README.md", b"# Tiny"),
                ("tokenizer.json", b"{\"a\":1}"),
            ],
        );
        Setup { fake, cache: tempfile::tempdir().unwrap(), weights }
    }

    fn hub(&self, token: Option<&str>) -> Hub {
        let token = token.and_then(|token| Secret::from_text("HF_TOKEN", token));
        let retry = Retry { attempts: 3, first_pause: Duration::from_millis(1) };
        Hub::new(Url::new("url", &self.fake.url()).unwrap(), token, self.cache.path()).with_retry(retry)
    }

    fn fetch(&self, text: &str) -> Result<std::path::PathBuf, Error> {
        self.hub(None).model(&RepoId::parse(Kind::Model, text).unwrap(), true, &mut Seen::default())
    }

    /// Downloads the model, and checks its files.
    fn succeed(&self) {
        let folder = self.fetch("otter/tiny").unwrap();
        assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), self.weights);
        assert_eq!(fs::read(folder.join("tokenizer.json")).unwrap(), b"{\"a\":1}");
        assert!(!folder.join("pytorch_model.bin").exists());
        let blobs = self.cache.path().join("models--otter--tiny/blobs");
        let left: Vec<_> = fs::read_dir(blobs).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left.len(), 3, "no part of a download is left: {left:?}");
    }
}

#[test]
fn a_model_is_downloaded_once_into_the_shared_layout() {
    let setup = Setup::new();
    let mut seen = Seen::default();
    let id = RepoId::parse(Kind::Model, "otter/tiny").unwrap();
    let folder = setup.hub(None).model(&id, false, &mut seen).unwrap();
    assert!(!folder.join("model.safetensors").exists() && seen.0 == seen.1 && seen.1 == 9);
    setup.succeed();
    let root = setup.cache.path().join("models--otter--tiny");
    let commit = fs::read_to_string(root.join("refs/main")).unwrap();
    assert_eq!(folder, root.join("snapshots").join(&commit));
    let link = fs::read_link(folder.join("config.json")).unwrap();
    assert_eq!(link, Path::new("../../blobs").join(ottava_hub::git_sha1(b"{}")));
    // A commit that is complete in the cache needs no request, and a branch only the question for its commit.
    let before = setup.fake.received().0.len();
    setup.fetch(&format!("otter/tiny@{commit}")).unwrap();
    assert_eq!(setup.fake.received().0.len(), before);
    setup.fetch("otter/tiny").unwrap();
    assert_eq!(setup.fake.received().0.len(), before + 1);
}

#[test]
fn a_token_reaches_the_hub_alone() {
    let setup = Setup::new();
    setup.fake.fail(|faults| faults.gated = Some(MODEL.into()));
    let id = RepoId::parse(Kind::Model, "otter/tiny").unwrap();
    setup.hub(Some("granted")).model(&id, true, &mut Seen::default()).unwrap();
    let (hub, storage) = setup.fake.received();
    assert!(hub.iter().all(|request| request.header("authorization") == Some("Bearer granted")));
    assert!(!storage.is_empty() && storage.iter().all(|request| request.header("authorization").is_none()));
}

#[test]
fn cut_connections_and_busy_servers_are_retried() {
    let setup = Setup::new();
    setup.fake.fail(|faults| (faults.busy, faults.cuts, faults.cut_after) = (2, 5, 70_000));
    setup.succeed();
    // A cut costs no byte that has arrived.
    let ranges: Vec<_> =
        setup.fake.received().1.iter().map(|request| request.header("range").unwrap().to_string()).collect();
    assert_eq!(ranges, ["bytes=0-199999", "bytes=70000-199999", "bytes=140000-199999"]);
}

#[test]
fn a_server_without_ranges_sends_the_whole_file() {
    let setup = Setup::of_size(34 << 20);
    setup.fake.fail(|faults| faults.ignore_ranges = true);
    setup.succeed();
    // The request that is received asks for the whole file, with time for all its bytes.
    let last = setup.fake.received().1.last().unwrap().header("range").unwrap().to_string();
    assert_eq!(last, format!("bytes=0-{}", (34 << 20) - 1));
}

#[test]
fn parallel_ranges_make_the_file_and_addresses_may_expire() {
    let setup = Setup::of_size(34 << 20);
    setup.fake.fail(|faults| (faults.expired, faults.cuts, faults.cut_after) = (2, 1, 1 << 20));
    setup.succeed();
    let starts: Vec<_> =
        setup.fake.received().1.iter().map(|request| request.header("range").unwrap().to_string()).collect();
    // Two ranges, two expired addresses, and the rest of the range that was cut.
    assert_eq!(starts.len(), 5, "{starts:?}");
    assert!(starts.contains(&format!("bytes={}-{}", 32 << 20, (34 << 20) - 1)), "{starts:?}");
}

#[test]
fn a_wrong_byte_is_found_and_never_stored() {
    let setup = Setup::new();
    setup.fake.fail(|faults| faults.wrong = 1);
    setup.succeed();
    let other = Setup::new();
    other.fake.fail(|faults| faults.wrong = 100);
    let error = other.fetch("otter/tiny").unwrap_err();
    assert!(matches!(&error, Error::External(text) if text.contains("checksum")), "{error}");
    let snapshots = other.cache.path().join("models--otter--tiny/snapshots");
    assert!(!snapshots.exists(), "no file was linked");
    // Later, the server is repaired.
    other.fake.fail(|faults| faults.wrong = 0);
    other.succeed();
}

#[test]
fn a_download_resumes_where_it_ended() {
    let setup = Setup::new();
    setup.fake.fail(|faults| (faults.cuts, faults.cut_after) = (1, 120_000));
    let hub = setup.hub(None).with_retry(Retry { attempts: 1, first_pause: Duration::ZERO });
    let id = RepoId::parse(Kind::Model, "otter/tiny").unwrap();
    setup.fake.fail(|faults| faults.cuts = 1);
    hub.model(&id, false, &mut Seen::default()).unwrap();
    // The first connection is cut after 120,000 bytes, and all later ones at once.
    setup.fake.fail(|faults| (faults.cuts, faults.cut_after) = (1, 120_000));
    hub.model(&id, true, &mut Seen::default()).unwrap();
    let starts: Vec<_> =
        setup.fake.received().1.iter().map(|request| request.header("range").unwrap().to_string()).collect();
    assert_eq!(starts, ["bytes=0-199999", "bytes=120000-199999"]);
    // A process that was killed leaves its part, and half a line.
    let other = Setup::new();
    let blobs = other.cache.path().join("models--otter--tiny/blobs");
    let name = ottava_common::hash::sha256(&other.weights);
    fs::create_dir_all(&blobs).unwrap();
    let mut part = other.weights.clone();
    part[150_000..].fill(0);
    fs::write(blobs.join(format!("{name}.part")), part).unwrap();
    fs::write(blobs.join(format!("{name}.ranges")), "0 100000\n100000 150000\n150000 2000").unwrap();
    other.succeed();
    assert_eq!(other.fake.received().1[0].header("range"), Some("bytes=150000-199999"));
}

#[test]
fn messages_say_what_is_missing_and_what_to_do() {
    let setup = Setup::new();
    let fails = |text: &str, words: &[&str]| {
        let error = setup.fetch(text).unwrap_err().to_string();
        words.iter().for_each(|word| assert!(error.contains(word), "no {word:?} in {error}"));
    };
    fails("otter/absent", &["has no model otter/absent", "check the spelling", "HF_TOKEN"]);
    // A data set was named where a model is expected.
    setup.fake.add("datasets/otter/chats", &[("train.jsonl", b"{}")]);
    fails(
        "otter/chats",
        &["has a data set of this name", "`ottava download --dataset otter/chats`", "`ottava init MODEL otter/chats`"],
    );
    let error = setup.fetch("otter/absent").unwrap_err().to_string();
    assert!(!error.contains("of this name") && !error.contains("meant as a path"), "{error}");
    fails("otter/tiny@v7", &["no revision `v7`"]);
    setup.fake.fail(|faults| faults.gated = Some(MODEL.into()));
    fails("otter/tiny", &["gated", "accept its conditions at", "/otter/tiny"]);
    setup.fake.fail(|faults| faults.gated = None);
    setup.fake.fail(|faults| faults.busy = 100);
    fails(
        "otter/tiny",
        &["the model otter/tiny is not complete in", "status 429", "after 3 attempts", "ottava download otter/tiny"],
    );
    setup.fake.fail(|faults| faults.busy = 0);
    let id = RepoId::parse(Kind::Model, "otter/tiny").unwrap();
    let offline =
        |setup: &Setup| setup.hub(None).without_network("HF_HUB_OFFLINE").model(&id, true, &mut Seen::default());
    let error = offline(&setup).unwrap_err().to_string();
    assert!(error.contains("HF_HUB_OFFLINE is set") && error.contains("ottava download otter/tiny"), "{error}");
    let requests = setup.fake.received().0.len();
    setup.succeed();
    let all = setup.fake.received().0.len();
    assert!(all > requests);
    offline(&setup).unwrap();
    assert_eq!(setup.fake.received().0.len(), all, "nothing was asked");
    // A server that fails is not needed if the cache is complete.
    setup.fake.fail(|faults| faults.busy = 100);
    setup.fetch("otter/tiny").unwrap();
    let links = setup.cache.path().join("models--otter--tiny/snapshots");
    let folder = fs::read_dir(&links).unwrap().next().unwrap().unwrap().path();
    fs::remove_file(folder.join("model.safetensors")).unwrap();
    let error = offline(&setup).unwrap_err().to_string();
    assert!(error.contains("1 of its files, such as model.safetensors"), "{error}");
}

#[test]
fn data_sets_give_the_files_of_a_split() {
    let setup = Setup::new();
    let repo = "datasets/otter/chats";
    setup.fake.add(
        repo,
        &[
            ("README.md", b"# Chats"),
            ("data/train-00000-of-00002.parquet", b"one"),
            ("data/train-00001-of-00002.parquet", b"two"),
            ("data/test-00000-of-00001.parquet", b"three"),
            ("script.py", b"print()"),
        ],
    );
    let hub = setup.hub(None);
    let names = |text: &str, split: &str| -> Result<Vec<String>, Error> {
        let id = DataId::of_path(Path::new(text))?.unwrap();
        let files = hub.data_files(&id, &[split], &mut Seen::default())?;
        Ok(files.iter().map(|path| String::from_utf8(fs::read(path).unwrap()).unwrap()).collect())
    };
    assert_eq!(names("otter/chats", "train").unwrap(), ["one", "two"]);
    assert_eq!(names("otter/chats?split=test", "train").unwrap(), ["three"]);
    assert_eq!(names("hf://datasets/otter/chats/data/*-00001-of-*.parquet", "train").unwrap(), ["two"]);
    let error = names("otter/chats", "validation").unwrap_err().to_string();
    assert!(error.contains("`test`, `train`"), "{error}");
    let error = names("otter/none", "train").unwrap_err().to_string();
    assert!(error.contains("has no data set otter/none, or it is private"), "{error}");
}

#[test]
fn a_listing_of_a_mirror_is_whole() {
    let setup = Setup::new();
    setup.fake.fail(|faults| faults.foreign_pages = true);
    setup.succeed();
    assert!(setup.fake.received().0.iter().any(|request| request.target().1.contains("cursor=4")));
}

#[test]
fn a_renamed_model_is_found() {
    let setup = Setup::new();
    setup.fake.fail(|faults| faults.renamed = Some(("otter/old".into(), "otter/tiny".into())));
    let folder = setup.fetch("otter/old").unwrap();
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), setup.weights);
    // The Hub has given owners to names that had none.
    setup.fake.fail(|faults| faults.renamed = Some(("/tiny/".into(), "/otter/tiny/".into())));
    let folder = setup.fetch("tiny").unwrap();
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), setup.weights);
    assert!(folder.starts_with(setup.cache.path().join("models--tiny")));
}

#[test]
fn a_given_commit_is_used_without_a_question() {
    let setup = Setup::new();
    let id = RepoId::parse(Kind::Model, "otter/tiny").unwrap();
    let hub = setup.hub(None);
    let folder = hub.model(&id, true, &mut Seen::default()).unwrap();
    setup.fake.add(MODEL, &[("config.json", b"{\"new\":1}")]);
    let requests = setup.fake.received().0.len();
    let again = setup.hub(None).with_pins(hub.pins());
    assert_eq!(again.model(&id, true, &mut Seen::default()).unwrap(), folder);
    assert_eq!(setup.fake.received().0.len(), requests);
    assert_ne!(setup.hub(None).model(&id, true, &mut Seen::default()).unwrap(), folder);
}

#[test]
fn a_data_set_of_a_script_is_read_from_its_copy() {
    let setup = Setup::new();
    setup.fake.add("datasets/otter/script", &[("script.py", b"print()")]);
    let files = |text: &str| -> Result<usize, Error> {
        let id = DataId::of_path(Path::new(text))?.unwrap();
        Ok(setup.hub(None).data_files(&id, &["train"], &mut Seen::default())?.len())
    };
    let error = files("otter/script").unwrap_err().to_string();
    assert!(error.contains("no file of a kind that is read") && error.contains("refs/convert/parquet"), "{error}");
    let copy =
        [("en/train/0000.parquet", b"a".as_slice()), ("de/train/0000.parquet", b"b"), ("de/test/0.parquet", b"c")];
    setup.fake.add_branch("datasets/otter/script", "refs/convert/parquet", &copy);
    let error = files("otter/script").unwrap_err().to_string();
    assert!(error.contains("`de`, `en`") && error.contains("?config=NAME"), "{error}");
    assert_eq!(files("otter/script?config=de").unwrap(), 1);
    let large = vec![b'#'; (1 << 20) + 1];
    setup.fake.add("datasets/otter/wordy", &[("README.md", &large), ("a.csv", b"a")]);
    let error = files("otter/wordy").unwrap_err().to_string();
    assert!(error.contains("README.md has 1048577 bytes"), "{error}");
    assert_eq!(files("hf://datasets/otter/wordy/a.csv").unwrap(), 1);
}
