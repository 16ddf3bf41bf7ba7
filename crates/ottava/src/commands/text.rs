//! The text that `eval` and `calibrate` run a model on.

use clap::Args;
use ottava_lm::data::{Documents, EvalLoader, SourceOptions, Split, TokenDataset, Tokenizer, Windows, loader, prepare};
use ottava_lm::models::{ConfigFile, decoder_config};
use ottava_lm::{Error, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The most tokens of a batch.
const MAX_TOKENS: usize = 1 << 24;

/// A text and how it is cut.
#[derive(Args)]
pub struct Text {
    /// Text (.txt, .md) or JSON lines (.jsonl), also gzipped.
    #[arg(long, required = true, num_args = 1..)]
    data: Vec<PathBuf>,
    /// Tokens per sequence; by default the model's positions, at most 1024.
    #[arg(long, value_parser = super::count)]
    seq_len: Option<usize>,
    /// Sequences at a time.
    #[arg(long, default_value_t = 8, value_parser = super::count)]
    batch_size: usize,
    /// Take each line of a text file as a document.
    #[arg(long)]
    lines: bool,
    /// The field of a JSON line that holds the text.
    #[arg(long, default_value = "text")]
    text_field: String,
}

/// A text in tokens.
pub struct Tokens {
    dataset: Arc<TokenDataset>,
    split: Split,
    /// Bytes of UTF-8.
    pub bytes: u64,
    rows: usize,
}

impl Text {
    /// The tokenizer of a model folder and the length of sequences, of which its model has enough positions.
    pub fn fit(&self, folder: &Path, config: &ConfigFile) -> Result<(Tokenizer, usize)> {
        let sizes = decoder_config(config)?;
        let tokenizer = Tokenizer::load(folder)?;
        tokenizer.check_fits(sizes.vocabulary)?;
        let seq_len = self.seq_len.unwrap_or(sizes.max_positions.min(1024));
        if seq_len > sizes.max_positions {
            return Err(Error::Config(format!(
                "--seq-len is {seq_len}, and config.json gives the model {} positions (`max_position_embeddings`)",
                sizes.max_positions
            )));
        }
        if self.batch_size.saturating_mul(seq_len) > MAX_TOKENS {
            return Err(Error::Config(format!(
                "--batch-size times --seq-len is {}; at most {MAX_TOKENS} tokens are evaluated at a time",
                self.batch_size.saturating_mul(seq_len)
            )));
        }
        Ok((tokenizer, seq_len))
    }

    /// Tokenizes the files.
    pub fn tokenize(&self, tokenizer: &Tokenizer) -> Result<Tokens> {
        let text_documents = if self.lines { Documents::Line } else { Documents::File };
        let text_field = self.text_field.clone();
        let options = SourceOptions { text_documents, text_field, ..SourceOptions::default() };
        let cache = tempfile::tempdir().map_err(Error::io(std::env::temp_dir()))?;
        let dataset = Arc::new(prepare(&self.data, &options, tokenizer, cache.path())?);
        let split = Split::all_validation(dataset.len());
        let bytes = loader::validation_bytes(&dataset, &split);
        Ok(Tokens { dataset, split, bytes, rows: self.batch_size })
    }
}

impl Tokens {
    /// The token before the first one.
    pub fn preceding_id(&self) -> u32 {
        self.dataset.meta().eos_id
    }

    /// All batches.
    pub fn batches(&self, windows: Windows) -> EvalLoader {
        EvalLoader::new(self.dataset.clone(), self.split, windows, self.rows)
    }

    /// Sequences of a batch.
    pub fn rows(&self) -> usize {
        self.rows
    }
}
