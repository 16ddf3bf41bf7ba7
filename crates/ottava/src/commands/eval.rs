//! `ottava eval`.

use super::inference::{Inference, StaticScales, with_model};
use super::text::{Batches, Text, Tokens};
use crate::output::{Meter, print_json, stop_on_signals};
use clap::Args;
use ottava_lm::Result;
use ottava_lm::calibrate::Calibration;
use ottava_lm::checkpoint::verify_model;
use ottava_lm::evaluate::{Evaluation, evaluate};
use ottava_lm::export::Source;
use ottava_lm::mode::StepPrecision;
use ottava_lm::models::{ConfigFile, Decoder};
use ottava_lm::parallel::Partition;
use ottava_lm::recipe::RecipeName;
use serde::Serialize;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Loss, perplexity and bits per byte of a model on a text.
#[derive(Args)]
#[command(after_help = "Examples:
  ottava eval model/ --data held-out.txt
  ottava eval runs/quickstart --data held-out.txt
  ottava eval model/ --data test.txt --seq-len 1024 --stride 512
  ottava eval model/ --data test.jsonl --seq-len 512 --recipe fp32 --device cpu --json
  ottava eval model/ --data test.txt --recipe fp8-row --set skip_slow_linears=false
  ottava eval model/ --data test.txt --compare --activation-scales scales.json")]
pub struct Eval {
    /// A Hugging Face model folder (such as a checkpoint), or the folder of a run, whose newest checkpoint is used.
    model: PathBuf,
    #[command(flatten)]
    text: Text,
    /// Distance in tokens between the starts of sequences, by default --seq-len. Below it, sequences overlap, and each scores its last STRIDE
    /// tokens (the first one all). An error for chats and completions, whose documents are evaluated one by one.
    #[arg(long, value_parser = super::count)]
    stride: Option<usize>,
    #[command(flatten)]
    how: Inference,
    /// Evaluate in BF16, in FP8 with dynamic scales (per token and output), and in FP8 with static scales (per input and weight), if the model
    /// has static scales: from fp8-delayed, from its folder, or from --activation-scales.
    #[arg(long, conflicts_with_all = ["recipe", "adapter"])]
    compare: bool,
    /// The input scales written by `ottava calibrate`.
    #[arg(long, value_name = "FILE", requires = "compare")]
    activation_scales: Option<PathBuf>,
    /// Print one JSON object with `loss`, `perplexity`, `bits_per_byte`, `tokens` and `seq_len`; for texts also `stride` and
    /// `preceding_id`; for chats and completions also `documents`, `truncated` and `left_out`.
    #[arg(long)]
    json: bool,
}

/// The output of `--json`.
#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    evaluation: Evaluation,
    #[serde(flatten)]
    cut: Value,
}

/// The loss in one precision.
#[derive(Serialize)]
struct Compared {
    precision: &'static str,
    #[serde(flatten)]
    evaluation: Evaluation,
}

impl Eval {
    pub fn run(self) -> Result<()> {
        stop_on_signals("stopping")?;
        if self.compare {
            return self.run_comparison();
        }
        let (mut model, tokenizer, seq_len) = with_model(&self.model, |folder| {
            let config = ConfigFile::read(folder)?;
            let (tokenizer, seq_len) = self.text.fit(folder, &config)?;
            Ok((self.how.load(folder, &config, seq_len)?, tokenizer, seq_len))
        })?;
        let tokens = self.text.tokenize(&tokenizer)?;
        let batches = tokens.batches(seq_len, self.stride)?;
        let cut = (batches.cut.describe(), batches.cut.fields());
        let evaluation = run(&mut model, &tokens, batches)?;
        if self.json {
            print_json(&Report { evaluation, cut: cut.1 });
            return Ok(());
        }
        out!("{}", words(&evaluation));
        out!("{}", cut.0);
        out!("{}", tokenizer.describe_edges());
        Ok(())
    }

    fn run_comparison(&self) -> Result<()> {
        let calibrated = self.activation_scales.as_deref().map(Calibration::read).transpose()?;
        let (results, cut) = with_model(&self.model, |folder| {
            verify_model(folder)?;
            let source = Source::open(folder)?;
            let (tokenizer, seq_len) = self.text.fit(folder, &source.config)?;
            let tokens = self.text.tokenize(&tokenizer)?;
            let cut = tokens.batches(seq_len, self.stride)?.cut;
            let inputs = match &calibrated {
                Some(calibrated) => {
                    calibrated.expect_model(&source.weights)?;
                    calibrated.input_scales()
                }
                None => source.input_scales()?,
            };
            let scales = (!inputs.is_empty()).then(|| source.static_scales(&inputs)).transpose()?;
            let mut precisions = vec![("bf16", RecipeName::Bf16, None), ("fp8 dynamic", RecipeName::Fp8Row, None)];
            match scales {
                Some(scales) => {
                    let given = StaticScales { scales, left: source.left()? };
                    precisions.push(("fp8 static", RecipeName::Fp8Delayed, Some(given)));
                }
                None => note!(
                    "no static scales: measure them with `ottava calibrate`, and name the file with --activation-scales"
                ),
            }
            let mut results = Vec::new();
            for (precision, recipe, scales) in precisions {
                let mut model = self.how.load_as(folder, &source.config, seq_len, recipe, scales.as_ref())?;
                results.push(Compared {
                    precision,
                    evaluation: run(&mut model, &tokens, tokens.batches(seq_len, self.stride)?)?,
                });
            }
            Ok((results, cut))
        })?;
        if self.json {
            let mut report = cut.fields();
            report["compare"] = json!(results);
            print_json(&report);
            return Ok(());
        }
        let base = results[0].evaluation.loss;
        for Compared { precision, evaluation } in &results {
            let more = (evaluation.loss / base - 1.0) * 100.0;
            out!("{precision:12} {}  loss {more:+.3} %", words(evaluation));
        }
        out!("{}", cut.describe());
        Ok(())
    }
}

/// Evaluates a model, and shows its speed.
fn run(model: &mut Decoder, tokens: &Tokens, batches: Batches) -> Result<Evaluation> {
    let mut meter = Meter::new("evaluated", batches.tokens);
    let mut progress = |tokens| meter.at(tokens);
    let evaluation =
        evaluate(model, batches.batches, tokens.bytes, StepPrecision::Recipe, &Partition::solo(), &mut progress)?;
    meter.finish(evaluation.tokens);
    Ok(evaluation)
}

fn words(evaluation: &Evaluation) -> String {
    let Evaluation { loss, perplexity, bits_per_byte, tokens, .. } = evaluation;
    format!("loss {loss:.5}  perplexity {perplexity:.4}  bits per byte {bits_per_byte:.5}  tokens {tokens}")
}
