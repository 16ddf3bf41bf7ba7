//! The files that a run writes while it trains. Of several ranks one writes them.

use super::start::{Resumed, RunLock};
use crate::checkpoint::FileStart;
use crate::config::RunConfig;
use crate::error::Result;
use crate::fs::{RealFs, replace_file};
use crate::report::{CastLog, EventWriter, MetricsWriter};
use crate::scaling::CastRecord;
use std::path::Path;

/// The log of what each cast measures, in the run's folder.
const CASTS: &str = "casts.jsonl";

/// Open files of a run.
pub(super) struct RunFiles {
    pub(super) metrics: MetricsWriter,
    /// The log of cast statistics, if there are casts and it is on.
    pub(super) casts: Option<CastLog>,
    pub(super) events: EventWriter,
    /// Held during the run, so that no second process writes into its folder.
    pub(super) lock: RunLock,
}

impl RunFiles {
    /// Creates the files of a new run, or cuts those of a resumed one to its checkpoint. What `casts` have counted so far belongs to no
    /// line of their log.
    pub(super) fn open(
        config: &RunConfig,
        mut lock: RunLock,
        resumed: Option<&mut Resumed>,
        casts: &[CastRecord],
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
        let logs = config.training.cast_statistics_steps > 0;
        let casts = CastLog::open(&folder.join(CASTS), from, casts, logs)?;
        let events = EventWriter::create(folder, from.map_or(0, |(_, step)| step))?;
        Ok(RunFiles { metrics, casts, events, lock })
    }

    /// Puts metrics and cast log on disk, before a checkpoint refers to them.
    pub(super) fn sync(&mut self) -> Result<()> {
        self.lock.check()?;
        self.metrics.sync()?;
        self.casts.as_mut().map_or(Ok(()), CastLog::sync)
    }

    /// The parts of metrics and cast log of the run in `folder` that a checkpoint copies now, by name.
    pub(super) fn saved(&self, folder: &Path) -> Result<Vec<(String, FileStart)>> {
        let casts = CastLog::saved(&folder.join(CASTS))?;
        Ok([self.metrics.saved()?].into_iter().chain(casts).collect())
    }
}
