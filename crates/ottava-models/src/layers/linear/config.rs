//! The configuration of a linear layer.

use crate::layers::cast::OperandCast;
use ottava_recipe::param::{FolderLayout, Split};

/// The configuration of a linear.
#[derive(Clone, Copy, Debug)]
pub struct LinearConfig<'a> {
    /// Its name in the scaling state.
    pub name: &'a str,
    /// The tensors that are stacked in its weight: name in the model folder, without `.weight`, and rows.
    pub parts: &'a [(String, usize)],
    /// The rows of the parts that ranks divide one by one, if the only tensor is a fusion of several; else empty.
    pub fused: &'a [usize],
    /// For each of `parts`, or each of the `fused` parts of a single tensor: the number of neighbouring ranks that hold the same rows, if ranks
    /// divide outputs; 1 if it is left out.
    pub replicas: &'a [usize],
    /// Columns of the weight.
    pub inputs: usize,
    /// Whether it has a bias.
    pub bias: bool,
    /// Standard deviation of initial weights.
    pub std: f32,
    /// Whether a model folder stores its weight transposed, like the weights of GPT-2.
    pub transposed: bool,
    /// How ranks divide its weight.
    pub split: Split,
    /// The cast of its input, if another linear reads the same input and owns the cast.
    pub shared_input: Option<OperandCast>,
}

impl LinearConfig<'_> {
    /// The `replicas` of part number `at`, or of all fused parts of a single tensor.
    pub(super) fn replicas_of(&self, at: usize) -> &[usize] {
        if self.fused.is_empty() { self.replicas.get(at..=at).unwrap_or(&[]) } else { self.replicas }
    }

    /// How a model folder stores its weight.
    pub(super) fn layout(&self) -> FolderLayout {
        if self.transposed { FolderLayout::Transposed } else { FolderLayout::Same }
    }
}
