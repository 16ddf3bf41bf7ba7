//! What layers need to know about a pass beside their input.

use crate::layer_ranks::{LayerRanks, ShardPlace};
use crate::mode::{Mode, Pass};
use crate::operand::{Gathering, Matrix, View};
use crate::param::{Loan, Param, ParamId, WgradProduct};
use crate::recompute::{Recompute, SavedActivations};
use crate::scaling::Casts;
use ottava_common::error::{Error, Result};
use ottava_tensor::comm::Axis;
use ottava_tensor::ops::{Accumulation, CodeCopies, Groups, KvBlocks, PagedBatch, SavedActivation, add, compress};
use ottava_tensor::{DType, Device, Tensor};
use std::collections::VecDeque;

/// How the tokens of a micro-batch lie: in sequences of one length, each a document or several. Positions and boundaries of documents are
/// data, which a captured step reads anew.
#[derive(Clone, Debug)]
pub struct Sequences {
    /// Sequences.
    pub batch: usize,
    /// Tokens per sequence.
    pub seq_len: usize,
    /// This rank among the ranks that divide each sequence: activations are `[batch · seq_len / ranks, …]`, the rank's part of the first sequence
    /// first.
    pub place: ShardPlace,
    /// I32 `[batch · seq_len / ranks]`: the position of each token in its document.
    pub positions: Tensor,
    /// I32 `[batch · seq_len / ranks]`: at tokens of documents, the number of such tokens in the whole micro-batch; at padding, 0. Means over tokens
    /// read it.
    pub counted: Tensor,
    /// By sequence, the padding that `counted` has.
    padding: Vec<usize>,
    /// I32 `[max_documents + 1]`: where documents begin in the whole sequences, as [`attention`](ottava_tensor::ops::attention()) reads them; `None` where each
    /// sequence is one document.
    pub cu_seqlens: Option<Tensor>,
}

impl Sequences {
    /// `batch` sequences of `seq_len` tokens from position 0 on.
    pub fn new(device: &Device, batch: usize, seq_len: usize) -> Result<Sequences> {
        Sequences::at(device, batch, seq_len, 0)
    }

    /// `batch` sequences whose tokens stand at positions `start..start + seq_len`.
    pub fn at(device: &Device, batch: usize, seq_len: usize, start: usize) -> Result<Sequences> {
        let positions: Vec<i32> = (0..batch * seq_len).map(|token| (start + token % seq_len) as i32).collect();
        let positions = Tensor::from_slice(device, &[batch * seq_len], &positions)?;
        let counted = Tensor::from_slice(device, &[batch * seq_len], &vec![(batch * seq_len) as i32; batch * seq_len])?;
        let padding = vec![0; batch];
        Ok(Sequences { batch, seq_len, place: ShardPlace::ALONE, positions, counted, padding, cu_seqlens: None })
    }

    /// [`Sequences::new`] for the rank at `place` of the ranks that divide each sequence.
    ///
    /// Errors when they do not divide it evenly.
    pub fn divided(device: &Device, batch: usize, seq_len: usize, place: ShardPlace) -> Result<Sequences> {
        if !seq_len.is_multiple_of(place.ranks) {
            return Err(Error::Config(format!(
                "the {} ranks of `parallel.context` do not divide a sequence of {seq_len} tokens evenly; change `data.max_length`",
                place.ranks
            )));
        }
        let whole = Sequences::new(&Device::Cpu, batch, seq_len)?;
        let own = Sequences { place, ..whole };
        let of_rank = |tensor: &Tensor| -> Result<Tensor> {
            let values = own.own(&tensor.to_vec::<i32>()?);
            Ok(Tensor::from_slice(device, &[values.len()], &values)?)
        };
        let (positions, counted) = (of_rank(&own.positions)?, of_rank(&own.counted)?);
        Ok(Sequences { positions, counted, ..own })
    }

    /// With room for `max_documents` documents; each sequence is one.
    pub fn with_documents(self, max_documents: usize) -> Result<Sequences> {
        let (batch, seq_len) = (self.batch, self.seq_len);
        let cu_seqlens = Tensor::zeros(self.positions.device(), &[max_documents + 1], DType::I32)?;
        let mut sequences = Sequences { cu_seqlens: Some(cu_seqlens), ..self };
        sequences.set_documents(&vec![seq_len; batch])?;
        Ok(sequences)
    }

    /// `batch` sequences of `seq_len` tokens, each one document, with room for `max_documents` shorter ones.
    pub fn packed(device: &Device, batch: usize, seq_len: usize, max_documents: usize) -> Result<Sequences> {
        Sequences::new(device, batch, seq_len)?.with_documents(max_documents)
    }

    /// The values of this rank's tokens, from the values of all tokens.
    pub fn own<T: Copy>(&self, values: &[T]) -> Vec<T> {
        let length = self.place.share(self.seq_len);
        let first = self.place.rank * length;
        values.chunks_exact(self.seq_len).flat_map(|row| &row[first..first + length]).copied().collect()
    }

    /// Declares the last `padding[row]` tokens of each sequence to be padding, which means over tokens leave out.
    ///
    /// Errors unless there is a number for each sequence, at most its length.
    pub fn set_padding(&mut self, padding: &[usize]) -> Result<()> {
        if padding.len() != self.batch || padding.iter().any(|&padding| padding > self.seq_len) {
            return Err(Error::Data(format!(
                "padding of a batch of {} x {}: {} sequences have padding, the longest of {} tokens",
                self.batch,
                self.seq_len,
                padding.len(),
                padding.iter().max().unwrap_or(&0)
            )));
        }
        if padding == self.padding {
            return Ok(());
        }
        self.padding = padding.to_vec();
        let tokens = (self.batch * self.seq_len - padding.iter().sum::<usize>()) as i32;
        let row = |&padding: &usize| [vec![tokens; self.seq_len - padding], vec![0; padding]].concat();
        let counted: Vec<i32> = padding.iter().flat_map(row).collect();
        let own = self.own(&counted);
        Ok(self.counted.write_bytes(bytemuck::cast_slice(&own))?)
    }

    /// Divides the tokens into documents of these lengths, in the order of the tokens.
    ///
    /// Errors when there are more documents than [`Sequences::packed`] made room for, or when one lies in two sequences.
    pub fn set_documents(&mut self, lengths: &[usize]) -> Result<()> {
        let tokens = self.batch * self.seq_len;
        let error = |what: String| {
            Err(Error::Data(format!("documents of a batch of {} x {}: {what}", self.batch, self.seq_len)))
        };
        let capacity = self.cu_seqlens.as_ref().map_or(0, |at| at.len() - 1);
        if lengths.len() > capacity {
            return error(format!("{} are more than the {capacity} that there is room for", lengths.len()));
        }
        let (mut boundaries, mut positions) = (vec![0], Vec::with_capacity(tokens));
        for (document, &length) in lengths.iter().enumerate() {
            let start = positions.len();
            if length == 0 || start % self.seq_len + length > self.seq_len {
                return error(format!(
                    "document {document} of {length} tokens at token {start} does not lie within one sequence"
                ));
            }
            positions.extend(0..length as i32);
            boundaries.push(positions.len() as i32);
        }
        if positions.len() != tokens {
            return error(format!("they have {} tokens", positions.len()));
        }
        boundaries.resize(capacity + 1, tokens as i32);
        let positions = self.own(&positions);
        self.positions.write_bytes(bytemuck::cast_slice(&positions))?;
        let at = self.cu_seqlens.as_mut().expect("there is room for documents");
        Ok(at.write_bytes(bytemuck::cast_slice(&boundaries))?)
    }
}

/// One pass of one micro-batch.
pub struct Context<'a> {
    /// The FP8 casts of the pass, and its mode.
    pub casts: Casts<'a>,
    /// The ranks that divide the tensors, sequences and experts of layers.
    pub ranks: &'a dyn LayerRanks,
    /// The weights that units read from elsewhere.
    pub loan: &'a Loan,
    /// How its tokens lie.
    pub sequences: &'a Sequences,
    /// What backward computes again.
    pub recompute: Recompute,
    /// The format of what forward keeps.
    pub saved_activations: SavedActivations,
    /// The cache of keys and values to which attention adds, in inference; `None` in passes over whole sequences.
    pub paged: Option<PagedPass<'a>>,
    /// F32 `[1]` (F64 for F64): the factor of the losses of layers in what backward differentiates; `None` if they do not count. Each is a mean
    /// over the tokens of the micro-batch.
    pub layer_loss_scale: Option<&'a Tensor>,
    /// Receives the products of the gradients of weights, in a backward that computes only gradients by inputs; `None` if backward
    /// computes both.
    pub deferred: Option<&'a mut DeferredWgrads>,
}

/// The products of the gradients of weights that a backward has deferred, in its order.
#[derive(Default)]
pub struct DeferredWgrads(pub VecDeque<DeferredWgrad>);

/// A product `dyᵀ · x` to be added to the gradient of a weight.
pub struct DeferredWgrad {
    /// The weight.
    pub weight: ParamId,
    /// The gradient by the output of its linear.
    pub dy: View,
    /// The input of its linear.
    pub x: View,
    /// How the product is accumulated.
    pub accumulation: Accumulation,
    /// The rows of each of the matrices that the weight stacks; `None` if it is one matrix.
    pub groups: Option<Groups>,
}

impl DeferredWgrad {
    /// Its operands.
    pub fn product(&self) -> Result<WgradProduct<'_>> {
        let DeferredWgrad { dy, x, accumulation, groups, .. } = self;
        Ok(WgradProduct { a: dy.columns()?, b: x.columns()?, accumulation: *accumulation, groups: groups.as_ref() })
    }
}

/// New tokens of many sequences, whose keys and values join a cache.
pub struct PagedPass<'a> {
    /// The cache of each attention layer, as [`Description::attention`](crate::param::Description::attention) lists them.
    pub layers: &'a mut [KvBlocks],
    /// The group of each layer.
    pub groups: &'a [usize],
    /// Where the tokens belong, in each group of layers.
    pub batches: &'a [PagedBatch<'a>],
    /// Whether they are all tokens of one sequence, for which attention of training computes the same.
    pub is_whole: bool,
}

impl<'a> PagedPass<'a> {
    /// The cache of attention layer `number`, and where the tokens belong in it.
    pub fn layer(&mut self, number: usize) -> (&mut KvBlocks, &'a PagedBatch<'a>) {
        (&mut self.layers[number], &self.batches[self.groups[number]])
    }

    fn reborrow(&mut self) -> PagedPass<'_> {
        PagedPass { layers: &mut *self.layers, ..*self }
    }
}

impl<'a> Context<'a> {
    /// A pass over whole sequences that recomputes nothing, whose units have their own weights. `ranks` are the ranks for which the model is built.
    pub fn new(casts: Casts<'a>, ranks: &'a dyn LayerRanks, sequences: &'a Sequences) -> Context<'a> {
        Context {
            casts,
            ranks,
            loan: Loan::none(),
            sequences,
            recompute: Recompute::None,
            saved_activations: SavedActivations::Exact,
            paged: None,
            layer_loss_scale: None,
            deferred: None,
        }
    }
}

impl Context<'_> {
    /// What the pass is for.
    pub fn mode(&self) -> Mode {
        self.casts.mode
    }

    /// The same pass, with the weights of another block.
    pub fn with_weights<'a>(&'a mut self, loan: &'a Loan) -> Context<'a> {
        let mode = self.mode();
        let paged = self.paged.as_mut().map(PagedPass::reborrow);
        let deferred = self.deferred.as_deref_mut();
        Context { casts: self.casts.in_mode(mode), loan, paged, deferred, ..*self }
    }

    /// The forward that backward runs once more, which keeps everything that the rest of backward reads.
    pub fn recomputation(&mut self) -> Context<'_> {
        let mode = self.mode().recomputation();
        Context { casts: self.casts.in_mode(mode), recompute: Recompute::None, paged: None, deferred: None, ..*self }
    }

    /// Adds `dyᵀ · x` to the gradient of `weight`, or defers the product. With `groups`, of each of the matrices that the weight stacks.
    /// Returns whether it was computed.
    pub fn add_wgrad(
        &mut self,
        weight: &mut Param,
        dy: &View,
        x: &View,
        groups: Option<&Groups>,
        accumulation: Accumulation,
    ) -> Result<bool> {
        let (id, dy, x, groups) = (weight.identity.id, dy.clone(), x.clone(), groups.cloned());
        let product = DeferredWgrad { weight: id, dy, x, accumulation, groups };
        match &mut self.deferred {
            Some(deferred) => deferred.0.push_back(product),
            None => weight.gradient.add_product(product.product()?)?,
        }
        Ok(self.deferred.is_none())
    }

    /// This rank among the ranks that divide the tensors of layers.
    pub fn place(&self) -> ShardPlace {
        self.ranks.place(Axis::Tensor)
    }

    /// Whether the ranks that divide the tensors of layers also divide the tokens between sublayers. In inference, which has few tokens, each
    /// of them has all tokens.
    pub fn divides_tokens(&self) -> bool {
        self.place().is_divided() && self.mode().pass != Pass::Inference
    }

    /// Starts to gather all rows of a matrix; this rank has the rows `own`. Ranks divide tokens.
    pub fn start_gather(&self, name: &str, own: Matrix) -> Result<Gathering> {
        let arriving = self.ranks.start_gather(Axis::Tensor, name, own.tensor())?;
        Ok(Gathering::new(own, self.place(), arriving))
    }

    /// All rows of a matrix. If ranks divide tokens, this rank has `rows` alone.
    pub fn gather(&self, name: &str, rows: &Tensor) -> Result<Tensor> {
        if self.divides_tokens() { self.ranks.gather(Axis::Tensor, name, rows) } else { Ok(rows.clone()) }
    }

    /// `addend + Σ partial` over the ranks that divide tensors: this rank's rows if ranks divide tokens.
    pub fn sum(&self, name: &str, partial: Tensor, addend: Option<&Tensor>) -> Result<Tensor> {
        match addend {
            _ if self.divides_tokens() => self.ranks.sum_own_rows(Axis::Tensor, name, partial, addend),
            Some(addend) => Ok(add(&self.ranks.sum(Axis::Tensor, name, partial)?, addend)?),
            None => self.ranks.sum(Axis::Tensor, name, partial),
        }
    }

    /// This rank's rows of `x`, which all ranks have whole, if ranks divide tokens.
    pub fn own_rows(&self, x: &Tensor) -> Result<Tensor> {
        let own = self.place().range(x.shape()[0]);
        if self.divides_tokens() { Ok(x.rows(own.start, own.end)?) } else { Ok(x.clone()) }
    }

    /// The copies of an FP8 operand that forward makes: wgrad contracts it over tokens, unless it is recomputed.
    pub fn operand_copies(&self) -> CodeCopies {
        if self.mode().keeps() && !self.recompute.operands() { CodeCopies::Both } else { CodeCopies::Rows }
    }

    /// Whether forward keeps activations compressed.
    pub fn compresses(&self) -> bool {
        self.mode().keeps() && self.saved_activations == SavedActivations::Float8
    }

    /// An activation as forward keeps it.
    pub fn save(&self, x: Tensor) -> Result<SavedActivation> {
        Ok(if self.compresses() { SavedActivation::Compressed(compress(&x)?) } else { SavedActivation::Exact(x) })
    }
}
