//! The angles of rotary positions, computed like in `modeling_rope_utils.py` of `transformers` 5.

use super::{LongRope, RopeKind, RopeScaling, Yarn};
use std::f64::consts::TAU;

/// The lengths of sequences on which scalings depend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeLengths {
    /// The value of `max_position_embeddings`.
    pub max_positions: usize,
    /// The length of the longest sequence. `transformers` switches the angles of "dynamic" and "longrope" by the length of each batch. Here, this
    /// length decides once for all sequences of a decoder, so all documents of a run and all requests of an engine have the same angles.
    pub seq_len: usize,
}

impl RopeScaling {
    /// Returns the number of rotated elements of a head with `head_dim` elements.
    pub fn rotated(&self, head_dim: usize) -> usize {
        match self.kind {
            // The pairs that do not turn have an angle of 0.
            RopeKind::Proportional { .. } => head_dim,
            _ => (head_dim as f64 * self.partial) as usize,
        }
    }

    /// Returns the radians per position for each pair of elements of a head with `head_dim` elements.
    pub fn inverse_frequencies(&self, head_dim: usize, lengths: RopeLengths) -> Vec<f64> {
        let dim = self.rotated(head_dim);
        let RopeLengths { max_positions, seq_len } = lengths;
        // The last bit of the standard library's `powf` differs between platforms, and late positions magnify the difference, so `libm` is used.
        let series = |theta: f64| (0..dim / 2).map(move |i| libm::pow(theta, -2.0 * i as f64 / dim as f64));
        let plain = series(self.theta);
        match &self.kind {
            RopeKind::Default => plain.collect(),
            RopeKind::Linear { factor } => plain.map(|f| f / factor).collect(),
            RopeKind::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => plain
                .map(|f| {
                    let turns = original_max_positions * f / TAU;
                    let smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    let smooth = smooth.clamp(0.0, 1.0);
                    (1.0 - smooth) * f / factor + smooth * f
                })
                .collect(),
            RopeKind::Dynamic { factor } => {
                let growth = seq_len.max(max_positions) as f64 / max_positions as f64;
                let power = dim as f64 / (dim as f64 - 2.0);
                series(self.theta * libm::pow(factor * growth - (factor - 1.0), power)).collect()
            }
            RopeKind::Yarn(yarn) => yarn.inverse_frequencies(self.theta, plain.collect()),
            RopeKind::Proportional { factor } => {
                let turned = (self.partial * head_dim as f64 / 2.0) as usize;
                plain.enumerate().map(|(pair, f)| if pair < turned { f / factor } else { 0.0 }).collect()
            }
            RopeKind::LongRope(long) => {
                let factors = if seq_len as f64 > long.original_max_positions { &long.long } else { &long.short };
                plain.zip(factors).map(|(f, factor)| f / factor).collect()
            }
        }
    }

    /// Returns the factor of cosines and sines.
    pub fn attention_factor(&self) -> f64 {
        match &self.kind {
            RopeKind::Yarn(yarn) => yarn.attention_factor(),
            RopeKind::LongRope(long) => long.attention_factor(),
            RopeKind::Default
            | RopeKind::Linear { .. }
            | RopeKind::Llama3 { .. }
            | RopeKind::Dynamic { .. }
            | RopeKind::Proportional { .. } => 1.0,
        }
    }
}

impl Yarn {
    fn inverse_frequencies(&self, theta: f64, plain: Vec<f64>) -> Vec<f64> {
        let dim = 2.0 * plain.len() as f64;
        // Returns the dimension that makes `turns` turns in the original context.
        let dimension =
            |turns: f64| dim * libm::log(self.original_max_positions / (turns * TAU)) / (2.0 * libm::log(theta));
        let (low, high) = (dimension(self.beta_fast), dimension(self.beta_slow));
        let (low, high) = if self.truncate { (low.floor(), high.ceil()) } else { (low, high) };
        let (low, mut high) = (low.max(0.0), high.min(dim - 1.0));
        if low == high {
            high += 0.001;
        }
        let stretched = |(i, f): (usize, f64)| {
            let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            f / self.factor * ramp + f * (1.0 - ramp)
        };
        plain.into_iter().enumerate().map(stretched).collect()
    }

    fn attention_factor(&self) -> f64 {
        let of = |mscale: f64| if self.factor <= 1.0 { 1.0 } else { 0.1 * mscale * libm::log(self.factor) + 1.0 };
        self.attention_factor.unwrap_or_else(|| match (self.mscale, self.mscale_all_dim) {
            (Some(mscale), Some(of_all)) if mscale != 0.0 && of_all != 0.0 => of(mscale) / of(of_all),
            _ => of(1.0),
        })
    }
}

impl LongRope {
    fn attention_factor(&self) -> f64 {
        let computed = || match self.factor <= 1.0 {
            true => 1.0,
            false => (1.0 + libm::log(self.factor) / libm::log(self.original_max_positions)).sqrt(),
        };
        self.attention_factor.unwrap_or_else(computed)
    }
}
