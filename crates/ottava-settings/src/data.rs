//! The tables `[data]`, `[data.records]`, `[data.chat]` and `[[data.datasets]]`.

use crate::auto;
use crate::pairs::{Names, Pairs};
use ottava_data::source::{BadRecord, Documents, SourceOptions, TrainOnEos};
use ottava_data::{ExcessLength, Formatting, Packing, Shards};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use toml::Value;

/// The `[data]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DataConfig {
    /// Training files, folders of training files, or patterns such as "data/*.jsonl". A file is text (.txt, .md), records (.jsonl, .json,
    /// .csv, .tsv), compressed text or records (.gz, .zst), .parquet, .arrow, or tokens of Megatron-LM (.bin with its .idx). Or data sets of the
    /// Hugging Face Hub: "OWNER/NAME?config=NAME&split=NAME" or "hf://datasets/OWNER/NAME@REVISION/PATTERN". Or objects of a store:
    /// "s3://BUCKET/PATTERN", "gs://BUCKET/PATTERN" or "az://CONTAINER/PATTERN". Or a file of a web server: "https://HOST/FILE".
    pub train_files: Vec<PathBuf>,
    /// Validation files, folders or patterns, in the formats of train_files; [] holds out val_set_size of the documents of train_files
    /// instead.
    pub val_files: Vec<PathBuf>,
    /// How the records of files are read.
    pub records: RecordsConfig,
    /// How conversations are rendered and tokenized.
    pub chat: ChatConfig,
    /// Whether prompts contribute to the loss too; with false, only completions and turns of the assistant contribute.
    pub train_on_inputs: bool,
    /// How documents are packed into rows: "wrapped" (one stream, cut into full rows), "bfd" (whole documents, packed into rows by best-fit
    /// decreasing), "none" (one document in each row), or "auto" ("bfd" if records hold conversations or completions, else "wrapped").
    pub packing: Packing,
    /// Whether tokens attend only to their own document, and positions restart at each document: true, false, or "auto" (true unless
    /// packing is "wrapped").
    #[serde(with = "auto")]
    #[schemars(with = "auto::Auto<bool>")]
    pub document_mask: Option<bool>,
    /// What to do with a whole document that is longer than max_length: "truncate" keeps its beginning, "raise" is an error.
    pub excess_length_strategy: ExcessLength,
    /// Documents of train_files that are held out for validation: a fraction below 1, or a number of documents; 0 holds out none. Ignored if
    /// val_files is set.
    pub val_set_size: f64,
    /// Tokens per sequence; at most the number of positions of the model.
    pub max_length: usize,
    /// Where prepared tokens are stored; "" means the folder `tokens` beside output_dir.
    pub cache_dir: PathBuf,
    /// Whether files of train_files are fetched and tokenized while the run trains, instead of before it (docs/data.md). Needs `training.max_steps`, and
    /// val_files or val_set_size = 0.
    pub streaming: bool,
    /// With streaming, the number of files whose documents are shuffled together. Each epoch visits the files in a pseudo-random order.
    pub shuffle_shards: usize,
    /// With streaming, the maximum number of files whose copies and tokens are on disk, at least twice shuffle_shards; 0 keeps all. Files of the cache of
    /// the Hugging Face Hub and local files are never removed.
    pub cached_shards: usize,
    /// If files are streamed, the files that train_files of each data set stand for; empty if all of them are local. Not a key of a run's file.
    #[serde(skip)]
    #[schemars(skip)]
    pub shards: Vec<Shards>,
    /// Several data sets instead of train_files and val_files, each a table `[[data.datasets]]` with name, train_files and, optionally,
    /// val_files, formatting, text_field, fields and roles. The last four keys have the values of `[data.records]` by default. Either all sets have
    /// a weight, or none. The share of a set in the tokens is its weight divided by the sum of all weights. Without weights, each set is
    /// read repeat times in an epoch (default 1). For example:
    ///
    /// ```toml
    /// [[data.datasets]]
    /// name = "web"
    /// train_files = ["web/*.parquet"]
    /// weight = 0.7
    /// ```
    pub datasets: Vec<DatasetConfig>,
}

/// A table of `[[data.datasets]]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DatasetConfig {
    /// The name of the data set in metrics and messages.
    pub name: String,
    /// Files with the training documents of the data set, in the formats of `data.train_files`.
    pub train_files: Vec<PathBuf>,
    /// Files with the validation documents of the data set, in the formats of `data.train_files`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub val_files: Vec<PathBuf>,
    /// The weight of the data set. Its share of the tokens is this weight divided by the sum of all weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<f64>,
    /// How often the documents of the data set are read in an epoch if no data set has a weight; 1 by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repeat: Option<f64>,
    /// The field of a record that holds the text; by default `data.records.text_field`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text_field: Option<String>,
    /// The formatting of the records; by default `data.records.formatting`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub formatting: Option<Formatting>,
    /// For names of fields that Ottava knows, the names of these fields in the files; by default `data.records.fields`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fields: Option<Pairs<String>>,
    /// For names of roles that Ottava knows, the names of these roles in the files; by default `data.records.roles`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub roles: Option<Pairs<Names>>,
}

/// The `[data.records]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RecordsConfig {
    /// The fields of the records of a file:
    pub formatting: Formatting,
    /// The field of a record that holds the text.
    pub text_field: String,
    /// What counts as a document in a text file: "file" (the whole file) or "line".
    pub text_documents: Documents,
    /// Ottava's names of fields with the names in your files. Example: { messages = "chat", role = "speaker", content = "text" }.
    pub fields: Pairs<String>,
    /// Ottava's names of roles with the names in your files. Example: { assistant = "bot", user = ["me", "you"] }.
    pub roles: Pairs<Names>,
    /// Fields of messages to ignore. Example: ["id", "timestamp"]. Any other unknown field of a message is an error.
    pub ignored_fields: Vec<String>,
    /// What to do with a record that cannot be used: "error" ends the run, "skip" drops the record and counts it.
    pub on_bad_record: BadRecord,
    /// The maximum number of records that "skip" drops per file.
    pub max_bad_records: u64,
}

/// The `[data.chat]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ChatConfig {
    /// A file with the chat template; "" uses the chat template in the folder of the tokenizer. The template is used only if records hold
    /// conversations.
    pub chat_template_path: PathBuf,
    /// Further variables of the chat template. Example: { enable_thinking = false }.
    #[schemars(with = "Pairs<serde_json::Value>")]
    pub chat_template_kwargs: Pairs<Value>,
    /// Roles of the messages that contribute to the loss. The field "train" of a message (true or false) overrides this list.
    pub roles_to_train: Vec<String>,
    /// Turns in which the end-of-turn token contributes to the loss: "turn" (every trained turn; the text after the token in the turn
    /// contributes too), "all" (also turns that are not trained on), "last" (the last trained turn) or "none".
    pub train_on_eos: TrainOnEos,
}

impl Default for DataConfig {
    fn default() -> DataConfig {
        DataConfig {
            train_files: Vec::new(),
            val_files: Vec::new(),
            records: RecordsConfig::default(),
            chat: ChatConfig::default(),
            train_on_inputs: SourceOptions::default().train_on_inputs,
            packing: Packing::Auto,
            document_mask: None,
            excess_length_strategy: ExcessLength::Truncate,
            val_set_size: 0.01,
            max_length: 1024,
            cache_dir: PathBuf::new(),
            streaming: false,
            shuffle_shards: 4,
            cached_shards: 0,
            shards: Vec::new(),
            datasets: Vec::new(),
        }
    }
}

impl Default for RecordsConfig {
    fn default() -> RecordsConfig {
        let source = SourceOptions::default();
        RecordsConfig {
            formatting: source.formatting,
            text_field: source.text_field,
            text_documents: source.text_documents,
            fields: Pairs::default(),
            roles: Pairs::default(),
            ignored_fields: source.ignored_fields,
            on_bad_record: source.on_bad_record,
            max_bad_records: 100,
        }
    }
}

impl Default for ChatConfig {
    fn default() -> ChatConfig {
        let source = SourceOptions::default();
        ChatConfig {
            chat_template_path: source.chat_template_path,
            chat_template_kwargs: Pairs::default(),
            roles_to_train: source.roles_to_train,
            train_on_eos: source.train_on_eos,
        }
    }
}
