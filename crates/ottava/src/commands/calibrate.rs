//! `ottava calibrate`.

use super::newest::with_model;
use super::text::Text;
use crate::output::{Meter, print_json, stop_on_signals};
use clap::{Args, ValueEnum};
use ottava_checkpoint::{WeightFiles, verify_model, with_experts_of};
use ottava_common::fs::{RealFs, replace_file};
use ottava_common::{Error, Result};
use ottava_data::Tokenizer;
use ottava_models::{ConfigFile, Decoder, decoder_config, language_model_config};
use ottava_recipe::param::Purpose;
use ottava_recipe::{Precision, RecipeName};
use ottava_settings::{DeviceChoice, RunConfig};
use ottava_train::calibrate::{Calibration, Range};
use ottava_train::plan::expect_model_fits;
use ottava_train::trainer::build;
use serde_json::json;
use std::path::PathBuf;

/// Measure the inputs of a model's linears in BF16 on a text, to compute static scales for FP8.
#[derive(Args)]
#[command(after_help = "Example:
  ottava calibrate model/ scales.json --data text.txt
  ottava eval model/ --data held-out.txt --compare --activation-scales scales.json
  ottava export model/ exported --format modelopt --activation-scales scales.json")]
pub struct Calibrate {
    /// A Hugging Face model folder (such as a checkpoint), or the folder of a run (its newest checkpoint is used).
    model: PathBuf,
    /// The file to write: JSON with `amax` and `input_scale` of each linear.
    output: PathBuf,
    #[command(flatten)]
    text: Text,
    /// How to choose the input value that maps to the largest E4M3 code.
    #[arg(long, default_value = "max")]
    method: Method,
    /// The number of sequences to measure, from the start of the text.
    #[arg(long, default_value_t = 512, value_parser = super::count)]
    samples: usize,
    /// Where to run: auto, cuda or cpu.
    #[arg(long, default_value = "auto", value_parser = crate::device::parse)]
    device: DeviceChoice,
    /// Print one JSON object with `linears` and `tokens`.
    #[arg(long)]
    json: bool,
}

/// How to choose the largest value that a scale represents.
#[derive(Clone, Copy, ValueEnum)]
enum Method {
    /// The amax: no value saturates.
    Max,
    /// The 99.99th percentile; larger values saturate.
    Percentile,
    /// The value with the least squared error of the cast.
    Mse,
}

impl Calibrate {
    pub fn run(self) -> Result<()> {
        stop_on_signals("stopping")?;
        let range = match self.method {
            Method::Max => Range::Max,
            Method::Percentile => Range::Percentile,
            Method::Mse => Range::Mse,
        };
        if self.output.is_dir() {
            return Err(Error::Config(format!("{}: this is a folder; name a file", self.output.display())));
        }
        let (mut model, weights, tokenizer, seq_len) = with_model(&self.model, |folder| {
            verify_model(folder)?;
            let config = ConfigFile::read(folder)?;
            let (tokenizer, seq_len) = self.text.fit(Tokenizer::load(folder)?, &decoder_config(&config)?)?;
            let (run, _) = RunConfig::saved_in(folder)?.unwrap_or_default();
            // Linears that the run kept in BF16 stay in BF16.
            let mut precision = Precision { recipe: RecipeName::Fp8Current, ..run.precision };
            precision.exceptions.skip_slow_linears = false;
            let device = crate::device::open(self.device)?;
            let sizes = with_experts_of(language_model_config(&config)?, folder);
            if sizes.experts().is_some_and(|experts| experts.stacks.is_some()) {
                return Err(config.error("this model cannot be calibrated: `ottava export` writes stacked experts only in BF16, which needs no input scales"));
            }
            let recipe = precision.recipe();
            expect_model_fits(folder, &sizes, &recipe, &device, seq_len, 1, &[])?;
            let model = build(Some(folder), None, 0, &device, &sizes, |weights| {
                Decoder::new(&sizes, &recipe, &device, Purpose::Infer, seq_len, weights)
            })?;
            Ok((model, WeightFiles::open(folder)?, tokenizer, seq_len))
        })?;
        let tokens = self.text.tokenize(&tokenizer)?;
        let batches = tokens.batches(seq_len, None)?;
        let total = batches.tokens.min((self.samples * seq_len) as u64);
        let mut meter = Meter::new("measured", total);
        let measured = batches.batches.take(self.samples.div_ceil(tokens.rows()));
        let calibration = Calibration::measure(&mut model, measured, range, &mut |tokens| meter.at(tokens))?;
        let calibration = calibration.of_model(&weights)?;
        meter.finish(calibration.tokens);
        replace_file(&RealFs, &self.output, calibration.render().as_bytes())?;
        let (linears, tokens) = (calibration.inputs.len(), calibration.tokens);
        match self.json {
            true => print_json(&json!({"linears": linears, "tokens": tokens})),
            false => out!("{}: scales of the inputs of {linears} linears, from {tokens} tokens", self.output.display()),
        }
        Ok(())
    }
}
