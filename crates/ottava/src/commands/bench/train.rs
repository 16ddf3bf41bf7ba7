//! `ottava bench train`.

use super::shared::{gib, share, storage};
use crate::output::print_json;
use crate::ranks::{Job, RankArgs, Role};
use clap::Args;
use ottava_common::Result;
use ottava_parallel::Ranks;
use ottava_recipe::RecipeName;
use ottava_recipe::storage::Storage;
use ottava_settings::{DeviceChoice, formats};
use ottava_train::bench::{TrainBench, TrainRow};
use serde_json::json;
use std::rc::Rc;

/// Time training steps of a known model's shape on random tokens: forward, backward, clipping and the update.
#[derive(Args)]
pub(super) struct Train {
    /// A known model such as llama-3-8b or qwen3.5-9b (for an unknown name, the error lists all), or a folder with a config.json.
    #[arg(long, default_value = "llama-2-7b")]
    model: String,
    /// The number of blocks; by default the model's number.
    #[arg(long, value_parser = crate::commands::count)]
    layers: Option<usize>,
    /// The number of tokens per sequence.
    #[arg(long, alias = "seq-len", default_value_t = 4096, value_parser = crate::commands::count)]
    max_length: usize,
    /// Pack documents of this many tokens into each sequence; tokens attend only to their own document.
    #[arg(long, value_parser = crate::commands::count)]
    document_len: Option<usize>,
    /// The number of sequences per micro-batch of each rank.
    #[arg(long, default_value_t = 2, value_parser = crate::commands::count)]
    micro_batch: usize,
    /// The number of micro-batches per step of each rank; with more micro-batches, a pipeline is idle for a smaller share of the time.
    #[arg(long, default_value_t = 1, value_parser = crate::commands::count)]
    micro_batches: usize,
    /// The number of steps to measure, after two warm-up steps; the median is reported.
    #[arg(long, default_value_t = 10, value_parser = crate::commands::count)]
    steps: usize,
    /// Recipes to run one after the other; ratios are relative to the first recipe.
    #[arg(long, alias = "compare", value_delimiter = ',', default_value = "bf16,fp8-delayed,fp8-current")]
    recipes: Vec<RecipeName>,
    /// Storages of the optimizer to run each recipe with: float32, msamp-o1, msamp-o2, msamp-o3, coat, bfloat16.
    #[arg(long, alias = "levels", value_delimiter = ',', default_value = "float32", value_parser = storage)]
    storages: Vec<Storage>,
    /// Override a setting of precision, optimizer, memory, parallel or lora for all recipes: `table.key=VALUE`, or `key=VALUE` if only one
    /// table has the key.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    settings: Vec<String>,
    #[command(flatten)]
    ranks: RankArgs,
    /// Where to run: auto, cuda or cpu.
    #[arg(long, default_value = "auto", value_parser = crate::device::parse)]
    device: DeviceChoice,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl Train {
    pub(super) fn run(self) -> Result<()> {
        let (ranks, choice) = self.ranks.choose(self.device)?;
        let config = formats(&self.settings)?;
        let Job { processes, local, comm } = Role::find(ranks)?.join(&config, None)?;
        let device = crate::device::open_of_rank(choice, &local)?;
        let shape = config.parallel.mesh(comm.size())?;
        let ranks = Ranks::new(comm, shape, &device)?.sending(config.parallel.communication.activation_dtype);
        let ranks = Rc::new(ranks.with_shard_groups(config.parallel.zero_shard_size)?);
        let bench = TrainBench {
            model: self.model,
            layers: self.layers,
            seq_len: self.max_length,
            document_len: self.document_len,
            micro_batch: self.micro_batch,
            micro_batches: self.micro_batches,
            steps: self.steps,
            config,
        };
        let mut rows: Vec<TrainRow> = Vec::new();
        let prints = ranks.leads() && !self.json;
        if prints {
            out!(
                "{:<12} {:<8} {:>10} {:>9} {:>8} {:>10} {:>7} {:>9} {:>11} {:>10} {:>10} {:>14}",
                "recipe",
                "storage",
                "tokens/s",
                "step ms",
                "ratio",
                "TFLOP/s",
                "watts",
                "mJ/token",
                "planned GiB",
                "peak GiB",
                "held GiB",
                "first step s"
            );
        }
        let runs = self.recipes.iter().flat_map(|&recipe| self.storages.iter().map(move |&storage| (recipe, storage)));
        for (recipe, storage) in runs {
            let row = bench.run(recipe, storage, &device, &ranks)?;
            let first = rows.first().unwrap_or(&row).tokens_per_second;
            if prints {
                let number = |value: Option<f64>| value.map_or("-".to_string(), |value| format!("{value:.0}"));
                out!(
                    "{:<12} {:<6} {:>10.0} {:>9.1} {:>8.3} {:>10.0} {:>7} {:>9} {:>11.2} {:>10.2} {:>10.2} {:>14.1}",
                    recipe.as_str(),
                    storage.as_str(),
                    row.tokens_per_second,
                    row.step_milliseconds,
                    row.tokens_per_second / first,
                    row.model_flops_per_second / 1e12,
                    number(row.watts),
                    number(row.watts.map(|watts| watts / row.tokens_per_second * 1e3)),
                    gib(row.planned_peak_bytes),
                    gib(row.peak_memory_bytes),
                    gib(row.reserved_memory_bytes),
                    row.first_step_seconds
                );
                if let Some(extra) = row.comparison_milliseconds {
                    let steps = bench.config.sentinel.sentinel_steps as f64;
                    let share = 100.0 * extra / (steps * row.step_milliseconds);
                    out!("  a comparison with BF16 takes {extra:.0} ms: {share:.2} % of {steps:.0} steps");
                }
                print_ranks(&row);
            }
            rows.push(row);
        }
        ranks.finish()?;
        if !ranks.leads() {
            return Ok(());
        }
        processes.wait()?;
        if prints {
            print_families(&rows);
        } else {
            print_json(&json!({"device": device.to_string(), "model": bench.model, "max_length": bench.seq_len,
                               "micro_batch": bench.micro_batch, "micro_batches": bench.micro_batches, "rows": rows}));
        }
        Ok(())
    }
}

/// Prints the throughput of all ranks, and the memory of each rank.
fn print_ranks(row: &TrainRow) {
    if row.ranks.len() == 1 {
        return;
    }
    let all = row.tokens_per_second * row.ranks.len() as f64;
    out!("  {} ranks: {:.0} tokens/s each, {all:.0} together", row.ranks.len(), row.tokens_per_second);
    for (rank, memory) in row.ranks.iter().enumerate() {
        let (peak, outside) = (gib(memory.peak_bytes), gib(memory.outside_bytes));
        out!("  rank {rank}: peak {peak:.2} GiB, {outside:.2} GiB outside the pool");
    }
}

/// Prints how the time of one more step divides among families of kernels, for each recipe.
fn print_families(rows: &[TrainRow]) {
    for row in rows.iter().filter(|row| !row.families.is_empty()) {
        let step: f64 = row.families.iter().map(|family| family.milliseconds).sum();
        let name = format!("{}, {}", row.recipe.as_str(), row.storage.as_str());
        out!("\n{name:<24} {:>9} {:>9}", "ms", "% of step");
        for family in &row.families {
            out!("{:<24} {:>9.2} {:>9.1}", family.family, family.milliseconds, share(family.milliseconds, step));
        }
    }
}
