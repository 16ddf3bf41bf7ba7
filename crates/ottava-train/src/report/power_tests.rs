//! Simulates a power failure after every file operation while a run starts, trains, saves, deletes old checkpoints and resumes. After the failure,
//! each checkpoint that was reported as saved is complete, and the run continues.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use serde_json::json;

use super::MetricsWriter;
use ottava_checkpoint::{CheckpointWriter, Verify, abandon_after, delete_old, latest_complete};
use ottava_common::fs::{Fs, FsFile, RealFs, create_dirs, replace_file};

/// A file operation that has completed. Paths are relative to the folder of the test.
#[derive(Clone, Debug)]
enum Op {
    CreateDir(PathBuf),
    Create(PathBuf),
    Append(PathBuf, u64),
    Write(PathBuf, Vec<u8>),
    Sync(PathBuf),
    SyncDir(PathBuf),
    Rename(PathBuf, PathBuf),
    Remove(PathBuf),
}

/// The real file system, with a list of the operations on it.
#[derive(Clone)]
struct Recorder {
    root: PathBuf,
    done: Arc<Mutex<Vec<Op>>>,
}

impl Recorder {
    fn note<T>(&self, result: io::Result<T>, op: impl FnOnce() -> Op) -> io::Result<T> {
        let value = result?;
        self.done.lock().unwrap().push(op());
        Ok(value)
    }

    fn below(&self, path: &Path) -> PathBuf {
        path.strip_prefix(&self.root).expect("all of a run is below the folder of the test").to_path_buf()
    }

    fn file(&self, file: Box<dyn FsFile>, path: &Path) -> Box<dyn FsFile> {
        Box::new(RecordedFile { recorder: self.clone(), file, path: self.below(path) })
    }
}

impl Fs for Recorder {
    fn create(&self, path: &Path) -> io::Result<Box<dyn FsFile>> {
        let file = self.note(RealFs.create(path), || Op::Create(self.below(path)))?;
        Ok(self.file(file, path))
    }
    fn append(&self, path: &Path, length: u64) -> io::Result<Box<dyn FsFile>> {
        let file = self.note(RealFs.append(path, length), || Op::Append(self.below(path), length))?;
        Ok(self.file(file, path))
    }
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.note(RealFs.create_dir(path), || Op::CreateDir(self.below(path)))
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.note(RealFs.rename(from, to), || Op::Rename(self.below(from), self.below(to)))
    }
    fn remove(&self, path: &Path) -> io::Result<()> {
        self.note(RealFs.remove(path), || Op::Remove(self.below(path)))
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.note(RealFs.sync_dir(path), || Op::SyncDir(self.below(path)))
    }
}

struct RecordedFile {
    recorder: Recorder,
    file: Box<dyn FsFile>,
    path: PathBuf,
}

impl Write for RecordedFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.file.write(bytes)?;
        self.recorder.done.lock().unwrap().push(Op::Write(self.path.clone(), bytes[..count].to_vec()));
        Ok(count)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl FsFile for RecordedFile {
    fn sync(&mut self) -> io::Result<()> {
        self.recorder.note(self.file.sync(), || Op::Sync(self.path.clone()))
    }
}

/// The real file system without flushes to the disk, for the time after a simulated failure.
struct Hasty;

struct HastyFile(Box<dyn FsFile>);

impl Fs for Hasty {
    fn create(&self, path: &Path) -> io::Result<Box<dyn FsFile>> {
        Ok(Box::new(HastyFile(RealFs.create(path)?)))
    }
    fn append(&self, path: &Path, length: u64) -> io::Result<Box<dyn FsFile>> {
        Ok(Box::new(HastyFile(RealFs.append(path, length)?)))
    }
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        RealFs.create_dir(path)
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        RealFs.rename(from, to)
    }
    fn remove(&self, path: &Path) -> io::Result<()> {
        RealFs.remove(path)
    }
    fn sync_dir(&self, _: &Path) -> io::Result<()> {
        Ok(())
    }
}

impl Write for HastyFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl FsFile for HastyFile {
    fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A file or folder: its state in the operating system, and its state on the disk.
#[derive(Default)]
struct Node {
    data: Vec<u8>,
    data_on_disk: Vec<u8>,
    entries: Option<BTreeMap<String, usize>>,
    entries_on_disk: BTreeMap<String, usize>,
}

/// The data that a power failure leaves on the disk.
#[derive(Clone, Copy, Debug)]
enum Left {
    /// The contents of files and the names in folders that were flushed.
    Synced,
    /// All names, and the contents of files that were flushed.
    Names,
}

/// The disk below the folder of a test, replayed from the list of operations.
struct Disk(Vec<Node>);

impl Disk {
    fn after(ops: &[Op]) -> Disk {
        let mut disk = Disk(vec![Node { entries: Some(BTreeMap::new()), ..Node::default() }]);
        ops.iter().for_each(|op| disk.apply(op));
        disk
    }

    fn find(&self, path: &Path) -> usize {
        path.iter().fold(0, |node, name| self.0[node].entries.as_ref().unwrap()[name.to_str().unwrap()])
    }

    fn entries(&mut self, path: &Path) -> (&mut BTreeMap<String, usize>, String) {
        let parent = self.find(path.parent().unwrap());
        let name = path.file_name().unwrap().to_str().unwrap().to_string();
        (self.0[parent].entries.as_mut().unwrap(), name)
    }

    fn add(&mut self, path: &Path, node: Node) {
        let id = self.0.len();
        self.0.push(node);
        let (entries, name) = self.entries(path);
        entries.insert(name, id);
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::CreateDir(path) => self.add(path, Node { entries: Some(BTreeMap::new()), ..Node::default() }),
            Op::Create(path) => self.add(path, Node::default()),
            Op::Append(path, length) => {
                let (entries, name) = self.entries(path);
                if !entries.contains_key(&name) {
                    self.add(path, Node::default());
                }
                let id = self.find(path);
                self.0[id].data.resize(*length as usize, 0);
            }
            Op::Write(path, bytes) => {
                let id = self.find(path);
                self.0[id].data.extend(bytes);
            }
            Op::Sync(path) => {
                let id = self.find(path);
                self.0[id].data_on_disk = self.0[id].data.clone();
            }
            Op::SyncDir(path) => {
                let id = self.find(path);
                self.0[id].entries_on_disk = self.0[id].entries.clone().unwrap();
            }
            Op::Rename(from, to) => {
                let (entries, name) = self.entries(from);
                let id = entries.remove(&name).unwrap();
                let (entries, name) = self.entries(to);
                entries.insert(name, id);
            }
            Op::Remove(path) => {
                let (entries, name) = self.entries(path);
                entries.remove(&name).unwrap();
            }
        }
    }

    /// Writes what the failure leaves into a real folder.
    fn write(&self, node: usize, left: Left, to: &Path) {
        let node = &self.0[node];
        match &node.entries {
            None => std::fs::write(to, &node.data_on_disk).unwrap(),
            Some(names) => {
                std::fs::create_dir_all(to).unwrap();
                let names = match left {
                    Left::Synced => &node.entries_on_disk,
                    Left::Names => names,
                };
                names.iter().for_each(|(name, &id)| self.write(id, left, &to.join(name)));
            }
        }
    }
}

/// Does the file operations of a trainer in a run's folder, in their order: starts or resumes, trains to `end`, and saves a checkpoint every second
/// step. Calls `saved` when a checkpoint is reported as saved.
fn train(
    fs: &dyn Fs,
    run: &Path,
    from: Option<(PathBuf, u64)>,
    end: u64,
    keep_count: usize,
    mut saved: impl FnMut(u64),
) {
    let folder = run.join("checkpoints");
    create_dirs(fs, &folder).unwrap();
    replace_file(fs, &run.join("config.toml"), format!("until = {end}").as_bytes()).unwrap();
    let path = run.join("metrics.jsonl");
    let (mut metrics, start) = match from {
        None => (MetricsWriter::create(fs, &path).unwrap(), 0),
        Some((checkpoint, step)) => {
            abandon_after(fs, &folder, step).unwrap();
            (MetricsWriter::restore(fs, &path, &checkpoint, step).unwrap(), step)
        }
    };
    for step in start + 1..=end {
        if step == start + 1 || step % 2 == 0 {
            metrics.append(step, &[("loss", json!(1.0 / step as f64))]).unwrap();
        }
        if step % 2 == 0 {
            metrics.sync().unwrap();
            replace_file(fs, &run.join("loss.svg"), b"<svg/>").unwrap();
            let mut writer = CheckpointWriter::begin(fs, &folder, step).unwrap();
            let (name, start) = metrics.saved().unwrap();
            // The checkpoint is written while the run continues, so the next step is logged between two files.
            if step < end {
                metrics.append(step + 1, &[("loss", json!(1.0 / (step + 1) as f64))]).unwrap();
            }
            writer.copy(&name, &start).unwrap();
            writer.file("model.safetensors", |file| file.write(&[step as u8; 100])).unwrap();
            writer.finish(json!({ "step": step })).unwrap();
            saved(step);
            delete_old(fs, &folder, keep_count, &[step]).unwrap();
        }
    }
}

#[test]
fn a_power_failure_after_any_operation_keeps_what_was_saved() {
    let folder = tempfile::tempdir().unwrap();
    let recorder = Recorder { root: folder.path().to_path_buf(), done: Arc::default() };
    let run = folder.path().join("runs/run");
    // The number of operations after which a step was reported as the newest saved step.
    let mut reports: Vec<(usize, u64)> = Vec::new();
    let report = |reports: &mut Vec<(usize, u64)>, step| reports.push((recorder.done.lock().unwrap().len(), step));
    train(&recorder, &run, None, 6, 2, |step| report(&mut reports, step));
    // The run returns to an older checkpoint twice. From then on, newer checkpoints do not count.
    let older = || Some((run.join("checkpoints/checkpoint-4"), 4));
    report(&mut reports, 4);
    train(&recorder, &run, older(), 5, 1, |_| ());
    let left = recorder.done.lock().unwrap().len();
    train(&recorder, &run, older(), 8, 1, |step| report(&mut reports, step));
    let ops = recorder.done.lock().unwrap().clone();
    let is_sixth = |op: &Op| matches!(op, Op::Rename(_, to) if to.ends_with("checkpoint-6"));
    let again = left + ops[left..].iter().position(is_sixth).unwrap();
    assert!(ops.len() > 120, "{} operations", ops.len());
    for count in 0..=ops.len() {
        let disk = Disk::after(&ops[..count]);
        for kept in [Left::Synced, Left::Names] {
            let after = tempfile::tempdir().unwrap();
            disk.write(0, kept, after.path());
            let run = after.path().join("runs/run");
            let found = latest_complete(&run.join("checkpoints"), Verify::Hashes).unwrap();
            let what =
                format!("{kept:?} after {count} of {} operations, the last {:?}", ops.len(), ops[..count].last());
            assert!(found.damaged.is_empty(), "{what}: {:?}", found.damaged);
            let newest = found.complete.map(|(path, manifest)| (path, manifest.step));
            let step = newest.as_ref().map_or(0, |(_, step)| *step);
            let reported = reports.iter().rfind(|(at, _)| *at <= count).map_or(0, |(_, step)| *step);
            assert!(step >= reported, "{what}: step {step} where {reported} was reported");
            assert!(step == 4 || !(left..=again).contains(&count), "{what}: step {step} was left behind");
            // The run continues, and its metrics have each step once.
            train(&Hasty, &run, newest, step + 2, 1, |_| ());
            let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
            let steps: Vec<u64> = text
                .lines()
                .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["step"].as_u64().unwrap())
                .collect();
            assert_eq!(steps, (1..=step + 2).collect::<Vec<_>>(), "{what}");
        }
    }
}
