use super::*;
use crate::CheckpointWriter;
use ottava_http::Retry;
use ottava_store::testing::FakeStore;
use serde_json::{Value, json};

struct Run {
    store: FakeStore,
    folder: tempfile::TempDir,
}

impl Run {
    fn new() -> Run {
        Run { store: FakeStore::start(), folder: tempfile::tempdir().unwrap() }
    }

    fn backup_of(&self, folder: &Path, keep: usize) -> Backup {
        let url = self.store.url();
        let variable = |name: &str| match name {
            "AWS_ACCESS_KEY_ID" => Some("id".to_string()),
            "AWS_SECRET_ACCESS_KEY" => Some("secret".to_string()),
            "AWS_ENDPOINT_URL" => Some(url.clone()),
            _ => None,
        };
        let retry = Retry { attempts: 2, first_pause: Duration::from_millis(1) };
        let bucket = Bucket::with_variables("setting", "s3://runs/first", &variable).unwrap();
        Backup::new(bucket.with_retry(retry).with_parts(100, 64), folder, keep)
    }

    fn backup(&self) -> Backup {
        self.backup_of(self.folder.path(), 2)
    }

    fn path(&self, step: u64) -> PathBuf {
        self.folder.path().join("checkpoints").join(atomic::name(step))
    }

    /// Writes a checkpoint with two files that `content` determines.
    fn save(&self, step: u64, content: &str) {
        self.save_with(step, content, Value::Null);
    }

    /// Like [`Run::save`], with these fields of the manifest.
    fn save_with(&self, step: u64, content: &str, extra: Value) {
        let mut writer = CheckpointWriter::begin(&RealFs, &self.folder.path().join("checkpoints"), step).unwrap();
        for (name, text) in [("model.safetensors", content.repeat(50)), ("config.json", content.to_string())] {
            writer.file(name, |file| file.write(text.as_bytes())).unwrap();
        }
        writer.finish(extra).unwrap();
    }

    fn save_three(&self) {
        for (step, content) in [(1, "a"), (2, "b"), (3, "c")] {
            self.save(step, content);
        }
    }

    fn upload(&self) {
        self.backup().start().finish();
    }

    /// Returns the steps whose manifests are in the store.
    fn steps(&self) -> Vec<u64> {
        let step =
            |name: &String| name.strip_prefix("runs/first/checkpoint-")?.strip_suffix("/manifest.json")?.parse().ok();
        let mut steps: Vec<u64> = self.store.objects().keys().filter_map(step).collect();
        steps.sort();
        steps
    }

    /// Restores the run in another folder, and returns the path of the checkpoint there, below that folder.
    fn restored(&self) -> Option<(tempfile::TempDir, PathBuf)> {
        let other = tempfile::tempdir().unwrap();
        let path = self.backup_of(other.path(), 2).restore().unwrap()?;
        verify(&path, Verify::Hashes).unwrap();
        Some((other, path))
    }
}

#[test]
fn checkpoints_are_uploaded_kept_and_restored_on_another_machine() {
    let run = Run::new();
    run.backup().expect_empty().unwrap();
    assert!(run.restored().is_none());
    std::fs::write(run.folder.path().join("hub.json"), "{}").unwrap();
    run.save(1, "a");
    run.save(2, "b");
    run.upload();
    assert_eq!(run.steps(), [1, 2]);
    let error = run.backup().expect_empty().unwrap_err();
    assert!(matches!(&error, Error::Config(text) if text.contains("--resume")), "{error}");
    // The folder has deleted the first one.
    std::fs::remove_dir_all(run.path(1)).unwrap();
    run.save(3, "c");
    run.upload();
    assert_eq!(run.steps(), [2, 3]);
    let (other, path) = run.restored().unwrap();
    assert_eq!(std::fs::read(path.join("model.safetensors")).unwrap(), "c".repeat(50).as_bytes());
    assert!(path.ends_with("checkpoints/checkpoint-3") && other.path().join("hub.json").is_file());
    // What the folder has is not downloaded.
    let before = run.store.received().len();
    assert!(run.backup().restore().unwrap().is_none());
    assert!(run.store.received()[before..].iter().all(|request| request.target().1.contains("list-type=2")));
    assert_eq!(run.store.open_uploads(), 0);
}

#[test]
fn an_abandoned_branch_is_deleted_and_a_step_that_is_made_again_is_replaced() {
    let run = Run::new();
    run.save_three();
    run.upload();
    // The run has returned to step 1, and has made step 2 again.
    for step in [2, 3] {
        std::fs::remove_dir_all(run.path(step)).unwrap();
    }
    run.save(2, "new");
    run.upload();
    assert_eq!(run.steps(), [1, 2]);
    let (_other, path) = run.restored().unwrap();
    assert_eq!(std::fs::read(path.join("config.json")).unwrap(), b"new");
}

#[test]
fn a_copy_without_its_manifest_or_with_damage_is_not_used() {
    let run = Run::new();
    run.save_three();
    run.backup_of(run.folder.path(), 0).start().finish();
    assert_eq!(run.steps(), [1, 2, 3]);
    run.store.set("runs/first/checkpoint-3/manifest.json", None);
    run.store.set("runs/first/checkpoint-2/config.json", Some(b"x"));
    let (_other, path) = run.restored().unwrap();
    assert!(path.ends_with("checkpoint-1"));
    // The next start repairs what the folder has.
    std::fs::remove_dir_all(run.path(2)).unwrap();
    run.upload();
    assert!(run.restored().unwrap().1.ends_with("checkpoint-3"));
}

#[test]
fn a_manifest_of_the_store_cannot_leave_the_folder() {
    let run = Run::new();
    run.save(1, "a");
    run.upload();
    let entry = crate::manifest::FileEntry { size: 1, sha256: ottava_common::hash::sha256(b"x") };
    let files = BTreeMap::from([("../../evil".to_string(), entry)]);
    let manifest = Manifest { format: 2, ottava: "x".into(), step: 2, files, extra: Value::Null };
    run.store.set("runs/first/checkpoint-2/manifest.json", Some(manifest.render().as_bytes()));
    run.store.set("runs/first/checkpoint-2/../../evil", Some(b"x"));
    let (other, path) = run.restored().unwrap();
    assert!(path.ends_with("checkpoint-1") && !other.path().join("evil").exists());
}

#[test]
fn every_prefix_of_an_upload_leaves_the_newest_complete_checkpoint() {
    let run = Run::new();
    run.save(1, "a");
    run.upload();
    run.save(2, "b");
    let mut stopped = 0;
    // The store fails from a later and later request on, as if the process were killed there.
    for requests in 0.. {
        let (backup, seen) = (run.backup(), run.store.received().len());
        let mut known = Known::default();
        run.store.fail_at(seen + requests..usize::MAX);
        let done = backup.upload_pending(&mut known).is_ok();
        run.store.fail_at(0..0);
        let (_other, path) = run.restored().expect("a complete checkpoint");
        assert!(path.ends_with(if run.steps().contains(&2) { "checkpoint-2" } else { "checkpoint-1" }));
        if done {
            break;
        }
        stopped += 1;
    }
    assert!(stopped > 5 && run.steps() == [1, 2], "{stopped} uploads were stopped");
}

#[test]
fn an_outage_does_not_lose_a_checkpoint() {
    let run = Run::new();
    run.save(1, "a");
    run.store.fail(usize::MAX);
    let uploads = run.backup().start();
    std::thread::sleep(Duration::from_millis(50));
    run.store.fail(0);
    uploads.finish();
    assert_eq!(run.steps(), [1]);
}

#[test]
fn a_rollback_deletes_the_abandoned_copies_before_the_next_save() {
    // The process sees the rollback, or was killed before, and its next start sees it.
    for is_killed in [false, true] {
        let run = Run::new();
        run.save_three();
        let mut known = Known::default();
        run.backup().upload_pending(&mut known).unwrap();
        assert_eq!(run.steps(), [1, 2, 3]);
        std::fs::write(run.folder.path().join("rollbacks.jsonl"), "{}\n").unwrap();
        crate::abandon_after(&RealFs, &run.folder.path().join("checkpoints"), 1).unwrap();
        // The copies in the store are no newer checkpoints of this run.
        assert_eq!(run.backup().restore().unwrap(), None);
        if is_killed {
            known = Known::default();
        }
        run.backup().upload_pending(&mut known).unwrap();
        assert_eq!(run.steps(), [1]);
        let (other, path) = run.restored().unwrap();
        assert!(path.ends_with("checkpoint-1"));
        assert_eq!(std::fs::read(other.path().join("rollbacks.jsonl")).unwrap(), b"{}\n");
        assert_eq!(known.overtaken, 0);
    }
}

#[test]
fn the_log_of_rollbacks_of_the_store_replaces_an_older_one() {
    let run = Run::new();
    run.save(1, "a");
    std::fs::write(run.folder.path().join("rollbacks.jsonl"), "1\n2\n").unwrap();
    run.upload();
    for (before, after) in [("1\n", "1\n2\n"), ("0\n", "1\n2\n"), ("1\n2\n3\n", "1\n2\n3\n")] {
        let other = tempfile::tempdir().unwrap();
        let path = other.path().join("rollbacks.jsonl");
        std::fs::write(&path, before).unwrap();
        assert!(run.backup_of(other.path(), 2).restore().unwrap().is_some());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), after);
    }
}

#[test]
fn the_best_checkpoint_is_kept_and_restored() {
    let run = Run::new();
    for (step, content) in [(1, "a"), (2, "b"), (3, "c"), (4, "d")] {
        run.save_with(step, content, json!({"best": {"step": 2}}));
    }
    let backup = |folder: &Path| run.backup_of(folder, 1).with_best(true);
    backup(run.folder.path()).start().finish();
    let other = tempfile::tempdir().unwrap();
    let path = backup(other.path()).restore().unwrap().unwrap();
    assert!(path.ends_with("checkpoint-4"));
    verify(&path.with_file_name("checkpoint-2"), Verify::Hashes).unwrap();
    assert!(!path.with_file_name("checkpoint-3").exists());
    // The folder has lost the best checkpoint, and the store keeps it.
    std::fs::remove_dir_all(path.with_file_name("checkpoint-2")).unwrap();
    backup(other.path()).start().finish();
    assert_eq!(run.steps(), [2, 4]);
}

#[test]
fn copies_that_no_start_can_use_are_an_error() {
    let run = Run::new();
    run.save(1, "a");
    run.upload();
    run.save(2, "b");
    let newer = json!({"format": 99, "step": 1});
    for step in [1, 3] {
        let name = format!("runs/first/checkpoint-{step}/manifest.json");
        run.store.set(&name, Some(ottava_common::hash::seal(&newer).as_bytes()));
    }
    let other = tempfile::tempdir().unwrap();
    let error = run.backup_of(other.path(), 2).restore().unwrap_err();
    assert!(matches!(&error, Error::Checkpoint(text) if text.contains("format 99")), "{error}");
    // This folder has a checkpoint to resume from.
    assert_eq!(run.backup().restore().unwrap(), None);
}

#[test]
fn a_damaged_checkpoint_of_the_folder_is_downloaded_again() {
    let run = Run::new();
    run.save(1, "a");
    run.save(2, "b");
    run.upload();
    std::fs::write(run.path(2).join("config.json"), "x").unwrap();
    assert!(run.backup().restore().unwrap().is_some());
    verify(&run.path(2), Verify::Hashes).unwrap();
}

#[test]
fn an_upload_without_its_manifest_is_no_checkpoint() {
    let run = Run::new();
    run.store.set("runs/first/checkpoint-1/model.safetensors", Some(b"x"));
    run.backup().expect_empty().unwrap();
}

#[test]
fn a_checkpoint_that_is_deleted_while_it_is_uploaded_is_complete() {
    let run = Run::new();
    run.save(1, "a");
    run.store.slow(Some(Duration::from_millis(20)));
    std::thread::scope(|scope| {
        let upload = scope.spawn(|| run.backup().upload_pending(&mut Known::default()));
        let is_put =
            |request: &ottava_http::testing::Received| request.head.starts_with("PUT /runs/first/checkpoint-1/");
        while !run.store.received().iter().any(is_put) {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::fs::remove_dir_all(run.path(1)).unwrap();
        upload.join().unwrap().unwrap();
    });
    assert!(run.restored().unwrap().1.ends_with("checkpoint-1"));
}

#[test]
fn a_checkpoint_that_is_deleted_before_its_upload_is_counted() {
    let run = Run::new();
    let mut known = Known::default();
    run.save(1, "a");
    run.store.fail(usize::MAX);
    run.backup().upload_pending(&mut known).unwrap_err();
    run.store.fail(0);
    std::fs::remove_dir_all(run.path(1)).unwrap();
    run.save(2, "b");
    run.backup().upload_pending(&mut known).unwrap();
    assert_eq!((known.overtaken, run.steps()), (1, vec![2]));
}

#[test]
fn a_store_that_refuses_to_list_parts_gets_checkpoints() {
    let run = Run::new();
    run.save(1, "a");
    run.store.refuse("&uploads=");
    run.upload();
    assert_eq!(run.steps(), [1]);
}
