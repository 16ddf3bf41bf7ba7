//! The text that `eval` and `calibrate` run a model on.

use super::remote::{Reads, Remote, VALIDATION};
use clap::Args;
use ottava_common::{Error, Result};
use ottava_data::{
    Batch, Documents, EvalLoader, Example, Fit, Formatting, Packing, RowLayout, SourceOptions, Split, SplitUse,
    TokenDataset, Tokenizer, Windows, expand, loader, prepare, source,
};
use ottava_models::{Decoder, DecoderConfig};
use ottava_train::objective::preference::{PreferenceSums, evaluate_rewards};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::Arc;

/// The maximum number of tokens of a batch.
const MAX_TOKENS: usize = 1 << 24;

/// The length in tokens from which a batch of tasks has fewer sequences than `--batch-size`.
const LONG: usize = 4096;

/// A text, and how it is divided into sequences.
#[derive(Args)]
pub struct Text {
    /// Text (.txt, .md) or JSON lines (.jsonl), also gzipped, or a data set of the Hugging Face Hub, such as OWNER/NAME?split=test.
    #[arg(long, required = true, num_args = 1..)]
    data: Vec<PathBuf>,
    /// The number of tokens per sequence; by default the model's positions, at most 1024 for a text.
    #[arg(long, alias = "seq-len", value_parser = super::count)]
    max_length: Option<usize>,
    /// The number of sequences per batch.
    #[arg(long, default_value_t = 8, value_parser = super::count)]
    batch_size: usize,
    /// Treat each line of a text file as a document.
    #[arg(long)]
    lines: bool,
    /// The field of a JSON line that holds the text.
    #[arg(long, default_value = "text")]
    text_field: String,
}

/// A tokenized text.
pub struct Tokens {
    dataset: Arc<TokenDataset>,
    split: Split,
    /// The number of bytes of the text in UTF-8.
    pub bytes: u64,
    rows: usize,
}

/// The batches of a text.
pub struct Batches {
    /// The batches.
    pub batches: Box<dyn Iterator<Item = Result<Batch>>>,
    /// The number of tokens that the batches predict.
    pub tokens: u64,
    /// How the text is divided into rows.
    pub cut: Cut,
}

/// How a text is divided into rows.
pub enum Cut {
    /// One stream of all documents.
    Stream {
        /// The rows.
        windows: Windows,
        /// The token before the first token of the text.
        preceding_id: u32,
    },
    /// Whole documents that do not attend to each other; only their answers contribute to the loss.
    Documents {
        /// The number of tokens of a row.
        seq_len: usize,
        /// The numbers of documents that are truncated or left out.
        fit: Fit,
    },
}

impl Cut {
    /// Describes the rows in words.
    pub fn describe(&self) -> String {
        match self {
            Cut::Stream { windows: Windows { seq_len, stride }, preceding_id } if stride == seq_len => {
                format!("in blocks of {seq_len} tokens that do not overlap; token {preceding_id} precedes the text")
            }
            Cut::Stream { windows: Windows { seq_len, stride }, preceding_id } => format!(
                "in windows of {seq_len} tokens, of which the last {stride} are counted; token {preceding_id} precedes the text"
            ),
            Cut::Documents { seq_len, fit } => {
                let Fit { documents, truncated, left_out, .. } = fit;
                let mut text = format!("over the answers of {} documents, each on its own", documents - left_out);
                if *truncated > 0 {
                    text += &format!("; {truncated} are longer than --max-length and cut to {seq_len} tokens");
                }
                if *left_out > 0 {
                    text +=
                        &format!("; {left_out} more have no answer within --max-length = {seq_len} and are left out");
                }
                text
            }
        }
    }

    /// Returns the fields that `--json` prints.
    pub fn fields(&self) -> Value {
        match self {
            Cut::Stream { windows: Windows { seq_len, stride }, preceding_id } => {
                json!({"max_length": seq_len, "stride": stride, "preceding_id": preceding_id})
            }
            Cut::Documents { seq_len, fit } => json!({
                "max_length": seq_len,
                "documents": fit.documents - fit.left_out,
                "truncated": fit.truncated,
                "left_out": fit.left_out,
            }),
        }
    }
}

impl Text {
    /// Returns the tokenizer with the length of sequences of a model of these `sizes`. Errors if the tokenizer does not fit, or if sequences are longer
    /// than the model's positions.
    pub fn fit(&self, tokenizer: Tokenizer, sizes: &DecoderConfig) -> Result<(Tokenizer, usize)> {
        tokenizer.check_fits(sizes.vocabulary)?;
        let seq_len = self.max_length_within(sizes, 1024)?;
        if self.batch_size.saturating_mul(seq_len) > MAX_TOKENS {
            return Err(Error::Config(format!(
                "--batch-size times --max-length is {}; at most {MAX_TOKENS} tokens are evaluated at a time",
                self.batch_size.saturating_mul(seq_len)
            )));
        }
        Ok((tokenizer, seq_len))
    }

    /// Returns --max-length, by default the model's positions but at most `most`. Errors if sequences are longer than the model's positions.
    pub fn max_length_within(&self, sizes: &DecoderConfig, most: usize) -> Result<usize> {
        match self.max_length.unwrap_or(sizes.context().min(most)) {
            length if length > sizes.context() => {
                Err(Error::Config(format!("--max-length is {length}, and {}", sizes.context_reason())))
            }
            length => Ok(length),
        }
    }

    /// Returns the maximum number of tokens of a batch with sequences of up to `longest` tokens. Few sequences are as long as the longest one, so batches of
    /// long sequences have fewer of them: their memory does not grow with the positions of the model.
    pub fn batch_tokens(&self, longest: usize) -> usize {
        self.batch_size.saturating_mul(longest.min(LONG)).min(MAX_TOKENS)
    }

    /// Tokenizes the files.
    pub fn tokenize(&self, tokenizer: &Tokenizer) -> Result<Tokens> {
        self.tokenize_as(Formatting::Auto, tokenizer)
    }

    /// Tokenizes the files as records of texts with labels. Returns `None` if the first file has plain text or pairs of preferences.
    pub fn tokenize_labeled(&self, tokenizer: &Tokenizer) -> Result<Option<Tokens>> {
        let files = self.files()?;
        let of_first = |formatting: Formatting| match files.first() {
            Some(path) => source::formatting(path, &self.options(formatting)),
            None => Ok(Formatting::Text),
        };
        // The fields of pairs and chats are detected, and the text of other records may have a name that only a classifier knows.
        let are_pairs = matches!(of_first(Formatting::Auto), Ok(Formatting::Preference));
        let has_labels = !are_pairs && of_first(Formatting::Classification)? == Formatting::Classification;
        has_labels.then(|| self.tokenize_as(Formatting::Classification, tokenizer)).transpose()
    }

    fn options(&self, formatting: Formatting) -> SourceOptions {
        let text_documents = if self.lines { Documents::Line } else { Documents::File };
        SourceOptions { text_documents, text_field: self.text_field.clone(), formatting, ..SourceOptions::default() }
    }

    fn files(&self) -> Result<Vec<PathBuf>> {
        expand(&Remote::default().data_files(&self.data, VALIDATION, Reads::Shapes)?, SplitUse::Validation)
    }

    fn tokenize_as(&self, formatting: Formatting, tokenizer: &Tokenizer) -> Result<Tokens> {
        let (files, options) = (self.files()?, self.options(formatting));
        let cache = tempfile::tempdir().map_err(Error::io(std::env::temp_dir()))?;
        let dataset = Arc::new(prepare(&files, &options, tokenizer, cache.path())?);
        let split = Split::all_validation(dataset.len());
        let bytes = loader::validation_bytes(&dataset, &split)?;
        Ok(Tokens { dataset, split, bytes, rows: self.batch_size })
    }
}

impl Tokens {
    /// Errors with [`Error::Data`] for preferences, because chosen and rejected completions are not one text.
    pub fn expect_text(&self) -> Result<()> {
        match self.dataset.meta().kind.preference() {
            None => Ok(()),
            Some(_) => Err(Error::Data(
                "the data are preferences, of which `ottava eval` evaluates pairs by a reward model; the rewards of a language model are relative \
                 to a reference, and its run writes those of held-out records (`data.val_set_size` or `data.val_files`) to metrics.jsonl"
                    .into(),
            )),
        }
    }

    /// Sums losses and rewards of the reward model `model` over pairs of preferences. Also returns the number of pairs that are longer than a row.
    /// Rows of `seq_len` tokens are padded with the token `padding`.
    pub fn rewards(
        &self,
        model: &mut Decoder,
        seq_len: usize,
        padding: Option<i64>,
    ) -> Result<(PreferenceSums, usize)> {
        let layout = RowLayout { seq_len, packing: Packing::None, document_mask: false, max_documents: None };
        // A pair has two rows.
        evaluate_rewards(model, self.dataset.clone(), layout, padding, self.rows.div_ceil(2))
    }

    /// Returns the texts with their columns, of records with labels.
    pub fn examples(&self) -> Result<Vec<Example>> {
        (0..self.dataset.len()).map(|i| Example::read(&self.dataset, i)).collect()
    }

    /// Returns all batches with rows of `seq_len` tokens. Chats and completions are whole documents, as in training. Texts are one stream of rows,
    /// whose starts are `stride` tokens apart (by default `seq_len`).
    ///
    /// Errors with [`Error::Config`] if documents are given a stride, or if the stride is larger than `seq_len`. Errors with [`Error::Data`] if no
    /// document has a target.
    pub fn batches(&self, seq_len: usize, stride: Option<usize>) -> Result<Batches> {
        let (dataset, meta) = (self.dataset.clone(), self.dataset.meta());
        if !meta.loss_mask {
            let windows = Windows { seq_len, stride: stride.unwrap_or(seq_len) };
            if windows.stride > seq_len {
                return Err(Error::Config(format!(
                    "--stride is {}, and --max-length {seq_len}: a larger stride would leave tokens out",
                    windows.stride
                )));
            }
            let cut = Cut::Stream { windows, preceding_id: meta.eos_id };
            let batches = EvalLoader::new(dataset, self.split, windows, self.rows)?;
            return Ok(Batches { tokens: batches.tokens(), batches: Box::new(batches), cut });
        }
        if stride.is_some() {
            let text = "--stride is for texts; each document of chats and completions is evaluated separately";
            return Err(Error::Config(text.into()));
        }
        let layout = RowLayout { seq_len, packing: Packing::Bfd, document_mask: true, max_documents: None };
        let fit = Fit::of_all(&dataset, &layout)?;
        if fit.left_out == fit.documents {
            let text = format!("no document has a token of an answer within --max-length = {seq_len}; raise that");
            return Err(Error::Data(text));
        }
        let tokens = meta.target_tokens;
        let batches = loader::whole_validation(dataset, self.split, layout, self.rows)?;
        Ok(Batches { tokens, batches: Box::new(batches), cut: Cut::Documents { seq_len, fit } })
    }

    /// Returns the number of sequences of a batch.
    pub fn rows(&self) -> usize {
        self.rows
    }
}
