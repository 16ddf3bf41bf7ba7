//! Configurations that do not come from a run's file: of a saved model, and of benchmarks.

use crate::RunConfig;
use crate::names::Known;
use ottava_checkpoint::{Manifest, Progress, training};
use ottava_common::error::{Error, Result};
use std::path::Path;
use toml::Table;

impl RunConfig {
    /// The configuration of the run that saved the checkpoint `folder`, and the names of its casts; `None` for other model folders.
    pub fn saved_in(folder: &Path) -> Result<Option<(RunConfig, Vec<String>)>> {
        let Some(manifest) = Manifest::read(folder)? else { return Ok(None) };
        let progress = training::progress(folder, &manifest)?;
        Ok(Some((RunConfig::saved(folder, &progress)?, progress.scaling_slots)))
    }

    /// This configuration with `settings` (`key=value`, as for `--set`) on top.
    ///
    /// Errors when a key is not in `[precision]`, or a value has the wrong kind.
    pub fn with_precision(&self, settings: &[String]) -> Result<RunConfig> {
        let table = Table::try_from(self).expect("a configuration is a table");
        let reason = "only keys of [precision] are set here; --help shows the options for others";
        let config = with_settings(table, settings, &["precision"], reason)?;
        // Settings that a plain model folder lacks, such as data, are not a problem here.
        config.expect_no_more_problems_than(self)?;
        Ok(config)
    }

    /// The configuration that the `progress` of the checkpoint at `path` holds.
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

/// The defaults with `settings` (`key=value`, as for `--set`): precision, optimizer, memory and division of a training benchmark.
///
/// Errors when a key is not in `[precision]`, `[sentinel]`, `[optimizer]`, `[memory]`, `[parallel]` or `[lora]`, and when a key is
/// `recipe`: benchmarks have an option for recipes. Whether the values are compatible depends on the recipe: call
/// [`RunConfig::expect_formats`].
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

/// The configuration of `table` with `settings` on top. The keys of `settings` must be in `tables`; `reason` is the error for other keys.
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
