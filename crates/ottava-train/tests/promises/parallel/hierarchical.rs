//! Hierarchical ZeRO: ranks divide slices within shard groups, and several groups store the same slices.
//!
//! Gradients are summed within a group first, and then over groups. This is another order than the order of one sum over all ranks, so results agree
//! with flat ZeRO up to the rounding of F32.

use crate::parallel::divided::{F32, Setup, llama, train};
use crate::parallel::expert_ranks::routed;
use crate::parallel::mesh::{Mesh, MeshRank, Seen, distance, rows};
use crate::setup::on_ranks;
use ottava_parallel::optim::optimizer_tensors;
use ottava_parallel::{Schedule, Zero};
use ottava_recipe::RecipeName;
use ottava_recipe::mode::StepPrecision;
use ottava_tensor::comm::Traffic;
use serde_json::json;

/// The stages that divide something.
const STAGES: [Zero; 3] = [Zero::OptimizerStates, Zero::Gradients, Zero::Weights];

/// Returns a run on four data ranks, each with `micro_batches` micro-batches.
fn on_four(alone: &Setup, micro_batches: usize, zero: Zero, shard: usize) -> Setup {
    let mesh = Mesh { schedule: Schedule::of_one_rank(micro_batches), data: 4, zero, shard, ..alone.mesh.clone() };
    Setup { mesh, ..alone.clone() }
}

/// Trains flat and in two shard groups. Checks that the results agree up to rounding, and that the first loss has the same bits, since no gradient was
/// summed before it. Returns the results of the shard groups.
fn train_both(alone: &Setup, micro_batches: usize, zero: Zero, what: &str) -> Seen {
    let [flat, groups] = [0, 2].map(|shard| train(&on_four(alone, micro_batches, zero, shard)));
    let (apart, name) = distance(&flat, &groups);
    assert!(apart < F32, "{what}, {zero:?}, {micro_batches} micro-batches: {name} is {apart:.1e} apart");
    let first = |seen: &Seen| seen["losses and norms"][0].to_bits();
    assert_eq!(first(&flat), first(&groups), "{what}, {zero:?}: the first loss");
    groups
}

/// [`train`] also checks that all ranks have the same weights, and that the slices of both groups have the same bits.
#[test]
fn shard_groups_train_as_flat_zero_does() {
    let mut experts = Setup::new(routed(json!({})), RecipeName::Fp32);
    let llama = Setup::new(llama(json!({})), RecipeName::Fp32);
    for micro_batches in [1, 2] {
        let [first, second, third] = STAGES.map(|zero| train_both(&llama, micro_batches, zero, "llama"));
        assert!(second == third, "stages 2 and 3 have the same bits");
        assert!(micro_batches > 1 || first == second, "with one micro-batch, stages 1 and 2 have the same bits");
    }
    // With two experts' ranks in a group of two, no other rank of the group has the same experts.
    for expert in [1, 2] {
        experts.mesh.expert = expert;
        train_both(&experts, 1, Zero::Weights, &format!("experts on {expert} ranks"));
    }
}

/// With FP8 weights, whose scales ranks of a group share, all stages have the same bits with one micro-batch. Codes that rounding has changed change
/// other codes, so results agree with flat ZeRO less closely than in F32.
#[test]
fn shard_groups_train_fp8_recipes_alike_in_all_stages() {
    for name in [RecipeName::Fp8Delayed, RecipeName::Fp8Row, RecipeName::Fp8Block] {
        let keys = json!({"hidden_size": 128, "num_hidden_layers": 1, "intermediate_size": 128});
        let alone = Setup::new(llama(keys), name);
        let [first, second, third] = STAGES.map(|zero| train(&on_four(&alone, 1, zero, 2)));
        assert!(first == second && second == third, "{}", name.as_str());
        let (apart, tensor) = distance(&train(&on_four(&alone, 1, Zero::Weights, 0)), &third);
        assert!(apart < 2e-2, "{}: {tensor} is {apart:.1e} apart", name.as_str());
    }
}

/// Returns the traffic of a step of each rank: all, and between shard groups.
fn traffic(setup: &Setup) -> Vec<(Traffic, Traffic)> {
    let mesh = setup.mesh.clone();
    on_ranks(mesh.ranks(), move |comm| {
        let mut own = mesh.run(&mesh.join(comm));
        own.work.partition().quantize_weights(&mut own.model).unwrap();
        let mut step = || {
            own.load(|number| rows(&format!("traffic {number}"), mesh.rows, 0..3, &mesh.sizes));
            let MeshRank { model, optimizer, work, .. } = &mut own;
            work.run(model, &mut **optimizer, 1e-3, StepPrecision::Recipe).unwrap();
            (own.ranks.traffic(), own.ranks.traffic_of_replicas())
        };
        // The first step also gathers what the update before it would gather.
        let (before, after) = (step(), step());
        own.ranks.finish().unwrap();
        (after.0 - before.0, after.1 - before.1)
    })
}

/// For `P` elements of matrices in F32, groups of `n` ranks and `N` groups, a rank sends `2 · 4P/n · (N-1)/N` bytes to other groups in each step, in all
/// stages and for any number of micro-batches. All other bytes of matrices stay in a group: `4P · (n-1)/n` for each gather and each scatter.
#[test]
fn only_slices_cross_groups_and_once_per_step() {
    let alone = Setup::new(llama(json!({})), RecipeName::Fp32);
    // Two blocks of Q, K, V and O with 64 x 64 elements and gate, up and down with 64 x 128 elements; the embedding and the head. All units are
    // multiples of two granules, so nothing is padded.
    let (blocks, vocabulary) = (2 * (4 * 64 * 64 + 3 * 64 * 128), 2 * 96 * 64);
    let elements = blocks + vocabulary;
    for zero in STAGES {
        let micro_batches = 2;
        // Stage 3 gathers blocks for forward and backward, and the embedding and the head once.
        let gathered = if zero == Zero::Weights { micro_batches * (2 * blocks + vocabulary) } else { elements };
        // Only stage 1 reduces once per step.
        let scatters = if zero == Zero::OptimizerStates { 1 } else { micro_batches };
        for (all, between) in traffic(&on_four(&alone, micro_batches as usize, zero, 2)) {
            let slice = 4 * elements / 2;
            let got = (all.all_gather.bytes, all.reduce_scatter.bytes, between.total().bytes);
            // The norm's partial sums of four ranks are gathered as F64.
            let norm = 8 * 3;
            assert_eq!(got, (4 * gathered / 2 + norm, scatters * slice, 2 * slice / 2), "{zero:?}");
            assert_eq!(between.total().bytes, between.all_reduce.bytes);
        }
    }
}

/// A bit that flips in a slice of one group is found by the comparison with the other group, and its tensor is named.
#[test]
fn a_flipped_bit_of_a_slice_is_named() {
    let setup = on_four(&Setup::new(llama(json!({})), RecipeName::Fp8Delayed), 1, Zero::Weights, 2);
    let mesh = setup.mesh.clone();
    let messages = on_ranks(4, move |comm| {
        let mut own = mesh.run(&mesh.join(comm));
        let MeshRank { ranks, model, optimizer, work } = &mut own;
        let partition = work.partition();
        partition.quantize_weights(model).unwrap();
        partition.compare_replicas(model, &mut **optimizer, "at the start").unwrap();
        if ranks.rank() == 3 {
            let mut params = model.parameters();
            let at = params.iter().rposition(|param| param.identity.name().contains("mlp.down_proj")).unwrap();
            let states = optimizer.states().swap_remove(at);
            let master = optimizer_tensors(&mut params[at].weights, states).swap_remove(0).tensor;
            let mut bytes = master.read_bytes().unwrap();
            bytes[11] ^= 1;
            master.write_bytes(&bytes).unwrap();
        }
        let found = partition.compare_replicas(model, &mut **optimizer, "after step 7");
        (ranks.rank(), found.err().map(|error| error.to_string()))
    });
    // Ranks 1 and 3 store the same slices.
    for (rank, message) in messages.into_iter().filter(|(rank, _)| rank % 2 == 1) {
        let message = message.unwrap_or_else(|| panic!("rank {rank} finds nothing"));
        assert!(message.contains("mlp.down_proj"), "{message}");
        assert!(message.contains("of rank 3 differs from that of rank 1 after step 7"), "{message}");
    }
}
