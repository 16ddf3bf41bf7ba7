//! A stage: some of a model's parts in a row, all of them on one device. A whole model is the stage that has all.

use super::DecoderConfig;
use super::prefetch::{ResidualBuffers, backward_blocks, forward_blocks};
use crate::context::Context;
use crate::error::Result;
use crate::layers::{
    Attention, AttentionConfig, Block, BlockSaved, Branch, Embedding, Head, Mlp, MlpConfig, Norm, NormSaved,
    OperandCast,
};
use crate::operand::ResidualGradient;
use crate::param::{Builder, GradientSink, Param, Purpose};
use ottava_tensor::{HostTransfer, Tensor};
use std::ops::Range;

/// Which parts of a model a stage has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Its blocks, of those that the model has.
    pub blocks: Range<usize>,
    /// Whether it starts with the embedding.
    pub embedding: bool,
    /// Whether it ends with the last norm and the head.
    pub head: bool,
}

impl Span {
    /// All parts of a model with this many blocks.
    pub fn whole(blocks: usize) -> Span {
        Span { blocks: 0..blocks, embedding: true, head: true }
    }
}

/// Parts of a model in the order of forward.
pub struct Stage {
    embedding: Option<Embedding>,
    blocks: Vec<Block>,
    head: Option<Head>,
    residuals: ResidualBuffers,
}

/// What a stage keeps of one micro-batch from forward to backward. Several may be in flight.
pub struct StageSaved {
    /// Of a stage with the embedding: what it read, I32 `[T]`.
    ids: Option<Tensor>,
    /// Empty where the inputs of blocks are all that is kept, in `inputs`.
    blocks: Vec<BlockSaved>,
    /// The inputs of the blocks in the host's memory.
    inputs: Vec<Tensor>,
    /// Of a stage with the head.
    norm: Option<NormSaved>,
}

impl Stage {
    /// Builds the parts of `span`.
    pub fn new(build: &mut Builder, config: &DecoderConfig, span: &Span, rope_table: &Tensor) -> Result<Stage> {
        const TABLE: &str = "model.embed_tokens";
        let c = config;
        let embedding =
            span.embedding.then(|| Embedding::new(build, TABLE, c.vocabulary, c.channels, c.init_std)).transpose()?;
        let blocks = span.blocks.clone().map(|i| block(build, c, i, rope_table)).collect::<Result<Vec<_>>>()?;
        build.block = None;
        let head = match span.head {
            true => {
                let norm = Norm::new(build, "model.norm", c.channels, c.norm_eps)?;
                Some(Head::new(build, norm, c.vocabulary, c.channels, c.init_std, c.tied.then_some(TABLE))?)
            }
            false => None,
        };
        let offloads = match build.purpose {
            Purpose::Train(kept) => kept.offload_residuals && kept.recompute.blocks(),
            Purpose::Infer => false,
        };
        let residuals = ResidualBuffers::new(offloads, build.device);
        Ok(Stage { embedding, blocks, head, residuals })
    }

    /// Its blocks.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Forward of a micro-batch: of I32 token ids `[T]` where the stage has the embedding, else of activations `[T, C]`. Returns
    /// activations `[T, C]`, normalised where the stage has the head.
    pub fn forward(&mut self, x: &Tensor, context: &mut Context) -> Result<(Tensor, StageSaved)> {
        let (mut x, ids) = match &self.embedding {
            Some(embedding) => (embedding.forward(x)?, Some(x.clone())),
            None => (x.clone(), None),
        };
        let mut inputs = self.residuals.take(self.blocks.len(), &x)?;
        let (mut blocks, mut leaving) = (Vec::with_capacity(self.blocks.len()), HostTransfer::default());
        forward_blocks(&self.blocks, context, |i, block, context| {
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
        let mut norm = None;
        if let Some(head) = &self.head {
            let (normed, saved) = head.norm.forward(&x, context)?;
            (x, norm) = (normed, Some(saved));
        }
        Ok((x, StageSaved { ids, blocks, inputs, norm }))
    }

    /// Forward without backward, with `block` in the place of [`Block::forward`].
    pub fn forward_only(
        &self,
        x: &Tensor,
        context: &mut Context,
        mut block: impl FnMut(usize, &Block, &Tensor, &mut Context) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let mut x = match &self.embedding {
            Some(embedding) => embedding.forward(x)?,
            None => x.clone(),
        };
        forward_blocks(&self.blocks, context, |i, each, context| {
            x = block(i, each, &x, context)?;
            Ok(())
        })?;
        match &self.head {
            Some(head) => Ok(head.norm.forward(&x, context)?.0),
            None => Ok(x),
        }
    }

    /// The norm before the head, and the weight of the head, of a stage that ends with them.
    fn head_mut(&mut self) -> Option<(&mut Norm, &mut Param)> {
        let Head { norm, weight } = self.head.as_mut()?;
        let weight = weight.as_mut().or(self.embedding.as_mut().map(|embedding| &mut embedding.table))?;
        Some((norm, weight))
    }

    /// The weight of the head, `[V, C]`, of a stage that ends with it.
    pub fn head_weight(&self) -> Option<&Param> {
        let weight = self.head.as_ref()?.weight.as_ref();
        weight.or(self.embedding.as_ref().map(|embedding| &embedding.table))
    }

    /// Losses `[T]` of I32 `targets` `[T]` after `normed` from [`Stage::forward`], and the gradient of `scale · Σ losses` by it; adds to
    /// the gradient of the head. `None` for a stage without the head.
    pub fn losses_and_gradient(
        &mut self,
        normed: &Tensor,
        targets: &Tensor,
        scale: &Tensor,
        sink: &mut dyn GradientSink,
    ) -> Result<Option<(Tensor, Tensor)>> {
        let Some((_, weight)) = self.head_mut() else { return Ok(None) };
        sink.begin(&mut [&mut *weight])?;
        Head::losses_and_gradient(normed, weight, targets, scale).map(Some)
    }

    /// Backward of a micro-batch, from the gradient `dy` `[T, C]` by what forward returned: adds to the gradients of all parameters, and
    /// returns the gradient by what forward read, or `None` where those were token ids.
    pub fn backward(
        &mut self,
        dy: Tensor,
        saved: StageSaved,
        context: &mut Context,
        sink: &mut dyn GradientSink,
    ) -> Result<Option<Tensor>> {
        let StageSaved { ids, mut blocks, inputs, norm } = saved;
        let dy = match (&mut self.head, norm) {
            (Some(head), Some(saved)) => {
                let dy = head.norm.backward(&dy, saved)?;
                sink.end(&mut head.parameters_mut())?;
                dy
            }
            _ => dy,
        };
        let mut dx = Some(ResidualGradient::from(dy));
        // The gradient that leaves a block is cast first by the block before it.
        let readers: Vec<_> = self.blocks.iter().map(Block::gradient).collect();
        backward_blocks(&mut self.blocks, &inputs, context, |i, block, input, context| {
            let saved = match input {
                Some(input) => BlockSaved::Input(input),
                None => blocks.pop().expect("forward has saved something for each block"),
            };
            let next = i.checked_sub(1).map_or(OperandCast::NONE, |before| readers[before]);
            let dy = dx.take().expect("each block leaves one");
            sink.begin(&mut parameters_of(block))?;
            dx = Some(block.backward(dy, saved, &next, context)?);
            sink.end(&mut parameters_of(block))
        })?;
        self.residuals.give_back(inputs);
        let dx = dx.expect("as above").value;
        match (&mut self.embedding, ids) {
            (Some(embedding), Some(ids)) => {
                sink.begin(&mut [&mut embedding.table])?;
                embedding.backward(&dx, &ids)?;
                sink.end(&mut [&mut embedding.table])?;
                Ok(None)
            }
            _ => Ok(Some(dx)),
        }
    }

    /// All parameters, always in the same order.
    pub fn parameters_mut(&mut self) -> Vec<&mut Param> {
        self.units_mut().into_iter().flatten().collect()
    }

    /// The parameters of each unit: the embedding, each block, the last norm and the head.
    pub fn units_mut(&mut self) -> Vec<Vec<&mut Param>> {
        let embedding = self.embedding.iter_mut().map(|embedding| vec![&mut embedding.table]);
        let head = self.head.iter_mut().map(Head::parameters_mut);
        embedding.chain(self.blocks.iter_mut().map(parameters_of)).chain(head).collect()
    }
}

fn parameters_of(block: &mut Block) -> Vec<&mut Param> {
    let mut all = Vec::new();
    block.parameters_mut(&mut |param| all.push(param));
    all
}

fn block(build: &mut Builder, c: &DecoderConfig, index: usize, table: &Tensor) -> Result<Block> {
    let name = format!("model.layers.{index}");
    build.block = Some((index, c.layers));
    let attention = AttentionConfig {
        channels: c.channels,
        heads: c.heads,
        kv_heads: c.kv_heads,
        head_dim: c.head_dim,
        qk_norm_eps: c.qk_norm.then_some(c.norm_eps),
        qkv_bias: c.qkv_bias,
        output_bias: c.output_bias,
        std: c.init_std,
    };
    let mlp = MlpConfig { channels: c.channels, hidden: c.hidden, bias: c.mlp_bias, std: c.init_std };
    let norm = |build: &mut Builder, part: &str| Norm::new(build, &format!("{name}.{part}"), c.channels, c.norm_eps);
    Ok(Block {
        attention: Branch {
            norm: norm(build, "input_layernorm")?,
            sublayer: Attention::new(build, &format!("{name}.self_attn"), attention, table.clone(), None)?,
        },
        mlp: Branch {
            norm: norm(build, "post_attention_layernorm")?,
            sublayer: Mlp::new(build, &format!("{name}.mlp"), mlp, None)?,
        },
    })
}
