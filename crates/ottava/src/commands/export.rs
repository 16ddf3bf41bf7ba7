//! `ottava export`.

use super::newest::with_model;
use crate::output::{print_json, stop_on_signals};
use clap::{Args, ValueEnum};
use ottava_checkpoint::verify_model;
use ottava_common::{Error, Result};
use ottava_convert::export::gguf::{FILE, GgufReport, GgufType, export_gguf};
use ottava_convert::export::{Convention, Fp8Format, LinearReport, Report, Scheme, Source, export};
use ottava_train::calibrate::Calibration;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Write a model folder with FP8 or FP4 weights for inference engines, or a GGUF file for llama.cpp. If the format has the same kind of scales as the FP8
/// run, the codes equal the codes of training.
#[derive(Args)]
#[command(after_help = "Examples:
  ottava export runs/quickstart exported
  ottava export model/ exported --format compressed-tensors
  ottava export runs/delayed exported --format modelopt
  ottava export model/ exported --format modelopt --activation-scales scales.json --set first_layers_bf16=1 --set last_layers_bf16=1
  ottava export fp8-model/ plain --format bf16
  ottava export model/ small --format nvfp4
  ottava export runs/quickstart exported --format gguf --dtype q8_0

fp8-block is read by vLLM, SGLang, TensorRT-LLM and transformers; compressed-tensors, nvfp4 and mxfp4 by vLLM and SGLang; modelopt by TensorRT-LLM and vLLM.")]
pub struct Export {
    /// A Hugging Face model folder (such as a checkpoint), or the folder of a run (its newest checkpoint is used).
    model: PathBuf,
    /// The new folder.
    output: PathBuf,
    /// The format of the linears of the blocks; all other weights are BF16. By default, a format whose scales are like the scales of the run that
    /// saved the model. For other models, fp8-block if inputs and outputs of all linears are multiples of 128, else compressed-tensors.
    #[arg(long)]
    format: Option<Format>,
    /// The type of matrices in a GGUF file (default bfloat16); vectors are in F32.
    #[arg(long, requires = "format")]
    dtype: Option<MatrixType>,
    /// The granularity of scales in compressed-tensors (default dynamic) and modelopt (default static).
    #[arg(long, requires = "format")]
    scheme: Option<SchemeName>,
    /// The input scales written by `ottava calibrate`, for --scheme static; by default, the input scales of the run or of the folder.
    #[arg(long, value_name = "FILE")]
    activation_scales: Option<PathBuf>,
    /// Keep linears in BF16: `first_layers_bf16=1`, `last_layers_bf16=1`, `high_precision_layers=["*.o_proj"]`, as in `[precision.exceptions]` of a run.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    settings: Vec<String>,
    /// Print one JSON object with the cast error of each linear, and the linears that stay in BF16 with the reason.
    #[arg(long)]
    json: bool,
}

/// Formats of weights.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Format {
    /// A folder without FP8.
    Bf16,
    /// DeepSeek's format: one scale per 128x128 weights, which is the scale of the run or a power of two. Engines compute the scales of inputs.
    Fp8Block,
    /// The format of llm-compressor and vLLM.
    CompressedTensors,
    /// The format of ModelOpt and TensorRT-LLM.
    Modelopt,
    /// Four bits in compressed-tensors: E4M3 scales per 16 inputs, and one scale per weight. Engines compute with 16-bit inputs.
    Nvfp4,
    /// Four bits in compressed-tensors: E8M0 scales per 32 inputs. Engines compute with 16-bit inputs.
    Mxfp4,
    /// One file for llama.cpp, model.gguf, with the tokenizer.
    Gguf,
}

/// Types of matrices in a GGUF file.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum MatrixType {
    Bfloat16,
    Float16,
    Float32,
    /// Blocks of 32 signed bytes with a scale in F16.
    #[value(name = "q8_0")]
    Q8_0,
}

/// The granularity of scales.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum SchemeName {
    /// One scale per output of a weight; engines compute one scale per token.
    Dynamic,
    /// One scale per weight and one scale per input. Input scales come from fp8-delayed or `ottava calibrate`.
    Static,
    /// One scale per 128x128 weights; engines compute one scale per 128 channels of a token.
    Block,
}

impl Export {
    pub fn run(self) -> Result<()> {
        stop_on_signals("stopping")?;
        if self.format == Some(Format::Gguf) {
            return self.gguf();
        }
        if self.dtype.is_some() {
            return Err(Error::Config(
                "--dtype is a choice of `--format gguf`; other formats are BF16, FP8 and FP4".into(),
            ));
        }
        let named = self.format.map(|format| self.fp8_format(format)).transpose()?;
        let calibrated = self.activation_scales.as_deref().map(Calibration::read).transpose()?;
        let stores_scales = |format: Option<Fp8Format>| format.is_some_and(|format| format.scheme == Scheme::Static);
        if calibrated.is_some() && named.is_some_and(|format| !stores_scales(format)) {
            return Err(Error::Config(
                "--activation-scales are of `--scheme static`; other schemes scale inputs by themselves".into(),
            ));
        }
        let report = with_model(&self.model, |folder| {
            verify_model(folder)?;
            let mut source = Source::open(folder)?;
            source.leave(&self.settings)?;
            let format = match named {
                Some(format) => format,
                None => {
                    let (format, reason) = Fp8Format::default_for(&source, calibrated.is_some())?;
                    note!("format: {}, since {reason}; --format chooses another", name_of(format));
                    Some(format)
                }
            };
            let input_scales = match (&calibrated, format) {
                (Some(calibrated), _) => {
                    calibrated.expect_model(&source.weights)?;
                    calibrated.input_scales()
                }
                (None, Some(Fp8Format { scheme: Scheme::Static, .. })) => source.input_scales()?,
                (None, _) => BTreeMap::new(),
            };
            export(&source, format, &input_scales, &self.output)
        })?;
        match self.json {
            true => print_json(&report),
            false => self.print(&report),
        }
        Ok(())
    }

    /// Returns the format of the linears; `None` for BF16.
    fn fp8_format(&self, format: Format) -> Result<Option<Fp8Format>> {
        let scheme = self.scheme.map(|scheme| match scheme {
            SchemeName::Dynamic => Scheme::Dynamic,
            SchemeName::Static => Scheme::Static,
            SchemeName::Block => Scheme::Block,
        });
        let of = |layout, default| Some(Fp8Format { layout, scheme: scheme.unwrap_or(default) });
        match format {
            Format::CompressedTensors => Ok(of(Convention::CompressedTensors, Scheme::Dynamic)),
            Format::Modelopt => Ok(of(Convention::ModelOpt, Scheme::Static)),
            _ if scheme.is_some() => Err(Error::Config(
                "--scheme is a choice of `--format compressed-tensors` and `--format modelopt`; the others have one"
                    .into(),
            )),
            Format::Fp8Block => Ok(Some(Fp8Format::FP8_BLOCK)),
            Format::Nvfp4 => Ok(of(Convention::CompressedTensors, Scheme::Nvfp4)),
            Format::Mxfp4 => Ok(of(Convention::CompressedTensors, Scheme::Mxfp4)),
            Format::Bf16 => Ok(None),
            Format::Gguf => unreachable!("a GGUF file has no linears in FP8"),
        }
    }

    fn gguf(&self) -> Result<()> {
        if self.scheme.is_some() || self.activation_scales.is_some() || !self.settings.is_empty() {
            return Err(Error::Config(
                "--scheme, --activation-scales and --set are for FP8 weights; `--format gguf` has none".into(),
            ));
        }
        let dtype = match self.dtype {
            None | Some(MatrixType::Bfloat16) => GgufType::Bfloat16,
            Some(MatrixType::Float16) => GgufType::Float16,
            Some(MatrixType::Float32) => GgufType::Float32,
            Some(MatrixType::Q8_0) => GgufType::Q8_0,
        };
        let report = with_model(&self.model, |folder| {
            verify_model(folder)?;
            export_gguf(&Source::open(folder)?, dtype, &self.output)
        })?;
        if self.json {
            print_json(&report);
            return Ok(());
        }
        let GgufReport { architecture, dtype, parameters, bytes, stored, left } = report;
        let stored: Vec<_> = stored.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
        out!(
            "{}: {parameters} parameters in {:.3} GB, architecture {architecture}; the tensors are {}",
            self.output.join(FILE).display(),
            bytes as f64 / 1e9,
            stored.join(", ")
        );
        if let Some(name) = left.first() {
            let more = if left.len() > 1 { format!(" and {} more", left.len() - 1) } else { String::new() };
            out!("in F16: {name}{more}: rows are no multiple of the 32 elements of a block of {}", dtype.name());
        }
        Ok(())
    }

    fn print(&self, report: &Report) {
        let Report { format, power_of_two_scales, parameters, bytes, linears, left, tensor_parallel } = report;
        out!("{}: {parameters} parameters in {:.3} GB", self.output.display(), *bytes as f64 / 1e9);
        let Some(ranks) = tensor_parallel else { return };
        // Linears differ mostly in the reason why they are cast again, so they are grouped by this reason.
        let mut kinds: BTreeMap<&str, Vec<&LinearReport>> = BTreeMap::new();
        for linear in linears {
            let origin = linear.recast.as_deref().unwrap_or("the codes of training");
            kinds.entry(origin).or_default().push(linear);
        }
        for (origin, linears) in kinds {
            let worst =
                linears.iter().max_by(|a, b| a.relative_error.total_cmp(&b.relative_error)).expect("one or more");
            let sum = |count: fn(&LinearReport) -> usize| linears.iter().map(|linear| count(linear)).sum::<usize>();
            let kind = format.map_or("BF16", |format| if format.fp4().is_some() { "FP4" } else { "FP8" });
            out!(
                "{} linears in {kind}, {origin}: relative error up to {:.2} % ({}), {} weights saturated, {} became zero",
                linears.len(),
                worst.relative_error * 100.0,
                worst.name,
                sum(|linear| linear.saturated),
                sum(|linear| linear.underflowed),
            );
        }
        let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for linear in left {
            reasons.entry(&linear.reason).or_default().push(&linear.name);
        }
        for (reason, names) in reasons {
            let more = if names.len() > 1 { format!(" and {} more", names.len() - 1) } else { String::new() };
            out!("in BF16: {}{more}: {reason}", names[0]);
        }
        out!("tensor parallelism: at most {ranks} ranks, whose shares are whole heads and whole blocks");
        if *power_of_two_scales == Some(false) {
            out!(
                "scales of blocks are not powers of two: engines that round them while they load (vLLM with DeepGEMM) cast these weights again"
            );
        }
        out!("read back: each weight is the nearest value of its format");
    }
}

/// Returns the name of a format on the command line.
fn name_of(Fp8Format { layout, scheme }: Fp8Format) -> String {
    let scheme = match scheme {
        Scheme::Dynamic => "dynamic",
        Scheme::Static => "static",
        Scheme::Block => "block",
        Scheme::Nvfp4 => return "nvfp4".into(),
        Scheme::Mxfp4 => return "mxfp4".into(),
    };
    match layout {
        Convention::DeepSeek => "fp8-block".into(),
        Convention::CompressedTensors => format!("compressed-tensors --scheme {scheme}"),
        Convention::ModelOpt => format!("modelopt --scheme {scheme}"),
    }
}
