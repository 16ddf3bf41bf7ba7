//! Reading a run's file, and applying the settings of a command line.

use crate::names::{self, Known};
use crate::{RunConfig, old_keys};
use ottava_common::error::{Error, Result};
use ottava_common::input;
use std::path::Path;
use toml::Table;

/// The maximum size of a configuration file in bytes.
const MAX_BYTES: u64 = 16 << 20;

/// Replaces names of remote models and data in settings by local paths.
pub type Resolve<'a> = dyn FnMut(&mut RunConfig) -> Result<()> + 'a;

/// The content of a run's file.
#[derive(Clone, Debug, PartialEq)]
pub struct Loaded {
    /// The settings.
    pub config: RunConfig,
    /// A sentence about keys with old names, if there are such keys. One rank of a run logs the sentence.
    pub old_keys: Option<String>,
}

impl RunConfig {
    /// Reads the file at `path` and then applies `settings` (`key=value`). A key is a dotted path, or only its last part if that part is unique.
    ///
    /// Errors with [`Error::Config`] if the file cannot be read, or if keys or values cannot be used. The error has one line for each such key or
    /// value.
    pub fn load(path: &Path, settings: &[String]) -> Result<Loaded> {
        RunConfig::load_with(path, settings, &mut |_| Ok(()))
    }

    /// Like [`RunConfig::load`]. `resolve` replaces names of remote models and data by local paths. It is called again if the model is an adapter, whose
    /// base model may have such a name.
    pub fn load_with(path: &Path, settings: &[String], resolve: &mut Resolve) -> Result<Loaded> {
        if let Some(remedy) = no_run(path) {
            return Err(Error::Config(format!("{}: {remedy}", path.display())));
        }
        let text = input::read_text(path, MAX_BYTES).map_err(|e| Error::Config(format!("{}: {e}", path.display())))?;
        let mut table: Table =
            text.parse().map_err(|e| Error::Config(format!("{}: this is not valid TOML: {e}", path.display())))?;
        let known = Known::new();
        let mut problems = Vec::new();
        known.canonical(&mut table, &mut problems);
        for setting in settings {
            if let Err(problem) = known.set(&mut table, setting) {
                problems.push(format!("--set {setting}: {problem}"));
            }
        }
        if problems.is_empty() {
            match RunConfig::from_table(table) {
                Ok((mut config, old)) => {
                    problems = config.problems();
                    if problems.is_empty() {
                        resolve(&mut config)?;
                        let mut config = config.with_adapter()?;
                        resolve(&mut config)?;
                        let sentence = |old| {
                            format!(
                                "{}: some keys have another name now: {old}; `ottava config migrate` rewrites the file",
                                path.display()
                            )
                        };
                        return Ok(Loaded { config, old_keys: old.map(sentence) });
                    }
                }
                Err(errors) => problems = errors,
            }
        }
        let told = problems.iter().take(names::MAX_PROBLEMS).map(|problem| format!("{}: {problem}", path.display()));
        let more = (problems.len() > names::MAX_PROBLEMS).then(|| format!("{}: more problems follow", path.display()));
        Err(Error::Config(told.chain(more).collect::<Vec<_>>().join("\n")))
    }
}

impl RunConfig {
    /// Returns the configuration of `table`, and a sentence about keys with old names, if there are such keys.
    ///
    /// Errors with all problems of keys, or with the first problem of a value.
    pub(super) fn from_table(mut table: Table) -> std::result::Result<(RunConfig, Option<String>), Vec<String>> {
        let (known, mut problems) = (Known::new(), Vec::new());
        let old = old_keys::translate(&mut table).unwrap_or_else(|found| {
            problems = found;
            None
        });
        known.keys_of_other_variants(&table, &mut problems);
        known.texts_for_lists(&table, &mut problems);
        if !problems.is_empty() {
            return Err(problems);
        }
        match table.try_into::<RunConfig>() {
            Ok(config) => Ok((config, old)),
            Err(error) => Err(vec![error.to_string().trim_end().replace('\n', " ")]),
        }
    }
}

/// Returns what to do with a file or folder whose name shows that it is not the TOML file of a run.
fn no_run(path: &Path) -> Option<String> {
    let extension = path.extension().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
    let shown = path.display();
    match extension.as_str() {
        _ if path.is_dir() => Some(format!(
            "this is a folder, and a run is a TOML file: `ottava init {shown} DATA.jsonl` writes one for a model folder"
        )),
        "gguf" => Some(format!(
            "this is a model, and a run is a TOML file: `ottava convert {shown} FOLDER` makes a model folder, and `ottava init FOLDER DATA.jsonl` a run"
        )),
        "yaml" | "yml" | "json" => {
            Some(format!("a run is a TOML file: `ottava import {shown}` translates the file of another trainer"))
        }
        "safetensors" | "bin" | "pt" | "pth" => Some(
            "these are weights, and a run is a TOML file: `ottava init FOLDER DATA.jsonl` writes one for their folder"
                .into(),
        ),
        "jsonl" | "csv" | "parquet" | "arrow" => Some(format!(
            "this is data, and a run is a TOML file: `ottava init FOLDER {shown}` writes one for a model folder"
        )),
        _ => None,
    }
}
