use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::json;

use super::*;
use ottava_common::fs::{Fs, FsFile, RealFs};

/// A fault that is injected at one operation.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// The operation fails with this system error. Later operations work.
    Error(i32),
    /// A write takes half of its bytes, and the next write fails as on a full disk.
    ShortWrite,
    /// This operation and all later operations fail, as if the program was killed.
    Killed,
}

/// The real file system with a fault at operation `at`, and a list of the operations.
#[derive(Clone)]
struct FaultyFs(Arc<Faults>);

struct Faults {
    fault: Fault,
    at: usize,
    done: AtomicUsize,
    trace: Mutex<Vec<String>>,
}

impl FaultyFs {
    fn new(fault: Fault, at: usize) -> FaultyFs {
        FaultyFs(Arc::new(Faults { fault, at, done: AtomicUsize::new(0), trace: Mutex::default() }))
    }

    fn operation(&self, what: &str, path: &Path) -> io::Result<()> {
        let index = self.0.done.fetch_add(1, Ordering::Relaxed);
        self.0.trace.lock().unwrap().push(format!("{what} {}", path.file_name().unwrap().to_string_lossy()));
        match self.0.fault {
            Fault::Error(code) if index == self.0.at => Err(io::Error::from_raw_os_error(code)),
            Fault::Killed if index >= self.0.at => Err(io::Error::other("killed")),
            _ => Ok(()),
        }
    }
}

impl Fs for FaultyFs {
    fn create(&self, path: &Path) -> io::Result<Box<dyn FsFile>> {
        self.operation("create", path)?;
        let file = RealFs.create(path)?;
        Ok(Box::new(FaultyFile { fs: self.clone(), file, path: path.to_path_buf(), full: false }))
    }
    fn append(&self, path: &Path, length: u64) -> io::Result<Box<dyn FsFile>> {
        self.operation("append", path).and_then(|()| RealFs.append(path, length))
    }
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.operation("create_dir", path).and_then(|()| RealFs.create_dir(path))
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.operation("rename to", to).and_then(|()| RealFs.rename(from, to))
    }
    fn remove(&self, path: &Path) -> io::Result<()> {
        self.operation("remove", path).and_then(|()| RealFs.remove(path))
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.operation("sync_dir", path).and_then(|()| RealFs.sync_dir(path))
    }
}

struct FaultyFile {
    fs: FaultyFs,
    file: Box<dyn FsFile>,
    path: PathBuf,
    full: bool,
}

impl Write for FaultyFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let short = self.fs.0.fault == Fault::ShortWrite && self.fs.0.done.load(Ordering::Relaxed) == self.fs.0.at;
        self.fs.operation("write", &self.path)?;
        if self.full {
            return Err(io::Error::from_raw_os_error(28));
        }
        self.full = short;
        self.file.write(if short { &bytes[..bytes.len() / 2] } else { bytes })
    }
    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl FsFile for FaultyFile {
    fn sync(&mut self) -> io::Result<()> {
        self.fs.operation("sync", &self.path).and_then(|()| self.file.sync())
    }
}

fn save(fs: &dyn Fs, folder: &Path, step: u64) -> Result<PathBuf> {
    let mut writer = CheckpointWriter::begin(fs, folder, step)?;
    writer.file("a.bin", |file| {
        file.write(b"abc")?;
        file.write(&[step as u8; 5000])
    })?;
    writer.file("sub/b.json", |file| file.write(format!("{{\"step\": {step}}}").as_bytes()))?;
    writer.finish(json!({ "learning_rate": 0.1, "world": 1 }))
}

fn newest(folder: &Path) -> Option<u64> {
    latest_complete(folder, Verify::Hashes).unwrap().complete.map(|(_, manifest)| manifest.step)
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn everything_is_on_disk_before_the_final_name_appears() {
    let folder = tempfile::tempdir().unwrap();
    let fs = FaultyFs::new(Fault::Killed, usize::MAX);
    let run = folder.path().join("run");
    let path = save(&fs, &run, 3).unwrap();
    assert_eq!(path, run.join("checkpoint-3"));
    let file = |name: &str| ["create", "write", "sync"].map(|what| format!("{what} {name}"));
    let above = folder.path().file_name().unwrap().to_string_lossy();
    let mut expected =
        vec!["create_dir run".to_string(), format!("sync_dir {above}"), "create_dir .tmp-checkpoint-3".into()];
    expected.extend(file("a.bin"));
    expected.push("create_dir sub".into());
    expected.extend([file("b.json"), file("manifest.json")].into_iter().flatten());
    expected.extend(
        ["sync_dir sub", "sync_dir .tmp-checkpoint-3", "rename to checkpoint-3", "sync_dir run"].map(String::from),
    );
    assert_eq!(*fs.0.trace.lock().unwrap(), expected);
    let manifest = verify(&path, Verify::Hashes).unwrap();
    assert_eq!((manifest.step, manifest.files["a.bin"].size, &manifest.extra["world"]), (3, 5003, &json!(1)));
    assert_eq!(
        manifest.files["a.bin"].sha256,
        ottava_common::hash::sha256(&std::fs::read(path.join("a.bin")).unwrap())
    );
}

#[test]
fn a_fault_at_any_operation_leaves_whole_checkpoints_only() {
    const ENOSPC: i32 = 28;
    const EIO: i32 = 5;
    for fault in [Fault::Error(ENOSPC), Fault::Error(EIO), Fault::ShortWrite, Fault::Killed] {
        let mut failures = 0;
        // Step 2 is new. Step 1 exists and is replaced, which takes the most operations.
        for (step, at) in [1, 2].into_iter().flat_map(|step| (0..20).map(move |at| (step, at))) {
            let folder = tempfile::tempdir().unwrap();
            save(&RealFs, folder.path(), 0).unwrap();
            save(&RealFs, folder.path(), 1).unwrap();
            let saved = save(&FaultyFs::new(fault, at), folder.path(), step);
            failures += usize::from(saved.is_err());
            let latest = latest_complete(folder.path(), Verify::Hashes).unwrap();
            assert!(latest.damaged.is_empty(), "{fault:?} at {at}: {:?}", latest.damaged);
            let found = latest.complete.map(|(_, manifest)| manifest.step);
            let least = if saved.is_ok() { step } else { step - 1 };
            assert!(found >= Some(least), "{fault:?} at {at} of step {step}: {found:?}");
            if matches!(fault, Fault::Error(_) | Fault::ShortWrite) && saved.is_err() {
                assert!(!names(folder.path()).iter().any(|name| name.starts_with(".tmp-")), "{fault:?} at {at}");
            }
            // Leftovers of the failed attempt do not disturb a later attempt.
            save(&RealFs, folder.path(), step).unwrap();
            assert_eq!(newest(folder.path()), Some(step.max(1)));
        }
        assert!(failures > 5, "{fault:?} struck {failures} times");
    }
}

#[test]
fn a_full_disk_is_named_with_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let error = save(&FaultyFs::new(Fault::Error(28), 2), folder.path(), 7).unwrap_err().to_string();
    assert!(error.contains(".tmp-checkpoint-7/a.bin: No space left on device"), "{error}");
}

#[test]
fn any_flipped_bit_or_cut_is_noticed_and_named() {
    let folder = tempfile::tempdir().unwrap();
    save(&RealFs, folder.path(), 1).unwrap();
    let path = save(&RealFs, folder.path(), 2).unwrap();
    let mut state = 1_u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    for trial in 0..600 {
        let name = ["a.bin", "sub/b.json", "manifest.json"][trial % 3];
        let good = std::fs::read(path.join(name)).unwrap();
        let mut bad = good.clone();
        let at = random(good.len());
        if trial % 2 == 0 {
            bad[at] ^= 1 << random(8)
        } else {
            bad.truncate(at)
        }
        std::fs::write(path.join(name), &bad).unwrap();
        let latest = latest_complete(folder.path(), Verify::Hashes).unwrap();
        assert_eq!(latest.complete.unwrap().1.step, 1, "{name} at {at}");
        assert!(latest.damaged[0].1.to_string().contains(&format!("checkpoint-2/{name}: ")), "{:?}", latest.damaged);
        std::fs::write(path.join(name), &good).unwrap();
    }
    assert_eq!(newest(folder.path()), Some(2));
}

#[test]
fn missing_swapped_and_foreign_checkpoints_are_not_taken() {
    let folder = tempfile::tempdir().unwrap();
    let first = save(&RealFs, folder.path(), 1).unwrap();
    let second = save(&RealFs, folder.path(), 2).unwrap();
    std::fs::copy(first.join("a.bin"), second.join("a.bin")).unwrap();
    assert_eq!(newest(folder.path()), Some(1), "a file of another checkpoint");
    std::fs::remove_file(second.join("a.bin")).unwrap();
    assert_eq!(newest(folder.path()), Some(1), "a missing file");
    std::fs::remove_dir_all(&second).unwrap();
    std::fs::create_dir(folder.path().join("checkpoint-9")).unwrap();
    for other in ["checkpoint-", "checkpoint-x", "checkpoint-010", "checkpoint-99999999999999999999", "check"] {
        std::fs::create_dir(folder.path().join(other)).unwrap();
    }
    let latest = latest_complete(folder.path(), Verify::Sizes).unwrap();
    assert_eq!((latest.complete.unwrap().1.step, latest.damaged.len()), (1, 1));
    RealFs.rename(&first, &folder.path().join("checkpoint-5")).unwrap();
    assert_eq!(newest(folder.path()), None, "its manifest is of step 1");
    assert!(latest_complete(Path::new("/nowhere"), Verify::Sizes).unwrap().complete.is_none());
}

/// Paths that lead out of a folder, or that are longer names of another path.
const OUTSIDE: [&str; 9] = ["../x", "/etc/passwd", "..", "a/../b", "a//b", "./a", "a/", "a\\b", ""];

#[test]
fn links_in_a_checkpoint_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = save(&RealFs, folder.path(), 1).unwrap();
    let elsewhere = folder.path().join("elsewhere");
    std::fs::rename(path.join("a.bin"), &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, path.join("a.bin")).unwrap();
    let error = verify(&path, Verify::Hashes).unwrap_err().to_string();
    assert!(error.contains("a.bin is a link"), "{error}");
    std::fs::remove_file(path.join("a.bin")).unwrap();
    std::fs::rename(&elsewhere, path.join("a.bin")).unwrap();
    std::fs::rename(path.join("sub"), &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, path.join("sub")).unwrap();
    let error = verify(&path, Verify::Hashes).unwrap_err().to_string();
    assert!(error.contains("sub is a link"), "{error}");
}

#[test]
fn a_newer_format_and_names_outside_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = save(&RealFs, folder.path(), 1).unwrap();
    let good = verify(&path, Verify::Hashes).unwrap();
    let error_of = |manifest: &Manifest| {
        std::fs::write(path.join("manifest.json"), manifest.render()).unwrap();
        verify(&path, Verify::Hashes).unwrap_err().to_string()
    };
    for format in [0, 3] {
        let error = error_of(&Manifest { format, ..good.clone() });
        assert!(error.contains(&format!("it has format {format}, this program reads 1 to 2")), "{error}");
    }
    for name in OUTSIDE {
        let mut bad = good.clone();
        bad.files.insert(name.into(), FileEntry { size: 1, sha256: String::new() });
        assert!(error_of(&bad).contains("is not the path of a file in this folder"), "{name}");
    }
    let mut writer = CheckpointWriter::begin(&RealFs, folder.path(), 4).unwrap();
    for name in OUTSIDE.into_iter().chain(["manifest.json"]) {
        assert!(writer.file(name, |_| Ok(())).is_err(), "{name}");
    }
    writer.file("twice", |_| Ok(())).unwrap();
    assert!(writer.file("twice", |_| Ok(())).is_err());
}

#[test]
fn dropping_an_unfinished_writer_removes_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = CheckpointWriter::begin(&RealFs, folder.path(), 4).unwrap();
    writer.file("a", |file| file.write(b"x")).unwrap();
    drop(writer);
    assert_eq!(names(folder.path()), [""; 0]);
}

#[test]
fn leftovers_of_killed_processes_are_removed_by_the_next_save() {
    let folder = tempfile::tempdir().unwrap();
    for leftover in [".tmp-checkpoint-3", ".trash-checkpoint-1", "keep"] {
        std::fs::create_dir_all(folder.path().join(leftover).join("x")).unwrap();
    }
    save(&RealFs, folder.path(), 9).unwrap();
    assert_eq!(names(folder.path()), ["checkpoint-9", "keep"]);
}

#[test]
fn retention_keeps_the_newest_complete_ones() {
    let folder = tempfile::tempdir().unwrap();
    for step in [5, 10, 100, 20, 30] {
        save(&RealFs, folder.path(), step).unwrap();
    }
    std::fs::remove_file(folder.path().join("checkpoint-30/a.bin")).unwrap();
    delete_old(&RealFs, folder.path(), 2, &[5]).unwrap();
    // Checkpoint 30 is damaged and does not count. Checkpoint 10 is deleted, and checkpoint 5 is protected.
    assert_eq!(names(folder.path()), ["checkpoint-100", "checkpoint-20", "checkpoint-30", "checkpoint-5"]);
    delete_old(&RealFs, folder.path(), 0, &[]).unwrap();
    assert_eq!(names(folder.path()), ["checkpoint-100"]);
    std::fs::remove_file(folder.path().join("checkpoint-100/a.bin")).unwrap();
    save(&RealFs, folder.path(), 50).unwrap();
    delete_old(&RealFs, folder.path(), 1, &[]).unwrap();
    assert_eq!(newest(folder.path()), Some(50), "the only complete one stays");
}

#[test]
fn deleting_renames_the_checkpoint_first() {
    for at in 0..3 {
        let folder = tempfile::tempdir().unwrap();
        save(&RealFs, folder.path(), 1).unwrap();
        save(&RealFs, folder.path(), 2).unwrap();
        let result = delete_old(&FaultyFs::new(Fault::Killed, at), folder.path(), 1, &[]);
        assert_eq!(result.is_err(), at < 2);
        let latest = latest_complete(folder.path(), Verify::Hashes).unwrap();
        assert_eq!((latest.complete.unwrap().1.step, latest.damaged.len()), (2, 0));
        delete_old(&RealFs, folder.path(), 1, &[]).unwrap();
    }
}
