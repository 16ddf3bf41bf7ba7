//! A stage: consecutive layers of a model on one device. A whole model is a stage with all layers.

mod compare;

pub use compare::ComparedSaved;

use crate::block::block;
use crate::layers::{
    Adaptable, Block, BlockSaved, ChunkLoss, Embedding, EmbeddingTail, EmbeddingTailSaved, Factor, Head, HeadConfig,
    HeadOutput, HeadWeight, LayerEmbeddings, LayerEmbeddingsSaved, Norm, NormSaved, OperandCast, Pooler, PoolerSaved,
    Stream,
};
use crate::prefetch::{ResidualBuffers, backward_blocks, forward_blocks};
use crate::{DecoderConfig, HeadSpec, RopeTables};
use ottava_common::error::{Error, Result};
use ottava_recipe::context::{Context, DeferredWgrads};
use ottava_recipe::layer_ranks::LayerRanks;
use ottava_recipe::operand::ResidualGradient;
use ottava_recipe::param::{Builder, Direction, Loan, Param, Purpose, Split, Units};
use ottava_recipe::shared_values::SharedValues;
use ottava_tensor::ops::{CrossEntropy, add};
use ottava_tensor::{HostTransfer, Tensor};
use std::ops::Range;

/// The layers of a stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// The indices of the blocks.
    pub blocks: Range<usize>,
    /// Whether the span starts with the embedding.
    pub embedding: bool,
    /// Whether the span ends with the last norm and the head.
    pub head: bool,
}

impl Span {
    /// Returns a span with all layers of a model with `blocks` blocks.
    pub fn whole(blocks: usize) -> Span {
        Span { blocks: 0..blocks, embedding: true, head: true }
    }
}

/// Consecutive layers of a model, in the order of forward.
pub struct Stage {
    embedding: Option<Embedding>,
    /// The embedding of learned positions, which is added to the embedding of tokens.
    positions: Option<Embedding>,
    /// The token types and the norm of an encoder.
    tail: Option<EmbeddingTail>,
    /// The embeddings of tokens for each block.
    of_layers: Option<LayerEmbeddings>,
    blocks: Vec<Block>,
    /// The pooler of an encoder, in the stage with the head.
    pooler: Option<Pooler>,
    head: Option<Head>,
    /// Whether embedding and head share their weight but are in different stages.
    is_tied: bool,
    residuals: ResidualBuffers,
}

/// The values that forward of a stage saves for backward of one micro-batch. Several micro-batches may be in flight.
pub struct StageSaved {
    /// The token ids, I32 `[T]`, if the stage has the embedding.
    ids: Option<Tensor>,
    /// The values that each block saves. Empty if only the inputs of blocks are saved, in `inputs`.
    blocks: Vec<BlockSaved>,
    /// The inputs of the blocks in host memory.
    inputs: Vec<Tensor>,
    /// The values that the last norm saves, if the stage has the head.
    norm: Option<NormSaved>,
    /// The values that the pooler saves.
    pooler: Option<PoolerSaved>,
    /// The values that layers share.
    shared: SharedValues,
    /// The values that embeddings save.
    embedded: EmbeddedSaved,
}

/// The values that the embeddings of a stage save.
#[derive(Default)]
struct EmbeddedSaved {
    of_layers: Option<LayerEmbeddingsSaved>,
    tail: Option<EmbeddingTailSaved>,
}

impl Stage {
    /// Builds the layers of `span`.
    pub fn new(build: &mut Builder, config: &DecoderConfig, span: &Span, tables: &RopeTables) -> Result<Stage> {
        let (c, Stream { channels, norm, names, std, .. }) = (config, config.stream);
        build.description.ignored.clone_from(&c.folder.ignored);
        let factor = Factor::rounded(build.device, channels, c.embedding.scale, build.recipe.compute)?;
        let table = names.embedding;
        let embedding = span
            .embedding
            .then(|| Embedding::new(build, table, [c.vocabulary, channels], std, factor, Split::Vocabulary))
            .transpose()?
            .map(|embedding| embedding.with_noise(c.embedding.noise));
        build.end_unit();
        let sizes = [c.embedding.first_position + c.max_positions, channels];
        let positions = (span.embedding && c.embedding.learned_positions)
            .then(|| Embedding::new(build, names.positions, sizes, std, Factor::default(), Split::None))
            .transpose()?
            .map(|positions| positions.with_first_row(c.embedding.first_position));
        build.end_unit();
        let tail = c.embedding.tail.filter(|_| span.embedding);
        let tail = tail.map(|spec| EmbeddingTail::new(build, spec, &c.stream)).transpose()?;
        build.end_unit();
        let of_layers = match c.embedding.of_layers {
            Some(_) if *span != Span::whole(c.layers.len()) => {
                return Err(Error::Config(
                    "the model has per-layer embeddings, which are computed with the embedding and read by every layer; stages of a pipeline do not \
                     send them to each other: set `parallel.pipeline` to 1"
                        .into(),
                ));
            }
            of_layers => {
                of_layers.map(|spec| LayerEmbeddings::new(build, spec, c.layers.len(), &c.stream)).transpose()?
            }
        };
        build.end_unit();
        let mut blocks = Vec::with_capacity(span.blocks.len());
        for i in span.blocks.clone() {
            blocks.push(block(build, c, i, tables)?);
            build.end_unit();
        }
        build.block = None;
        // Inference needs no pooler that is not computed, and some folders lack it.
        let pooler = c.head.pooler.filter(|spec| span.head && (spec.is_read || build.purpose.trains()));
        let pooler = pooler.map(|spec| Pooler::new(build, spec, &c.stream)).transpose()?;
        build.end_unit();
        let head = match span.head {
            true => {
                let has_norm = !names.norm.is_empty();
                let norm = has_norm.then(|| Norm::new(build, names.norm, channels, norm)).transpose()?;
                let HeadSpec { scale: logit_scale, cap, labels, scores, label_smoothing, wide_logits, value, .. } =
                    c.head;
                let loss = CrossEntropy { soft_cap: cap, label_smoothing };
                let weight = match (c.ties_head(), span.embedding) {
                    _ if labels.is_some() => HeadWeight::Scores(scores),
                    (false, _) => HeadWeight::Own,
                    (true, true) => HeadWeight::Embedding(table),
                    (true, false) => HeadWeight::Copy(table),
                };
                let (name, vocabulary) = (names.head, labels.unwrap_or(c.vocabulary));
                let config =
                    HeadConfig { name, vocabulary, channels, std, logit_scale, loss, wide_logits, weight, value };
                Some(Head::new(build, norm, config)?)
            }
            false => None,
        };
        build.end_unit();
        let offloads = match build.purpose {
            Purpose::Train(kept) => kept.offload_residuals && kept.recompute.blocks(),
            Purpose::Infer => false,
        };
        let residuals = ResidualBuffers::new(offloads, build.device);
        let is_tied = c.ties_head() && span.embedding != span.head;
        Ok(Stage { embedding, positions, tail, of_layers, blocks, pooler, head, is_tied, residuals })
    }

    /// Returns the weight that embedding and head share, if they are in different stages: the embedding's table, or the head's copy of the table.
    pub fn tied_weight_mut(&mut self) -> Option<&mut Param> {
        let table = self.embedding.as_mut().map(|embedding| &mut embedding.table);
        table.or(self.head.as_mut().and_then(|head| head.weight.as_mut())).filter(|_| self.is_tied)
    }

    /// Returns whether embedding and head share their weight but are in different stages.
    pub fn is_tied(&self) -> bool {
        self.is_tied
    }

    /// Returns the head's copy of the embedding's table, if the embedding is in another stage.
    pub fn copy(&self) -> Option<&Param> {
        self.head.as_ref().and_then(|head| head.weight.as_ref()).filter(|_| self.is_tied)
    }

    /// Returns the blocks of the stage.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Runs forward of a micro-batch, from I32 token ids `[T]` if the stage has the embedding, else from activations `[T, C]`. Returns
    /// activations `[T, C]`, which are normalised if the stage has the head.
    pub fn forward(
        &mut self,
        x: &Tensor,
        context: &mut Context,
        units: &mut dyn Units,
    ) -> Result<(Tensor, StageSaved)> {
        let ids = self.embedding.is_some().then(|| x.clone());
        let mut shared = SharedValues::default();
        let context = &mut context.sharing(&mut shared);
        let (mut x, embedded) = self.embed(x, context, units)?;
        let mut inputs = self.residuals.take(self.blocks.len(), &x)?;
        let (mut blocks, mut leaving) = (Vec::with_capacity(self.blocks.len()), HostTransfer::default());
        forward_blocks(&self.blocks, context, units, |i, block, context| {
            let input = x.clone();
            if let Some(buffer) = inputs.get_mut(i) {
                std::mem::replace(&mut leaving, HostTransfer::store(input.clone(), buffer)?).wait()?;
                x = block.forward(&input, context)?.0;
            } else {
                let saved;
                (x, saved) = block.forward(&input, context)?;
                blocks.push(saved);
            }
            Ok(())
        })?;
        leaving.wait()?;
        let (mut norm, mut pooler) = (None, None);
        if let Some(head) = &self.head {
            (x, norm) = head.normalise(&x, context)?;
            (x, pooler) = self.pool(x, context, units)?;
        }
        Ok((x, StageSaved { ids, blocks, inputs, norm, pooler, shared, embedded }))
    }

    /// Runs forward without saving anything for backward, for evaluation or for inference with a cache.
    pub fn forward_only(&self, x: &Tensor, context: &mut Context, units: &mut dyn Units) -> Result<Tensor> {
        let mut shared = SharedValues::default();
        let context = &mut context.sharing(&mut shared);
        let (mut x, _) = self.embed(x, context, units)?;
        forward_blocks(&self.blocks, context, units, |_, block, context| {
            x = block.forward(&x, context)?.0;
            Ok(())
        })?;
        match &self.head {
            Some(head) => Ok(self.pool(head.normalise(&x, context)?.0, context, units)?.0),
            None => Ok(x),
        }
    }

    /// Pools activations that the last norm has normalised. Without a pooler, returns `x`.
    fn pool(&self, x: Tensor, context: &mut Context, units: &mut dyn Units) -> Result<(Tensor, Option<PoolerSaved>)> {
        let Some(pooler) = &self.pooler else { return Ok((x, None)) };
        let loan = fetch_unit(&pooler.parameters(), Direction::Forward, units)?;
        let (y, saved) = pooler.forward(&x, &mut context.with_weights(&loan))?;
        Ok((y, Some(saved)))
    }

    /// Returns the gradient by the input of [`Stage::pool`].
    fn pool_backward(
        &mut self,
        dy: Tensor,
        saved: Option<PoolerSaved>,
        context: &mut Context,
        units: &mut dyn Units,
    ) -> Result<Tensor> {
        let (Some(pooler), Some(saved)) = (&mut self.pooler, saved) else { return Ok(dy) };
        let loan = fetch_unit(&pooler.parameters(), Direction::Backward, units)?;
        units.begin_gradients(&mut pooler.parameters_mut())?;
        // Only products of blocks are deferred.
        let dx = pooler.backward(dy, saved, &mut Context { deferred: None, ..context.with_weights(&loan) })?;
        units.end_gradients(&mut pooler.parameters_mut())?;
        Ok(dx)
    }

    /// Returns the embeddings of tokens plus learned positions, and shares the embeddings for each block. Without an embedding in the stage, returns
    /// `x`.
    fn embed(&self, x: &Tensor, context: &mut Context, units: &mut dyn Units) -> Result<(Tensor, EmbeddedSaved)> {
        let mut saved = EmbeddedSaved::default();
        let Some(embedding) = &self.embedding else { return Ok((x.clone(), saved)) };
        let ids = x;
        let mut x = embedding.forward(ids, &fetch(&embedding.table, Direction::Forward, units)?, context)?;
        if let Some(of_layers) = &self.of_layers {
            let loan = fetch_unit(&of_layers.parameters(), Direction::Forward, units)?;
            saved.of_layers = Some(of_layers.forward(&x, ids, &mut context.with_weights(&loan))?);
        }
        if let Some(positions) = &self.positions {
            let loan = fetch(&positions.table, Direction::Forward, units)?;
            x = add(&x, &positions.forward(&context.sequences.positions, &loan, context)?)?;
        }
        if let Some(tail) = &self.tail {
            let loan = fetch_unit(&tail.parameters(), Direction::Forward, units)?;
            let (normed, of_tail) = tail.forward(&x, ids, &context.with_weights(&loan))?;
            (x, saved.tail) = (normed, Some(of_tail));
        }
        Ok((x, saved))
    }

    /// Returns the weight of the head, if the stage has the head.
    fn head_weight_mut(&mut self) -> Option<&mut Param> {
        let weight = self.head.as_mut()?.weight.as_mut();
        weight.or(self.embedding.as_mut().map(|embedding| &mut embedding.table))
    }

    /// Returns the result of the head, if the stage has the head.
    pub fn output(&self) -> Option<HeadOutput> {
        self.head.as_ref().map(|head| head.output)
    }

    /// Returns the weight `[V, C]` of the head, if the stage has the head.
    pub fn head_weight(&self) -> Option<&Param> {
        let weight = self.head.as_ref()?.weight.as_ref();
        weight.or(self.embedding.as_ref().map(|embedding| &embedding.table))
    }

    /// Returns the weight `[C]` of the value head, if the stage has one.
    pub fn value_weight(&self) -> Option<&Param> {
        self.head.as_ref()?.value.as_ref()
    }

    /// Runs [`Head::value_gradient`] on the result of [`Stage::forward`]. Returns `None` for a stage without a value head.
    pub fn value_gradient(
        &mut self,
        normed: &Tensor,
        dvalues: &Tensor,
        ranks: &dyn LayerRanks,
    ) -> Result<Option<Tensor>> {
        let weight = self.head.as_mut().and_then(|head| head.value.as_mut());
        weight.map(|weight| Head::value_gradient(normed, weight, dvalues, ranks)).transpose()
    }

    /// Returns the losses `[T]` of I32 `targets` `[T]` and the gradient of `Σ scale · losses` by `normed`, the result of [`Stage::forward`]. Adds to
    /// the gradient of the head. Returns `None` for a stage without the head. `ranks` divide the tensors of layers. See
    /// [`Head::losses_and_gradient`].
    pub fn losses_and_gradient(
        &mut self,
        normed: &Tensor,
        targets: &Tensor,
        scale: &Tensor,
        ranks: &dyn LayerRanks,
        units: &mut dyn Units,
    ) -> Result<Option<(Tensor, Tensor)>> {
        let (Some(output), Some(weight)) = (self.output(), self.head_weight_mut()) else { return Ok(None) };
        let loan = fetch(weight, Direction::Backward, units)?;
        units.begin_gradients(&mut [&mut *weight])?;
        Head::losses_and_gradient(normed, weight, &loan, targets, scale, output, ranks).map(Some)
    }

    /// [`Stage::losses_and_gradient`] of any loss of the logits of `tokens` tokens, as [`Head::chunked_gradient`]. The loss of scores reads scores with
    /// their bias.
    pub fn chunked_gradient(
        &mut self,
        normed: &Tensor,
        tokens: usize,
        ranks: &dyn LayerRanks,
        units: &mut dyn Units,
        loss_of_chunk: &mut ChunkLoss,
    ) -> Result<Option<(Tensor, Tensor)>> {
        let mut bias = self.head.as_mut().and_then(|head| head.bias.take());
        let mut with_bias = |scores: &mut Tensor, start: usize, end: usize| {
            let Some(bias) = &mut bias else { return loss_of_chunk(scores, start, end) };
            Head::add_bias(scores, bias)?;
            let losses = loss_of_chunk(scores, start, end)?;
            Head::bias_gradient(scores, bias, ranks)?;
            Ok(losses)
        };
        let found = match (self.output(), self.head_weight_mut()) {
            (Some(output), Some(weight)) => {
                let loan = fetch(weight, Direction::Backward, units)?;
                units.begin_gradients(&mut [&mut *weight])?;
                Head::chunked_gradient(normed, weight, &loan, tokens, output, ranks, &mut with_bias).map(Some)
            }
            _ => Ok(None),
        };
        if let Some(head) = &mut self.head {
            head.bias = bias;
        }
        found
    }

    /// Returns the bias of the scores, if the stage has one.
    pub fn score_bias(&self) -> Option<&Param> {
        self.head.as_ref()?.bias.as_ref()
    }

    /// Runs backward of a micro-batch from `dy` `[T, C]`, the gradient by the result of forward. Adds to the gradients of all parameters. Returns the
    /// gradient by the input of forward, or `None` if the input was token ids. If the context defers products, [`Stage::wgrads`] computes them.
    pub fn backward(
        &mut self,
        dy: Tensor,
        saved: StageSaved,
        context: &mut Context,
        units: &mut dyn Units,
    ) -> Result<Option<Tensor>> {
        let StageSaved { ids, mut blocks, inputs, norm, pooler, mut shared, embedded } = saved;
        let EmbeddedSaved { of_layers, tail } = embedded;
        let context = &mut context.sharing(&mut shared);
        let dy = self.pool_backward(dy, pooler, context, units)?;
        let dy = match &mut self.head {
            Some(head) => {
                let dy = head.normalise_backward(&dy, norm)?;
                units.end_gradients(&mut head.parameters_mut())?;
                dy
            }
            _ => dy,
        };
        let mut dx = Some(ResidualGradient::from(dy));
        // The block that precedes a block reads its `dx`; `readers` holds the cast that each block applies first to such a gradient.
        let readers: Vec<_> = self.blocks.iter().map(Block::gradient).collect();
        backward_blocks(&mut self.blocks, &inputs, context, units, |i, block, input, context, units| {
            let saved = match input {
                Some(input) => BlockSaved::Input(input),
                None => blocks.pop().expect("forward has saved something for each block"),
            };
            let next = i.checked_sub(1).map_or(OperandCast::NONE, |before| readers[before]);
            let dy = dx.take().expect("each block leaves one");
            units.begin_gradients(&mut parameters_of(block))?;
            dx = Some(block.backward(dy, saved, &next, context)?);
            match context.deferred {
                Some(_) => Ok(()),
                None => units.end_gradients(&mut parameters_of(block)),
            }
        })?;
        self.residuals.give_back(inputs);
        let mut dx = dx.expect("as above").value;
        if let (Some(embeddings), Some(saved), Some(ids)) = (&mut self.of_layers, of_layers, &ids) {
            let loan = fetch_unit(&embeddings.parameters(), Direction::Backward, units)?;
            units.begin_gradients(&mut embeddings.parameters_mut())?;
            // Only products of blocks are deferred.
            let of_unit = &mut Context { deferred: None, ..context.with_weights(&loan) };
            dx = add(&dx, &embeddings.backward(saved, ids, of_unit)?)?;
            units.end_gradients(&mut embeddings.parameters_mut())?;
        }
        if let (Some(of_tail), Some(saved), Some(ids)) = (&mut self.tail, tail, &ids) {
            let loan = fetch_unit(&of_tail.parameters(), Direction::Backward, units)?;
            units.begin_gradients(&mut of_tail.parameters_mut())?;
            dx = of_tail.backward(&dx, saved, ids, &context.with_weights(&loan))?;
            units.end_gradients(&mut of_tail.parameters_mut())?;
        }
        match (&mut self.embedding, ids) {
            (Some(embedding), Some(ids)) => {
                let learned = self.positions.as_mut().map(|positions| (positions, &context.sequences.positions));
                for (embedding, ids) in [Some((embedding, &ids)), learned].into_iter().flatten() {
                    units.begin_gradients(&mut [&mut embedding.table])?;
                    embedding.backward(&dx, ids, context)?;
                    units.end_gradients(&mut [&mut embedding.table])?;
                }
                Ok(None)
            }
            _ => Ok(Some(dx)),
        }
    }

    /// Computes the products that a backward deferred, and adds them to the gradients of the weights.
    pub fn wgrads(&mut self, deferred: DeferredWgrads, units: &mut dyn Units) -> Result<()> {
        let mut products = deferred.0.into_iter().peekable();
        for block in self.blocks.iter_mut().rev() {
            let mut params = parameters_of(block);
            while let Some(product) =
                products.next_if(|product| params.iter().any(|param| param.identity.id == product.weight))
            {
                let weight = params.iter_mut().find(|param| param.identity.id == product.weight).expect("found above");
                weight.gradient.add_product(product.product()?)?;
            }
            units.end_gradients(&mut params)?;
        }
        assert!(products.next().is_none(), "backward defers products of the blocks in its order");
        Ok(())
    }

    /// Returns all parameters, always in the same order.
    pub fn parameters_mut(&mut self) -> Vec<&mut Param> {
        self.units_mut().into_iter().flatten().collect()
    }

    /// Calls `visit` for each linear of the blocks that can have an adapter, always in the same order.
    pub fn linears_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut dyn Adaptable)) {
        self.of_layers.iter_mut().for_each(|of_layers| of_layers.linears_mut(visit));
        self.blocks.iter_mut().for_each(|block| block.linears_mut(visit));
    }

    /// Returns whether forward of the blocks reads only stored weights and codes.
    pub fn blocks_are_stored(&self) -> bool {
        let mut are_stored = true;
        self.blocks.iter().for_each(|block| block.parameters(&mut |param| are_stored &= param.is_stored()));
        are_stored
    }

    /// Returns the parameters of each unit: the embedding, learned positions, the end of an encoder's embedding, embeddings for each block, each block,
    /// the pooler, and the last norm with the head.
    pub fn units_mut(&mut self) -> Vec<Vec<&mut Param>> {
        let embedding =
            self.embedding.iter_mut().chain(&mut self.positions).map(|embedding| vec![&mut embedding.table]);
        let head = self.head.iter_mut().map(Head::parameters_mut);
        let of_layers = self.of_layers.iter_mut().map(LayerEmbeddings::parameters_mut);
        let tail = self.tail.iter_mut().map(EmbeddingTail::parameters_mut);
        let pooler = self.pooler.iter_mut().map(Pooler::parameters_mut);
        let blocks = self.blocks.iter_mut().map(parameters_of);
        embedding.chain(tail).chain(of_layers).chain(blocks).chain(pooler).chain(head).collect()
    }
}

/// Returns the weight of a unit that is one matrix, as a loan.
pub(super) fn fetch(weight: &Param, direction: Direction, units: &mut dyn Units) -> Result<Loan> {
    units.start(&[weight])?;
    units.fetch(&[weight], direction)
}

/// Returns the weights of a unit, as a loan.
fn fetch_unit(weights: &[&Param], direction: Direction, units: &mut dyn Units) -> Result<Loan> {
    units.start(weights)?;
    units.fetch(weights, direction)
}

fn parameters_of(block: &mut Block) -> Vec<&mut Param> {
    let mut all = Vec::new();
    block.parameters_mut(&mut |param| all.push(param));
    all
}
