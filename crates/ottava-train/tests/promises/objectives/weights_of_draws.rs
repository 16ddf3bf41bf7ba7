//! The weights that draws read: codes are cast once, values where products read values, and graphs are captured again when forward reads other tensors.

use crate::setup::{Seeded, devices_of, logits, on_ranks, recipe, tiny_llama};
use ottava_models::Decoder;
use ottava_parallel::{Partition, Ranks, ReduceFormat, WholeWeights, Zero};
use ottava_recipe::mode::Mode;
use ottava_recipe::param::{Loan, MemoryPolicy, Param, Purpose};
use ottava_recipe::scaling::Casts;
use ottava_recipe::storage::Storage;
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_tensor::comm::MeshShape;
use ottava_tensor::cuda::GpuModel;
use ottava_tensor::ops::cast;
use ottava_tensor::{DType, Device, Tensor};
use ottava_train::step::host::values;
use std::collections::BTreeSet;
use std::rc::Rc;

/// A trained model whose products cast the weights that they read, or read stored codes.
fn model(name: RecipeName, device: &Device, storage: Storage, weight_codes: bool) -> Decoder {
    let memory = MemoryPolicy { formats: storage.formats(), weight_codes, ..MemoryPolicy::FULL };
    let recipe = recipe(name, Fp8Format::Auto);
    let purpose = Purpose::Train(memory);
    let mut model = Decoder::new(&tiny_llama(), &recipe, device, purpose, 64, &mut Seeded { std: 0.3 }).unwrap();
    model.quantize_weights().unwrap();
    model
}

/// Applies `read` to each parameter of `model`.
fn each<T>(model: &mut Decoder, read: impl Fn(&Param, &mut Casts) -> T) -> Vec<T> {
    let (units, scaling) = model.units_and_scaling();
    let mut casts = scaling.casts(Mode::INFERENCE);
    units.into_iter().flatten().map(|param| read(param, &mut casts)).collect()
}

/// The bytes that forward reads of each weight.
fn read(model: &mut Decoder) -> Vec<Vec<Vec<u8>>> {
    each(model, |param, casts| {
        let weight = param.for_forward(&Loan::default(), casts).unwrap();
        weight.tensors().map(|tensor| tensor.read_bytes().unwrap()).collect()
    })
}

fn cast_by_forward(model: &mut Decoder) -> usize {
    each(model, |param, casts| param.is_cast_by_forward(casts)).into_iter().filter(|&is_cast| is_cast).count()
}

/// Writes other weights, as an update does.
fn change(param: &mut Param) {
    let value = param.weights.value().unwrap();
    let changed: Vec<f32> = values(&value).unwrap().into_iter().map(|x| 0.75 * x as f32).collect();
    let changed = Tensor::from_slice(value.device(), value.shape(), &changed).unwrap();
    param.weights.set_value(cast(&changed, value.dtype()).unwrap());
}

/// A model that stores no codes has them for draws, with the bytes of stored codes, and again after an update.
#[test]
fn codes_of_draws_are_those_of_a_model_that_stores_codes() {
    use RecipeName::{Fp8Block, Fp8Current, Fp8Delayed, Fp8Row};
    for name in [Fp8Row, Fp8Block, Fp8Delayed, Fp8Current] {
        for storage in [Storage::Float32, Storage::MsampO2] {
            for device in devices_of(&recipe(name, Fp8Format::Auto)) {
                let named = format!("{}, {storage:?} on {device}", name.as_str());
                let [mut stored, mut casting] = [true, false].map(|codes| model(name, &device, storage, codes));
                let (mut whole, partition) = (WholeWeights::default(), Partition::solo());
                let linears = cast_by_forward(&mut casting);
                assert!(linears >= 8 && cast_by_forward(&mut stored) == 0, "{named}: {linears}");
                for _ in 0..2 {
                    let lent = whole.lend(&mut casting, &partition, |model, _| {
                        assert_eq!(cast_by_forward(model), 0, "{named}");
                        Ok(read(model))
                    });
                    assert!(lent.unwrap() == read(&mut stored), "{named}");
                    assert_eq!(cast_by_forward(&mut casting), linears, "{named}: steps cast again");
                    for model in [&mut stored, &mut casting] {
                        model.parameters().into_iter().for_each(change);
                        model.quantize_weights().unwrap();
                    }
                }
            }
        }
    }
}

/// Lets a linear read values from now on, as the sentinel does.
fn demote(model: &mut Decoder) {
    model.scaling().set_high_precision(&BTreeSet::from(["model.layers.1.mlp.down_proj".to_string()]));
}

fn drawn_logits(model: &Decoder) -> Vec<f64> {
    let ids = Tensor::from_slice(&Device::Cpu, &[5], &[3, 1, 4, 1, 5]).unwrap();
    values(&logits(model, &ids)).unwrap()
}

/// On ranks that divide weights, a linear whose products read values has its whole values in draws.
#[test]
fn divided_linears_read_whole_values_in_draws() {
    let (device, precision) = (Device::Cpu, recipe(RecipeName::Fp8Row, Fp8Format::Auto));
    let mut alone = model(RecipeName::Fp8Row, &device, Storage::Float32, true);
    demote(&mut alone);
    let expected = drawn_logits(&alone);
    let drawn = on_ranks(2, move |group| {
        let ranks = Rc::new(Ranks::new(group, MeshShape::of_data(2), &Device::Cpu).unwrap());
        [Zero::OptimizerStates, Zero::Gradients, Zero::Weights].map(|zero| {
            let purpose = Purpose::Train(MemoryPolicy::FULL);
            let mut model = Decoder::unloaded(&tiny_llama(), &precision, &Device::Cpu, purpose, 64).unwrap();
            let partition = Partition::new(&mut model, ranks.clone(), zero, ReduceFormat::Stored, true).unwrap();
            partition.load(&mut model, &mut Seeded { std: 0.3 }).unwrap();
            partition.quantize_weights(&mut model).unwrap();
            demote(&mut model);
            WholeWeights::default().lend(&mut model, &partition, |model, _| Ok(drawn_logits(model))).unwrap()
        })
    });
    assert!(drawn.into_iter().flatten().all(|logits| logits == expected));
}

/// Another tensor in the place of codes, and a linear that reads values from now on, make graphs of draws invalid.
#[test]
fn draws_hear_that_forward_reads_other_tensors() {
    let device = Device::dry_gpu(GpuModel::h200());
    let mut model = model(RecipeName::Fp8Row, &device, Storage::Float32, false);
    let (mut whole, partition) = (WholeWeights::default(), Partition::solo());
    let lend = |model: &mut Decoder, whole: &mut WholeWeights| {
        whole.lend(model, &partition, |_, reads_others| Ok(reads_others)).unwrap()
    };
    assert!(lend(&mut model, &mut whole));
    assert!(!lend(&mut model, &mut whole));
    let mut others = Vec::new();
    for _ in 0..64 {
        others.push(Tensor::empty(&device, &[128, 64], DType::E4M3).unwrap());
    }
    assert!(lend(&mut model, &mut whole), "other tensors lie in the place of codes");
    assert!(!lend(&mut model, &mut whole));
    demote(&mut model);
    assert!(lend(&mut model, &mut whole), "a linear reads values");
    assert!(!lend(&mut model, &mut whole));
}
