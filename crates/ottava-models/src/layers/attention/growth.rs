//! The growth of queries with their positions.

/// The factor of queries at a position, after rotation and norm: `1 + β · ln(1 + ⌊(position + first) / context⌋)`. Nakanishi 2025, arXiv:2501.19399;
/// Llama 4 and `transformers`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryGrowth {
    /// The constant β.
    pub beta: f64,
    /// The number of positions after which queries grow: the context of the model before stretching.
    pub original_max_positions: f64,
    /// The number of the first position.
    pub first: usize,
}

impl QueryGrowth {
    /// Returns the factor at `position`, which is counted from 0.
    pub fn factor(&self, position: usize) -> f64 {
        1.0 + self.beta * ((position + self.first) as f64 / self.original_max_positions).floor().ln_1p()
    }
}
