//! Configurations that do not come from a run's file: of a saved model, and of benchmarks.

use super::RunConfig;
use super::names::Known;
use crate::checkpoint::{Manifest, training};
use crate::error::{Error, Result};
use std::path::Path;
use toml::{Table, Value};

impl RunConfig {
    /// The configuration of the run that saved the checkpoint `folder`, and the names of its casts; `None` for other model folders.
    pub fn saved_in(folder: &Path) -> Result<Option<(RunConfig, Vec<String>)>> {
        let Some(manifest) = Manifest::read(folder)? else { return Ok(None) };
        let progress = training::progress(folder, &manifest)?;
        Ok(Some((RunConfig::saved(folder, &progress)?, progress.scaling_slots)))
    }

    /// The configuration that the `progress` of the checkpoint at `path` holds.
    pub fn saved(path: &Path, progress: &training::Progress) -> Result<RunConfig> {
        toml::from_str(&progress.config).map_err(|e| {
            let path = path.join("manifest.json");
            let e = e.to_string().trim_end().replace('\n', " ");
            Error::Checkpoint(format!("{}: its configuration cannot be read: {e}", path.display()))
        })
    }
}

/// The defaults with `settings` (`key=value`, as for `--set`): precision, optimizer, memory and division of a training benchmark.
///
/// Errors when a key is of another table than `[precision]`, `[optimizer]`, `[memory]` and `[parallel]`, or `recipe`, which benchmarks have an option for.
/// Whether the values are compatible depends on the recipe: call [`RunConfig::expect_formats`].
pub fn formats(settings: &[String]) -> Result<RunConfig> {
    let (known, mut table, mut problems) = (Known::new(), Table::new(), Vec::new());
    for setting in settings {
        if let Err(problem) = set(&known, &mut table, setting) {
            problems.push(format!("--set {setting}: {problem}"));
        }
    }
    if problems.is_empty() {
        match table.try_into::<RunConfig>() {
            Ok(config) => return Ok(config),
            Err(error) => problems.push(format!("--set: {}", error.to_string().trim_end().replace('\n', " "))),
        }
    }
    Err(Error::Config(problems.join("\n")))
}

fn set(known: &Known, table: &mut Table, setting: &str) -> Result<(), String> {
    let mut alone = Table::new();
    known.set(&mut alone, setting)?;
    match alone.iter().next() {
        Some((name, _)) if !["precision", "optimizer", "memory", "parallel"].contains(&name.as_str()) => {
            Err("only keys of [precision], [optimizer], [memory] and [parallel] are set here; --help shows the options for others"
                .into())
        }
        Some((_, Value::Table(keys))) if keys.contains_key("recipe") => Err("recipes are named by --compare".into()),
        _ => known.set(table, setting),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::Precision;

    fn read(settings: &[&str]) -> Result<RunConfig, String> {
        formats(&settings.iter().map(|s| s.to_string()).collect::<Vec<_>>()).map_err(|error| error.to_string())
    }

    #[test]
    fn settings_override_the_defaults() {
        assert_eq!(read(&[]), Ok(RunConfig::default()));
        let changed = read(&["first_layers_bf16=1", "precision.fp8_format=e4m3", "fp8_margin=2", "level=O2"]).unwrap();
        let fp8_format = crate::recipe::Fp8Format::E4m3;
        let precision = Precision { first_layers_bf16: 1, fp8_format, margin: 2, ..Precision::default() };
        assert_eq!((changed.precision, changed.optimizer.level), (precision, crate::level::Level::O2));
    }

    #[test]
    fn settings_of_other_tables_and_the_recipe_are_errors() {
        let error = read(&["max_length=4", "recipe=fp32", "mragin=1"]).unwrap_err();
        for part in [
            "max_length=4: only keys of [precision], [optimizer], [memory] and [parallel]",
            "recipe=fp32: recipes are named by --compare",
            "did you mean `precision.margin`",
        ] {
            assert!(error.contains(part), "{part} in {error}");
        }
        assert!(read(&["margin=much"]).unwrap_err().contains("--set"));
        let problem = |settings: &[&str]| read(settings).unwrap().expect_formats().unwrap_err().to_string();
        assert!(problem(&["margin=99"]).contains("`precision.margin` is 99"));
        assert!(problem(&["smooth_swiglu=true"]).contains("smooth_swiglu"), "which BF16 has no use for");
    }
}
