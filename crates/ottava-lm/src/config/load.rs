//! Reading a run's file, and the settings that a command line changes in it.

use super::RunConfig;
use super::names::{self, Known};
use crate::error::{Error, Result};
use crate::input;
use std::path::Path;
use toml::Table;

/// The largest configuration file.
const MAX_BYTES: u64 = 16 << 20;

impl RunConfig {
    /// Reads `path` and applies `settings` (`key=value`; the key a dotted path, or a bare one that is unique) on top.
    pub fn load(path: &Path, settings: &[String]) -> Result<RunConfig> {
        let text = input::read_text(path, MAX_BYTES).map_err(|e| Error::Config(format!("{}: {e}", path.display())))?;
        let mut table: Table =
            text.parse().map_err(|e| Error::Config(format!("{}: this is not valid TOML: {e}", path.display())))?;
        let known = Known::new();
        let mut problems = Vec::new();
        known.canonical(&mut table, "", &mut problems);
        for setting in settings {
            if let Err(problem) = known.set(&mut table, setting) {
                problems.push(format!("--set {setting}: {problem}"));
            }
        }
        if problems.is_empty() {
            match table.try_into::<RunConfig>() {
                Ok(config) => {
                    problems = config.problems();
                    if problems.is_empty() {
                        return config.with_adapter();
                    }
                }
                Err(error) => problems.push(error.to_string().trim_end().replace('\n', " ")),
            }
        }
        let told = problems.iter().take(names::MAX_PROBLEMS).map(|problem| format!("{}: {problem}", path.display()));
        let more = (problems.len() > names::MAX_PROBLEMS).then(|| format!("{}: more problems follow", path.display()));
        Err(Error::Config(told.chain(more).collect::<Vec<_>>().join("\n")))
    }
}
