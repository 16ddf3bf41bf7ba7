//! Training data: files of text and records, cached tokens, and batches in a computed order.
//!
//! ```
//! use ottava_data::Batch;
//!
//! // Two rows of three tokens; the target of an input is the token after it.
//! let batch = Batch::whole(vec![1, 2, 3, 7, 8, 9], vec![2, 3, 4, 8, 9, 10], 2);
//! assert_eq!((batch.rows, batch.seq_len, batch.padding_tokens()), (2, 3, 0));
//! ```
//!
//! Where to change what:
//! * The files that can be read: `Kind` in `files.rs`, `Input` and `DocumentReader` in `source.rs`, and `Format` of `ottava-files` for columnar
//!   files.
//! * The fields of records: `Formatting` in `records.rs`, with `messages.rs`, `preference_records.rs`, `prompt_records.rs` and
//!   `example_records.rs`.
//! * The splits of folders: `splits.rs`.
//! * The rows: `Packing`, `RowLayout` and `Window` in `packing.rs`, `Cursor` in `loader.rs`.
//! * Files that are fetched while a run trains: `ShardSource` and `StreamRows` in `stream.rs`.
//! * The data set of the next row: `next_set` in `mixture.rs`.
//! * The built-in chat templates: a file in `templates/built_in/`, and a row of `BUILT_IN` in `built_in.rs`.
//! * The keys of a data set: `DatasetConfig` (`settings/data.rs`), which `check_datasets` (`settings/datasets.rs`) checks.
//! * Numbers that need a pass over all documents: `Statistics` (`statistics.rs`), which is stored beside the tokens.
#![forbid(unsafe_code)]

mod added_tokens;
mod built_in;
mod byte_form;
mod cards;
pub mod chat;
mod chat_files;
mod columns;
mod compression;
mod content;
mod continuation;
mod detokenizer;
mod edges;
mod encode;
mod eval_loader;
mod example_records;
pub mod examples;
mod fields;
mod files;
#[cfg(test)]
mod formats_tests;
mod guard;
mod guess;
mod join;
mod json_values;
mod left_out;
pub mod loader;
mod mapping;
mod marked;
mod megatron;
mod messages;
pub mod mixture;
pub mod order;
mod packing;
mod parts;
#[cfg(test)]
mod parts_tests;
mod pieces;
pub mod preference;
mod preference_records;
pub mod prepare;
pub mod preview;
mod prompt_records;
pub mod prompts;
mod reads;
pub mod records;
pub mod shards;
pub mod source;
mod splits;
mod stamps;
pub mod statistics;
mod stream;
mod table;
mod tiktoken;
mod token_writer;
mod tokenize;
pub mod tokenizer;
pub mod tokenizer_changes;
mod tokenizer_parts;
pub mod turns;
mod values;
mod words;

pub use built_in::{BUILT_IN, BuiltInTemplate};
pub use chat::{Chat, ChatTemplate, PromptForm};
pub use content::{Content, ExampleRecord, ExampleText, PromptRecord};
pub use detokenizer::{Decoded, Detokenizer};
pub use edges::read_json;
pub use eval_loader::{EvalLoader, Windows};
pub use examples::{Example, ExampleLoader, ExampleRows};
pub use files::expand;
pub use guess::{Guess, toml_table};
pub use loader::{Batch, LoaderState, RowShare};
pub use megatron::write_megatron;
pub use mixture::{BatchLoader, DataSet, DataState, TrainingData};
pub use order::Split;
pub use ottava_jinja::Clock;
pub use ottava_jinja::json_text::{keep_integers, parse as parse_json, write as write_json};
pub use packing::{ExcessLength, Packing, RowLayout, best_fit, max_unknown_documents};
pub use parts::Part;
pub use preference::{PreferenceBatch, PreferenceLoader, Records, RowTarget};
pub use prepare::{PreparedPart, prepare, prepare_part};
pub use prompts::{Prompt, PromptLoader, PromptSet};
pub use records::Formatting;
pub use shards::{PreferenceKind, RecordKind, TokenDataset};
pub use source::{BadRecord, Documents, SourceOptions, TrainOnEos};
pub use splits::SplitUse;
pub use statistics::{Fit, Statistics};
pub use stream::{ShardSource, ShardStream, Shards, StreamSizes};
pub use tokenizer::Tokenizer;
