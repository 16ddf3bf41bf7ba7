//! Settings of other trainers' files as a run's TOML.

mod cpo;
mod datasets;
mod deepspeed;
mod defaults;
mod fields;
mod policy;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod trainer_tests;

use crate::names::{self, Known};
use crate::words::{self, InFile, Translation};
use crate::{RunConfig, keys, paths};
use datasets::DataSets;
use defaults::Trainer;
use ottava_common::error::{Error, Result};
use ottava_common::input;
use ottava_common::yaml::Yaml;
use policy::{Dialect, Found, Reader};
use serde_json::{Map, Value as Json};
use std::fmt::Write;
use std::path::Path;
use toml::{Table, Value};

/// The maximum size of a file, in bytes.
const MAX_BYTES: u64 = 64 << 10;

/// A translated file.
#[derive(Debug)]
pub struct Imported {
    /// The run's TOML, with what was not translated as comments.
    pub toml: String,
    /// Keys without translation, `FILE:LINE: key: reason`.
    pub refused: Vec<String>,
    /// Keys that need no translation, `FILE:LINE: key: reason`.
    pub needless: Vec<String>,
    /// What is still wrong with the run.
    pub problems: Vec<String>,
}

/// Translates the YAML or JSON file at `path`, of Axolotl, LLaMA-Factory, TRL, verl, NeMo-RL, Accelerate or DeepSpeed, or a script that starts
/// verl.
///
/// Errors with [`Error::Config`] when the file cannot be read.
pub fn import(path: &Path) -> Result<Imported> {
    let wrong = |reason: String| Error::Config(format!("{}: {reason}", path.display()));
    let text = input::read_text(path, MAX_BYTES).map_err(|error| wrong(error.to_string()))?;
    let mut yaml = match policy::yaml_of_script(&text) {
        Some(script) => script,
        None => Yaml::parse(&text).map_err(|error| wrong(format!("this is not YAML: {error}")))?,
    };
    deepspeed::read_into(&mut yaml.table, path, MAX_BYTES).map_err(wrong)?;
    let trainer = Trainer::of(&yaml.table);
    let policy = policy::dialect(trainer, &yaml.table).map(|dialect| (dialect, dialect.read(&yaml.table)));
    let mut import = Import {
        known: Known::new(),
        path,
        yaml: &yaml,
        trainer,
        ours: Vec::new(),
        refused: Vec::new(),
        needless: Vec::new(),
        objective: None,
        deferred: Vec::new(),
        policy,
    };
    import.table(&yaml.table, "");
    import.name_losses_of_cpo();
    import.leave_out_smoothing();
    import.leave_out_label_of_rewards();
    import.name_wandb();
    import.add_policy();
    import.add_defaults();
    import.add_deferred();
    match import.objective {
        // Without the key, the run would train something else.
        Some(note) => {
            Err(Error::Config(format!("{note}; without it the run would have another objective, so none is written")))
        }
        None => Ok(import.finish()),
    }
}

/// Our key of the warm-up.
const WARMUP: &str = "lr_scheduler.warmup_steps";

/// Our key of the objective of a run.
const OBJECTIVE: &str = "preference.loss_type";

/// `text` as a part of a comment in TOML, which has no control characters.
fn comment(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { c.escape_default().to_string() } else { c.to_string() }).collect()
}

/// A setting of ours, and the comment behind it.
struct Setting {
    path: String,
    value: Value,
    comment: String,
}

struct Import<'a> {
    known: Known,
    path: &'a Path,
    yaml: &'a Yaml,
    trainer: Trainer,
    ours: Vec<Setting>,
    refused: Vec<String>,
    needless: Vec<String>,
    /// Why the objective of the run is not translated.
    objective: Option<String>,
    /// Settings that are valid beside other settings only, each with its path in the file and what is wrong with it alone.
    deferred: Vec<(String, Setting, String)>,
    /// What the trainer's keys of reinforcement learning say.
    policy: Option<(&'static Dialect, Reader)>,
}

impl Import<'_> {
    fn table(&mut self, table: &Map<String, Json>, prefix: &str) {
        for (key, value) in table {
            let path = format!("{prefix}{key}");
            match value {
                // A key without a value has its default.
                Json::Null => {}
                value => match (self.data_sets(&path, value), value) {
                    (Some(found), _) => self.add_data_sets(found),
                    (None, Json::Object(inner)) => self.table(inner, &format!("{path}.")),
                    (None, value) => self.key(&path, value),
                },
            }
        }
    }

    /// The data sets that a key names, unless all keys of the trainer have meanings of their own.
    fn data_sets(&self, path: &str, value: &Json) -> Option<DataSets> {
        let is_open = self.policy.as_ref().is_none_or(|(dialect, _)| dialect.is_open());
        is_open.then(|| datasets::translate(path, value, &self.yaml.table, self.path)).flatten()
    }

    /// Adds what keys of reinforcement learning say together.
    fn add_policy(&mut self) {
        let Some((_, reader)) = self.policy.take() else { return };
        // Records of such a run are prompts.
        self.ours.retain(|setting| setting.path != "data.records.formatting");
        for (path, ours, value, comment) in reader.settings {
            let before = self.ours.len();
            self.add(&path, ours, value);
            if let Some(setting) = self.ours.get_mut(before) {
                setting.comment = comment;
            }
        }
        reader.refused.iter().for_each(|(path, reason)| self.refuse(path, reason));
        if let Some((path, reason)) = reader.objective {
            self.objective = Some(self.note(&path, &reason));
        }
        let rewards = reader.rewards.into_iter().map(Value::Table).collect();
        self.ours.push(Setting { path: words::REWARDS.into(), value: Value::Array(rewards), comment: String::new() });
    }

    fn add_data_sets(&mut self, found: DataSets) {
        for (path, value) in found.settings {
            self.ours.push(Setting { path: path.into(), value, comment: found.comment.into() });
        }
        found.refused.iter().for_each(|(path, reason)| self.refuse(path, reason));
    }

    /// Translates one key.
    fn key(&mut self, path: &str, value: &Json) {
        let Ok(value) = Value::try_from(value) else {
            return self.refuse(path, "a list with a gap is not translated");
        };
        // DeepSpeed leaves these values to the program that uses it.
        let is_of_deepspeed = self.trainer == Trainer::DeepSpeed || words::is_of_deepspeed(path);
        if value.as_str() == Some("") || (is_of_deepspeed && value.as_str() == Some("auto")) {
            return;
        }
        if is_of_deepspeed && deepspeed::is_switched_off(path, &self.yaml.table) {
            return self.not_needed(path, "the table is not switched on: `enabled` is not true");
        }
        match self.policy.as_ref().map(|(dialect, reader)| (dialect.find(path, reader), reader.value_of(path))) {
            None | Some((Found::Usual, _)) => {}
            Some((Found::Taken, _)) => return,
            Some((Found::Unknown, _)) => return self.refuse(path, "this key is not known"),
            Some((Found::Row(meaning), value)) => {
                let value = value.and_then(|value| Value::try_from(value).ok());
                return value.map_or((), |value| self.translated(path, words::translate_by(meaning, &value)));
            }
        }
        if path == "fsdp" {
            let words = value.as_array().map_or(std::slice::from_ref(&value), Vec::as_slice);
            let words = words.iter().map(|word| word.as_str().map_or_else(|| word.to_string(), str::to_lowercase));
            return words.for_each(|words| words.split([' ', ',']).for_each(|word| self.word_of_fsdp(word)));
        }
        match words::in_file(path, &value) {
            InFile::OfTable(Some(reason)) => self.translated(path, reason),
            InFile::OfTable(None) => self.refuse(path, "this key of a table is not supported"),
            InFile::Word(name, translation) => match self.trainer.own(&name, &value, &self.yaml.table) {
                Some((ours, value)) => self.add(path, ours, value),
                None => match (translation, self.key_of_ours(&name)) {
                    (Some(translation), _) => self.translated(path, translation),
                    (None, Some(ours)) => self.add(path, &ours, value),
                    (None, None) => self.refuse(path, "this key is not known"),
                },
            },
        }
    }

    /// The only key of ours whose last part is `name`. Only a file of reinforcement learning has keys of its tables.
    fn key_of_ours(&self, name: &str) -> Option<String> {
        let is_of_others = |path: &String| words::OTHER_OBJECTIVES.iter().any(|table| path.starts_with(table));
        self.known.path_of(name).filter(|path| self.policy.is_some() || !is_of_others(path))
    }

    fn translated(&mut self, path: &str, translation: Translation) {
        match translation {
            Translation::Ours(ours, value) => self.add(path, ours, value),
            Translation::Nothing | Translation::Without(..) => {}
            Translation::Needless(reason) => self.not_needed(path, reason),
            Translation::Refused(reason) => self.refuse(path, reason),
        }
    }

    /// Translates a word of the key `fsdp`: a strategy, or how FSDP is set up.
    fn word_of_fsdp(&mut self, word: &str) {
        match word {
            "" | "auto_wrap" => {}
            "offload" => self.add("fsdp", "memory.offload_parameters", Value::Float(1.0)),
            strategy => match words::translate("fsdp", &Value::String(strategy.into())) {
                Some(Translation::Ours(ours, value)) => self.add("fsdp", ours, value),
                Some(Translation::Refused(reason)) => self.refuse("fsdp", reason),
                _ => {}
            },
        }
    }

    /// Writes the entry `name` of our key `ours`, whose value is a table with names of the user's choice.
    fn add_entry(&mut self, path: &str, ours: &str, name: &str, value: Value) {
        let entry = Table::from_iter([(name.to_string(), value)]);
        if let Some(reason) = self.known.mistake(ours, &Value::Table(entry.clone())) {
            return self.refuse(path, &reason);
        }
        match self.ours.iter_mut().find(|setting| setting.path == ours) {
            Some(Setting { value: Value::Table(before), .. }) => before.extend(entry),
            _ => self.ours.push(Setting { path: ours.into(), value: Value::Table(entry), comment: String::new() }),
        }
    }

    /// Writes `value` at `ours`, in the form that the key has.
    fn add(&mut self, path: &str, ours: &str, value: Value) {
        let of_table =
            ours.rsplit_once('.').filter(|(table, _)| keys::find(ours).is_none() && keys::find(table).is_some());
        if let Some((table, name)) = of_table {
            return self.add_entry(path, table, name, value);
        }
        let mut value = value;
        if let Some(text) = value.as_str().filter(|_| self.known.is_list(ours)) {
            let parts = text.split(',').map(|part| Value::String(part.trim().to_string()));
            value = Value::Array(parts.collect());
        }
        if ours == "lora.target_modules" {
            match value.as_str() {
                Some("all-linear") | None => {}
                // A regular expression of whole names, as in PEFT.
                Some(text) if text.contains(['\\', '(', '*', '.']) => {}
                Some(text) => value = Value::Array(text.split(',').map(|part| part.trim().into()).collect()),
            }
        }
        if let Some(number) = value.as_float().filter(|number| number.fract() == 0.0 && self.known.is_integer(ours)) {
            value = Value::Integer(number as i64);
        }
        if let Some(reason) = self.known.mistake(ours, &value) {
            let setting = Setting { path: ours.to_string(), value, comment: String::new() };
            return match ours == OBJECTIVE {
                true => self.refuse(path, &reason),
                false => self.deferred.push((path.to_string(), setting, reason)),
            };
        }
        let is_fp8 = |value: &Value| value.as_str().is_some_and(|recipe| recipe.starts_with("fp8"));
        if let Some(before) = self.ours.iter_mut().find(|setting| setting.path == ours) {
            // A switch for BF16 beside one for FP8 is the type of everything else; a share of warm-up steps replaces their number.
            if ours == "precision.recipe" && is_fp8(&before.value) != is_fp8(&value) {
                before.value = if is_fp8(&value) { value } else { before.value.clone() };
            } else if ours == WARMUP && before.value.is_float() != value.is_float() {
                before.value = if value.is_float() { value } else { before.value.clone() };
            } else if before.value != value {
                let reason = format!("`{ours}` is {} by another key already", before.value);
                self.refuse(path, &reason);
            }
            return;
        }
        self.ours.push(Setting { path: ours.to_string(), value, comment: String::new() });
    }

    fn note(&self, path: &str, reason: &str) -> String {
        let line = self.yaml.lines.get(path).map_or(String::new(), |line| format!("{line}:"));
        format!("{}:{line} `{path}`: {reason}", self.path.display())
    }

    /// Notes a key that needs no translation. All keys of a table, or of FSDP, with the same reason get one note.
    fn not_needed(&mut self, path: &str, reason: &str) {
        let is_of_table = path.contains('.') || path.starts_with("fsdp");
        let is_noted = is_of_table && self.needless.iter().any(|note| note.ends_with(reason));
        if !is_noted {
            self.needless.push(self.note(path, reason));
        }
    }

    fn refuse(&mut self, path: &str, reason: &str) {
        let note = self.note(path, reason);
        if words::is_in_file(path, OBJECTIVE) {
            self.objective.get_or_insert(note.clone());
        }
        self.refused.push(note);
    }

    /// Names the loss of a file of CPOTrainer.
    fn name_losses_of_cpo(&mut self) {
        let find = |path: &str| self.ours.iter().find(|setting| setting.path == path).map(|setting| &setting.value);
        let found = cpo::settings(find(OBJECTIVE), find(cpo::ALPHA), find("preference.simpo_gamma").is_some());
        let Some(found) = found.filter(|_| matches!(self.trainer, Trainer::Trl | Trainer::Axolotl)) else { return };
        let replaced = [cpo::LOSS, cpo::ALPHA, cpo::WEIGHTS, cpo::REFERENCE_FREE];
        self.ours.retain(|setting| !replaced.contains(&setting.path.as_str()));
        let setting =
            |(path, value, comment): cpo::Named| Setting { path: path.into(), value, comment: comment.into() };
        self.ours.extend(found.into_iter().map(setting));
    }

    /// Reports to Weights & Biases if a file of Axolotl names a project there, as Axolotl does.
    fn name_wandb(&mut self) {
        let names = |key: &str| {
            self.yaml.table.get(key).is_some_and(|value| value.as_str().is_some_and(|text| !text.is_empty()))
        };
        let is_known = self.ours.iter().any(|setting| setting.path == "logging.report_to");
        if self.trainer == Trainer::Axolotl && names("wandb_project") && !is_known {
            self.add("wandb_project", "logging.report_to", Value::from(vec!["wandb"]));
        }
    }

    /// Leaves out the number of labels of a reward model, whose only label is the reward.
    fn leave_out_label_of_rewards(&mut self) {
        let is_one =
            |setting: &Setting| setting.path == "classification.num_labels" && setting.value.as_integer() == Some(1);
        if self.ours.iter().any(|setting| setting.path == OBJECTIVE) {
            self.ours.retain(|setting| !is_one(setting));
        }
    }

    /// Leaves out `label_smoothing` if TRL's losses do not read it.
    fn leave_out_smoothing(&mut self) {
        if self.trainer != Trainer::Trl {
            return;
        }
        let losses = self.ours.iter().find(|setting| setting.path == OBJECTIVE).map(|setting| &setting.value);
        let names = losses.map_or(&[][..], |value| value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice));
        let reads = |smooths: &dyn Fn(&str) -> bool| names.iter().filter_map(Value::as_str).any(smooths);
        let is_sigmoid = names.is_empty() || reads(&|name| name == "sigmoid");
        let others = reads(&|name| ["robust", "exo_pair", "aot", "aot_unpaired", "cpo", "simpo"].contains(&name));
        let before = self.ours.len();
        if !others || is_sigmoid {
            self.ours.retain(|setting| setting.path != "preference.label_smoothing");
        }
        match (self.ours.len() < before, others) {
            (false, _) => {}
            (true, false) => {
                let reason =
                    "TRL reads it for the losses `robust`, `exo_pair`, `aot` and `aot_unpaired`, and in CPOTrainer";
                self.needless.push(self.note("label_smoothing", reason));
            }
            (true, true) => {
                let reason = "TRL smooths no labels of `sigmoid`, and here it holds for all losses of the list";
                self.objective.get_or_insert(self.note("label_smoothing", reason));
            }
        }
    }

    /// Refuses keys that the optimizer or the schedule of the file does not have.
    fn refuse_other_variants(&mut self) {
        let chosen = |tag: &str| {
            let given = self.ours.iter().find(|setting| setting.path == tag).map(|setting| &setting.value);
            given.or(keys::find(tag)?.default.as_ref()).and_then(Value::as_str).map(str::to_string)
        };
        let refused: Vec<(String, String)> = self
            .ours
            .iter()
            .filter_map(|setting| {
                let key = keys::find(&setting.path)?;
                let variants = key.variants.as_ref()?;
                let name = chosen(&variants.tag).filter(|name| !key.is_of(name))?;
                Some((
                    setting.path.clone(),
                    format!("it is for {}, and `{}` is {name}", variants.names.join(", "), variants.tag),
                ))
            })
            .collect();
        self.ours.retain(|setting| !refused.iter().any(|(path, _)| *path == setting.path));
        refused.iter().for_each(|(path, reason)| self.refuse(path, reason));
    }

    /// Adds the defaults of the trainer.
    fn add_defaults(&mut self) {
        let own = policy::dialect(self.trainer, &self.yaml.table).map_or(&[][..], |dialect| dialect.defaults);
        let own = own.iter().map(|(path, text)| (*path, text.to_string()));
        for (path, text) in own.chain(self.trainer.defaults(&self.yaml.table)) {
            if !self.ours.iter().any(|setting| setting.path == path) {
                let value =
                    format!("value = {text}").parse::<Table>().expect("our own values are TOML")["value"].clone();
                let comment = format!("  # the default of {}", self.trainer.name());
                self.ours.push(Setting { path: path.into(), value, comment });
            }
        }
    }

    /// Adds the settings that are valid beside the others, and refuses the rest.
    fn add_deferred(&mut self) {
        for (path, setting, reason) in std::mem::take(&mut self.deferred) {
            let problems = |more: Option<&Setting>| {
                let mut table = Table::new();
                for Setting { path, value, .. } in self.ours.iter().chain(more) {
                    paths::insert(&mut table, path, value.clone()).ok()?;
                }
                Some(table.try_into::<RunConfig>().ok()?.problems())
            };
            let is_new = self.ours.iter().all(|other| other.path != setting.path);
            match (problems(None), problems(Some(&setting))) {
                (Some(before), Some(after)) if is_new => match after.iter().find(|problem| !before.contains(problem)) {
                    None => self.ours.push(setting),
                    Some(problem) => self.refuse(&path, &refused(&setting.path, &setting.value, problem)),
                },
                _ => self.refuse(&path, &reason),
            }
        }
    }

    fn finish(mut self) -> Imported {
        self.refuse_other_variants();
        let is_written = |setting: &Setting| keys::find(&setting.path).is_some();
        debug_assert!(self.ours.iter().all(is_written), "each setting has a key");
        let path = comment(&self.path.display().to_string());
        let mut toml = format!("# Translated from {path} of {} by `ottava import`.\n", self.trainer.name());
        for (title, list) in [("Not translated", &self.refused), ("Not needed", &self.needless)] {
            if !list.is_empty() {
                let _ = write!(toml, "#\n# {title}:\n");
                list.iter().for_each(|note| {
                    let _ = writeln!(toml, "#   {}", comment(note));
                });
            }
        }
        toml.push('\n');
        let mut table = "";
        let is_table = |path: &str| [words::DATASETS, words::REWARDS].contains(&path);
        for key in keys::all().iter().filter(|key| !is_table(&key.path)) {
            let Some(setting) = self.ours.iter().find(|setting| setting.path == key.path) else { continue };
            let (of, name) = key.path.rsplit_once('.').unwrap_or(("", &key.path));
            if of != table {
                let _ = write!(toml, "\n[{of}]\n");
                table = of;
            }
            let _ = writeln!(toml, "{name} = {}{}", setting.value, setting.comment);
        }
        for setting in self.ours.iter().filter(|setting| is_table(&setting.path)) {
            toml.push_str(&tables(setting));
        }
        let problems = match toml::from_str::<RunConfig>(&toml) {
            Ok(config) => config.problems(),
            Err(error) => vec![error.to_string().trim_end().replace('\n', " ")],
        };
        Imported { toml, refused: self.refused, needless: self.needless, problems }
    }
}

/// The tables of a list such as `[[data.datasets]]`, with a comment at the share of each.
fn tables(Setting { path, value, comment }: &Setting) -> String {
    let mut toml = String::new();
    for set in value.as_array().into_iter().flatten().filter_map(Value::as_table) {
        let _ = write!(toml, "\n[[{path}]]\n");
        for (key, value) in set {
            let comment =
                if value.is_float() && !comment.is_empty() { format!("  # {comment}") } else { String::new() };
            let _ = writeln!(toml, "{key} = {value}{comment}");
        }
    }
    toml
}

/// Why the key `path` of ours does not get `value`.
fn refused(path: &str, value: &Value, reason: &str) -> String {
    format!("{} is refused: {reason}", names::line(path, value))
}

impl Known {
    /// The only path whose last part is `name`.
    fn path_of(&self, name: &str) -> Option<String> {
        let mut found = self.0.iter().filter(|path| path.rsplit('.').next() == Some(name));
        found.next().filter(|_| found.next().is_none()).cloned()
    }

    fn is_list(&self, path: &str) -> bool {
        keys::find(path).is_some_and(|key| key.is("array"))
    }

    fn is_integer(&self, path: &str) -> bool {
        keys::find(path).is_some_and(|key| key.is("integer") || key.schema["type"][0] == "integer")
    }

    /// Why `path` cannot have `value`.
    fn mistake(&self, path: &str, value: &Value) -> Option<String> {
        let mut table = Table::new();
        let mut write = |path: &str, value: Value| paths::insert(&mut table, path, value).ok();
        // Without adapters, their keys are not checked.
        write("lora.r", Value::Integer(i64::from(path.starts_with("lora."))))?;
        // The loss that requires it does not get it from its own key.
        write("preference.label_smoothing", Value::Float(0.1))?;
        let variants = keys::find(path).and_then(|key| key.variants.as_ref());
        if let Some(variants) = variants {
            write(&variants.tag, variants.names[0].as_str().into())?;
        }
        let base: RunConfig = table.clone().try_into().ok()?;
        paths::insert(&mut table, path, value.clone()).ok()?;
        let reason = match table.try_into::<RunConfig>() {
            Err(error) => error.to_string().lines().next().unwrap_or_default().trim().to_string(),
            Ok(config) => {
                let before = base.problems();
                config.problems().into_iter().find(|problem| !before.contains(problem))?
            }
        };
        Some(refused(path, value, &reason))
    }
}
