//! `ottava eval`.

use super::inference::{Inference, model_folder};
use crate::output::print_json;
use clap::Args;
use ottava_lm::data::{Documents, EvalLoader, Shard, SourceOptions, Split, Tokenizer, loader, prepare};
use ottava_lm::evaluate::evaluate;
use ottava_lm::models::{ConfigFile, decoder_config};
use ottava_lm::{Error, Result};
use std::path::PathBuf;
use std::sync::Arc;

/// Loss, perplexity and bits per byte of a model on a text.
#[derive(Args)]
#[command(after_help = "Examples:
  ottava eval model/ --data held-out.txt
  ottava eval runs/quickstart --data held-out.txt
  ottava eval model/ --data test.jsonl --seq-len 512 --recipe fp32 --device cpu --json")]
pub struct Eval {
    /// A Hugging Face model folder, as a checkpoint is one; or the folder of a run, for its newest.
    model: PathBuf,
    /// Text (.txt, .md) or JSON lines (.jsonl), also gzipped.
    #[arg(long, required = true, num_args = 1..)]
    data: Vec<PathBuf>,
    /// Tokens per sequence; by default the model's positions, at most 1024.
    #[arg(long)]
    seq_len: Option<usize>,
    /// Sequences at a time.
    #[arg(long, default_value_t = 8)]
    batch_size: usize,
    /// Take each line of a text file as a document.
    #[arg(long)]
    lines: bool,
    /// The field of a JSON line that holds the text.
    #[arg(long, default_value = "text")]
    text_field: String,
    #[command(flatten)]
    how: Inference,
    /// Print one JSON object with `loss`, `perplexity`, `bits_per_byte` and `tokens`.
    #[arg(long)]
    json: bool,
}

impl Eval {
    pub fn run(self) -> Result<()> {
        let model = model_folder(self.model)?;
        let config = ConfigFile::read(&model)?;
        let sizes = decoder_config(&config)?;
        let tokenizer = Tokenizer::load(&model)?;
        tokenizer.check_fits(sizes.vocabulary)?;
        let seq_len = self.seq_len.unwrap_or(sizes.max_positions.min(1024));
        if seq_len == 0 || self.batch_size == 0 {
            return Err(Error::Config("--seq-len and --batch-size must be at least 1".into()));
        }
        let documents = if self.lines { Documents::Line } else { Documents::File };
        let options = SourceOptions { text_documents: documents, text_field: self.text_field };
        let cache = tempfile::tempdir().map_err(Error::io(std::env::temp_dir()))?;
        let dataset = Arc::new(prepare(&self.data, &options, &tokenizer, cache.path())?);
        let split = Split::all_validation(dataset.len());
        let mut model = self.how.load(&model, &config, seq_len)?;
        let bytes = loader::validation_bytes(&dataset, &split);
        let batches = EvalLoader::new(dataset, split, seq_len, self.batch_size, Shard::WHOLE);
        let result = evaluate(&mut model, batches, bytes)?;
        match self.json {
            true => print_json(&result),
            false => out!(
                "loss {:.5}  perplexity {:.4}  bits per byte {:.5}  tokens {}",
                result.loss,
                result.perplexity,
                result.bits_per_byte,
                result.tokens
            ),
        }
        Ok(())
    }
}
