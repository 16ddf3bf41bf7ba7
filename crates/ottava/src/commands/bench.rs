//! `ottava bench`.

use super::bench_decode::Decode;
use crate::output::print_json;
use crate::ranks::{Job, RankArgs, Role};
use clap::{Args, Subcommand};
use ottava_lm::bench::{self, SweepCell, TrainBench, TrainRow};
use ottava_lm::config::{DeviceChoice, formats};
use ottava_lm::level::{Gradients, Level};
use ottava_lm::parallel::Ranks;
use ottava_lm::recipe::RecipeName;
use ottava_lm::{Error, Result};
use ottava_tensor::bench::{
    BusRates, CollectiveRow, CommBench, CommReport, Cost, Meter, Rates, copy_bandwidth, kernels,
};
use ottava_tensor::{DType, Device};
use serde_json::json;
use std::rc::Rc;

/// Measure this machine: kernels relative to the memory bandwidth, collectives, and whole training steps.
#[derive(Args)]
#[command(after_help = "Examples:
  ottava bench kernels
  ottava bench gemm --model llama-2-7b --tokens 8192
  ottava bench linear --recipes bf16,fp8-delayed,fp8-current
  ottava bench linear --sweep --recipes fp8-delayed
  ottava bench attention --seq-lens 1024,4096 --power
  ottava bench train --model llama-2-7b --compare bf16,fp8-delayed,fp8-current --levels bf16
  ottava bench train --compare bf16,fp8-current --set first_layers_bf16=1 --set last_layers_bf16=1
  ottava bench train --model qwen2.5-0.5b --seq-len 1024 --micro-batch 32 --json
  ottava bench train --model llama-3-8b --gpus 2
  ottava bench decode --model llama-3-8b --batch 1,16 --kv-cache-dtype auto,fp8 --prefill 8192
  ottava bench decode --model llama-3-70b --gpus 2 --recipes fp8-row --kv-cache-dtype fp8
  ottava bench comm --gpus 2")]
pub struct Bench {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    Kernels(Kernels),
    Gemm(Gemm),
    Linear(Linear),
    Attention(Attention),
    Train(Train),
    Decode(Decode),
    Comm(CommArgs),
}

/// Time every memory-bound op and compare it with a copy of the same size.
#[derive(Args)]
struct Kernels {
    /// Rows of the activations.
    #[arg(long, default_value_t = 8192, value_parser = super::count)]
    tokens: usize,
    /// Width of the residual stream.
    #[arg(long, default_value_t = 4096, value_parser = super::count)]
    channels: usize,
    /// Width of the feed-forward layers.
    #[arg(long, default_value_t = 11_008, value_parser = super::count)]
    hidden: usize,
    /// Also measure power, clock and energy per run of each row under load, which takes 1.3 seconds for each. Needs NVML, which comes with NVIDIA's driver.
    #[arg(long)]
    power: bool,
    /// Where to run: auto, cuda or cpu.
    #[arg(long, default_value = "auto", value_parser = crate::device::parse)]
    device: DeviceChoice,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Time the products of a model's linear layers, relative to the best rate of their types.
#[derive(Args)]
struct Gemm {
    /// A model that `bench train` knows.
    #[arg(long, default_value = "llama-2-7b")]
    model: String,
    /// Rows of the activations.
    #[arg(long, default_value_t = 8192, value_parser = super::count)]
    tokens: usize,
    /// Recipes whose products to time.
    #[arg(long, value_delimiter = ',', default_value = "bf16,fp8-delayed")]
    recipes: Vec<RecipeName>,
    /// Type in which wgrad accumulates: float32 or bfloat16.
    #[arg(long, default_value = "float32", value_parser = sums)]
    gradient_dtype: DType,
    /// Also measure power, clock and energy per run of each row under load, which takes 1.3 seconds for each. Needs NVML, which comes with NVIDIA's driver.
    #[arg(long)]
    power: bool,
    /// Where to run: auto, cuda or cpu.
    #[arg(long, default_value = "auto", value_parser = crate::device::parse)]
    device: DeviceChoice,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Time whole linear layers, forward and backward with their casts, relative to their products without casts.
#[derive(Args)]
struct Linear {
    /// A model that `bench train` knows.
    #[arg(long, default_value = "llama-2-7b")]
    model: String,
    /// Rows of the activations; by default 8192, and with --sweep 1024, 4096, 8192 and 32768.
    #[arg(long, value_delimiter = ',', value_parser = super::count)]
    tokens: Vec<usize>,
    /// Recipes to compare; speed-ups are relative to the first. With --sweep, the first that is not bf16 is compared with bf16.
    #[arg(long, value_delimiter = ',', default_value = "bf16,fp8-delayed,fp8-current")]
    recipes: Vec<RecipeName>,
    /// Type in which gradients of weights are stored: float32, bfloat16 or float8.
    #[arg(long, default_value = "float32", value_parser = gradients)]
    gradient_dtype: Gradients,
    /// Time a grid of shapes instead of a model's, to see where FP8 pays.
    #[arg(long)]
    sweep: bool,
    /// Inputs and outputs of the grid.
    #[arg(long, value_delimiter = ',', default_value = "512,1024,2048,4096,8192,16384", requires = "sweep", value_parser = super::count)]
    sizes: Vec<usize>,
    /// Where to run: auto, cuda or cpu.
    #[arg(long, default_value = "auto", value_parser = crate::device::parse)]
    device: DeviceChoice,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Time each kind of attention of a model, forward and backward, relative to the best rate of a BF16 product.
#[derive(Args)]
struct Attention {
    /// A model that `bench train` knows.
    #[arg(long, default_value = "llama-2-7b")]
    model: String,
    /// Tokens of a micro-batch.
    #[arg(long, default_value_t = 8192, value_parser = super::count)]
    tokens: usize,
    /// Tokens per sequence; several values run one after the other.
    #[arg(long, value_delimiter = ',', default_value = "512,1024,2048,4096,8192", value_parser = super::count)]
    seq_lens: Vec<usize>,
    /// Also measure power, clock and energy per run of each row under load, which takes 1.3 seconds for each. Needs NVML, which comes with NVIDIA's driver.
    #[arg(long)]
    power: bool,
    /// Where to run: auto, cuda or cpu.
    #[arg(long, default_value = "auto", value_parser = crate::device::parse)]
    device: DeviceChoice,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Time training steps of a known model's shape on random tokens: forward, backward, clipping and the update.
#[derive(Args)]
struct Train {
    /// llama-2-7b, llama-2-13b, llama-30b, llama-3-8b, llama-3-70b, qwen2.5-0.5b, -1.5b, -3b, -7b, qwen3-0.6b, -8b, gpt2, gpt2-xl, gemma-2-9b,
    /// phi-3-medium, or command-r-35b.
    #[arg(long, default_value = "llama-2-7b")]
    model: String,
    /// Number of blocks; by default that of the model.
    #[arg(long, value_parser = super::count)]
    layers: Option<usize>,
    /// Tokens per sequence.
    #[arg(long, default_value_t = 4096, value_parser = super::count)]
    seq_len: usize,
    /// Pack documents of this many tokens into each sequence; tokens attend only to their own document.
    #[arg(long, value_parser = super::count)]
    document_len: Option<usize>,
    /// Sequences per micro-batch, of each rank.
    #[arg(long, default_value_t = 2, value_parser = super::count)]
    micro_batch: usize,
    /// Micro-batches per step, of each rank; a pipeline is idle for less of the time with more of them.
    #[arg(long, default_value_t = 1, value_parser = super::count)]
    micro_batches: usize,
    /// Steps to measure, after two warm-up steps; the median is reported.
    #[arg(long, default_value_t = 10, value_parser = super::count)]
    steps: usize,
    /// Recipes to run one after the other; ratios are relative to the first.
    #[arg(long, value_delimiter = ',', default_value = "bf16,fp8-delayed,fp8-current")]
    compare: Vec<RecipeName>,
    /// Levels of the optimizer to run each recipe at: O0, O1, O2, O3, coat, bf16.
    #[arg(long, value_delimiter = ',', default_value = "O0", value_parser = level)]
    levels: Vec<Level>,
    /// Override a setting of precision, optimizer, memory, parallel or lora for all recipes: `table.key=VALUE`, or `key=VALUE` if only one table has it.
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

/// Time collectives between ranks, alone and overlapped with products.
#[derive(Args)]
struct CommArgs {
    /// Sizes of whole buffers in MiB; by default 1, 4, 16, 64 and 256.
    #[arg(long, value_delimiter = ',', value_parser = super::count)]
    mib: Vec<usize>,
    /// Size of the buffers of collectives that overlap with products, in MB (10^6 bytes); by default 200.
    #[arg(long, value_parser = super::count)]
    beside_mb: Option<usize>,
    #[command(flatten)]
    ranks: RankArgs,
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
            What::Gemm(command) => command.run(),
            What::Linear(command) => command.run(),
            What::Attention(command) => command.run(),
            What::Train(command) => command.run(),
            What::Decode(command) => command.run(),
            What::Comm(command) => command.run(),
        }
    }
}

impl Kernels {
    fn run(self) -> Result<()> {
        let device = crate::device::open(self.device)?;
        let (bandwidth, bus) = (copy_bandwidth(&device)?, BusRates::measure(&device)?);
        let rows = kernels(meter(&device, self.power)?, self.tokens, self.channels, self.hidden)?;
        if self.json {
            let rows: Vec<_> = rows
                .iter()
                .map(|r| {
                    json!({"name": r.name, "bytes": r.bytes, "milliseconds": r.cost.milliseconds, "power": r.cost.power,
                           "percent_of_floor": share(r.floor_milliseconds, r.cost.milliseconds)})
                })
                .collect();
            print_json(&json!({"device": device.to_string(), "copy_bytes_per_second": bandwidth,
                               "bus_bytes_per_second": bus, "kernels": rows}));
            return Ok(());
        }
        out!("{device}: a copy moves {:.0} GB/s, reads and writes counted", bandwidth / 1e9);
        if let Some(BusRates { up, down, both }) = bus {
            let [up, down, both] = [up, down, both].map(|rate| rate / 1e9);
            out!("the bus: {up:.1} GB/s to the GPU, {down:.1} to the host, {both:.1} each way at once");
        }
        let power = power_columns(self.power);
        out!("{:<44} {:>9} {:>8} {:>11}{power}", "kernel", "µs", "GB/s", "% of floor");
        for r in rows {
            out!(
                "{:<44} {:>9.1} {:>8.0} {:>11.0}{}",
                r.name,
                r.cost.milliseconds * 1e3,
                r.bytes as f64 / r.cost.milliseconds / 1e6,
                share(r.floor_milliseconds, r.cost.milliseconds),
                power_of(&r.cost)
            );
        }
        Ok(())
    }
}

/// Percentage of the best rate.
fn share(floor: f64, time: f64) -> f64 {
    100.0 * floor / time
}

/// Measures ops on `device`, and their `power` if asked.
fn meter(device: &Device, power: bool) -> Result<Meter<'_>> {
    if power && !matches!(device, Device::Cuda(gpu) if gpu.energy().is_some()) {
        return Err(Error::Config(format!(
            "--power: NVML has no energy counter for {device}; leave out --power, or use a GPU that has one"
        )));
    }
    Ok(Meter { device, power })
}

/// The heads of the columns of [`power_of`].
fn power_columns(asked: bool) -> String {
    if asked { format!(" {:>6} {:>6} {:>9}", "W", "MHz", "mJ/run") } else { String::new() }
}

/// Watts, clock and energy, as the last columns of a row.
fn power_of(cost: &Cost) -> String {
    cost.power.map_or(String::new(), |power| {
        format!(" {:>6.0} {:>6.0} {:>9.2}", power.watts, power.megahertz, power.millijoules)
    })
}

/// The first line of a table: the device and its best rates.
fn measure(choice: DeviceChoice, json: bool) -> Result<(Device, Rates)> {
    let device = crate::device::open(choice)?;
    let rates = Rates::measure(&device)?;
    if !json {
        out!(
            "{device}: a large product {:.0} TFLOP/s in BF16, {:.0} in FP8; a copy {:.0} GB/s",
            rates.bf16_flops / 1e12,
            rates.fp8_flops / 1e12,
            rates.copy_bytes / 1e9
        );
    }
    Ok((device, rates))
}

impl Gemm {
    fn run(self) -> Result<()> {
        let model = bench::model(&self.model)?;
        let (device, rates) = measure(self.device, self.json)?;
        if !self.json {
            out!(
                "{:<22} {:<6} {:<12} {:>20} {:>9} {:>9} {:>11}{}",
                "linear",
                "",
                "recipe",
                "T x N x K",
                "ms",
                "TFLOP/s",
                "% of floor",
                power_columns(self.power)
            );
        }
        let mut rows = Vec::new();
        let meter = meter(&device, self.power)?;
        bench::gemms(meter, &model, self.tokens, &self.recipes, self.gradient_dtype, &rates, |row| {
            let [t, n, k] = row.sizes;
            if !self.json {
                out!(
                    "{:<22} {:<6} {:<12} {:>20} {:>9.3} {:>9.0} {:>11.0}{}",
                    row.linear,
                    format!("{:?}", row.product).to_lowercase(),
                    row.recipe.as_str(),
                    format!("{t} x {n} x {k}"),
                    row.cost.milliseconds,
                    2e-9 * (t * n * k) as f64 / row.cost.milliseconds,
                    share(row.floor_milliseconds, row.cost.milliseconds),
                    power_of(&row.cost)
                );
            }
            rows.push(row);
        })?;
        if self.json {
            print_json(&json!({"device": device.to_string(), "model": self.model, "rates": rates, "rows": rows}));
        }
        Ok(())
    }
}

impl Linear {
    fn run(self) -> Result<()> {
        if self.sweep {
            return self.sweep();
        }
        let model = bench::model(&self.model)?;
        let (device, rates) = measure(self.device, self.json)?;
        let tokens = if self.tokens.is_empty() { vec![8192] } else { self.tokens };
        if !self.json {
            out!(
                "{:<22} {:<12} {:>20} {:>9} {:>12} {:>9} {:>11} {:>9}",
                "linear",
                "recipe",
                "T x N x K",
                "ms",
                "products ms",
                "ratio",
                "% of floor",
                "speed-up"
            );
        }
        let (mut rows, mut first) = (Vec::new(), None);
        let gradients = self.gradient_dtype;
        bench::linears(&device, &model, &tokens, &self.recipes, gradients, &rates, |row| {
            let [t, n, k] = row.sizes;
            if row.recipe == self.recipes[0] {
                first = Some(row.milliseconds);
            }
            if !self.json {
                out!(
                    "{:<22} {:<12} {:>20} {:>9.3} {:>12.3} {:>9.3} {:>11.0} {:>9.3}",
                    row.linear,
                    row.recipe.as_str(),
                    format!("{t} x {n} x {k}"),
                    row.milliseconds,
                    row.products_milliseconds,
                    row.milliseconds / row.products_milliseconds,
                    share(row.floor_milliseconds, row.milliseconds),
                    first.unwrap_or(row.milliseconds) / row.milliseconds
                );
            }
            rows.push(row);
        })?;
        if self.json {
            print_json(&json!({"device": device.to_string(), "model": self.model, "rates": rates, "rows": rows}));
        }
        Ok(())
    }

    fn sweep(self) -> Result<()> {
        let device = crate::device::open(self.device)?;
        let tokens = if self.tokens.is_empty() { vec![1024, 4096, 8192, 32_768] } else { self.tokens };
        let Some(&name) = self.recipes.iter().find(|&&name| name != RecipeName::Bf16) else {
            return Err(Error::Config("a sweep compares BF16 with another recipe; name one in --recipes".into()));
        };
        let mut cells: Vec<SweepCell> = Vec::new();
        bench::sweep(&device, &tokens, &self.sizes, name, self.gradient_dtype, |cell| {
            let ([t, n, k], ratio) = (cell.sizes, cell.milliseconds / cell.bf16_milliseconds);
            if !self.json {
                if n == self.sizes[0] && k == self.sizes[0] {
                    out!("{t} tokens: time of {} / time of bf16, by outputs (down) and inputs (across)", name.as_str());
                    let across: String = self.sizes.iter().map(|k| format!(" {k:>7}")).collect();
                    out!("{:>7}{across}", "");
                }
                let start = if k == self.sizes[0] { format!("{n:>7}") } else { String::new() };
                let end = if Some(&k) == self.sizes.last() { "\n" } else { "" };
                out_part!("{start} {ratio:>7.3}{end}");
            }
            cells.push(cell);
        })?;
        if self.json {
            print_json(&json!({"device": device.to_string(), "recipe": name, "cells": cells}));
        }
        Ok(())
    }
}

impl Attention {
    fn run(self) -> Result<()> {
        let model = bench::model(&self.model)?;
        let (device, rates) = measure(self.device, self.json)?;
        if !self.json {
            let power = power_columns(self.power);
            out!("{:>9} {:>9} {:<9} {:>9} {:>9} {:>11}{power}", "batch", "sequence", "", "ms", "TFLOP/s", "% of floor");
        }
        let mut rows = Vec::new();
        let meter = meter(&device, self.power)?;
        for &seq_len in &self.seq_lens {
            for row in bench::attention(meter, &model, self.tokens, seq_len)? {
                for (i, pass) in ["forward", "backward"].into_iter().enumerate().filter(|_| !self.json) {
                    let rate = row.flops[i] / (row.costs[i].milliseconds * 1e-3);
                    out!(
                        "{:>9} {:>9} {:<9} {:>9.3} {:>9.0} {:>11.0}{}  {}",
                        row.batch,
                        row.seq_len,
                        pass,
                        row.costs[i].milliseconds,
                        rate / 1e12,
                        share(rate, rates.bf16_flops),
                        power_of(&row.costs[i]),
                        row.attention
                    );
                }
                rows.push(row);
            }
        }
        if self.json {
            print_json(&json!({"device": device.to_string(), "model": self.model, "rates": rates, "rows": rows}));
        }
        Ok(())
    }
}

impl Train {
    fn run(self) -> Result<()> {
        let (ranks, choice) = self.ranks.choose(self.device)?;
        let config = formats(&self.settings)?;
        let Job { processes, local, comm } = Role::find(ranks)?.join(&config, None)?;
        let device = crate::device::open_of_rank(choice, &local)?;
        let shape = config.parallel.mesh(comm.size())?;
        let ranks = Rc::new(Ranks::new(comm, shape, &device)?.sending(config.parallel.activation_dtype));
        let bench = TrainBench {
            model: self.model,
            layers: self.layers,
            seq_len: self.seq_len,
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
                "{:<12} {:<6} {:>10} {:>9} {:>8} {:>10} {:>7} {:>9} {:>11} {:>10} {:>10} {:>14}",
                "recipe",
                "level",
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
        let runs = self.compare.iter().flat_map(|&recipe| self.levels.iter().map(move |&level| (recipe, level)));
        for (recipe, level) in runs {
            let row = bench.run(recipe, level, &device, &ranks)?;
            let first = rows.first().unwrap_or(&row).tokens_per_second;
            if prints {
                let number = |value: Option<f64>| value.map_or("-".to_string(), |value| format!("{value:.0}"));
                out!(
                    "{:<12} {:<6} {:>10.0} {:>9.1} {:>8.3} {:>10.0} {:>7} {:>9} {:>11.2} {:>10.2} {:>10.2} {:>14.1}",
                    recipe.as_str(),
                    level.as_str(),
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
            print_json(&json!({"device": device.to_string(), "model": bench.model, "seq_len": bench.seq_len,
                               "micro_batch": bench.micro_batch, "micro_batches": bench.micro_batches, "rows": rows}));
        }
        Ok(())
    }
}

impl CommArgs {
    fn run(self) -> Result<()> {
        let (ranks, choice) = self.ranks.choose(self.device)?;
        let Job { processes, local, comm } = Role::find(ranks)?.join(&formats(&[])?, None)?;
        let device = crate::device::open_of_rank(choice, &local)?;
        let comm = match &device {
            Device::Cuda(gpu) => comm.with_gpu(gpu, Error::RANKS)?,
            Device::Cpu | Device::DryCpu(_) => comm,
        };
        let mut bench = CommBench::for_device(&device);
        if !self.mib.is_empty() {
            bench.bytes = self.mib.iter().map(|mib| mib << 20).collect();
        }
        bench.beside_bytes = self.beside_mb.map_or(bench.beside_bytes, |mb| mb * 1_000_000);
        let (leads, prints) = (comm.rank() == 0, comm.rank() == 0 && !self.json);
        if prints && comm.size() > 1 {
            out!("{} ranks, {device}", comm.size());
            out!("{:<16} {:<10} {:>10} {:>12} {:>10}", "collective", "of", "MiB", "µs", "bus GB/s");
        }
        let report = bench.run(&comm, &device, |row| {
            if prints {
                print_collective(row);
            }
        })?;
        comm.finish()?;
        if !leads {
            return Ok(());
        }
        processes.wait()?;
        match self.json {
            true => print_json(&json!({"device": device.to_string(), "report": report})),
            false => print_comm(&report),
        }
        Ok(())
    }
}

fn print_collective(row: &CollectiveRow) {
    out!(
        "{:<16} {:<10} {:>10.1} {:>12.1} {:>10.1}",
        row.kind.as_str(),
        // Whatever only moves is moved as bytes.
        if row.kind.dtype().size() == 1 { "bytes" } else { row.kind.dtype().name() },
        row.bytes as f64 / f64::from(1 << 20),
        row.milliseconds * 1e3,
        row.bus_bytes_per_second / 1e9
    );
}

/// Linear fits to the times of collectives, and their contention with products.
fn print_comm(report: &CommReport) {
    out!("\n{:<16} {:>12} {:>10} {:>20}", "time of a call", "latency µs", "GB/s", "largest error, %");
    for fit in &report.fits {
        out!(
            "{:<16} {:>12.1} {:>10.1} {:>20.1}",
            fit.kind.as_str(),
            fit.latency_seconds * 1e6,
            fit.bytes_per_second / 1e9,
            fit.residual * 100.0
        );
    }
    let [t, n, k] = report.product;
    out!("\noverlapped: products of {t} x {n} x {k} in {}, and back-to-back collectives", report.product_dtype);
    out!("{:<16} {:>10} {:>12} {:>12} {:>10}", "", "MB", "alone, µs", "overlap, µs", "slower, %");
    for row in &report.contention {
        let line = |what: &str, alone: f64, beside: Option<f64>, slower: Option<f64>| {
            let number = |value: Option<f64>| value.map_or("-".to_string(), |value| format!("{value:.1}"));
            let (mb, beside, slower) = (row.bytes as f64 / 1e6, number(beside.map(|ms| ms * 1e3)), number(slower));
            out!("{what:<16} {mb:>10.1} {:>12.1} {beside:>12} {slower:>10}", alone * 1e3);
        };
        let (product, slower) = (row.product_beside_milliseconds, row.product_slowdown());
        line("product", row.product_milliseconds, Some(product), Some(slower));
        let (collective, beside) = (row.collective_milliseconds, row.collective_beside_milliseconds);
        line(row.kind.as_str(), collective, beside, row.collective_slowdown());
    }
}

/// Communication of several ranks, and the memory of each.
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

/// Where the time of one more step went, recipe by recipe.
fn print_families(rows: &[TrainRow]) {
    for row in rows.iter().filter(|row| !row.families.is_empty()) {
        let step: f64 = row.families.iter().map(|family| family.milliseconds).sum();
        let name = format!("{}, {}", row.recipe.as_str(), row.level.as_str());
        out!("\n{name:<24} {:>9} {:>9}", "ms", "% of step");
        for family in &row.families {
            out!("{:<24} {:>9.2} {:>9.1}", family.family, family.milliseconds, share(family.milliseconds, step));
        }
    }
}

fn sums(text: &str) -> Result<DType, String> {
    match text {
        "float32" => Ok(DType::F32),
        "bfloat16" => Ok(DType::BF16),
        other => Err(format!("`{other}` is not a type of sums; float32 and bfloat16 are")),
    }
}

fn gradients(text: &str) -> Result<Gradients, String> {
    match text {
        "float32" => Ok(Gradients::Float32),
        "bfloat16" => Ok(Gradients::Bfloat16),
        "float8" => Ok(Gradients::Float8),
        other => Err(format!("`{other}` is not a way to keep gradients; float32, bfloat16 and float8 are")),
    }
}

fn level(text: &str) -> Result<Level, String> {
    Level::ALL
        .into_iter()
        .find(|level| level.as_str() == text)
        .ok_or_else(|| format!("`{text}` is not a level; there are {}", Level::ALL.map(Level::as_str).join(", ")))
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}
