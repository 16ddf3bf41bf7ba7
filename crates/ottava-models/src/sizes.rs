//! The sizes and settings of a decoder, common to all families.

use crate::layers::{
    EmbeddingTailSpec, ExpertsSpec, HeadsSpec, LatentSpec, LayerEmbeddingsSpec, MlpSpec, PoolerSpec, ScoreSpec, Stream,
    within,
};
use crate::spec::{LayerSpec, SublayerSpec, expect_positive, expect_sizes};
use crate::{RopeKind, RopeScaling};
use ottava_recipe::lora::{Lora, Pattern, Targets};

/// The sizes and settings of a decoder: an embedding, layers on a residual stream, and a head.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// The number of tokens in the vocabulary, `V`.
    pub vocabulary: usize,
    /// The maximum number of positions.
    pub max_positions: usize,
    /// The residual stream.
    pub stream: Stream,
    /// The embedding.
    pub embedding: EmbeddingSpec,
    /// The rotary positions that layers refer to by index ([`RopeSpec`](super::RopeSpec)). The first entry is the model's. A second entry exists if
    /// layers with a window have different rotary positions. Empty without rotary positions.
    pub ropes: Vec<RopeScaling>,
    /// The layers, in the order of forward.
    pub layers: Vec<LayerSpec>,
    /// The head.
    pub head: HeadSpec,
    /// Notes about the model folder, which do not affect layers.
    pub folder: FolderNotes,
    /// The adapters of the blocks' linears, which are trained instead of the model. Not part of `config.json`.
    pub lora: Option<Lora>,
}

/// The embedding of a decoder.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmbeddingSpec {
    /// The factor of the embedding's rows, rounded to the compute type.
    pub scale: f32,
    /// Whether a learned row per position is added.
    pub learned_positions: bool,
    /// The row of position 0 in the table of learned positions.
    pub first_position: usize,
    /// The strength of the noise that training adds to the embedding ([`Embedding`](crate::layers::Embedding)); 0 adds none. Not part of
    /// `config.json`.
    pub noise: f64,
    /// The further embeddings of tokens, one for each layer. `None` without such embeddings.
    pub of_layers: Option<LayerEmbeddingsSpec>,
    /// The token types and the norm of an encoder. `None` without them.
    pub tail: Option<EmbeddingTailSpec>,
}

/// The head of a decoder.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadSpec {
    /// Whether the head shares the embedding's table.
    pub tied: bool,
    /// The factor of the logits.
    pub scale: f32,
    /// The bound of the absolute values of logits.
    pub cap: Option<f64>,
    /// The number of labels whose scores the head computes instead of logits, in a classifier. A reward model has one label.
    pub labels: Option<usize>,
    /// The names of the tensors of the scores.
    pub scores: ScoreSpec,
    /// The pooler of an encoder. `None` for decoders.
    pub pooler: Option<PoolerSpec>,
    /// Whether the activations before the head are pooled, and the head is not read. The head is then tied to the embedding, so it has no tensor. Not part
    /// of `config.json`.
    pub pooled: bool,
    /// The share of the target distribution that the loss spreads evenly over the vocabulary. Not part of `config.json`.
    pub label_smoothing: f64,
    /// Whether the loss reads logits in F32, like sampling. Not part of `config.json`.
    pub wide_logits: bool,
    /// Whether a value head beside the logits estimates the return of each token. Not part of `config.json`.
    pub value: bool,
}

/// The contents of a model folder that are not built.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FolderNotes {
    /// The beginnings of the names of tensors that a folder may have and that are copied: of layers that predict further tokens, and of indexers of
    /// sparse attention.
    pub carried: Vec<String>,
    /// The tensors without dimensions that a folder has for constants of the model, and their values.
    pub constants: Vec<(String, f32)>,
    /// A sentence for each key of `config.json` that is ignored.
    pub ignored: Vec<String>,
    /// A sentence for each key of `config.json` that is not implemented and changes only training.
    pub untrainable: Vec<String>,
    /// The beginnings of the names of tensors of other heads, which a folder may have and which are neither read nor copied.
    pub other_heads: Vec<&'static str>,
}

/// The maximum number of experts in all layers: more than any model has, but few enough to plan within seconds.
const MAX_EXPERTS: usize = 1 << 17;

impl DecoderConfig {
    /// Returns a decoder without layers on a `stream`. The head has a table of its own.
    pub fn new(vocabulary: usize, max_positions: usize, stream: Stream) -> DecoderConfig {
        DecoderConfig {
            vocabulary,
            max_positions,
            stream,
            embedding: EmbeddingSpec {
                scale: 1.0,
                learned_positions: false,
                first_position: 0,
                noise: 0.0,
                of_layers: None,
                tail: None,
            },
            ropes: Vec::new(),
            layers: Vec::new(),
            head: HeadSpec {
                tied: false,
                scale: 1.0,
                cap: None,
                labels: None,
                scores: ScoreSpec::OF_DECODERS,
                pooler: None,
                pooled: false,
                label_smoothing: 0.0,
                wide_logits: false,
                value: false,
            },
            folder: FolderNotes::default(),
            lora: None,
        }
    }

    /// Returns the decoder with `count` layers. They are its first layers. If it has fewer than `count` layers, its layers are repeated.
    pub fn with_layers(self, count: usize) -> DecoderConfig {
        let layers = self.layers.iter().cycle().take(count).cloned().collect();
        DecoderConfig { layers, ..self }
    }

    /// Returns the sublayers of all layers, in the order of forward.
    pub fn sublayers(&self) -> impl Iterator<Item = &SublayerSpec> {
        self.layers.iter().flat_map(LayerSpec::sublayers)
    }

    /// Returns the sublayers of all layers mutably, in the order of forward.
    pub fn sublayers_mut(&mut self) -> impl Iterator<Item = &mut SublayerSpec> {
        self.layers.iter_mut().flat_map(|layer| &mut layer.branches).flat_map(|branch| &mut branch.sublayers)
    }

    /// Returns the model whose folder may have this number of layers after the last one. They predict further tokens.
    pub(crate) fn with_further_layers(mut self, count: usize) -> DecoderConfig {
        let further = self.layers.len()..self.layers.len() + count;
        self.folder.carried.extend(further.map(|layer| format!("{}.{layer}.", self.stream.names.blocks)));
        self
    }

    /// Returns the model whose folder may have tensors with names that begin with `beginning`. They predict further tokens.
    pub(crate) fn with_carried(mut self, beginning: &str) -> DecoderConfig {
        self.folder.carried.push(beginning.to_string());
        self
    }

    /// Returns the multi-head attention of each layer that has one.
    pub fn heads_mut(&mut self) -> impl Iterator<Item = &mut HeadsSpec> {
        self.sublayers_mut().filter_map(|sublayer| match sublayer {
            SublayerSpec::Heads(heads, _) => Some(heads),
            _ => None,
        })
    }

    /// Returns the latent attention of each layer that has one.
    pub(crate) fn latents_mut(&mut self) -> impl Iterator<Item = &mut LatentSpec> {
        self.sublayers_mut().filter_map(|sublayer| match sublayer {
            SublayerSpec::Latent(latent, _) => Some(latent),
            _ => None,
        })
    }

    /// Returns the experts of each layer that has experts.
    pub fn experts_mut(&mut self) -> impl Iterator<Item = &mut ExpertsSpec> {
        self.sublayers_mut().filter_map(|sublayer| match sublayer {
            SublayerSpec::Experts(experts) => Some(experts),
            _ => None,
        })
    }

    /// Returns the model with the layout of experts that a model folder has: tensors of each expert, or stacks in one of two orders. `shape` returns the
    /// shape of a tensor of the folder. Layers whose experts the folder does not have keep their layout.
    pub fn with_experts_of(mut self, shape: impl Fn(&str) -> Option<Vec<usize>>) -> DecoderConfig {
        let Stream { names, channels, .. } = self.stream;
        for (index, layer) in self.layers.iter_mut().enumerate() {
            for sublayer in layer.branches.iter_mut().flat_map(|branch| &mut branch.sublayers) {
                let mixture = within(&format!("{}.{index}", names.blocks), sublayer.name(names));
                if let SublayerSpec::Experts(experts) = sublayer {
                    experts.stacks = experts.stacks_of(&mixture, names, channels, &shape);
                }
            }
        }
        self
    }

    /// Returns whether the model is an encoder: its tokens see later tokens, so it writes no text.
    pub fn is_encoder(&self) -> bool {
        self.heads().is_some_and(|heads| heads.both_directions)
    }

    /// Returns the multi-head attention of the first layer that has one.
    pub fn heads(&self) -> Option<&HeadsSpec> {
        self.layers.iter().find_map(LayerSpec::heads)
    }

    /// Returns the latent attention of the first layer that has one.
    pub fn latent(&self) -> Option<&LatentSpec> {
        self.layers.iter().find_map(LayerSpec::latent)
    }

    /// Returns the MLP of the first layer that has one.
    pub fn mlp(&self) -> Option<&MlpSpec> {
        self.layers.iter().find_map(LayerSpec::mlp)
    }

    /// Returns the experts of the first layer that has experts.
    pub fn experts(&self) -> Option<&ExpertsSpec> {
        self.layers.iter().find_map(LayerSpec::experts)
    }

    /// Returns the rotary positions of the model, or `None` if it has none.
    pub fn rope(&self) -> Option<&RopeScaling> {
        self.ropes.first()
    }

    /// Errors with a sentence if these sizes cannot be built.
    pub fn check(&self) -> Result<(), String> {
        expect_sizes(&[
            ("vocab_size", self.vocabulary),
            ("hidden_size", self.stream.channels),
            ("num_hidden_layers", self.layers.len()),
            ("max_position_embeddings", self.max_positions),
        ])?;
        expect_positive(&[
            ("the factor of the embedding", Some(f64::from(self.embedding.scale))),
            ("the factor of residual branches", Some(f64::from(self.stream.residual_scale))),
            ("the factor of logits", Some(f64::from(self.head.scale))),
            ("the soft cap of logits", self.head.cap),
        ])?;
        self.layers.iter().try_for_each(LayerSpec::check)?;
        let (layers, count) = (self.layers.len(), self.experts().map_or(0, |experts| experts.count));
        if count * layers > MAX_EXPERTS {
            let all = count * layers;
            return Err(format!(
                "{layers} layers of {count} experts are {all} experts; at most {MAX_EXPERTS} are possible"
            ));
        }
        // Checks also rotary positions that no layer uses.
        let dim = self.sublayers().map(SublayerSpec::rotary_dim).find(|dim| *dim > 0);
        dim.map_or(Ok(()), |dim| self.ropes.iter().try_for_each(|rope| rope.check(dim)))
    }

    /// Excludes dense MLPs and shared experts from "all-linear" adapters if the model has experts. PEFT takes names of MLPs and shared experts for names of
    /// experts, and does not load their adapters.
    pub fn with_adapters_beside_experts(mut self) -> DecoderConfig {
        let shared = self.experts().is_some_and(|experts| experts.shared.is_some());
        let has_both = self.experts().is_some() && (shared || self.mlp().is_some());
        let names = self.stream.names;
        let (Some(lora), true) = (&mut self.lora, has_both) else { return self };
        let linears: Vec<String> = names.gate_up.iter().chain([&names.down]).map(|name| name.to_string()).collect();
        let listed = linears.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        if lora.targets == Targets::AllLinear && lora.exceptions.exclude == Targets::NONE {
            // Routed experts keep their adapters.
            let text = format!("(?!.*[.]experts[.]).*[.](?:{})", linears.join("|"));
            lora.exceptions.exclude =
                Targets::Pattern(Pattern::new(&text).expect("names of linears have only letters"));
            self.folder.ignored.push(format!(
                "{listed} of dense MLPs and shared experts have no adapters with \"all-linear\": PEFT does not load them for a model with experts; name \
                 them in `lora.target_modules` to train them all the same"
            ));
        } else if linears.iter().any(|name| lora.has(&format!("{}.0.{}.{name}", names.blocks, names.mlp))) {
            self.folder.ignored.push(format!(
                "adapters of {listed} of dense MLPs and shared experts are not loaded by PEFT for a model with experts; `ottava merge` makes a model of \
                 them"
            ));
        }
        self
    }

    /// Returns whether the head reads the embedding's table. If adapters train the embedding or the head whole, each has a weight of its own, as in PEFT:
    /// the other module keeps the weight of the folder.
    pub fn ties_head(&self) -> bool {
        let names = self.stream.names;
        let saves = |lora: &Lora| [names.embedding, names.head].iter().any(|module| lora.saves(module));
        self.head.tied && !self.lora.as_ref().is_some_and(saves)
    }

    /// Returns the names of the head's weight and of the embedding's table, if the folder has one tensor for both and the model has two.
    pub fn divided_head(&self) -> Option<[String; 2]> {
        let names = self.stream.names;
        (self.head.tied && !self.ties_head())
            .then(|| [names.head, names.embedding].map(|name| format!("{name}.weight")))
    }

    /// Returns the longest sequence: the number of positions of config.json, or less if a sublayer is implemented only for shorter sequences.
    pub fn context(&self) -> usize {
        self.limit().map_or(self.positions(), |(tokens, _)| tokens)
    }

    /// Returns a clause that says why sequences have at most [`DecoderConfig::context`] tokens.
    pub fn context_reason(&self) -> String {
        match self.limit() {
            Some((tokens, reason)) => format!("{reason}, {tokens} tokens"),
            None => format!("config.json gives the model {} positions (`max_position_embeddings`)", self.positions()),
        }
    }

    /// Returns the smallest maximum of tokens of all sublayers with its reason, if it is below the number of positions.
    fn limit(&self) -> Option<(usize, &'static str)> {
        let smallest = self.sublayers().filter_map(SublayerSpec::limit).min_by_key(|(tokens, _)| *tokens);
        smallest.filter(|(tokens, _)| *tokens < self.positions())
    }

    /// Returns the number of positions: `max_position_embeddings`, or more if rotary scaling stretches positions to a multiple of it.
    fn positions(&self) -> usize {
        let stretched = self.rope().map_or(0.0, |rope| match &rope.kind {
            RopeKind::Dynamic { factor } => self.max_positions as f64 * factor,
            RopeKind::Yarn(yarn) => yarn.original_max_positions * yarn.factor,
            RopeKind::Default
            | RopeKind::Linear { .. }
            | RopeKind::Llama3 { .. }
            | RopeKind::LongRope(_)
            | RopeKind::Proportional { .. } => 0.0,
        });
        self.max_positions.max(stretched as usize)
    }

    /// Returns whether embedding, residual branches, attention scores or logits have factors or soft caps.
    pub fn has_factors(&self) -> bool {
        let factors = [self.embedding.scale, self.stream.residual_scale, self.head.scale];
        let of_scores = self.sublayers().any(|sublayer| sublayer.score_factors() != [None; 2]);
        factors != [1.0; 3] || self.head.cap.is_some() || of_scores
    }
}
