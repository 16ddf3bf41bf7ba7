//! Tests which ranks share scales, and that a cast with a wrong group is detected.

use super::Amaxes;
use crate::Ranks;
use ottava_common::error::Result;
use ottava_recipe::layer_ranks::Undivided;
use ottava_recipe::scaling::{AmaxGroup, ScalingState, Slots};
use ottava_recipe::{Cast, FirstStep, Scaling};
use ottava_tensor::comm::{Axis, Group, MeshShape, threads};
use ottava_tensor::ops::{AmaxReducer, DelayedScaling, NonFinite};
use ottava_tensor::{DType, Device, Granularity, Tensor};
use std::rc::Rc;

const CAST: Cast = Cast {
    format: DType::E4M3,
    granularity: Granularity::PerTensor,
    scaling: Scaling::Delayed {
        how: DelayedScaling { reducer: AmaxReducer::Max, margin: 0, interval: 1, non_finite: NonFinite::Quarantine },
        window: 2,
        first_step: FirstStep::Unscaled,
    },
};

const TENSOR: AmaxGroup = AmaxGroup::Over(&[Axis::Tensor]);

/// Returns the amax that a rank measures in a slot before the reduction.
fn measured(rank: usize, slot: usize) -> f32 {
    ((7 * rank + 3 * slot) % 5 + 1) as f32
}

/// Runs a step of one rank whose casts have the groups `declared`. Returns the reduced amaxes, the number of maxima, and whether the comparison finds
/// scales that differ.
fn step(world: Group, shape: MeshShape, declared: &[AmaxGroup]) -> (Vec<f32>, u64, Result<()>) {
    let (rank, device) = (world.rank(), Device::Cpu);
    let ranks = Ranks::new(world, shape, &device).unwrap();
    let mut slots = Slots::default();
    for (slot, &group) in declared.iter().enumerate() {
        slots.add(format!("layers.{slot}.input"), CAST, group, None);
    }
    let mut scaling = ScalingState::new(&device, slots, Rc::new(Undivided)).unwrap();
    let own: Vec<_> = (0..declared.len()).map(|slot| measured(rank, slot)).collect();
    *scaling.amaxes_mut() = Tensor::from_slice(&device, &[own.len()], &own).unwrap();
    Amaxes::merge(&mut scaling, &ranks).unwrap().finish(&mut scaling).unwrap();
    let merged = scaling.amaxes_mut().to_vec::<f32>().unwrap();
    let maxima = ranks.traffic().all_reduce.calls;
    scaling.update().unwrap();
    let compared = ranks.compare_scales(&scaling, "after step 1");
    ranks.finish().unwrap();
    (merged, maxima, compared)
}

/// Runs [`step`] on all ranks of a mesh.
fn steps(shape: MeshShape, declared: &'static [AmaxGroup]) -> Vec<(Vec<f32>, u64, Result<()>)> {
    let ranks = threads::group(shape.ranks()).into_iter();
    let ranks: Vec<_> = ranks.map(|world| std::thread::spawn(move || step(world, shape, declared))).collect();
    ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
}

/// Returns the largest amax of `slot` among the ranks that share its scale with `rank`.
fn expected(shape: MeshShape, group: AmaxGroup, rank: usize, slot: usize) -> f32 {
    let AmaxGroup::Over(axes) = group else { return measured(rank, slot) };
    let groups = shape.groups(axes);
    let own = groups.iter().find(|group| group.contains(&rank)).unwrap();
    own.iter().map(|&rank| measured(rank, slot)).fold(0.0, f32::max)
}

#[test]
fn casts_of_one_group_take_one_maximum_and_agree() {
    let shape = MeshShape::of_data(3);
    for (rank, (merged, maxima, compared)) in steps(shape, &[AmaxGroup::DATA; 4]).into_iter().enumerate() {
        assert_eq!(maxima, 1);
        let expected: Vec<_> = (0..4).map(|slot| expected(shape, AmaxGroup::DATA, rank, slot)).collect();
        assert_eq!(merged, expected);
        compared.unwrap();
    }
}

#[test]
fn each_group_takes_a_maximum_of_its_casts() {
    let shape = MeshShape { tensor: 2, ..MeshShape::of_data(2) };
    let both = AmaxGroup::Over(&[Axis::Data, Axis::Tensor]);
    const DECLARED: &[AmaxGroup] = &[
        AmaxGroup::DATA,
        TENSOR,
        AmaxGroup::Own,
        AmaxGroup::Over(&[Axis::Data]),
        AmaxGroup::Over(&[Axis::Data, Axis::Tensor]),
        AmaxGroup::Over(&[Axis::Pipeline]),
    ];
    assert_eq!(DECLARED[4], both);
    for (rank, (merged, maxima, _)) in steps(shape, DECLARED).into_iter().enumerate() {
        let expected: Vec<_> = (0..DECLARED.len()).map(|slot| expected(shape, DECLARED[slot], rank, slot)).collect();
        assert_eq!(merged, expected, "rank {rank}");
        assert_eq!(maxima, 3, "data with or without context, tensor, and both");
    }
}

#[test]
fn a_cast_with_a_wrong_group_is_named_on_all_ranks() {
    // The tensors of these casts are divided over the data axis.
    const OWN: &[AmaxGroup] = &[AmaxGroup::DATA, AmaxGroup::Own, AmaxGroup::DATA];
    const OTHER_AXIS: &[AmaxGroup] = &[AmaxGroup::DATA, TENSOR, AmaxGroup::DATA];
    let with_tensor = MeshShape { tensor: 2, ..MeshShape::of_data(2) };
    for (shape, declared) in [
        (MeshShape::of_data(2), OWN),
        (MeshShape::of_data(2), OTHER_AXIS),
        (with_tensor, OWN),
        (with_tensor, OTHER_AXIS),
    ] {
        for (rank, (.., compared)) in steps(shape, declared).into_iter().enumerate() {
            let message = compared.expect_err("scales differ").to_string();
            let tensor = rank % shape.tensor;
            let expected = format!(
                "ranks have diverged: `layers.1.input` (amax and scale) of rank {} differs from that of rank {tensor} after step 1",
                tensor + shape.tensor
            );
            assert!(message.contains(&expected), "{shape}, rank {rank}: {message}");
        }
    }
}

/// Ranks with other layers have other casts, so a pipeline reduces amaxes over ranks with the same layers. A group with the pipeline axis
/// would mix amaxes of different casts.
#[test]
fn ranks_of_a_pipeline_keep_the_amaxes_of_their_layers() {
    let shape = MeshShape { pipeline: 2, ..MeshShape::of_data(2) };
    const WRONG: AmaxGroup = AmaxGroup::Over(&[Axis::Data, Axis::Context, Axis::Pipeline]);
    let amaxes = |declared: &'static [AmaxGroup]| -> Vec<_> {
        steps(shape, declared).into_iter().map(|(merged, ..)| merged).collect()
    };
    let right = amaxes(&[AmaxGroup::DATA; 3]);
    for (rank, merged) in right.iter().enumerate() {
        let same_layers = [rank / 2 * 2, rank / 2 * 2 + 1];
        let expected: Vec<_> =
            (0..3).map(|slot| same_layers.map(|rank| measured(rank, slot)).into_iter().fold(0.0, f32::max)).collect();
        assert_eq!(*merged, expected, "rank {rank}");
    }
    assert_ne!(amaxes(&[WRONG; 3]), right);
}
