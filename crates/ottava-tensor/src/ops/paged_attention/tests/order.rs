//! While results must not depend on the batch, a token has the same bits alone, in a chunk of a prompt, and in a whole document.

use super::*;
use crate::cuda::CudaDevice;
use crate::ops::{attention_with_sinks, cast, normal};
use std::sync::Arc;

fn with_gpu(work: impl FnOnce(&Device, &Arc<CudaDevice>)) {
    if let Some(device) = gpu() {
        let Device::Cuda(gpu) = &device else { unreachable!("it is a GPU") };
        work(&device, gpu);
    }
}

/// Groups and head sizes of all kernels, with and without bounds.
fn layouts() -> Vec<AttentionSpec> {
    let bounded = |window, soft_cap, l| AttentionSpec { window, soft_cap, ..l };
    vec![
        AttentionSpec::causal(8, 2, 128),
        AttentionSpec::causal(3, 3, 80),
        AttentionSpec::causal(6, 1, 96),
        AttentionSpec::causal(14, 2, 64),
        AttentionSpec::causal(20, 1, 32),
        bounded(Some(300), Some(3.0), AttentionSpec::causal(8, 2, 128)),
        bounded(Some(40), None, AttentionSpec::causal(4, 4, 64)),
        bounded(None, Some(1.5), AttentionSpec::causal(6, 3, 128)),
    ]
}

/// Appends the tokens `all` of one sequence, and returns the attention of each as a row of its own.
fn one_by_one(
    device: &Device,
    gpu: &CudaDevice,
    l: &AttentionSpec,
    all: &Tensor,
    kv: DType,
    sinks: Option<&Tensor>,
) -> Tensor {
    let length = all.shape()[0];
    let whole = Ragged::new(&[length], &[length], 1);
    let mut cache = KvBlocks::new(device, l, whole.blocks, BLOCK_SIZE, kv).unwrap();
    whole.run(all, &mut cache, l).unwrap();
    let rows = Ragged::of_rows(&whole, length, length, 0..length, length);
    gpu.with_batch_invariance(|| rows.run_with(all, &mut cache, l, sinks)).unwrap()
}

#[test]
fn chunks_of_prompts_have_the_bits_of_their_tokens() {
    with_gpu(|device, gpu| {
        let large = AttentionSpec::causal(4, 2, 256);
        for l in layouts().into_iter().chain([large, AttentionSpec { window: Some(300), ..large }]) {
            for (dtype, kv) in [(DType::BF16, DType::BF16), (DType::BF16, DType::E4M3), (DType::F16, DType::F16)] {
                let lengths = [700, 1300, 90];
                let of = |length: usize| normals(&length.to_string(), &[length, l.qkv_width()], dtype);
                let all = lengths.map(|length| of(length).to_device(device).unwrap());
                let expected = all.each_ref().map(|all| one_by_one(device, gpu, &l, all, kv, None));
                let blocks = Ragged::new(&lengths, &lengths, 4).blocks;
                let mut cache = KvBlocks::new(device, &l, blocks, BLOCK_SIZE, kv).unwrap();
                let mut done = [0; 3];
                for new in [[300, 1024, 1], [3, 200, 33], [397, 0, 56], [0, 76, 0]] {
                    let ends: [usize; 3] = std::array::from_fn(|i| done[i] + new[i]);
                    let rows = |x: &[Tensor]| -> Vec<Tensor> {
                        (0..3).map(|i| x[i].rows(done[i], ends[i]).unwrap()).collect()
                    };
                    let tables = Ragged::new(&lengths, &new, 4).ending_at(&ends);
                    let qkv = stacked(&rows(&all));
                    let found = gpu.with_batch_invariance(|| tables.run(&qkv, &mut cache, &l)).unwrap();
                    let what = format!("{l}, {dtype} in {kv}, tokens from {done:?} to {ends:?}");
                    assert_close(&what, &stacked(&rows(&expected)), &found, Tolerance::Exact);
                    done = ends;
                }
                assert_eq!(done, lengths);
            }
        }
    });
}

#[test]
fn whole_documents_have_the_bits_of_their_tokens() {
    with_gpu(|device, gpu| {
        let large = AttentionSpec::causal(4, 2, 256);
        let larger = [large, AttentionSpec { window: Some(300), ..large }, AttentionSpec::causal(3, 3, 192)];
        // Larger heads, and keys and values in codes, have a temporary cache.
        let plain = layouts().into_iter().chain(larger);
        let codes = layouts().into_iter().chain(larger).map(|l| AttentionSpec { kv_dtype: Some(DType::E4M3), ..l });
        for (l, (with_sinks, deviation)) in
            plain.chain(codes).zip([(false, 1.0), (true, 8.0), (true, 0.1)].into_iter().cycle())
        {
            let kv = l.kv_dtype.unwrap_or(DType::BF16);
            let lengths = [700, 1, 257, 33, 1057];
            let of = |&length: &usize| {
                let all = normal(device, &[length, l.qkv_width()], deviation, length as u64).unwrap();
                cast(&all, DType::BF16).unwrap()
            };
            let all: Vec<Tensor> = lengths.iter().map(of).collect();
            let sinks = normals("sinks", &[l.heads], DType::BF16).to_device(device).unwrap();
            let sinks = with_sinks.then_some(&sinks);
            let of_tokens = |all| one_by_one(device, gpu, &l, all, kv, sinks);
            let expected: Vec<Tensor> = all.iter().map(of_tokens).collect();
            let mut at = vec![0];
            at.extend(lengths.iter().scan(0, |end, &length| {
                *end += length as i32;
                Some(*end)
            }));
            // Unused entries.
            at.resize(9, at[lengths.len()]);
            let at = Tensor::from_slice(device, &[at.len()], &at).unwrap();
            let qkv = stacked(&all);
            let attended = |qkv: &Tensor, batch, at| {
                let input = AttentionInput::fused(qkv, &l, batch, at);
                gpu.with_batch_invariance(|| attention_with_sinks(input, &l, sinks)).unwrap().0
            };
            let what = format!("{l}, sinks: {with_sinks}, deviation {deviation}");
            assert_close(&what, &stacked(&expected), &attended(&qkv, 1, Some(&at)), Tolerance::Exact);
            // Sequences without boundaries of documents, and two of them.
            assert_close(&what, &expected[4], &attended(&all[4], 1, None), Tolerance::Exact);
            let twice = [all[2].duplicate().unwrap(), all[2].duplicate().unwrap()];
            let found = attended(&stacked(&twice), 2, None);
            assert_close(&what, &expected[2], &found.rows(257, 514).unwrap(), Tolerance::Exact);
        }
    });
}
