//! The tables `[data]` and `[[data.datasets]]`.

use crate::auto;
use ottava_data::source::{BadRecord, Documents, SourceOptions, TrainOnEos};
use ottava_data::{ExcessLength, Formatting, Packing};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The `[data]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DataConfig {
    /// Files of text, records or tokens, folders of them, and patterns of names.
    pub train_files: Vec<PathBuf>,
    /// Files with the validation documents; empty holds out some of `train_files`.
    pub val_files: Vec<PathBuf>,
    /// Whether a document of a text file is a `line` or the whole `file`.
    pub text_documents: Documents,
    /// The field of a JSON line that holds the text.
    pub text_field: String,
    /// The fields of JSON lines: `auto` (by the first one), `text`, `messages`, `prompt_completion`, `alpaca` or `sharegpt`.
    pub formatting: Formatting,
    /// Other names of fields: `ours=theirs`.
    pub fields: Vec<String>,
    /// Other names of roles: `ours=theirs`.
    pub roles: Vec<String>,
    /// Fields of messages that are left out.
    pub ignored_fields: Vec<String>,
    /// The roles of messages that contribute to the loss.
    pub roles_to_train: Vec<String>,
    /// The turns whose end contributes to the loss: `turn` (all learned ones), `all`, `last` (the last learned one) or `none`.
    pub train_on_eos: TrainOnEos,
    /// Further variables of the chat template: `name=value`.
    pub chat_template_kwargs: Vec<String>,
    /// What is done with a record that cannot be used: `error` or `skip`.
    pub on_bad_record: BadRecord,
    /// The most records of a file that may be left out.
    pub max_bad_records: u64,
    /// A file with a chat template; empty means that of the tokenizer's folder.
    pub chat_template_path: PathBuf,
    /// Whether prompts contribute to the loss too, instead of only answers and completions.
    pub train_on_inputs: bool,
    /// `auto`, `wrapped` (a stream of documents), `bfd` (whole documents, several in a row) or `none` (a document in each row).
    pub packing: Packing,
    /// Whether attention ends at the edges of documents; `None`, written `auto`, where documents are whole.
    #[serde(with = "auto")]
    pub document_mask: Option<bool>,
    /// The treatment of a whole document longer than a row: `truncate` or `raise`.
    pub excess_length_strategy: ExcessLength,
    /// Documents held out for validation: a share below 1, or a number.
    pub val_set_size: f64,
    /// Tokens per sequence.
    pub max_length: usize,
    /// Folder of prepared tokens; empty means `tokens` next to the run's folder.
    pub cache_dir: PathBuf,
    /// Several data sets instead of `train_files`, each with a share of the tokens.
    pub datasets: Vec<DatasetConfig>,
}

/// A table of `[[data.datasets]]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DatasetConfig {
    /// Its name, in metrics and messages.
    pub name: String,
    /// As the key of the same name of `[data]`.
    pub train_files: Vec<PathBuf>,
    /// As the key of the same name of `[data]`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub val_files: Vec<PathBuf>,
    /// Its share of the tokens, divided by the sum of all weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<f64>,
    /// How often its documents are read in an epoch, if no set has a weight; 1 where it is not set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repeat: Option<f64>,
    /// As the key of the same name of `[data]`, which is taken where this one is not set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text_field: Option<String>,
    /// As the key of the same name of `[data]`, which is taken where this one is not set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub formatting: Option<Formatting>,
    /// As the key of the same name of `[data]`, which is taken where this one is not set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fields: Option<Vec<String>>,
    /// As the key of the same name of `[data]`, which is taken where this one is not set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub roles: Option<Vec<String>>,
}

impl DatasetConfig {
    /// All keys.
    pub(super) const KEYS: &[&str] =
        &["name", "train_files", "val_files", "weight", "repeat", "text_field", "formatting", "fields", "roles"];
}

impl Default for DataConfig {
    fn default() -> DataConfig {
        let source = SourceOptions::default();
        DataConfig {
            train_files: Vec::new(),
            val_files: Vec::new(),
            text_documents: source.text_documents,
            text_field: source.text_field,
            formatting: source.formatting,
            fields: source.fields,
            roles: source.roles,
            ignored_fields: source.ignored_fields,
            roles_to_train: source.roles_to_train,
            train_on_eos: source.train_on_eos,
            chat_template_kwargs: source.chat_template_kwargs,
            on_bad_record: source.on_bad_record,
            max_bad_records: 100,
            chat_template_path: source.chat_template_path,
            train_on_inputs: source.train_on_inputs,
            packing: Packing::Auto,
            document_mask: None,
            excess_length_strategy: ExcessLength::Truncate,
            val_set_size: 0.01,
            max_length: 1024,
            cache_dir: PathBuf::new(),
            datasets: Vec::new(),
        }
    }
}
