//! Settings of what is not trained by a configuration file: of a finished model, and of benchmarks.

use super::names::Known;
use super::{MemoryConfig, RunConfig};
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

/// The `[precision]` and `[memory]` of a benchmark: `settings` (`key=value`, as `--set` has them) over their defaults.
///
/// Errors when a key is of another table, or `recipe`, which benchmarks have an option for.
pub fn benchmark_settings(settings: &[String]) -> Result<(Precision, MemoryConfig)> {
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
                    return Ok((config.precision, config.memory));
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
    let ours = |key: &String| ["precision", "memory"].contains(&key.as_str());
    match alone.get("precision") {
        _ if !alone.keys().all(ours) => {
            Err("only keys of [precision] and [memory] are set here; --help shows the options for others".into())
        }
        Some(Value::Table(keys)) if keys.contains_key("recipe") => Err("recipes are named by --compare".into()),
        _ => known.set(table, setting),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(settings: &[&str]) -> Result<(Precision, MemoryConfig), String> {
        benchmark_settings(&settings.iter().map(|s| s.to_string()).collect::<Vec<_>>())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn settings_stand_by_themselves() {
        assert_eq!(read(&[]), Ok((Precision::default(), MemoryConfig::default())));
        let changed =
            read(&["first_layers_bf16=1", "precision.fp8_format=e4m3", "fp8_margin=2", "memory.weight_codes=false"])
                .unwrap();
        let fp8_format = crate::recipe::Fp8Format::E4m3;
        assert!(read(&["smooth_swiglu=true"]).unwrap().0.smooth_swiglu, "whatever the default recipe is");
        let precision = Precision { first_layers_bf16: 1, fp8_format, margin: 2, ..Precision::default() };
        assert_eq!(changed, (precision, MemoryConfig { weight_codes: false, ..MemoryConfig::default() }));
    }

    #[test]
    fn other_settings_are_refused() {
        let error = read(&["state_dtype=bfloat16", "recipe=fp32", "mragin=1"]).unwrap_err();
        for part in [
            "state_dtype=bfloat16: only keys of [precision] and [memory]",
            "recipe=fp32: recipes are named by --compare",
            "did you mean `precision.margin`",
        ] {
            assert!(error.contains(part), "{part} in {error}");
        }
        assert!(read(&["margin=99"]).unwrap_err().contains("`precision.margin` is 99"));
        assert!(read(&["margin=much"]).unwrap_err().contains("--set"));
    }
}
