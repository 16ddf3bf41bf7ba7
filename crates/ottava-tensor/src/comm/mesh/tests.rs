//! Coordinates, shapes, and the groups of each set of axes.

use super::{Axis, Mesh, MeshShape, sets};
use crate::comm::process::tests::tcp_group;
use crate::comm::tests::on_ranks;
use crate::comm::{Group, Reduce, Traffic, threads};
use crate::device::Device;
use crate::tensor::Tensor;

const CUBE: MeshShape = MeshShape { data: 2, context: 1, tensor: 2, pipeline: 2, expert: 1 };

#[test]
fn tensor_is_fastest_then_context_data_and_pipeline() {
    let shape = MeshShape { data: 3, context: 2, tensor: 4, pipeline: 2, expert: 6 };
    shape.check(48).unwrap();
    let at = |rank| Axis::ALL.map(|axis| shape.coordinate(rank, axis));
    // The order is data, context, tensor, pipeline, expert.
    assert_eq!((at(1), at(4), at(8)), ([0, 0, 1, 0, 0], [0, 1, 0, 0, 1], [1, 0, 0, 0, 2]));
    assert_eq!((at(24), at(47)), ([0, 0, 0, 1, 0], [2, 1, 3, 1, 5]));
    assert_eq!(shape.groups(&[Axis::Tensor])[1], [4, 5, 6, 7]);
    assert_eq!(shape.groups(&[Axis::Data])[0], [0, 8, 16]);
    assert_eq!(shape.groups(&[Axis::Pipeline])[5], [5, 29]);
    let shape = MeshShape { expert: 2, ..shape };
    assert_eq!(shape.groups(&[Axis::Expert])[0], [0, 4], "consecutive ranks of data x context");
    assert_eq!(shape.groups(&[Axis::Expert, Axis::Data, Axis::Context]), shape.groups(&[Axis::Data, Axis::Context]));
    assert_eq!(shape.expert_replicas()[..2], [[0, 8, 16], [1, 9, 17]], "every other of data x context");
    let shape = MeshShape { expert: 1, ..shape };
    assert_eq!(shape.expert_replicas(), shape.groups(&[Axis::Data, Axis::Context]));
}

#[test]
fn the_groups_of_an_axis_are_listed_in_short() {
    assert_eq!(CUBE.describe(Axis::Tensor), "ranks 0, 1; ranks 2, 3; ranks 4, 5; ranks 6, 7");
    assert_eq!(
        MeshShape { data: 4, ..CUBE }.describe(Axis::Data),
        "ranks 0, 2, 4, 6; ranks 1, 3, 5, 7; ranks 8, 10, 12, 14; ranks 9, 11, 13, 15"
    );
    assert_eq!(
        MeshShape { data: 64, pipeline: 1, ..CUBE }.describe(Axis::Tensor),
        "ranks 0, 1; ranks 2, 3; ranks 4, 5; ranks 6, 7; and 60 other groups"
    );
    assert_eq!(MeshShape::of_data(8).describe(Axis::Data), "ranks 0 to 7");
}

#[test]
fn shapes_that_do_not_fit_are_errors_that_name_both_sides() {
    let error = |shape: MeshShape, ranks| shape.check(ranks).unwrap_err().to_string();
    let message = error(CUBE, 6);
    assert!(message.ends_with("tensor 2, pipeline 2, expert 1 has 8 ranks, and the job has 6"), "{message}");
    let message = error(MeshShape { expert: 4, ..CUBE }, 8);
    assert!(message.ends_with("the expert axis does not divide data x context, 2"), "{message}");
    assert!(MeshShape { expert: 0, ..CUBE }.check(8).is_err());
}

#[test]
fn collectives_of_all_groups_of_a_cube_run_beside_each_other() {
    for group in [threads::group(8), tcp_group(8)] {
        on_ranks(group, |world| {
            let mesh = Mesh::new(world, CUBE).unwrap();
            let rank = mesh.world().rank();
            // All calls are started before the first wait, and half of the ranks wait in reverse order.
            let mut open: Vec<_> = (sets().into_iter())
                .map(|axes| {
                    let x = Tensor::from_slice(&Device::Cpu, &[1], &[(1 << rank) as f32]).unwrap();
                    let sum = mesh.group(&axes).all_reduce("ranks", Reduce::Sum, x).unwrap();
                    (axes, sum)
                })
                .collect();
            if rank % 2 == 1 {
                open.reverse();
            }
            for (axes, sum) in open {
                let groups = CUBE.groups(&axes);
                let own = groups.iter().find(|group| group.contains(&rank)).unwrap();
                let expected: f32 = own.iter().map(|&rank| (1 << rank) as f32).sum();
                assert_eq!(sum.wait().unwrap().to_vec::<f32>().unwrap(), [expected], "{axes:?} of rank {rank}");
                let members = mesh.group(&axes).ranks();
                assert!(own.len() == 1 || *members == own[..], "{axes:?}: {members:?}");
            }
            mesh.world().finish().unwrap();
        });
    }
}

#[test]
fn the_data_axis_alone_is_the_group_of_all_ranks() {
    on_ranks(threads::group(3), |world| {
        let mesh = Mesh::new(world, MeshShape::of_data(3)).unwrap();
        assert!(mesh.world().recent().is_empty(), "nothing is split");
        for axes in [&[Axis::Data][..], &[Axis::Data, Axis::Context], &Axis::ALL] {
            assert!(std::ptr::eq(mesh.group(axes), mesh.world()));
        }
        assert_eq!((mesh.group(&[Axis::Tensor]).size(), mesh.group(&[]).size()), (1, 1));
        assert_eq!((mesh.size(Axis::Data), mesh.coordinate(Axis::Data)), (3, mesh.world().rank()));
        mesh.world().finish().unwrap();
    });
    let solo = Mesh::new(Group::solo(), MeshShape::of_data(1)).unwrap();
    assert!(std::ptr::eq(solo.group(&[Axis::Data]), solo.world()));
}

#[test]
fn a_dry_rank_has_the_groups_of_its_place() {
    let shape = MeshShape { data: 4, context: 1, tensor: 2, pipeline: 2, expert: 2 };
    let mesh = Mesh::new(Group::dry(13, 16), shape).unwrap();
    assert_eq!(mesh.group(&[Axis::Data]).ranks(), [9, 11, 13, 15]);
    assert_eq!(mesh.group(&[Axis::Tensor]).ranks(), [12, 13]);
    assert_eq!(mesh.group(&[Axis::Expert]).ranks(), [13, 15]);
    assert_eq!(mesh.expert_replicas().ranks(), [9, 13]);
    assert_eq!(mesh.layer_group(Axis::Expert).ranks(), [12, 13, 14, 15], "expert x tensor");
    let undivided = Mesh::new(Group::dry(13, 16), MeshShape { expert: 1, ..shape }).unwrap();
    assert_eq!(undivided.layer_group(Axis::Expert).ranks(), [12, 13]);
    assert_eq!((mesh.group(&[Axis::Data]).rank(), mesh.group(&[Axis::Data]).name()), (2, "data"));
    let x = Tensor::empty(&Device::Cpu.dry(), &[400], crate::dtype::DType::BF16).unwrap();
    let x = mesh.group(&[Axis::Data]).all_gather("x", x).unwrap().wait().unwrap();
    let stages = mesh.group(&[Axis::Pipeline]);
    stages.send("x", 0, &x).unwrap().wait().unwrap();
    let x = stages.receive("x", 0, x).unwrap().wait().unwrap();
    stages.exchange("x", 0, &x, 0, x.empty_like().unwrap()).unwrap().wait().unwrap();
    // Tensors received on the host are zeros.
    let zeros = stages.receive("y", 0, Tensor::from_slice(&Device::Cpu, &[1], &[1.0f32]).unwrap()).unwrap();
    assert_eq!(zeros.wait().unwrap().to_vec::<f32>().unwrap(), [0.0]);
    let Traffic { all_gather, send, .. } = mesh.world().traffic();
    assert_eq!((all_gather.bytes, send.bytes, send.calls), (600, 1600, 2));
}

#[test]
fn shard_groups_are_consecutive_ranks_of_data_and_context() {
    let shape = MeshShape { data: 8, context: 1, tensor: 2, pipeline: 2, expert: 2 };
    let mesh = |rank, size| Mesh::new(Group::dry(rank, 32), shape).unwrap().with_shards(size).unwrap();
    // Rank 21 has place 2 of data x context, tensor 1 and stage 1.
    let hierarchical = mesh(21, 4);
    assert_eq!(hierarchical.shard_group(false).ranks(), [17, 19, 21, 23]);
    assert_eq!(hierarchical.shard_group(true).ranks(), [17, 21], "the ranks with the same experts");
    assert_eq!(hierarchical.slice_replicas().ranks(), [21, 29]);
    assert_eq!((hierarchical.shard_group(false).rank(), hierarchical.slice_replicas().rank()), (2, 0));
    let flat = mesh(21, 8);
    assert_eq!(flat.shard_group(false).ranks(), flat.group(&[Axis::Data]).ranks());
    assert_eq!(flat.shard_group(true).ranks(), flat.expert_replicas().ranks());
    assert_eq!(flat.slice_replicas().size(), 1);
    // Experts of an expert axis that fills a shard group are not divided.
    assert_eq!(
        (mesh(21, 2).shard_group(true).size(), mesh(21, 2).slice_replicas().ranks()),
        (1, &[17, 21, 25, 29][..])
    );
    let without = Mesh::new(Group::dry(21, 32), MeshShape { expert: 1, ..shape }).unwrap().with_shards(4).unwrap();
    assert_eq!(without.shard_group(true).ranks(), without.shard_group(false).ranks());
    let error = |size| shape.check_shards(size).unwrap_err().to_string();
    assert!(error(3).ends_with("shard groups have 3 ranks, and data x context has 8; choose a divisor of 8"));
    assert!(error(1).ends_with("shard groups have 1 ranks, and the expert axis has 2; choose a multiple of 2"));
    assert!(shape.check_shards(0).is_err());
}
