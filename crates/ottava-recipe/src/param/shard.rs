//! The part of a tensor of a model folder that a parameter holds.

use crate::layer_ranks::ShardPlace;
use crate::storage::States;
use ottava_tensor::ExpandedTensor;
use std::ops::Range;

/// A tensor of a Hugging Face folder.
#[derive(Clone, Debug, PartialEq)]
pub struct FolderTensor {
    /// The name, for example `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// The shape in memory: `[outputs, inputs]` for a linear.
    pub shape: Vec<usize>,
    /// The layout of the tensor in the folder.
    pub layout: FolderLayout,
}

/// The layout of a tensor in a model folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FolderLayout {
    /// The layout is the same as in memory.
    Same,
    /// Transposed, `[inputs, outputs]`.
    Transposed,
    /// A vector that is stored as a matrix with this many rows.
    Rows(usize),
    /// A vector of which a folder has a tensor for each of this many heads. `{}` in the name stands for the number of a head.
    Heads(usize),
    /// The rows of queries, keys and values of one head after another, for this many heads. In memory, the rows of all queries come first, then keys,
    /// then values.
    ByHead(usize),
    /// A matrix or bias of an expert, stored in one tensor with the matrices or biases of all experts of a layer.
    Stacked(Stacked),
    /// A matrix of the adapter of an expert, stored in one tensor with these matrices of all experts of a layer.
    ExpertAdapter(ExpertAdapter),
}

/// The place of a matrix of an expert's adapter in a tensor of PEFT for all experts of a layer. The name of the matrix is
/// `MIXTURE.experts.EXPERT.PARAMETER.lora_A.weight`.
///
/// For an adapter of rank `r` of `E` experts, PEFT stores `lora_A` as `[E · r, inputs]`, expert after expert. `lora_B` is `[outputs, r · E]`: the
/// columns of one rank of all experts are neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertAdapter {
    /// Which matrix it is.
    pub matrix: AdapterMatrix,
    /// The order of the elements of the adapted parameter in the memory of transformers. With [`StackOrder::InputsFirst`], PEFT takes outputs for
    /// inputs, so `A` transposed is stored as `lora_B`, and `B` transposed as `lora_A`.
    pub order: StackOrder,
    /// The index of the expert.
    pub expert: usize,
    /// The number of experts, `E`.
    pub experts: usize,
    /// The names in an expert of the linears whose outputs the adapter has.
    pub linears: &'static [&'static str],
    /// Whether another parameter of the same experts, which PEFT adapts after this one, has an adapter. PEFT then calls the module of this adapter
    /// `base_layer`.
    pub is_inner: bool,
}

/// A matrix of an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterMatrix {
    /// `A`, `[r, inputs]`.
    A,
    /// `B`, `[outputs, r]`.
    B,
}

impl ExpertAdapter {
    /// Returns whether PEFT stores the matrix as `lora_A`.
    pub fn is_stored_as_a(&self) -> bool {
        (self.matrix == AdapterMatrix::A) != (self.order == StackOrder::InputsFirst)
    }
}

/// The place of an expert's matrix or bias in a tensor of all experts of a layer, with the outputs of `L` linears. A tensor of biases is
/// `[E, L · outputs]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stacked {
    /// The name of the stacked tensor in the mixture. For biases, `_bias` is appended.
    pub name: &'static str,
    /// The order of the elements.
    pub order: StackOrder,
    /// The index of the expert.
    pub expert: usize,
    /// The number of experts, `E`.
    pub experts: usize,
    /// The index of the linear.
    pub linear: usize,
    /// The number of linears, `L`.
    pub linears: usize,
}

/// The order of the elements in a tensor that stacks the matrices of all experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StackOrder {
    /// `[E, inputs, L · outputs]`, with the outputs of the linears interleaved: gpt-oss.
    Interleaved,
    /// `[E, inputs, L · outputs]`, with one linear after another: Llama 4, and published folders of Qwen3-VL.
    InputsFirst,
    /// `[E, L · outputs, inputs]`, with one linear after another: Granite, and the memory of transformers.
    OutputsFirst,
}

impl StackOrder {
    /// Returns the order with inputs and outputs exchanged, in which a folder may have the same tensors. Returns `None` for interleaved outputs.
    pub fn exchanged(self) -> Option<StackOrder> {
        match self {
            StackOrder::Interleaved => None,
            StackOrder::InputsFirst => Some(StackOrder::OutputsFirst),
            StackOrder::OutputsFirst => Some(StackOrder::InputsFirst),
        }
    }
}

impl FolderTensor {
    /// Creates a tensor that a folder stores in this shape.
    pub fn new(name: String, shape: Vec<usize>) -> FolderTensor {
        FolderTensor { name, shape, layout: FolderLayout::Same }
    }

    /// Returns the shape in a folder.
    pub fn stored_shape(&self) -> Vec<usize> {
        match self.layout {
            FolderLayout::Same | FolderLayout::ByHead(_) => self.shape.clone(),
            FolderLayout::Transposed => self.shape.iter().rev().copied().collect(),
            FolderLayout::Rows(rows) | FolderLayout::Heads(rows) => vec![rows, self.shape[0] / rows],
            FolderLayout::Stacked(Stacked { experts, linears, order, .. }) => {
                let (outputs, inputs) = (linears * self.shape[0], &self.shape[1..]);
                match order {
                    StackOrder::Interleaved | StackOrder::InputsFirst => [&[experts], inputs, &[outputs]].concat(),
                    StackOrder::OutputsFirst => [&[experts, outputs], inputs].concat(),
                }
            }
            FolderLayout::ExpertAdapter(place) => {
                let (rows, columns) = (self.shape[0], self.shape[1]);
                let (r, width) = if place.matrix == AdapterMatrix::A { (rows, columns) } else { (columns, rows) };
                if place.is_stored_as_a() { vec![place.experts * r, width] } else { vec![width, r * place.experts] }
            }
        }
    }

    /// Returns the tensors of a folder that hold this tensor, one after another: a tensor for each head with [`FolderLayout::Heads`], else this tensor.
    pub fn in_folder(&self) -> Vec<FolderTensor> {
        let FolderLayout::Heads(heads) = self.layout else { return vec![self.clone()] };
        let of_head =
            |head: usize| FolderTensor::new(self.name.replace("{}", &head.to_string()), vec![self.shape[0] / heads]);
        (0..heads).map(of_head).collect()
    }

    /// Returns the name of the folder's tensor that holds this tensor.
    pub fn stored_name(&self) -> String {
        let mixture = || self.name.rsplit_once(".experts.").expect("an expert is one of experts").0;
        match self.layout {
            FolderLayout::Stacked(Stacked { name, .. }) => {
                let bias = if self.name.ends_with(".bias") { "_bias" } else { "" };
                format!("{}.{name}{bias}", mixture())
            }
            FolderLayout::ExpertAdapter(place) => {
                let inner = if place.is_inner { ".base_layer" } else { "" };
                format!("{}.experts{inner}.lora_{}.weight", mixture(), if place.is_stored_as_a() { "A" } else { "B" })
            }
            _ => self.name.clone(),
        }
    }

    /// Returns the number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// The division of a tensor of a layer among ranks. A layer chooses it when it is built, and [`Builder::shard`](super::Builder::shard) returns the
/// [`Shard`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Not divided: norms, biases of [`Split::Input`] linears, and projections to latents.
    None,
    /// Divided by outputs, the first dimension: Q, K, V, gate and up, and their biases.
    Output,
    /// Divided by inputs, the second dimension: linears that read the outputs of [`Split::Output`] linears.
    Input,
    /// Divided by tokens of the vocabulary, the first dimension: embedding and head.
    Vocabulary,
    /// Not divided, but only on the rank that has the expert.
    Expert,
}

impl Split {
    /// Returns the dimension that is divided.
    pub fn dim(self) -> Option<usize> {
        match self {
            Split::None | Split::Expert => None,
            Split::Output | Split::Vocabulary => Some(0),
            Split::Input => Some(1),
        }
    }
}

/// The part of a [`FolderTensor`] that this rank holds: a range of indices of one dimension.
#[derive(Clone, Debug, PartialEq)]
pub struct Shard {
    /// The whole tensor.
    pub tensor: FolderTensor,
    /// The division of the tensor among ranks.
    pub split: Split,
    /// The divided dimension, or 0 if the tensor is whole.
    pub dim: usize,
    /// The indices of the divided dimension that this rank holds.
    pub range: Range<usize>,
    /// This rank's place among the neighbouring ranks that hold the same indices. Several ranks hold the same latents, and the same heads if the
    /// model has fewer key and value heads than ranks.
    pub replica: ShardPlace,
}

impl Shard {
    /// Returns the shard of the rank at `place` if ranks divide `tensor` by `split`. Returns `None` if the dimension does not divide evenly.
    pub fn new(tensor: FolderTensor, split: Split, place: ShardPlace) -> Option<Shard> {
        let whole = 0..tensor.shape[split.dim().unwrap_or(0)];
        Shard::within(tensor, whole, split, place, 1)
    }

    /// Returns the shard of the indices `part` of the divided dimension, for a tensor whose parts are divided separately. `replicas` neighbouring
    /// ranks hold the same indices. `replicas` must divide the number of ranks. Returns `None` if `part` does not divide evenly.
    pub fn within(
        tensor: FolderTensor,
        part: Range<usize>,
        split: Split,
        place: ShardPlace,
        replicas: usize,
    ) -> Option<Shard> {
        let ShardPlace { rank, ranks } = ShardPlace { rank: place.rank / replicas, ranks: place.ranks / replicas };
        let replica = ShardPlace { rank: place.rank % replicas, ranks: replicas };
        let (dim, size) = (split.dim().unwrap_or(0), part.len());
        let range = match split {
            Split::None | Split::Expert => part,
            _ if !size.is_multiple_of(ranks) => return None,
            _ => part.start + rank * (size / ranks)..part.start + (rank + 1) * (size / ranks),
        };
        Some(Shard { tensor, split, dim, range, replica })
    }

    /// Returns the shape of the shard.
    pub fn shape(&self) -> Vec<usize> {
        let mut shape = self.tensor.shape.clone();
        shape[self.dim] = self.range.len();
        shape
    }

    /// Returns the number of elements of the shard.
    pub fn elements(&self) -> usize {
        self.shape().iter().product()
    }

    /// Returns where `elements` of the shard are in the whole tensor. `elements` are counted in row-major order.
    pub fn region(&self, elements: Range<usize>) -> Region {
        match self.dim {
            0 => {
                let first = self.range.start * self.tensor.shape[1..].iter().product::<usize>();
                Region { elements: first + elements.start..first + elements.end, columns: None }
            }
            _ => Region { elements, columns: Some(self.range.clone()).filter(|it| it.len() < self.tensor.shape[1]) },
        }
    }

    /// Returns the ranges of the flat whole tensor that contain `elements` of the shard, ascending and not adjacent. `elements` are in row-major
    /// order.
    pub fn folder_ranges(&self, elements: Range<usize>) -> Vec<Range<usize>> {
        self.region(elements).ranges(&self.tensor.shape)
    }

    /// Returns whether a boundary of the shard's columns divides a group of moments of the whole tensor.
    pub fn divides_groups(&self, states: States) -> bool {
        let is_cut = |column: usize| !column.is_multiple_of(ExpandedTensor::GROUP);
        states == States::Coat
            && self.split == Split::Input
            && (is_cut(self.range.start) || is_cut(self.range.len()))
            && self.range.len() < self.tensor.shape[1]
    }

    /// Returns the first index of the divided dimension that `rank` holds. `own` is the place of this rank.
    pub fn first_of(&self, rank: usize, own: ShardPlace) -> usize {
        let number = |rank: usize| rank / self.replica.ranks * self.range.len();
        self.range.start + number(rank) - number(own.rank)
    }
}

/// Elements of a tensor: a range in row-major order, of whole rows or of some columns. A tensor of more than two dimensions is treated as a matrix
/// whose columns combine all dimensions after the first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// The range of elements, counted within `columns` only.
    pub elements: Range<usize>,
    /// The columns. `None` means all columns.
    pub columns: Option<Range<usize>>,
}

impl Region {
    /// Returns the ranges of the flat tensor of this `shape`, ascending and not adjacent.
    pub fn ranges(&self, shape: &[usize]) -> Vec<Range<usize>> {
        let whole = || Some(self.elements.clone()).filter(|elements| !elements.is_empty());
        let Some(columns) = &self.columns else { return Vec::from_iter(whole()) };
        let (run, stride, mut at) = (columns.len(), shape[1..].iter().product::<usize>(), self.elements.start);
        let mut ranges: Vec<Range<usize>> = Vec::new();
        while at < self.elements.end {
            let (row, offset) = (at / run, at % run);
            let count = (run - offset).min(self.elements.end - at);
            let start = row * stride + columns.start + offset;
            match ranges.last_mut() {
                Some(last) if last.end == start => last.end += count,
                _ => ranges.push(start..start + count),
            }
            at += count;
        }
        ranges
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tensor(shape: &[usize]) -> FolderTensor {
        FolderTensor::new("w".into(), shape.to_vec())
    }

    #[test]
    fn a_whole_tensor_is_one_range() {
        let shard = Shard::new(tensor(&[5, 7]), Split::None, ShardPlace { rank: 3, ranks: 4 }).unwrap();
        assert_eq!(shard.shape(), [5, 7]);
        assert_eq!(shard.folder_ranges(3..30).as_slice(), std::slice::from_ref(&(3..30)));
    }

    #[test]
    fn columns_are_a_range_per_row() {
        let shard = Shard::new(tensor(&[3, 8]), Split::Input, ShardPlace { rank: 1, ranks: 2 }).unwrap();
        assert_eq!(shard.shape(), [3, 4]);
        assert_eq!(shard.folder_ranges(0..12), [4..8, 12..16, 20..24]);
        assert_eq!(shard.folder_ranges(2..5), [6..8, 12..13]);
    }

    /// Divides two key and value heads among four ranks. The last two ranks are checked.
    #[test]
    fn neighbours_hold_the_same_indices_of_few_heads() {
        let of = |rank| {
            let place = ShardPlace { rank, ranks: 4 };
            Shard::within(tensor(&[6, 3]), 2..6, Split::Output, place, 2).unwrap()
        };
        assert_eq!((of(2).range, of(3).range), (4..6, 4..6));
        assert_eq!((of(2).replica.rank, of(3).replica.rank), (0, 1));
        let first = |rank| of(3).first_of(rank, ShardPlace { rank: 3, ranks: 4 });
        assert_eq!([0, 1, 2, 3].map(first), [2, 2, 4, 4]);
        assert_eq!(Shard::within(tensor(&[6, 3]), 2..5, Split::Output, ShardPlace { rank: 0, ranks: 4 }, 2), None);
    }

    #[test]
    fn an_uneven_dimension_is_not_divided() {
        assert_eq!(Shard::new(tensor(&[5, 8]), Split::Output, ShardPlace { rank: 0, ranks: 2 }), None);
        assert_eq!(Shard::new(tensor(&[8, 5]), Split::Input, ShardPlace { rank: 0, ranks: 2 }), None);
    }

    proptest! {
        /// The shards of all ranks together hold each element once, for any division into pieces.
        #[test]
        fn shards_hold_each_element_once(
            rows in 1..5usize, columns in 1..5usize, ranks in 1..5usize, cut in 0..200usize, by_input: bool, vector: bool
        ) {
            let (split, shape) = match (by_input && !vector, vector) {
                (true, _) => (Split::Input, vec![rows, columns * ranks]),
                (_, false) => (Split::Output, vec![rows * ranks, columns]),
                (_, true) => (Split::Vocabulary, vec![rows * ranks]),
            };
            let mut seen = vec![0; shape.iter().product()];
            for rank in 0..ranks {
                let shard = Shard::new(tensor(&shape), split, ShardPlace { rank, ranks }).unwrap();
                let (elements, cut) = (shard.elements(), cut % (shard.elements() + 1));
                let mut count = 0;
                for range in [0..cut, cut..elements].into_iter().flat_map(|part| shard.folder_ranges(part)) {
                    count += range.len();
                    range.for_each(|element| seen[element] += 1);
                }
                prop_assert_eq!(count, elements);
            }
            prop_assert!(seen.iter().all(|&times| times == 1), "{:?}", seen);
        }
    }
}
