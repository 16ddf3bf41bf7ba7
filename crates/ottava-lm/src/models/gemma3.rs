//! The text model of Gemma 3: Gemma 2 with normalised queries and keys instead of soft caps, five layers with a window for each without,
//! and rotary positions of another base in the former. Team Gemma 2025, arXiv:2503.19786.

use super::family::{Family, common};
use super::gemma2::{gemma, read_gemma};
use super::rope::NESTED;
use super::{ConfigFile, DecoderConfig, LayerSet, RopeScaling};
use crate::error::Result;
use crate::layers::NormScope;

pub(super) const FAMILY: Family = Family {
    architecture: "Gemma3ForCausalLM",
    model_type: "gemma3_text",
    reward_model: Some("Gemma3TextForSequenceClassification"),
    read,
};

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let pattern: usize = file.optional("sliding_window_pattern", 6)?;
    if pattern == 0 {
        return Err(file.error("`sliding_window_pattern` is 0; it is a number of layers"));
    }
    // The rotary positions are read below: `common` knows one kind for all layers.
    let mut others = file.values().clone();
    let nested = file.section("rope_parameters")?.filter(|section| NESTED.iter().any(|key| section.has(key)));
    if nested.is_some() {
        others.remove("rope_parameters");
    }
    let sizes = common(&file.with_values(others))?;
    let of = |key: usize, theta_key: &str, theta: f64, old: Option<ConfigFile>| {
        let section = nested.as_ref().map(|nested| nested.section(NESTED[key])).transpose()?.flatten();
        RopeScaling::of_section(file, section.or(old).as_ref(), file.optional(theta_key, theta)?)
    };
    let rope = of(0, "rope_theta", 1_000_000.0, file.section("rope_scaling")?)?;
    let local_rope = Some(of(1, "rope_local_base_freq", 10_000.0, None)?);
    let max_positions = file.optional("max_position_embeddings", 131_072)?;
    let local = LayerSet::AllButEvery(pattern);
    let defaults =
        DecoderConfig { max_positions, rope, local_rope, local, qk_norm: Some(NormScope::Head), ..gemma(sizes) };
    read_gemma(file, defaults)
}
