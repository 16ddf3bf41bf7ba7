//! The configuration of a linear layer.

use crate::layers::cast::OperandCast;
use ottava_recipe::param::{FolderLayout, Split};

/// The configuration of a linear.
#[derive(Clone, Copy, Debug)]
pub struct LinearConfig<'a> {
    /// The name of the linear in the scaling state.
    pub name: &'a str,
    /// The tensors that are stacked in the weight: their names in the model folder, without `.weight`, and their numbers of rows.
    pub parts: &'a [(String, usize)],
    /// The row counts of the parts of a single fused tensor, which ranks divide part by part. Empty if no tensor is fused.
    pub fused: &'a [usize],
    /// The number of neighbouring ranks that hold the same rows if ranks divide outputs, for each of `parts`. For a single fused tensor, the number
    /// is given for each of `fused`. A missing number means 1.
    pub replicas: &'a [usize],
    /// The number of columns of the weight.
    pub inputs: usize,
    /// Whether the linear has a bias.
    pub bias: bool,
    /// The standard deviation of initial weights.
    pub std: f32,
    /// The layout of the weight in a model folder.
    pub layout: FolderLayout,
    /// The division of the weight among ranks.
    pub split: Split,
    /// The cast of the input, if another linear reads the same input and owns the cast.
    pub shared_input: Option<OperandCast>,
    /// The reason why no recipe casts the linear's products to FP8. `None` if the recipe decides.
    pub uncast: Option<&'a str>,
}

impl LinearConfig<'_> {
    /// Returns the entry of `replicas` for part number `at`, or all entries for a single fused tensor.
    pub(super) fn replicas_of(&self, at: usize) -> &[usize] {
        if self.fused.is_empty() { self.replicas.get(at..=at).unwrap_or(&[]) } else { self.replicas }
    }

    /// Returns the layout in a model folder of tensors whose first dimension is the outputs, such as the bias.
    pub(super) fn layout_of_outputs(&self) -> FolderLayout {
        match self.layout {
            FolderLayout::Transposed => FolderLayout::Same,
            layout => layout,
        }
    }
}
