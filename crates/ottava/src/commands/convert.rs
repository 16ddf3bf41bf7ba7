//! `ottava convert`.

use crate::output::{print_json, stop_on_signals};
use clap::{Args, ValueEnum};
use ottava_common::{Error, Result};
use ottava_convert::convert;
use ottava_tensor::DType;
use serde_json::json;
use std::path::PathBuf;

/// Convert a model of llama.cpp (GGUF) or a checkpoint of Megatron-LM to a Hugging Face folder that all commands read.
#[derive(Args)]
#[command(after_help = "Examples:
  ottava convert SmolLM2-135M-Instruct.Q4_1.gguf smollm2
  ottava generate smollm2 --prompt 'The capital of France'
  ottava convert checkpoints/iter_0001000 model --like Llama-3.1-8B")]
pub struct Convert {
    /// A GGUF file of the architecture `llama`, `qwen2`, `qwen3`, `gemma2` or `gemma3`, or the folder of a Megatron-LM checkpoint (`torch_dist` or `torch`) of a Llama, Qwen2 or Qwen3.
    model: PathBuf,
    /// The new folder with config.json, model.safetensors, tokenizer.json, chat_template.jinja and other files.
    output: PathBuf,
    /// A Hugging Face folder with config.json and tokenizer for a Megatron-LM model; without this option, config.json is created from the arguments
    /// in the checkpoint, and no tokenizer is written.
    #[arg(long, value_name = "FOLDER")]
    like: Option<PathBuf>,
    /// The type of the weights: bfloat16, or float32 to keep every bit.
    #[arg(long, default_value = "bfloat16")]
    dtype: WeightType,
    /// Print one JSON object with `parameters`, `stored` (the number of tensors of each type in the file) and `warnings`.
    #[arg(long)]
    json: bool,
}

/// The type of the weights in the new folder.
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
        if self.model.join("config.json").is_file() && !self.model.join("latest_checkpointed_iteration.txt").is_file() {
            return Err(Error::Config(format!(
                "{0}: this is a model folder already, which all commands read; `ottava export {0} OUTPUT --format bf16` (or fp8-block, gguf) writes its weights in another format",
                self.model.display()
            )));
        }
        let converted = convert(&self.model, self.like.as_deref(), &self.output, dtype)?;
        for warning in &converted.warnings {
            note!("{warning}");
        }
        match self.json {
            true => print_json(
                &json!({"parameters": converted.parameters, "stored": converted.stored, "warnings": converted.warnings}),
            ),
            false => {
                let stored: Vec<_> = converted.stored.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
                out!(
                    "{}: {} parameters in {}; the tensors of the source are {}",
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
