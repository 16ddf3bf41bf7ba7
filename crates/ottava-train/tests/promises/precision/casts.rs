//! The casts of a model are the decided casts, a recipe without casts is BF16, and an infinity is reported and not stored.

use crate::setup::{Training, batch, build, decoder, devices, fp8_names_on, linear, recipe, recipes, tiny_llama};
use ottava_models::Decoder;
use ottava_recipe::mode::Mode;
use ottava_recipe::scaling::OneRank;
use ottava_recipe::{Delayed, Exceptions, Fp8Format, Precision, ProductPrecision, Recipe, RecipeName};
use ottava_tensor::ops::{CodeCopies, NonFinite, cast};
use ottava_tensor::testing::{normals, values};
use ottava_tensor::{DType, Device, Tensor};

/// A recipe that leaves all linears in BF16 is recipe `bf16`, whichever setting is used for this.
#[test]
fn without_a_single_cast_fp8_is_bf16_to_the_bit() {
    let config = tiny_llama();
    let train = |recipe: &Recipe, device: &Device| {
        let mut training = Training::new(decoder(&config, recipe, device, 0.08));
        let step = |i: usize| batch(&format!("no cast, step {i}"), 4, 24, config.vocabulary);
        let losses: Vec<u64> = (0..4).map(|i| training.step(&step(i), 4).to_bits()).collect();
        (losses, training.bits())
    };
    let exceptions = [
        Exceptions { patterns: vec!["*".into()], ..Exceptions::default() },
        Exceptions { first: 2, ..Exceptions::default() },
        Exceptions { first: 1, last: 1, ..Exceptions::default() },
        Exceptions { patterns: vec!["*.self_attn".into(), "*.mlp".into()], ..Exceptions::default() },
        Exceptions { slow_at: Some(96), ..Exceptions::default() },
    ];
    for device in devices() {
        let expected = train(&recipe(RecipeName::Bf16, Fp8Format::Hybrid), &device);
        for (name, exceptions) in
            fp8_names_on(&device).into_iter().flat_map(|name| exceptions.clone().map(|e| (name, e)))
        {
            let recipe = Recipe { exceptions: exceptions.clone(), ..recipe(name, Fp8Format::Auto) };
            let is_emulated = recipe.casts.is_some_and(|casts| casts.input.granularity.microscaling().is_some());
            if exceptions.slow_at.is_some() && is_emulated {
                // Emulated formats are never faster, so speed makes no exceptions.
                continue;
            }
            assert!(train(&recipe, &device) == expected, "{} with {exceptions:?}, {device}", name.as_str());
        }
    }
}

fn reads_weight_codes(recipe: &Recipe) -> bool {
    [recipe.products.fprop, recipe.products.dgrad] != [ProductPrecision::High; 2]
}

/// The built casts of each linear equal the planned casts.
#[test]
fn a_model_casts_what_its_plan_says() {
    let config = tiny_llama();
    for (name, recipe) in recipes() {
        let model = Decoder::describe(&config, &recipe).unwrap();
        let cast = model.linears.iter().filter(|(_, decision)| decision.fp8.is_some());
        let expected: Vec<String> = cast
            .flat_map(|(site, _)| ["input", "weight", "grad_output"].map(|operand| format!("{}.{operand}", site.name)))
            .filter(|name| !name.ends_with(".weight") || reads_weight_codes(&recipe))
            .collect();
        let mut built = decoder(&config, &recipe, &Device::Cpu, 0.05);
        assert_eq!(built.scaling().names(), expected, "{name}");
        assert_eq!(*built.description(), model, "{name}: a dry build describes the model");
    }
}

/// The infinity of one step changes no scale and is reported by name. If it were stored, it would fix the scale for the length of the history.
#[test]
fn an_infinity_is_named_and_not_remembered() {
    let calm: Vec<f32> = normals("x", &[32, 48], DType::F32).to_vec().unwrap();
    let mut wild = calm.clone();
    wild[77] = f32::INFINITY;
    for (non_finite, held) in [(NonFinite::Quarantine, false), (NonFinite::Keep, true)] {
        let precision = Precision {
            recipe: RecipeName::Fp8Delayed,
            delayed: Delayed { amax_history_len: 8, non_finite, ..Delayed::default() },
            ..Precision::default()
        };
        for device in devices() {
            let (linear, mut scaling) =
                build(&precision.recipe(), &device, |b| linear(b, &[("linear", 16)], 48, false, 0.0));
            let slot = linear.input().slot().unwrap();
            let mut step = |x: &[f32], factor: f32| {
                let x: Vec<f32> = x.iter().map(|v| v * factor).collect();
                let x = cast(&Tensor::from_slice(&device, &[32, 48], &x).unwrap(), DType::BF16).unwrap();
                let mut casts = scaling.casts(Mode::TRAINING);
                let frozen = casts.freeze(slot, &x).unwrap();
                casts.quantize(slot, &frozen, &x, CodeCopies::Both).unwrap();
                scaling.update().unwrap();
                let (_, scale) = scaling.arrays().unwrap().swap_remove(1);
                (scaling.losses(&OneRank).unwrap().non_finite, values(&scale)[0])
            };
            let (none, before) = step(&calm, 1.0);
            let (named, during) = step(&wild, 1.0);
            let (none_again, after) = step(&calm, 2.0);
            assert!(none.is_empty() && none_again.is_empty(), "{none:?} {none_again:?}");
            assert_eq!(named, ["linear.input"]);
            assert_eq!(before, during);
            assert_eq!(after == before, held, "{non_finite:?}: {before} then {after}");
        }
    }
}
