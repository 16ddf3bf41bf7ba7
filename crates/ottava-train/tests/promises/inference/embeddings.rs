//! Embeddings of prompts: pooled activations after the last norm.

use crate::inference::engine::{ROOMY, finish, prompt, run};
use crate::setup::{decoder, devices_of, kv_cache, recipe, tiny_llama};
use ottava_engine::{Engine, EngineOptions, Pooling, Request};
use ottava_models::{Decoder, InferenceBatch, SequenceTokens};
use ottava_recipe::{Fp8Format, Recipe, RecipeName};
use ottava_tensor::ops::cast;
use ottava_tensor::{DType, Device};

fn model(recipe: &Recipe, device: &Device) -> Decoder {
    decoder(&tiny_llama(), recipe, device, 0.3)
}

/// Returns texts that begin with the same tokens, each with its pooling.
fn texts() -> Vec<(Vec<u32>, Pooling)> {
    let whole = prompt("text", 100);
    let of = |tokens: usize| [Pooling::Mean, Pooling::Last].map(|pooling| (whole[..tokens].to_vec(), pooling));
    [1, 33, 64, 100].into_iter().flat_map(of).collect()
}

fn requests() -> Vec<Request> {
    let request = |(prompt, pooling)| Request { prompt, pooling: Some(pooling), ..Request::default() };
    texts().into_iter().map(request).collect()
}

/// Computes the embedding of each text in one pass over it.
fn expected(model: &mut Decoder) -> Vec<Vec<f32>> {
    model.scale_by_token().unwrap();
    let embed = |(text, pooling): (Vec<u32>, Pooling)| {
        let (mut cache, blocks) = kv_cache(model, text.len());
        let tokens = [SequenceTokens::new(0, &text, &blocks)];
        let batch = InferenceBatch::padded(model.device(), &tokens).unwrap();
        let hidden = cast(&model.hidden(&batch, &mut cache).unwrap(), DType::F32).unwrap();
        let values = hidden.rows(0, text.len()).unwrap().to_vec::<f32>().unwrap();
        let rows = values.chunks_exact(values.len() / text.len());
        let pooled = match pooling {
            Pooling::Last => rows.last().unwrap().iter().map(|x| f64::from(*x)).collect(),
            Pooling::Scores | Pooling::Cls => unreachable!("the model is no classifier and no encoder"),
            Pooling::Mean => rows.fold(vec![0.0; values.len() / text.len()], |sum: Vec<f64>, row| {
                sum.iter().zip(row).map(|(sum, x)| sum + f64::from(*x)).collect()
            }),
        };
        let norm = pooled.iter().map(|x| x * x).sum::<f64>().sqrt();
        pooled.iter().map(|x| (x / norm) as f32).collect()
    };
    texts().into_iter().map(embed).collect()
}

/// The texts are read in chunks, with requests that draw tokens, after preemptions, and with blocks of shared prefixes in the cache. A CPU gives the
/// same bits.
#[test]
fn embeddings_are_the_pooled_activations_of_the_whole_text() {
    for name in [RecipeName::Fp32, RecipeName::Bf16, RecipeName::Fp8Current] {
        let recipe = recipe(name, Fp8Format::Auto);
        let expected = expected(&mut model(&recipe, &Device::Cpu));
        for (prefill_chunk, kv_cache_tokens) in [(1000, 2000), (17, 2000), (40, 160)] {
            let options = EngineOptions { prefill_chunk, kv_cache_tokens, ..ROOMY };
            let mut engine = Engine::new(model(&recipe, &Device::Cpu), &options).unwrap();
            let draws = Request { prompt: prompt("text", 90), max_new_tokens: 30, ..Request::default() };
            let scored = Request { pooling: Some(Pooling::Mean), prompt_logprobs: Some(0), ..draws.clone() };
            let alone = run(&mut engine, vec![draws.clone()]).remove(0);
            let found = run(&mut engine, [vec![draws], requests(), vec![scored]].concat());
            let context = format!("{}, {options:?}", name.as_str());
            assert_eq!((&found[0], &found[9].tokens), (&alone, &alone.tokens), "{context}");
            assert_eq!(found[9].prompt.len(), 90, "{context}");
            for (found, expected) in found[1..9].iter().zip(&expected) {
                assert_eq!((&found.embedding, found.tokens.len()), (expected, 0), "{context}");
            }
        }
    }
}

/// The memory of the text is freed after a part of it was read, and the whole text is read again.
#[test]
fn a_text_that_is_held_gets_the_same_embedding() {
    let recipe = recipe(RecipeName::Bf16, Fp8Format::Auto);
    let expected = expected(&mut model(&recipe, &Device::Cpu));
    let options = EngineOptions { prefill_chunk: 17, ..ROOMY };
    let mut engine = Engine::new(model(&recipe, &Device::Cpu), &options).unwrap();
    let id = engine.add(requests().swap_remove(6)).unwrap();
    (0..3).for_each(|_| assert!(engine.step().unwrap().is_empty()));
    engine.hold(id);
    engine.resume(id);
    assert_eq!(finish(&mut engine)[&id].embedding, expected[6]);
}

/// On a GPU, sums are added in another order. In BF16, an embedding is as far from the F32 embedding as on a CPU, up to a factor of 2 in the angle.
#[test]
fn embeddings_agree_across_devices() {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    // For small angles, half the square of the angle.
    let apart = |a: &[f32], b: &[f32]| 1.0 - dot(a, b);
    let of = |name| expected(&mut model(&recipe(name, Fp8Format::Auto), &Device::Cpu));
    let exact = of(RecipeName::Fp32);
    let in_bf16 = of(RecipeName::Bf16).iter().zip(&exact).map(|(a, b)| apart(a, b)).fold(0.0, f64::max);
    // Norms of F32 vectors are off by some units of 2⁻²⁴.
    for (name, bound) in [(RecipeName::Fp32, 1e-5), (RecipeName::Bf16, 4.0 * in_bf16)] {
        let recipe = recipe(name, Fp8Format::Auto);
        for device in devices_of(&recipe) {
            let mut engine = Engine::new(model(&recipe, &device), &ROOMY).unwrap();
            for (found, exact) in run(&mut engine, requests()).iter().zip(&exact) {
                assert!((dot(&found.embedding, &found.embedding) - 1.0).abs() < 1e-5, "their norm is 1");
                let found = apart(&found.embedding, exact);
                assert!(found <= bound, "{}, {device}: {found}, and {bound} is the bound", name.as_str());
            }
        }
    }
}
