//! Static scales of the inputs of linears, measured on a text.

use crate::evaluate::evaluate;
use ottava_checkpoint::WeightFiles;
use ottava_common::error::{Error, Result};
use ottava_common::input;
use ottava_data::Batch;
use ottava_models::Decoder;
use ottava_parallel::Partition;
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::scaling::Histogram;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The share of values that do not saturate with [`Range::Percentile`].
pub const PERCENTILE: f64 = 0.9999;

/// The maximum size of the file. The file of a model of 10,000 blocks has about 5 MB.
const MAX_BYTES: u64 = 64 << 20;

/// The version of the file.
const FORMAT: u32 = 2;

/// The value that a scale maps to the largest E4M3 value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Range {
    /// The largest absolute value, so no value saturates.
    Max,
    /// The smallest absolute value that is not exceeded by [`PERCENTILE`] of all values.
    Percentile,
    /// The candidate with the smallest sum of squared errors. The 64 candidates begin at the largest absolute value and descend, eight per octave.
    Mse,
}

/// The scales of a model's inputs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// The version of the file.
    format: u32,
    /// How the scales were chosen.
    pub range: Range,
    /// The number of tokens of the text.
    pub tokens: u64,
    /// The [`DequantizedFiles::fingerprint`](ottava_checkpoint::DequantizedFiles::fingerprint) of the linears; empty if the model does not come from a folder.
    pub model: String,
    /// The range of each input, by the name of its linear in the folder.
    pub inputs: BTreeMap<String, InputRange>,
}

/// The range of the input of a linear.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InputRange {
    /// The largest absolute value.
    pub amax: f32,
    /// `code = cast(x / input_scale)`.
    pub input_scale: f32,
}

impl Range {
    /// Returns the value that the scale maps to the largest E4M3 value.
    fn largest(self, histogram: &Histogram) -> Result<f32> {
        let amax = histogram.amax()?;
        Ok(match self {
            Range::Max => amax,
            Range::Percentile => histogram.percentile(PERCENTILE),
            Range::Mse if amax == 0.0 => amax,
            Range::Mse => {
                let candidates = (0..64).map(|eighth| amax * (-f64::from(eighth) / 8.0).exp2() as f32);
                let errors = candidates.map(|largest| (largest, histogram.squared_error(largest)));
                errors.min_by(|(_, a), (_, b)| a.total_cmp(b)).expect("there are 64").0
            }
        })
    }
}

impl Calibration {
    /// Measures on `batches` the inputs of all linears that the recipe of `model` casts. Passes run in the compute type. `progress` is called as in
    /// [`evaluate`].
    ///
    /// Errors with [`Error::Data`] if the text is empty, and with [`Error::NonFinite`] if a value is not finite.
    pub fn measure(
        model: &mut Decoder,
        batches: impl IntoIterator<Item = Result<Batch>>,
        range: Range,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Calibration> {
        model.scaling().record_histograms();
        let evaluation = evaluate(model, batches, 0, StepPrecision::High, &Partition::solo(), progress)?;
        if evaluation.tokens == 0 {
            return Err(Error::Data("there is no text to calibrate with; name files with more".into()));
        }
        let histograms: BTreeMap<_, _> = model.scaling().take_histograms().into_iter().collect();
        let mut inputs = BTreeMap::new();
        for (site, _) in &model.description().linears {
            let owner = model.description().input_owner(&site.name);
            let Some(histogram) = histograms.get(&format!("{owner}.input")) else { continue };
            let wrong = |_| Error::NonFinite(format!("the input of `{}` has values that are not finite", site.name));
            let (amax, largest) = (histogram.amax().map_err(wrong)?, range.largest(histogram)?);
            // An input of zeros gets the scale 1.
            let input_scale = if largest > 0.0 { largest / 448.0 } else { 1.0 };
            inputs.extend(site.parts.iter().map(|part| (part.clone(), InputRange { amax, input_scale })));
        }
        Ok(Calibration { format: FORMAT, range, tokens: evaluation.tokens, model: String::new(), inputs })
    }

    /// Returns these scales, marked as scales of the model whose weights are in the folder of `weights`.
    pub fn of_model(self, weights: &WeightFiles) -> Result<Calibration> {
        Ok(Calibration { model: weights.fingerprint(self.inputs.keys())?, ..self })
    }

    /// Errors with [`Error::Config`] if the scales were measured on a model with other weights.
    pub fn expect_model(&self, weights: &WeightFiles) -> Result<()> {
        let names: BTreeSet<&str> = weights.names().collect();
        let other = |what: &str| {
            Error::Config(format!(
                "the scales of inputs {what}: measure those of this model with `ottava calibrate` and name that file"
            ))
        };
        if let Some(linear) = self.inputs.keys().find(|linear| !names.contains(format!("{linear}.weight").as_str())) {
            return Err(other(&format!("have one of `{linear}`, which is no linear of this model")));
        }
        match weights.fingerprint(self.inputs.keys())? == self.model {
            true => Ok(()),
            false => Err(other("were measured on another model, whose weights are not these")),
        }
    }

    /// Reads a file that [`Calibration::render`] wrote.
    pub fn read(path: &Path) -> Result<Calibration> {
        let wrong = |reason: String| Error::Model(format!("{}: {reason}", path.display()));
        let text = input::read(path, MAX_BYTES).map_err(Error::io(path))?;
        let not_ours = |e| wrong(format!("this is not a file of `ottava calibrate`: {e}"));
        let value: serde_json::Value = serde_json::from_slice(&text).map_err(not_ours)?;
        if value["format"].is_u64() && value["format"] != FORMAT {
            let found = &value["format"];
            return Err(wrong(format!("it has format {found}, this program reads {FORMAT}; measure the scales again")));
        }
        let read: Calibration = serde_json::from_value(value).map_err(not_ours)?;
        let bad = read.inputs.iter().find(|(_, range)| !(range.input_scale.is_finite() && range.input_scale > 0.0));
        match bad {
            Some((name, range)) => Err(wrong(format!("the scale of `{name}` is {}; it is above 0", range.input_scale))),
            None => Ok(read),
        }
    }

    /// Returns the contents of the file, as JSON.
    pub fn render(&self) -> String {
        serde_json::to_string_pretty(self).expect("names and numbers are JSON") + "\n"
    }

    /// Returns `input_scale` by the name of each linear.
    pub fn input_scales(&self) -> BTreeMap<String, f32> {
        self.inputs.iter().map(|(name, range)| (name.clone(), range.input_scale)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ottava_tensor::{DType, Device, Tensor};

    /// The tensor has a thousand values of 0.9 and one value of 1. With a scale that saturates 1, 0.9 is nearer to a code.
    #[test]
    fn least_squares_may_saturate_the_largest() {
        let bytes: Vec<u8> =
            (0..1001).flat_map(|i| half::bf16::from_f32(if i == 7 { 1.0 } else { 0.9 }).to_le_bytes()).collect();
        let mut histogram = Histogram::default();
        histogram.add(&Tensor::from_bytes(&Device::Cpu, &[1001], DType::BF16, &bytes).unwrap()).unwrap();
        let largest = |range: Range| range.largest(&histogram).unwrap();
        let near = half::bf16::from_f32(0.9).to_f32();
        assert_eq!((largest(Range::Max), largest(Range::Percentile)), (1.0, 1.0));
        assert!(
            largest(Range::Mse) < 1.0 && histogram.squared_error(largest(Range::Mse)) < histogram.squared_error(1.0)
        );
        assert_eq!(histogram.percentile(0.999), near);
        assert_eq!(Range::Mse.largest(&Histogram::default()).unwrap(), 0.0);
    }
}
