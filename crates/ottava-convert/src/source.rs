//! The content of a Hugging Face folder that a model of another program provides.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Map, Value};

use ottava_common::Result;

/// A model of another program.
pub struct Model<'a> {
    /// `config.json`.
    pub config: Map<String, Value>,
    /// Other files than that and the weights.
    pub files: Files,
    /// Name and shape of each weight.
    pub weights: Vec<(String, Vec<usize>)>,
    /// The types of the source's tensors, with their numbers.
    pub stored: BTreeMap<&'static str, usize>,
    /// The values of a weight by its name, row-major.
    pub values: Values<'a>,
    /// Sentences about properties that could not be checked.
    pub warnings: Vec<String>,
}

/// Reads the values of a weight.
pub type Values<'a> = Box<dyn Fn(&str) -> Result<Vec<f32>> + 'a>;

/// A weight of the folder, and the tensor that holds it.
pub struct Weight {
    /// Its name in the folder.
    pub name: String,
    /// Its name in the source.
    pub stored: String,
    /// Its shape, row-major, in both.
    pub shape: Vec<usize>,
    /// The number of heads, where rows of each are stored in another order.
    pub rotary_heads: Option<usize>,
}

impl Weight {
    /// Elements of a row; 1 of a vector.
    pub fn columns(&self) -> usize {
        self.shape.get(1).copied().unwrap_or(1)
    }
}

/// Files of the folder other than the weights, by name.
pub type Files = Vec<(Cow<'static, str>, Arc<[u8]>)>;

/// Rows of q or k for rotary positions that turn the two halves of a head, from rows in which two rows that are turned together are neighbours,
/// as llama.cpp and interleaved Megatron models have them. `values` are rows of `columns`, for `heads` heads.
pub fn halves_of_heads(values: &[f32], columns: usize, heads: usize) -> Vec<f32> {
    let head = values.len() / columns / heads;
    let rows = (0..heads).flat_map(|h| (0..head).map(move |i| h * head + i % (head / 2) * 2 + i / (head / 2)));
    rows.flat_map(|row| &values[row * columns..(row + 1) * columns]).copied().collect()
}

/// The inverse of [`halves_of_heads`].
pub fn neighbours_in_heads(values: &[f32], columns: usize, heads: usize) -> Vec<f32> {
    let head = values.len() / columns / heads;
    let rows = (0..heads).flat_map(|h| (0..head).map(move |i| h * head + i % 2 * (head / 2) + i / 2));
    rows.flat_map(|row| &values[row * columns..(row + 1) * columns]).copied().collect()
}
