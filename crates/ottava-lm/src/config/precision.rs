//! The `[precision]` of what is not trained by a configuration file: of a finished model, and of benchmarks.

use super::RunConfig;
use super::names::Known;
use crate::checkpoint::{Manifest, training};
use crate::error::{Error, Result};
use crate::recipe::Precision;
use std::path::Path;
use toml::{Table, Value};

impl RunConfig {
    /// The configuration of the run that saved the checkpoint `folder`; `None` for other model folders.
    pub fn saved_in(folder: &Path) -> Result<Option<RunConfig>> {
        let Some(manifest) = Manifest::read(folder)? else { return Ok(None) };
        RunConfig::saved(folder, &training::progress(folder, &manifest)?).map(Some)
    }

    /// The configuration that the `progress` of the checkpoint at `path` holds.
    pub fn saved(path: &Path, progress: &training::Progress) -> Result<RunConfig> {
        toml::from_str(&progress.config)
            .map_err(|e| Error::Checkpoint(format!("{}: its configuration does not read: {e}", path.display())))
    }
}

/// A `[precision]` table from `settings` (`key=value`, as `--set` has them) over its defaults.
///
/// Errors when a key is of another table, or `recipe`, which benchmarks have an option for.
pub fn precision(settings: &[String]) -> Result<Precision> {
    let (known, mut table, mut problems) = (Known::new(), Table::new(), Vec::new());
    for setting in settings {
        if let Err(problem) = set(&known, &mut table, setting) {
            problems.push(format!("--set {setting}: {problem}"));
        }
    }
    if problems.is_empty() {
        match table.try_into::<RunConfig>() {
            Ok(config) => {
                // A benchmark has its recipes from elsewhere, and this stands for those that have it.
                problems = Precision { smooth_swiglu: false, ..config.precision.clone() }.problems();
                if problems.is_empty() {
                    return Ok(config.precision);
                }
            }
            Err(error) => problems.push(format!("--set: {}", error.to_string().trim_end().replace('\n', " "))),
        }
    }
    Err(Error::Config(problems.join("\n")))
}

fn set(known: &Known, table: &mut Table, setting: &str) -> Result<(), String> {
    let mut alone = Table::new();
    known.set(&mut alone, setting)?;
    match alone.get("precision") {
        None if !alone.is_empty() => {
            Err("only keys of [precision] are set here; --help shows the options for others".into())
        }
        Some(Value::Table(keys)) if keys.contains_key("recipe") => Err("recipes are named by --compare".into()),
        _ => known.set(table, setting),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(settings: &[&str]) -> Result<Precision, String> {
        precision(&settings.iter().map(|s| s.to_string()).collect::<Vec<_>>()).map_err(|error| error.to_string())
    }

    #[test]
    fn settings_of_precision_stand_by_themselves() {
        assert_eq!(read(&[]), Ok(Precision::default()));
        let changed = read(&["first_layers_bf16=1", "precision.fp8_format=e4m3", "fp8_margin=2"]).unwrap();
        let fp8_format = crate::recipe::Fp8Format::E4m3;
        assert!(read(&["smooth_swiglu=true"]).unwrap().smooth_swiglu, "whatever the default recipe is");
        assert_eq!(changed, Precision { first_layers_bf16: 1, fp8_format, margin: 2, ..Precision::default() });
    }

    #[test]
    fn other_settings_are_refused() {
        let error = read(&["state_dtype=bfloat16", "recipe=fp32", "mragin=1"]).unwrap_err();
        for part in [
            "state_dtype=bfloat16: only keys of [precision]",
            "recipe=fp32: recipes are named by --compare",
            "did you mean `precision.margin`",
        ] {
            assert!(error.contains(part), "{part} in {error}");
        }
        assert!(read(&["margin=99"]).unwrap_err().contains("`precision.margin` is 99"));
        assert!(read(&["margin=much"]).unwrap_err().contains("--set"));
    }
}
