//! Ranks that divide the model and hold their slices of weights in host memory. A CPU has only one memory, but each pass also gathers offloaded
//! weights from their place there.

use crate::parallel::mesh::{MeshRank, rows};
use crate::parallel::ranks::{STEPS, Seen, on_threads, plain};
use crate::parallel::reopen::{alone, on, reopen, tensors, train};
use crate::setup::{config, on_ranks, recipe, tiny_llama};
use ottava_models::DecoderConfig;
use ottava_parallel::Zero;
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::MemoryPolicy;
use ottava_recipe::recompute::Recompute;
use ottava_recipe::storage::{Formats, Masters, Share, Storage};
use ottava_recipe::{Fp8Format, RecipeName};
use serde_json::json;

/// The stages of ZeRO that divide the model.
const STAGES: [Zero; 3] = [Zero::OptimizerStates, Zero::Gradients, Zero::Weights];
/// The shares that offload the last of two blocks, and both blocks.
const SHARES: [f64; 2] = [0.5, 1.0];

/// Compares steps of two ranks with these shares of weights offloaded with steps without offloading.
fn expect_same(sizes: &DecoderConfig, name: RecipeName, memory: MemoryPolicy, zero: Zero, shares: &[f64]) {
    let steps = |share: f64| -> Seen {
        let memory = MemoryPolicy { offload_parameters: Share::new(share), ..memory };
        on_threads(STEPS, sizes, &recipe(name, Fp8Format::Auto), memory, plain(zero), 4, 2)
    };
    let here = steps(0.0);
    for &share in shares {
        let there = steps(share);
        let what = format!("{name:?}, {zero:?}, {share} of the blocks offloaded, {memory:?}");
        for ((tensor, expected), (_, got)) in here.values.iter().zip(&there.values) {
            assert!(expected == got, "{what}: {tensor}");
        }
        assert_eq!(here.scales, there.scales, "{what}");
        let [before, after] = [&here, &there].map(|seen| seen.traffic.all_gather.bytes);
        match zero {
            Zero::Weights => assert_eq!(before, after, "{what}: the same gathers"),
            _ => assert!(before < after, "{what}: gathers in each pass, {before} and {after} bytes"),
        }
    }
}

#[test]
fn offloaded_slices_change_no_bit() {
    for name in [RecipeName::Bf16, RecipeName::Fp8Delayed, RecipeName::Fp8Row] {
        for zero in STAGES {
            expect_same(&tiny_llama(), name, MemoryPolicy::FULL, zero, &SHARES);
        }
    }
}

/// Without master weights, the weights themselves are in host memory. Codes are there too if ranks gather codes.
#[test]
fn offloaded_slices_change_no_bit_at_any_level() {
    let of = |storage: Storage| MemoryPolicy { formats: storage.formats(), ..MemoryPolicy::FULL };
    let remainder = Formats { masters: Masters::Remainder, ..Storage::Float32.formats() };
    let wide = config(json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }));
    let half = Share::new(0.5);
    for (i, (sizes, memory)) in [
        (tiny_llama(), of(Storage::Bfloat16)),
        (tiny_llama(), of(Storage::MsampO2)),
        (tiny_llama(), MemoryPolicy { offload_optimizer: half, recompute: Recompute::Full, ..of(Storage::MsampO3) }),
        (tiny_llama(), MemoryPolicy { formats: remainder, offload_optimizer: half, ..MemoryPolicy::FULL }),
        (tiny_llama(), MemoryPolicy { weight_codes: false, ..of(Storage::MsampO2) }),
        (wide, of(Storage::Coat)),
    ]
    .into_iter()
    .enumerate()
    {
        for (k, name) in [RecipeName::Fp8Delayed, RecipeName::Fp8Current, RecipeName::Fp8Block].into_iter().enumerate()
        {
            expect_same(&sizes, name, memory, STAGES[(i + k) % 3], &SHARES[(i + k) % 2..][..1]);
        }
    }
}

/// Each of `expert` ranks has its own experts, which are offloaded as on one rank.
#[test]
fn checkpoints_do_not_depend_on_what_is_offloaded() {
    let folder = tempfile::tempdir().unwrap();
    for (family, storage, expert) in
        [("phi3", Storage::Float32, 1), ("phi3", Storage::MsampO2, 1), ("qwen3_moe", Storage::Bfloat16, 2)]
    {
        for zero in STAGES {
            let mut alone = alone(family, 256, Storage::MsampO2);
            alone.memory.formats = storage.formats();
            let mut here = on(&alone, [2, 1, 1], zero);
            here.expert = expert;
            let mut there = here.clone();
            there.memory.offload_parameters = Share::new(1.0);
            let what = format!("{family}, {storage:?}, {zero:?}");
            let path = |words: &str| folder.path().join(format!("{what}, {words}"));
            let saved = [(&here, "here"), (&there, "there")].map(|(mesh, words)| train(mesh, &path(words)));
            assert!(tensors(&saved[0]) == tensors(&saved[1]), "{what}: other bytes are saved");
            let next = [(0, &here, "here, here"), (0, &there, "here, there"), (1, &here, "there, here")]
                .map(|(first, mesh, words)| tensors(&reopen(&saved[first], mesh, 1, &path(words))));
            assert!(next[0] == next[1], "{what}: a run that offloads goes on with other bits");
            assert!(next[0] == next[2], "{what}: a run that offloaded goes on with other bits");
        }
    }
}

/// An update whose norm exceeds the limit writes neither weights nor codes, so weights and codes in host memory stay unchanged.
#[test]
fn a_skipped_step_keeps_offloaded_codes() {
    for storage in [Storage::Float32, Storage::Bfloat16, Storage::MsampO2] {
        let [here, there] = [0.0, 1.0].map(|share| {
            let mut mesh = on(&alone("phi3", 256, Storage::MsampO2), [2, 1, 1], Zero::Weights);
            (mesh.memory.formats, mesh.memory.offload_parameters) = (storage.formats(), Share::new(share));
            on_ranks(2, move |comm| {
                let MeshRank { ranks, model, optimizer, work } = mesh.run(&mesh.join(comm));
                let work = work.with_norm_limit().unwrap();
                let mut own = MeshRank { ranks, model, optimizer, work };
                own.work.partition().quantize_weights(&mut own.model).unwrap();
                [f64::INFINITY, 0.0, f64::INFINITY].map(|limit| {
                    own.load(|row| rows(&format!("skipped {row}"), mesh.rows, 0..3, &mesh.sizes));
                    let MeshRank { model, optimizer, work, .. } = &mut own;
                    work.set_norm_limit(limit);
                    let done = work.run(model, &mut **optimizer, 1e-3, StepPrecision::Recipe).unwrap();
                    (done.loss, done.grad_norm, done.is_skipped)
                })
            })
        });
        assert_eq!(here[0].map(|(.., is_skipped)| is_skipped), [false, true, false]);
        assert_eq!(here, there, "{storage:?}");
    }
}
