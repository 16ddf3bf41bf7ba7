//! The decoder that all families share: embedding, blocks, norm, head.

use super::RopeScaling;
use super::through::{Pass, Residuals, through};
use crate::error::{Error, Result};
use crate::layer::{Context, GemmInput, Layer};
use crate::layers::{Attention, AttentionConfig, Block, BlockSaved, Embedding, Head, KvCache, Mlp, Norm, NormSaved};
use crate::param::{Builder, Init, Kept, Param, Part, Purpose, WeightSource};
use crate::recipe::{Decision, LinearSite, Recipe};
use crate::recompute::{Recompute, SavedActivations};
use crate::scaling::{ScalingState, Slots};
use ottava_tensor::ops::{real_type, rope_table};
use ottava_tensor::{Crossing, Device, Tensor};

/// Sizes of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Tokens `V`.
    pub vocabulary: usize,
    /// Width `C` of the residual stream.
    pub channels: usize,
    /// Width `F` of the feed-forward layers.
    pub hidden: usize,
    /// Blocks.
    pub layers: usize,
    /// Query heads `H`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Size `D` of a head.
    pub head_dim: usize,
    /// Positions the model was made for.
    pub max_positions: usize,
    /// Epsilon of the norms.
    pub norm_eps: f64,
    /// Whether the head shares the embedding's table.
    pub tied: bool,
    /// Standard deviation of initial weights.
    pub init_std: f32,
    /// Rotary positions.
    pub rope: RopeScaling,
    /// Biases on queries, keys and values.
    pub qkv_bias: bool,
    /// Bias on the attention's output.
    pub output_bias: bool,
    /// Biases in the MLP.
    pub mlp_bias: bool,
    /// Tokens that attention looks back, if limited; sequences must not be longer.
    pub window: Option<usize>,
}

/// One linear of a model, for plans and parameter counts.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearShape {
    /// Its name in the scaling state, without the block's number: `self_attn.qkv_proj`.
    pub name: &'static str,
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
    /// Whether it has a bias.
    pub bias: bool,
    /// The names, in a model folder, of the linears that it stacks.
    pub parts: &'static [&'static str],
    /// Whether its input is what SwiGLU gives.
    pub after_swiglu: bool,
}

impl DecoderConfig {
    /// The linears of one block.
    pub fn block_linears(&self) -> [LinearShape; 4] {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        [
            LinearShape {
                name: "self_attn.qkv_proj",
                n: q + 2 * kv,
                k: self.channels,
                bias: self.qkv_bias,
                parts: &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
                after_swiglu: false,
            },
            LinearShape {
                name: "self_attn.o_proj",
                n: self.channels,
                k: q,
                bias: self.output_bias,
                parts: &["self_attn.o_proj"],
                after_swiglu: false,
            },
            LinearShape {
                name: "mlp.gate_up_proj",
                n: 2 * self.hidden,
                k: self.channels,
                bias: self.mlp_bias,
                parts: &["mlp.gate_proj", "mlp.up_proj"],
                after_swiglu: false,
            },
            LinearShape {
                name: "mlp.down_proj",
                n: self.channels,
                k: self.hidden,
                bias: self.mlp_bias,
                parts: &["mlp.down_proj"],
                after_swiglu: true,
            },
        ]
    }

    /// All linears of the blocks, block by block.
    pub fn sites(&self) -> Vec<LinearSite> {
        let site = |block: usize, linear: &LinearShape| LinearSite {
            name: format!("model.layers.{block}.{}", linear.name),
            parts: linear.parts.iter().map(|part| format!("model.layers.{block}.{part}")).collect(),
            outputs: linear.n,
            inputs: linear.k,
            block: Some((block, self.layers)),
            after_swiglu: linear.after_swiglu,
        };
        let linears = self.block_linears();
        (0..self.layers).flat_map(|block| linears.iter().map(move |linear| site(block, linear))).collect()
    }

    /// What `recipe` does with each linear, block by block, in the order of [`DecoderConfig::block_linears`].
    ///
    /// Errors when its exceptions do not fit this model.
    pub fn decide(&self, recipe: &Recipe) -> Result<Vec<[Decision; 4]>> {
        let sites = self.sites();
        recipe.check(&sites, &["lm_head", "model.embed_tokens"])?;
        let decisions = sites.iter().map(|site| recipe.decide(site)).collect::<Result<Vec<_>>>()?;
        Ok(decisions.chunks_exact(4).map(|block| block.to_vec().try_into().expect("four linears a block")).collect())
    }

    /// Number of trained values.
    pub fn parameters(&self) -> usize {
        let linear = |l: &LinearShape| l.n * (l.k + usize::from(l.bias));
        let block: usize = self.block_linears().iter().map(linear).sum::<usize>() + 2 * self.channels;
        let tables = if self.tied { 1 } else { 2 };
        tables * self.vocabulary * self.channels + self.layers * block + self.channels
    }

    /// Floating-point operations of forward and backward per token, at sequences of `seq_len`: six per weight of a product, and
    /// causal attention; recomputation and norms are not counted.
    pub fn flops_per_token(&self, seq_len: usize) -> f64 {
        let products: usize = self.block_linears().iter().map(|l| l.n * l.k).sum::<usize>() * self.layers;
        let attention = self.layers * self.heads * self.head_dim * seq_len;
        6.0 * (products + self.vocabulary * self.channels) as f64 + 6.0 * attention as f64
    }

    /// What is impossible about these sizes.
    pub fn check(&self) -> Result<(), String> {
        let sizes = [
            ("vocab_size", self.vocabulary),
            ("hidden_size", self.channels),
            ("intermediate_size", self.hidden),
            ("num_hidden_layers", self.layers),
            ("num_attention_heads", self.heads),
            ("num_key_value_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("max_position_embeddings", self.max_positions),
        ];
        for (key, value) in sizes {
            if value == 0 || value > 1 << 24 {
                return Err(format!("`{key}` is {value}"));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(format!(
                "`num_attention_heads` {} is not a multiple of `num_key_value_heads` {}",
                self.heads, self.kv_heads
            ));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(format!("`head_dim` {} is odd; rotary positions pair its halves", self.head_dim));
        }
        Ok(())
    }
}

/// A decoder with its weights and the scaling state of its casts.
pub struct Decoder {
    config: DecoderConfig,
    device: Device,
    recipe: Recipe,
    recompute: Recompute,
    saved_activations: SavedActivations,
    residuals: Residuals,
    embedding: Embedding,
    blocks: Vec<Block>,
    norm: Norm,
    /// The head's own weight, unless it is tied to the embedding.
    head: Option<Param>,
    scaling: ScalingState,
}

impl Decoder {
    /// Builds the model on `device`, with values from `weights`, for sequences up to `seq_len`.
    pub fn new(
        config: &DecoderConfig,
        recipe: &Recipe,
        device: &Device,
        purpose: Purpose,
        seq_len: usize,
        weights: &mut dyn WeightSource,
    ) -> Result<Decoder> {
        if let Some(window) = config.window.filter(|&window| seq_len > window) {
            return Err(Error::Model(format!(
                "the model attends to a sliding window of {window} tokens, which is not implemented; keep sequences of {seq_len} within it"
            )));
        }
        config.decide(recipe)?;
        let frequencies = config.rope.inverse_frequencies(config.head_dim);
        let table = rope_table(device, &frequencies, seq_len, real_type(recipe.compute))?;
        let mut build = Builder { device, recipe, purpose, weights, slots: Slots::default(), block: None };
        let c = config;
        recipe.expect_on(device)?;
        let embedding = Embedding::new(&mut build, "model.embed_tokens", c.vocabulary, c.channels, c.init_std)?;
        let blocks = (0..c.layers).map(|i| block(&mut build, c, i, &table)).collect::<Result<Vec<_>>>()?;
        build.block = None;
        let norm = Norm::new(&mut build, "model.norm", c.channels, c.norm_eps)?;
        let head = match c.tied {
            true => None,
            false => {
                let part = Part { name: "lm_head.weight".into(), shape: vec![c.vocabulary, c.channels] };
                Some(Param::new(&mut build, vec![part], Init::Normal(c.init_std))?)
            }
        };
        let scaling = ScalingState::new(device, build.slots)?;
        let (config, device, recipe) = (config.clone(), device.clone(), recipe.clone());
        let kept = match purpose {
            Purpose::Train(kept) => kept,
            Purpose::Infer => Kept::FULL,
        };
        let recompute = kept.recompute;
        // What a block that is run again keeps, backward consumes at once.
        let saved_activations = if recompute.blocks() { SavedActivations::Exact } else { kept.saved_activations };
        let residuals = Residuals::new(kept.offload_residuals && recompute.blocks(), &device);
        Ok(Decoder {
            config,
            device,
            recipe,
            recompute,
            saved_activations,
            residuals,
            embedding,
            blocks,
            norm,
            head,
            scaling,
        })
    }

    /// Its sizes.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Its precision.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// Where it lies.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The scaling state of its casts.
    pub fn scaling(&mut self) -> &mut ScalingState {
        &mut self.scaling
    }

    /// All parameters, always in the same order.
    pub fn parameters(&mut self) -> Vec<&mut Param> {
        self.parameters_and_scaling().0
    }

    /// All parameters, and the scaling state of all casts.
    pub fn parameters_and_scaling(&mut self) -> (Vec<&mut Param>, &mut ScalingState) {
        let mut all = Vec::new();
        let mut visit = |param| all.push(param);
        visit(&mut self.embedding.table);
        for block in &mut self.blocks {
            block.parameters(&mut visit);
        }
        visit(&mut self.norm.weight);
        if let Some(head) = &mut self.head {
            visit(head);
        }
        (all, &mut self.scaling)
    }

    /// Casts all weights with the current scales, to be called after building and loading; updates cast the weights they make.
    pub fn quantize_weights(&mut self) -> Result<()> {
        // These casts belong to the coming step, also where an evaluation went before.
        self.scaling.observe(true);
        let (params, scaling) = self.parameters_and_scaling();
        params.into_iter().try_for_each(|param| param.quantize(scaling))?;
        // What they lose counts for no step, since the step before may have been another process.
        self.scaling.losses().map(drop)
    }

    /// Losses `[batch · seq_len]` of I32 `targets` after I32 `inputs`, without gradients; leaves no trace in the scaling state.
    pub fn losses(&mut self, inputs: &Tensor, targets: &Tensor, batch: usize) -> Result<Tensor> {
        self.scaling.observe(false);
        let mut context = Context {
            batch,
            seq_len: inputs.len() / batch,
            training: false,
            recompute: Recompute::None,
            saved_activations: SavedActivations::Exact,
            scaling: &mut self.scaling,
        };
        let mut x = self.embedding.forward(inputs)?;
        through(Pass::Forward, &mut self.blocks, &mut [], &mut context, |_, block, _, context| {
            x = block.forward(x.clone(), context)?.0;
            Ok(())
        })?;
        let (x, _) = final_norm(&self.norm, &x, &mut context)?;
        let weight = self.head.as_ref().unwrap_or(&self.embedding.table);
        Head::losses(&x, weight, targets)
    }

    /// Losses `[batch · seq_len]`, and adds the gradient of `scale · Σ losses` to all parameters' gradients.
    pub fn losses_and_gradients(
        &mut self,
        inputs: &Tensor,
        targets: &Tensor,
        batch: usize,
        scale: f64,
    ) -> Result<Tensor> {
        self.scaling.observe(true);
        let mut context = Context {
            batch,
            seq_len: inputs.len() / batch,
            training: true,
            recompute: self.recompute,
            saved_activations: self.saved_activations,
            scaling: &mut self.scaling,
        };
        let forward = self.device.scope("forward");
        let mut x = self.embedding.forward(inputs)?;
        let mut saved = Vec::with_capacity(self.blocks.len());
        let residuals = self.residuals.slots(self.blocks.len(), &x)?;
        let mut leaving = Crossing::default();
        through(Pass::Forward, &mut self.blocks, residuals, &mut context, |_, block, slot, context| {
            let input = x.clone();
            if let Some(slot) = slot {
                std::mem::replace(&mut leaving, Crossing::store(input.clone(), slot)?).wait()?;
                x = block.forward(input, context)?.0;
            } else {
                let kept;
                (x, kept) = block.forward(input, context)?;
                saved.push(kept);
            }
            Ok(())
        })?;
        leaving.wait()?;
        let (normed, kept) = final_norm(&self.norm, &x, &mut context)?;
        drop(forward);
        let head = self.device.scope("head");
        let weight = self.head.as_mut().unwrap_or(&mut self.embedding.table);
        let (losses, dnormed) = Head::losses_and_gradient(&normed, weight, targets, scale)?;
        drop(head);
        let _backward = self.device.scope("backward");
        let mut dx = Some(GemmInput::Plain(self.norm.backward(&dnormed, kept, None)?));
        // What leaves a block is first cast by the block before it.
        let read_by: Vec<_> = self.blocks.iter().map(|block| block.gradient_slot(context.scaling)).collect();
        through(Pass::Backward, &mut self.blocks, residuals, &mut context, |i, block, slot, context| {
            let kept = match slot {
                Some(residual) => BlockSaved::Input(residual.clone()),
                None => saved.pop().expect("forward has saved something for each block"),
            };
            let next = i.checked_sub(1).and_then(|before| read_by[before]);
            let dy = dx.take().expect("each block leaves one");
            dx = Some(block.backward_for(dy, kept, next, context)?);
            Ok(())
        })?;
        self.embedding.backward(dx.expect("as above").value(), inputs)?;
        Ok(losses)
    }

    /// Logits `[T, V]` of every position of one sequence of I32 `ids` `[T]`.
    pub fn logits(&mut self, ids: &Tensor) -> Result<Tensor> {
        let mut caches = self.caches(ids.len())?;
        let x = self.forward_cached(ids, &mut caches, 0)?;
        Head::logits(&x, self.head.as_ref().unwrap_or(&self.embedding.table))
    }

    /// Empty caches for `capacity` tokens, one per block.
    pub fn caches(&self, capacity: usize) -> Result<Vec<KvCache>> {
        self.blocks.iter().map(|block| block.attention.cache(capacity, &self.embedding.table.value()?)).collect()
    }

    /// Logits `[1, V]` after the last of the new tokens `ids` `[T]`, at positions `start..`; `caches` hold the tokens before.
    pub fn next_logits(&mut self, ids: &Tensor, caches: &mut [KvCache], start: usize) -> Result<Tensor> {
        let x = self.forward_cached(ids, caches, start)?;
        let last = x.rows(ids.len() - 1, ids.len())?;
        Head::logits(&last, self.head.as_ref().unwrap_or(&self.embedding.table))
    }

    fn forward_cached(&mut self, ids: &Tensor, caches: &mut [KvCache], start: usize) -> Result<Tensor> {
        self.scaling.observe(false);
        let mut context = Context {
            batch: 1,
            seq_len: ids.len(),
            training: false,
            recompute: Recompute::None,
            saved_activations: SavedActivations::Exact,
            scaling: &mut self.scaling,
        };
        let mut x = self.embedding.forward(ids)?;
        through(Pass::Forward, &mut self.blocks, &mut [], &mut context, |i, block, _, context| {
            x = block.forward_cached(&x, &mut caches[i], start, context)?;
            Ok(())
        })?;
        Ok(final_norm(&self.norm, &x, &mut context)?.0)
    }
}

fn block(build: &mut Builder, c: &DecoderConfig, index: usize, table: &Tensor) -> Result<Block> {
    let name = format!("model.layers.{index}");
    build.block = Some((index, c.layers));
    let attention = AttentionConfig {
        channels: c.channels,
        heads: c.heads,
        kv_heads: c.kv_heads,
        head_dim: c.head_dim,
        qkv_bias: c.qkv_bias,
        output_bias: c.output_bias,
    };
    Ok(Block {
        attention_norm: Norm::new(build, &format!("{name}.input_layernorm"), c.channels, c.norm_eps)?,
        attention: Attention::new(build, &format!("{name}.self_attn"), attention, table.clone(), c.init_std)?,
        mlp_norm: Norm::new(build, &format!("{name}.post_attention_layernorm"), c.channels, c.norm_eps)?,
        mlp: Mlp::new(build, &format!("{name}.mlp"), c.channels, c.hidden, c.mlp_bias, c.init_std)?,
    })
}

/// The norm before the head, which reads it in high precision.
fn final_norm(norm: &Norm, x: &Tensor, context: &mut Context) -> Result<(Tensor, NormSaved)> {
    let (y, saved) = norm.forward(x, None, context)?;
    Ok((y.into_value(), saved))
}
