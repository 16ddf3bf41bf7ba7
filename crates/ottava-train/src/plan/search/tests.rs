//! Tests that the list of divisions is complete, and that the search finds fast divisions that fit.

use super::*;
use crate::bench::model;
use ottava_recipe::RecipeName;
use ottava_recipe::storage::Storage;
use ottava_tensor::cuda::GpuModel;
use std::collections::BTreeSet;

const GIB: f64 = (1u64 << 30) as f64;

/// Returns a run whose step has 32 sequences of 1,024 tokens, one per micro-batch.
fn run() -> RunConfig {
    let mut config = RunConfig::default();
    (config.data.max_length, config.data.val_set_size) = (1024, 0.0);
    (config.training.per_device_train_batch_size, config.training.global_batch_size) = (1, Some(32));
    (config.precision.recipe, config.optimizer.storage) = (RecipeName::Bf16, Storage::Bfloat16);
    config.parallel.auto = true;
    config
}

fn gpu(gib: f64) -> Device {
    Device::dry_gpu(GpuModel { memory: (gib * GIB) as usize, ..GpuModel::h200() })
}

/// Returns a model of two blocks of Llama-2-7B.
fn small() -> DecoderConfig {
    model("llama-2-7b").unwrap().with_layers(2)
}

#[test]
fn divisions_are_all_meshes_once() {
    for ranks in 1..=24 {
        for experts in [1, 8] {
            let all = divisions(ranks, experts);
            let distinct: BTreeSet<_> = all.iter().map(|division| format!("{division:?}")).collect();
            assert_eq!(distinct.len(), all.len(), "{ranks} ranks");
            for Division { shape, zero } in &all {
                shape.check(ranks).unwrap();
                assert!(
                    shape.tensor <= 8
                        && if experts == 1 { shape.expert == 1 } else { experts % (shape.expert * shape.tensor) == 0 }
                );
                assert!(shape.pipeline == 1 || *zero <= Zero::OptimizerStates);
                assert!(shape.data * shape.context > 1 || *zero == Zero::Nothing);
            }
            // The same meshes are found by trying all sizes.
            let mut meshes = BTreeSet::new();
            for data in 1..=ranks {
                for (context, tensor, pipeline) in
                    (1..=ranks).flat_map(|c| (1..=8).flat_map(move |t| (1..=ranks).map(move |p| (c, t, p))))
                {
                    for expert in (1..=ranks).filter(|expert| experts % expert == 0) {
                        let shape = MeshShape { data, context, tensor, pipeline, expert };
                        let divides = experts == 1 || experts % (expert * tensor) == 0;
                        if shape.check(ranks).is_ok() && divides {
                            meshes.insert(format!("{shape}"));
                        }
                    }
                }
            }
            let found: BTreeSet<_> = all.iter().map(|division| division.shape.to_string()).collect();
            assert_eq!(found, meshes, "{ranks} ranks, {experts} experts");
        }
    }
}

#[test]
fn with_memory_for_the_whole_model_ranks_divide_the_batch() {
    let search = ParallelSearch::new(&run(), &small(), &gpu(140.0), 4).unwrap();
    assert_eq!(search.best.len(), 3);
    let speeds: Vec<f64> = search.best.iter().map(|candidate| candidate.tokens_per_second).collect();
    assert!(speeds.is_sorted_by(|a, b| a >= b), "{speeds:?}");
    assert_eq!(search.fastest().unwrap().division.shape, MeshShape::of_data(4), "{:?}", search.best);
    let step = search.best[0].step;
    assert!(step.seconds > 0.0 && step.idle_seconds == 0.0 && step.exposed_seconds > 0.0, "{step:?}");
}

/// If the whole model does not fit on a GPU, the search returns only divisions of the model. The other divisions are dropped, with the memory that
/// they would need.
#[test]
fn without_memory_for_the_whole_model_ranks_divide_it() {
    // Weights, gradients and states of the whole model take 5 GiB.
    let search = ParallelSearch::new(&run(), &small(), &gpu(5.5), 4).unwrap();
    let best = search.fastest().unwrap();
    let divides =
        |division: &Division| division.zero > Zero::Nothing || division.shape.data * division.shape.context < 4;
    assert!(divides(&best.division), "{best:?}");
    assert!((best.peak_bytes as f64) <= 5.5 * GIB, "{best:?}");
    let whole =
        search.dropped.iter().find(|dropped| !divides(&dropped.division)).expect("the whole model does not fit");
    assert!(whole.why.starts_with("it does not fit with recompute"), "{}", whole.why);
    assert!(whole.needed_bytes.is_some_and(|bytes| bytes as f64 > 4.0 * GIB), "{whole:?}");
    let found = ParallelSearch::new(&run(), &small(), &gpu(0.5), 2).unwrap();
    let error = found.fastest().unwrap_err();
    assert!(error.exit_code() == 3 && error.to_string().contains("no division among 2 ranks"), "{error}");
}

#[test]
fn meshes_that_a_model_cannot_have_are_dropped_with_the_reason() {
    let mut config = run();
    // A step has six sequences, which four data ranks cannot divide.
    config.training.global_batch_size = Some(6);
    let mut sizes = small();
    sizes.heads_mut().for_each(|heads| (heads.heads, heads.kv_heads) = (3, 3));
    let search = ParallelSearch::new(&config, &sizes, &gpu(140.0), 4).unwrap();
    let why = |is: &dyn Fn(&MeshShape) -> bool| {
        let dropped = search.dropped.iter().find(|dropped| is(&dropped.division.shape));
        dropped.unwrap_or_else(|| panic!("{:?}", search.best)).why.clone()
    };
    assert!(why(&|shape| shape.context == 2 && shape.tensor == 1).contains("3 query heads"));
    assert!(why(&|shape| shape.data == 4).contains("6 sequences per step cannot be split over 4 ranks"));
    assert!(why(&|shape| shape.pipeline == 4).contains("the model has 2 blocks"));
    let reasons = search.reasons();
    assert!(reasons.len() < search.dropped.len(), "each reason once: {reasons:?}");
}

#[test]
fn experts_are_divided_if_they_do_not_fit() {
    let sizes = model("qwen3-30b-a3b").unwrap().with_layers(2);
    let search = ParallelSearch::new(&run(), &sizes, &gpu(14.0), 2).unwrap();
    assert!(search.best.iter().any(|candidate| candidate.division.shape.expert == 2), "{:?}", search.best);
    assert!(search.best.iter().any(|candidate| candidate.division.shape.tensor == 2), "{:?}", search.best);
}

#[test]
fn latent_attention_is_divided_along_every_axis() {
    // The first layer of the model has no experts.
    let sizes = model("deepseek-v2-lite").unwrap().with_layers(1).with_layers(2);
    let search = ParallelSearch::new(&run(), &sizes, &gpu(140.0), 2).unwrap();
    let dropped = search
        .dropped
        .iter()
        .find(|Dropped { division: Division { shape, .. }, .. }| shape.tensor * shape.context == 2);
    assert!(dropped.is_none(), "{dropped:?}");
}

#[test]
fn a_search_needs_the_sequences_of_a_step() {
    let mut config = run();
    config.training.global_batch_size = None;
    let error = ParallelSearch::new(&config, &small(), &gpu(140.0), 2).unwrap_err().to_string();
    assert!(error.contains("set `training.global_batch_size`"), "{error}");
}
