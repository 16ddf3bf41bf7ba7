//! Families and options of small models in `transformers`: logits, loss and gradients of packed documents in F32, and greedy text.
//! `scripts/make_referee.py` records the files.

use crate::setup::{
    devices, gradients, greedy_text, largest_error, logits, losses_and_gradients_of, recipe, relative_error,
};
use ottava_lm::context::Sequences;
use ottava_lm::models::{ConfigFile, Decoder, DecoderConfig, decoder_config};
use ottava_lm::param::{FolderTensor, Init, MemoryPolicy, Purpose, Shard, WeightSource};
use ottava_lm::recipe::{Fp8Format, RecipeName};
use ottava_tensor::ops::cast;
use ottava_tensor::testing::values;
use ottava_tensor::{DType, Device, Tensor};
use safetensors::SafeTensors;
use std::ops::Range;

/// Windows are shorter than the texts; `phi3_short` and `phi3_long`, and the two of "dynamic", lie on both sides of the length at which
/// the angles change.
const MODELS: [&str; 15] = [
    "mistral_window",
    "qwen2_window",
    "qwen3_window",
    "gemma2",
    "gemma3",
    "phi3",
    "phi3_short",
    "phi3_long",
    "granite",
    "olmo2",
    "smollm3",
    "yarn",
    "yarn_mscale",
    "dynamic_short",
    "dynamic_long",
];
/// Tokens of a row.
const TOKENS: usize = 24;

/// What `transformers` computed for one model.
struct Recorded {
    name: &'static str,
    file: Vec<u8>,
}

impl Recorded {
    fn open(name: &'static str) -> Recorded {
        let path = format!("{}/tests/data/referee_{name}.safetensors", env!("CARGO_MANIFEST_DIR"));
        Recorded { name, file: std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}")) }
    }

    /// A tensor, floating-point values as F32.
    fn tensor(&self, tensor: &str) -> Option<Tensor> {
        let file = SafeTensors::deserialize(&self.file).expect("the recorded file is whole");
        let view = file.tensor(&format!("{}/{tensor}", self.name)).ok()?;
        let dtype = match view.dtype() {
            safetensors::Dtype::I32 => return tensor_of(view.shape(), DType::I32, view.data()),
            safetensors::Dtype::BF16 => DType::BF16,
            _ => DType::F32,
        };
        cast(&tensor_of(view.shape(), dtype, view.data())?, DType::F32).ok()
    }

    fn ids(&self, tensor: &str) -> Vec<i32> {
        self.tensor(tensor).unwrap_or_else(|| panic!("{tensor}")).to_vec().expect("I32")
    }

    fn values(&self, tensor: &str) -> Vec<f64> {
        values(&self.tensor(tensor).unwrap_or_else(|| panic!("{}: {tensor}", self.name)))
    }

    fn config(&self) -> DecoderConfig {
        let (_, metadata) = SafeTensors::read_metadata(&self.file).expect("the recorded file is whole");
        let keys = metadata.metadata().as_ref().expect("metadata")[&format!("{}/config", self.name)].clone();
        let keys = serde_json::from_str(&keys).expect("a JSON object");
        decoder_config(&ConfigFile::from_values(self.name, keys)).expect("transformers wrote this configuration")
    }

    /// The model, for sequences of one row.
    fn decoder(&mut self, device: &Device) -> Decoder {
        let (recipe, purpose) = (recipe(RecipeName::Fp32, Fp8Format::Hybrid), Purpose::Train(MemoryPolicy::FULL));
        let mut decoder = Decoder::new(&self.config(), &recipe, device, purpose, TOKENS, self).expect("it is built");
        decoder.quantize_weights().expect("nothing to cast");
        decoder
    }
}

fn tensor_of(shape: &[usize], dtype: DType, bytes: &[u8]) -> Option<Tensor> {
    Some(Tensor::from_bytes(&Device::Cpu, shape, dtype, bytes).expect("shape and bytes agree"))
}

impl WeightSource for Recorded {
    fn read(&mut self, tensor: &FolderTensor, elements: Range<usize>, _: Init) -> ottava_lm::Result<Tensor> {
        let values = self.tensor(&format!("weights/{}", tensor.name)).unwrap_or_else(|| panic!("{}", tensor.name));
        assert_eq!(values.shape(), tensor.stored_shape(), "{}: {}", self.name, tensor.name);
        Ok(values.reshape(&[values.len()])?.rows(elements.start, elements.end)?)
    }
}

#[test]
fn packed_documents_have_the_logits_and_gradients_of_transformers() {
    for name in MODELS {
        let mut recorded = Recorded::open(name);
        let lengths: Vec<usize> = recorded.ids("documents").into_iter().map(|len| len as usize).collect();
        for device in devices() {
            let mut decoder = recorded.decoder(&device);
            let place = |ids: Vec<i32>| Tensor::from_slice(&device, &[ids.len()], &ids).unwrap();
            let (inputs, targets) = (place(recorded.ids("inputs")), place(recorded.ids("targets")));
            let mut seen_logits = Vec::new();
            let mut start = 0;
            for length in &lengths {
                seen_logits.extend(values(&logits(&decoder, &inputs.rows(start, start + length).unwrap())));
                start += length;
            }
            let logits_error = largest_error(&seen_logits, &recorded.values("logits"));

            let mut sequences = Sequences::packed(&device, inputs.len() / TOKENS, TOKENS, lengths.len()).unwrap();
            sequences.set_documents(&lengths).unwrap();
            let scale = 1.0 / targets.len() as f64;
            let losses = losses_and_gradients_of(&mut decoder, &inputs, &targets, sequences, scale).unwrap();
            let loss = values(&losses).iter().sum::<f64>() * scale;
            let loss_error = (loss / recorded.values("loss")[0] - 1.0).abs();

            let shards: Vec<Vec<Shard>> = decoder.parameters().iter().map(|p| p.shards.clone()).collect();
            let (mut largest, mut compared) = (0f64, 0);
            for ((_, gradient), of_param) in gradients(&mut decoder).into_iter().zip(shards) {
                let mut rest = &gradient[..];
                for shard in of_param {
                    let (own, after) = rest.split_at(shard.elements());
                    rest = after;
                    let tensor = &shard.tensor.name;
                    let expected = recorded.values(&format!("gradients/{tensor}"));
                    let error = relative_error(own, &expected);
                    assert!(error < 1e-5, "{name} on {device}, gradient of `{tensor}`: {error:.1e}");
                    (largest, compared) = (largest.max(error), compared + 1);
                }
            }
            let file = SafeTensors::deserialize(&recorded.file).unwrap();
            let of_gradients = file.names().iter().filter(|tensor| tensor.contains("/gradients/")).count();
            assert_eq!(compared, of_gradients, "{name}: no gradient is left over");
            eprintln!(
                "{name} on {device}: logits {logits_error:.1e}, loss {loss_error:.1e}, {compared} gradients {largest:.1e} apart"
            );
            assert!(logits_error < 1e-5, "{name} on {device}: logits are {logits_error:e} apart");
            assert!(loss_error < 1e-6, "{name} on {device}: the loss is {loss_error:e} apart");
        }
    }
}

/// Through the paged cache: the prompt in one pass, then token by token.
#[test]
fn greedy_text_is_that_of_generate() {
    for name in MODELS {
        let mut recorded = Recorded::open(name);
        let Some(expected) = recorded.tensor("greedy") else { continue };
        let expected: Vec<u32> = expected.to_vec::<i32>().unwrap().into_iter().map(|id| id as u32).collect();
        for device in devices() {
            let decoder = recorded.decoder(&device);
            assert_eq!(greedy_text(&decoder, &expected[..12], expected.len()), expected, "{name} on {device}");
        }
    }
}
