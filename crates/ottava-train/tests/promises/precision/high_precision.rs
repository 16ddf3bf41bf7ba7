//! Steps in high precision, during which histories and scales are still updated.

use crate::setup::{Alone, build, devices, linear, precision, quantize, recipes_on, sequences, training};
use crate::step::steps::{LEAN, expect_same, run, without_losses_of_casts};
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::MemoryPolicy;
use ottava_recipe::recompute::Recompute;
use ottava_recipe::{Delayed, ExceptionsConfig, FirstStep, Precision, ProductName, Recipe, RecipeName};
use ottava_tensor::ops::cast;
use ottava_tensor::testing::{normals, values};
use ottava_tensor::{DType, Device, Tensor};
use std::ops::Range;

/// Returns histories and scales after each of eight steps of two micro-batches. The tensors of these steps do not depend on the precision.
fn histories(recipe: &Recipe, device: &Device, high: Range<usize>) -> Vec<Vec<(String, Vec<f64>)>> {
    let (t, k, n) = (24, 40, 33);
    let (mut linear, mut scaling) = build(recipe, device, |b| linear(b, &[("linear", n)], k, false, 0.0));
    let random = |name: String, shape: &[usize], factor: f64| -> Tensor {
        let x: Vec<f32> = values(&normals(&name, shape, DType::F32)).iter().map(|x| (x * factor) as f32).collect();
        let x = Tensor::from_slice(&Device::Cpu, shape, &x).unwrap();
        cast(&x, recipe.compute).unwrap().to_device(device).unwrap()
    };
    let mut seen = Vec::new();
    let sequences = sequences(device, 1, t);
    for step in 0..8 {
        let precision = precision(high.contains(&step));
        // Sizes rise and fall, so that histories matter.
        let factor = [1.0, 8.0, 0.25, 3.0][step % 4];
        linear.parameters_mut(&mut |p| p.weights.set_value(random(format!("weight {step}"), &[n, k], factor)));
        quantize(linear.trained(), &mut scaling);
        for pass in 0..2 {
            let mut context = training(&mut scaling, &sequences, precision);
            let x = random(format!("x {step} {pass}"), &[t, k], factor);
            let dy = random(format!("dy {step} {pass}"), &[t, n], 1e-3 * factor);
            let (_, saved) = linear.forward(x, None, &mut context).unwrap();
            linear.backward(dy, saved, &mut context).unwrap();
        }
        linear.parameters_mut(&mut |p| p.gradient.clear());
        scaling.update().unwrap();
        let arrays = scaling.arrays().unwrap().into_iter().filter(|(_, a)| a.dtype() == DType::F32);
        seen.push(arrays.map(|(name, array)| (name, values(&array))).collect());
    }
    seen
}

#[test]
fn histories_and_scales_do_not_notice_steps_in_high_precision() {
    for (first_step, interval) in [(FirstStep::Current, 1), (FirstStep::Unscaled, 1), (FirstStep::Current, 3)] {
        for high_precision_products in [vec![], vec![ProductName::Wgrad], vec![ProductName::Fprop]] {
            let (recipe, amax_history_len) = (RecipeName::Fp8Delayed, 3);
            let precision = Precision {
                recipe,
                delayed: Delayed { amax_history_len, first_step, interval, ..Delayed::default() },
                exceptions: ExceptionsConfig { high_precision_products, ..ExceptionsConfig::default() },
                ..Precision::default()
            };
            for device in devices() {
                let never = histories(&precision.recipe(), &device, 0..0);
                assert_eq!(never.last().unwrap().len(), 3);
                for high in [0..2, 2..5, 6..8, 0..8] {
                    assert!(histories(&precision.recipe(), &device, high.clone()) == never, "{precision:?}, {high:?}");
                }
            }
        }
    }
}

#[test]
fn a_model_in_high_precision_throughout_has_the_bits_of_bf16() {
    for device in devices() {
        for kept in
            [MemoryPolicy::FULL, LEAN, MemoryPolicy { recompute: Recompute::Attention, weight_codes: false, ..LEAN }]
        {
            let numbers = |recipe: &Recipe, recorded| {
                let all = run(recipe, &device, kept, recorded, |_, _| StepPrecision::High);
                // The losses of casts, and scales, are left out.
                all.into_iter()
                    .filter(|(name, _)| !["casts", "amax", "scaling."].iter().any(|part| name.contains(part)))
                    .collect::<Vec<_>>()
            };
            let expected = numbers(&Precision::default().recipe(), false);
            for (name, recipe) in recipes_on(&device).into_iter().filter(|(_, recipe)| recipe.casts.is_some()) {
                for recorded in [false, true] {
                    expect_same(&format!("{name} on {device}, {kept:?}"), &expected, &numbers(&recipe, recorded));
                }
            }
        }
    }
}

/// Steps two and three are in high precision. With or without captured steps and with any memory policy, they give the same bits.
#[test]
fn a_detour_changes_no_bit_by_how_steps_are_run() {
    for device in devices() {
        for (name, recipe) in recipes_on(&device).into_iter().filter(|(_, recipe)| recipe.casts.is_some()) {
            let detour = |kept, recorded| {
                let all = run(&recipe, &device, kept, recorded, |_, step| precision((1..3).contains(&step)));
                without_losses_of_casts(&all)
            };
            let expected = detour(LEAN, false);
            for (kept, recorded) in
                [(LEAN, true), (MemoryPolicy { recompute: Recompute::NormSwiglu, weight_codes: false, ..LEAN }, true)]
            {
                expect_same(&format!("{name} on {device}, {kept:?}"), &expected, &detour(kept, recorded));
            }
            let without = run(&recipe, &device, LEAN, false, |_, _| StepPrecision::Recipe);
            assert!(
                without_losses_of_casts(&without) != expected,
                "{name} on {device}: the detour is seen in the losses"
            );
        }
    }
}
