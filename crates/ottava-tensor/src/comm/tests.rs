//! Compares each collective with plain loops, on groups of threads and of TCP ranks. Tests disagreement and lost ranks.

use super::call::{Call, Op};
use super::process::tests::{tcp_group, tcp_group_within};
use super::*;
use crate::device::Device;
use crate::dtype::DType;
use crate::element::{Float, Real, with_float};
use crate::error::{Error, RankFault, Result};
use crate::tensor::Tensor;
use half::bf16;
use proptest::prelude::*;
use std::thread;
use std::time::{Duration, Instant};

/// All types.
const DTYPES: [DType; 11] = [
    DType::F64,
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::E4M3,
    DType::E5M2,
    DType::E8M0,
    DType::I16,
    DType::I32,
    DType::I64,
    DType::U8,
];

/// Runs `rank` on a thread per group, and returns the results in rank order.
pub(super) fn on_ranks<T: Send>(group: Vec<Group>, rank: impl Fn(Group) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let ranks: Vec<_> = group.into_iter().map(|comm| scope.spawn(|| rank(comm))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    })
}

fn tensor(dtype: DType, bytes: &[u8]) -> Tensor {
    Tensor::from_bytes(&Device::Cpu, &[bytes.len() / dtype.size()], dtype, bytes).unwrap()
}

/// Returns `count` elements of `dtype` for `rank`. Sums of them are rounded, and depend on the order.
fn values(dtype: DType, count: usize, rank: usize, seed: u64) -> Vec<u8> {
    let value = |i: usize| {
        let mut x = seed ^ ((rank as u64) << 32) ^ i as u64;
        for _ in 0..3 {
            x = (x ^ (x >> 31)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        }
        (x >> 11) as f64 / (1u64 << 53) as f64 - 0.5
    };
    match dtype {
        DType::E8M0 | DType::U8 => (0..count).map(|i| (value(i) * 255.0) as i8 as u8).collect(),
        DType::I16 => (0..count).flat_map(|i| ((value(i) * 6e4) as i16).to_le_bytes()).collect(),
        DType::I32 => (0..count).flat_map(|i| ((value(i) * 4e9) as i32).to_le_bytes()).collect(),
        DType::I64 => (0..count).flat_map(|i| ((value(i) * 1e19) as i64).to_le_bytes()).collect(),
        dtype => with_float!(dtype, T => {
            let wide = |i| value(i) * if i % 3 == 0 { 3e4 } else { 1.0 };
            let values: Vec<T> = (0..count).map(|i| T::store(<T as Float>::Real::of(wide(i)))).collect();
            bytemuck::cast_slice(&values).to_vec()
        }),
    }
}

/// Returns the sum in rank order, element by element.
fn plain_sum<T: Float>(inputs: &[Vec<u8>], output: DType) -> Vec<u8> {
    let read = |bytes: &[u8], i: usize| tensor(T::DTYPE, bytes).to_vec::<T>().unwrap()[i].load();
    let sum = |i: usize| inputs[1..].iter().fold(read(&inputs[0], i), |sum, input| sum + read(input, i));
    let count = inputs[0].len() / size_of::<T>();
    if output == T::DTYPE {
        (0..count).flat_map(|i| bytemuck::bytes_of(&T::store(sum(i))).to_vec()).collect()
    } else {
        (0..count).flat_map(|i| (sum(i).to_f64() as f32).to_le_bytes()).collect()
    }
}

/// The results of a rank's collectives, as bytes.
type Results = Vec<Vec<u8>>;

/// Calls each collective once, with `n` elements per slice.
fn call_all(comm: &Group, dtype: DType, n: usize, seed: u64) -> Result<Results> {
    let (rank, size) = (comm.rank(), comm.size());
    let own = tensor(dtype, &values(dtype, n * size, rank, seed));
    let mut pending = vec![
        comm.all_gather("gather", own.duplicate()?)?,
        comm.all_to_all("exchange", &own, own.empty_like()?)?,
        comm.broadcast("copy", size - 1, own.duplicate()?)?,
    ];
    if [DType::F64, DType::F32, DType::F16, DType::BF16].contains(&dtype) {
        for output in [dtype, DType::F32] {
            let output = Tensor::empty(&Device::Cpu, &[n], output)?;
            pending.push(comm.reduce_scatter("scatter", &own, output)?);
        }
        pending.push(comm.all_reduce("sum", Reduce::Sum, own.duplicate()?)?);
    }
    if [DType::F64, DType::F32, DType::I32, DType::I64].contains(&dtype) {
        pending.push(comm.all_reduce("max", Reduce::Max, own.duplicate()?)?);
    }
    comm.barrier("between")?;
    let mut results = pending.into_iter().map(|p| p.wait()?.read_bytes()).collect::<Result<Results>>()?;
    results.extend(comm.agree("lengths", &vec![rank as u8; rank * n])?);
    Ok(results)
}

/// Returns the results that `call_all` must return on `rank`.
fn expected(rank: usize, size: usize, dtype: DType, n: usize, seed: u64) -> Results {
    let inputs: Vec<_> = (0..size).map(|rank| values(dtype, n * size, rank, seed)).collect();
    let slice =
        |bytes: &[u8], which: usize| bytes[which * bytes.len() / size..(which + 1) * bytes.len() / size].to_vec();
    let mut results = vec![
        (0..size).flat_map(|from| slice(&inputs[from], from)).collect(),
        (0..size).flat_map(|from| slice(&inputs[from], rank)).collect(),
        inputs[size - 1].clone(),
    ];
    if [DType::F64, DType::F32, DType::F16, DType::BF16].contains(&dtype) {
        let sum = |output| with_float!(dtype, T => plain_sum::<T>(&inputs, output));
        results.extend([slice(&sum(dtype), rank), slice(&sum(DType::F32), rank), sum(dtype)]);
    }
    macro_rules! largest {
        ($t:ty) => {{
            let read = |rank: usize| tensor(dtype, &inputs[rank]).to_vec::<$t>().unwrap();
            let larger = |a: Vec<$t>, b: Vec<$t>| a.into_iter().zip(b).map(|(a, b)| a.max(b)).collect();
            let largest = (1..size).map(read).fold(read(0), larger);
            results.push(bytemuck::cast_slice(&largest).to_vec());
        }};
    }
    match dtype {
        DType::F64 => largest!(f64),
        DType::F32 => largest!(f32),
        DType::I32 => largest!(i32),
        DType::I64 => largest!(i64),
        _ => {}
    }
    results.extend((0..size).map(|rank| vec![rank as u8; rank * n]));
    results
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn collectives_of_threads_equal_plain_loops(size in 1usize..=5, which in 0..DTYPES.len(), n in 0usize..14, seed: u64) {
        let results = on_ranks(threads::group(size), |comm| call_all(&comm, DTYPES[which], n, seed).unwrap());
        for (rank, results) in results.into_iter().enumerate() {
            prop_assert_eq!(results, expected(rank, size, DTYPES[which], n, seed));
        }
    }
}

#[test]
fn solo_threads_and_processes_give_the_same_bits() {
    for size in [1, 2, 5] {
        let groups = [threads::group(size), tcp_group(size)];
        let results = groups.map(|group| {
            on_ranks(group, |comm| DTYPES.map(|dtype| [0, 1, 257].map(|n| call_all(&comm, dtype, n, 7).unwrap())))
        });
        assert!(results[0] == results[1], "{size} ranks");
        if size == 1 {
            let comm = Group::solo();
            let solo = DTYPES.map(|dtype| [0, 1, 257].map(|n| call_all(&comm, dtype, n, 7).unwrap()));
            assert!(solo == results[0][0]);
        }
    }
}

#[test]
fn sums_are_in_rank_order_and_rounded_once() {
    // In F32, 1e8 + 1 is 1e8, so only the last term survives. In reverse order, only the 1 survives.
    let terms = [1e8f32, 1.0, -1e8, 2.0];
    let sums = on_ranks(threads::group(4), |comm| {
        let x = Tensor::from_slice(&Device::Cpu, &[1], &[terms[comm.rank()]]).unwrap();
        comm.all_reduce("x", Reduce::Sum, x).unwrap().wait().unwrap().to_vec::<f32>().unwrap()[0]
    });
    assert_eq!(sums, [2.0; 4]);
    // 2^-9 is added to 1 three times. Rounding to BF16 after each addition would lose every term.
    let terms = [1.0, 1.0 / 512.0, 1.0 / 512.0, 1.0 / 512.0].map(bf16::from_f32);
    let sums = on_ranks(threads::group(4), |comm| {
        let x = Tensor::from_slice(&Device::Cpu, &[1], &[terms[comm.rank()]]).unwrap();
        comm.all_reduce("x", Reduce::Sum, x).unwrap().wait().unwrap().to_vec::<bf16>().unwrap()[0]
    });
    assert_eq!(sums, [bf16::from_f32(1.0078125); 4]);
}

#[test]
fn a_nan_survives_the_maximum_on_any_rank() {
    for bad in 0..3 {
        let largest = on_ranks(threads::group(3), |comm| {
            let own = if comm.rank() == bad { f32::NAN } else { 1.0 };
            let x = Tensor::from_slice(&Device::Cpu, &[2], &[own, -0.0 * comm.rank() as f32]).unwrap();
            comm.all_reduce("amax", Reduce::Max, x).unwrap().wait().unwrap().to_vec::<f32>().unwrap()
        });
        assert!(largest.iter().all(|x| x[0].is_nan() && x[1] == 0.0), "{bad}: {largest:?}");
    }
}

/// Returns the errors of all ranks. Each rank makes one call. The argument of `odd` says whether the rank makes the different call.
fn errors(group: Vec<Group>, odd: impl Fn(&Group, bool) -> Result<()> + Sync) -> Vec<Error> {
    on_ranks(group, |comm| {
        comm.barrier("start").unwrap();
        odd(&comm, comm.rank() == 1).expect_err("the ranks disagree")
    })
}

#[test]
fn ranks_that_disagree_get_both_sides() {
    let x = |dtype, n| Tensor::zeros(&Device::Cpu, &[n], dtype).unwrap();
    let gather = |comm: &Group, name: &str, dtype, n| comm.all_gather(name, x(dtype, n))?.wait().map(drop);
    type Odd<'a> = Box<dyn Fn(&Group, bool) -> Result<()> + Sync + 'a>;
    let cases: Vec<(Odd, &str, &str)> = vec![
        (
            Box::new(|comm, odd| match odd {
                true => comm.reduce_scatter("b", &x(DType::BF16, 6), x(DType::F32, 2))?.wait().map(drop),
                false => gather(comm, "a", DType::F32, 3),
            }),
            "reduce_scatter `b` of 6 bfloat16 to float32",
            "all_gather `a` of 3 float32",
        ),
        (
            Box::new(|comm, odd| gather(comm, if odd { "b" } else { "a" }, DType::F32, 3)),
            "all_gather `b` of 3 float32",
            "all_gather `a` of 3 float32",
        ),
        (
            Box::new(|comm, odd| gather(comm, "a", DType::F32, if odd { 6 } else { 3 })),
            "all_gather `a` of 6 float32",
            "all_gather `a` of 3 float32",
        ),
        (
            Box::new(|comm, odd| gather(comm, "a", if odd { DType::I32 } else { DType::F32 }, 3)),
            "all_gather `a` of 3 int32",
            "all_gather `a` of 3 float32",
        ),
        (
            Box::new(|comm, odd| comm.broadcast("a", usize::from(odd), x(DType::F32, 3))?.wait().map(drop)),
            "broadcast `a` of 3 float32 from rank 1",
            "broadcast `a` of 3 float32 from rank 0",
        ),
        (
            Box::new(|comm, odd| if odd { comm.barrier("save") } else { comm.agree("stop", &[1]).map(drop) }),
            "barrier `save`",
            "agree `stop`",
        ),
    ];
    for (odd, rank_1, others) in cases {
        for group in [threads::group(3), tcp_group(3)] {
            let errors = errors(group, &odd);
            for error in &errors {
                let message = error.to_string();
                assert!(matches!(error, Error::Ranks { fault: RankFault::Desync, .. }), "{message}");
                assert_eq!(message, errors[0].to_string());
                assert!(message.contains("as its collective 2, rank"), "{message}");
                assert!(message.contains(&format!("rank 1 calls {rank_1}")), "{message}");
                assert!(message.contains(&format!("calls {others}")), "{message}");
            }
            let Error::Ranks { recent, .. } = &errors[1] else { unreachable!("seen above") };
            assert_eq!(recent[..], ["1: barrier `start`".to_string(), format!("2: {rank_1}")]);
        }
    }
}

#[test]
fn a_rank_that_leaves_is_named_by_open_and_later_collectives() {
    for group in [threads::group(3), tcp_group(3)] {
        let started = Instant::now();
        let messages = on_ranks(group, |comm| {
            comm.barrier("start").unwrap();
            if comm.rank() == 1 {
                return Vec::new();
            }
            let x = Tensor::zeros(&Device::Cpu, &[1], DType::F32).unwrap();
            let open = comm.all_reduce("grad norm", Reduce::Sum, x).unwrap().wait().unwrap_err().to_string();
            vec![open, comm.barrier("next").unwrap_err().to_string()]
        });
        let process = fault::this_process();
        let open = format!("rank 1 ({process}) ended during all_reduce `grad norm`, collective 2");
        let later = format!("rank 1 ({process}) ended during barrier `next`, collective 3");
        assert_eq!(messages, [vec![open.clone(), later.clone()], vec![], vec![open, later]]);
        assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    }
}

#[test]
fn a_rank_may_leave_once_it_has_its_result() {
    for _ in 0..20 {
        for group in [threads::group(3), tcp_group(3)] {
            on_ranks(group, |comm| comm.barrier("last").unwrap());
        }
    }
}

#[test]
fn unfit_tensors_are_errors_before_anything_is_sent() {
    let comm = threads::group(3).swap_remove(0);
    let x = |dtype, n| Tensor::zeros(&Device::Cpu, &[n], dtype).unwrap();
    let cases = [
        (comm.all_gather("a", x(DType::F32, 7)), "all_gather `a` of 7 float32: the elements do not split into 3"),
        (comm.all_reduce("a", Reduce::Sum, x(DType::E4M3, 3)), "all_reduce `a` is of float8_e4m3, expected float64"),
        (comm.all_reduce("a", Reduce::Max, x(DType::BF16, 3)), "all_reduce (max) `a` is of bfloat16"),
        (comm.reduce_scatter("a", &x(DType::BF16, 6), x(DType::F16, 2)), "the output is float16, expected float32"),
        (comm.reduce_scatter("a", &x(DType::BF16, 6), x(DType::BF16, 3)), "the output has 3 elements, expected 2"),
        (comm.all_to_all("a", &x(DType::F32, 6), x(DType::I32, 6)), "the output is int32"),
        (comm.broadcast("a", 3, x(DType::F32, 6)), "from rank 3: the group has 3 ranks"),
        (comm.all_gather("a", Tensor::zeros(&Device::Cpu.dry(), &[3], DType::F32).unwrap()), "a dry run has no data"),
    ];
    for (result, expected) in cases {
        let message = result.err().expect("an unfit tensor").to_string();
        assert!(message.contains(expected), "{message}");
    }
    let gpu = Device::dry_gpu(crate::cuda::GpuModel::h200());
    let on_gpu = comm.all_gather("a", Tensor::zeros(&gpu, &[3], DType::F32).unwrap()).err().expect("a GPU's tensor");
    assert!(on_gpu.to_string().starts_with("all_gather `a` lies on "), "{on_gpu}");
    assert_eq!(comm.traffic(), Traffic::default());
    assert!(comm.recent().is_empty());
}

#[test]
fn traffic_counts_what_each_collective_has_to_move() {
    let traffic = on_ranks(threads::group(4), |comm| {
        call_all(&comm, DType::F32, 100, 1).unwrap();
        assert_eq!(comm.recent().len(), 9);
        (comm.reset_traffic(), comm.traffic())
    });
    // Buffers have 400 elements of 4 bytes. There are two reduce-scatters and two all-reduces.
    let sent = |calls, bytes| Sent { calls, bytes };
    let expected = Traffic {
        all_gather: sent(1, 1200),
        reduce_scatter: sent(2, 2400),
        all_reduce: sent(2, 4800),
        all_to_all: sent(1, 1200),
        broadcast: sent(1, 1200),
        ..Traffic::default()
    };
    assert_eq!(traffic, [(expected, Traffic::default()); 4]);
    assert_eq!(expected.total(), sent(7, 10_800));
    assert_eq!(expected * 3 - expected, expected + expected);
}

#[test]
fn a_dry_rank_counts_what_it_would_send() {
    let (comm, device) = (Group::dry(1, 4), Device::Cpu.dry());
    assert_eq!(comm.agree("a", b"x").unwrap(), vec![b"x"; 4]);
    comm.barrier("b").unwrap();
    let empty = |n| Tensor::empty(&device, &[n], DType::BF16).unwrap();
    assert_eq!(comm.all_gather("g", empty(400)).unwrap().wait().unwrap().len(), 400);
    assert_eq!(comm.reduce_scatter("r", &empty(400), empty(100)).unwrap().wait().unwrap().len(), 100);
    assert!(comm.all_gather("g", empty(3)).is_err(), "calls are checked");
    let sent = Sent { calls: 1, bytes: 600 };
    assert_eq!(comm.traffic(), Traffic { all_gather: sent, reduce_scatter: sent, ..Traffic::default() });
}

#[test]
fn the_last_64_collectives_are_kept() {
    let comm = Group::solo();
    (0..100).for_each(|i| comm.barrier(&i.to_string()).unwrap());
    let recent = comm.recent();
    assert_eq!((recent.len(), recent[0].as_str(), recent[63].as_str()), (64, "37: barrier `36`", "100: barrier `99`"));
}

/// Progress reports belong to the process, so the two halves are one test.
#[test]
fn a_rank_that_does_not_come_is_named_unless_it_makes_progress() {
    const LIMIT: Duration = Duration::from_millis(800);
    let groups = || {
        let limits = Limits { collective: LIMIT, ..Limits::default() };
        [threads::group_within(3, limits), tcp_group_within(3, LIMIT)]
    };
    for absent in [0, 1] {
        for group in groups() {
            let process = fault::this_process();
            let errors = on_ranks(group, |comm| {
                comm.barrier("first").unwrap();
                if comm.rank() == absent {
                    let begin = Instant::now();
                    // The rank is alive and computes without end.
                    while begin.elapsed() < LIMIT * 3 {
                        thread::sleep(LIMIT / 10);
                    }
                }
                comm.all_reduce("loss", Reduce::Sum, tensor(DType::F32, &[0; 4])).and_then(Pending::wait).err()
            });
            let waiting = if absent == 0 { "ranks 1, 2" } else { "ranks 0, 2" };
            for error in errors {
                let error = error.expect("the deadline is over");
                assert!(matches!(error, Error::Ranks { fault: RankFault::Late, .. }));
                assert_eq!(
                    error.to_string(),
                    format!(
                        "rank {absent} ({process}) did not call all_reduce `loss`, collective 2 \
                         (its last was barrier `first`, collective 1) within 800ms; {waiting} are waiting"
                    )
                );
            }
        }
    }
    for group in groups() {
        on_ranks(group, |comm| {
            let begin = Instant::now();
            while comm.rank() == 1 && begin.elapsed() < LIMIT * 3 {
                report_progress();
                thread::sleep(LIMIT / 20);
            }
            comm.barrier("after long work").unwrap();
        });
    }
}

#[test]
fn different_collectives_of_gpus_are_named_before_anything_waits_for_them() {
    let call = |elements| Call { op: Op::AllGather, name: "layers.3".into(), dtype: Some(DType::BF16), elements };
    for group in [threads::group(3), tcp_group(3)] {
        let errors = on_ranks(group, |comm| {
            comm.endpoint.history.note(&comm.members, comm.rank(), &call(512));
            comm.compare_calls_so_far("step 1").unwrap();
            comm.compare_calls_so_far("step 2").unwrap();
            comm.endpoint.history.note(&comm.members, comm.rank(), &call(if comm.rank() == 1 { 256 } else { 512 }));
            comm.endpoint.history.note(&comm.members, comm.rank(), &call(512));
            comm.compare_calls_so_far("step 3").unwrap_err().to_string()
        });
        for error in errors {
            assert!(
                error.starts_with("ranks disagree: in step 3, rank 1 has started 2 collectives, the last all_gather")
            );
            assert!(error.contains(" of its GPU, and rank 0 2 collectives, the last all_gather `layers.3`"), "{error}");
        }
    }
}
