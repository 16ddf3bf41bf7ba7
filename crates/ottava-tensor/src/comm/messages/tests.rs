//! Messages of threads and of TCP ranks: their order, and partners that are missing, different, dead or late.

use crate::comm::fault::this_process;
use crate::comm::process::tests::{tcp_group, tcp_group_within};
use crate::comm::tests::on_ranks;
use crate::comm::{Group, Limits, Sent, threads};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, RankFault, Result};
use crate::tensor::Tensor;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_millis(800);

/// The maximum time in which a test's fault reaches all ranks.
const DEADLINE: Duration = Duration::from_secs(20);

fn tensor(values: &[f32]) -> Tensor {
    Tensor::from_slice(&Device::Cpu, &[values.len()], values).unwrap()
}

fn zeros(elements: usize) -> Tensor {
    Tensor::zeros(&Device::Cpu, &[elements], DType::F32).unwrap()
}

#[test]
fn messages_arrive_in_order_and_do_not_hold_their_sender() {
    for group in [threads::group(3), tcp_group(3)] {
        on_ranks(group, |group| {
            let (rank, values) = (group.rank(), |i: usize| tensor(&[i as f32, 10.0 + i as f32]));
            if rank == 0 {
                // Sent before the other ranks receive.
                for i in 0..4 {
                    let sent = group.send("x", 1 + i % 2, &values(i)).unwrap().wait().unwrap();
                    assert_eq!(sent.to_vec::<f32>().unwrap(), [i as f32, 10.0 + i as f32]);
                }
                group.send("nothing", 1, &zeros(0)).unwrap().wait().unwrap();
                assert_eq!(group.traffic().send, Sent { calls: 5, bytes: 32 });
            }
            group.barrier("sent").unwrap();
            if rank > 0 {
                let open: Vec<_> = (0..2).map(|_| group.receive("x", 0, zeros(2)).unwrap()).collect();
                for (i, open) in open.into_iter().enumerate() {
                    let expected = values(2 * i + rank - 1).to_vec::<f32>().unwrap();
                    assert_eq!(open.wait().unwrap().to_vec::<f32>().unwrap(), expected, "rank {rank}");
                }
                assert_eq!(group.traffic().send, Sent::default(), "a message counts for its sender");
            }
            if rank == 1 {
                group.receive("nothing", 0, zeros(0)).unwrap().wait().unwrap();
            }
            group.finish().unwrap();
        });
    }
}

#[test]
fn neighbours_exchange_in_a_ring() {
    for group in [threads::group(1), tcp_group(2), threads::group(5), tcp_group(3)] {
        on_ranks(group, |group| {
            let (rank, size) = (group.rank(), group.size());
            let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
            // Sizes differ by sender, if there are several ranks.
            let values = |rank: usize| vec![rank as f32; if size == 1 { 2 } else { 1 + rank }];
            let received = group.exchange("x", next, &tensor(&values(rank)), previous, zeros(values(previous).len()));
            assert_eq!(received.unwrap().wait().unwrap().to_vec::<f32>().unwrap(), values(previous));
            group.finish().unwrap();
        });
    }
}

#[test]
fn unfit_messages_are_errors_before_anything_is_sent() {
    let group = threads::group(3).swap_remove(1);
    let codes = Tensor::zeros(&Device::Cpu, &[2], DType::E4M3).unwrap();
    let cases = [
        (group.send("a", 1, &zeros(2)), "send `a` of 2 float32 to rank 1: that is this rank"),
        (group.receive("a", 1, zeros(2)), "receive `a` of 2 float32 from rank 1: that is this rank"),
        (group.exchange("a", 1, &zeros(2), 0, zeros(2)), "to rank 1: that is this rank"),
        (group.exchange("a", 1, &zeros(2), 1, codes), "exchange `a` of 2 float32 with 2 float8_e4m3 of this rank"),
        (group.send("a", 3, &zeros(2)), "message `a`: with rank 3: the group has 3 ranks"),
        (group.send("a", 0, &Tensor::zeros(&Device::Cpu.dry(), &[3], DType::F32).unwrap()), "a dry run has no data"),
    ];
    for (result, expected) in cases {
        let message = result.err().expect("an unfit message").to_string();
        assert!(message.contains(expected), "{message}");
    }
    assert!(group.recent().is_empty());
}

/// The call of rank 2 of four ranks, and the call that rank 3 must make. They are in a group of these two ranks, with `elements` elements.
type Sides = [fn(&Group, &str, usize) -> Result<()>; 2];

const SEND: fn(&Group, &str, usize) -> Result<()> =
    |pair, name, elements| pair.send(name, 1 - pair.rank(), &zeros(elements))?.wait().map(drop);
const RECEIVE: fn(&Group, &str, usize) -> Result<()> =
    |pair, name, elements| pair.receive(name, 1 - pair.rank(), zeros(elements))?.wait().map(drop);
const EXCHANGE: fn(&Group, &str, usize) -> Result<()> = |pair, name, elements| {
    let other = 1 - pair.rank();
    pair.exchange(name, other, &zeros(elements), other, zeros(elements))?.wait().map(drop)
};
/// The number of elements is part of the name, so another number is another name.
const SPLIT: fn(&Group, &str, usize) -> Result<()> =
    |pair, name, elements| pair.split(&format!("{name}{elements}"), 0, 0).map(drop);

const SIDES: [(&str, Sides); 4] =
    [("send", [SEND, RECEIVE]), ("receive", [RECEIVE, SEND]), ("exchange", [EXCHANGE; 2]), ("split", [SPLIT; 2])];

/// The action of rank 3 instead of its side of a call.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Instead {
    /// It makes the call with another size.
    Different,
    /// It leaves the job.
    Leaves,
    /// It is alive but makes no call.
    Sleeps,
    /// It waits in a barrier of all ranks.
    Elsewhere,
}

/// Returns the errors of the ranks that make a call, by rank, and the time until they occurred.
fn errors(group: Vec<Group>, sides: Sides, instead: Instead) -> Vec<(usize, Error)> {
    let (began, failed) = (Instant::now(), AtomicUsize::new(0));
    let errors = on_ranks(group, |world| {
        let rank = world.rank();
        let pair = world.split("pair", rank / 2, 0).unwrap();
        let error = match (rank, instead) {
            (2, _) => sides[0](&pair, "x", 4).and_then(|()| pair.barrier("after")),
            (3, Instead::Different) => sides[1](&pair, "x", 8).and_then(|()| pair.barrier("after")),
            (3, Instead::Leaves) => return None,
            (3, Instead::Sleeps) => {
                // It waits until all other ranks have failed.
                while failed.load(Ordering::SeqCst) < 3 && began.elapsed() < DEADLINE {
                    thread::sleep(LIMIT / 20);
                }
                return None;
            }
            _ => {
                // Ranks 0 and 1 call the barrier later than rank 2 makes its call, so the call of rank 2 is overdue first.
                thread::sleep(if rank < 2 { LIMIT / 2 } else { Duration::ZERO });
                world.barrier("elsewhere")
            }
        };
        failed.fetch_add(1, Ordering::SeqCst);
        Some((rank, error.expect_err("the ranks of a failed job get errors")))
    });
    assert!(began.elapsed() < DEADLINE, "{:?}", began.elapsed());
    errors.into_iter().flatten().collect()
}

fn groups() -> [Vec<Group>; 2] {
    let limits = Limits { collective: LIMIT, ..Limits::default() };
    [threads::group_within(4, limits), tcp_group_within(4, LIMIT)]
}

#[test]
fn sides_that_differ_are_both_named_on_all_ranks() {
    for (what, sides) in SIDES {
        for group in groups() {
            let errors = errors(group, sides, Instead::Different);
            assert_eq!(errors.len(), 4, "{what}");
            for (rank, error) in errors {
                let message = error.to_string();
                assert!(matches!(error, Error::Ranks { fault: RankFault::Desync, .. }), "{what}: {message}");
                assert!(message.contains(" of group `pair` (ranks 2, 3)"), "{what}, rank {rank}: {message}");
                let calls = match what {
                    "send" => [
                        "rank 3 calls receive `x` of 8 float32 from rank 2",
                        "rank 2 calls send `x` of 4 float32 to rank 3",
                    ],
                    "receive" => [
                        "rank 3 calls send `x` of 8 float32 to rank 2",
                        "rank 2 calls receive `x` of 4 float32 from rank 3",
                    ],
                    "exchange" => ["rank 3 calls ", "rank 2 calls "],
                    _ => ["rank 3 calls split `x8`", "rank 2 calls split `x4`"],
                };
                assert!(calls.iter().all(|call| message.contains(call)), "{what}, rank {rank}: {message}");
            }
        }
    }
}

#[test]
fn a_partner_that_leaves_is_named_on_all_ranks() {
    for (what, sides) in SIDES {
        for group in groups() {
            let errors = errors(group, sides, Instead::Leaves);
            assert_eq!(errors.len(), 3, "{what}");
            for (rank, error) in errors {
                let message = error.to_string();
                assert!(
                    message.starts_with(&format!("rank 3 ({}) ended during ", this_process())),
                    "{what}: {message}"
                );
                // The sender may have continued.
                let during = match (rank, what) {
                    (2, "send" | "exchange") => " of group `pair` (ranks 2, 3)",
                    (2, "receive") => "receive `x` from rank 3, message 1 of group `pair` (ranks 2, 3)",
                    (2, _) => "split `x4`, collective 1 of group `pair` (ranks 2, 3)",
                    _ => "barrier `elsewhere`, collective 2",
                };
                assert!(message.contains(during), "{what}, rank {rank}: {message}");
            }
        }
    }
}

#[test]
fn a_partner_that_never_comes_is_named_with_who_waits_for_it() {
    for (what, sides) in SIDES {
        for group in groups() {
            let errors = errors(group, sides, Instead::Sleeps);
            assert_eq!(errors.len(), 3, "{what}");
            let (missed, waits) = match what {
                "send" | "exchange" => ("receive `x` from rank 2, message 1", "has sent it"),
                "receive" => ("send `x` to rank 2, message 1", "is waiting"),
                _ => ("split `x4`, collective 1", "is waiting"),
            };
            for (rank, error) in errors {
                assert!(matches!(error, Error::Ranks { fault: RankFault::Late, .. }), "{what}, {rank}: {error}");
                let expected = format!(
                    "rank 3 ({}) did not call {missed} of group `pair` (ranks 2, 3) (its last was split `pair`, \
                     collective 1) within 800ms; rank 2 {waits}",
                    this_process()
                );
                assert_eq!(error.to_string(), expected, "{what}, rank {rank}");
            }
        }
    }
}

#[test]
fn a_partner_that_waits_in_another_call_is_named_with_both_calls() {
    for (what, sides) in SIDES {
        let limits = Limits { collective: LIMIT, ..Limits::default() };
        let errors = errors(threads::group_within(4, limits), sides, Instead::Elsewhere);
        assert_eq!(errors.len(), 4, "{what}");
        for (rank, error) in errors {
            let message = error.to_string();
            assert!(matches!(error, Error::Ranks { fault: RankFault::Late, .. }), "{what}, rank {rank}: {message}");
            assert!(message.contains("rank 2"), "{what}, rank {rank}: {message}");
            assert!(
                message.contains("rank 3") || message.contains(", 3 are waiting"),
                "{what}, rank {rank}: {message}"
            );
            assert!(message.contains("barrier `elsewhere`"), "{what}, rank {rank}: {message}");
            assert!(message.contains("of group `pair` (ranks 2, 3)"), "{what}, rank {rank}: {message}");
        }
    }
}

#[test]
fn two_ranks_that_receive_from_each_other_are_named() {
    let limits = Limits { collective: LIMIT, ..Limits::default() };
    let errors = on_ranks(threads::group_within(2, limits), |group| {
        group.receive("x", 1 - group.rank(), zeros(1)).unwrap().wait().unwrap_err().to_string()
    });
    for error in errors {
        assert!(
            error.contains("did not call send `x` to rank ") && error.contains("its last was receive `x`"),
            "{error}"
        );
    }
}

/// An announcement may take any time, because a server without requests is healthy. Ranks that do not listen are late.
#[test]
fn announcements_reach_all_ranks_and_have_no_deadline() {
    let groups = || {
        let limits = Limits { collective: LIMIT, ..Limits::default() };
        [threads::group_within(3, limits), tcp_group_within(3, LIMIT)]
    };
    for group in groups() {
        on_ranks(group, |group| {
            if group.rank() == 1 {
                group.announce("first", b"early".to_vec()).unwrap();
                thread::sleep(LIMIT * 3);
                group.announce("second", Vec::new()).unwrap();
            } else {
                assert_eq!(group.listen("first", 1).unwrap(), b"early");
                assert_eq!(group.listen("second", 1).unwrap(), b"");
            }
            group.finish().unwrap();
        });
    }
    for group in groups() {
        let errors = on_ranks(group, |group| match group.rank() {
            0 => {
                group.announce("step", vec![1]).unwrap();
                group.barrier("step").unwrap_err().to_string()
            }
            1 => group.listen("step", 0).unwrap_err().to_string(),
            _ => {
                thread::sleep(LIMIT * 3);
                String::new()
            }
        });
        for error in &errors[..2] {
            assert!(error.starts_with("rank 2 (") && error.contains(" did not call "), "{error}");
        }
    }
    let group = threads::group(2);
    let errors = on_ranks(group, |group| (group.rank() == 0).then(|| group.listen("step", 1).unwrap_err().to_string()));
    let ended = format!("rank 1 ({}) ended during announce `step`, collective 1", this_process());
    assert_eq!(errors[0].as_deref(), Some(ended.as_str()));
    let wrong = threads::group(2).swap_remove(0).listen("step", 2).unwrap_err().to_string();
    assert_eq!(wrong, "announce `step`: from rank 2: the group has 2 ranks");
}

#[test]
fn an_inbox_has_the_parts_of_the_others_in_their_order() {
    for group in [threads::group(4), tcp_group(4)] {
        let received = on_ranks(group, |group| {
            let (rank, size) = (group.rank(), group.size());
            let mut inbox = group.inbox(&Device::Cpu, 2, DType::F32).unwrap();
            // Ranks exchange with the other ranks in different orders.
            for step in [2, 1, 3] {
                let part = tensor(&[rank as f32, 0.5]);
                inbox.exchange("part", (rank + step) % size, &part, (rank + size - step) % size).unwrap();
            }
            let again = inbox.exchange("part", (rank + 1) % size, &zeros(2), (rank + 3) % size).unwrap_err();
            assert!(again.to_string().contains("has sent its part"), "{again}");
            let parts = inbox.wait().unwrap().to_vec::<f32>().unwrap();
            group.barrier("received").unwrap();
            parts
        });
        for (rank, parts) in received.into_iter().enumerate() {
            let expected: Vec<_> =
                (0..4).filter(|&other| other != rank).flat_map(|other| [other as f32, 0.5]).collect();
            assert_eq!(parts, expected, "rank {rank}");
        }
    }
}
