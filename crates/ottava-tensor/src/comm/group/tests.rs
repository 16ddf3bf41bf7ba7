//! Splits: their ranks, their counters, and the faults of their calls.

use crate::comm::call::{Call, Op};
use crate::comm::process::tests::{tcp_group, tcp_group_within};
use crate::comm::tests::on_ranks;
use crate::comm::{Group, Limits, Reduce, threads};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, RankFault};
use crate::tensor::Tensor;
use std::thread;
use std::time::Duration;

const LIMIT: Duration = Duration::from_millis(800);

fn groups_within(size: usize) -> [Vec<Group>; 2] {
    let limits = Limits { collective: LIMIT, ..Limits::default() };
    [threads::group_within(size, limits), tcp_group_within(size, LIMIT)]
}

fn number(value: f32) -> Tensor {
    Tensor::from_slice(&Device::Cpu, &[1], &[value]).unwrap()
}

#[test]
fn a_split_of_a_split_has_the_ranks_of_its_colour_in_the_order_of_keys() {
    for group in [threads::group(6), tcp_group(6)] {
        on_ranks(group, |world| {
            let rank = world.rank();
            // Ranks 1 3 5 in reverse, and ranks 0 2 4.
            let half = world.split("half", rank % 2, if rank % 2 == 1 { 10 - rank } else { 7 }).unwrap();
            assert_eq!(half.ranks(), [[0, 2, 4], [5, 3, 1]][rank % 2]);
            assert_eq!((half.ranks()[half.rank()], half.size(), half.name()), (rank, 3, "half"));
            let part = half.split("part", usize::from(half.rank() > 0), 0).unwrap();
            assert_eq!(part.ranks(), if half.rank() == 0 { &half.ranks()[..1] } else { &half.ranks()[1..] });
            let sum = |group: &Group| {
                group
                    .all_reduce("x", Reduce::Sum, number(rank as f32))
                    .unwrap()
                    .wait()
                    .unwrap()
                    .to_vec::<f32>()
                    .unwrap()[0]
            };
            let sums = [&world, &half, &part].map(sum);
            let expected = [&world, &half, &part].map(|group| group.ranks().iter().sum::<usize>() as f32);
            assert_eq!(sums, expected);
            // Roots are numbered in the group, and sums are added in the order of the group.
            let x = half.broadcast("x", 2, number(rank as f32)).unwrap().wait().unwrap();
            assert_eq!(x.to_vec::<f32>().unwrap(), [half.ranks()[2] as f32]);
            assert_eq!(
                half.agree("ranks", &[rank as u8]).unwrap().concat(),
                half.ranks().iter().map(|&r| r as u8).collect::<Vec<_>>()
            );
            assert_eq!(world.traffic().all_reduce.calls, 3, "of all groups");
            let recent = world.recent();
            assert!(recent.contains(&"2 of group `half`: all_reduce `x` of 1 float32".into()), "{recent:?}");
            let error = half.broadcast("x", 3, number(0.0)).err().unwrap().to_string();
            assert_eq!(error, "broadcast `x`: from rank 3: the group has 3 ranks");
            drop(half);
            world.finish().unwrap();
        });
    }
}

#[test]
fn a_rank_alone_splits_itself() {
    let half = Group::solo().split("half", 3, 1).unwrap();
    assert_eq!((half.rank(), half.size(), half.name()), (0, 1, "half"));
    half.barrier("alone").unwrap();
    let thread = threads::group(1).swap_remove(0);
    thread.split("half", 0, 0).unwrap().barrier("alone").unwrap();
    let dry = Group::dry(2, 4);
    assert_eq!(dry.split("all", 1, 1).unwrap().ranks(), [0, 1, 2, 3]);
    let odd = dry.split_by("even", |rank| (rank % 2, 0)).unwrap();
    assert_eq!((odd.ranks(), odd.rank()), (&[0, 2][..], 1));
}

#[test]
fn ranks_that_disagree_in_a_split_are_named_as_in_the_job() {
    for group in [threads::group(4), tcp_group(4)] {
        let errors = on_ranks(group, |world| {
            let pair = world.split("pair", world.rank() / 2, 0).unwrap();
            // Ranks 0 and 1 wait for the other pair, and get the fault of that pair.
            match world.rank() {
                3 => pair.barrier("save"),
                2 => pair.agree("stop", &[]).map(drop),
                _ => world.barrier("next"),
            }
            .unwrap_err()
        });
        for error in errors {
            let message = "ranks disagree: rank 3 calls barrier `save` as its collective 1 of group `pair` (ranks 2, 3), \
                           rank 2 calls agree `stop`";
            assert_eq!(error.to_string(), message);
            assert!(matches!(error, Error::Ranks { fault: RankFault::Desync, .. }));
        }
    }
}

#[test]
fn ranks_that_split_differently_are_named() {
    for group in [threads::group(3), tcp_group(3)] {
        let errors = on_ranks(group, |world| {
            let name = if world.rank() == 2 { "tensor" } else { "data" };
            world.split(name, 0, 0).err().expect("names differ").to_string()
        });
        for error in errors {
            assert!(error.contains("rank 2 calls split `tensor` as its collective 1, rank "), "{error}");
            assert!(error.contains("calls split `data`"), "{error}");
        }
    }
}

#[test]
fn a_rank_that_a_waiting_rank_waits_for_is_the_one_that_is_late() {
    for group in groups_within(3) {
        let errors = on_ranks(group, |world| {
            let low = world.split("low", world.rank() / 2, 0).unwrap();
            let high = world.split("high", usize::from(world.rank() > 0), 0).unwrap();
            match world.rank() {
                // Rank 0 waits for rank 1, which waits for rank 2. Rank 2 is alive and makes no call.
                0 => low.barrier("first"),
                1 => high.barrier("second"),
                _ => {
                    thread::sleep(LIMIT * 3);
                    world.barrier("never")
                }
            }
            .unwrap_err()
            .to_string()
        });
        for error in errors {
            assert!(error.starts_with("rank 2 (pid ") && error.contains("did not call barrier `second`"), "{error}");
            assert!(error.contains("collective 1 of group `high` (ranks 1, 2) (its last was split `high`"), "{error}");
            assert!(error.ends_with("; rank 1 is waiting"), "{error}");
        }
    }
}

#[test]
fn ranks_that_wait_for_each_other_are_named() {
    for group in groups_within(2) {
        let errors = on_ranks(group, |world| {
            let other = world.split("other", 0, 0).unwrap();
            let [first, second] = if world.rank() == 0 { [&world, &other] } else { [&other, &world] };
            first.barrier("a").and_then(|()| second.barrier("a")).unwrap_err().to_string()
        });
        for error in errors {
            assert!(error.contains("did not call barrier `a`, collective "), "{error}");
            assert!(error.contains("its last was barrier `a`, collective "), "{error}");
            assert!(error.contains("rank 0") && error.contains("rank 1") && error.contains("group `other`"), "{error}");
        }
    }
}

#[test]
fn calls_of_gpus_are_compared_in_each_group_and_between_each_pair() {
    let call = |op, elements| Call { op, name: "x".into(), dtype: Some(DType::BF16), elements };
    type Calls = fn(usize, usize) -> (Op, usize);
    // The calls by rank. Calls are equal within a pair, and differ between pairs.
    let equal: [Calls; 2] = [
        |rank, _| (Op::AllGather, 8 + rank / 2),
        |rank, place| (if place == 0 { Op::Send { to: rank + 1 } } else { Op::Receive { from: rank - 1 } }, rank / 2),
    ];
    let different: [(Calls, &str); 3] = [
        (
            |rank, _| (Op::AllGather, rank),
            "rank 1 has started 1 collectives of group `pair` (ranks 0, 1), the last all_gather",
        ),
        (
            |rank, place| (if place == 0 { Op::Send { to: rank + 1 } } else { Op::Receive { from: rank - 1 } }, rank),
            "rank 1 has started 1 messages from rank 0 to rank 1 of group `pair` (ranks 0, 1), the last receive `x` of 1 bfloat16",
        ),
        (
            |rank, place| if place == 0 { (Op::Send { to: rank + 1 }, 1) } else { (Op::AllGather, 1) },
            "rank 1 has started no messages from rank 0 to rank 1",
        ),
    ];
    for group in [threads::group(4), tcp_group(4)] {
        on_ranks(group, |world| {
            let pair = world.split("pair", world.rank() / 2, 0).unwrap();
            for (step, calls) in equal.iter().enumerate() {
                let (op, elements) = calls(world.rank(), pair.rank());
                pair.endpoint.history.note(&pair.members, world.rank(), &call(op, elements));
                world.compare_calls_so_far(&format!("step {step}")).unwrap();
            }
            world.finish().unwrap();
        });
    }
    for (calls, expected) in different {
        let errors = on_ranks(threads::group(4), |world| {
            let pair = world.split("pair", world.rank() / 2, 0).unwrap();
            let (op, elements) = calls(world.rank(), pair.rank());
            pair.endpoint.history.note(&pair.members, world.rank(), &call(op, elements));
            world.compare_calls_so_far("step 1").unwrap_err().to_string()
        });
        for error in errors {
            assert!(error.contains(expected), "{error}");
            assert!(error.contains(" of its GPU, and rank 0 "), "{error}");
        }
    }
}
