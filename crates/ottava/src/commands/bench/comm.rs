//! `ottava bench comm`.

use crate::output::print_json;
use crate::ranks::{Job, RankArgs, Role};
use clap::Args;
use ottava_common::{Error, Result};
use ottava_settings::{DeviceChoice, formats};
use ottava_tensor::Device;
use ottava_tensor::bench::{CollectiveRow, CommBench, CommReport};
use serde_json::json;

/// Time collectives between ranks, alone and overlapped with products.
#[derive(Args)]
pub(super) struct CommArgs {
    /// Sizes of whole buffers in MiB; by default 1, 4, 16, 64 and 256.
    #[arg(long, value_delimiter = ',', value_parser = crate::commands::count)]
    mib: Vec<usize>,
    /// Sizes of sums of activations in KiB; by default 8, 32, 128, 512, 1024 and 4096.
    #[arg(long, value_delimiter = ',', value_parser = crate::commands::count)]
    sum_kib: Vec<usize>,
    /// Size of the buffers of collectives that overlap with products, in MB (10^6 bytes); by default 200.
    #[arg(long, value_parser = crate::commands::count)]
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

impl CommArgs {
    pub(super) fn run(self) -> Result<()> {
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
        if !self.sum_kib.is_empty() {
            bench.sum_bytes = self.sum_kib.iter().map(|kib| kib << 10).collect();
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
        "{:<16} {:<10} {:>10.3} {:>12.1} {:>10.1}",
        row.kind.as_str(),
        // Collectives that only move data move bytes, whatever the type.
        if row.kind.dtype().size() == 1 { "bytes" } else { row.kind.dtype().name() },
        row.bytes as f64 / f64::from(1 << 20),
        row.milliseconds * 1e3,
        row.bus_bytes_per_second / 1e9
    );
}

/// Prints linear fits to the times of collectives, and the slow-down of collectives and products that overlap.
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
