//! The content that a model of another program provides for a Hugging Face folder.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Map, Value};

use ottava_common::Result;

/// A model of another program.
pub struct Model<'a> {
    /// `config.json`.
    pub config: Map<String, Value>,
    /// The files other than `config.json` and the weights.
    pub files: Files,
    /// The name and the shape of each weight.
    pub weights: Vec<(String, Vec<usize>)>,
    /// The number of the source's tensors of each type.
    pub stored: BTreeMap<&'static str, usize>,
    /// Returns the values of a weight by its name, in row-major order.
    pub values: Values<'a>,
    /// Sentences about properties that could not be checked.
    pub warnings: Vec<String>,
}

/// A function that reads the values of a weight.
pub type Values<'a> = Box<dyn Fn(&str) -> Result<Vec<f32>> + 'a>;

/// A weight of the folder, and the tensor of the source that stores it.
pub struct Weight {
    /// The name of the weight in the folder.
    pub name: String,
    /// The name of the tensor in the source.
    pub stored: String,
    /// The shape of both, row-major.
    pub shape: Vec<usize>,
    /// The number of heads, if the source stores the rows of each head in another order.
    pub rotary_heads: Option<usize>,
}

impl Weight {
    /// Returns the number of elements of a row; 1 for a vector.
    pub fn columns(&self) -> usize {
        self.shape.get(1).copied().unwrap_or(1)
    }
}

/// The files of the folder except the weights, by name.
pub type Files = Vec<(Cow<'static, str>, Arc<[u8]>)>;

/// Reorders the rows of q or k for rotary positions that rotate the two halves of a head. In `values`, two rows that are rotated together are
/// neighbours, as in llama.cpp and in interleaved Megatron models. `values` are rows of `columns` elements, for `heads` heads.
pub fn halves_of_heads(values: &[f32], columns: usize, heads: usize) -> Vec<f32> {
    let head = values.len() / columns / heads;
    let rows = (0..heads).flat_map(|h| (0..head).map(move |i| h * head + i % (head / 2) * 2 + i / (head / 2)));
    rows.flat_map(|row| &values[row * columns..(row + 1) * columns]).copied().collect()
}

/// Inverts [`halves_of_heads`].
pub fn neighbours_in_heads(values: &[f32], columns: usize, heads: usize) -> Vec<f32> {
    let head = values.len() / columns / heads;
    let rows = (0..heads).flat_map(|h| (0..head).map(move |i| h * head + i % 2 * (head / 2) + i / 2));
    rows.flat_map(|row| &values[row * columns..(row + 1) * columns]).copied().collect()
}
