//! Configurations that are not read from a run's file: configurations of saved models and of benchmarks.

use crate::RunConfig;
use crate::names::Known;
use ottava_checkpoint::{Manifest, Progress, training};
use ottava_common::error::{Error, Result};
use std::path::Path;
use toml::Table;

impl RunConfig {
    /// Returns the configuration of the run that saved the checkpoint `folder`, and the names of its casts; `None` for other model folders.
    pub fn saved_in(folder: &Path) -> Result<Option<(RunConfig, Vec<String>)>> {
        let Some(manifest) = Manifest::read(folder)? else { return Ok(None) };
        let progress = training::progress(folder, &manifest)?;
        Ok(Some((RunConfig::saved(folder, &progress)?, progress.scaling_slots)))
    }

    /// Returns this configuration changed by `settings` (`key=value`, as for `--set`).
    ///
    /// Errors if a key is not in `[precision]`, or if a value has the wrong type.
    pub fn with_precision(&self, settings: &[String]) -> Result<RunConfig> {
        let table = Table::try_from(self).expect("a configuration is a table");
        let reason = "only keys of [precision] are set here; --help shows the options for others";
        let config = with_settings(table, settings, &["precision"], reason)?;
        // A plain model folder has no data, for example, so problems that existed before do not count.
        config.expect_no_more_problems_than(self)?;
        Ok(config)
    }

    /// Returns the configuration in the `progress` of the checkpoint at `path`.
    pub fn saved(path: &Path, progress: &Progress) -> Result<RunConfig> {
        let table = progress.config.parse::<Table>().map_err(|error| vec![error.to_string()]);
        let read = table.and_then(RunConfig::from_table).map(|(config, _)| config);
        read.map_err(|problems| {
            let (path, problems) = (path.join("manifest.json"), problems.join("; "));
            let problems = problems.trim_end().replace('\n', " ");
            Error::Checkpoint(format!("{}: its configuration cannot be read: {problems}", path.display()))
        })
    }
}

/// Returns the defaults changed by `settings` (`key=value`, as for `--set`). Used for the precision, optimizer, memory and division of a training
/// benchmark.
///
/// Errors if a key is not in `[precision]`, `[sentinel]`, `[optimizer]`, `[memory]`, `[parallel]` or `[lora]`. Also errors for the key `recipe`,
/// because benchmarks have an option for recipes. Call [`RunConfig::expect_formats`] to check that the values are compatible, which depends on the
/// recipe.
pub fn formats(settings: &[String]) -> Result<RunConfig> {
    let tables = ["precision", "sentinel", "optimizer", "memory", "parallel", "lora"];
    let reason = "only keys of [precision], [sentinel], [optimizer], [memory], [parallel] and [lora] are set here; --help shows the options for others";
    let config = with_settings(Table::new(), settings, &tables, reason)?;
    let names_recipe = |setting: &&String| {
        let mut alone = Table::new();
        Known::new().set(&mut alone, setting).is_ok() && alone.values().any(|table| table.get("recipe").is_some())
    };
    match settings.iter().find(names_recipe) {
        Some(setting) => Err(Error::Config(format!("--set {setting}: recipes are named by --recipes"))),
        None => Ok(config),
    }
}

/// Returns the configuration of `table` changed by `settings`. The keys of `settings` must be in `tables`; `reason` is the error for other keys.
fn with_settings(mut table: Table, settings: &[String], tables: &[&str], reason: &str) -> Result<RunConfig> {
    let (known, mut problems) = (Known::new(), Vec::new());
    for setting in settings {
        let mut alone = Table::new();
        let checked = known.set(&mut alone, setting).and_then(|()| match alone.keys().next() {
            Some(name) if !tables.contains(&name.as_str()) => Err(reason.to_string()),
            _ => known.set(&mut table, setting),
        });
        if let Err(problem) = checked {
            problems.push(format!("--set {setting}: {problem}"));
        }
    }
    if problems.is_empty() {
        match RunConfig::from_table(table) {
            Ok((config, _)) => return Ok(config),
            Err(errors) => problems.extend(errors.into_iter().map(|error| format!("--set: {error}"))),
        }
    }
    Err(Error::Config(problems.join("\n")))
}
