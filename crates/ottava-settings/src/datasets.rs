//! The data sets that a run's file names: options, problems, tokens and shares.

use crate::demands::Problems;
use crate::{DatasetConfig, RunConfig};
use ottava_common::error::{Error, Result};
use ottava_data::source::{BadRecord, SourceOptions, formatting};
use ottava_data::{
    ChatTemplate, DataSet, Formatting, Packing, Part, PreparedPart, RowLayout, Split, SplitUse, Tokenizer,
    TrainingData, expand, max_unknown_documents, prepare, prepare_part,
};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The units of a weight: weights are rounded to nine decimals. With [`MAX_WEIGHT`] and [`MAX_SETS`], the sum of all shares is below 2^60.
const UNIT: f64 = 1e9;

/// The units of the whole, in which shares by tokens are counted.
const REPEAT_UNIT: f64 = 1e15;

/// The maximum weight, and the maximum number of repeats.
const MAX_WEIGHT: f64 = 1e6;

/// The maximum number of data sets of a run.
const MAX_SETS: usize = 1024;

impl RunConfig {
    /// Returns the data sets of the run: the tables `[[data.datasets]]`, or one data set with the files of `[data]`.
    pub fn datasets(&self) -> Vec<DatasetConfig> {
        match self.data.datasets.is_empty() {
            true => vec![DatasetConfig {
                train_files: self.data.train_files.clone(),
                val_files: self.data.val_files.clone(),
                ..DatasetConfig::default()
            }],
            false => self.data.datasets.clone(),
        }
    }

    /// Returns the options for reading the files of a data set.
    pub(super) fn source_options(&self, set: &DatasetConfig) -> SourceOptions {
        let data = &self.data;
        SourceOptions {
            text_documents: data.records.text_documents,
            text_field: set.text_field.as_ref().unwrap_or(&data.records.text_field).clone(),
            formatting: match set.formatting.unwrap_or(data.records.formatting) {
                Formatting::Auto => self.objective().properties().formatting,
                formatting => formatting,
            },
            train_on_inputs: data.train_on_inputs,
            fields: set.fields.as_ref().unwrap_or(&data.records.fields).entries(),
            roles: set.roles.as_ref().unwrap_or(&data.records.roles).entries(),
            ignored_fields: data.records.ignored_fields.clone(),
            roles_to_train: data.chat.roles_to_train.clone(),
            train_on_eos: data.chat.train_on_eos,
            chat_template_kwargs: data.chat.chat_template_kwargs.entries(),
            on_bad_record: data.records.on_bad_record,
            max_bad_records: match data.records.on_bad_record {
                BadRecord::Error => 0,
                BadRecord::Skip => data.records.max_bad_records,
            },
            chat_template_path: data.chat.chat_template_path.clone(),
        }
    }

    /// Returns the chat template of the data; `None` if the run has no template.
    ///
    /// Has the errors of [`ChatTemplate::of_options`].
    pub fn chat_template(&self, tokenizer: &Tokenizer) -> Result<Option<ChatTemplate>> {
        ChatTemplate::of_options(tokenizer, &self.source_options(&DatasetConfig::default()))
    }

    /// Resolves `data.packing`, `data.document_mask`, `[preference]` and `[classification]` by the first records of the files. Returns each file with its
    /// formatting.
    ///
    /// Errors with [`Error::Data`] if a file or its first record cannot be read, and with [`Error::Config`] if `[preference]` does not fit the
    /// records.
    pub fn resolve_data(&mut self) -> Result<Vec<(PathBuf, Formatting)>> {
        let mut files = Vec::new();
        for (number, set) in self.datasets().into_iter().enumerate() {
            let options = self.source_options(&set);
            let train_files = self.training_files(number, &set)?;
            for path in [train_files, expand(&set.val_files, SplitUse::Validation)?].concat() {
                files.push((formatting(&path, &options)?, path));
            }
        }
        let shapes = || files.iter().map(|(formatting, path)| (*formatting, path.as_path()));
        self.resolve_prompts(shapes())?;
        self.resolve_examples(shapes())?;
        self.resolve_classification()?;
        self.resolve_preference(files.iter().map(|(formatting, _)| *formatting))?;
        self.resolve_distillation();
        if self.data.packing == Packing::Auto {
            let prompts = files.iter().any(|(formatting, _)| formatting.has_prompts());
            self.data.packing = if prompts { Packing::Bfd } else { Packing::Wrapped };
        }
        self.data.document_mask.get_or_insert(self.data.packing != Packing::Wrapped);
        Ok(files.into_iter().map(|(formatting, path)| (path, formatting)).collect())
    }

    /// Returns the data of the run. Data that were not prepared before are prepared now.
    ///
    /// Returns the errors of [`prepare()`]. Errors with [`Error::Config`] if no training data are left.
    pub fn prepare_data(&self, tokenizer: &Tokenizer) -> Result<TrainingData> {
        let (layout, configs) = (self.layout(), self.datasets());
        let mut sets = Vec::new();
        for (number, config) in configs.iter().enumerate() {
            let set = match self.data.streaming {
                true => self.streamed_set(number, config, tokenizer, &layout),
                false => self.prepare_set(config, tokenizer, &layout),
            };
            sets.push(set.map_err(|error| in_set(config, error))?);
        }
        let repeats = configs.iter().map(|config| config.repeat.unwrap_or(1.0));
        let repeated: Vec<f64> = sets.iter().zip(repeats).map(|(set, n)| set.statistics.tokens as f64 * n).collect();
        let epoch_tokens: f64 = repeated.iter().sum();
        for ((set, config), repeated) in sets.iter_mut().zip(&configs).zip(&repeated) {
            set.share = match config.weight {
                Some(weight) => (weight * UNIT).round() as u64,
                None => (repeated / epoch_tokens * REPEAT_UNIT).round() as u64,
            }
            .max(1);
        }
        Ok(TrainingData { sets, layout, epoch_tokens })
    }

    /// Prepares a part of the tokens of each data set. Returns each part with the name of its data set. The call that prepares the last missing part
    /// joins all parts.
    ///
    /// Returns the errors of [`prepare_part`].
    pub fn prepare_part(&self, tokenizer: &Tokenizer, part: Part) -> Result<Vec<(String, PreparedPart)>> {
        let prepare = |set: &DatasetConfig| {
            let (files, options) = (set_files(set)?.1, self.source_options(set));
            Ok((set.name.clone(), prepare_part(&files, &options, tokenizer, &self.cache_dir(), part)?))
        };
        self.datasets().iter().map(|set| prepare(set).map_err(|error| in_set(set, error))).collect()
    }

    pub(super) fn prepare_set(
        &self,
        set: &DatasetConfig,
        tokenizer: &Tokenizer,
        layout: &RowLayout,
    ) -> Result<DataSet> {
        let (held_out, files) = set_files(set)?;
        let dataset = prepare(&files, &self.source_options(set), tokenizer, &self.cache_dir())?;
        // The two documents of a pair stay in the same split.
        let together = dataset.len() / dataset.records();
        let split = match held_out {
            0 => Split::new(dataset.records(), self.data.val_set_size)?,
            count => {
                let documents: u64 = dataset.meta().sources[..count].iter().map(|source| source.documents).sum();
                Split::leading(dataset.records(), documents / together as u64)?
            }
        };
        let split = split.of_groups(together);
        let only = DataSet::only(Arc::new(dataset), split, layout, self.seed)?;
        only.statistics.check(&only.dataset, layout, self.data.excess_length_strategy)?;
        Ok(DataSet { name: set.name.clone(), ..only })
    }

    /// Whether the run has validation documents.
    pub fn validates(&self) -> bool {
        self.data.val_set_size > 0.0 || self.datasets().iter().any(|set| !set.val_files.is_empty())
    }

    /// Whether evaluations have something to compute: validation documents or tasks.
    pub fn evaluates(&self) -> bool {
        self.validates() || !self.evaluation.tasks.is_empty()
    }

    /// Checks `[[data.datasets]]`.
    pub(super) fn check_datasets(&self, problems: &mut Problems) {
        let sets = &self.data.datasets;
        if sets.is_empty() {
            problems.demand(
                !self.data.train_files.is_empty(),
                "`data.train_files` is empty: name at least one file, folder or pattern of data",
            );
            return;
        }
        problems.demand(
            self.data.train_files.is_empty() && self.data.val_files.is_empty(),
            "`data.train_files` or `val_files` and [[data.datasets]] are set; make the files one more table of [[data.datasets]]",
        );
        problems.demand(
            sets.len() <= MAX_SETS,
            format!("[[data.datasets]] has {} sets, {MAX_SETS} are the most", sets.len()),
        );
        let mut names = BTreeSet::new();
        for (number, set) in (1..).zip(sets) {
            let is_name = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
            problems.demand(
                !set.name.is_empty() && set.name.chars().all(is_name),
                format!("set {number} of [[data.datasets]] needs a `name` of letters, digits, `_`, `-` and `.`, for its metrics; it is {:?}", set.name),
            );
            problems
                .demand(names.insert(&set.name), format!("two sets of [[data.datasets]] have the name `{}`", set.name));
            problems.demand(
                !set.train_files.is_empty(),
                format!("`train_files` of data set `{}` is empty: name at least one file, folder or pattern", set.name),
            );
            for (key, value) in [("weight", set.weight), ("repeat", set.repeat)] {
                problems.demand(
                    value.is_none_or(|value| (1.0 / UNIT..=MAX_WEIGHT).contains(&value)),
                    format!("`{key}` of data set `{}` lies outside 1e-9 to {MAX_WEIGHT:.0}", set.name),
                );
            }
        }
        let weights = sets.iter().filter(|set| set.weight.is_some()).count();
        problems.demand(
            [0, sets.len()].contains(&weights),
            format!("{weights} of {} sets of [[data.datasets]] have a `weight`; set it for all of them, or for none, which gives each set the share of its tokens", sets.len()),
        );
        problems.demand(
            weights == 0 || sets.iter().all(|set| set.repeat.is_none()),
            "sets of [[data.datasets]] have a `weight` and a `repeat`; weights are shares whatever the size of a set, and repeats multiply it: use one of the two",
        );
    }

    /// Returns the name and the share of each data set if the sets have weights; `None` without weights, because the shares then depend on token
    /// counts.
    pub fn weighted_shares(&self) -> Option<Vec<(&str, f64)>> {
        let sets = &self.data.datasets;
        let weights = sets.iter().map(|set| set.weight).collect::<Option<Vec<f64>>>().filter(|all| !all.is_empty())?;
        let sum: f64 = weights.iter().sum();
        Some(sets.iter().zip(weights).map(|(set, weight)| (set.name.as_str(), weight / sum)).collect())
    }

    /// Whether the shares of the data sets equal the shares of `other`.
    pub fn has_shares_of(&self, other: &RunConfig) -> bool {
        let shares =
            |config: &RunConfig| config.data.datasets.iter().map(|set| (set.weight, set.repeat)).collect::<Vec<_>>();
        shares(self) == shares(other)
    }

    /// Returns the packing and the length of rows. If packing is still `auto`, it is one stream of documents.
    pub fn layout(&self) -> RowLayout {
        let packing = match self.data.packing {
            Packing::Auto => Packing::Wrapped,
            packing => packing,
        };
        let document_mask = self.data.document_mask.unwrap_or(packing != Packing::Wrapped);
        let seq_len = self.data.max_length;
        RowLayout {
            seq_len,
            packing,
            document_mask,
            max_documents: self.data.streaming.then(|| max_unknown_documents(seq_len)),
        }
    }

    /// Returns the folder of prepared tokens.
    pub fn cache_dir(&self) -> PathBuf {
        match self.data.cache_dir.as_os_str().is_empty() {
            true => self.output_dir.parent().unwrap_or(Path::new(".")).join("tokens"),
            false => self.data.cache_dir.clone(),
        }
    }
}

/// Returns the number of validation files of a data set, and all its files. Validation files come first, so validation documents come first too.
fn set_files(set: &DatasetConfig) -> Result<(usize, Vec<PathBuf>)> {
    let mut files = expand(&set.val_files, SplitUse::Validation)?;
    let held_out = files.len();
    files.extend(set.train_files.iter().cloned());
    Ok((held_out, files))
}

/// Adds the name of the data set to an error.
fn in_set(set: &DatasetConfig, error: Error) -> Error {
    let named = |text: String| match set.name.as_str() {
        "" => text,
        name => format!("data set `{name}`: {text}"),
    };
    match error {
        Error::Data(text) => Error::Data(named(text)),
        Error::Config(text) => Error::Config(named(text)),
        other => other,
    }
}
