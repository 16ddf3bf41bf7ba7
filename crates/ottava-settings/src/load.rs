//! Reading a run's file, and applying the settings of a command line.

use crate::names::{self, Known};
use crate::{RunConfig, old_keys, paths};
use ottava_common::error::{Error, Result};
use ottava_common::input;
use ottava_recipe::RecipeName;
use std::path::Path;
use toml::{Table, Value};

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
        let loaded = RunConfig::read(path, settings)?;
        Ok(Loaded { config: loaded.config.resolved(resolve)?, ..loaded })
    }

    /// Replaces names by local paths, and an adapter as the model by its base model. [`RunConfig::load_with`] calls this.
    ///
    /// Has the errors of `resolve`, and errors if the adapter cannot be read.
    pub fn resolved(mut self, resolve: &mut Resolve) -> Result<RunConfig> {
        resolve(&mut self)?;
        let mut config = self.with_adapter()?;
        resolve(&mut config)?;
        config.with_texts_of_adapter()?.with_tokenizer()
    }

    /// Reads the file as [`RunConfig::load`] does, and does not replace names of remote models and data.
    pub fn read(path: &Path, settings: &[String]) -> Result<Loaded> {
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
                Ok((config, old)) => {
                    problems = config.problems();
                    if problems.is_empty() {
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
        match table.clone().try_into::<RunConfig>() {
            Ok(config) => Ok((config, old)),
            Err(error) => Err(vec![explain(&with_whole_key(&table, error.to_string().trim_end()))]),
        }
    }
}

/// Parses the name of a recipe, with the answers of `--set precision.recipe=…` to other names.
pub fn parse_recipe(text: &str) -> std::result::Result<RecipeName, String> {
    let mut table = Table::new();
    Known::new().set(&mut table, &format!("precision.recipe={text}"))?;
    let (config, _) = RunConfig::from_table(table).map_err(|problems| problems.join("; "))?;
    Ok(config.precision.recipe)
}

/// Replaces the name of a table in `error` by the key whose value is wrong. The parser names only the table if the keys of an algorithm are in the same
/// table as other keys.
fn with_whole_key(table: &Table, error: &str) -> String {
    let Some((what, section)) =
        error.rsplit_once("\nin `").map(|(what, section)| (what, section.trim_end_matches('`')))
    else {
        return error.to_string();
    };
    let Some(Value::Table(inner)) = paths::get(table, section) else { return error.to_string() };
    let mut keys = Vec::new();
    paths::flatten("", inner, &mut keys);
    // Without the wrong value, the table has no error or another one.
    let causes = |key: &str| {
        let mut without = table.clone();
        paths::remove(&mut without, &format!("{section}.{key}"));
        without.try_into::<RunConfig>().err().is_none_or(|other| other.to_string().trim_end() != error)
    };
    match keys.iter().find(|(key, _)| causes(key)) {
        Some((key, _)) => format!("{what}\nin `{section}.{key}`"),
        None => error.to_string(),
    }
}

/// Rewrites the error of a value in the words of the file: the key, its value, and what it can be.
fn explain(error: &str) -> String {
    let (what, key) = error.rsplit_once("\nin ").unwrap_or((error, "the file"));
    let what = what.replace('\n', " ");
    if let Some((found, wanted)) = what.strip_prefix("invalid type: ").and_then(|rest| rest.rsplit_once(", expected "))
    {
        let value = found.find(['`', '"']).map_or(found, |at| found[at..].trim_matches('`'));
        let whole = value.parse::<f64>().ok().filter(|number| number.fract() == 0.0 && number.abs() < 1e15);
        let wanted = match wanted {
            "u64" | "usize" | "u32" | "i64" | "i32" => match whole {
                Some(number) => format!("a whole number without a point, such as {number}"),
                None => "a whole number".into(),
            },
            "f64" | "f32" => "a number".into(),
            "a boolean" => "true or false, in lower case and without quotes".into(),
            "a string" => "a text in quotes".into(),
            "path string" => "a path in quotes".into(),
            "a sequence" => "a list, such as [\"a\", \"b\"]".into(),
            other => other.to_string(),
        };
        return format!("{key} is {value}, expected {wanted}");
    }
    if let Some((value, names)) = what.strip_prefix("unknown variant ").and_then(|rest| rest.split_once(", expected "))
    {
        let plain = value.trim_matches('`');
        let known: Vec<&str> = names.split('`').skip(1).step_by(2).collect();
        let meant = match TYPES.iter().find(|(theirs, ours)| *theirs == plain && known.contains(ours)) {
            Some((_, ours)) => Some(*ours),
            None => known.iter().copied().find(|name| names::distance(plain, name).is_some()),
        };
        let hint = meant.map_or(String::new(), |meant| format!("; did you mean \"{meant}\"?"));
        let known: Vec<_> = known.iter().map(|name| format!("\"{name}\"")).collect();
        return format!("{key} is \"{plain}\", expected one of {}{hint}", known.join(", "));
    }
    // A number that the type does not have, such as -1 for u64.
    if let Some((found, _)) = what.strip_prefix("invalid value: ").and_then(|rest| rest.rsplit_once(", expected u")) {
        let value = found.split('`').nth(1).unwrap_or(found);
        return format!("{key} is {value}, expected a whole number from 0 up");
    }
    match key {
        "the file" => what,
        key => format!("{what} in {key}"),
    }
}

/// Names of types in other programs, and of the recipes that compute in them.
const TYPES: [(&str, &str); 4] =
    [("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32"), ("fp8", "fp8-current")];

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
        _ if !path.exists() && extension != "toml" && input::is_hub_id(path) => Some(format!(
            "there is no such file, and a run is a TOML file: if this is a model of the Hub, `ottava init {shown} DATA.jsonl` writes a run for it"
        )),
        _ if !path.exists() => {
            let named = path.file_name().map(|name| Path::new("configs").join(name)).filter(|other| other.exists());
            let remedy = named.map_or("check the name".into(), |other| format!("did you mean {}?", other.display()));
            Some(format!(
                "there is no such file; relative paths start at the folder that the command runs in: {remedy}"
            ))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_a_recipe_has_the_answers_of_the_setting() {
        assert_eq!(parse_recipe("fp8-row"), Ok(RecipeName::Fp8Row));
        assert!(parse_recipe("fp8-rows").unwrap_err().contains("did you mean \"fp8-row\"?"));
        assert!(parse_recipe("purple").unwrap_err().contains("expected one of \"fp32\", \"bf16\""));
    }

    #[test]
    fn a_model_in_the_place_of_a_run_is_told_the_command() {
        let error = RunConfig::load(Path::new("otter/tiny"), &[]).unwrap_err().to_string();
        assert!(error.contains("`ottava init otter/tiny DATA.jsonl`"), "{error}");
        let error = RunConfig::load(Path::new("otter/tiny.toml"), &[]).unwrap_err().to_string();
        assert!(error.contains("check the name"), "{error}");
    }

    #[test]
    fn a_number_of_steps_on_the_command_line_replaces_the_epochs_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.toml");
        let text = "model.path = \"m\"\ndata.train_files = [\"a.txt\"]\ntraining.num_train_epochs = 3.0\n";
        std::fs::write(&path, text).unwrap();
        let unread = |settings: &[&str]| {
            let settings: Vec<String> = settings.iter().map(|setting| setting.to_string()).collect();
            let told = RunConfig::load(&path, &settings).unwrap().config.without_effect();
            told.into_iter().any(|text| text.contains("num_train_epochs"))
        };
        assert!(!unread(&["max_steps=60"]));
        assert!(unread(&["max_steps=60", "num_train_epochs=2"]), "both on the command line");
        std::fs::write(&path, text.to_string() + "training.max_steps = 60\n").unwrap();
        assert!(unread(&[]), "both in the file");
    }

    #[test]
    fn values_of_a_wrong_type_are_named_with_their_key() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.toml");
        std::fs::write(&path, "model.path = \"m\"\ndata.train_files = [\"a.txt\"]\n").unwrap();
        for (setting, words) in [
            ("max_steps=1e3", "`training.max_steps` is 1000.0, expected a whole number without a point, such as 1000"),
            (
                "gradient_accumulation_steps=1.5",
                "`training.gradient_accumulation_steps` is 1.5, expected a whole number",
            ),
            ("train_on_inputs=True", "`data.train_on_inputs` is \"True\", expected true or false, in lower case"),
            ("learning_rate=x", "`optimizer.learning_rate` is \"x\", expected a number"),
            ("beta1=x", "`optimizer.beta1` is \"x\", expected a number"),
            ("warmup_steps=x", "`lr_scheduler.warmup_steps`"),
            ("seed=-1", "`seed` is -1, expected a whole number from 0 up"),
            ("init_from=1", "`lora.init_from` is 1, expected a path in quotes"),
            ("recipe=bfloat16", "expected one of \"fp32\", \"bf16\""),
            ("recipe=bfloat16", "did you mean \"bf16\"?"),
            ("recipe=fp8-curent", "did you mean \"fp8-current\"?"),
        ] {
            let error = RunConfig::load(&path, &[setting.to_string()]).unwrap_err().to_string();
            assert!(error.contains(words) && !error.contains("invalid type"), "{setting}: {error}");
        }
    }
}
