//! Requests of several adapters share an engine and the weights of its model.

use crate::inference::engine::{Got, ROOMY, prompt, run};
use crate::models::families::all_families;
use crate::peft::lora::{adapter_run, base};
use crate::runs::resume::{train, write_inputs};
use crate::setup::{Seeded, devices_of, recipe, tiny_llama};
use ottava_checkpoint::{AdapterFolder, merge};
use ottava_engine::{AdapterId, Engine, EngineOptions, Request, Sampling};
use ottava_models::{ConfigFile, Decoder, DecoderConfig, decoder_config};
use ottava_recipe::lora::{Lora, Targets};
use ottava_recipe::param::Purpose;
use ottava_recipe::{Fp8Format, Recipe, RecipeName};
use ottava_tensor::Device;
use ottava_tensor::cuda::GpuModel;
use ottava_train::plan::{expect_model_fits, inference_bytes};
use ottava_train::trainer::{Start, build};
use std::path::Path;

/// Returns adapters with different ranks and linears. They adapt some parts of fused weights, and not all linears of a layer. One of them has
/// magnitudes.
fn adapters() -> [Lora; 3] {
    let names = |names: &[&str]| Targets::Names(names.iter().map(|name| name.to_string()).collect());
    let all =
        Lora { r: 3, alpha: 4.0, use_rslora: true, use_dora: false, targets: Targets::AllLinear, ..Lora::default() };
    let few = Lora { r: 8, use_rslora: false, targets: names(&["q_proj", "layers.1.mlp.down_proj"]), ..all.clone() };
    let dora = Lora { r: 2, use_dora: true, targets: names(&["v_proj", "o_proj", "up_proj"]), ..all.clone() };
    [all, few, dora]
}

fn model(lora: Option<Lora>, recipe: &Recipe, device: &Device) -> Decoder {
    model_of(&DecoderConfig { lora, ..tiny_llama() }, recipe, device, 200)
}

fn model_of(sizes: &DecoderConfig, recipe: &Recipe, device: &Device, seq_len: usize) -> Decoder {
    let mut model = Decoder::new(sizes, recipe, device, Purpose::Infer, seq_len, &mut Seeded { std: 0.3 }).unwrap();
    model.quantize_weights().unwrap();
    model
}

/// Returns the same requests for the model and for each adapter, in turn.
fn requests() -> Vec<Request> {
    let drawn = Sampling { temperature: 1.2, seed: 3, ..Sampling::default() };
    let greedy = Request { prompt: prompt("a", 70), max_new_tokens: 20, logprobs: Some(2), ..Request::default() };
    let drawn = Request { prompt: prompt("a", 70), max_new_tokens: 40, sampling: drawn, ..greedy.clone() };
    let scored = Request { prompt: prompt("b", 9), prompt_logprobs: Some(1), ..greedy.clone() };
    let ids = || std::iter::once(None).chain((0..adapters().len()).map(|number| Some(AdapterId(number))));
    let of = |request: &Request| ids().map(|adapter| Request { adapter, ..request.clone() }).collect::<Vec<_>>();
    [greedy, drawn, scored].iter().flat_map(of).collect()
}

/// Returns the result of each request alone, from a model that has only its adapters.
fn expected(recipe: &Recipe, device: &Device) -> Vec<Got> {
    let options = EngineOptions { prefix_caching: false, ..ROOMY };
    let of_adapter = |lora: Option<Lora>| Engine::new(model(lora, recipe, device), &options).unwrap();
    let mut engines: Vec<Engine> = std::iter::once(None).chain(adapters().map(Some)).map(of_adapter).collect();
    let alone = |request: Request| {
        let engine = &mut engines[request.adapter.map_or(0, |adapter| adapter.0 + 1)];
        run(engine, vec![Request { adapter: None, ..request }]).remove(0)
    };
    requests().into_iter().map(alone).collect()
}

/// Makes an engine with all adapters.
fn engine(recipe: &Recipe, device: &Device, options: EngineOptions) -> Engine {
    let model = model(Some(Lora::of_no_linear()), recipe, device);
    let loaded = adapters().map(|lora| model.load_adapters(&lora, &mut Seeded { std: 0.3 }).unwrap());
    let mut engine = Engine::new(model, &options).unwrap();
    let ids = loaded.map(|adapters| engine.add_adapters(adapters));
    assert_eq!(ids, [0, 1, 2].map(AdapterId));
    engine
}

/// The requests are in one batch, with shared and with scarce blocks of the cache.
#[test]
fn requests_of_an_adapter_get_what_a_model_with_it_alone_gives() {
    for name in [RecipeName::Fp32, RecipeName::Fp8Current, RecipeName::Fp8Block] {
        let (recipe, cpu) = (recipe(name, Fp8Format::Auto), Device::Cpu);
        let expected = expected(&recipe, &cpu);
        for [one, other] in [[0, 1], [0, 2], [0, 3], [1, 2], [2, 3]] {
            assert_ne!(expected[one].logprobs, expected[other].logprobs, "{}", name.as_str());
        }
        for (max_batch, prefill_chunk, kv_cache_tokens) in [(12, 64, 2000), (5, 17, 288)] {
            let options = EngineOptions { max_batch, prefill_chunk, kv_cache_tokens, ..ROOMY };
            let mut engine = engine(&recipe, &cpu, options);
            // In the second pass, blocks of ended requests are found.
            for time in 0..2 {
                assert_eq!(run(&mut engine, requests()), expected, "{}, {options:?}, time {time}", name.as_str());
            }
            assert!(engine.stats().prefix_hits > 0);
        }
    }
}

/// The adapters of each kind of layer return to their places.
#[test]
fn adapters_of_every_family_can_be_added() {
    let recipe = recipe(RecipeName::Fp32, Fp8Format::Auto);
    let [all, ..] = adapters();
    for (family, sizes) in all_families() {
        let parameters = ["experts.down_proj".to_string()].into_iter().filter(|_| sizes.experts().is_some()).collect();
        let lora = Lora { parameters, ..all.clone() };
        let of = |lora: Lora| model_of(&DecoderConfig { lora: Some(lora), ..sizes.clone() }, &recipe, &Device::Cpu, 8);
        let options = EngineOptions { max_model_len: 8, ..ROOMY };
        let base = of(Lora::of_no_linear());
        let loaded = base.load_adapters(&lora, &mut Seeded { std: 0.3 }).unwrap();
        let mut engine = Engine::new(base, &options).unwrap();
        let id = engine.add_adapters(loaded);
        let get = |engine: &mut Engine, adapter| {
            let prompt = vec![3, 1, 4, 1, 5];
            let request = Request { adapter, prompt, max_new_tokens: 3, logprobs: Some(0), ..Request::default() };
            run(engine, vec![request]).remove(0)
        };
        let [with, without] = [Some(id), None].map(|adapter| get(&mut engine, adapter));
        assert_eq!(with, get(&mut Engine::new(of(lora.clone()), &options).unwrap(), None), "{family}");
        assert_ne!(with.logprobs, without.logprobs, "{family}");
    }
}

/// Devices are tested one after the other, because on a GPU batches of other sizes round differently.
#[test]
fn an_engine_changes_adapters_between_requests() {
    for name in [RecipeName::Bf16, RecipeName::Fp8Current] {
        let recipe = recipe(name, Fp8Format::Auto);
        for device in devices_of(&recipe) {
            let expected = expected(&recipe, &device);
            let mut engine = engine(&recipe, &device, EngineOptions { prefix_caching: false, ..ROOMY });
            engine.warm_up().unwrap();
            let found: Vec<Got> = requests().into_iter().flat_map(|request| run(&mut engine, vec![request])).collect();
            assert_eq!(found, expected, "{} on {device}", name.as_str());
        }
    }
}

/// Makes the engine of a model folder with `adapters`.
fn of_folder(folder: &Path, adapters: Vec<AdapterFolder>) -> ottava_common::Result<Engine> {
    let lora = (!adapters.is_empty()).then(Lora::of_no_linear);
    let sizes = DecoderConfig { lora, ..decoder_config(&ConfigFile::read(folder)?)? };
    let recipe = recipe(RecipeName::Fp32, Fp8Format::Auto);
    let mut model = build(Some(folder), None, 0, &Device::Cpu, &sizes, |weights| {
        Decoder::new(&sizes, &recipe, &Device::Cpu, Purpose::Infer, 64, weights)
    })?;
    model.quantize_weights()?;
    let loaded = adapters.into_iter().map(|folder| folder.load(&model)).collect::<ottava_common::Result<Vec<_>>>()?;
    let mut engine = Engine::new(model, &EngineOptions { max_model_len: 64, ..ROOMY })?;
    loaded.into_iter().for_each(|adapters| assert_eq!(engine.add_adapters(adapters), AdapterId(0)));
    Ok(engine)
}

#[test]
fn a_request_of_an_adapter_is_scored_as_by_the_merged_model_and_misfits_are_errors() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let base = base(inputs.path());
    let mut run_of_adapter = adapter_run(inputs.path(), &base, &inputs.path().join("run"), RecipeName::Fp32);
    run_of_adapter.lora.target_modules = Targets::Names(vec!["q_proj".into(), "down_proj".into()]);
    train(&run_of_adapter, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    let (folder, merged) = (run_of_adapter.output_dir.join("checkpoints/checkpoint-6"), inputs.path().join("merged"));
    let open = || AdapterFolder::open(&folder).unwrap();
    merge(&base, &open(), None, &merged).unwrap();
    let request = |adapter| {
        let prompt = prompt("merged", 40);
        Request {
            adapter,
            prompt,
            max_new_tokens: 10,
            prompt_logprobs: Some(0),
            logprobs: Some(0),
            ..Request::default()
        }
    };
    let mut engine = of_folder(&base, vec![open()]).unwrap();
    let [plain, with] = [None, Some(AdapterId(0))].map(|adapter| run(&mut engine, vec![request(adapter)]).remove(0));
    let sum = run(&mut of_folder(&merged, Vec::new()).unwrap(), vec![request(None)]).remove(0);
    let scores = |got: &Got| -> Vec<f32> {
        got.prompt.iter().flatten().chain(&got.logprobs).map(|token| token.logprob).collect()
    };
    let far = |a: &Got, b: &Got| scores(a).iter().zip(scores(b)).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert_eq!((with.tokens.len(), &with.tokens), (10, &sum.tokens));
    // In F32, the base and the adapter are two products and a sum, and the merged weight is one product. Log-probabilities near -5 have steps of
    // 4.8e-7, and differ by one or two steps. The bound is a hundredth of the effect of the adapter.
    assert!(far(&with, &sum) < 1e-4, "{} from the merged model", far(&with, &sum));
    assert!(far(&with, &plain) > 1e-2, "the adapter changes scores by {}", far(&with, &plain));
    // These are an adapter of another rank, an adapter with a linear that its settings do not name, and an adapter with a linear that no model has.
    let settings = std::fs::read_to_string(folder.join("adapter_config.json")).unwrap();
    let wrong = inputs.path().join("wrong");
    std::fs::create_dir(&wrong).unwrap();
    std::fs::copy(folder.join("adapter_model.safetensors"), wrong.join("adapter_model.safetensors")).unwrap();
    for (from, to, words) in [
        (
            "\"r\": 3",
            "\"r\": 4",
            "has `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight` of shape [3, 32]",
        ),
        (
            "\"down_proj\",",
            "",
            "has `base_model.model.model.layers.0.mlp.down_proj.lora_A.weight`, which the base model",
        ),
        ("\"q_proj\"", "\"query\"", "which the base model has no place for, or neither `target_modules` nor"),
    ] {
        assert!(settings.contains(from), "{settings}");
        std::fs::write(wrong.join("adapter_config.json"), settings.replace(from, to)).unwrap();
        let error = of_folder(&base, vec![AdapterFolder::open(&wrong).unwrap()]).err().expect(words).to_string();
        assert!(error.starts_with(&wrong.display().to_string()) && error.contains(words), "{error}");
    }
}

/// The planned memory of a model and adapters equals the memory of loading them and computing a token with each. It grows by the adapters' weights.
#[test]
fn planned_memory_of_inference_counts_adapters() {
    let recipe = recipe(RecipeName::Fp8Current, Fp8Format::Auto);
    let gpu = Device::dry_gpu(GpuModel::h200());
    // With a small vocabulary, the peak is after the build.
    let sizes = DecoderConfig { lora: Some(Lora::of_no_linear()), vocabulary: 64, ..tiny_llama().with_layers(8) };
    let planned = |adapters: &[Lora]| inference_bytes(&sizes, &recipe, &gpu, 64, 1, adapters).unwrap();
    let [all, few, dora] = adapters();
    let [base, one, two] =
        [vec![], vec![all.clone()], vec![all.clone(), few.clone()]].map(|adapters| planned(&adapters));
    // The elements of `A` and `B` of all linears are BF16.
    let matrices = |lora: &Lora| {
        let with = DecoderConfig { lora: Some(lora.clone()), ..sizes.clone() };
        let mut model = Decoder::unloaded(&with, &recipe, &Device::Cpu.dry(), Purpose::Infer, 1).unwrap();
        2 * model.parameters().iter().map(|param| param.weights.shape().iter().product::<usize>()).sum::<usize>()
    };
    let slack = |bytes: usize| bytes..bytes + bytes / 2 + (64 << 10);
    assert!(slack(matrices(&all)).contains(&(one - base)), "{} for {}", one - base, matrices(&all));
    assert!(slack(matrices(&few)).contains(&(two - one)), "{} for {}", two - one, matrices(&few));
    // The norms of the fused gate and up projection need its dequantized values and the product of the adapter, in BF16.
    let plain = Lora { use_dora: false, ..dora.clone() };
    let scratch = planned(&[dora]) - planned(&[plain]);
    assert!((2 * 2 * 224 * 64..1 << 18).contains(&scratch), "{scratch} for norms");
    // The memory of the model alone is not enough for the model and the adapter.
    let small = Device::dry_gpu(GpuModel { memory: base, ..GpuModel::h200() });
    let error = expect_model_fits(Path::new("none"), &sizes, &recipe, &small, 64, 1, &[all]).unwrap_err();
    assert_eq!(error.exit_code(), 3);
    assert!(error.to_string().starts_with("the model and the adapters beside it do not fit"), "{error}");
}

#[test]
fn adapters_that_there_are_not_are_errors() {
    let recipe = recipe(RecipeName::Bf16, Fp8Format::Auto);
    let mut engine = engine(&recipe, &Device::Cpu, ROOMY);
    let request = Request { adapter: Some(AdapterId(3)), prompt: vec![1], ..Request::default() };
    let error = engine.add(request).unwrap_err().to_string();
    assert_eq!(error, "there is no adapter number 3; the engine has 3");
    let error = model(None, &recipe, &Device::Cpu).load_adapters(&adapters()[0], &mut Seeded { std: 0.3 });
    assert!(error.err().expect("it is built for none").to_string().contains("built for them"));
}
