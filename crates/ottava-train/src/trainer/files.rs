//! The files that a run writes while it trains. Of several ranks one writes them.

use super::start::{Resumed, RunLock};
use crate::report::{CastLog, EventWriter, MetricsWriter};
use ottava_checkpoint::FileStart;
use ottava_common::error::Result;
use ottava_common::fs::{RealFs, replace_file};
use ottava_settings::RunConfig;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The log of what each cast measures, in the run's folder.
const CASTS: &str = "casts.jsonl";

/// The log of comparisons with BF16, in the run's folder.
const SENTINEL: &str = "sentinel.jsonl";

/// The log of digests of tensors, in the run's folder.
const DIGESTS: &str = "digests.jsonl";

/// The log of statistics of tensors, in the run's folder.
const TENSORS: &str = "tensors.jsonl";

/// The folder of files of tensors, in the run's folder.
pub(super) const DUMPS: &str = "dumps";

/// The log of alarms, in the run's folder.
const ALARMS: &str = "alarms.jsonl";

/// The log of completions of reinforcement learning, in the run's folder.
const COMPLETIONS: &str = "completions.jsonl";

/// The completions of the prompts of `[generation]`, in the run's folder.
const SAMPLES: &str = "samples.jsonl";

/// Open files of a run.
pub(super) struct RunFiles {
    pub(super) metrics: MetricsWriter,
    /// The log of cast statistics, if there are casts and it is on.
    pub(super) casts: Option<CastLog>,
    /// The log of comparisons, if there are any.
    pub(super) sentinel: Option<MetricsWriter>,
    /// The log of digests, if passes are repeated.
    pub(super) digests: Option<MetricsWriter>,
    /// The log of statistics of tensors, if there are any.
    pub(super) tensors: Option<MetricsWriter>,
    /// The log of completions, if any are logged.
    pub(super) completions: Option<MetricsWriter>,
    /// The completions of prompts, if they are drawn at evaluations.
    pub(super) samples: Option<MetricsWriter>,
    /// The log of alarms, since the first one.
    alarms: Option<MetricsWriter>,
    pub(super) events: EventWriter,
    /// Held during the run, so that no second process writes into its folder.
    pub(super) lock: RunLock,
}

impl RunFiles {
    /// Creates the files of a new run, or cuts the files of a resumed run to its checkpoint. `has_casts` says whether the run casts anything.
    pub(super) fn open(
        config: &RunConfig,
        mut lock: RunLock,
        resumed: Option<&mut Resumed>,
        has_casts: bool,
    ) -> Result<RunFiles> {
        lock.keep();
        let folder = &config.output_dir;
        let path = folder.join("metrics.jsonl");
        let (metrics, from) = match resumed {
            None => (MetricsWriter::create(&RealFs, &path)?, None),
            Some(resumed) => {
                resumed.abandon_others(config)?;
                let step = resumed.progress.step;
                (MetricsWriter::restore(&RealFs, &path, &resumed.path, step)?, Some((resumed.path.as_path(), step)))
            }
        };
        replace_file(&RealFs, &folder.join("config.toml"), config.to_toml().as_bytes())?;
        let logs = config.logging.cast_statistics_steps > 0 && has_casts;
        let casts = CastLog::open(&folder.join(CASTS), from, logs)?;
        let compares = config.sentinel.sentinel_steps > 0;
        let sentinel = MetricsWriter::optional(&folder.join(SENTINEL), from, compares)?;
        let digests = MetricsWriter::optional(&folder.join(DIGESTS), from, config.sentinel.repeat_steps > 0)?;
        let tensors = MetricsWriter::optional(&folder.join(TENSORS), from, !config.debug.debug_steps.is_empty())?;
        let completes = config.reinforcement.is_on() && config.logging.completions > 0;
        let completions = MetricsWriter::optional(&folder.join(COMPLETIONS), from, completes)?;
        let samples = MetricsWriter::optional(&folder.join(SAMPLES), from, config.generation.at_evaluations)?;
        let alarms = MetricsWriter::optional(&folder.join(ALARMS), from, folder.join(ALARMS).is_file())?;
        let events = EventWriter::create(folder, from.map_or(0, |(_, step)| step))?;
        Ok(RunFiles { metrics, casts, sentinel, digests, tensors, completions, samples, alarms, events, lock })
    }

    /// Logs an alarm of the run in `folder`.
    pub(super) fn log_alarm(&mut self, folder: &Path, step: u64, fields: &[(&str, Value)]) -> Result<()> {
        if self.alarms.is_none() {
            self.alarms = Some(MetricsWriter::create(&RealFs, &folder.join(ALARMS))?);
        }
        self.alarms.as_mut().map_or(Ok(()), |log| log.append(step, fields))
    }

    /// Puts metrics and logs on disk, before a checkpoint refers to them.
    pub(super) fn sync(&mut self) -> Result<()> {
        self.lock.check()?;
        self.metrics.sync()?;
        self.casts.as_mut().map_or(Ok(()), CastLog::sync)?;
        let RunFiles { sentinel, digests, tensors, completions, samples, alarms, .. } = self;
        let logs = [sentinel, digests, tensors, completions, samples, alarms];
        logs.into_iter().flatten().try_for_each(MetricsWriter::sync)
    }

    /// Returns the paths of metrics and logs, which a snapshot flushes to the disk. Errors if another process has taken the folder of the run.
    pub(super) fn paths(&self) -> Result<Vec<PathBuf>> {
        self.lock.check()?;
        let RunFiles { metrics, casts, sentinel, digests, tensors, completions, samples, alarms, .. } = self;
        let logs = [sentinel, digests, tensors, completions, samples, alarms].into_iter().flatten();
        let logs = logs.chain([metrics]).map(MetricsWriter::path).chain(casts.iter().map(CastLog::path));
        Ok(logs.map(Path::to_path_buf).collect())
    }

    /// The parts of metrics and logs of the run in `folder` that a checkpoint copies now, by name.
    pub(super) fn saved(&self, folder: &Path) -> Result<Vec<(String, FileStart)>> {
        let logs = [CASTS, SENTINEL, DIGESTS, TENSORS, COMPLETIONS, SAMPLES, ALARMS];
        let logs = logs.map(|name| MetricsWriter::saved_at(&folder.join(name)));
        let logs = logs.into_iter().filter_map(Result::transpose);
        std::iter::once(self.metrics.saved()).chain(logs).collect()
    }
}
