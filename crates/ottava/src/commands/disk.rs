//! The disk space of a run: what its checkpoints take, and what is free.

use super::plan_verdict::size;
use ottava_common::Error;
use ottava_common::fs::free_space;
use ottava_settings::{Interval, RunConfig};
use std::io::ErrorKind;
use std::path::Path;

/// Returns a sentence with the settings to change if the checkpoints of a run take more space than is free where they are written. `bytes` is the size of
/// a checkpoint, and `steps` the number of steps if it is known.
///
/// A new checkpoint is written before an old one is deleted, so a run has one checkpoint more at a time than it keeps.
pub fn shortage(config: &RunConfig, bytes: u64, steps: Option<u64>) -> Option<String> {
    let checkpoint = &config.checkpoint;
    let saves = match (checkpoint.save_steps, steps) {
        (Interval::Every(interval), Some(steps)) => steps.div_ceil(interval.max(1)).max(1),
        (Interval::Every(_) | Interval::End, _) => 1,
    };
    let count = match checkpoint.save_total_limit as u64 {
        0 => saves,
        limit => saves.min(limit.saturating_add(1)),
    };
    let (needed, free) = (bytes.saturating_mul(count), free_space(&config.output_dir)?);
    let checkpoints = match count {
        1 => format!("a checkpoint takes {}", size(bytes)),
        _ => format!("{count} checkpoints, one of them while it is written, take {}", size(needed)),
    };
    (needed > free).then(|| {
        format!(
            "{checkpoints}, and {} are free on the disk of {}: free space, set `output_dir` to a folder of another disk, or set a smaller \
             `checkpoint.save_total_limit`",
            size(free),
            config.output_dir.display()
        )
    })
}

/// Whether this process may write files into `folder`.
pub fn is_writable(folder: &Path) -> bool {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    rustix::fs::access(folder, rustix::fs::Access::WRITE_OK).is_ok()
}

/// Adds the setting of the folder to the error of a run whose folder cannot be written to.
pub fn in_output_dir(error: Error) -> Error {
    match error {
        Error::Io { path, source }
            if matches!(
                source.kind(),
                ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem | ErrorKind::NotADirectory
            ) =>
        {
            Error::Config(format!("{path}: {source}; set `output_dir` to a folder that you may write to"))
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoints_that_do_not_fit_the_disk_are_told_with_both_numbers() {
        let folder = tempfile::tempdir().unwrap();
        let mut config = RunConfig { output_dir: folder.path().join("runs/new"), ..RunConfig::default() };
        let there = free_space(&config.output_dir).unwrap();
        assert_eq!(shortage(&config, 1, Some(10_000)), None);
        let told = shortage(&config, there * 2, Some(60)).unwrap();
        assert!(told.contains("a checkpoint takes") && told.contains("free on the disk of"), "{told}");
        assert!(told.contains(&size(there * 2)) && told.contains("`output_dir`"), "{told}");
        // Three are kept while the next one is written.
        let told = shortage(&config, there / 2, Some(10_000)).unwrap();
        assert!(told.contains("4 checkpoints, one of them while it is written"), "{told}");
        config.checkpoint.save_steps = Interval::End;
        assert_eq!(shortage(&config, there / 2, Some(10_000)), None);
    }

    #[test]
    fn a_folder_of_a_run_that_cannot_be_written_names_its_setting() {
        let denied = std::io::Error::from(ErrorKind::PermissionDenied);
        assert!(in_output_dir(Error::io("/usr/run")(denied)).to_string().contains("set `output_dir`"));
    }
}
