//! A cost model of communication: the time of collectives on links, and the part of it that compute does not hide. All functions are pure.
//!
//! Times are in seconds, sizes in bytes, rates in bytes per second. A collective within a node is a ring. A collective over several nodes of n GPUs
//! is a ring between nodes on 1/n of the buffer, followed by a ring within each node.

use super::communication::{CommunicationPlan, UnitPlan};
use super::timeline::{Brings, Collective, Timeline};
use ottava_parallel::Zero;
use ottava_tensor::comm::{GPUS_PER_NODE, Pattern, Sent, Traffic};
use serde::Serialize;

/// A ring of links. A collective of `W` ranks on a buffer of `B` bytes takes `start + (W - 1) · hop + B · (W - 1) / (W · bandwidth)`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Ring {
    /// The seconds to launch a collective.
    pub start: f64,
    /// The seconds from a rank to the next rank.
    pub hop: f64,
    /// The bytes per second that a rank sends.
    pub bandwidth: f64,
}

impl Ring {
    /// Returns the seconds of one call over a buffer of `bytes` for `ranks` ranks. Returns zero for one rank.
    fn seconds(&self, bytes: f64, ranks: f64) -> f64 {
        match ranks > 1.0 {
            true => self.start + (ranks - 1.0) * self.hop + bytes * (ranks - 1.0) / (ranks * self.bandwidth),
            false => 0.0,
        }
    }
}

/// A kind of collective: its links, and its slowdown when it overlaps with products.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Kind {
    /// The ring of the collective without overlap.
    pub ring: Ring,
    /// The time when the collective overlaps with products, relative to its time alone.
    pub beside_products: f64,
}

/// The links within a node.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct NodeLinks {
    /// The links of gathers.
    pub gather: Kind,
    /// The links of sums.
    pub reduce: Kind,
    /// The links of exchanges of FP8 gradients.
    pub exchange: Kind,
    /// The time of a product that overlaps with collectives, relative to its time alone.
    pub products: f64,
}

/// The links of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Links {
    /// The links within a node.
    pub within: NodeLinks,
    /// The links between nodes for each GPU, used by all collectives.
    pub between: Ring,
    /// The number of GPUs of a node.
    pub gpus_per_node: usize,
}

impl Links {
    /// The links of H200 GPUs with NVLink, where copy engines move the data. Latencies and bandwidths were measured on two GPUs (`ottava bench comm`,
    /// docs/parallelism.md). More GPUs are assumed to have the same values and no contention between copies. A node has 8 GPUs. Between nodes, each
    /// GPU is assumed to use 45 of the 50 GB/s of one NDR adapter, with the largest latency of `graph/tuning.cc` of NCCL.
    pub const H200: Links = {
        const fn kind([start, hop, bandwidth]: [f64; 3]) -> Kind {
            Kind { ring: Ring { start, hop, bandwidth }, beside_products: 1.0 }
        }
        let within = NodeLinks {
            gather: kind([18.6e-6, 1.4e-6, 316e9]),
            reduce: kind([29.2e-6, 2.0e-6, 262e9]),
            exchange: kind([30.1e-6, 2.0e-6, 276e9]),
            products: 1.04,
        };
        Links { within, between: Ring { start: 8.4e-6, hop: 14e-6, bandwidth: 45e9 }, gpus_per_node: GPUS_PER_NODE }
    };

    /// Returns the seconds of a collective over a buffer of `bytes` on `ranks` ranks. `kind` is its kind within a node.
    fn collective(&self, kind: &Kind, bytes: f64, ranks: usize) -> f64 {
        if ranks <= 1 || bytes == 0.0 {
            return 0.0;
        }
        let gpus = ranks.min(self.gpus_per_node.max(1));
        let nodes = ranks.div_ceil(gpus) as f64;
        let gpus = gpus as f64;
        self.between.seconds(bytes / gpus, nodes) + kind.ring.seconds(bytes, gpus)
    }

    /// Returns the links of the ranks that store the same slices, one rank of each of `groups` groups of `shard` consecutive ranks.
    fn of_replicas(&self, shard: usize, groups: usize) -> Links {
        Links { gpus_per_node: (self.gpus_per_node / shard.max(1)).clamp(1, groups.max(1)), ..*self }
    }

    /// Returns the seconds of the calls of a rank that sends `sent` in a job of `ranks` ranks. Collectives are within a node, and messages may be
    /// between nodes.
    fn direct(&self, sent: Traffic, ranks: usize) -> f64 {
        let within = &self.within;
        let of = |ring: Ring, sent: Sent| sent.calls as f64 * ring.start + sent.bytes as f64 / ring.bandwidth;
        // Messages run along the pipeline axis, whose ranks are farthest apart.
        let messages = if ranks > self.gpus_per_node { self.between } else { within.exchange.ring };
        of(within.gather.ring, sent.of(Pattern::Gather))
            + of(within.exchange.ring, sent.of(Pattern::Exchange))
            + of(within.reduce.ring, sent.of(Pattern::Reduce) + sent.of(Pattern::ReduceAndGather))
            + of(messages, sent.of(Pattern::Message))
    }

    /// Returns the seconds for which the layers of a rank wait for exchanges of activations in a job of `ranks` ranks. All ranks of a layer are in
    /// one node.
    fn of_layers(&self, plan: &CommunicationPlan, ranks: usize) -> f64 {
        let sums = Traffic { all_to_all: plan.of_layers.send, ..Traffic::default() };
        let others = Traffic { send: Sent::default(), ..plan.of_layers };
        let exposed = if plan.hides_sums { EXPOSED_SUMS } else { 1.0 };
        self.direct(others, ranks) + exposed * self.direct(sums, ranks)
    }

    /// Returns the seconds of `sent.calls` equal calls on `ranks` ranks. `sent.bytes` are the bytes that each rank sends if `counted` ranks make
    /// these calls. The sizes of the buffers do not depend on the number of ranks.
    fn seconds(&self, kind: &Kind, sent: Sent, counted: usize, ranks: usize) -> f64 {
        if sent.calls == 0 || counted <= 1 {
            return 0.0;
        }
        let calls = sent.calls as f64;
        let buffer = sent.bytes as f64 / calls * counted as f64 / (counted - 1) as f64;
        calls * self.collective(kind, buffer, ranks)
    }
}

/// The bytes per second that AdamW reads and writes on an H200: `optimizer` of `ottava bench train` with Llama-2-7B on two and on four GPUs.
const UPDATE: f64 = 3.86e12;

/// The bytes of FP8 codes that an H200 transposes per second. It reads these bytes and writes as many (`transpose, FP8` of `ottava bench kernels`).
const TRANSPOSE: f64 = 3.48e12 / 2.0;

/// The share of the time of sums over tensor ranks that makes a step longer: products do not hide it, or become slower by it. With Llama-2-7B on two
/// H200, the sums took 33 ms, 4 ms of them were exposed, and the step was 16 ms longer than without sums.
const EXPOSED_SUMS: f64 = 0.5;

/// The share of forward in the compute: one of three products of each linear.
const FORWARD: f64 = 1.0 / 3.0;

/// A predicted step on a number of ranks. Each rank has the micro-batches of the plan.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// The number of ranks.
    pub ranks: usize,
    /// The seconds of all collectives of a step, without overlap.
    pub communication_seconds: f64,
    /// The predicted step; `None` if the compute time is not known.
    pub step: Option<PredictedStep>,
}

/// The time of a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PredictedStep {
    /// The seconds of communication that compute does not hide.
    pub exposed_seconds: f64,
    /// The seconds for which ranks of a pipeline wait for each other.
    pub idle_seconds: f64,
    /// The seconds by which communication slows the compute that hides it.
    pub slowdown_seconds: f64,
    /// The seconds of the step: compute, the update, transposes of gathered codes, and the three times above.
    pub seconds: f64,
    /// The number of tokens per second on which each rank trains.
    pub tokens_per_second: f64,
}

/// The properties of a pipeline that the cost model needs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PipelineCost {
    /// The idle time of ranks, divided by their compute time.
    pub bubble: f64,
    /// The time of the most expensive stage, divided by the mean of the stages.
    pub imbalance: f64,
}

impl PipelineCost {
    /// The properties without a pipeline.
    pub const NONE: PipelineCost = PipelineCost { bubble: 0.0, imbalance: 1.0 };
}

impl PredictedStep {
    /// Returns a step of `tokens` that takes `seconds` on one rank, without communication.
    pub fn alone(seconds: f64, tokens: f64) -> PredictedStep {
        let (exposed_seconds, idle_seconds, slowdown_seconds) = (0.0, 0.0, 0.0);
        PredictedStep { exposed_seconds, idle_seconds, slowdown_seconds, seconds, tokens_per_second: tokens / seconds }
    }
}

/// Predicts a step of `plan` on `ranks` ranks. The number of ranks that divide the model is as in the plan, and the other ranks divide tokens.
/// `compute` is the seconds that one GPU alone takes for the tokens of a rank and for the update of the whole model. The ranks that divide the model
/// divide it evenly. With ZeRO 1 to 3, each rank updates its share.
///
/// Units run one after the other, and communication overlaps with them as follows.
/// * Gathers run one unit ahead of compute. With ZeRO 1 and 2, units are gathered in the first forward of a step, and the preceding update hides the
///   gathers of the first two units. With ZeRO 3 and for offloaded weights, units are gathered in each forward and each backward.
/// * Codes are transposed once for each gather that no other gather follows before backward.
/// * Reductions overlap with the last backward with ZeRO 0 and 1, and with each backward with ZeRO 2 and 3. Compute waits for the last reductions.
/// * With shard groups (`parallel.zero_shard_size`), gathers and reductions are within a group, and the last backward also starts the sums of slices
///   over groups. More ranks are more groups.
/// * With ZeRO 1 to 3, compute waits for the all-reduces of vectors and amaxes at the end.
/// * Compute waits for exchanges of activations and for the messages of a pipeline.
pub fn predict(
    plan: &CommunicationPlan,
    pipeline: PipelineCost,
    ranks: usize,
    links: &Links,
    compute: Option<f64>,
) -> Prediction {
    let parts = (plan.ranks / plan.sharing.max(1)).max(1);
    let (all, ranks) = (ranks, (ranks / parts).max(1));
    let shards = Shards::new(plan, ranks, links);
    let seconds = |kind, sent| links.seconds(kind, sent, plan.shard, shards.size);
    let (t, within) = (&(plan.traffic - plan.of_layers - plan.of_replicas), &links.within);
    let waits = if all > 1 { links.of_layers(plan, all) } else { 0.0 };
    let messages = if all > 1 { links.direct(Traffic { send: t.send, ..Traffic::default() }, all) } else { 0.0 };
    let exchanges = seconds(&within.exchange, t.of(Pattern::Exchange));
    let gathers = seconds(&within.gather, t.of(Pattern::Gather)) + exchanges;
    let scatters = seconds(&within.reduce, t.of(Pattern::Reduce));
    let both = t.of(Pattern::ReduceAndGather);
    let half = Sent { bytes: both.bytes / 2, ..both };
    let of_all = |kind, sent| links.seconds(kind, sent, plan.sharing, ranks);
    let all_reduces = of_all(&within.reduce, half) + of_all(&within.gather, half);
    let sums = shards.seconds(plan, within);
    let divides = plan.zero > Zero::Nothing && ranks > 1;
    let step = compute.map(|alone| {
        let alone = alone / parts as f64;
        // A single GPU writes codes and their transposes in its update.
        let codes: u64 = plan.units.iter().map(|unit| unit.transposed_bytes).sum();
        let whole = ((plan.update_bytes + 2 * codes) as f64 / UPDATE).min(alone);
        let update = match divides {
            true => (plan.update_bytes + codes) as f64 / UPDATE / shards.size as f64,
            false => whole,
        };
        let timeline = simulate(plan, &shards, links, alone - whole);
        let (end, slowdown) = (if divides { all_reduces } else { 0.0 }, timeline.slowdown);
        let exposed = timeline.exposed + end + waits + messages;
        let busy = timeline.computed + waits;
        let idle = busy * ((1.0 + pipeline.bubble) * pipeline.imbalance - 1.0);
        let seconds = timeline.computed + update + exposed + slowdown + idle;
        PredictedStep {
            exposed_seconds: exposed,
            idle_seconds: idle,
            slowdown_seconds: slowdown,
            seconds,
            tokens_per_second: plan.tokens as f64 / seconds,
        }
    });
    let communication_seconds = gathers + scatters + all_reduces + sums + waits + messages;
    Prediction { ranks: all, communication_seconds, step }
}

/// The shard groups of a job: ranks that divide parameters, and the groups that store the same slices.
struct Shards {
    /// The number of ranks of a group.
    size: usize,
    /// The number of groups.
    groups: usize,
    /// The links between groups.
    links: Links,
}

impl Shards {
    /// Returns the groups of a job with `ranks` ranks of data x context. Their size is as in the plan, if the plan has several groups.
    fn new(plan: &CommunicationPlan, ranks: usize, links: &Links) -> Shards {
        let size = if plan.shard == plan.sharing { ranks } else { plan.shard.min(ranks) };
        let groups = ranks.div_ceil(size.max(1));
        Shards { size, groups, links: links.of_replicas(size, groups) }
    }

    /// Returns the seconds of the calls between groups.
    fn seconds(&self, plan: &CommunicationPlan, within: &NodeLinks) -> f64 {
        let counted = plan.sharing / plan.shard.max(1);
        let of = |kind, sent| self.links.seconds(kind, sent, counted, self.groups);
        let both = plan.of_replicas.of(Pattern::ReduceAndGather);
        let half = Sent { bytes: both.bytes / 2, ..both };
        of(&within.reduce, half) + of(&within.gather, half) + of(&within.gather, plan.of_replicas.of(Pattern::Gather))
    }
}

/// Simulates forward and backward of all micro-batches. Their compute takes `compute` seconds without overlap.
fn simulate(plan: &CommunicationPlan, shards: &Shards, links: &Links, compute: f64) -> Timeline {
    let (within, ranks) = (&links.within, shards.size);
    let mut timeline = Timeline::new(within.products);
    let of = |kind: &Kind, bytes: u64| {
        let seconds = links.collective(kind, bytes as f64, ranks);
        Collective { seconds, beside_products: kind.beside_products }
    };
    let between = |kind: &Kind, bytes: u64| {
        let seconds = shards.links.collective(kind, bytes as f64, shards.groups);
        Collective { seconds, beside_products: kind.beside_products }
    };
    let reduce = |timeline: &mut Timeline, unit: &UnitPlan, is_last: bool| {
        let kind = if unit.codes_reduced { &within.exchange } else { &within.reduce };
        timeline.start(Brings::Gradients, of(kind, unit.reduced_bytes));
        if plan.zero == Zero::Nothing {
            timeline.start(Brings::Gradients, of(&within.gather, unit.reduced_bytes));
        }
        if is_last && shards.groups > 1 {
            timeline.start(Brings::Gradients, between(&within.reduce, unit.slice_bytes));
            timeline.start(Brings::Gradients, between(&within.gather, unit.slice_bytes));
        }
    };
    let start = |timeline: &mut Timeline, unit: Option<(usize, &UnitPlan)>| {
        if let Some((i, unit)) = unit.filter(|(_, unit)| unit.gathered_bytes > 0) {
            timeline.start(Brings::Weights(i), of(&within.gather, unit.gathered_bytes));
        }
    };
    let transpose = |unit: &UnitPlan| if ranks > 1 { unit.transposed_bytes as f64 / TRANSPOSE } else { 0.0 };
    // A rank of a pipeline has only some of the units. It has no units if it shares nothing.
    let share: f64 = plan.units.iter().map(|unit| unit.compute).sum();
    if share == 0.0 {
        timeline.compute(compute);
        return timeline;
    }
    let each = compute / plan.micro_batches as f64 / share;
    let units: Vec<_> = plan.units.iter().enumerate().collect();
    for pass in 0..plan.micro_batches {
        let first = pass == 0;
        let in_forward = |i: usize, unit: &UnitPlan| unit.gathers_in_each_pass || (first && i > 1);
        let order = |i: usize| units.get(i).copied().filter(|&(i, unit)| in_forward(i, unit));
        start(&mut timeline, order(0));
        for &(i, unit) in &units {
            start(&mut timeline, order(i + 1));
            timeline.wait(Brings::Weights(i));
            let transposes = if first && !unit.gathers_in_each_pass { transpose(unit) } else { 0.0 };
            timeline.compute(unit.compute * each * FORWARD + transposes);
        }
        let reduces = plan.zero >= Zero::Gradients || pass + 1 == plan.micro_batches;
        let order = |i: Option<usize>| i.map(|i| units[i]).filter(|(_, unit)| unit.gathers_in_each_pass);
        start(&mut timeline, order(units.len().checked_sub(1)));
        for &(i, unit) in units.iter().rev() {
            start(&mut timeline, order(i.checked_sub(1)));
            timeline.wait(Brings::Weights(i));
            let transposes = if unit.gathers_in_each_pass { transpose(unit) } else { 0.0 };
            timeline.compute(unit.compute * each * (1.0 - FORWARD) + transposes);
            if reduces {
                reduce(&mut timeline, unit, pass + 1 == plan.micro_batches);
            }
        }
    }
    timeline.wait(Brings::Gradients);
    timeline
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sent() -> impl Strategy<Value = Sent> {
        (0..200u64, 0..1u64 << 34).prop_map(|(calls, bytes)| Sent { calls, bytes: if calls == 0 { 0 } else { bytes } })
    }

    prop_compose! {
        fn plans()(
            kinds in proptest::array::uniform5(sent()),
            ranks in 2..64usize,
            units in proptest::collection::vec((0..1u64 << 30, 0..1u64 << 30, proptest::bool::ANY, 0.0..1.0), 1..40),
            [codes_gathered, codes_reduced] in proptest::array::uniform2(proptest::bool::ANY),
            micro_batches in 1..9usize,
            zero in 0..4usize,
        ) -> CommunicationPlan {
            let [all_gather, reduce_scatter, all_reduce, all_to_all, broadcast] = kinds;
            let traffic = Traffic { all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, ..Traffic::default() };
            let (zero, update_bytes) = (Zero::ALL[zero], 1 << 30);
            let all: f64 = units.iter().map(|(.., compute)| compute).sum::<f64>().max(1e-9);
            let unit = |(gathered_bytes, reduced_bytes, gathers_in_each_pass, compute)| {
                let transposed_bytes = if codes_gathered { gathered_bytes } else { 0 };
                let compute = compute / all;
                UnitPlan { gathered_bytes, gathers_in_each_pass, transposed_bytes, reduced_bytes, codes_reduced, slice_bytes: 0, compute }
            };
            let units = units.into_iter().map(unit).collect();
            let (sharing, of_layers) = (ranks, Traffic::default());
            let hides_sums = false;
            CommunicationPlan { ranks, sharing, shard: sharing, units, micro_batches, zero, tokens: 4096, traffic, of_layers, of_replicas: of_layers, hides_sums, update_bytes }
        }
    }

    fn on_h200(plan: &CommunicationPlan, ranks: usize, compute: f64) -> (Prediction, PredictedStep) {
        let prediction = predict(plan, PipelineCost::NONE, ranks, &Links::H200, Some(compute));
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
            let computed = step.seconds - step.exposed_seconds - step.slowdown_seconds;
            let most = computed * (Links::H200.within.products - 1.0);
            prop_assert!(at_most(step.slowdown_seconds, most), "{all:?}");
            let without = predict(&plan, PipelineCost::NONE, ranks, &Links::H200, None);
            prop_assert_eq!((without.communication_seconds, without.step), (all.communication_seconds, None));
        }

        #[test]
        fn one_rank_communicates_nothing(plan in plans(), compute in 1e-3..10.0) {
            let (all, step) = on_h200(&plan, 1, compute);
            prop_assert_eq!((all.communication_seconds, step.exposed_seconds, step.slowdown_seconds), (0.0, 0.0, 0.0));
            // Shares of up to 39 units in up to 8 micro-batches are added in F64: some hundred roundings, each of 2⁻⁵³ of the sum.
            prop_assert!((step.seconds - compute).abs() <= 1e-9 * compute, "{} s", step.seconds);
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
            let kind = |kind: Kind| Kind { ring: slower(kind.ring), ..kind };
            let node = |of: NodeLinks| {
                let (gather, reduce, exchange) = (kind(of.gather), kind(of.reduce), kind(of.exchange));
                NodeLinks { gather, reduce, exchange, ..of }
            };
            let Links { within, between, gpus_per_node } = Links::H200;
            let links = Links { within: node(within), between: slower(between), gpus_per_node };
            let more = predict(&plan, PipelineCost::NONE, ranks, &links, Some(compute));
            prop_assert!(at_most(all.communication_seconds, more.communication_seconds));
            prop_assert!(at_most(step.exposed_seconds, more.step.unwrap().exposed_seconds));
            prop_assert!(at_most(step.seconds, more.step.unwrap().seconds));
        }
    }

    /// Computed by hand, without latency, for two data ranks, two tensor ranks and two stages. Each GPU computes a quarter of the model. Layers send
    /// 2.2 GB, and messages 1.5 GB.
    #[test]
    fn parts_of_a_model_wait_for_each_other() {
        let ring = |bandwidth| Ring { start: 0.0, hop: 0.0, bandwidth };
        let kind = |bandwidth| Kind { ring: ring(bandwidth), beside_products: 1.0 };
        let node = NodeLinks { gather: kind(220e9), reduce: kind(200e9), exchange: kind(150e9), products: 1.0 };
        let links = Links { within: node, between: ring(50e9), gpus_per_node: 8 };
        let unit = UnitPlan {
            gathered_bytes: 0,
            gathers_in_each_pass: false,
            transposed_bytes: 0,
            reduced_bytes: 0,
            codes_reduced: false,
            slice_bytes: 0,
            compute: 1.0,
        };
        let sent = |bytes| Sent { calls: 1, bytes };
        let of_layers = Traffic { all_gather: sent(2_200_000_000), ..Traffic::default() };
        let traffic = Traffic { send: sent(1_500_000_000), ..of_layers };
        let plan = CommunicationPlan {
            ranks: 8,
            sharing: 2,
            shard: 2,
            zero: Zero::Nothing,
            units: vec![unit],
            micro_batches: 4,
            tokens: 4096,
            traffic,
            of_layers,
            of_replicas: Traffic::default(),
            hides_sums: true,
            update_bytes: 0,
        };
        let pipeline = PipelineCost { bubble: 0.25, imbalance: 1.2 };
        let step = |ranks| predict(&plan, pipeline, ranks, &links, Some(0.4)).step.unwrap();
        // Both sides add a few numbers below 1 in F64, so they differ by some units of 2⁻⁵³.
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a}, expected {b}");
        close(step(8).exposed_seconds, 0.01 + 0.01);
        close(step(8).idle_seconds, (0.1 + 0.01) * (1.25 * 1.2 - 1.0));
        close(step(8).seconds, 0.1 + 0.02 + 0.055);
        // More data ranks do not change the communication within a copy of the model.
        close(step(8).seconds, step(4).seconds);
        assert_eq!(predict(&plan, PipelineCost::NONE, 8, &links, Some(0.4)).step.unwrap().idle_seconds, 0.0);
        // Products hide half of the time of sums over tensor ranks.
        let exposed = |hides_sums| {
            let of_layers = Traffic { send: sent(2_000_000_000), ..plan.of_layers };
            links.of_layers(&CommunicationPlan { of_layers, hides_sums, ..plan.clone() }, 8)
        };
        let sums = Traffic { all_to_all: sent(2_000_000_000), ..Traffic::default() };
        close(exposed(false) - exposed(true), 0.5 * links.direct(sums, 8));
    }

    /// Computed by hand, without latency: two nodes of eight ranks. A node reduces and gathers 1.6 GB, and each GPU then sums its slice of 0.2 GB with
    /// the other node. More nodes change only the sum.
    #[test]
    fn shard_groups_within_nodes_send_only_slices_between_nodes() {
        let ring = |bandwidth| Ring { start: 0.0, hop: 0.0, bandwidth };
        let kind = |bandwidth| Kind { ring: ring(bandwidth), beside_products: 1.0 };
        let node = NodeLinks { gather: kind(200e9), reduce: kind(100e9), exchange: kind(150e9), products: 1.0 };
        let links = Links { within: node, between: ring(50e9), gpus_per_node: 8 };
        let unit = UnitPlan {
            gathered_bytes: 1_600_000_000,
            gathers_in_each_pass: true,
            transposed_bytes: 0,
            reduced_bytes: 1_600_000_000,
            codes_reduced: false,
            slice_bytes: 200_000_000,
            compute: 1.0,
        };
        let sent = |bytes| Sent { calls: 1, bytes };
        let of_replicas = Traffic { all_reduce: sent(200_000_000), ..Traffic::default() };
        let (all_gather, reduce_scatter) = (sent(1_400_000_000), sent(1_400_000_000));
        let plan = CommunicationPlan {
            ranks: 16,
            sharing: 16,
            shard: 8,
            zero: Zero::Weights,
            units: vec![unit],
            micro_batches: 1,
            tokens: 4096,
            traffic: Traffic { all_gather, reduce_scatter, ..of_replicas },
            of_layers: Traffic::default(),
            of_replicas,
            hides_sums: false,
            update_bytes: 0,
        };
        // Both sides add a few numbers below 1 in F64.
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a}, expected {b}");
        let within = 1.4 / 200.0 + 1.4 / 100.0;
        let of = |ranks| predict(&plan, PipelineCost::NONE, ranks, &links, Some(0.0));
        close(of(16).communication_seconds, within + 2.0 * 0.1 / 50.0);
        close(of(32).communication_seconds, within + 2.0 * 0.15 / 50.0);
        // Forward and backward gather the unit.
        close(of(16).step.unwrap().exposed_seconds, within + 1.4 / 200.0 + 2.0 * 0.1 / 50.0);
        close(of(8).step.unwrap().exposed_seconds, within + 1.4 / 200.0);
    }

    /// Computed by hand, without latency: 16 ranks in two nodes gather 1.6 GB. Each GPU exchanges 0.2 GB of it between nodes.
    #[test]
    fn nodes_exchange_a_share_for_each_gpu() {
        let ring = |bandwidth| Ring { start: 0.0, hop: 0.0, bandwidth };
        let links = Links { between: ring(50e9), gpus_per_node: 8, ..Links::H200 };
        let gather = Kind { ring: ring(200e9), beside_products: 1.0 };
        let sent = Sent { calls: 4, bytes: 4 * 1_500_000_000 };
        let seconds = links.seconds(&gather, sent, 16, 16);
        assert!((seconds - 4.0 * (0.1 / 50.0 + 1.4 / 200.0)).abs() < 1e-12, "{seconds}");
    }
}
