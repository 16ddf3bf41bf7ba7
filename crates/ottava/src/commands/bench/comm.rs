//! `ottava bench comm`.

use super::messages::{MessageRow, time_messages};
use crate::output::print_json;
use crate::ranks::{Job, RankArgs, Role};
use clap::Args;
use ottava_common::{Error, Result};
use ottava_settings::{DeviceChoice, formats};
use ottava_tensor::Device;
use ottava_tensor::bench::{CollectiveRow, CommBench, CommReport};
use ottava_tensor::comm::Group;
use serde::Serialize;
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
    /// Measure the links within a host and between hosts apart, and messages between two ranks. The ranks are divided evenly among N hosts, in the order of
    /// their numbers.
    #[arg(long, value_name = "N", value_parser = crate::commands::count)]
    hosts: Option<usize>,
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
        }
        let measured = match self.hosts {
            None => json!({"device": device.to_string(), "report": measure(&bench, &comm, &device, prints)?}),
            Some(hosts) => {
                let tiers = measure_tiers(&bench, tiers(&comm, hosts)?, &device, prints)?;
                json!({"device": device.to_string(), "hosts": hosts, "tiers": tiers})
            }
        };
        comm.finish()?;
        if leads {
            processes.wait()?;
            if self.json {
                print_json(&measured);
            }
        }
        Ok(())
    }
}

/// Measures the collectives of `group`, and prints them if `prints`.
fn measure(bench: &CommBench, group: &Group, device: &Device, prints: bool) -> Result<CommReport> {
    if prints && group.size() > 1 {
        print_columns();
    }
    let report = bench.run(group, device, |row| {
        if prints {
            print_collective(row);
        }
    })?;
    if prints {
        print_comm(&report);
    }
    Ok(report)
}

/// Measures messages and collectives of each tier, and prints them if `prints`.
fn measure_tiers(
    bench: &CommBench,
    tiers: Vec<(&'static str, Group)>,
    device: &Device,
    prints: bool,
) -> Result<Vec<MeasuredTier>> {
    let of_tier = |(tier, group): (&'static str, Group)| -> Result<MeasuredTier> {
        let messages = time_messages(&group, device, &bench.bytes)?;
        if prints {
            out!("\n{tier}: groups of {} ranks, all at the same time", group.size());
            out!("{:<16} {:<10} {:>10} {:>12} {:>10}", "message", "of", "MiB", "µs", "GB/s");
            messages.iter().for_each(print_message);
            out!("");
        }
        let report = measure(bench, &group, device, prints)?;
        Ok(MeasuredTier { tier, messages, report })
    };
    tiers.into_iter().map(of_tier).collect()
}

/// The links of a tier, as rank 0 measured them.
#[derive(Serialize)]
struct MeasuredTier {
    tier: &'static str,
    messages: Vec<MessageRow>,
    report: CommReport,
}

/// Returns the tiers of `hosts` hosts that have links, and the group of this rank in each: the ranks of its host, and the ranks with its number on all hosts.
///
/// Errors if the ranks cannot be divided evenly, and if there is one rank.
fn tiers(comm: &Group, hosts: usize) -> Result<Vec<(&'static str, Group)>> {
    let (rank, ranks) = (comm.rank(), comm.size());
    if !ranks.is_multiple_of(hosts) || ranks == 1 {
        return Err(Error::Config(format!(
            "--hosts is {hosts}, and the number of ranks is {ranks}; start 2 or more ranks, a multiple of the number of hosts"
        )));
    }
    let of_host = ranks / hosts;
    let within = ("within a host", comm.split("within a host", rank / of_host, rank)?);
    let across = ("between hosts", comm.split("between hosts", rank % of_host, rank)?);
    Ok([within, across].into_iter().filter(|(_, group)| group.size() > 1).collect())
}

fn print_columns() {
    out!("{:<16} {:<10} {:>10} {:>12} {:>10}", "collective", "of", "MiB", "µs", "bus GB/s");
}

fn print_message(row: &MessageRow) {
    print_row("to the next rank", "bytes", row.bytes, row.milliseconds, row.bytes_per_second);
}

fn print_row(what: &str, of: &str, bytes: usize, milliseconds: f64, rate: f64) {
    let mib = bytes as f64 / f64::from(1 << 20);
    out!("{what:<16} {of:<10} {mib:>10.3} {:>12.1} {:>10.1}", milliseconds * 1e3, rate / 1e9);
}

fn print_collective(row: &CollectiveRow) {
    // Collectives that only move data move bytes, whatever the type.
    let of = if row.kind.dtype().size() == 1 { "bytes" } else { row.kind.dtype().name() };
    print_row(row.kind.as_str(), of, row.bytes, row.milliseconds, row.bus_bytes_per_second);
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
