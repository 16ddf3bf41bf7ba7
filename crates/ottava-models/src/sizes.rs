//! The sizes of a decoder, common to all families.

use crate::layers::{ExpertsConfig, LLAMA, LatentSizes, Names, NormScope};
use crate::{LayerSet, RopeKind, RopeScaling};
use ottava_recipe::lora::{Lora, Targets};
use ottava_tensor::ops::{Activation, NormKind, RopePairs};

/// How a model knows the positions of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Positions {
    /// It rotates queries and keys.
    Rotary(RopePairs),
    /// It adds a learned row per position to the embedding.
    Learned,
}

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
    /// The maximum number of positions.
    pub max_positions: usize,
    /// Epsilon of the norms.
    pub norm_eps: f64,
    /// Whether the head shares the embedding's table.
    pub tied: bool,
    /// Standard deviation of initial weights.
    pub init_std: f32,
    /// Rotary positions.
    pub rope: RopeScaling,
    /// Rotary positions of the layers `local`, if they differ from those of the others.
    pub local_rope: Option<RopeScaling>,
    /// The layers without rotary positions.
    pub unrotated: LayerSet,
    /// What is normalised of queries and keys before rotary positions, if anything is.
    pub qk_norm: Option<NormScope>,
    /// Biases on queries, keys and values.
    pub qkv_bias: bool,
    /// Bias on the attention's output.
    pub output_bias: bool,
    /// A learned logit of each query head in its softmax, whose probability is dropped.
    pub sinks: bool,
    /// Biases in the MLP.
    pub mlp_bias: bool,
    /// The sliding window of attention in the layers `local`, if any: the number of tokens that a token sees, itself included.
    pub window: Option<usize>,
    /// The layers with the window.
    pub local: LayerSet,
    /// The factor of products of queries and keys; `None` for `1 / √head_dim`.
    pub attention_scale: Option<f64>,
    /// The bound of the absolute values of attention scores.
    pub score_cap: Option<f64>,
    /// The norms.
    pub norm: NormKind,
    /// Whether norms have biases.
    pub norm_bias: bool,
    /// What the MLP computes between its linears.
    pub activation: Activation,
    /// Positions.
    pub positions: Positions,
    /// Whether attention and MLP are parallel and read one norm.
    pub parallel: bool,
    /// The factor of the embedding, which is rounded to the compute type.
    pub embedding_scale: f32,
    /// The factor of the outputs of attention and MLP, before they are added to the residual stream.
    pub residual_scale: f32,
    /// The factor of logits.
    pub logit_scale: f32,
    /// The bound of the absolute values of logits.
    pub logit_cap: Option<f64>,
    /// Whether the head computes the score of a reward model instead of logits.
    pub score: bool,
    /// Layers behind the last one that a folder may have and nothing reads: those that predict further tokens.
    pub skipped_layers: usize,
    /// The parts of heads of latent attention; `None` for heads of their own.
    pub latent: Option<LatentSizes>,
    /// The experts of the layers `routed`, in place of their MLPs.
    pub experts: Option<ExpertsConfig>,
    /// The layers with experts.
    pub routed: LayerSet,
    /// Names of tensors.
    pub names: &'static Names,
    /// A sentence for each key of `config.json` that is ignored.
    pub ignored: Vec<String>,
    /// A sentence for each key of `config.json` that changes training alone and is not implemented.
    pub untrainable: Vec<String>,
    /// The share of the target distribution that the loss spreads evenly over the vocabulary; not part of `config.json`.
    pub label_smoothing: f64,
    /// Adapters of the blocks' linears, which are trained instead of the model; not part of `config.json`.
    pub lora: Option<Lora>,
}

/// The largest size of a tensor.
pub(super) const MAX_SIZE: usize = 1 << 24;

/// More experts in all layers than any model has, but few enough to be planned within seconds.
const MAX_EXPERTS: usize = 1 << 17;

impl Default for DecoderConfig {
    /// Llama's blocks, without sizes.
    fn default() -> DecoderConfig {
        DecoderConfig {
            vocabulary: 0,
            channels: 0,
            hidden: 0,
            layers: 0,
            heads: 0,
            kv_heads: 0,
            head_dim: 0,
            max_positions: 2048,
            norm_eps: 1e-5,
            tied: false,
            init_std: 0.02,
            rope: RopeScaling::default(),
            local_rope: None,
            unrotated: LayerSet::None,
            qk_norm: None,
            qkv_bias: false,
            output_bias: false,
            sinks: false,
            mlp_bias: false,
            window: None,
            local: LayerSet::All,
            attention_scale: None,
            score_cap: None,
            norm: NormKind::Rms,
            norm_bias: false,
            activation: Activation::SwiGlu,
            positions: Positions::Rotary(RopePairs::Halves),
            parallel: false,
            embedding_scale: 1.0,
            residual_scale: 1.0,
            logit_scale: 1.0,
            logit_cap: None,
            score: false,
            skipped_layers: 0,
            latent: None,
            experts: None,
            routed: LayerSet::All,
            names: &LLAMA,
            ignored: Vec::new(),
            untrainable: Vec::new(),
            label_smoothing: 0.0,
            lora: None,
        }
    }
}

impl DecoderConfig {
    /// Problems of these sizes, a sentence each.
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
            if value == 0 || value > MAX_SIZE {
                return Err(format!("`{key}` is {value}"));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(format!(
                "`num_attention_heads` {} is not a multiple of `num_key_value_heads` {}",
                self.heads, self.kv_heads
            ));
        }
        let factors = [
            ("the factor of the embedding", Some(f64::from(self.embedding_scale))),
            ("the factor of residual branches", Some(f64::from(self.residual_scale))),
            ("the factor of logits", Some(f64::from(self.logit_scale))),
            ("the soft cap of logits", self.logit_cap),
            ("the soft cap of attention scores", self.score_cap),
            ("the factor of attention scores", self.attention_scale),
        ];
        for (what, factor) in factors {
            if let Some(factor) = factor.filter(|factor| !(factor.is_finite() && *factor > 0.0)) {
                return Err(format!("{what} is {factor}; it is a number above 0"));
            }
        }
        if let Some(latent) = self.latent {
            let sizes = [latent.kv_rank, latent.plain, latent.rotated, latent.value, latent.query_rank.unwrap_or(1)];
            if sizes.iter().any(|&size| size == 0 || size > MAX_SIZE) || latent.value > latent.head_dim() {
                return Err(format!(
                    "the sizes of latent attention are {latent:?}; all are above 0, and values fit into keys"
                ));
            }
        }
        self.experts.as_ref().map_or(Ok(()), |experts| self.check_experts(experts))?;
        if self.window == Some(0) {
            return Err("`sliding_window` is 0; a token sees itself with 1".into());
        }
        if self.positions != Positions::Learned {
            [Some(&self.rope), self.local_rope.as_ref()].into_iter().flatten().try_for_each(|r| self.check_rope(r))?;
        }
        Ok(())
    }

    /// These sizes, whose adapters of all linears are none of MLPs and shared experts beside experts: PEFT takes such names for those of the
    /// experts, and does not load them.
    pub fn with_adapters_beside_experts(mut self) -> DecoderConfig {
        let dense =
            |experts: &ExpertsConfig| experts.shared.is_some() || (0..self.layers).any(|i| !self.routed.contains(i));
        let (Some(lora), true) = (&mut self.lora, self.experts.as_ref().is_some_and(dense)) else { return self };
        let names: Vec<String> =
            self.names.gate_up.iter().chain([&self.names.down]).map(|name| name.to_string()).collect();
        let listed = names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        if lora.targets == Targets::AllLinear && lora.exceptions.exclude == Targets::NONE {
            lora.exceptions.exclude = Targets::Names(names);
            self.ignored.push(format!(
                "{listed} have no adapters with \"all-linear\": PEFT does not load them for a model with experts; name them in \
                 `lora.target_modules` to train them all the same"
            ));
        } else if names.iter().any(|name| lora.has(&format!("{}.0.{}.{name}", self.names.blocks, self.names.mlp))) {
            self.ignored.push(format!(
                "adapters of {listed} are not loaded by PEFT for a model with experts; `ottava merge` makes a model of them"
            ));
        }
        self
    }

    /// Elements of a head to which rotary positions apply, or a part of which they rotate.
    pub fn rotary_dim(&self) -> usize {
        self.latent.map_or(self.head_dim, |latent| latent.rotated)
    }

    /// The sliding window of the attention of the layer `index`.
    pub fn window_at(&self, index: usize) -> Option<usize> {
        self.window.filter(|_| self.local.contains(index))
    }

    /// The experts of the layer `index`; `None` if it has an MLP.
    pub fn experts_at(&self, index: usize) -> Option<&ExpertsConfig> {
        self.experts.as_ref().filter(|_| self.routed.contains(index))
    }

    /// The rotary positions of the layer `index`; `None` if it has none.
    pub fn rope_at(&self, index: usize) -> Option<&RopeScaling> {
        match (self.positions, &self.local_rope) {
            (Positions::Learned, _) => None,
            _ if self.unrotated.contains(index) => None,
            (_, Some(local)) if self.local.contains(index) => Some(local),
            _ => Some(&self.rope),
        }
    }

    /// The longest sequence: `max_position_embeddings`, or more where rotary positions are stretched to a multiple of it.
    pub fn context(&self) -> usize {
        let stretched = match &self.rope.kind {
            RopeKind::Dynamic { factor } => self.max_positions as f64 * factor,
            RopeKind::Yarn(yarn) => yarn.original_max_positions * yarn.factor,
            RopeKind::Default | RopeKind::Linear { .. } | RopeKind::Llama3 { .. } | RopeKind::LongRope(_) => 0.0,
        };
        self.max_positions.max(stretched as usize)
    }

    /// Whether embedding, residual branches, attention scores or logits have factors or soft caps of their own.
    pub fn has_factors(&self) -> bool {
        let factors = [self.embedding_scale, self.residual_scale, self.logit_scale];
        let options = [self.attention_scale, self.score_cap, self.logit_cap];
        factors != [1.0; 3] || options.iter().any(Option::is_some)
    }

    fn check_experts(&self, experts: &ExpertsConfig) -> Result<(), String> {
        let shared = experts.shared.map_or(1, |shared| shared.hidden);
        for (what, width) in [("an expert", experts.hidden), ("the shared expert", shared)] {
            if width == 0 || width > MAX_SIZE {
                return Err(format!("the width of {what} is {width}"));
            }
        }
        if let Some(problem) = experts.routing.problem(experts.count) {
            return Err(problem);
        }
        match experts.count * self.layers {
            all if all > MAX_EXPERTS => {
                let (count, layers) = (experts.count, self.layers);
                Err(format!("{layers} layers of {count} experts are {all} experts; at most {MAX_EXPERTS} are possible"))
            }
            _ => Ok(()),
        }
    }

    fn check_rope(&self, rope: &RopeScaling) -> Result<(), String> {
        let (partial, rotated) = (rope.partial, rope.rotated(self.rotary_dim()));
        if partial == 1.0 && !rotated.is_multiple_of(2) {
            return Err(format!("`head_dim` {rotated} is odd; rotary positions pair its halves"));
        }
        if !(partial > 0.0 && partial <= 1.0) || rotated == 0 || !rotated.is_multiple_of(2) {
            let (dim, rotates) = (self.head_dim, "rotary positions rotate an even number of elements");
            return Err(format!("`partial_rotary_factor` {partial} of `head_dim` {dim} is {rotated}; {rotates}"));
        }
        rope.kind.check(rotated)
    }
}
