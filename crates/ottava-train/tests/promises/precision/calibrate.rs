//! Static scales of inputs, which are measured once and never change.

use crate::setup::{batch, decoder, devices, losses, precision, recipe, sequences, tiny_llama};
use ottava_data::Batch;
use ottava_models::Decoder;
use ottava_recipe::param::Resident;
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_tensor::Device;
use ottava_tensor::testing::values;
use ottava_train::calibrate::{Calibration, InputRange, Range};
use std::collections::BTreeMap;

fn model(name: RecipeName, device: &Device) -> Decoder {
    decoder(&tiny_llama(), &recipe(name, Fp8Format::Hybrid), device, 0.3)
}

/// Returns two batches of the tiny model.
fn batches() -> Vec<Batch> {
    let of = |name| {
        let [inputs, targets] = batch(name, 2, 24, 96).map(|ids| ids.to_vec::<i32>().unwrap());
        Batch::whole(inputs, targets, 2)
    };
    ["one", "two"].map(of).into()
}

fn measured(range: Range, device: &Device) -> Calibration {
    let mut model = model(RecipeName::Fp8Current, device);
    Calibration::measure(&mut model, batches().into_iter().map(Ok), range, &mut |_| ()).unwrap()
}

#[test]
fn ranges_are_those_of_values_in_bf16() {
    for device in devices() {
        let [max, percentile, mse] = [Range::Max, Range::Percentile, Range::Mse].map(|range| measured(range, &device));
        assert_eq!((max.tokens, max.inputs.len()), (96, 14));
        // Steps in high precision measure the same amaxes on the same text in another way.
        let mut model = model(RecipeName::Fp8Current, &device);
        for name in ["one", "two"] {
            let [inputs, _] = batch(name, 2, 24, 96).map(|ids| ids.to_device(&device).unwrap());
            model.forward(0, &inputs, &sequences(&device, 2, 48), precision(true), &mut Resident).unwrap();
        }
        let (names, amaxes) = (model.scaling().names(), values(model.scaling().amaxes_mut()));
        let amaxes: BTreeMap<String, f64> = names.into_iter().zip(amaxes).collect();
        for (name, InputRange { amax, input_scale }) in &max.inputs {
            let fused = name.replace("q_proj", "qkv_proj").replace("k_proj", "qkv_proj").replace("v_proj", "qkv_proj");
            let fused = fused.replace("qkqkv", "qkv").replace("gate_proj", "gate_up_proj");
            let fused = if name.ends_with("up_proj") { name.replace("up_proj", "gate_up_proj") } else { fused };
            assert_eq!(f64::from(*amax), amaxes[&format!("{fused}.input")], "{name}");
            assert_eq!(*input_scale, amax / 448.0);
            let [clipped, least] = [&percentile, &mse].map(|other| other.inputs[name].input_scale / input_scale);
            assert!(clipped <= 1.0 && clipped > 0.3 && least <= 1.0 && least > 1e-3, "{name}: {clipped} {least}");
        }
    }
}

/// Linears that read the same input have the same scale.
#[test]
fn files_are_read_as_they_were_written_and_checked() {
    let calibration = measured(Range::Max, &Device::Cpu);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("scales.json");
    let read = |text: &str| {
        std::fs::write(&path, text).unwrap();
        Calibration::read(&path).map_err(|error| error.to_string())
    };
    assert_eq!(read(&calibration.render()).unwrap(), calibration);
    let of = |name: &str| calibration.inputs[&format!("model.layers.1.{name}")];
    assert_eq!(of("self_attn.q_proj"), of("self_attn.v_proj"));
    assert_ne!(of("self_attn.q_proj"), of("self_attn.o_proj"));
    for (from, to, words) in [
        ("\"format\": 2", "\"format\": 1", "it has format 1, this program reads 2; measure the scales again"),
        ("\"format\": 2", "\"form\": 2", "this is not a file of `ottava calibrate`: unknown field `form`"),
        ("\"input_scale\": ", "\"input_scale\": -", "the scale of `model.layers.0."),
    ] {
        let error = read(&calibration.render().replace(from, to)).unwrap_err();
        assert!(error.contains("scales.json: ") && error.contains(words), "{error}");
    }
}

/// For one sequence, current scaling computes the scale that calibration has measured for the first input. Static scales stay the same for any input.
#[test]
fn set_scales_are_used_and_never_change() {
    for device in devices() {
        let [inputs, targets] = batch("one", 2, 24, 96).map(|ids| ids.to_device(&device).unwrap());
        let loss = |scale: &dyn Fn(&str) -> Option<f32>| {
            let mut model = model(RecipeName::Fp8Delayed, &device);
            let names = model.scaling().names();
            let scales = names.into_iter().filter_map(|name| Some((name.clone(), scale(&name)?))).collect();
            model.scaling().set_scales(&scales, ".input").unwrap();
            model.quantize_weights().unwrap();
            let first = values(&losses(&mut model, &inputs, &targets, 2).unwrap());
            assert_eq!(values(&losses(&mut model, &inputs, &targets, 2).unwrap()), first);
            first.iter().sum::<f64>() / first.len() as f64
        };
        let calibration = measured(Range::Max, &device);
        let of = |name: &str| {
            let linear = name.strip_suffix(".input")?.replace("qkv_proj", "q_proj").replace("gate_up_proj", "up_proj");
            Some(1.0 / calibration.inputs[&linear].input_scale)
        };
        let current = values(&losses(&mut model(RecipeName::Fp8Current, &device), &inputs, &targets, 2).unwrap());
        let current = current.iter().sum::<f64>() / current.len() as f64;
        let (measured, coarse) = (loss(&of), loss(&|name| Some(of(name)? / 65536.0)));
        // Inputs divided by 65536 are subnormal, so most of their bits are lost.
        let [measured, coarse] = [measured, coarse].map(|loss| (loss / current - 1.0).abs());
        assert!(measured < 0.01 && coarse > 2.0 * measured, "{device}: {measured:e} and {coarse:e} from {current}");
        let mut model = model(RecipeName::Fp8Delayed, &device);
        let error = model.scaling().set_scales(&BTreeMap::new(), ".input").unwrap_err().to_string();
        assert!(error.contains("there is no scale for the cast `model.layers.0.self_attn.qkv_proj.input`"), "{error}");
    }
}
