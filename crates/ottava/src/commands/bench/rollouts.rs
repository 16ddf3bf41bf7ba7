//! `ottava bench rollouts`.

use super::shared::{gib, name_of, of_recipe, storage};
use crate::output::print_json;
use clap::Args;
use ottava_common::Result;
use ottava_recipe::storage::Storage;
use ottava_recipe::{KvCacheDtype, RecipeName};
use ottava_settings::{DeviceChoice, formats};
use ottava_train::bench::{RolloutBench, RolloutRow};
use serde_json::json;

/// Time a generation of reinforcement learning and its optimizer step, with the shape of a model and random weights. The lengths of completions are
/// quantiles of a log-logistic distribution of shape 4, which has a long tail.
#[derive(Args)]
pub(super) struct Rollouts {
    /// A model that `bench train` knows, or a folder with a config.json.
    #[arg(long, default_value = "llama-3-8b")]
    model: String,
    /// The number of blocks; by default the model's number.
    #[arg(long, value_parser = crate::commands::count)]
    layers: Option<usize>,
    /// The number of prompts of a generation.
    #[arg(long, default_value_t = 64, value_parser = crate::commands::count)]
    prompts: usize,
    /// The number of completions of each prompt.
    #[arg(long, default_value_t = 8, value_parser = crate::commands::count)]
    num_generations: usize,
    /// The number of tokens of a prompt.
    #[arg(long, default_value_t = 512, value_parser = crate::commands::count)]
    prompt_length: usize,
    /// The mean number of tokens of a completion, before lengths are cut to fit --max-length.
    #[arg(long, default_value_t = 1024, value_parser = crate::commands::count)]
    mean_length: usize,
    /// The number of tokens of a row. A prompt and its completion together have at most this many tokens.
    #[arg(long, default_value_t = 4096, value_parser = crate::commands::count)]
    max_length: usize,
    /// The number of rows of a micro-batch.
    #[arg(long, default_value_t = 2, value_parser = crate::commands::count)]
    micro_batch: usize,
    /// The number of tokens of the KV cache; 0 for as many as the completions need and memory has room for.
    #[arg(long, default_value_t = 0)]
    kv_cache_tokens: usize,
    /// The number of generations to measure, each with one step; means are reported.
    #[arg(long, default_value_t = 1, value_parser = crate::commands::count)]
    steps: usize,
    /// Recipes to run one after the other; ratios are relative to the first recipe.
    #[arg(long, value_delimiter = ',', default_value = "bf16,fp8-row,fp8-block")]
    recipes: Vec<RecipeName>,
    /// The format of the KV cache for each recipe, or one format for all: auto, bfloat16 or fp8.
    #[arg(long, value_delimiter = ',', default_value = "auto")]
    kv_cache_dtype: Vec<KvCacheDtype>,
    /// The storage of the optimizer: float32, msamp-o1, msamp-o2, msamp-o3, coat, bfloat16.
    #[arg(long, default_value = "bfloat16", value_parser = storage)]
    storage: Storage,
    /// Override a setting of precision, optimizer, memory or lora for all recipes: `table.key=VALUE`, or `key=VALUE` if only one table has the key.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    settings: Vec<String>,
    /// Where to run: auto, cuda or cpu.
    #[arg(long, default_value = "auto", value_parser = crate::device::parse)]
    device: DeviceChoice,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl Rollouts {
    pub(super) fn run(self) -> Result<()> {
        let device = crate::device::open(self.device)?;
        let bench = RolloutBench {
            model: self.model,
            layers: self.layers,
            prompts: self.prompts,
            num_generations: self.num_generations,
            prompt_length: self.prompt_length,
            mean_length: self.mean_length,
            max_length: self.max_length,
            micro_batch: self.micro_batch,
            kv_cache_tokens: self.kv_cache_tokens,
            steps: self.steps,
            config: formats(&self.settings)?,
        };
        let mut rows: Vec<RolloutRow> = Vec::new();
        for (i, &recipe) in self.recipes.iter().enumerate() {
            let kv_cache_dtype = of_recipe(&self.kv_cache_dtype, i);
            let row = bench.run(recipe, self.storage, kv_cache_dtype, &device)?;
            if !self.json {
                print(&row, rows.first());
            }
            rows.push(row);
        }
        if self.json {
            print_json(&json!({"device": device.to_string(), "model": bench.model, "rows": rows}));
        }
        Ok(())
    }
}

/// Prints a row with its speed-up over the `first` row. If `first` is `None`, prints the head of the table before the row.
fn print(row: &RolloutRow, first: Option<&RolloutRow>) {
    if first.is_none() {
        out!(
            "{} completions of {} tokens in all, the longest of {}; {} are drawn at once",
            row.completions,
            row.drawn_tokens,
            row.longest,
            row.at_once
        );
        out!(
            "{:<12} {:<9} {:>9} {:>12} {:>12} {:>8} {:>13} {:>13} {:>8} {:>8} {:>11} {:>9}",
            "recipe",
            "KV cache",
            "draws s",
            "tokens/s",
            "hand-over ms",
            "step s",
            "micro-batches",
            "tokens/s",
            "whole s",
            "speed-up",
            "planned GiB",
            "peak GiB"
        );
    }
    out!(
        "{:<12} {:<9} {:>9.2} {:>12.0} {:>12.2} {:>8.2} {:>13} {:>13.0} {:>8.2} {:>8.3} {:>11.2} {:>9.2}",
        row.recipe.as_str(),
        name_of(row.kv_cache_dtype),
        row.draw_seconds,
        row.drawn_per_second,
        row.hand_over_milliseconds,
        row.step_seconds,
        row.micro_batches,
        row.step_tokens_per_second,
        row.seconds,
        first.unwrap_or(row).seconds / row.seconds,
        gib(row.planned_peak_bytes),
        gib(row.peak_memory_bytes)
    );
}
