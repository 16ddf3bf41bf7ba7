//! The weights of a folder have the same bits on every device, for every type in which a folder stores them.

use crate::setup::{devices, recipe, tiny_llama};
use ottava_checkpoint::{FolderWeights, RandomWeights};
use ottava_models::Decoder;
use ottava_recipe::param::{Purpose, WeightSource};
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_tensor::cuda::GpuModel;
use ottava_tensor::ops::cast;
use ottava_tensor::testing::normals;
use ottava_tensor::{DType, Device};
use safetensors::tensor::{Dtype, TensorView};
use std::collections::BTreeMap;
use std::path::Path;

/// Writes the tensors of [`tiny_llama`] in `dtype`, and returns their values, rounded to F32.
fn write(folder: &Path, dtype: DType) -> BTreeMap<String, Vec<f32>> {
    let own = match dtype {
        DType::BF16 => Dtype::BF16,
        DType::F16 => Dtype::F16,
        DType::F64 => Dtype::F64,
        _ => Dtype::F32,
    };
    let (mut views, mut values) = (Vec::new(), BTreeMap::new());
    for tensor in Decoder::folder_tensors(&tiny_llama(), &recipe(RecipeName::Bf16, Fp8Format::Auto)).unwrap() {
        let stored = cast(&normals(&tensor.name, &tensor.shape, DType::F64), dtype).unwrap();
        values.insert(tensor.name.clone(), cast(&stored, DType::F32).unwrap().to_vec().unwrap());
        views.push((tensor.name, tensor.shape, stored.read_bytes().unwrap()));
    }
    let views = views.iter().map(|(name, shape, bytes)| (name, TensorView::new(own, shape.clone(), bytes).unwrap()));
    std::fs::write(folder.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    values
}

fn load(name: RecipeName, device: &Device, weights: &mut dyn WeightSource) -> ottava_common::Result<Decoder> {
    Decoder::new(&tiny_llama(), &recipe(name, Fp8Format::Auto), device, Purpose::Infer, 32, weights)
}

#[test]
fn loaded_weights_have_the_bits_of_the_folder() {
    for dtype in [DType::BF16, DType::F16, DType::F32, DType::F64] {
        let folder = tempfile::tempdir().unwrap();
        let values = write(folder.path(), dtype);
        for device in devices() {
            for (name, compute) in [(RecipeName::Fp32, DType::F32), (RecipeName::Bf16, DType::BF16)] {
                let mut weights = FolderWeights::open(folder.path()).unwrap().on(&device);
                let mut model = load(name, &device, &mut weights).unwrap();
                weights.finish(&tiny_llama()).unwrap();
                for param in model.parameters() {
                    let shards = param.identity.shards.iter().flat_map(|shard| &values[&shard.tensor.name]);
                    let expected: Vec<f32> = shards.copied().collect();
                    let expected = ottava_tensor::Tensor::from_slice(&Device::Cpu, &[expected.len()], &expected);
                    let expected = cast(&expected.unwrap(), compute).unwrap().read_bytes().unwrap();
                    let found = param.weights.value().unwrap();
                    assert_eq!(found.dtype(), compute);
                    assert!(
                        found.read_bytes().unwrap() == expected,
                        "{} from {dtype} on {device}",
                        param.identity.name()
                    );
                }
            }
        }
    }
}

#[test]
fn loading_takes_no_more_memory_than_planned() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), DType::F32);
    let peak = |of: &dyn Fn(&Device) -> Box<dyn WeightSource>| {
        let device = Device::dry_gpu(GpuModel::h200());
        load(RecipeName::Bf16, &device, &mut *of(&device)).unwrap();
        device.tracker().unwrap().take_peak().bytes
    };
    let planned = peak(&|device| Box::new(RandomWeights { seed: 0, device: device.clone() }));
    let taken = peak(&|device| Box::new(FolderWeights::open(folder.path()).unwrap().on(device)));
    assert!(0 < taken && taken <= planned, "{taken} bytes, planned are {planned}");
}

#[test]
fn a_file_that_is_cut_while_it_is_read_is_named_with_its_tensor() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), DType::BF16);
    for device in devices() {
        let mut weights = FolderWeights::open(folder.path()).unwrap().on(&device);
        let file = folder.path().join("model.safetensors");
        let bytes = std::fs::read(&file).unwrap();
        std::fs::File::options().write(true).open(&file).unwrap().set_len(bytes.len() as u64 - 1).unwrap();
        let Err(error) = load(RecipeName::Bf16, &device, &mut weights) else { panic!("the last tensor is cut") };
        let (error, file) = (error.to_string(), file.display());
        assert!(error.starts_with(&format!("{file}: tensor \"")) && error.contains("cannot be read"), "{error}");
        std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    }
}
