//! Adapters in the format of PEFT, with various values of each key of `adapter_config.json`: losses as PEFT computes them in F32.
//! `scripts/suites/check_adapters.py` records the file.

use crate::models::configurations::{ByName, Expected, loss, model, model_from, read};
use crate::setup::on_one_thread;
use ottava_checkpoint::{AdaptedWeights, AdapterFolder, RandomWeights};
use ottava_models::{ConfigFile, DecoderConfig, language_model_config};
use ottava_recipe::lora::Lora;
use ottava_tensor::Device;
use safetensors::{Dtype, serialize_to_file, tensor::TensorView};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

#[derive(Deserialize)]
struct Case {
    name: String,
    /// The `config.json` of the base.
    base: Map<String, Value>,
    /// The `adapter_config.json`.
    adapter: Value,
    /// The shapes of the adapter's tensors.
    shapes: BTreeMap<String, Vec<usize>>,
    ids: Vec<i32>,
    #[serde(flatten)]
    expected: Expected,
}

impl Case {
    /// Returns the loss of a model that is loaded with the adapter, which has modules that were trained whole.
    fn loss_alone(&self, adapter: AdapterFolder, config: DecoderConfig) -> ottava_common::Result<f64> {
        let sizes = DecoderConfig { lora: Some(adapter.lora.clone()), ..config };
        let new = RandomWeights { seed: 0, device: Device::Cpu };
        let mut base = ByName;
        let mut weights = AdaptedWeights::new(&mut base, Some(adapter), new, false).for_model(&sizes);
        let decoder = model_from(&sizes, &mut weights)?;
        weights.finish()?;
        loss(&decoder, &self.ids)
    }

    /// Returns the loss of the base with the adapter.
    fn loss(&self) -> ottava_common::Result<f64> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("adapter_config.json"), self.adapter.to_string()).unwrap();
        let values = |(name, shape): (&String, &Vec<usize>)| -> Vec<u8> {
            ByName::values(name, shape).iter().flat_map(|value| value.to_le_bytes()).collect()
        };
        let bytes: Vec<Vec<u8>> = self.shapes.iter().map(values).collect();
        let views: Result<Vec<_>, _> = (self.shapes.iter().zip(&bytes))
            .map(|((name, shape), bytes)| Ok((name, TensorView::new(Dtype::F32, shape.clone(), bytes)?)))
            .collect::<Result<_, safetensors::SafeTensorError>>();
        serialize_to_file(views.unwrap(), None, &folder.path().join("adapter_model.safetensors")).unwrap();

        let config = language_model_config(&ConfigFile::from_values("config.json", self.base.clone()))?;
        let adapter = AdapterFolder::open(folder.path())?;
        if !adapter.lora.modules_to_save.is_empty() {
            return self.loss_alone(adapter, config);
        }
        let mut decoder = model(&DecoderConfig { lora: Some(Lora::of_no_linear()), ..config })?;
        let mut adapters = adapter.load(&decoder)?;
        decoder.exchange_adapters(&mut adapters);
        loss(&decoder, &self.ids)
    }
}

#[test]
fn adapters_have_the_losses_of_peft_or_are_refused() {
    let cases: Vec<Case> = read("adapters.json.gz");
    assert!(cases.len() > 100, "{}", cases.len());
    let problem = |case: &Case| Some(format!("{}: {}", case.name, case.expected.difference(case.loss())?));
    let problems: Vec<String> = on_one_thread(|| cases.iter().filter_map(problem).collect());
    assert!(problems.is_empty(), "{} of {}:\n{}", problems.len(), cases.len(), problems.join("\n"));
}
