//! Generated `config.json` files of every family: losses of tiny models with seeded weights, as `transformers` computes them in F32.
//! `scripts/suites/check_configs.py` records the file.

use crate::models::recorded::in_memory;
use crate::setup::{logits, on_one_thread, recipe};
use flate2::read::GzDecoder;
use ottava_models::{ConfigFile, Decoder, DecoderConfig, language_model_config};
use ottava_recipe::lora::MAGNITUDE;
use ottava_recipe::param::{FolderTensor, Init, Purpose, WeightSource};
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_tensor::testing::values;
use ottava_tensor::{Device, Tensor};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::ops::Range;

/// The number of tokens of a row.
const ROW: usize = 24;

#[derive(Deserialize)]
struct Case {
    name: String,
    config: Map<String, Value>,
    /// The ids of a text: the end of a text, the text itself, and its end.
    ids: Vec<i32>,
    #[serde(flatten)]
    expected: Expected,
}

/// Weights that depend only on names and shapes, as in `seeded` of `scripts/suites/common.py`.
pub struct ByName;

impl ByName {
    /// Returns the values of a tensor of a folder.
    pub fn values(name: &str, shape: &[usize]) -> Vec<f32> {
        let hash = |start: u64, byte: u8| (start ^ u64::from(byte)).wrapping_mul(1_099_511_628_211);
        let start = name.bytes().fold(14_695_981_039_346_656_037, hash);
        let multiplies = shape.len() == 1 && (name.ends_with(".weight") || name.ends_with(MAGNITUDE));
        let center = if multiplies { 1.0 } else { 0.0 };
        let value = |i: usize| {
            let mut x = start.wrapping_add((i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15));
            x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            x ^= x >> 31;
            (x >> 40) as f32 / (1 << 24) as f32 - 0.5 + center
        };
        (0..shape.iter().product()).map(value).collect()
    }
}

impl WeightSource for ByName {
    fn read(&mut self, tensor: &FolderTensor, elements: Range<usize>, _: Init) -> ottava_common::Result<Tensor> {
        let shape = tensor.stored_shape();
        let stored = Tensor::from_slice(&Device::Cpu, &shape, &ByName::values(&tensor.stored_name(), &shape))?;
        let whole = in_memory(stored, tensor);
        Ok(whole.reshape(&[tensor.elements()])?.rows(elements.start, elements.end)?)
    }
}

/// Makes a model with these weights, in F32.
pub fn model(sizes: &DecoderConfig) -> ottava_common::Result<Decoder> {
    model_from(sizes, &mut ByName)
}

/// Makes a model with the weights of a source, in F32.
pub fn model_from(sizes: &DecoderConfig, weights: &mut dyn WeightSource) -> ottava_common::Result<Decoder> {
    let recipe = recipe(RecipeName::Fp32, Fp8Format::Hybrid);
    let mut decoder = Decoder::new(sizes, &recipe, &Device::Cpu, Purpose::Infer, ROW, weights)?;
    decoder.quantize_weights()?;
    Ok(decoder)
}

/// Returns the mean loss of rows of `ROW` tokens, each a sequence.
pub fn loss(decoder: &Decoder, ids: &[i32]) -> ottava_common::Result<f64> {
    let mut sum = 0.0;
    for start in (0..ids.len() - 1).step_by(ROW) {
        let inputs = Tensor::from_slice(&Device::Cpu, &[ROW], &ids[start..start + ROW])?;
        let logits = values(&logits(decoder, &inputs));
        for (of_token, &target) in logits.chunks(logits.len() / ROW).zip(&ids[start + 1..]) {
            let largest = of_token.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let lse = of_token.iter().map(|z| (z - largest).exp()).sum::<f64>().ln() + largest;
            sum += lse - of_token[target as usize];
        }
    }
    Ok(sum / (ids.len() - 1) as f64)
}

/// Reads the records of a gzipped file of `tests/data`.
pub fn read<T: DeserializeOwned>(file: &str) -> Vec<T> {
    let path = format!("{}/tests/data/{file}", env!("CARGO_MANIFEST_DIR"));
    let recording = GzDecoder::new(std::fs::File::open(&path).unwrap_or_else(|e| panic!("{path}: {e}")));
    serde_json::from_reader(recording).expect("the script wrote it")
}

/// The recorded result of a case.
#[derive(Deserialize)]
pub struct Expected {
    /// The loss; `None` if the other program cannot run the case either.
    loss: Option<f64>,
    /// Whether the case may be an error, since its function is not implemented.
    refused: bool,
}

impl Expected {
    /// Returns the difference from the recorded result, in words; `None` if there is no difference.
    pub fn difference(&self, found: ottava_common::Result<f64>) -> Option<String> {
        match (found, self.loss) {
            (Ok(found), Some(expected)) if (found / expected - 1.0).abs() < 1e-5 => None,
            (Err(_), _) if self.refused => None,
            (found, expected) => Some(format!("{found:?}, and the loss {expected:?} was recorded")),
        }
    }
}

#[test]
fn configurations_have_the_losses_of_transformers_or_are_refused() {
    let cases: Vec<Case> = read("configurations.json.gz");
    assert!(cases.len() > 500, "{}", cases.len());
    let problem = |case: &Case| {
        let config = ConfigFile::from_values("config.json", case.config.clone());
        let found = language_model_config(&config).and_then(|sizes| loss(&model(&sizes)?, &case.ids));
        let text = serde_json::to_string(&case.config).expect("an object");
        Some(format!("{} {text}: {}", case.name, case.expected.difference(found)?))
    };
    let problems_of = |part: &[Case]| on_one_thread(|| part.iter().filter_map(problem).collect::<Vec<_>>());
    let problems = std::thread::scope(|scope| {
        let halves = cases.chunks(cases.len().div_ceil(2));
        let started: Vec<_> = halves.map(|half| scope.spawn(move || problems_of(half))).collect();
        started.into_iter().flat_map(|half| half.join().expect("no panic")).collect::<Vec<_>>()
    });
    assert!(problems.is_empty(), "{} of {}:\n{}", problems.len(), cases.len(), problems.join("\n"));
}
