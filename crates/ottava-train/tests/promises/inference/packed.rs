//! The first tokens of several requests are computed in one pass, by the attention of training over documents.

use crate::inference::engine::{ROOMY, prompt, request, run};
use crate::setup::{decoder, devices_of, recipe, tiny_llama};
use ottava_engine::{Engine, EngineOptions, Request};
use ottava_models::{CacheSizes, Decoder, InferenceBatch, KvCache, SequenceTokens};
use ottava_recipe::{Fp8Format, Recipe, RecipeName};
use ottava_tensor::cuda::GpuModel;
use ottava_tensor::ops::cast;
use ottava_tensor::{DType, Device, Tensor};

const LENGTHS: [usize; 4] = [40, 1, 90, 133];

/// Returns the activations of four sequences, and afterwards the activations of one further token of each, which reads the cache.
fn activations(model: &Decoder, batch_of: impl Fn(&Device, &[SequenceTokens]) -> InferenceBatch) -> [Vec<f32>; 2] {
    let texts = LENGTHS.map(|length| prompt("packed", length));
    let mut end = 0;
    let blocks = LENGTHS.map(|length| {
        let first = end;
        end += length as i32 / 16 + 1;
        vec![(first..end).collect::<Vec<i32>>()]
    });
    let groups: Vec<_> = model.kv_groups(200).into_iter().map(|group| (group, end as usize)).collect();
    let sizes = CacheSizes { groups: &groups, block_size: 16, dtype: model.recipe().compute, slots: 4, saved: 0 };
    let mut cache = model.kv_cache(sizes).expect("memory");
    let whole: Vec<_> = texts.iter().zip(&blocks).map(|(text, blocks)| SequenceTokens::new(0, text, blocks)).collect();
    let next = [7];
    let further: Vec<_> =
        LENGTHS.iter().zip(&blocks).map(|(&at, blocks)| SequenceTokens::new(at, &next, blocks)).collect();
    let values = |hidden: Tensor, rows: usize| -> Vec<f32> {
        cast(&hidden.rows(0, rows).unwrap(), DType::F32).unwrap().to_vec().unwrap()
    };
    let device = model.device();
    let hidden = |batch: InferenceBatch, cache: &mut KvCache| model.hidden(&batch, cache).expect("forward runs");
    let of_whole = values(hidden(batch_of(device, &whole), &mut cache), LENGTHS.iter().sum());
    [of_whole, values(hidden(InferenceBatch::padded(device, &further).unwrap(), &mut cache), LENGTHS.len())]
}

fn model(recipe: &Recipe, device: &Device) -> Decoder {
    let mut model = decoder(&tiny_llama(), recipe, device, 0.1);
    model.scale_by_token().expect("scales by token");
    model
}

/// On a CPU the results are equal to the bit. On a GPU, two kernels compute them.
#[test]
fn packed_sequences_get_what_others_get() {
    for name in [RecipeName::Fp32, RecipeName::Bf16, RecipeName::Fp8Row, RecipeName::Fp8Block] {
        let recipe = recipe(name, Fp8Format::Auto);
        for device in devices_of(&recipe) {
            let model = model(&recipe, &device);
            let packed = activations(&model, |device, all| InferenceBatch::packed(device, all).unwrap());
            let padded = activations(&model, |device, all| InferenceBatch::padded(device, all).unwrap());
            if !matches!(device, Device::Cuda(_)) {
                assert_eq!(packed, padded, "{name:?}");
                continue;
            }
            // A BF16 number has 8 bits. In FP8, a value near the middle of two codes may take the other code, 1/16 away; an H200 differs by 0.042.
            let bound = match name {
                RecipeName::Fp32 => 1e-5,
                RecipeName::Bf16 => 0.02,
                _ => 0.08,
            };
            for (packed, padded) in packed.iter().zip(&padded) {
                let norm: f32 = padded.iter().map(|x| x * x).sum();
                let apart: f32 = packed.iter().zip(padded).map(|(a, b)| (a - b) * (a - b)).sum();
                assert!((apart / norm).sqrt() < bound, "{name:?} on {device}: {}", (apart / norm).sqrt());
            }
        }
    }
}

/// The prompts of a step are one pass. Its attention is planned for the number of documents that all packed passes have.
#[test]
fn a_gpu_packs_the_prompts_of_a_step() {
    let device = Device::dry_gpu(GpuModel::h200());
    let Device::Cuda(gpu) = &device else { panic!("not a GPU") };
    let options = EngineOptions { prefill_chunk: 1024, ..ROOMY };
    let mut engine = Engine::new(model(&recipe(RecipeName::Bf16, Fp8Format::Auto), &device), &options).unwrap();
    let requests: Vec<Request> = [150, 101, 33, 7, 190].map(|tokens| request("p", tokens)).into_iter().collect();
    run(&mut engine, requests);
    let planned = format!("{:?}", gpu.workload());
    // 481 tokens are padded to 512.
    assert_eq!(planned.matches("AttentionShape").count(), 1, "{planned}");
    assert!(planned.contains("seq: 512, documents: 32"), "{planned}");
}
