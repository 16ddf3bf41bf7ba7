//! Writes `metrics.jsonl`, the record of a run that other programs read: one JSON object per line, each with its `step`.

use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use ottava_checkpoint::FileStart;
use ottava_common::fs::{Fs, FsFile, RealFs, expect_regular, replace_file, set_aside, sync_parent};
use ottava_common::{Error, Result};

/// The maximum size of a file of metrics or cast statistics that is read whole. A hundred million steps take less.
pub const MAX_METRICS_BYTES: u64 = 1 << 36;

/// Returns the name that the copy of the file at `path` has in a checkpoint.
fn saved_name(path: &Path) -> String {
    let name = path.file_name().expect("a file has a name");
    format!("training/{}", name.to_string_lossy())
}

/// Appends lines to a `metrics.jsonl`.
pub struct MetricsWriter {
    file: Box<dyn FsFile>,
    path: PathBuf,
}

impl MetricsWriter {
    /// Starts the metrics of a new run at `path`. If the file has lines of a run that ended before its first checkpoint, it is renamed. Errors with
    /// [`Error::Data`] if the file is of another kind.
    pub fn create(fs: &dyn Fs, path: &Path) -> Result<MetricsWriter> {
        let (first, all) = (length_up_to(path, 0)?, length_up_to(path, u64::MAX)?);
        if all > first {
            let aside = set_aside(fs, path)?;
            tracing::warn!("lines of a run without a checkpoint were moved to {}", aside.display());
        }
        MetricsWriter::open(fs, path, 0)
    }

    /// Opens `path` to continue after `step`. Removes the lines of later steps, because a resumed run trains them again, and an incomplete last line.
    /// Errors with [`Error::Data`] if a line of an earlier step cannot be read.
    pub fn resume(fs: &dyn Fs, path: &Path, step: u64) -> Result<MetricsWriter> {
        MetricsWriter::open(fs, path, length_up_to(path, step)?)
    }

    /// Opens `path` to continue after `checkpoint` of `step`, with exactly the lines of the checkpoint's copy. A file that does not start with these
    /// lines is renamed. Checkpoints of format 1 do not hold a copy, so `path` is then cut after `step`.
    pub fn restore(fs: &dyn Fs, path: &Path, checkpoint: &Path, step: u64) -> Result<MetricsWriter> {
        let saved = checkpoint.join(saved_name(path));
        if !saved.is_file() {
            let kept = length_up_to(path, step)?;
            if kept == 0 {
                tracing::warn!("{}: the metrics of steps 1 to {step} are missing", path.display());
            }
            return MetricsWriter::open(fs, path, kept);
        }
        let length = std::fs::metadata(&saved).map_err(Error::io(&saved))?.len();
        if !starts_with(path, &saved)? {
            if path.symlink_metadata().is_ok() {
                let aside = set_aside(fs, path)?;
                tracing::warn!("lines of another branch were moved to {}", aside.display());
            }
            replace_file(fs, path, &std::fs::read(&saved).map_err(Error::io(&saved))?)?;
        }
        MetricsWriter::open(fs, path, length)
    }

    /// Opens an optional log at `path`. If `resumed` holds a checkpoint and its step, restores the lines of earlier steps. Returns `None` if `logs`
    /// is false, also after it has restored lines.
    pub fn optional(path: &Path, resumed: Option<(&Path, u64)>, logs: bool) -> Result<Option<MetricsWriter>> {
        let saved = resumed.is_some_and(|(checkpoint, _)| checkpoint.join(saved_name(path)).is_file());
        if !logs && !saved && !path.is_file() {
            return Ok(None);
        }
        let writer = match resumed {
            None => MetricsWriter::create(&RealFs, path)?,
            Some((checkpoint, step)) if saved => MetricsWriter::restore(&RealFs, path, checkpoint, step)?,
            // If the run has not logged, its checkpoints do not hold a copy of the log.
            Some((_, step)) => MetricsWriter::resume(&RealFs, path, step)?,
        };
        Ok(logs.then_some(writer))
    }

    /// Returns the part of an optional log at `path` that a checkpoint copies now, and its name in the checkpoint. Returns `None` if the log does not
    /// exist.
    pub fn saved_at(path: &Path) -> Result<Option<(String, FileStart)>> {
        path.is_file().then(|| Ok((saved_name(path), FileStart::now(path)?))).transpose()
    }

    fn open(fs: &dyn Fs, path: &Path, length: u64) -> Result<MetricsWriter> {
        let file = fs.append(path, length).map_err(Error::io(path))?;
        sync_parent(fs, path)?;
        Ok(MetricsWriter { file, path: path.to_path_buf() })
    }

    /// Appends a line with `step` and then `fields`. Numbers that are not finite become null, since JSON cannot represent them.
    pub fn append(&mut self, step: u64, fields: &[(&str, Value)]) -> Result<()> {
        let mut record = Map::from_iter([("step".to_string(), Value::from(step))]);
        record.extend(fields.iter().map(|(name, value)| (name.to_string(), value.clone())));
        let line = Value::Object(record).to_string() + "\n";
        // The line is written in one call, so a reader never sees half a line.
        self.file.write_all(line.as_bytes()).map_err(Error::io(&self.path))
    }

    /// Flushes the file to the disk. Called before a checkpoint is saved, so that the file has all steps that a checkpoint has.
    pub fn sync(&mut self) -> Result<()> {
        self.file.sync().map_err(Error::io(&self.path))
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the part of the file that a checkpoint copies now, and its name in the checkpoint.
    pub fn saved(&self) -> Result<(String, FileStart)> {
        Ok((saved_name(&self.path), FileStart::now(&self.path)?))
    }
}

/// Opens the file at `path`. Returns `None` if it does not exist. Errors if it is not a regular file.
fn open_regular(path: &Path) -> Result<Option<File>> {
    expect_regular(path).map_err(Error::io(path))?;
    match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        file => file.map(Some).map_err(Error::io(path)),
    }
}

/// Returns whether the file at `path` starts with the bytes of the file at `start`.
fn starts_with(path: &Path, start: &Path) -> Result<bool> {
    let Some(file) = open_regular(path)? else { return Ok(false) };
    let start_file = File::open(start).map_err(Error::io(start))?;
    let (mut file, mut start_file) = (BufReader::new(file), BufReader::new(start_file));
    loop {
        let there = file.fill_buf().map_err(Error::io(path))?;
        let wanted = start_file.fill_buf().map_err(Error::io(start))?;
        let count = there.len().min(wanted.len());
        if wanted.is_empty() {
            return Ok(true);
        }
        if there.is_empty() || there[..count] != wanted[..count] {
            return Ok(false);
        }
        file.consume(count);
        start_file.consume(count);
    }
}

/// Returns the number of bytes before the first line of a step after `step`. Returns 0 if the file does not exist.
fn length_up_to(path: &Path, step: u64) -> Result<u64> {
    let Some(file) = open_regular(path)? else { return Ok(0) };
    let (mut reader, mut kept, mut line) = (BufReader::new(file), 0, Vec::new());
    for number in 1.. {
        line.clear();
        reader.read_until(b'\n', &mut line).map_err(Error::io(path))?;
        if !line.ends_with(b"\n") {
            break;
        }
        let found = serde_json::from_slice::<Value>(&line).ok().and_then(|record| record.get("step")?.as_u64());
        match found {
            Some(found) if found > step => break,
            Some(_) => kept += line.len() as u64,
            None => {
                return Err(Error::Data(format!(
                    "{}:{number}: not a line of metrics with a step; move the file away to start a new one",
                    path.display()
                )));
            }
        }
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use ottava_checkpoint::CheckpointWriter;
    use ottava_common::fs::RealFs;
    use std::io::Write;

    fn run(path: &Path, steps: std::ops::RangeInclusive<u64>) {
        let mut metrics = MetricsWriter::resume(&RealFs, path, steps.start() - 1).unwrap();
        for step in steps {
            metrics.append(step, &[("loss", json!(1.0 / step as f64)), ("kind", json!("train"))]).unwrap();
            if step % 4 == 0 {
                metrics.append(step, &[("eval_loss", json!(f64::NAN))]).unwrap();
            }
        }
        metrics.sync().unwrap();
    }

    #[test]
    fn a_resumed_run_has_the_file_of_an_unbroken_one() {
        let folder = tempfile::tempdir().unwrap();
        let (unbroken, broken) = (folder.path().join("a"), folder.path().join("b"));
        run(&unbroken, 1..=12);
        let expected = std::fs::read_to_string(&unbroken).unwrap();
        assert!(expected.starts_with("{\"step\":1,\"loss\":1.0,\"kind\":\"train\"}\n"));
        assert!(expected.contains("{\"step\":4,\"eval_loss\":null}\n"));
        for k in 0..=12 {
            for leftover in ["", "{\"st", "{\"step\": 1"] {
                run(&broken, 1..=9);
                let mut file = File::options().append(true).open(&broken).unwrap();
                file.write_all(leftover.as_bytes()).unwrap();
                let k = k.min(9);
                run(&broken, k + 1..=12);
                assert_eq!(std::fs::read_to_string(&broken).unwrap(), expected, "stopped after {k}, left {leftover:?}");
            }
        }
    }

    /// If a step is stopped during its evaluation, its line is kept in the checkpoint as JSON and written later.
    #[test]
    fn numbers_that_were_read_are_written_with_the_same_digits() {
        for text in ["1.5740016959607601", "2.2250738585072014e-308", "0.30000000000000004"] {
            let value: Value = serde_json::from_str(text).unwrap();
            assert_eq!(value.to_string(), text);
        }
    }

    #[test]
    fn a_file_of_another_kind_is_not_cut() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        for text in ["{\"step\":1}\nhello\n", "{\"step\":1}\n{\"loss\":1}\n", "{\"step\":1}\n{\"step\":-1}\n"] {
            std::fs::write(&path, text).unwrap();
            let error = MetricsWriter::resume(&RealFs, &path, 5).err().unwrap().to_string();
            assert!(error.contains("metrics.jsonl:2: not a line of metrics"), "{error}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
    }

    #[test]
    fn a_run_starts_with_the_metrics_of_its_checkpoint_and_nothing_is_lost() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
        run(&path, 1..=4);
        let four = read("metrics.jsonl");
        let metrics = MetricsWriter::resume(&RealFs, &path, 4).unwrap();
        let mut writer = CheckpointWriter::begin(&RealFs, folder.path(), 4).unwrap();
        let (name, start) = metrics.saved().unwrap();
        writer.copy(&name, &start).unwrap();
        let checkpoint = writer.finish(Value::Null).unwrap();
        // Lines that the run trains again are cut. Lines of another branch are moved to another file. Missing lines are restored.
        run(&path, 5..=9);
        drop(MetricsWriter::restore(&RealFs, &path, &checkpoint, 4).unwrap());
        assert_eq!(read("metrics.jsonl"), four);
        std::fs::write(&path, "{\"step\":1,\"loss\":9.0}\n").unwrap();
        drop(MetricsWriter::restore(&RealFs, &path, &checkpoint, 4).unwrap());
        assert_eq!(
            (read("metrics.jsonl"), read("abandoned-metrics.jsonl")),
            (four.clone(), "{\"step\":1,\"loss\":9.0}\n".into())
        );
        std::fs::remove_file(&path).unwrap();
        drop(MetricsWriter::restore(&RealFs, &path, &checkpoint, 4).unwrap());
        assert_eq!(read("metrics.jsonl"), four);
        // A new run begins with an empty file.
        drop(MetricsWriter::create(&RealFs, &path).unwrap());
        assert_eq!((read("metrics.jsonl"), read("abandoned-metrics.jsonl.2")), (String::new(), four));
        std::fs::write(&path, "{\"step\":0,\"eval_loss\":9.0}\n{\"st").unwrap();
        drop(MetricsWriter::create(&RealFs, &path).unwrap());
        assert_eq!(read("metrics.jsonl"), "");
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("elsewhere", &path).unwrap();
        let error = MetricsWriter::resume(&RealFs, &path, 0).err().unwrap().to_string();
        assert!(error.contains("this is a link"), "{error}");
    }
}
