//! Compares collectives of two GPUs, each in a separate process, with collectives of the CPU. Skipped with a message if there are fewer GPUs.

use super::*;
use crate::comm::process::tests::{Rank, join_as_child};
use crate::cuda::{GpuModel, Graph};
use crate::element::Element;
use half::bf16;
use std::env;
use std::thread;
use std::time::Duration;

/// The numbers of elements of a slice: one, a prime, and more than one CTA processes at once.
const SLICES: [usize; 3] = [1, 1009, (1 << 18) + 16];

/// The number of replays of a captured graph. Each replay has other inputs.
const REPLAYS: usize = 3;

/// Returns the input of a collective, by rank, round and element. Sums of these values are rounded.
fn value(rank: usize, round: usize, i: usize) -> f32 {
    let bits = ((i + 1) as u32).wrapping_mul(2_654_435_761).rotate_left(11) ^ ((7 * round + rank + 1) as u32);
    let value = f64::from(bits.wrapping_mul(2_246_822_519)) / f64::from(u32::MAX) - 0.5;
    (value * if i.is_multiple_of(3) { 3e4 } else { 1.0 }) as f32
}

fn tensor<T: Element>(len: usize, element: impl Fn(usize) -> T) -> Tensor {
    Tensor::from_slice(&Device::Cpu, &[len], &(0..len).map(element).collect::<Vec<_>>()).unwrap()
}

/// A function that calls one collective.
type Calls = fn(&Group, &Tensor) -> Result<Tensor>;

/// The collectives of two ranks.
const CALLS: [(&str, Calls); 11] = [
    ("all_gather", |comm, x| comm.all_gather("x", x.duplicate()?)?.wait()),
    ("reduce_scatter", |comm, x| {
        comm.reduce_scatter("x", x, Tensor::empty(x.device(), &[x.len() / 2], x.dtype())?)?.wait()
    }),
    ("all_reduce", |comm, x| comm.all_reduce("x", Reduce::Sum, x.duplicate()?)?.wait()),
    ("all_reduce (max)", |comm, x| comm.all_reduce("x", Reduce::Max, x.duplicate()?)?.wait()),
    ("all_to_all", |comm, x| comm.all_to_all("x", x, x.empty_like()?)?.wait()),
    ("broadcast", |comm, x| comm.broadcast("x", 1, x.duplicate()?)?.wait()),
    ("all_gather in symmetric memory", |comm, x| {
        let mut all = comm.symmetric(x.device(), x.shape(), x.dtype())?;
        all.copy_from(0, x)?;
        comm.all_gather("x", all)?.wait()
    }),
    ("all_to_all to symmetric memory", |comm, x| {
        let received = comm.symmetric(x.device(), &[2, x.len() / 2], x.dtype())?;
        comm.all_to_all("x", x, received)?.wait()
    }),
    ("exchange of parts", |comm, x| {
        let mut inbox = comm.inbox(x.device(), x.len(), x.dtype())?;
        inbox.exchange("x", 1 - comm.rank(), x, 1 - comm.rank())?;
        inbox.wait()
    }),
    ("sum", |comm, x| comm.sum("x", x, None)),
    ("sum and addend", |comm, x| comm.sum("x", x, Some(&comm.broadcast("x", 0, x.duplicate()?)?.wait()?))),
];

/// Returns the inputs of a rank in a round: a tensor of each type, and the collectives that support it.
fn inputs(rank: usize, round: usize, slice: usize) -> Vec<(Tensor, &'static [usize])> {
    let (len, float) = (2 * slice, |i| value(rank, round, i));
    const MOVED: &[usize] = &[0, 4, 5, 6, 7, 8];
    const SUMMED: &[usize] = &[0, 1, 2, 4, 5, 6, 7, 8, 9, 10];
    // The values are like amaxes. Each rank has one NaN.
    let amax = |i| if i == len - 1 - rank { f32::NAN } else { float(i).abs() };
    let codes = (0..len).map(|i| float(i).to_bits() as u8).collect::<Vec<_>>();
    vec![
        (tensor(len, float), SUMMED),
        (tensor(len, |i| f64::from(float(i))), &SUMMED[..8]),
        (tensor(len, |i| bf16::from_f32(float(i))), SUMMED),
        (tensor(len, |i| half::f16::from_f32(float(i))), SUMMED),
        (tensor(len, amax), &[3]),
        (tensor(len, |i| float(i) as i32), &[0, 3, 4, 5, 6]),
        (tensor(len, |i| float(i) as i64), &[3]),
        (Tensor::from_bytes(&Device::Cpu, &[len], DType::E4M3, &codes).unwrap(), MOVED),
        (Tensor::from_bytes(&Device::Cpu, &[len], DType::E8M0, &codes).unwrap(), MOVED),
    ]
}

fn expect_equal(name: &str, slice: usize, on_cpu: &Tensor, on_gpu: &Tensor) {
    let [expected, got] = [on_cpu, on_gpu].map(|x| x.read_bytes().unwrap());
    let size = on_cpu.dtype().size();
    let wrong = expected.chunks(size).zip(got.chunks(size)).position(|(a, b)| a != b);
    let words = |i: usize| {
        format!("{:x?} on the CPU, {:x?} on the GPU", &expected[i * size..][..size], &got[i * size..][..size])
    };
    assert!(
        wrong.is_none(),
        "{name} of {}, slices of {slice}: element {wrong:?} is {}",
        on_cpu.dtype(),
        words(wrong.unwrap_or(0))
    );
    assert_eq!(expected.len(), got.len(), "{name}");
}

/// Compares all collectives of one round: eager, and captured and replayed with other inputs.
fn compare_all(comm: &Group, gpu: &Arc<CudaDevice>) -> Result<()> {
    let device = Device::Cuda(gpu.clone());
    for slice in SLICES {
        let of_round = |round| inputs(comm.rank(), round, slice);
        let mut on_gpu: Vec<_> = of_round(0).iter().map(|(x, _)| x.to_device(&device).unwrap()).collect();
        for ((x, calls), on_gpu) in of_round(0).iter().zip(&on_gpu) {
            for &(name, call) in calls.iter().map(|&i| &CALLS[i]) {
                expect_equal(name, slice, &call(comm, x)?, &call(comm, on_gpu)?);
            }
        }
        let mut outputs: Vec<Vec<Tensor>> = Vec::new();
        let mut graph = Graph::capture(gpu, || -> Result<()> {
            for ((_, calls), x) in of_round(0).iter().zip(&on_gpu) {
                outputs.push(calls.iter().map(|&i| (CALLS[i].1)(comm, x)).collect::<Result<_>>()?);
            }
            Ok(())
        })?;
        for round in 1..=REPLAYS {
            let inputs = of_round(round);
            for ((x, _), on_gpu) in inputs.iter().zip(&mut on_gpu) {
                on_gpu.write_bytes(&x.read_bytes()?)?;
            }
            graph.replay()?;
            for ((x, calls), outputs) in inputs.iter().zip(&outputs) {
                for (&(name, call), on_gpu) in calls.iter().map(|&i| &CALLS[i]).zip(outputs) {
                    expect_equal(&format!("{name}, replay {round}"), slice, &call(comm, x)?, on_gpu);
                }
            }
        }
    }
    Ok(())
}

/// The most values of a link of a chain of sums. They take several calls of each block.
const LONGEST: usize = 3_000_001;

/// Compares a chain of sums of many sizes, eager and in replayed graphs: the previous sum is the addend of each sum, and parts are written where the
/// parts of the call before the previous call were. Ranks start late in turns.
fn chain_of_sums(comm: &Group, device: &Device) -> Result<()> {
    let Device::Cuda(gpu) = device else { unreachable!("it is a GPU") };
    let sizes: Vec<_> = (0..60).map(|i| [1, 7, 4096, 30_000, 131_072, LONGEST][(i * i + i / 6) % 6]).collect();
    let chain = |values: &Tensor| -> Result<Tensor> {
        let mut total = Tensor::zeros(values.device(), &[LONGEST], DType::BF16)?;
        for (i, &size) in sizes.iter().enumerate() {
            let sum = comm.sum("link", &values.rows(i, i + size)?, Some(&total.rows(0, size)?))?;
            total.copy_to_elements(0, &sum)?;
        }
        Ok(total)
    };
    let first = tensor(LONGEST + sizes.len(), |i| bf16::from_f32(value(comm.rank(), 0, i)));
    let expected = chain(&first)?;
    let on_gpu = first.to_device(device)?;
    expect_equal("chain of sums", 0, &expected, &chain(&on_gpu)?);
    let mut last = None;
    let mut graph = Graph::capture(gpu, || -> Result<()> {
        last = Some(chain(&on_gpu)?);
        Ok(())
    })?;
    for replay in 0..20 {
        if replay % 2 == comm.rank() {
            thread::sleep(Duration::from_millis(3));
        }
        graph.replay()?;
    }
    expect_equal("replayed chain of sums", 0, &expected, &last.expect("it was captured"));
    Ok(())
}

/// Runs several collectives that are in flight together and overlap with compute. Tensors are freed and dropped early.
fn overlap(comm: &Group, device: &Device) -> Result<()> {
    const N: usize = 1 << 22;
    for round in 0..20 {
        let ones = tensor(N, |_| (round + 1) as f32).to_device(device)?;
        let first = comm.all_reduce("first", Reduce::Sum, ones.duplicate()?)?;
        let dropped = comm.all_to_all("dropped", &ones, ones.empty_like()?)?;
        let second = comm.all_reduce("second", Reduce::Sum, ones.duplicate()?)?;
        drop(dropped);
        // This tensor may reuse the memory of the dropped call.
        let other = Tensor::zeros(device, &[N], DType::F32)?;
        let (second, first) = (second.wait()?, first.wait()?);
        for x in [first, second] {
            assert!(x.to_vec::<f32>()?.iter().all(|&x| x == 2.0 * (round + 1) as f32), "round {round}");
        }
        assert!(other.to_vec::<f32>()?.iter().all(|&x| x == 0.0), "round {round}");
    }
    Ok(())
}

#[test]
#[ignore = "started by collectives_of_two_gpus_equal_those_of_the_cpu"]
fn rank_process() {
    let Some(comm) = join_as_child() else { return };
    println!("joined");
    let gpu = own_gpu(&comm);
    let before = gpu.usable_memory();
    let comm = comm.with_gpu(&gpu, 5).unwrap();
    println!("NCCL holds {} MiB", (before - gpu.usable_memory()) >> 20);
    compare_all(&comm, &gpu).unwrap();
    chain_of_sums(&comm, &Device::Cuda(gpu.clone())).unwrap();
    overlap(&comm, &Device::Cuda(gpu.clone())).unwrap();
    let to_float = comm.reduce_scatter(
        "x",
        &Tensor::zeros(&Device::Cuda(gpu.clone()), &[2], DType::BF16).unwrap(),
        Tensor::zeros(&Device::Cuda(gpu.clone()), &[1], DType::F32).unwrap(),
    );
    let message = to_float.err().expect("NCCL sums to the type of the input").to_string();
    assert!(message.contains("GPUs sum bfloat16 to bfloat16"), "{message}");
    comm.finish().unwrap();
    println!("equal");
}

/// Returns the GPU of this rank.
fn own_gpu(group: &Group) -> Arc<CudaDevice> {
    CudaDevice::open(group.rank()).unwrap()
}

/// Returns whether there are two GPUs. If not, prints a message, or fails if two GPUs are required.
fn has_two_gpus() -> bool {
    let gpus = CudaDevice::count().unwrap_or(0);
    if gpus < 2 {
        let required = env::var("OTTAVA_REQUIRE_GPUS").is_ok_and(|gpus| gpus.trim() >= "2");
        assert!(!required, "{gpus} GPUs are visible");
        eprintln!("skipped: {gpus} GPUs are visible");
    }
    gpus >= 2
}

#[test]
fn collectives_of_two_gpus_equal_those_of_the_cpu() {
    if !has_two_gpus() {
        return;
    }
    let mut ranks = Rank::group("comm::nccl::tests::rank_process", 2, &[]);
    for (rank, process) in ranks.iter_mut().enumerate() {
        eprintln!("rank {rank}: NCCL holds {}", process.line("NCCL holds "));
    }
    for process in &mut ranks {
        process.line("equal");
        assert!(process.0.wait().unwrap().success());
    }
}

/// Sends each kind of message between two ranks, where rank 0 sends first, and runs a collective. Returns what this rank receives.
fn exchange_all(group: &Group, x: &Tensor) -> Result<Vec<Tensor>> {
    let (rank, other) = (group.rank(), 1 - group.rank());
    let into = || Tensor::empty(x.device(), &[x.len()], x.dtype());
    let message = |name, sender| match rank == sender {
        true => group.send(name, other, x),
        false => group.receive(name, other, into()?),
    };
    let there = message("there", 0)?;
    let exchanged = group.exchange("both", other, x, other, into()?)?;
    let back = message("back", 1)?;
    let sum = group.all_reduce("sum", Reduce::Sum, x.duplicate()?)?;
    let (sent, received) = if rank == 0 { (there, back) } else { (back, there) };
    sent.wait()?;
    [received, exchanged, sum].into_iter().map(Pending::wait).collect()
}

/// Compares messages with messages of the CPU. The group is a split that has two ranks in reverse order. Messages are sent without a graph, then
/// captured in a graph and replayed with other inputs.
fn compare_messages(world: &Group, gpu: &Arc<CudaDevice>) -> Result<()> {
    let device = Device::Cuda(gpu.clone());
    let group = world.split("reversed", 0, 1 - world.rank())?;
    assert_eq!(group.ranks(), [1, 0]);
    let early = tensor(1, |_| 1.0f32).to_device(&device)?;
    let captured = Graph::capture(gpu, || group.all_reduce("sum", Reduce::Sum, early.duplicate()?)?.wait().map(drop));
    let message = captured.err().expect("the communicator is not made yet").to_string();
    assert!(message.contains("group `reversed` must send and sum tensors of GPUs once"), "{message}");
    for len in SLICES {
        let input = |round| tensor(len, |i| bf16::from_f32(value(world.rank(), round, i)));
        let mut x = input(0).to_device(&device)?;
        let compare = |what: &str, round, on_gpu: &[Tensor]| -> Result<()> {
            for (on_cpu, on_gpu) in exchange_all(&group, &input(round))?.iter().zip(on_gpu) {
                expect_equal(what, len, on_cpu, on_gpu);
            }
            Ok(())
        };
        compare("eager", 0, &exchange_all(&group, &x)?)?;
        let mut outputs = Vec::new();
        let mut graph = Graph::capture(gpu, || -> Result<()> {
            outputs = exchange_all(&group, &x)?;
            Ok(())
        })?;
        for round in 1..=REPLAYS {
            x.write_bytes(&input(round).read_bytes()?)?;
            graph.replay()?;
            compare(&format!("replay {round}"), round, &outputs)?;
        }
        world.compare_gpu_calls("a length")?;
    }
    Ok(())
}

/// Each rank sends before it receives, and each direction has a separate channel. In one stream, the sends would wait for each other.
fn messages_cross(world: &Group, gpu: &Arc<CudaDevice>) -> Result<()> {
    let device = Device::Cuda(gpu.clone());
    let channel = |name: &str, channel| Ok::<_, Error>(world.split(name, 0, world.rank())?.on_channel(channel));
    let channels = [channel("there", 0)?, channel("back", 1)?];
    let (rank, other) = (world.rank(), 1 - world.rank());
    let x = tensor(1 << 20, |i| bf16::from_f32(value(rank, 0, i))).to_device(&device)?;
    let expected = tensor(1 << 20, |i| bf16::from_f32(value(other, 0, i)));
    // The two ranks create the communicators in the same order.
    for (sender, channel) in channels.iter().enumerate() {
        match rank == sender {
            true => channel.send("first", other, &x)?.wait()?,
            false => channel.receive("first", other, x.empty_like()?)?.wait()?,
        };
    }
    let cross = || -> Result<Tensor> {
        let sent = channels[rank].send("cross", other, &x)?;
        let received = channels[other].receive("cross", other, x.empty_like()?)?.wait()?;
        sent.wait()?;
        Ok(received)
    };
    expect_equal("eager", 1 << 20, &expected, &cross()?);
    let mut received = None;
    let mut graph = Graph::capture(gpu, || -> Result<()> {
        received = Some(cross()?);
        Ok(())
    })?;
    for _ in 0..REPLAYS {
        graph.replay()?;
    }
    expect_equal("replayed", 1 << 20, &expected, received.as_ref().expect("it was captured"));
    world.compare_gpu_calls("crossing messages")
}

#[test]
#[ignore = "started by messages_in_a_split_of_two_gpus_equal_those_of_the_cpu"]
fn message_process() {
    let Some(world) = join_as_child() else { return };
    println!("joined");
    let gpu = own_gpu(&world);
    let world = world.with_gpu(&gpu, 5).unwrap();
    compare_messages(&world, &gpu).unwrap();
    messages_cross(&world, &gpu).unwrap();
    world.finish().unwrap();
    println!("equal");
}

#[test]
fn messages_in_a_split_of_two_gpus_equal_those_of_the_cpu() {
    if !has_two_gpus() {
        return;
    }
    for process in &mut Rank::group("comm::nccl::tests::message_process", 2, &[]) {
        process.line("equal");
        assert!(process.0.wait().unwrap().success());
    }
}

/// Rank 1 sleeps while rank 0 waits for its GPU, which waits for a message of rank 1.
#[test]
#[ignore = "started by a_gpu_that_waits_for_a_rank_that_sleeps_ends_at_the_deadline"]
fn late_process() {
    let Some(world) = join_as_child() else { return };
    println!("joined");
    let gpu = own_gpu(&world);
    let world = world.with_gpu(&gpu, 5).unwrap();
    let pair = world.split("pair", 0, 0).unwrap();
    let x = tensor(1, |_| 1.0f32).to_device(&Device::Cuda(gpu.clone())).unwrap();
    pair.exchange("first", 1 - pair.rank(), &x, 1 - pair.rank(), x.duplicate().unwrap()).unwrap().wait().unwrap();
    gpu.synchronize().unwrap();
    world.barrier("ready").unwrap();
    println!("ready");
    if world.rank() == 1 {
        std::thread::sleep(std::time::Duration::from_secs(60));
    }
    let late = pair.receive("second", 1, x).unwrap();
    drop(late);
    gpu.synchronize().unwrap();
}

#[test]
fn a_gpu_that_waits_for_a_rank_that_sleeps_ends_at_the_deadline() {
    if !has_two_gpus() {
        return;
    }
    let mut ranks = Rank::group("comm::nccl::tests::late_process", 2, &[]);
    ranks.iter_mut().for_each(|process| drop(process.line("ready")));
    let began = std::time::Instant::now();
    for (rank, process) in ranks.iter_mut().enumerate() {
        assert_eq!(process.0.wait().unwrap().code(), Some(5), "rank {rank}");
        // The limit allows three seconds for the GPU, two for the main thread, and the interval of the watch's checks.
        assert!(began.elapsed() < std::time::Duration::from_secs(15), "rank {rank}: {:?}", began.elapsed());
        let message = process.errors();
        assert!(message.contains("error: rank 0 (pid ") && message.contains(") has waited "), "{message}");
        let call = "for its GPU after GPU, group `pair`: receive `second` of 1 float32 from rank 1";
        assert!(message.contains(call), "{message}");
    }
}

/// Ranks of a group of one need no library, on any device.
#[test]
fn a_group_of_one_reduces_on_any_device() {
    let comm = Group::solo();
    let dry = Device::dry_gpu(GpuModel::h200());
    for device in [Device::Cpu, dry.clone(), Device::Cpu.dry()] {
        let x = Tensor::zeros(&device, &[4], DType::F32).unwrap();
        for (name, call) in
            CALLS.iter().filter(|(name, _)| !["reduce_scatter", "broadcast", "exchange of parts"].contains(name))
        {
            assert_eq!(call(&comm, &x).unwrap().len(), 4, "{name}");
        }
        let scattered = comm.reduce_scatter("x", &x, x.empty_like().unwrap()).unwrap().wait().unwrap();
        assert!(scattered.device().same(&device));
    }
    assert_eq!((comm.recent().len(), comm.traffic().total().bytes), (24, 0));
    let Device::Cuda(gpu) = dry else { unreachable!("made above") };
    assert_eq!(Group::solo().with_gpu(&gpu, 5).unwrap().size(), 1);
}
