//! Static scales of the inputs of linears, from the values that they have on a text.

use crate::checkpoint::WeightFiles;
use crate::data::Batch;
use crate::error::{Error, Result};
use crate::evaluate::evaluate;
use crate::input;
use crate::mode::StepPrecision;
use crate::models::Decoder;
use crate::parallel::Partition;
use crate::scaling::Histogram;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The share of values that [`Range::Percentile`] keeps; the others saturate.
pub const PERCENTILE: f64 = 0.9999;

/// The largest file: that of a model of 10,000 blocks has some 5 MB.
const MAX_BYTES: u64 = 64 << 20;

/// The version of the file.
const FORMAT: u32 = 2;

/// Which value becomes the largest of E4M3.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Range {
    /// The largest one: none saturates.
    Max,
    /// The smallest one that [`PERCENTILE`] of all values do not exceed.
    Percentile,
    /// That with the least sum of squared errors, of 64 from the largest down, eight per octave.
    Mse,
}

/// The scales of a model's inputs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// The version of the file.
    format: u32,
    /// How scales were chosen.
    pub range: Range,
    /// Tokens of the text.
    pub tokens: u64,
    /// [`WeightFiles::fingerprint`] of the linears; empty if they are of no folder.
    pub model: String,
    /// By the name of each linear in a folder.
    pub inputs: BTreeMap<String, InputRange>,
}

/// The values of the input of a linear.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InputRange {
    /// The largest absolute value.
    pub amax: f32,
    /// `code = cast(x / input_scale)`.
    pub input_scale: f32,
}

impl Range {
    /// The value that becomes the largest of E4M3.
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
    /// Measures the inputs of all linears that the recipe of `model` casts, in the compute type, on `batches`; `progress` as for
    /// [`evaluate`].
    ///
    /// Errors with [`Error::Data`] when there is no text, and with [`Error::NonFinite`] when a value is not finite.
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
            let owner = model.description().input_owner(site, model.config().shares_operands());
            let Some(histogram) = histograms.get(&format!("{owner}.input")) else { continue };
            let wrong = |_| Error::NonFinite(format!("the input of `{}` has values that are not finite", site.name));
            let (amax, largest) = (histogram.amax().map_err(wrong)?, range.largest(histogram)?);
            // An input of zeros has the scale 1.
            let input_scale = if largest > 0.0 { largest / 448.0 } else { 1.0 };
            inputs.extend(site.parts.iter().map(|part| (part.clone(), InputRange { amax, input_scale })));
        }
        Ok(Calibration { format: FORMAT, range, tokens: evaluation.tokens, model: String::new(), inputs })
    }

    /// These scales as those of the model whose weights are in the folder of `weights`.
    pub fn of_model(self, weights: &WeightFiles) -> Result<Calibration> {
        Ok(Calibration { model: weights.fingerprint(self.inputs.keys())?, ..self })
    }

    /// Errors with [`Error::Config`] when the scales were measured on a model with other weights.
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

    /// Reads a file of [`Calibration::render`].
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

    /// The file, as JSON.
    pub fn render(&self) -> String {
        serde_json::to_string_pretty(self).expect("names and numbers are JSON") + "\n"
    }

    /// `input_scale` by the name of each linear.
    pub fn input_scales(&self) -> BTreeMap<String, f32> {
        self.inputs.iter().map(|(name, range)| (name.clone(), range.input_scale)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ottava_tensor::{DType, Device, Tensor};

    /// Of a thousand values of 0.9 and one of 1: 0.9 is nearer to a code where 1 saturates.
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
