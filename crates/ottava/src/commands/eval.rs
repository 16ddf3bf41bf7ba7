//! `ottava eval`.

use super::inference::{Inference, with_model};
use crate::output::{print_json, stop_on_signals};
use clap::Args;
use ottava_lm::data::{Documents, EvalLoader, Shard, SourceOptions, Split, Tokenizer, loader, prepare};
use ottava_lm::evaluate::evaluate;
use ottava_lm::mode::StepPrecision;
use ottava_lm::models::{ConfigFile, decoder_config};
use ottava_lm::param::Resident;
use ottava_lm::{Error, Result};
use std::path::PathBuf;
use std::sync::Arc;

/// The most tokens of a batch.
const MAX_TOKENS: usize = 1 << 24;

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
    #[command(flatten)]
    how: Inference,
    /// Print one JSON object with `loss`, `perplexity`, `bits_per_byte` and `tokens`.
    #[arg(long)]
    json: bool,
}

impl Eval {
    pub fn run(self) -> Result<()> {
        stop_on_signals("stopping")?;
        let (mut model, tokenizer, seq_len) = with_model(&self.model, |folder| {
            let config = ConfigFile::read(folder)?;
            let sizes = decoder_config(&config)?;
            let tokenizer = Tokenizer::load(folder)?;
            tokenizer.check_fits(sizes.vocabulary)?;
            let seq_len = self.seq_len.unwrap_or(sizes.max_positions.min(1024));
            if seq_len > sizes.max_positions {
                return Err(Error::Config(format!(
                    "--seq-len is {seq_len}, and config.json gives the model {} positions (`max_position_embeddings`)",
                    sizes.max_positions
                )));
            }
            Ok((self.how.load(folder, &config, seq_len)?, tokenizer, seq_len))
        })?;
        if self.batch_size.saturating_mul(seq_len) > MAX_TOKENS {
            return Err(Error::Config(format!(
                "--batch-size times --seq-len is {}; at most {MAX_TOKENS} tokens are evaluated at a time",
                self.batch_size.saturating_mul(seq_len)
            )));
        }
        let documents = if self.lines { Documents::Line } else { Documents::File };
        let options =
            SourceOptions { text_documents: documents, text_field: self.text_field, ..SourceOptions::default() };
        let cache = tempfile::tempdir().map_err(Error::io(std::env::temp_dir()))?;
        let dataset = Arc::new(prepare(&self.data, &options, &tokenizer, cache.path())?);
        let split = Split::all_validation(dataset.len());
        let bytes = loader::validation_bytes(&dataset, &split);
        let batches = EvalLoader::new(dataset, split, seq_len, self.batch_size, Shard::WHOLE);
        let result = evaluate(&mut model, batches, bytes, StepPrecision::Recipe, &mut Resident)?;
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
