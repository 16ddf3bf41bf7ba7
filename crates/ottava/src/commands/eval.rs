//! `ottava eval`.

use super::eval_output::{check_output, write_lines};
use super::inference::{Inference, InferenceRanks, StaticScales};
use super::newest::with_model;
use super::text::{Batches, Text, Tokens};
use crate::output::{Meter, print_json, stop_on_signals};
use crate::ranks::RankArgs;
use clap::Args;
use ottava_checkpoint::verify_model;
use ottava_common::{Error, Result};
use ottava_convert::export::Source;
use ottava_data::examples::LABEL;
use ottava_data::{Example, ExampleRows, Tokenizer};
use ottava_models::{
    ConfigFile, Decoder, Labels, classifier, decoder_config, language_model_config, pad_token, reward_model,
};
use ottava_parallel::Partition;
use ottava_recipe::RecipeName;
use ottava_recipe::mode::StepPrecision;
use ottava_settings::ProblemType;
use ottava_train::calibrate::Calibration;
use ottava_train::evaluate::{Likelihood, TextLoss, evaluate};
use ottava_train::objective::classification::{LabelMetrics, LabelReader, LabeledTexts, Scored, predicted};
use serde::Serialize;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Compute loss, perplexity and bits per byte of a model on a text, its scores in tasks, loss and accuracy of a reward model on pairs of preferences, or the
/// metrics of a classifier on texts with labels.
#[derive(Args)]
#[command(mut_arg("data", |data| data.required(false).required_unless_present("tasks")))]
#[command(after_help = "Examples:
  ottava eval model/ --data held-out.txt
  ottava eval runs/quickstart --data held-out.txt
  ottava eval model/ --data test.txt --max-length 1024 --stride 512
  ottava eval model/ --data test.jsonl --max-length 512 --recipe fp32 --device cpu --json
  ottava eval model/ --data test.txt --recipe fp8-row --set skip_slow_linears=false
  ottava eval model/ --data test.txt --gpus 2
  ottava eval reward-model/ --data pairs.jsonl
  ottava eval classifier/ --data labeled.jsonl
  ottava eval model/ --task tasks/words.toml --task tasks/sums.toml --output samples.jsonl
  ottava eval model/ --data test.txt --compare --activation-scales scales.json")]
pub struct Eval {
    /// A Hugging Face model folder (such as a checkpoint), or the folder of a run (its newest checkpoint is used).
    pub(super) model: PathBuf,
    #[command(flatten)]
    pub(super) text: Text,
    /// A file with a task, such as questions with choices (docs/tasks.md); the option may be given several times.
    #[arg(long = "task", value_name = "FILE", conflicts_with_all = ["data", "stride", "compare", "lines", "text_field"])]
    pub(super) tasks: Vec<PathBuf>,
    /// Where to write a JSON object for each item of the tasks (the item, log-likelihoods or generated text, and scores), or for each text of a classifier
    /// (its label, the predicted label, and the score of each label).
    #[arg(long, value_name = "FILE")]
    pub(super) output: Option<PathBuf>,
    /// The distance in tokens between the starts of sequences, by default --max-length. If STRIDE is smaller than --max-length, sequences overlap,
    /// and each sequence scores its last STRIDE tokens (the first sequence scores all its tokens). Chats and completions are evaluated one document
    /// at a time, so --stride is an error.
    #[arg(long, value_parser = super::count)]
    stride: Option<usize>,
    #[command(flatten)]
    pub(super) how: Inference,
    #[command(flatten)]
    pub(super) ranks: RankArgs,
    /// Evaluate in BF16 and in FP8 with dynamic scales (per token and output). If static scales (per input and weight) are known, also evaluate in
    /// FP8 with static scales. Static scales come from a run with fp8-delayed, from the folder of the model, or from --activation-scales.
    #[arg(long, conflicts_with_all = ["recipe", "adapter", "gpus", "ranks"])]
    compare: bool,
    /// The input scales written by `ottava calibrate`.
    #[arg(long, value_name = "FILE", requires = "compare")]
    activation_scales: Option<PathBuf>,
    /// Print one JSON object with `loss`, `perplexity`, `bits_per_byte`, `tokens` and `max_length`; for texts also `stride` and
    /// `preceding_id`; for chats and completions also `documents`, `truncated` and `left_out`. For a reward model: `loss`, `accuracy`,
    /// `margin`, `mean_reward`, `min_reward`, `max_reward`, `pairs`, `left_out` and `max_length`. For a classifier: `loss`, `accuracy` and macro `f1`,
    /// or `mse` and `pearson`, `texts`, `truncated` and `max_length`. For tasks: `results`, with `items`, metrics and their
    /// standard errors by the name of the task, and `max_length`.
    #[arg(long)]
    pub(super) json: bool,
}

/// Returns the label, the list of labels, or the numbers that the scores of a text predict.
fn prediction(reader: &LabelReader, scores: &[f64]) -> Value {
    let places = predicted(reader.problem, scores);
    let mut names = reader.names.iter().zip(places).filter(|(_, is_predicted)| *is_predicted).map(|(name, _)| name);
    match reader.problem {
        ProblemType::SingleLabelClassification => json!(names.next()),
        ProblemType::MultiLabelClassification => json!(names.collect::<Vec<_>>()),
        ProblemType::Regression => json!(scores),
    }
}

/// The output of `--json`.
#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    evaluation: TextLoss,
    #[serde(flatten)]
    cut: Value,
}

/// The evaluation in one precision.
#[derive(Serialize)]
struct Compared {
    precision: &'static str,
    #[serde(flatten)]
    evaluation: TextLoss,
}

impl Eval {
    pub fn run(self) -> Result<()> {
        stop_on_signals("stopping")?;
        if !self.tasks.is_empty() {
            return self.run_tasks();
        }
        if self.compare {
            return self.run_comparison();
        }
        self.output.as_deref().map_or(Ok(()), check_output)?;
        let ranks = self.how.ranks(&self.ranks)?;
        let loaded = with_model(&self.model, |folder| {
            let config = ConfigFile::read(folder)?;
            let sizes = self.how.sizes(&config)?;
            let (tokenizer, seq_len) = self.text.fit(self.how.texts(folder, &sizes)?.tokenizer, &sizes)?;
            Ok((self.how.load_any(folder, &config, seq_len, &ranks)?, config, tokenizer, seq_len))
        });
        let (mut model, config, tokenizer, seq_len) = ranks.together(loaded)?;
        if let Some(count) = model.config().head.labels
            && let Some(tokens) = self.text.tokenize_labeled(&tokenizer)?
        {
            let labels = self.how.labels(&config, count)?;
            let padding = pad_token(&classifier(&config, tokenizer.padding_id(), &labels)?)?;
            let rows = ExampleRows::new(&tokenizer, seq_len, padding).for_encoder(model.config().is_encoder());
            return self.run_labels(&mut model, &tokens, &rows, labels, ranks);
        }
        if self.output.is_some() {
            return Err(Error::Config(
                "--output is for tasks and for texts with labels, which a classifier scores; remove it, or name a task with --task".into(),
            ));
        }
        if model.config().is_encoder() && model.config().head.labels.is_none() {
            // Says that an encoder predicts no tokens.
            language_model_config(&config)?;
        }
        let tokens = self.text.tokenize(&tokenizer)?;
        if model.config().head.labels.is_some() {
            ranks.expect_alone("the evaluation of a reward model")?;
            let padding = pad_token(&reward_model(&config, tokenizer.padding_id())?)?;
            return self.run_rewards(&mut model, &tokens, seq_len, padding);
        }
        tokens.expect_text()?;
        let batches = tokens.batches(seq_len, self.stride)?;
        let cut = (batches.cut.describe(), batches.cut.fields());
        let partition = ranks.partition(&mut model)?;
        let evaluation = run(&mut model, &tokens, batches, &partition)?;
        let leads = ranks.leads();
        drop(partition);
        ranks.finish()?;
        if !leads {
            return Ok(());
        }
        if self.json {
            print_json(&Report { evaluation, cut: cut.1 });
            return Ok(());
        }
        out!("{}", words(&evaluation));
        out!("{}", cut.0);
        out!("{}", tokenizer.describe_edges());
        Ok(())
    }

    /// Evaluates a classifier.
    fn run_labels(
        &self,
        model: &mut Decoder,
        tokens: &Tokens,
        rows: &ExampleRows,
        Labels { names, problem_type }: Labels,
        ranks: InferenceRanks,
    ) -> Result<()> {
        if self.stride.is_some() {
            return Err(Error::Config("--stride is for texts, and the model is a classifier; remove it".into()));
        }
        let named = problem_type.as_deref().and_then(ProblemType::named);
        let reader = LabelReader { problem: named.unwrap_or(ProblemType::of_labels(names.len())), names };
        let examples = tokens.examples()?;
        let texts = LabeledTexts { examples: &examples, reader: &reader, rows, per_batch: tokens.rows() };
        let partition = ranks.partition(model)?;
        let Scored { scores, labels } = texts.score(model, &partition, StepPrecision::Recipe)?;
        let LabelMetrics { loss, metrics } = LabelMetrics::of(reader.problem, &scores, &labels)?;
        let leads = ranks.leads();
        drop(partition);
        ranks.finish()?;
        if !leads {
            return Ok(());
        }
        if let Some(path) = &self.output {
            let row = |(example, scores): (&Example, &Vec<f64>)| {
                let prediction = prediction(&reader, scores);
                json!({"label": example.columns.get(LABEL), "prediction": prediction, "scores": scores})
            };
            write_lines(path, examples.iter().zip(&scores).map(row))?;
        }
        let (count, seq_len) = (examples.len(), rows.seq_len);
        let truncated = examples.iter().filter(|example| example.texts[0].len() > seq_len).count();
        if self.json {
            let mut report = json!({"loss": loss, "texts": count, "truncated": truncated, "max_length": seq_len});
            for (name, value) in metrics.named {
                report[&*name] = json!(value);
            }
            print_json(&report);
            return Ok(());
        }
        let metrics: Vec<_> = metrics.named.iter().map(|(name, value)| format!("{name} {value:.5}")).collect();
        out!("loss {loss:.5}  {}", metrics.join("  "));
        let cut = match truncated {
            0 => String::new(),
            texts => format!("; {texts} have more than --max-length = {seq_len} tokens and are cut"),
        };
        out!("over {count} texts ({}){cut}", reader.problem.as_str());
        Ok(())
    }

    /// Evaluates a reward model.
    fn run_rewards(&self, model: &mut Decoder, tokens: &Tokens, seq_len: usize, padding: Option<i64>) -> Result<()> {
        if self.stride.is_some() {
            return Err(Error::Config("--stride is for texts, and the model is a reward model; remove it".into()));
        }
        let (sums, left_out) = tokens.rewards(model, seq_len, padding)?;
        let (metrics, pairs) = (sums.metrics().named, sums.losses[1] as u64);
        if self.json {
            let mut report = json!({"loss": sums.loss(), "pairs": pairs, "left_out": left_out, "max_length": seq_len});
            for (name, value) in metrics {
                report[&*name] = json!(value);
            }
            print_json(&report);
            return Ok(());
        }
        let metrics: Vec<_> = metrics.iter().map(|(name, value)| format!("{name} {value:.5}")).collect();
        out!("loss {:.5}  {}", sums.loss(), metrics.join("  "));
        let left = match left_out {
            0 => String::new(),
            pairs => {
                format!("; {pairs} more have a sequence of more than --max-length = {seq_len} tokens and are left out")
            }
        };
        out!("over {pairs} pairs{left}");
        Ok(())
    }

    fn run_comparison(&self) -> Result<()> {
        let calibrated = self.activation_scales.as_deref().map(Calibration::read).transpose()?;
        let (results, cut) = with_model(&self.model, |folder| {
            verify_model(folder)?;
            let source = Source::open(folder)?;
            let (tokenizer, seq_len) = self.text.fit(Tokenizer::load(folder)?, &decoder_config(&source.config)?)?;
            let tokens = self.text.tokenize(&tokenizer)?;
            tokens.expect_text()?;
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
                    evaluation: run(&mut model, &tokens, tokens.batches(seq_len, self.stride)?, &Partition::solo())?,
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

/// Evaluates a model, and shows the speed.
fn run(model: &mut Decoder, tokens: &Tokens, batches: Batches, partition: &Partition) -> Result<TextLoss> {
    let mut meter = Meter::new("evaluated", batches.tokens);
    let mut progress = |tokens| meter.at(tokens);
    let evaluation = evaluate(model, batches.batches, tokens.bytes, StepPrecision::Recipe, partition, &mut progress)?;
    meter.finish(evaluation.tokens);
    Ok(evaluation)
}

fn words(TextLoss { loss, likelihood, tokens }: &TextLoss) -> String {
    let likelihood = likelihood.as_ref().map_or(String::new(), |Likelihood { perplexity, bits_per_byte }| {
        format!("  perplexity {perplexity:.4}  bits per byte {bits_per_byte:.5}")
    });
    format!("loss {loss:.5}{likelihood}  tokens {tokens}")
}
