//! The data of a pass that layers need in addition to their input.

use crate::layer_ranks::{LayerRanks, ShardPlace};
use crate::mode::{Mode, Pass};
use crate::operand::{Gathering, Matrix, View};
use crate::param::{Loan, Param, ParamId, WgradProduct};
use crate::recompute::{Recompute, SavedActivations};
use crate::recurrent::{RecurrentBatch, RecurrentStates};
use crate::scaling::Casts;
use crate::shared_values::SharedValues;
use ottava_common::error::{Error, Result};
use ottava_tensor::comm::Axis;
use ottava_tensor::ops::{
    Accumulation, CodeCopies, Groups, KvBlocks, PagedBatch, SavedActivation, Segments, TokenDraws, compress,
};
use ottava_tensor::{DType, Device, Tensor};
use std::collections::VecDeque;

/// The layout of a micro-batch's tokens: sequences of one length, each with one or several documents. Positions and boundaries of documents are
/// data that a captured step reads again in each replay.
#[derive(Clone, Debug)]
pub struct Sequences {
    /// The number of sequences.
    pub batch: usize,
    /// The number of tokens per sequence.
    pub seq_len: usize,
    /// This rank's place among the ranks that divide each sequence. Activations are `[batch · seq_len / ranks, …]`: the rank's part of each sequence,
    /// one sequence after the other.
    pub place: ShardPlace,
    /// The position of each token in its document, I32 `[batch · seq_len / ranks]`.
    pub positions: Tensor,
    /// The divisor for means over tokens, I32 `[batch · seq_len / ranks]`: for padding 0, and for each other token the number of tokens in the whole
    /// micro-batch that are not padding.
    pub counted: Tensor,
    /// The number of padding tokens of each sequence, as stored in `counted`.
    padding: Vec<usize>,
    /// The offsets in the whole sequences at which documents begin, I32 `[max_documents + 1]`, for [`attention`](ottava_tensor::ops::attention()).
    /// `None` if each sequence is one document.
    pub cu_seqlens: Option<Tensor>,
    /// The random numbers of the tokens. `None` if layers draw none.
    pub draws: Option<TokenDraws>,
}

impl Sequences {
    /// Returns `batch` sequences of `seq_len` tokens, whose positions begin at 0.
    pub fn new(device: &Device, batch: usize, seq_len: usize) -> Result<Sequences> {
        Sequences::at(device, batch, seq_len, 0)
    }

    /// Returns `batch` sequences whose tokens have the positions `start..start + seq_len`.
    pub fn at(device: &Device, batch: usize, seq_len: usize, start: usize) -> Result<Sequences> {
        let positions: Vec<i32> = (0..batch * seq_len).map(|token| (start + token % seq_len) as i32).collect();
        let positions = Tensor::from_slice(device, &[batch * seq_len], &positions)?;
        let counted = Tensor::from_slice(device, &[batch * seq_len], &vec![(batch * seq_len) as i32; batch * seq_len])?;
        let padding = vec![0; batch];
        Ok(Sequences {
            batch,
            seq_len,
            place: ShardPlace::ALONE,
            positions,
            counted,
            padding,
            cu_seqlens: None,
            draws: None,
        })
    }

    /// Returns the sequences of [`Sequences::new`] for the rank at `place` among the ranks that divide each sequence.
    ///
    /// Errors when the number of ranks does not divide `seq_len`.
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

    /// Adds room for `max_documents` documents. Each sequence is one document until [`Sequences::set_documents`].
    pub fn with_documents(self, max_documents: usize) -> Result<Sequences> {
        let (batch, seq_len) = (self.batch, self.seq_len);
        let cu_seqlens = Tensor::zeros(self.positions.device(), &[max_documents + 1], DType::I32)?;
        let mut sequences = Sequences { cu_seqlens: Some(cu_seqlens), ..self };
        sequences.set_documents(&vec![seq_len; batch])?;
        Ok(sequences)
    }

    /// Returns `batch` sequences of `seq_len` tokens. Each sequence is one document, and memory for `max_documents` shorter documents is reserved.
    pub fn packed(device: &Device, batch: usize, seq_len: usize, max_documents: usize) -> Result<Sequences> {
        Sequences::new(device, batch, seq_len)?.with_documents(max_documents)
    }

    /// Returns the values of this rank's tokens, from the values of all tokens.
    pub fn own<T: Copy>(&self, values: &[T]) -> Vec<T> {
        let length = self.place.share(self.seq_len);
        let first = self.place.rank * length;
        values.chunks_exact(self.seq_len).flat_map(|row| &row[first..first + length]).copied().collect()
    }

    /// Gives each token a number, from which layers draw random numbers. `number` is a function of the sequence and of the position in it.
    pub fn number_tokens(&mut self, number: impl Fn(usize, usize) -> i32) -> Result<()> {
        let seq_len = self.seq_len;
        let numbers: Vec<i32> =
            (0..self.batch * seq_len).map(|token| number(token / seq_len, token % seq_len)).collect();
        self.draws = Some(TokenDraws::new(self.positions.device(), &self.own(&numbers))?);
        Ok(())
    }

    /// Marks the last `padding[row]` tokens of each sequence as padding, which means over tokens leave out.
    ///
    /// Errors unless each sequence has one number, which is at most the sequence's length.
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

    /// Returns the documents as segments, whose offsets are in the whole sequences.
    pub fn segments(&self) -> Segments<'_> {
        self.cu_seqlens.as_ref().map_or(Segments::Even(self.batch), Segments::At)
    }

    /// Divides the tokens into documents of these lengths, in the order of the tokens.
    ///
    /// Errors when the number of documents exceeds the reserved number ([`Sequences::packed`]), or when a document would lie in two sequences.
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

/// The context of one pass of one micro-batch.
pub struct Context<'a> {
    /// The FP8 casts of the pass, and its mode.
    pub casts: Casts<'a>,
    /// The ranks that divide the tensors, sequences and experts of layers.
    pub ranks: &'a dyn LayerRanks,
    /// The weights on loan to a unit, for weights that this process does not store on the device.
    pub loan: &'a Loan,
    /// The layout of the tokens.
    pub sequences: &'a Sequences,
    /// The values that backward recomputes.
    pub recompute: Recompute,
    /// The format in which forward saves activations.
    pub saved_activations: SavedActivations,
    /// The KV cache that attention appends to, in inference. `None` in passes over whole sequences.
    pub paged: Option<PagedPass<'a>>,
    /// The factor of the losses of layers in the loss that backward differentiates, F32 `[1]` (F64 for F64). `None` if the loss excludes them. Each
    /// of these losses is a mean over the tokens of the micro-batch.
    pub layer_loss_scale: Option<&'a Tensor>,
    /// Receives the wgrad products, if backward computes only dgrads. `None` if backward computes dgrads and wgrads.
    pub deferred: Option<&'a mut DeferredWgrads>,
    /// The values that layers of the stage share. `None` outside of a stage.
    pub shared: Option<&'a mut SharedValues>,
}

/// The wgrad products that a backward has deferred, in the order of backward.
#[derive(Default)]
pub struct DeferredWgrads(pub VecDeque<DeferredWgrad>);

/// A product `dyᵀ · x` that is later added to the gradient of a weight.
pub struct DeferredWgrad {
    /// The weight.
    pub weight: ParamId,
    /// The gradient by the output of the weight's linear.
    pub dy: View,
    /// The input of the weight's linear.
    pub x: View,
    /// The accumulation of the product.
    pub accumulation: Accumulation,
    /// The rows of each matrix, if the weight stacks several matrices. `None` for one matrix.
    pub groups: Option<Groups>,
}

impl DeferredWgrad {
    /// Returns the operands of the product.
    pub fn product(&self) -> Result<WgradProduct<'_>> {
        let DeferredWgrad { dy, x, accumulation, groups, .. } = self;
        Ok(WgradProduct { a: dy.columns()?, b: x.columns()?, accumulation: *accumulation, groups: groups.as_ref() })
    }
}

/// A pass over new tokens of several sequences. Their keys and values are appended to a cache.
pub struct PagedPass<'a> {
    /// The cache of each attention layer, in the order of [`Description::attention`](crate::param::Description::attention).
    pub layers: &'a mut [KvBlocks],
    /// The index of each layer's group.
    pub groups: &'a [usize],
    /// The placement of the tokens in the cache, for each group of layers.
    pub batches: &'a [PagedBatch<'a>],
    /// The states of each recurrent layer, in the order of [`Description::recurrent`](crate::param::Description::recurrent).
    pub states: &'a mut [RecurrentStates],
    /// The new tokens of the sequences of recurrent layers.
    pub recurrent: RecurrentBatch<'a>,
    /// Whether attention is the attention of training, which does not read the cache. Then the tokens are the first tokens of their sequences. Boundaries
    /// of documents divide several sequences.
    pub is_whole: bool,
}

impl<'a> PagedPass<'a> {
    /// Returns the cache of attention layer `number`, and the placement of the tokens in it.
    pub fn layer(&mut self, number: usize) -> (&mut KvBlocks, &'a PagedBatch<'a>) {
        (&mut self.layers[number], &self.batches[self.groups[number]])
    }

    /// Returns the states of recurrent layer `number`, and the new tokens of their sequences.
    pub fn states_of(&mut self, number: usize) -> (&mut RecurrentStates, RecurrentBatch<'a>) {
        (&mut self.states[number], self.recurrent)
    }

    fn reborrow(&mut self) -> PagedPass<'_> {
        PagedPass { layers: &mut *self.layers, states: &mut *self.states, ..*self }
    }
}

impl<'a> Context<'a> {
    /// Creates the context of a pass over whole sequences, without recomputation and without loans. The model must have been built for `ranks`.
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
            shared: None,
        }
    }
}

impl Context<'_> {
    /// Returns the mode of the pass.
    pub fn mode(&self) -> Mode {
        self.casts.mode
    }

    /// Returns the context of the same pass with the weights of another block.
    pub fn with_weights<'a>(&'a mut self, loan: &'a Loan) -> Context<'a> {
        let mode = self.mode();
        let paged = self.paged.as_mut().map(PagedPass::reborrow);
        let (deferred, shared) = (self.deferred.as_deref_mut(), self.shared.as_deref_mut());
        Context { casts: self.casts.in_mode(mode), loan, paged, deferred, shared, ..*self }
    }

    /// Returns the context of the same pass in a stage whose layers share `values`.
    pub fn sharing<'a>(&'a mut self, values: &'a mut SharedValues) -> Context<'a> {
        let loan = self.loan;
        Context { shared: Some(values), ..self.with_weights(loan) }
    }

    /// Returns the values that layers of the stage share. Panics outside of a stage.
    pub fn shared(&mut self) -> &mut SharedValues {
        self.shared.as_deref_mut().expect("layers that share values run in a stage")
    }

    /// Returns the context in which backward recomputes forward, and saves everything that the rest of backward reads.
    pub fn recomputation(&mut self) -> Context<'_> {
        let (mode, shared) = (self.mode().recomputation(), self.shared.as_deref_mut());
        Context {
            casts: self.casts.in_mode(mode),
            recompute: Recompute::None,
            paged: None,
            deferred: None,
            shared,
            ..*self
        }
    }

    /// Adds `dyᵀ · x` to the gradient of `weight`, or defers the product. With `groups`, each group of rows has its own matrix in the weight.
    /// Returns whether the product was computed.
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

    /// Returns this rank's place among the ranks that divide the tensors of layers.
    pub fn place(&self) -> ShardPlace {
        self.ranks.place(Axis::Tensor)
    }

    /// Returns whether the ranks that divide the tensors of layers also divide the tokens between sublayers. In inference each rank has all tokens,
    /// because there are few.
    pub fn divides_tokens(&self) -> bool {
        self.place().is_divided() && self.mode().pass != Pass::Inference
    }

    /// Starts to gather the rows of a matrix from the ranks that divide tokens. This rank has the rows `own`.
    pub fn start_gather(&self, name: &str, own: Matrix) -> Result<Gathering> {
        let arriving = self.ranks.start_gather(Axis::Tensor, name, own.tensor())?;
        Ok(Gathering::new(own, self.place(), arriving))
    }

    /// Gathers all rows of a matrix if ranks divide tokens. Then `rows` are only this rank's rows.
    pub fn gather(&self, name: &str, rows: &Tensor) -> Result<Tensor> {
        if self.divides_tokens() { self.ranks.gather(Axis::Tensor, name, rows) } else { Ok(rows.clone()) }
    }

    /// Returns `addend + Σ partial` over the ranks that divide tensors. If ranks divide tokens, returns this rank's rows of the sum.
    pub fn sum(&self, name: &str, partial: Tensor, addend: Option<&Tensor>) -> Result<Tensor> {
        match self.divides_tokens() {
            true => self.ranks.sum_own_rows(Axis::Tensor, name, partial, addend),
            false => self.ranks.sum(Axis::Tensor, name, &partial, addend),
        }
    }

    /// Returns this rank's rows of `x` if ranks divide tokens, else `x`. Each rank has all rows of `x`.
    pub fn own_rows(&self, x: &Tensor) -> Result<Tensor> {
        let own = self.place().range(x.shape()[0]);
        if self.divides_tokens() { Ok(x.rows(own.start, own.end)?) } else { Ok(x.clone()) }
    }

    /// Returns the random numbers of `rows` tokens, the tokens of the pass or this rank's part of them. `None` if the pass draws none: only passes
    /// with backward do.
    pub fn draws(&self, rows: usize) -> Result<Option<TokenDraws>> {
        let Some(draws) = self.sequences.draws.as_ref().filter(|_| self.mode().keeps()) else { return Ok(None) };
        let all = draws.tokens();
        Ok(Some(if rows == all { draws.clone() } else { draws.of_tokens(self.place().range(all))? }))
    }

    /// Returns the copies of an FP8 operand that forward writes. Wgrad contracts the operand over tokens, so it needs a second copy unless the
    /// operand is recomputed.
    pub fn operand_copies(&self) -> CodeCopies {
        if self.mode().keeps() && !self.recompute.operands() { CodeCopies::Both } else { CodeCopies::Rows }
    }

    /// Returns whether forward saves activations compressed.
    pub fn compresses(&self) -> bool {
        self.mode().keeps() && self.saved_activations == SavedActivations::Float8
    }

    /// Returns an activation in the form in which forward saves it.
    pub fn save(&self, x: Tensor) -> Result<SavedActivation> {
        Ok(if self.compresses() { SavedActivation::Compressed(compress(&x)?) } else { SavedActivation::Exact(x) })
    }
}
