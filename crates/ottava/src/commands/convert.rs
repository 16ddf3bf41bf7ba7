//! `ottava convert`.

use crate::output::{print_json, stop_on_signals};
use clap::{Args, ValueEnum};
use ottava_lm::Result;
use ottava_lm::convert::convert;
use ottava_tensor::DType;
use serde_json::json;
use std::path::PathBuf;

/// Convert a model of llama.cpp (GGUF) to a Hugging Face folder, as all commands read it.
#[derive(Args)]
#[command(after_help = "Example:
  ottava convert SmolLM2-135M-Instruct.Q4_1.gguf smollm2
  ottava generate smollm2 --prompt 'The capital of France'")]
pub struct Convert {
    /// The file, of the architecture `llama`.
    model: PathBuf,
    /// The new folder: config.json, model.safetensors, tokenizer.json, chat_template.jinja and others.
    output: PathBuf,
    /// The type of the weights: bfloat16 rounds dequantized values to 8 bits, float32 keeps them all.
    #[arg(long, default_value = "bfloat16")]
    dtype: WeightType,
    /// Print one JSON object with `parameters`, and `stored`: the tensors of each type in the file.
    #[arg(long)]
    json: bool,
}

/// Types of weights in a folder.
#[derive(Clone, Copy, ValueEnum)]
enum WeightType {
    Bfloat16,
    Float32,
}

impl Convert {
    pub fn run(self) -> Result<()> {
        stop_on_signals("stopping")?;
        let dtype = match self.dtype {
            WeightType::Bfloat16 => DType::BF16,
            WeightType::Float32 => DType::F32,
        };
        let converted = convert(&self.model, &self.output, dtype)?;
        match self.json {
            true => print_json(&json!({"parameters": converted.parameters, "stored": converted.stored})),
            false => {
                let stored: Vec<_> = converted.stored.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
                out!(
                    "{}: {} parameters in {}; the tensors of the file are {}",
                    self.output.display(),
                    converted.parameters,
                    dtype.name(),
                    stored.join(", ")
                );
            }
        }
        Ok(())
    }
}
