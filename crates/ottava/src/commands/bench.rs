//! `ottava bench`.

use crate::output::print_json;
use clap::{Args, Subcommand};
use ottava_lm::Result;
use ottava_lm::bench::{TrainBench, TrainRow};
use ottava_lm::config::{DeviceChoice, MemoryConfig, OptimizerConfig, StateDType};
use ottava_lm::recipe::RecipeName;
use ottava_lm::recompute::Recompute;
use ottava_tensor::bench::{copy_bandwidth, kernels};
use serde_json::json;

/// Measure this machine: kernels against the memory's speed, and whole training steps.
#[derive(Args)]
#[command(after_help = "Examples:
  ottava bench kernels
  ottava bench train --model llama-2-7b --compare bf16,fp8-delayed,fp8-current --state-dtype bfloat16 --gradient-dtype bfloat16 --no-master-weights
  ottava bench train --model qwen2.5-0.5b --seq-len 1024 --micro-batch 32 --json")]
pub struct Bench {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    Kernels(Kernels),
    Train(Train),
}

/// Time every memory-bound op beside what a copy of as many bytes takes.
#[derive(Args)]
struct Kernels {
    /// Rows of the activations.
    #[arg(long, default_value_t = 8192)]
    tokens: usize,
    /// Width of the residual stream.
    #[arg(long, default_value_t = 4096)]
    channels: usize,
    /// Width of the feed-forward layers.
    #[arg(long, default_value_t = 11_008)]
    hidden: usize,
    /// Where to run: auto, cuda or cpu.
    #[arg(long, default_value = "auto", value_parser = crate::device::parse)]
    device: DeviceChoice,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Time training steps of a known model's shape on random tokens: forward, backward, clipping and AdamW.
#[derive(Args)]
struct Train {
    /// llama-2-7b, llama-2-13b, llama-3-8b, or qwen2.5-0.5b, -1.5b, -3b, -7b.
    #[arg(long, default_value = "llama-2-7b")]
    model: String,
    /// Blocks, if not as many as the model has.
    #[arg(long)]
    layers: Option<usize>,
    /// Tokens per sequence.
    #[arg(long, default_value_t = 4096)]
    seq_len: usize,
    /// Sequences per step.
    #[arg(long, default_value_t = 2)]
    micro_batch: usize,
    /// Steps whose median is reported, after two that are not.
    #[arg(long, default_value_t = 10)]
    steps: usize,
    /// Recipes to run in turn; ratios are to the first.
    #[arg(long, value_delimiter = ',', default_value = "bf16,fp8-delayed,fp8-current")]
    compare: Vec<RecipeName>,
    /// Type of the optimizer's moments: float32 or bfloat16.
    #[arg(long, default_value = "float32", value_parser = state_dtype)]
    state_dtype: StateDType,
    /// Type of the gradients of the blocks' matrices: float32 or bfloat16.
    #[arg(long, default_value = "float32", value_parser = state_dtype)]
    gradient_dtype: StateDType,
    /// Keep no float32 weights; updates round by chance.
    #[arg(long)]
    no_master_weights: bool,
    /// What backward computes again: none, norm-swiglu, attention or full.
    #[arg(long, default_value = "none")]
    recompute: Recompute,
    /// Cast weights anew for each product instead of keeping their FP8 codes.
    #[arg(long)]
    no_weight_codes: bool,
    /// Where to run: auto, cuda or cpu.
    #[arg(long, default_value = "auto", value_parser = crate::device::parse)]
    device: DeviceChoice,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl Bench {
    pub fn run(self) -> Result<()> {
        match self.what {
            What::Kernels(command) => command.run(),
            What::Train(command) => command.run(),
        }
    }
}

impl Kernels {
    fn run(self) -> Result<()> {
        let device = crate::device::open(self.device)?;
        let bandwidth = copy_bandwidth(&device)?;
        let rows = kernels(&device, self.tokens, self.channels, self.hidden)?;
        let share = |floor: f64, time: f64| 100.0 * floor / time;
        if self.json {
            let rows: Vec<_> = rows
                .iter()
                .map(|r| {
                    json!({"name": r.name, "bytes": r.bytes, "milliseconds": r.milliseconds,
                           "percent_of_floor": share(r.floor_milliseconds, r.milliseconds)})
                })
                .collect();
            print_json(&json!({"device": device.to_string(), "copy_bytes_per_second": bandwidth, "kernels": rows}));
            return Ok(());
        }
        println!("{device}: a copy moves {:.0} GB/s, reads and writes counted", bandwidth / 1e9);
        println!("{:<44} {:>9} {:>8} {:>11}", "kernel", "µs", "GB/s", "% of floor");
        for r in rows {
            println!(
                "{:<44} {:>9.1} {:>8.0} {:>11.0}",
                r.name,
                r.milliseconds * 1e3,
                r.bytes as f64 / r.milliseconds / 1e6,
                share(r.floor_milliseconds, r.milliseconds)
            );
        }
        Ok(())
    }
}

impl Train {
    fn run(self) -> Result<()> {
        let device = crate::device::open(self.device)?;
        let bench = TrainBench {
            model: self.model,
            layers: self.layers,
            seq_len: self.seq_len,
            micro_batch: self.micro_batch,
            steps: self.steps,
            optimizer: OptimizerConfig {
                state_dtype: self.state_dtype,
                gradient_dtype: self.gradient_dtype,
                master_weights: !self.no_master_weights,
            },
            memory: MemoryConfig { recompute: self.recompute, weight_codes: !self.no_weight_codes },
        };
        let mut rows: Vec<TrainRow> = Vec::new();
        if !self.json {
            println!(
                "{:<12} {:>10} {:>9} {:>8} {:>12} {:>10} {:>12}",
                "recipe", "tokens/s", "step ms", "ratio", "TFLOP/s", "peak GiB", "first step s"
            );
        }
        for recipe in self.compare {
            let row = bench.run(recipe, &device)?;
            let first = rows.first().unwrap_or(&row).tokens_per_second;
            if !self.json {
                println!(
                    "{:<12} {:>10.0} {:>9.1} {:>8.3} {:>12.0} {:>10.2} {:>12.1}",
                    recipe.as_str(),
                    row.tokens_per_second,
                    row.step_milliseconds,
                    row.tokens_per_second / first,
                    row.model_flops_per_second / 1e12,
                    row.peak_memory_bytes as f64 / (1u64 << 30) as f64,
                    row.first_step_seconds
                );
            }
            rows.push(row);
        }
        if self.json {
            print_json(&json!({"device": device.to_string(), "model": bench.model, "seq_len": bench.seq_len,
                               "micro_batch": bench.micro_batch, "rows": rows}));
        }
        Ok(())
    }
}

fn state_dtype(text: &str) -> Result<StateDType, String> {
    match text {
        "float32" => Ok(StateDType::Float32),
        "bfloat16" => Ok(StateDType::Bfloat16),
        other => Err(format!("`{other}` is not a type of optimizer states; float32 and bfloat16 are")),
    }
}
