//! A cost model of communication: what collectives take on links, and how much of that training does not hide. Pure functions.
//!
//! Times are in seconds, sizes in bytes, rates in bytes per second. Collectives within a node are rings; over several nodes a collective
//! has a ring between nodes on 1/n of the buffer and one within nodes of n GPUs, one after the other.

use super::communication::{CommunicationPlan, UnitPlan};
use super::memory::GPUS_PER_NODE;
use super::timeline::{Brings, Contention, Timeline};
use crate::parallel::Zero;
use ottava_tensor::comm::Sent;
use serde::Serialize;

/// A ring of links: a collective of `W` ranks takes `start + (W - 1) · hop + B · (W - 1) / (W · bandwidth)` for a buffer of `B` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Ring {
    /// Seconds to launch a collective.
    pub start: f64,
    /// Seconds from a rank to the next.
    pub hop: f64,
    /// Bytes per second that a rank sends.
    pub bandwidth: f64,
}

impl Ring {
    /// Seconds of one call over a buffer of `bytes` for `ranks` ranks; zero for one rank.
    fn seconds(&self, bytes: f64, ranks: f64) -> f64 {
        match ranks > 1.0 {
            true => self.start + (ranks - 1.0) * self.hop + bytes * (ranks - 1.0) / (ranks * self.bandwidth),
            false => 0.0,
        }
    }
}

/// The links of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Links {
    /// Gathers within a node.
    pub gather: Ring,
    /// Sums within a node.
    pub reduce: Ring,
    /// All collectives between nodes, for each GPU.
    pub between: Ring,
    /// GPUs of a node.
    pub gpus_per_node: usize,
}

impl Links {
    /// H200 with NVLink: latencies of 2 and 4, bandwidths of 4 with 256 MiB (`ottava bench comm`, docs/parallelism.md). Assumed: 8 GPUs per
    /// node, and between nodes 45 of the 50 GB/s of one NDR adapter per GPU, with the largest latency of `graph/tuning.cc` of NCCL.
    pub const H200: Links = Links {
        gather: Ring { start: 14.0e-6, hop: 1.4e-6, bandwidth: 255e9 },
        reduce: Ring { start: 12.1e-6, hop: 2.0e-6, bandwidth: 265e9 },
        between: Ring { start: 8.4e-6, hop: 14e-6, bandwidth: 45e9 },
        gpus_per_node: GPUS_PER_NODE,
    };

    /// Seconds of a collective over a buffer of `bytes` with rings `within` a node, on `ranks` ranks.
    fn collective(&self, within: &Ring, bytes: f64, ranks: usize) -> f64 {
        if ranks <= 1 || bytes == 0.0 {
            return 0.0;
        }
        let gpus = ranks.min(self.gpus_per_node.max(1));
        let nodes = ranks.div_ceil(gpus) as f64;
        let gpus = gpus as f64;
        self.between.seconds(bytes / gpus, nodes) + within.seconds(bytes, gpus)
    }

    /// Seconds of `sent.calls` equal calls, of which each of `counted` ranks sends `sent.bytes`, on `ranks` ranks. The buffers are the same
    /// on any number of ranks.
    fn seconds(&self, within: &Ring, sent: Sent, counted: usize, ranks: usize) -> f64 {
        if sent.calls == 0 || counted <= 1 {
            return 0.0;
        }
        let calls = sent.calls as f64;
        let buffer = sent.bytes as f64 / calls * counted as f64 / (counted - 1) as f64;
        calls * self.collective(within, buffer, ranks)
    }
}

/// Bytes per second that AdamW reads and writes on an H200: `optimizer` of `ottava bench train`, Llama-2-7B on two and on four.
const UPDATE: f64 = 3.86e12;

/// The share of compute that is forward: one of three products of each linear.
const FORWARD: f64 = 1.0 / 3.0;

/// A step on a number of ranks, each with the micro-batches of the plan.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// Ranks.
    pub ranks: usize,
    /// Seconds of all collectives of a step, with nothing beside them.
    pub communication_seconds: f64,
    /// What that does to a step whose compute time is known.
    pub step: Option<PredictedStep>,
}

/// The time of a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PredictedStep {
    /// Seconds of communication that no compute hides.
    pub exposed_seconds: f64,
    /// Seconds by which communication slows the compute that hides it.
    pub slowdown_seconds: f64,
    /// Seconds of the step: compute, the update, and both of these.
    pub seconds: f64,
    /// Tokens that each rank trains on per second.
    pub tokens_per_second: f64,
}

/// Predicts a step of `plan` on `ranks` ranks. `compute` is the seconds that the step takes on one GPU alone, which updates the whole model;
/// with ZeRO 1 to 3 each rank updates its share.
///
/// Units run one after the other. Gathers run one unit ahead, in the first forward of a step with ZeRO 1 and 2, where the update before
/// hides those of the first two units, and in each forward and backward with ZeRO 3. Reductions run behind the last backward with ZeRO 0
/// and 1 and behind each with ZeRO 2 and 3. Compute waits for the last ones, and with ZeRO 1 to 3 for the all-reduces of vectors and amaxes
/// at the end.
pub fn predict(
    plan: &CommunicationPlan,
    ranks: usize,
    links: &Links,
    contention: &Contention,
    compute: Option<f64>,
) -> Prediction {
    let seconds = |ring, sent| links.seconds(ring, sent, plan.ranks, ranks);
    let t = &plan.traffic;
    let gathers = seconds(&links.gather, t.all_gather + t.broadcast) + seconds(&links.gather, t.all_to_all);
    let scatters = seconds(&links.reduce, t.reduce_scatter);
    // Half of the bytes of an all-reduce are those of a reduce-scatter, half those of a gather.
    let half = Sent { bytes: t.all_reduce.bytes / 2, ..t.all_reduce };
    let all_reduces = seconds(&links.reduce, half) + seconds(&links.gather, half);
    let end = if plan.zero == Zero::Nothing { 0.0 } else { all_reduces };
    let step = compute.map(|alone| {
        let whole = (plan.update_bytes as f64 / UPDATE).min(alone);
        let (compute, update) = (alone - whole, if plan.zero == Zero::Nothing { whole } else { whole / ranks as f64 });
        let timeline = simulate(plan, ranks, links, contention, compute);
        let (exposed, slowdown) = (timeline.exposed + end, timeline.slowdown);
        let seconds = compute + update + exposed + slowdown;
        PredictedStep {
            exposed_seconds: exposed,
            slowdown_seconds: slowdown,
            seconds,
            tokens_per_second: plan.tokens as f64 / seconds,
        }
    });
    Prediction { ranks, communication_seconds: gathers + scatters + all_reduces, step }
}

/// Forward and backward of all micro-batches, whose compute takes so many seconds alone.
fn simulate(plan: &CommunicationPlan, ranks: usize, links: &Links, contention: &Contention, compute: f64) -> Timeline {
    let mut timeline = Timeline::new(*contention);
    let gather = |bytes: u64| links.collective(&links.gather, bytes as f64, ranks);
    let reduce = |unit: &UnitPlan| match (unit.codes_reduced, plan.zero) {
        // An all-to-all, and a gather of the sums.
        (true, Zero::Nothing) => 2.0 * gather(unit.reduced_bytes),
        (true, _) => gather(unit.reduced_bytes),
        (false, zero) => {
            let scatter = links.collective(&links.reduce, unit.reduced_bytes as f64, ranks);
            scatter + if zero == Zero::Nothing { gather(unit.reduced_bytes) } else { 0.0 }
        }
    };
    let start = |timeline: &mut Timeline, unit: Option<(usize, &UnitPlan)>| {
        if let Some((i, unit)) = unit.filter(|(_, unit)| unit.gathered_bytes > 0) {
            timeline.start(Brings::Weights(i), gather(unit.gathered_bytes));
        }
    };
    let each = compute / plan.micro_batches as f64;
    let units: Vec<_> = plan.units.iter().enumerate().collect();
    for pass in 0..plan.micro_batches {
        let (always, first) = (plan.zero == Zero::Weights, pass == 0);
        let in_forward = |i: usize| always || (first && i > 1);
        let order = |i: usize| units.get(i).copied().filter(|&(i, _)| in_forward(i));
        start(&mut timeline, order(0));
        for &(i, unit) in &units {
            start(&mut timeline, order(i + 1));
            timeline.wait(Brings::Weights(i));
            timeline.compute(unit.compute * each * FORWARD);
        }
        let reduces = plan.zero >= Zero::Gradients || pass + 1 == plan.micro_batches;
        let order = |i: Option<usize>| i.filter(|_| always).map(|i| units[i]);
        start(&mut timeline, order(units.len().checked_sub(1)));
        for &(i, unit) in units.iter().rev() {
            start(&mut timeline, order(i.checked_sub(1)));
            timeline.wait(Brings::Weights(i));
            timeline.compute(unit.compute * each * (1.0 - FORWARD));
            if reduces {
                timeline.start(Brings::Gradients, reduce(unit));
            }
        }
    }
    timeline.wait(Brings::Gradients);
    timeline
}

#[cfg(test)]
mod tests {
    use super::*;
    use ottava_tensor::comm::Traffic;
    use proptest::prelude::*;

    fn sent() -> impl Strategy<Value = Sent> {
        (0..200u64, 0..1u64 << 34).prop_map(|(calls, bytes)| Sent { calls, bytes: if calls == 0 { 0 } else { bytes } })
    }

    prop_compose! {
        fn plans()(
            kinds in proptest::array::uniform5(sent()),
            ranks in 2..64usize,
            units in proptest::collection::vec((0..1u64 << 30, 0..1u64 << 30, 0.0..1.0), 1..40),
            codes_reduced in proptest::bool::ANY,
            micro_batches in 1..9usize,
            zero in 0..4usize,
        ) -> CommunicationPlan {
            let [all_gather, reduce_scatter, all_reduce, all_to_all, broadcast] = kinds;
            let traffic = Traffic { all_gather, reduce_scatter, all_reduce, all_to_all, broadcast };
            let (zero, update_bytes) = (Zero::ALL[zero], 1 << 30);
            let all: f64 = units.iter().map(|(.., compute)| compute).sum::<f64>().max(1e-9);
            let unit = |(gathered_bytes, reduced_bytes, compute)| {
                UnitPlan { gathered_bytes, reduced_bytes, codes_reduced, compute: compute / all }
            };
            let units = units.into_iter().map(unit).collect();
            CommunicationPlan { ranks, units, micro_batches, zero, tokens: 4096, traffic, update_bytes }
        }
    }

    fn on_h200(plan: &CommunicationPlan, ranks: usize, compute: f64) -> (Prediction, PredictedStep) {
        let prediction = predict(plan, ranks, &Links::H200, &Contention::H200, Some(compute));
        (prediction, prediction.step.unwrap())
    }

    fn at_most(a: f64, b: f64) -> bool {
        a <= b * (1.0 + 1e-9) + 1e-15
    }

    proptest! {
        #[test]
        fn no_more_is_exposed_than_is_communicated(plan in plans(), ranks in 2..4097usize, compute in 1e-3..10.0) {
            let (all, step) = on_h200(&plan, ranks, compute);
            let (_, nothing_hides) = on_h200(&plan, ranks, 0.0);
            prop_assert!(step.exposed_seconds >= 0.0 && step.slowdown_seconds >= 0.0);
            prop_assert!(at_most(step.exposed_seconds, nothing_hides.exposed_seconds), "{all:?}");
            prop_assert!(at_most(step.slowdown_seconds, compute * (Contention::H200.products - 1.0)), "{all:?}");
            let without = predict(&plan, ranks, &Links::H200, &Contention::H200, None);
            prop_assert_eq!((without.communication_seconds, without.step), (all.communication_seconds, None));
        }

        #[test]
        fn one_rank_communicates_nothing(plan in plans(), compute in 1e-3..10.0) {
            let (all, step) = on_h200(&plan, 1, compute);
            prop_assert_eq!((all.communication_seconds, step.exposed_seconds, step.slowdown_seconds), (0.0, 0.0, 0.0));
            prop_assert_eq!(step.seconds, compute);
        }

        #[test]
        fn more_bytes_take_longer(plan in plans(), ranks in 2..4097usize, times in 1..5u64, compute in 1e-3..10.0) {
            let (all, step) = on_h200(&plan, ranks, compute);
            let mut more = plan.clone();
            for kind in [&mut more.traffic.all_gather, &mut more.traffic.reduce_scatter, &mut more.traffic.all_reduce] {
                kind.bytes *= times;
            }
            for unit in &mut more.units {
                unit.gathered_bytes *= times;
                unit.reduced_bytes *= times;
            }
            let (more, longer) = on_h200(&more, ranks, compute);
            prop_assert!(at_most(all.communication_seconds, more.communication_seconds));
            prop_assert!(at_most(step.exposed_seconds, longer.exposed_seconds));
            prop_assert!(at_most(step.seconds, longer.seconds));
        }

        #[test]
        fn slower_links_take_longer(plan in plans(), ranks in 2..4097usize, factor in 1.0..20.0, compute in 1e-3..10.0) {
            let (all, step) = on_h200(&plan, ranks, compute);
            let slower = |ring: Ring| Ring { start: ring.start * factor, hop: ring.hop * factor, ..ring };
            let Links { gather, reduce, between, gpus_per_node } = Links::H200;
            let links =
                Links { gather: slower(gather), reduce: slower(reduce), between: slower(between), gpus_per_node };
            let more = predict(&plan, ranks, &links, &Contention::H200, Some(compute));
            prop_assert!(at_most(all.communication_seconds, more.communication_seconds));
            prop_assert!(at_most(step.exposed_seconds, more.step.unwrap().exposed_seconds));
            prop_assert!(at_most(step.seconds, more.step.unwrap().seconds));
        }
    }

    /// By hand, without latency: 16 ranks in two nodes gather 1.6 GB, 0.2 GB of it between nodes for each GPU.
    #[test]
    fn nodes_exchange_a_share_for_each_gpu() {
        let ring = |bandwidth| Ring { start: 0.0, hop: 0.0, bandwidth };
        let links = Links { gather: ring(200e9), reduce: ring(100e9), between: ring(50e9), gpus_per_node: 8 };
        let sent = Sent { calls: 4, bytes: 4 * 1_500_000_000 };
        let seconds = links.seconds(&links.gather, sent, 16, 16);
        assert!((seconds - 4.0 * (0.1 / 50.0 + 1.4 / 200.0)).abs() < 1e-12, "{seconds}");
    }
}
