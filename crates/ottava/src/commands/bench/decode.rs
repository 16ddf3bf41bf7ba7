//! `ottava bench decode`.

use super::shared::{name_of, of_recipe};
use crate::commands::inference::InferenceRanks;
use crate::output::print_json;
use crate::ranks::{RankArgs, Role};
use clap::Args;
use ottava_common::Result;
use ottava_recipe::{KvCacheDtype, RecipeName};
use ottava_settings::DeviceChoice;
use ottava_tensor::Device;
use ottava_train::bench::{DecodeBench, DecodeRow};
use serde_json::json;

/// Time decoding and prefill with the shape of a known model and random weights, relative to the time to read weights and KV cache. With --gpus or
/// --ranks, the bytes and the time to read them are the values of rank 0.
#[derive(Args)]
pub struct Decode {
    /// A model that `bench train` knows, or a folder with a config.json.
    #[arg(long, default_value = "llama-3-8b")]
    model: String,
    /// The number of blocks; by default the model's number.
    #[arg(long, value_parser = crate::commands::count)]
    layers: Option<usize>,
    /// Batch sizes, measured one after the other.
    #[arg(long, value_delimiter = ',', default_value = "1,16,64,256", value_parser = crate::commands::count)]
    batch: Vec<usize>,
    /// The number of tokens of each sequence.
    #[arg(long, default_value_t = 1024, value_parser = crate::commands::count)]
    context: usize,
    /// Also time the prefill of a prompt of this many tokens.
    #[arg(long, value_parser = crate::commands::count)]
    prefill: Option<usize>,
    /// Recipes to run one after the other; ratios are relative to the first recipe.
    #[arg(long, value_delimiter = ',', default_value = "bf16,fp8-row")]
    recipes: Vec<RecipeName>,
    /// The format of the KV cache for each recipe, or one format for all: auto, bfloat16 or fp8.
    #[arg(long, value_delimiter = ',', default_value = "auto")]
    kv_cache_dtype: Vec<KvCacheDtype>,
    /// The number of steps; the median step time is reported.
    #[arg(long, default_value_t = 20, value_parser = crate::commands::count)]
    steps: usize,
    #[command(flatten)]
    ranks: RankArgs,
    /// Where to run: auto, cuda or cpu.
    #[arg(long, default_value = "auto", value_parser = crate::device::parse)]
    device: DeviceChoice,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl Decode {
    pub fn run(self) -> Result<()> {
        let (count, choice) = self.ranks.choose(self.device)?;
        let ranks = InferenceRanks::join(Role::find(count)?, choice)?;
        let (count, device) = (ranks.ranks().size(), ranks.device());
        let Decode { model, layers, context, prefill, steps, .. } = self;
        let bench = DecodeBench { model, layers, batches: self.batch, context, prefill, steps };
        let prints = ranks.leads() && !self.json;
        let mut rows: Vec<DecodeRow> = Vec::new();
        for (i, &recipe) in self.recipes.iter().enumerate() {
            let kv_cache_dtype = of_recipe(&self.kv_cache_dtype, i);
            bench.run(recipe, kv_cache_dtype, device, ranks.ranks(), |row| {
                let same = |other: &&DecodeRow| (other.batch, other.new_tokens) == (row.batch, row.new_tokens);
                let first = rows.iter().find(same).unwrap_or(&row).milliseconds;
                if prints && rows.is_empty() {
                    print_head(device, count);
                }
                if prints {
                    out!(
                        "{:<12} {:<9} {:>6} {:>8} {:>8} {:>10.3} {:>10.0} {:>11.2} {:>11.0} {:>9.3}{}",
                        recipe.as_str(),
                        name_of(kv_cache_dtype),
                        row.batch,
                        row.context,
                        row.new_tokens,
                        row.milliseconds,
                        row.tokens_per_second,
                        row.bytes as f64 / 1e9,
                        100.0 * row.floor_milliseconds / row.milliseconds,
                        first / row.milliseconds,
                        row.all_reduce_milliseconds.map_or(String::new(), |ms| format!(" {ms:>14.3}"))
                    );
                }
                rows.push(row);
            })?;
        }
        if self.json && ranks.leads() {
            print_json(&json!({"device": device.to_string(), "model": bench.model, "ranks": count, "rows": rows}));
        }
        ranks.finish()
    }
}

/// Prints the head of the table for `ranks` ranks.
fn print_head(device: &Device, ranks: usize) {
    if ranks > 1 {
        out!("{ranks} ranks, {device}: GB read and floor are those of rank 0; all-reduces are also timed alone");
    }
    out!(
        "{:<12} {:<9} {:>6} {:>8} {:>8} {:>10} {:>10} {:>11} {:>11} {:>9}{}",
        "recipe",
        "KV cache",
        "batch",
        "context",
        "new",
        "step ms",
        "tokens/s",
        "GB read",
        "% of floor",
        "speed-up",
        if ranks > 1 { format!(" {:>14}", "all-reduces ms") } else { String::new() }
    );
}
