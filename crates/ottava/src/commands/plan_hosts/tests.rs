//! Groups of ranks on hosts, and bytes on each link.

use super::*;
use ottava_tensor::comm::{Sent, Traffic};

fn hosts_of(shape: MeshShape, gpus_per_host: usize) -> Vec<(&'static str, usize)> {
    let placement = Placement::new(&shape, shape.data * shape.context, gpus_per_host);
    placement.groups.iter().map(|group| (group.axis.as_str(), group.hosts)).collect()
}

#[test]
fn groups_are_placed_by_the_order_of_ranks() {
    let shape = MeshShape { data: 32, context: 1, tensor: 4, pipeline: 8, expert: 1 };
    assert_eq!(hosts_of(shape, 8), [("data", 16), ("tensor", 1), ("pipeline", 8)]);
    let shape = MeshShape { data: 16, context: 2, tensor: 8, pipeline: 1, expert: 4 };
    assert_eq!(hosts_of(shape, 8), [("data", 16), ("context", 2), ("tensor", 1), ("expert", 4)]);
    assert_eq!(hosts_of(MeshShape::of_data(8), 8), [("data", 1)]);
    // Ranks 4 and 5 are on the first of two hosts, and ranks 6 and 7 on the second.
    let shape = MeshShape { data: 3, context: 1, tensor: 4, pipeline: 1, expert: 1 };
    assert_eq!(hosts_of(shape, 6), [("data", 2), ("tensor", 2)]);
}

#[test]
fn gradients_cross_the_network_once_with_zero_and_twice_without() {
    let unit = UnitPlan {
        gathered_bytes: 0,
        gathers_in_each_pass: false,
        transposed_bytes: 0,
        reduced_bytes: 64_000,
        codes_reduced: false,
        slice_bytes: 0,
        compute: 1.0,
    };
    let sent = |zero| {
        let plan = CommunicationPlan {
            ranks: 64,
            sharing: 64,
            shard: 64,
            zero,
            units: vec![unit],
            micro_batches: 1,
            tokens: 4096,
            traffic: Traffic::default(),
            of_layers: Traffic::default(),
            of_replicas: Traffic::default(),
            hides_sums: false,
            update_bytes: 0,
        };
        Placement::new(&MeshShape::of_data(64), 64, 8).gradients_on_network(&plan)
    };
    // 8,000 bytes of each GPU are reduced among eight hosts.
    assert_eq!(Zero::ALL.map(sent), [14_000.0, 7_000.0, 7_000.0, 7_000.0]);
}

/// Llama-2-7B on eight hosts with ZeRO 0 and gradients in BF16: 2 · 2P bytes · 7/8 within a host, and 2 · 2P/8 · 7/8 between hosts.
#[test]
fn gradients_cross_hosts_once_for_each_gpu() {
    let parameters = 6.7e9;
    let buffer = 2.0 * parameters;
    let all_reduce = Sent { calls: 1, bytes: (2.0 * buffer * 63.0 / 64.0) as u64 };
    let plan = CommunicationPlan {
        ranks: 64,
        sharing: 64,
        shard: 64,
        zero: Zero::Nothing,
        units: Vec::new(),
        micro_batches: 1,
        tokens: 4096,
        traffic: Traffic { all_reduce, ..Traffic::default() },
        of_layers: Traffic::default(),
        of_replicas: Traffic::default(),
        hides_sums: false,
        update_bytes: 0,
    };
    let (within, between) = Placement::new(&MeshShape::of_data(64), 64, 8).bytes(Some(&plan));
    assert!((within / (2.0 * buffer * 7.0 / 8.0) - 1.0).abs() < 1e-6, "{within}");
    assert!((between / (2.0 * buffer / 8.0 * 7.0 / 8.0) - 1.0).abs() < 1e-6, "{between}");
    // 78 ms on a network with 45 GB/s per GPU, for many hosts.
    let (_, between) = Placement::new(&MeshShape::of_data(64), 64, 1).bytes(Some(&plan));
    assert!((between / (2.0 * buffer * 63.0 / 64.0) - 1.0).abs() < 1e-6, "{between}");
}

/// Stage 3 in groups of eight ranks, on eight hosts of eight GPUs: weights and gradients of 64,000 bytes stay within a host, and each GPU sums its slice
/// of 8,000 bytes with seven other hosts.
#[test]
fn shard_groups_send_only_slices_to_other_hosts() {
    let unit = UnitPlan {
        gathered_bytes: 64_000,
        gathers_in_each_pass: true,
        transposed_bytes: 0,
        reduced_bytes: 64_000,
        codes_reduced: false,
        slice_bytes: 8_000,
        compute: 1.0,
    };
    let sent = |bytes| Sent { calls: 1, bytes };
    let of_replicas = Traffic { all_reduce: sent(14_000), ..Traffic::default() };
    let (all_gather, reduce_scatter) = (sent(2 * 56_000), sent(56_000));
    let plan = CommunicationPlan {
        ranks: 64,
        sharing: 64,
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
    let on_hosts_of = |gpus: usize| Placement::new(&MeshShape::of_data(64), 8, gpus);
    let placement = on_hosts_of(8);
    let shards = placement.shards.as_ref().map(|shards| (shards.ranks, shards.groups, shards.hosts));
    assert_eq!((shards, placement.bytes(Some(&plan))), (Some((8, 8, 1)), (168_000.0, 14_000.0)));
    assert_eq!(placement.gradients_on_network(&plan), 14_000.0);
    // Two groups of a host sum their slices first, and then each GPU half of a slice with three other hosts.
    let (within, between) = on_hosts_of(16).bytes(Some(&plan));
    assert_eq!((within, between), (168_000.0 + 8_000.0, 4_000.0 * 2.0 * 3.0 / 4.0));
    // Groups across two hosts send a part of each buffer to the other host.
    let placement = on_hosts_of(4);
    assert_eq!(placement.shards.as_ref().map(|shards| shards.hosts), Some(2));
    assert_eq!(placement.bytes(Some(&plan)), (3.0 * 48_000.0, 3.0 * 8_000.0 + 14_000.0));
}
