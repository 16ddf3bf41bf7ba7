//! `ottava eval`.

use super::inference::{Inference, with_model};
use crate::output::{Meter, print_json, stop_on_signals};
use clap::Args;
use ottava_lm::data::{Documents, EvalLoader, SourceOptions, Split, Tokenizer, Windows, loader, prepare};
use ottava_lm::evaluate::{Evaluation, evaluate};
use ottava_lm::mode::StepPrecision;
use ottava_lm::models::{ConfigFile, decoder_config};
use ottava_lm::param::Resident;
use ottava_lm::{Error, Result};
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;

/// The most tokens of a batch.
const MAX_TOKENS: usize = 1 << 24;

/// Loss, perplexity and bits per byte of a model on a text.
#[derive(Args)]
#[command(after_help = "Examples:
  ottava eval model/ --data held-out.txt
  ottava eval runs/quickstart --data held-out.txt
  ottava eval model/ --data test.txt --seq-len 1024 --stride 512
  ottava eval model/ --data test.jsonl --seq-len 512 --recipe fp32 --device cpu --json
  ottava eval model/ --data test.txt --recipe fp8-row --set skip_slow_linears=false")]
pub struct Eval {
    /// A Hugging Face model folder, as a checkpoint is one; or the folder of a run, for its newest.
    model: PathBuf,
    /// Text (.txt, .md) or JSON lines (.jsonl), also gzipped.
    #[arg(long, required = true, num_args = 1..)]
    data: Vec<PathBuf>,
    /// Tokens per sequence; by default the model's positions, at most 1024.
    #[arg(long, value_parser = super::count)]
    seq_len: Option<usize>,
    /// Tokens from the start of a sequence to that of the next: below --seq-len they overlap, and each counts its last STRIDE tokens, the
    /// first one all. By default --seq-len: blocks.
    #[arg(long, value_parser = super::count)]
    stride: Option<usize>,
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
    /// Print one JSON object with `loss`, `perplexity`, `bits_per_byte`, `tokens`, and the convention: `seq_len`, `stride` and
    /// `preceding_id`.
    #[arg(long)]
    json: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    evaluation: Evaluation,
    seq_len: usize,
    stride: usize,
    /// The token before the first one.
    preceding_id: u32,
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
        let stride = self.stride.unwrap_or(seq_len);
        if stride > seq_len {
            return Err(Error::Config(format!(
                "--stride is {stride}, and --seq-len {seq_len}: a larger stride would leave tokens out"
            )));
        }
        let documents = if self.lines { Documents::Line } else { Documents::File };
        let options =
            SourceOptions { text_documents: documents, text_field: self.text_field, ..SourceOptions::default() };
        let cache = tempfile::tempdir().map_err(Error::io(std::env::temp_dir()))?;
        let dataset = Arc::new(prepare(&self.data, &options, &tokenizer, cache.path())?);
        let split = Split::all_validation(dataset.len());
        let bytes = loader::validation_bytes(&dataset, &split);
        let preceding_id = dataset.meta().eos_id;
        let batches = EvalLoader::new(dataset, split, Windows { seq_len, stride }, self.batch_size);
        let mut meter = Meter::new("evaluated", batches.tokens());
        let mut progress = |tokens| meter.at(tokens);
        let evaluation = evaluate(&mut model, batches, bytes, StepPrecision::Recipe, &mut Resident, &mut progress)?;
        meter.finish(evaluation.tokens);
        if self.json {
            print_json(&Report { evaluation, seq_len, stride, preceding_id });
            return Ok(());
        }
        let Evaluation { loss, perplexity, bits_per_byte, tokens } = evaluation;
        out!("loss {loss:.5}  perplexity {perplexity:.4}  bits per byte {bits_per_byte:.5}  tokens {tokens}");
        match stride == seq_len {
            true => out!("in blocks of {seq_len} tokens that do not overlap; token {preceding_id} precedes the text"),
            false => out!(
                "in windows of {seq_len} tokens, of which the last {stride} are counted; token {preceding_id} precedes the text"
            ),
        }
        out!("{}", tokenizer.describe_edges());
        Ok(())
    }
}
