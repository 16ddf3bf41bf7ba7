//! Small models that scripts recorded with PyTorch: settings, weights and results. `tests/data/README.md` lists the files.

use ottava_models::{ConfigFile, DecoderConfig, decoder_config};
use ottava_recipe::param::{FolderLayout, FolderTensor, Init, StackOrder, Stacked, WeightSource};
use ottava_tensor::ops::{cast, transpose};
use ottava_tensor::{DType, Device, Tensor, testing};
use safetensors::SafeTensors;
use std::ops::Range;

/// A model of a file of `tests/data`.
#[derive(Clone)]
pub struct Recorded {
    /// The prefix of the names of its tensors, before a slash; empty for a file of one model.
    name: &'static str,
    file: Vec<u8>,
}

impl Recorded {
    /// Opens the model `name` of `tests/data/{file}.safetensors`.
    pub fn open(file: &str, name: &'static str) -> Recorded {
        let path = Recorded::path_of(file);
        Recorded { name, file: std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}")) }
    }

    /// Returns the path of `tests/data/{file}.safetensors`.
    pub fn path_of(file: &str) -> String {
        format!("{}/tests/data/{file}.safetensors", env!("CARGO_MANIFEST_DIR"))
    }

    fn path(&self, name: &str) -> String {
        if self.name.is_empty() { name.to_string() } else { format!("{}/{name}", self.name) }
    }

    fn tensors(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.file).expect("the recorded file is whole")
    }

    /// Returns a tensor, with floating-point values as F32. Returns `None` if it was not recorded.
    pub fn find(&self, name: &str) -> Option<Tensor> {
        let file = self.tensors();
        let view = file.tensor(&self.path(name)).ok()?;
        let dtype = match view.dtype() {
            safetensors::Dtype::I32 => DType::I32,
            safetensors::Dtype::BF16 => DType::BF16,
            safetensors::Dtype::U8 => DType::U8,
            _ => DType::F32,
        };
        let tensor = Tensor::from_bytes(&Device::Cpu, view.shape(), dtype, view.data()).expect("shape and bytes agree");
        Some(if dtype == DType::BF16 { cast(&tensor, DType::F32).expect("a float") } else { tensor })
    }

    /// Returns a recorded tensor.
    pub fn tensor(&self, name: &str) -> Tensor {
        self.find(name).unwrap_or_else(|| panic!("{} was not recorded", self.path(name)))
    }

    /// Returns the values of a tensor.
    pub fn values(&self, name: &str) -> Vec<f64> {
        testing::values(&self.tensor(name))
    }

    /// Returns the values of a tensor of ids.
    pub fn ids(&self, name: &str) -> Vec<i32> {
        self.tensor(name).to_vec().expect("I32")
    }

    /// Returns the number of tensors whose names begin with `kind/`.
    pub fn count(&self, kind: &str) -> usize {
        let start = self.path(&format!("{kind}/"));
        self.tensors().names().iter().filter(|name| name.starts_with(&start)).count()
    }

    /// Returns the sizes of the model.
    pub fn sizes(&self) -> DecoderConfig {
        let (_, metadata) = SafeTensors::read_metadata(&self.file).expect("the recorded file is whole");
        let keys = metadata.metadata().as_ref().expect("metadata")[&self.path("config")].clone();
        let keys = serde_json::from_str(&keys).expect("a JSON object");
        decoder_config(&ConfigFile::from_values(self.name, keys)).expect("transformers wrote this configuration")
    }

    /// Returns the weight or the gradient (`kind`) of `tensor`, in the layout of memory.
    pub fn of_tensor(&self, kind: &str, tensor: &FolderTensor) -> Tensor {
        let stored = self.tensor(&format!("{kind}/{}", tensor.stored_name()));
        assert_eq!(stored.shape(), tensor.stored_shape(), "{}", self.path(&tensor.name));
        in_memory(stored, tensor)
    }
}

/// Converts `stored`, the tensor of a folder that holds `tensor`, to the layout of memory.
pub fn in_memory(stored: Tensor, tensor: &FolderTensor) -> Tensor {
    match tensor.layout {
        FolderLayout::Same => stored,
        FolderLayout::ByHead(heads) => {
            let (all, size) = (testing::values(&stored), stored.len() / (3 * heads));
            let of =
                |part: usize, head: usize| all[(head * 3 + part) * size..][..size].iter().map(|&value| value as f32);
            let own: Vec<f32> = (0..3).flat_map(|part| (0..heads).flat_map(move |head| of(part, head))).collect();
            Tensor::from_slice(&Device::Cpu, &tensor.shape, &own).expect("as many")
        }
        FolderLayout::Transposed => transpose(&stored).expect("a matrix"),
        FolderLayout::Rows(_) | FolderLayout::Heads(_) => stored.reshape(&tensor.shape).expect("as many"),
        FolderLayout::ExpertAdapter(_) => unreachable!("`peft/experts.rs` reads adapters of experts from folders"),
        FolderLayout::Stacked(Stacked { expert, linear, linears, order, .. }) => {
            let (all, outputs) = (testing::values(&stored), tensor.shape[0]);
            let inputs = tensor.elements() / outputs;
            let at = |output, input| match order {
                StackOrder::Interleaved => (expert * inputs + input) * linears * outputs + output * linears + linear,
                StackOrder::InputsFirst => ((expert * inputs + input) * linears + linear) * outputs + output,
                StackOrder::OutputsFirst => ((expert * linears + linear) * outputs + output) * inputs + input,
            };
            let own = (0..tensor.elements()).map(|i| all[at(i / inputs, i % inputs)] as f32);
            Tensor::from_slice(&Device::Cpu, &tensor.shape, &own.collect::<Vec<_>>()).expect("as many")
        }
    }
}

impl WeightSource for Recorded {
    fn read(&mut self, tensor: &FolderTensor, elements: Range<usize>, _: Init) -> ottava_common::Result<Tensor> {
        let values = self.of_tensor("weights", tensor);
        Ok(values.reshape(&[values.len()])?.rows(elements.start, elements.end)?)
    }
}
