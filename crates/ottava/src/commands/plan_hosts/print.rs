//! Prints plans of jobs on several hosts.

use super::super::plan_verdict::duration;
use super::{DISK, FailureTables, GPUS_PER_HOST, GroupPlan, HostPlan, PublishedRow, ShardPlan};
use ottava_elastic::simulate::Spread;

impl HostPlan {
    /// Prints the plan.
    pub fn print(&self) {
        out!("\nHosts: {} with {} each\n", self.hosts, counted(self.gpus_per_host as u64, "GPU"));
        for GroupPlan { axis, ranks, hosts } in &self.groups {
            let place = if *hosts > 1 { format!("each across {hosts} hosts") } else { "each within a host".into() };
            out!("  {}: groups of {ranks} ranks, {place}", axis.as_str());
        }
        if let Some(ShardPlan { ranks, groups, hosts }) = &self.shards {
            let place = if *hosts > 1 { format!("each across {hosts} hosts") } else { "each within a host".into() };
            out!("  ZeRO: {groups} groups of {ranks} ranks, {place}");
        }
        out!("  a GPU sends {:.2} GB a step within its host", self.host_link_bytes / 1e9);
        out!("  a GPU sends {:.2} GB a step to other hosts", self.network_bytes / 1e9);
        out!("  a step takes {}", duration(self.step_seconds));
        out!("  a step has {} of exposed communication", duration(self.exposed_seconds));
        out!(
            "  with {:.0} tokens per GPU in a micro-batch, backward hides the gradient exchange between hosts",
            self.hiding_tokens
        );
        out!("\nFailures, by a model (docs/many-machines.md)\n");
        out!("  a failure every {:.1} h", self.mtbf_hours);
        out!("  {}", counted(u64::from(self.spares), "spare host"));
        out!("  a restart takes {} min", self.restart_minutes);
        out!("  a checkpoint pauses training for {}", duration(self.save_pause_seconds));
        out!(
            "  a checkpoint is complete after {}, if the shared disk takes {:.0} GB/s from all hosts",
            duration(self.save_write_seconds),
            DISK / 1e9 * self.hosts as f64
        );
        out!("  the best `checkpoint.save_steps` is {}", self.save_steps);
        out!("  checkpoints on disk: {} of the time trains new steps", percent(&self.disk.goodput));
        if let Some(goodput) = self.formula_goodput {
            out!("  checkpoints on disk, by the formula: {:.1} %", goodput * 100.0);
        }
        out!("  snapshots in the memory of hosts, `[recovery]`: {}", percent(&self.memory.goodput));
        out!("  snapshots are {} apart", counted(self.snapshot_steps, "step"));
        out!("  snapshots take {:.1} GiB of each host", self.snapshot_bytes / f64::from(1 << 30));
        out!("  in 30 days, no spare is left {:.1} times", self.disk.exhausted);
        out!("  in 30 days, both copies of a snapshot are lost {:.1} times", self.memory.copies_lost);
        if let (Some(tokens), Some(days)) = (self.tokens, self.days) {
            out!("  {tokens:.3e} tokens take {days:.1} days without failures");
            out!("  {tokens:.3e} tokens take {:.1} days with checkpoints on disk", days / self.disk.goodput.mean);
            out!("  {tokens:.3e} tokens take {:.1} days with snapshots in memory", days / self.memory.goodput.mean);
        }
    }
}

impl FailureTables {
    /// Prints the tables.
    pub fn print(&self) {
        let failures = match self.mtbf {
            None => "the failures of Llama 3 405B per GPU".to_string(),
            Some((hours, gpus)) => format!("a failure every {hours} h on {gpus} GPUs"),
        };
        out!("\nShare of the time that trains new steps, with {failures} (docs/many-machines.md)\n");
        out!(
            "  assumed: {GPUS_PER_HOST} GPUs per host, {:.0} s per step, checkpoints that pause training for {:.0} s and are complete after {:.0} s, a restart in {} min, a repair in {:.0} days\n",
            self.step_seconds,
            self.save_pause_seconds,
            self.save_write_seconds,
            self.restart_minutes,
            self.repair_days
        );
        out!(
            "  {:>6} {:>7} {:>6}  {:<22}{:<22}{:<22}{}",
            "GPUs",
            "hours",
            "spares",
            "waits",
            "shrinks",
            "spares",
            "spares and snapshots"
        );
        for row in &self.sizes {
            let columns = [&row.disk_waits, &row.disk_shrinks, &row.disk, &row.memory].map(percent);
            let [waits, shrinks, disk, memory] = columns;
            out!(
                "  {:>6} {:>7.1} {:>6}  {waits:<22}{shrinks:<22}{disk:<22}{memory}",
                row.gpus,
                row.mtbf_hours,
                row.spares
            );
        }
        out!("\nPublished runs\n");
        for PublishedRow { run, published, published_goodput, simulated } in &self.published {
            out!("  {run}");
            out!("    published: {published} ({:.1} %); simulated: {}", published_goodput * 100.0, percent(simulated));
        }
    }
}

/// Formats a number of things.
fn counted(number: u64, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

/// Formats the mean of a share with its extremes.
fn percent(spread: &Spread) -> String {
    let Spread { mean, least, most } = spread;
    format!("{:.1} % ({:.1} to {:.1})", mean * 100.0, least * 100.0, most * 100.0)
}
