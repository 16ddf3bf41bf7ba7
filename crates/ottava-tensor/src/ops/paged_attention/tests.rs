mod order;

use super::*;
use crate::Granularity;
use crate::cuda::Graph;
use crate::ops::{
    Accumulation, AttentionInput, CodeCopies, Operand, attention, attention_backward, attention_sink,
    attention_with_sinks, gemm_nt, rope_table,
};
use crate::poison::without_poison;
use crate::testing::{Tolerance, assert_close, gpu, normals, parity, quantized, values};

/// Sequences that end at the given contexts, with a number of new tokens each, in `capacity` rows. Their blocks are scattered in the cache.
struct Ragged {
    query_starts: Vec<i32>,
    context_lens: Vec<i32>,
    cached_lens: Vec<i32>,
    block_tables: Vec<i32>,
    capacity: usize,
    max_new: usize,
    blocks: usize,
}

const BLOCK_SIZE: usize = 16;

impl Ragged {
    fn new(contexts: &[usize], new: &[usize], capacity: usize) -> Ragged {
        let per_row = contexts.iter().max().unwrap().div_ceil(BLOCK_SIZE);
        let blocks = contexts.len() * per_row;
        let mut query_starts = vec![0];
        for new in new.iter().chain(std::iter::repeat(&0)).take(capacity) {
            query_starts.push(query_starts.last().unwrap() + *new as i32);
        }
        let mut context_lens: Vec<i32> = contexts.iter().map(|&context| context as i32).collect();
        context_lens.resize(capacity, 0);
        let mut cached_lens: Vec<i32> =
            contexts.iter().zip(new).map(|(&context, &new)| (context - new) as i32).collect();
        cached_lens.resize(capacity, 0);
        // Seven has no common factor with the numbers of blocks that the tests use.
        let mut block_tables: Vec<i32> = (0..blocks).map(|i| (i * 7 % blocks) as i32).collect();
        block_tables.resize(capacity * per_row, 0);
        let max_new = *new.iter().max().unwrap();
        Ragged { query_starts, context_lens, cached_lens, block_tables, capacity, max_new, blocks }
    }

    /// Returns the same blocks and new tokens for sequences that end at these contexts.
    fn ending_at(mut self, contexts: &[usize]) -> Ragged {
        for (row, &context) in contexts.iter().enumerate() {
            self.context_lens[row] = context as i32;
            self.cached_lens[row] = context as i32 - (self.query_starts[row + 1] - self.query_starts[row]);
        }
        self
    }

    /// Returns a batch of `capacity` rows, each with one new token of the same sequence. The sequence ends at `context`, has its blocks in `whole`,
    /// and its last `new` tokens are new. The batch has the new tokens `rows`.
    fn of_rows(whole: &Ragged, context: usize, new: usize, rows: std::ops::Range<usize>, capacity: usize) -> Ragged {
        let count = rows.len() as i32;
        let mut context_lens: Vec<i32> = rows.clone().map(|row| (context - new + row + 1) as i32).collect();
        let mut cached_lens = vec![(context - new + rows.start) as i32; rows.len()];
        context_lens.resize(capacity, 0);
        cached_lens.resize(capacity, 0);
        Ragged {
            query_starts: (0..=capacity as i32).map(|row| row.min(count)).collect(),
            context_lens,
            cached_lens,
            block_tables: whole.block_tables.repeat(capacity),
            capacity,
            max_new: 1,
            blocks: whole.blocks,
        }
    }

    /// Calls `work` with the tensors of this batch on `device`.
    fn with_batch<T>(&self, device: &Device, work: impl FnOnce(&PagedBatch) -> Result<T>) -> Result<T> {
        let vector = |shape: &[usize], values: &[i32]| Tensor::from_slice(device, shape, values);
        let starts = vector(&[self.capacity + 1], &self.query_starts)?;
        let [lens, cached] = [&self.context_lens, &self.cached_lens].map(|lens| vector(&[self.capacity], lens));
        let tables = vector(&[self.capacity, self.block_tables.len() / self.capacity], &self.block_tables)?;
        work(&PagedBatch {
            query_starts: &starts,
            context_lens: &lens?,
            cached_lens: &cached?,
            block_tables: &tables,
            max_new: self.max_new,
        })
    }

    /// Appends the new tokens `qkv`, and returns their attention.
    fn run(&self, qkv: &Tensor, cache: &mut KvBlocks, spec: &AttentionSpec) -> Result<Tensor> {
        self.run_with(qkv, cache, spec, None)
    }

    /// Runs the batch as [`Ragged::run`], with sinks.
    fn run_with(
        &self,
        qkv: &Tensor,
        cache: &mut KvBlocks,
        spec: &AttentionSpec,
        sinks: Option<&Tensor>,
    ) -> Result<Tensor> {
        self.with_batch(qkv.device(), |batch| {
            let mut qkv = qkv.duplicate()?;
            append_kv(&mut qkv, cache, batch, spec, None)?;
            paged_attention(&qkv, cache, batch, spec, sinks)
        })
    }
}

/// Returns one tensor with the rows of all parts.
fn stacked(parts: &[Tensor]) -> Tensor {
    let rows = parts.iter().map(|part| part.shape()[0]).sum();
    let mut all = Tensor::zeros(parts[0].device(), &[rows, parts[0].shape()[1]], parts[0].dtype()).unwrap();
    let mut row = 0;
    for part in parts {
        all.copy_from(row, part).unwrap();
        row += part.shape()[0];
    }
    all
}

/// Prompts are processed in chunks, then tokens one by one, in a batch with other sequences. On the CPU, each sequence is bit-identical to plain
/// attention. Cases with a window also test sinks.
#[test]
fn sequences_in_pieces_equal_whole_ones() {
    let lengths = [37, 5, 70];
    let bounded = AttentionSpec { window: Some(9), soft_cap: Some(0.7), scale: 0.4, ..AttentionSpec::causal(4, 2, 6) };
    for (l, dtype) in [
        (AttentionSpec::causal(4, 2, 8), DType::F32),
        (AttentionSpec::causal(3, 1, 16), DType::BF16),
        (AttentionSpec::causal(2, 2, 6), DType::F64),
        (bounded, DType::F32),
        (bounded, DType::BF16),
    ] {
        let whole: Vec<Tensor> =
            lengths.iter().map(|n| normals(&format!("qkv {n}"), &[*n, l.qkv_width()], dtype)).collect();
        let sinks = normals("sinks", &[l.heads], dtype);
        let sinks = l.window.map(|_| &sinks);
        let attended = |qkv| {
            let (mut o, mut lse) = attention(AttentionInput::fused(qkv, &l, 1, None), &l).unwrap();
            sinks.iter().for_each(|sinks| attention_sink(&mut o, &mut lse, sinks).unwrap());
            o
        };
        let expected: Vec<Tensor> = whole.iter().map(attended).collect();
        let blocks = Ragged::new(&lengths, &lengths, 4).blocks;
        let mut cache = KvBlocks::new(&Device::Cpu, &l, blocks, BLOCK_SIZE, dtype).unwrap();
        let mut done = [0; 3];
        for new in [[20, 1, 33], [0, 1, 36], [16, 2, 0], [1, 1, 1]] {
            let ends: [usize; 3] = std::array::from_fn(|i| done[i] + new[i]);
            let rows = |x: &[Tensor]| -> Vec<Tensor> { (0..3).map(|i| x[i].rows(done[i], ends[i]).unwrap()).collect() };
            // These are the tables of the whole sequences, so blocks keep their places.
            let tables = Ragged::new(&lengths, &new, 4);
            let new = stacked(&rows(&whole));
            let o = tables.ending_at(&ends).run_with(&new, &mut cache, &l, sinks).unwrap();
            assert_close(&format!("{dtype} at {done:?}"), &stacked(&rows(&expected)), &o, Tolerance::Exact);
            done = ends;
        }
        assert_eq!(done, lengths);
    }
}

/// Compares devices for the last `new` tokens of sequences that end at `contexts`, after earlier tokens. The batch has two rows of padding.
fn parity_of(contexts: &[usize], new: &[usize], capacity: usize, l: AttentionSpec, dtype: DType, kv: DType) {
    let (before, now) = (Ragged::new(contexts, contexts, capacity), Ragged::new(contexts, new, capacity));
    let all = normals("all", &[contexts.iter().sum(), l.qkv_width()], dtype);
    let last = normals("last", &[new.iter().sum::<usize>() + 2, l.qkv_width()], dtype);
    // Sums run in another order, powers of two are approximate, and tensor cores read probabilities in 16 bits, relative to a power of two: the largest is
    // rounded as well. With heads of 512, an H200 differs by 76 steps of F32, and with other heads by 2.3 steps of BF16.
    let tolerance = Tolerance::Steps(dtype, if dtype == DType::F32 { 128.0 } else { 3.0 });
    parity(&[all, last, normals("sinks", &[l.heads], dtype)], tolerance, |x| {
        let mut cache = KvBlocks::new(x[0].device(), &l, before.blocks, BLOCK_SIZE, kv)?;
        before.run(&x[0], &mut cache, &l)?;
        Ok(vec![now.run(&x[1], &mut cache, &l)?, now.run_with(&x[1], &mut cache, &l, Some(&x[2]))?])
    });
}

#[test]
fn paged_attention_agrees_across_devices() {
    // Only the CPU was compared with plain attention above.
    if gpu().is_none() {
        return;
    }
    // Decode over several splits, also with empty rows; chunks of prompts; several new tokens that fit in one tile or do not.
    let cases: [(&[usize], &[usize], usize); 4] = [
        (&[700, 1, 256, 257, 90], &[1; 5], 8),
        (&[40, 300, 7], &[33, 20, 7], 3),
        (&[530, 300, 70], &[2, 0, 4], 4),
        (&[600], &[1], 1),
    ];
    // Groups of all sizes; head sizes divisible by four, by eight or by neither; more query heads than columns; cases for CUDA cores.
    let layouts = [
        AttentionSpec::causal(3, 3, 64),
        AttentionSpec::causal(4, 2, 80),
        AttentionSpec::causal(6, 2, 96),
        AttentionSpec::causal(8, 2, 128),
        AttentionSpec::causal(6, 1, 128),
        AttentionSpec::causal(8, 1, 64),
        AttentionSpec::causal(16, 1, 96),
        AttentionSpec::causal(20, 1, 16),
        AttentionSpec::causal(2, 1, 256),
        AttentionSpec::causal(12, 1, 160),
        AttentionSpec::causal(4, 1, 512),
        AttentionSpec::causal(4, 2, 6),
    ];
    for (contexts, new, capacity) in cases {
        for l in layouts {
            for (dtype, kv) in [
                (DType::F32, DType::F32),
                (DType::F16, DType::F16),
                (DType::BF16, DType::BF16),
                (DType::F16, DType::E4M3),
                (DType::BF16, DType::E4M3),
                (DType::F32, DType::E4M3),
                (DType::F16, DType::BF16),
            ] {
                parity_of(contexts, new, capacity, l, dtype, kv);
            }
        }
    }
    // Windows within a split, over several splits, and longer than the context; soft caps.
    let bounded = |window, soft_cap, l| AttentionSpec { window, soft_cap, ..l };
    for (contexts, new, capacity) in cases {
        for l in [
            bounded(Some(40), None, AttentionSpec::causal(8, 2, 128)),
            bounded(Some(300), Some(3.0), AttentionSpec::causal(4, 2, 256)),
            bounded(None, Some(1.5), AttentionSpec::causal(6, 1, 64)),
            bounded(Some(5000), None, AttentionSpec::causal(3, 3, 64)),
            bounded(Some(17), Some(2.0), AttentionSpec::causal(4, 2, 6)),
        ] {
            for (dtype, kv) in [(DType::BF16, DType::BF16), (DType::BF16, DType::E4M3), (DType::F32, DType::F32)] {
                parity_of(contexts, new, capacity, l, dtype, kv);
            }
        }
    }
    // More blocks than run at once, with codes that pass through shared memory. No such kernel supports a window.
    let many: Vec<usize> = (0..40).map(|i| [1 + i, 16, 17, 33][i % 4]).chain([1100, 1024, 300, 257]).collect();
    for l in [
        AttentionSpec::causal(8, 8, 64),
        AttentionSpec::causal(16, 8, 128),
        AttentionSpec::causal(9, 9, 80),
        AttentionSpec::causal(16, 8, 256),
        bounded(Some(40), None, AttentionSpec::causal(8, 8, 64)),
    ] {
        for dtype in [DType::F16, DType::BF16] {
            parity_of(&many, &[1; 44], 46, l, dtype, DType::E4M3);
        }
    }
    // Splits larger than the smallest size; warps with more tiles than lanes.
    for kv in [DType::BF16, DType::E4M3] {
        parity_of(&[8300, 5], &[1, 1], 2, AttentionSpec::causal(2, 1, 64), DType::BF16, kv);
        parity_of(&[2500], &[40], 1, AttentionSpec::causal(2, 1, 128), DType::BF16, kv);
    }
}

/// A token has the same bits alone, in a batch with other sequences, and in a batch with a prompt. This includes batches without prompts whose codes
/// pass through shared memory.
#[test]
fn no_token_depends_on_other_sequences() {
    let Some(gpu) = gpu() else { return };
    for (contexts, l) in [
        (vec![700, 257, 90], AttentionSpec::causal(8, 2, 128)),
        ([&[700, 257, 90][..], &[20; 31]].concat(), AttentionSpec::causal(16, 8, 128)),
    ] {
        for kv in [DType::BF16, DType::E4M3] {
            let count = contexts.len();
            let before = Ragged::new(&contexts, &contexts, count);
            let all = normals("all", &[contexts.iter().sum(), l.qkv_width()], DType::BF16).to_device(&gpu).unwrap();
            let last = normals("last", &[count, l.qkv_width()], DType::BF16).to_device(&gpu).unwrap();
            let prompt = normals("prompt", &[20, l.qkv_width()], DType::BF16).to_device(&gpu).unwrap();
            let run = |new: &[usize], x: &[Tensor]| {
                let mut cache = KvBlocks::new(&gpu, &l, before.blocks, BLOCK_SIZE, kv).unwrap();
                before.run(&all, &mut cache, &l).unwrap();
                Ragged::new(&contexts, new, count).run(&stacked(x), &mut cache, &l).unwrap()
            };
            let together = run(&vec![1; count], &[last.rows(0, count).unwrap()]);
            let mut only = vec![0; count];
            only[1] = 1;
            let alone = run(&only, &[last.rows(1, 2).unwrap()]);
            let mut with_prompt = vec![1; count];
            with_prompt[count - 1] = 20;
            let beside = run(&with_prompt, &[last.rows(0, count - 1).unwrap(), prompt]);
            let (expected, all_but_one) = (together.rows(1, 2).unwrap(), together.rows(0, count - 1).unwrap());
            assert_close(&format!("{kv}, alone"), &expected, &alone, Tolerance::Exact);
            assert_close(&format!("{kv}, beside"), &all_but_one, &beside.rows(0, count - 1).unwrap(), Tolerance::Exact);
        }
    }
}

/// The context is so long that a warp has more tiles than lanes. In a large batch, its codes pass through shared memory, in other splits than in a
/// small batch.
#[test]
fn splits_of_long_contexts_agree() {
    let Some(gpu) = gpu() else { return };
    let (contexts, l) = ([&[66_000][..], &[1; 39]].concat(), AttentionSpec::causal(8, 8, 64));
    for dtype in [DType::BF16, DType::F16] {
        let whole = Ragged::new(&contexts, &contexts, 40);
        let of = |name, tokens| normals(name, &[tokens, l.qkv_width()], dtype).to_device(&gpu).unwrap();
        let (all, last) = (of("all", contexts.iter().sum()), of("last", 40));
        let mut cache = KvBlocks::new(&gpu, &l, whole.blocks, BLOCK_SIZE, DType::E4M3).unwrap();
        whole.run(&all, &mut cache, &l).unwrap();
        let together = Ragged::new(&contexts, &[1; 40], 40).run(&last, &mut cache, &l).unwrap();
        let mut first = Ragged::new(&contexts, &[1; 40], 40);
        (first.query_starts, first.context_lens, first.cached_lens) = (vec![0, 1], vec![66_000], vec![65_999]);
        first.capacity = 1;
        first.block_tables.truncate(first.block_tables.len() / 40);
        let alone = first.run(&last.rows(0, 1).unwrap(), &mut cache, &l).unwrap();
        assert_close(&format!("{dtype}"), &alone, &together.rows(0, 1).unwrap(), Tolerance::Steps(dtype, 2.0));
    }
}

/// Keys, values and scales that earlier owners of a block left after the last token of a sequence do not change any bit, even if they are NaN.
#[test]
fn what_lies_behind_a_sequence_is_not_read() {
    let Some(gpu) = gpu() else { return };
    const BEHIND: usize = 3;
    for (count, l) in [(3, AttentionSpec::causal(8, 2, 128)), (40, AttentionSpec::causal(8, 8, 64))] {
        for kv in [DType::BF16, DType::E4M3] {
            let contexts: Vec<usize> = (0..count).map(|i| [700, 17, 90, 38][i % 4]).collect();
            let longer: Vec<usize> = contexts.iter().map(|context| context + BEHIND).collect();
            let of = |name, tokens| normals(name, &[tokens, l.qkv_width()], DType::BF16).to_device(&gpu).unwrap();
            let (before, last) = (of("all", longer.iter().sum()), of("last", count));
            let run = |behind: f32| {
                let whole = Ragged::new(&longer, &longer, count);
                let mut cache = KvBlocks::new(&gpu, &l, whole.blocks, BLOCK_SIZE, kv).unwrap();
                if let Some(scales) = &mut cache.scale_inv {
                    // Scales that an earlier owner of the memory left.
                    *scales = Tensor::from_slice(&gpu, scales.shape(), &vec![behind; scales.len()]).unwrap();
                }
                whole.run(&before, &mut cache, &l).unwrap();
                let values = vec![half::bf16::from_f32(behind); count * BEHIND * l.qkv_width()];
                let values = Tensor::from_slice(&gpu, &[count * BEHIND, l.qkv_width()], &values).unwrap();
                Ragged::new(&longer, &vec![BEHIND; count], count).run(&values, &mut cache, &l).unwrap();
                let now = Ragged::new(&longer, &vec![1; count], count).ending_at(&contexts);
                now.run(&last, &mut cache, &l).unwrap()
            };
            assert_close(&format!("{count} sequences in {kv}"), &run(1.0), &run(f32::NAN), Tolerance::Exact);
        }
    }
}

/// New tokens of one sequence are separate rows of a batch, with the same blocks. A row has the same bits alone, with the other rows, and with other
/// sequences. The cases have several splits, which are counted for each row, and more rows than the cache has blocks.
#[test]
fn tokens_as_rows_do_not_depend_on_others() {
    let Some(device) = gpu() else { return };
    let Device::Cuda(gpu) = &device else { unreachable!("it is a GPU") };
    let window = |l| AttentionSpec { window: Some(300), soft_cap: Some(3.0), ..l };
    for (context, new, capacity) in [(700, 60, 64), (700, 5, 8), (9000, 40, 64), (90, 60, 64)] {
        for l in [
            AttentionSpec::causal(8, 2, 128),
            AttentionSpec::causal(20, 1, 64),
            AttentionSpec::causal(2, 2, 256),
            AttentionSpec::causal(4, 2, 6),
            window(AttentionSpec::causal(8, 2, 128)),
        ] {
            for (dtype, kv) in [(DType::BF16, DType::BF16), (DType::BF16, DType::E4M3), (DType::F32, DType::F32)] {
                let whole = Ragged::new(&[context], &[context], 1);
                let of = |name, tokens| normals(name, &[tokens, l.qkv_width()], dtype).to_device(&device).unwrap();
                let (all, last) = (of("all", context), of("last", new));
                let mut cache = KvBlocks::new(&device, &l, whole.blocks, BLOCK_SIZE, kv).unwrap();
                whole.run(&all, &mut cache, &l).unwrap();
                // Returns the results for the rows of these new tokens.
                let mut rows = |tokens: std::ops::Range<usize>, capacity: usize| {
                    let rows = Ragged::of_rows(&whole, context, new, tokens.clone(), capacity);
                    let mut qkv = Tensor::zeros(&device, &[capacity, l.qkv_width()], dtype).unwrap();
                    qkv.copy_from(0, &last.rows(tokens.start, tokens.end).unwrap()).unwrap();
                    let o = gpu.with_batch_invariance(|| rows.run(&qkv, &mut cache, &l)).unwrap();
                    o.rows(0, tokens.len()).unwrap()
                };
                let together = rows(0..new, capacity);
                let again = rows(0..new, capacity);
                let what = format!("{new} of {context} tokens, {l:?}, {dtype} in {kv}");
                assert_close(&what, &together, &again, Tolerance::Exact);
                for token in [0, new / 2, new - 1] {
                    let expected = together.rows(token, token + 1).unwrap();
                    assert_close(&what, &expected, &rows(token..token + 1, 1), Tolerance::Exact);
                }
                let half = rows(new / 2..new, capacity);
                assert_close(&what, &together.rows(new / 2, new).unwrap(), &half, Tolerance::Exact);
            }
        }
    }
}

/// Rows of one sequence read keys and values that the same pass appends, even if attention starts before the GEMM that computes them has ended.
#[test]
fn rows_read_tokens_of_their_own_pass() {
    let Some(device) = gpu() else { return };
    let Device::Cuda(gpu) = &device else { unreachable!("it is a GPU") };
    const NEW: usize = 60;
    const ROWS: usize = 64;
    let l = AttentionSpec::causal(8, 2, 128);
    let of = |name, shape: [usize; 2]| normals(name, &shape, DType::BF16).to_device(&device).unwrap();
    let codes = |x: Tensor| quantized(&x, DType::E4M3, Granularity::PerRow, CodeCopies::Rows).unwrap();
    // The GEMM has so many terms that it still runs when attention starts.
    let (a, b) = (codes(of("a", [ROWS, 32_768])), codes(of("b", [l.qkv_width(), 32_768])));
    let product = || gemm_nt(Operand::Rows(&a), Operand::Rows(&b), DType::BF16, Accumulation::Exact);
    for context in [90, 700] {
        let whole = Ragged::new(&[context], &[context], 1);
        let before = of("before", [context, l.qkv_width()]);
        for kv in [DType::BF16, DType::E4M3] {
            let run = |at_once: bool| {
                // With fewer blocks than rows, attention would first clear counters, and would not start early.
                let mut cache = KvBlocks::new(&device, &l, whole.blocks.max(ROWS), BLOCK_SIZE, kv)?;
                whole.run(&before, &mut cache, &l)?;
                let ended = || if at_once { Ok(()) } else { gpu.synchronize() };
                Ragged::of_rows(&whole, context, NEW, 0..NEW, ROWS).with_batch(&device, |batch| {
                    let mut o = None;
                    let mut ops = || -> Result<()> {
                        let mut qkv = product()?;
                        ended()?;
                        append_kv(&mut qkv, &mut cache, batch, &l, None)?;
                        ended()?;
                        o = Some(paged_attention(&qkv, &cache, batch, &l, None)?);
                        Ok(())
                    };
                    match at_once {
                        true => without_poison(|| Graph::capture(gpu, ops))?.replay()?,
                        false => ops()?,
                    }
                    Ok(o.expect("the ops succeeded"))
                })
            };
            let run = |at_once| gpu.with_constant_weights(|| run(at_once)).unwrap();
            assert_close(&format!("{context} tokens in {kv}"), &run(false), &run(true), Tolerance::Exact);
        }
    }
}

/// Codes and scales of the cache, values in another type than activations, and rotated rows (padding included) have the same bits on all
/// devices. They equal the bits of `rope` before `append_kv`.
#[test]
fn caches_are_bit_identical_across_devices_and_to_rope() {
    // Heads that consist of whole eights of pairs, and heads that do not; more heads than a block processes.
    for (l, pairs) in [
        (AttentionSpec::causal(4, 2, 64), Some(RopePairs::Halves)),
        (AttentionSpec::causal(30, 10, 128), Some(RopePairs::Neighbours)),
        (AttentionSpec::causal(4, 2, 80), None),
        (AttentionSpec::causal(2, 2, 80), Some(RopePairs::Neighbours)),
        (AttentionSpec::causal(3, 1, 70), Some(RopePairs::Halves)),
        (AttentionSpec::causal(4, 2, 6), Some(RopePairs::Neighbours)),
        (AttentionSpec::causal(2, 1, 7), None),
    ] {
        let ragged = Ragged::new(&[20, 3], &[20, 3], 4);
        for (dtype, kv) in
            [(DType::BF16, DType::E4M3), (DType::F32, DType::E4M3), (DType::F32, DType::BF16), (DType::F16, DType::F16)]
        {
            let mut qkv = normals("qkv", &[25, l.qkv_width()], dtype).to_device(&Device::Cpu).unwrap();
            // A key of zeros has the scale 1.
            qkv.copy_from(2, &Tensor::zeros(&Device::Cpu, &[1, l.qkv_width()], dtype).unwrap()).unwrap();
            let frequencies: Vec<f64> = (0..l.head_dim / 2).map(|i| 0.9f64.powi(i as i32)).collect();
            let table = match pairs {
                Some(_) => rope_table(&Device::Cpu, &frequencies, 60, DType::F32).unwrap(),
                None => Tensor::zeros(&Device::Cpu, &[1, 1], DType::F32).unwrap(),
            };
            let positions: Vec<i32> = (0..25).map(|t| t * 7 % 60).collect();
            let positions = Tensor::from_slice(&Device::Cpu, &[25], &positions).unwrap();
            let append = |x: &[Tensor], fused: bool| {
                let (mut qkv, mut cache) =
                    (x[0].duplicate()?, KvBlocks::new(x[0].device(), &l, ragged.blocks, BLOCK_SIZE, kv)?);
                let mut rotation = pairs.map(|pairs| (Angles { table: &x[1], positions: &x[2] }, pairs));
                if let (false, Some((angles, pairs))) = (fused, rotation) {
                    rope(&mut qkv, angles, rotated(&l, pairs), Rotation::Forward)?;
                    rotation = None;
                }
                ragged.with_batch(x[0].device(), |batch| append_kv(&mut qkv, &mut cache, batch, &l, rotation))?;
                let cache = cache.tensors().into_iter().map(Tensor::duplicate).collect::<Result<Vec<Tensor>>>()?;
                Ok([vec![qkv], cache].concat())
            };
            let inputs = [qkv, table, positions];
            parity(&inputs, Tolerance::Exact, |x| append(x, true));
            for (apart, together) in append(&inputs, false).unwrap().iter().zip(append(&inputs, true).unwrap()) {
                assert_close(&format!("{l:?} {dtype} in {kv}"), apart, &together, Tolerance::Exact);
            }
        }
    }
}

/// Half a step of E4M3 is 1/16 of a value. It moves scores, and averages of values.
#[test]
fn a_cache_in_codes_is_as_exact_as_its_format() {
    let (l, ragged) = (AttentionSpec::causal(4, 2, 64), Ragged::new(&[90], &[90], 1));
    let qkv = normals("qkv", &[90, l.qkv_width()], DType::F32);
    let [exact, coded] = [DType::F32, DType::E4M3].map(|kv| {
        let mut cache = KvBlocks::new(&Device::Cpu, &l, ragged.blocks, BLOCK_SIZE, kv).unwrap();
        values(&ragged.run(&qkv, &mut cache, &l).unwrap())
    });
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let apart = norm(&mut exact.iter().zip(&coded).map(|(a, b)| a - b)) / norm(&mut exact.iter().copied());
    // A cast of normal values to E4M3 moves keys and values by 2.7 % of their norms, which is 3.8 % together. Up to 4.2 % was seen.
    assert!(apart > 1e-3 && apart < 0.06, "{apart}");
    assert_eq!(KvBlocks::block_bytes(&l, 32, DType::E4M3), 2 * 2 * 32 * (64 + 4) + 2 * 4);
}

#[test]
fn indices_outside_of_the_cache_are_errors() {
    let l = AttentionSpec::causal(2, 1, 8);
    let qkv = normals("qkv", &[3, l.qkv_width()], DType::F32);
    let run = |change: &dyn Fn(&mut Ragged)| {
        let mut ragged = Ragged::new(&[20], &[3], 1);
        let mut cache = KvBlocks::new(&Device::Cpu, &l, 2, BLOCK_SIZE, DType::F32).unwrap();
        change(&mut ragged);
        ragged.run(&qkv, &mut cache, &l).map(drop)
    };
    run(&|_| {}).unwrap();
    for wrong in [
        &(|ragged: &mut Ragged| ragged.block_tables[1] = 2) as &dyn Fn(&mut Ragged),
        &|ragged| ragged.block_tables[0] = -1,
        &|ragged| ragged.context_lens[0] = 33,
        &|ragged| ragged.context_lens[0] = 2,
        &|ragged| ragged.query_starts[1] = 4,
        &|ragged| ragged.query_starts[0] = -1,
    ] {
        let error = run(wrong).unwrap_err().to_string();
        assert!(error.contains("do not fit a cache"), "{error}");
    }
}

/// Documents whose keys and values are read as from a cache have, on a CPU, the bits of their tokens over the cache, and on all devices nearly the results
/// and gradients of the values of the cache.
#[test]
fn documents_can_read_keys_and_values_as_a_cache_stores_them() {
    let lengths = [37usize, 1, 70];
    let at: Vec<i32> = [0]
        .into_iter()
        .chain(lengths.iter().scan(0, |end, n| {
            *end += *n as i32;
            Some(*end)
        }))
        .chain([108])
        .collect();
    for (l, with_sinks) in [
        (AttentionSpec::causal(4, 2, 64), true),
        (AttentionSpec { window: Some(20), soft_cap: Some(5.0), ..AttentionSpec::causal(2, 2, 32) }, false),
        (AttentionSpec::causal(2, 1, 256), true),
    ] {
        let stored = AttentionSpec { kv_dtype: Some(DType::E4M3), ..l };
        let qkv = normals("qkv", &[108, l.qkv_width()], DType::BF16);
        let sinks = normals("sinks", &[l.heads], DType::BF16);
        let d_o = normals("d_o", &[108, l.output_width()], DType::BF16);
        let at = Tensor::from_slice(&Device::Cpu, &[at.len()], &at).unwrap();
        let run = |x: &[Tensor], spec: &AttentionSpec| -> Result<Vec<Tensor>> {
            let input = AttentionInput::fused(&x[0], spec, 1, Some(&x[3]));
            let (o, lse) = attention_with_sinks(input, spec, with_sinks.then_some(&x[1]))?;
            let gradient = attention_backward(&x[2], input, &o, &lse, spec)?.fused();
            Ok(vec![o, lse.reshape(&[108 * l.heads])?, gradient])
        };
        // On a GPU, `lse` has a row for each token.
        let inputs = [qkv.duplicate().unwrap(), sinks.duplicate().unwrap(), d_o, at];
        // Gradients have the tolerance of `attention`. An H200 differs by 4.6 steps.
        parity(&inputs, Tolerance::Steps(DType::BF16, 6.0), |x| Ok(run(x, &stored)?.into_iter().step_by(2).collect()));
        let whole = Ragged::new(&lengths, &lengths, 3);
        let mut cache = KvBlocks::new(&Device::Cpu, &l, whole.blocks, BLOCK_SIZE, DType::E4M3).unwrap();
        let mut values_of_cache = qkv.duplicate().unwrap();
        let of_tokens = whole.run_with(&values_of_cache, &mut cache, &l, with_sinks.then_some(&sinks)).unwrap();
        let found = run(&inputs, &stored).unwrap();
        assert_close(&format!("{l}"), &of_tokens, &found[0], Tolerance::Exact);
        whole.with_batch(&Device::Cpu, |batch| append_kv(&mut values_of_cache, &mut cache, batch, &l, None)).unwrap();
        let expected = run(&[values_of_cache, sinks, inputs[2].clone(), inputs[3].clone()], &l).unwrap();
        for (found, expected) in found.iter().zip(&expected) {
            // The values of the cache are rounded to BF16 here, and attention over the cache reads them before this rounding.
            assert_close(&format!("{l}"), expected, found, Tolerance::Steps(DType::BF16, 8.0));
        }
        assert_ne!(values(&found[0]), values(&run(&inputs, &l).unwrap()[0]), "{l}: values of the cache differ");
    }
}
