//! Reads and writes `run.json`: a description of a run, and how it ended.

use ottava_common::error::{Error, Result};
use ottava_common::fs::{RealFs, replace_file};
use ottava_common::input;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::time::UNIX_EPOCH;

/// The maximum size of a `run.json` in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// The name of the file in the folder of a run.
const FILE: &str = "run.json";

/// A description of a run. It is written when the run starts or resumes, and again when it ends.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RunRecord {
    /// The time at which the run started or resumed, in seconds since 1970.
    pub started: u64,
    /// The product name of the GPUs, or `CPU`.
    pub device: String,
    /// The number of processes that train.
    pub ranks: usize,
    /// The number of ranks of each axis, such as `data 2, context 1, tensor 1, pipeline 1, expert 1`.
    pub mesh: String,
    /// The recipe.
    pub recipe: String,
    /// The number of trained parameters.
    pub parameters: usize,
    /// The number of steps of the whole run.
    pub max_steps: u64,
    /// The number of tokens of a step, summed over all ranks.
    pub tokens_per_step: u64,
    /// The floating-point operations of forward and backward per token, without recomputation.
    pub flops_per_token: f64,
    /// The peak FLOP/s of all GPUs together for dense products in BF16, from the data sheet; `None` on a CPU and on unknown GPUs.
    pub peak_flops: Option<f64>,
    /// The bytes of tensors at the peak that the dry run has planned for one rank. `None` on a CPU, since metrics there count the memory of the whole
    /// process.
    pub planned_memory_bytes: Option<u64>,
    /// How the run ended; `None` while it runs, and after it was killed.
    pub end: Option<RunEnd>,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunEnd {
    /// The time of the end, in seconds since 1970.
    pub time: u64,
    /// The last step.
    pub step: u64,
    /// The outcome of the run.
    pub outcome: RunOutcome,
    /// The message of the error; empty if the run finished.
    pub message: String,
}

/// The outcome of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RunOutcome {
    /// All steps were trained, or early stopping ended the run.
    Finished,
    /// A signal or the sentinel ended the run. It can be resumed.
    Stopped,
    /// An error ended the run.
    Failed,
}

impl RunRecord {
    /// Returns the current time in seconds since 1970.
    pub fn now() -> u64 {
        UNIX_EPOCH.elapsed().unwrap_or_default().as_secs()
    }

    /// Returns the model FLOP utilisation at `tokens_per_second` of all ranks: the share of [`RunRecord::peak_flops`]. The BF16 peak is used for
    /// every recipe, so utilisations of recipes can be compared. FP8 has twice this peak, so its utilisation may exceed 1. Chowdhery et al. 2022,
    /// arXiv:2204.02311, appendix B.
    pub fn utilization(&self, tokens_per_second: f64) -> Option<f64> {
        self.peak_flops.map(|peak| tokens_per_second * self.flops_per_token / peak)
    }

    /// Writes the record into `folder`, the folder of the run.
    pub fn write(&self, folder: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self).expect("a record is plain data") + "\n";
        replace_file(&RealFs, &folder.join(FILE), text.as_bytes())
    }

    /// Reads the record of the run in `folder`. Returns `None` if the file does not exist. A link is not followed.
    ///
    /// # Errors
    /// Errors of the system, errors of [`input::open_unlinked`], and [`Error::Data`] if another program wrote the file.
    pub fn read(folder: &Path) -> Result<Option<RunRecord>> {
        let path = folder.join(FILE);
        let text = match input::read_text_unlinked(&path, MAX_BYTES) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            text => text.map_err(Error::io(&path))?,
        };
        serde_json::from_str(&text).map(Some).map_err(|error| {
            Error::Data(format!("{}: not the record of a run ({error}); move the file away", path.display()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written_and_later_keys_are_no_error() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(RunRecord::read(folder.path()).unwrap(), None);
        let end = RunEnd { time: 7, step: 5, outcome: RunOutcome::Failed, message: "why".into() };
        let record = RunRecord {
            ranks: 8,
            flops_per_token: 2e9,
            peak_flops: Some(8e12),
            end: Some(end),
            ..RunRecord::default()
        };
        record.write(folder.path()).unwrap();
        assert_eq!(RunRecord::read(folder.path()).unwrap(), Some(record.clone()));
        assert_eq!((record.utilization(1000.0), RunRecord::default().utilization(1000.0)), (Some(0.25), None));
        let path = folder.path().join("run.json");
        std::fs::write(&path, "{\"ranks\": 2, \"of_a_later_version\": 1}").unwrap();
        assert_eq!(RunRecord::read(folder.path()).unwrap().unwrap().ranks, 2);
        std::fs::write(&path, "hello").unwrap();
        assert!(RunRecord::read(folder.path()).unwrap_err().to_string().contains("run.json: not the record of a run"));
    }
}
