//! `metrics.jsonl`: one JSON object a line, each with its `step`. The record of a run that other programs read.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::{Error, Result};

/// Appends to a `metrics.jsonl`.
pub struct MetricsWriter {
    file: File,
    path: PathBuf,
}

impl MetricsWriter {
    /// Opens `path` to go on after `step`, 0 for a new run. Lines of later steps are removed: a resumed run does these
    /// steps again, and its file is then the same as that of an unbroken run. So is half a line that a killed run left.
    /// Errors with [`Error::Data`] when another line before them cannot be read.
    pub fn resume(path: &Path, step: u64) -> Result<MetricsWriter> {
        let kept = match File::open(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => 0,
            file => length_up_to(file.map_err(Error::io(path))?, path, step)?,
        };
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(Error::io(path))?;
        file.set_len(kept).map_err(Error::io(path))?;
        Ok(MetricsWriter { file, path: path.to_path_buf() })
    }

    /// Appends one line: `step`, then `fields`. Numbers that are not finite become null, as JSON has none.
    pub fn append(&mut self, step: u64, fields: &[(&str, Value)]) -> Result<()> {
        let mut record = Map::from_iter([("step".to_string(), Value::from(step))]);
        record.extend(fields.iter().map(|(name, value)| (name.to_string(), value.clone())));
        let line = Value::Object(record).to_string() + "\n";
        // In one call, so that a reader never sees half a line.
        self.file.write_all(line.as_bytes()).map_err(Error::io(&self.path))
    }

    /// Brings what was written to the disk; before a checkpoint is saved, which must not know steps that this lacks.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_all().map_err(Error::io(&self.path))
    }
}

/// Bytes of the lines before the first that is of a later step than `step`.
fn length_up_to(file: File, path: &Path, step: u64) -> Result<u64> {
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

    fn run(path: &Path, steps: std::ops::RangeInclusive<u64>) {
        let mut metrics = MetricsWriter::resume(path, steps.start() - 1).unwrap();
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
                let mut file = OpenOptions::new().append(true).open(&broken).unwrap();
                file.write_all(leftover.as_bytes()).unwrap();
                let k = k.min(9);
                run(&broken, k + 1..=12);
                assert_eq!(std::fs::read_to_string(&broken).unwrap(), expected, "stopped after {k}, left {leftover:?}");
            }
        }
    }

    #[test]
    fn a_file_of_another_kind_is_not_cut() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        for text in ["{\"step\":1}\nhello\n", "{\"step\":1}\n{\"loss\":1}\n", "{\"step\":1}\n{\"step\":-1}\n"] {
            std::fs::write(&path, text).unwrap();
            let error = MetricsWriter::resume(&path, 5).err().unwrap().to_string();
            assert!(error.contains("metrics.jsonl:2: not a line of metrics"), "{error}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
    }
}
