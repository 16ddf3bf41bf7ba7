//! Frequencies of rotary positions, with scaling for long contexts.

use super::ConfigFile;
use crate::error::Result;
use serde_json::{Map, Value, json};

/// The angles of rotary positions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeScaling {
    /// Base of the geometric series of wavelengths.
    pub theta: f64,
    /// The stretch, if any.
    pub kind: RopeKind,
}

/// Kinds of stretching.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeKind {
    /// None.
    Default,
    /// All wavelengths are stretched by one factor. Chen et al. 2023, arXiv:2306.15595.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Long wavelengths are stretched by a factor, short ones are not, with a ramp between: Llama 3.1.
    Llama3 {
        /// The factor for long wavelengths.
        factor: f64,
        /// Wavelengths above the original context divided by this are long.
        low_freq_factor: f64,
        /// Wavelengths below the original context divided by this are short.
        high_freq_factor: f64,
        /// The context of the model before stretching.
        original_max_positions: f64,
    },
}

impl Default for RopeScaling {
    fn default() -> RopeScaling {
        RopeScaling { theta: 10_000.0, kind: RopeKind::Default }
    }
}

impl RopeScaling {
    /// Reads the old spelling (`rope_theta`, `rope_scaling`) or the new one (`rope_parameters`).
    pub fn read(file: &ConfigFile) -> Result<RopeScaling> {
        let parameters = file.section("rope_parameters")?;
        let scaling = match &parameters {
            Some(parameters) => Some(parameters.clone()),
            None => file.section("rope_scaling")?,
        };
        let theta = file.optional("rope_theta", 10_000.0)?;
        let Some(section) = scaling else { return Ok(RopeScaling { theta, kind: RopeKind::Default }) };
        let theta = section.optional("rope_theta", theta)?;
        let old_name = section.optional("type", "default".to_string())?;
        let kind = match section.optional("rope_type", old_name)?.as_str() {
            "default" => RopeKind::Default,
            "linear" => RopeKind::Linear { factor: section.required("factor")? },
            "llama3" => RopeKind::Llama3 {
                factor: section.required("factor")?,
                low_freq_factor: section.required("low_freq_factor")?,
                high_freq_factor: section.required("high_freq_factor")?,
                original_max_positions: section.required("original_max_position_embeddings")?,
            },
            other => {
                let text = format!("the rope type `{other}` is not implemented; default, linear and llama3 are");
                return Err(section.error(&text));
            }
        };
        Ok(RopeScaling { theta, kind })
    }

    /// Radians per position of each pair of a head of `dim`.
    pub fn inverse_frequencies(&self, dim: usize) -> Vec<f64> {
        // The last bit of the standard library's power differs between platforms, and late positions magnify it.
        let plain = (0..dim / 2).map(|i| libm::pow(self.theta, -2.0 * i as f64 / dim as f64));
        match self.kind {
            RopeKind::Default => plain.collect(),
            RopeKind::Linear { factor } => plain.map(|f| f / factor).collect(),
            RopeKind::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => plain
                .map(|f| {
                    let turns = original_max_positions * f / std::f64::consts::TAU;
                    let smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    let smooth = smooth.clamp(0.0, 1.0);
                    (1.0 - smooth) * f / factor + smooth * f
                })
                .collect(),
        }
    }

    /// The keys of `config.json` in both spellings, for old and new readers.
    pub fn write(&self, values: &mut Map<String, Value>) {
        let kind = match self.kind {
            RopeKind::Default => json!({"rope_type": "default"}),
            RopeKind::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
            RopeKind::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
                "original_max_position_embeddings": original_max_positions as u64,
            }),
        };
        let mut parameters = kind.clone();
        parameters["rope_theta"] = json!(self.theta);
        values.insert("rope_parameters".into(), parameters);
        values.insert("rope_theta".into(), json!(self.theta));
        values.insert("rope_scaling".into(), if self.kind == RopeKind::Default { Value::Null } else { kind });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: Value) -> RopeScaling {
        let Value::Object(values) = json else { panic!("an object") };
        RopeScaling::read(&ConfigFile::from_values("config.json", values)).unwrap()
    }

    #[test]
    fn both_spellings_mean_the_same_and_survive_writing() {
        let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192});
        let mut parameters = llama3.clone();
        parameters["rope_theta"] = json!(500000.0);
        let old = read(json!({"rope_theta": 500000.0, "rope_scaling": llama3}));
        let new = read(json!({"rope_parameters": parameters}));
        assert_eq!(old, new);
        let mut written = Map::new();
        old.write(&mut written);
        assert_eq!(read(Value::Object(written)), old);
    }

    #[test]
    fn llama3_stretches_long_wavelengths_only() {
        let kind = RopeKind::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_positions: 8192.0,
        };
        let plain = RopeScaling { theta: 500_000.0, kind: RopeKind::Default }.inverse_frequencies(128);
        let stretched = RopeScaling { theta: 500_000.0, kind }.inverse_frequencies(128);
        assert_eq!((plain[0], plain[1]), (stretched[0], stretched[1]));
        assert!((stretched[63] * 8.0 / plain[63] - 1.0).abs() < 1e-12);
        let ramp = plain.iter().zip(&stretched).filter(|(p, s)| s < p && **s * 8.0 > **p * 1.000_001).count();
        assert!(ramp > 0, "some wavelengths lie on the ramp");
    }
}
