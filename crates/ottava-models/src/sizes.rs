//! What a decoder is, common to all families.

use crate::layers::{ExpertsSpec, HeadsSpec, LatentSpec, MlpSpec, Stream};
use crate::spec::{LayerSpec, SublayerSpec, expect_positive, expect_sizes};
use crate::{RopeKind, RopeScaling};
use ottava_recipe::lora::{Lora, Targets};

/// A decoder: an embedding, layers on a residual stream, and a head.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Tokens `V`.
    pub vocabulary: usize,
    /// The maximum number of positions.
    pub max_positions: usize,
    /// The residual stream.
    pub stream: Stream,
    /// The embedding.
    pub embedding: EmbeddingSpec,
    /// The rotary positions that layers have, as [`RopeSpec`](super::RopeSpec) numbers them: the rotary positions of the model first, then the
    /// rotary positions of layers with a window, if these layers have others. Empty without rotary positions.
    pub ropes: Vec<RopeScaling>,
    /// The layers, in the order of forward.
    pub layers: Vec<LayerSpec>,
    /// The head.
    pub head: HeadSpec,
    /// What concerns its folder alone.
    pub folder: FolderNotes,
    /// Adapters of the blocks' linears, which are trained instead of the model; not part of `config.json`.
    pub lora: Option<Lora>,
}

/// The embedding of a decoder.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmbeddingSpec {
    /// The factor of its rows, which is rounded to the compute type.
    pub scale: f32,
    /// Whether a learned row per position is added.
    pub learned_positions: bool,
}

/// The head of a decoder.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadSpec {
    /// Whether it shares the embedding's table.
    pub tied: bool,
    /// The factor of logits.
    pub scale: f32,
    /// The bound of the absolute values of logits.
    pub cap: Option<f64>,
    /// Whether it computes the score of a reward model instead of logits.
    pub score: bool,
    /// The share of the target distribution that the loss spreads evenly over the vocabulary; not part of `config.json`.
    pub label_smoothing: f64,
    /// Whether the loss reads logits in F32, as draws do; not part of `config.json`.
    pub wide_logits: bool,
}

/// What the folder of a decoder has that is not built.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FolderNotes {
    /// Layers behind the last one that a folder may have and nothing reads: the layers that predict further tokens.
    pub skipped_layers: usize,
    /// A sentence for each key of `config.json` that is ignored.
    pub ignored: Vec<String>,
    /// A sentence for each key of `config.json` that changes training alone and is not implemented.
    pub untrainable: Vec<String>,
}

/// More experts in all layers than any model has, but few enough to be planned within seconds.
const MAX_EXPERTS: usize = 1 << 17;

impl DecoderConfig {
    /// A decoder without layers on a `stream`, whose head has a table of its own.
    pub fn new(vocabulary: usize, max_positions: usize, stream: Stream) -> DecoderConfig {
        DecoderConfig {
            vocabulary,
            max_positions,
            stream,
            embedding: EmbeddingSpec { scale: 1.0, learned_positions: false },
            ropes: Vec::new(),
            layers: Vec::new(),
            head: HeadSpec {
                tied: false,
                scale: 1.0,
                cap: None,
                score: false,
                label_smoothing: 0.0,
                wide_logits: false,
            },
            folder: FolderNotes::default(),
            lora: None,
        }
    }

    /// The same decoder with `count` layers: its first ones, and all of them again if it has fewer.
    pub fn with_layers(self, count: usize) -> DecoderConfig {
        let layers = self.layers.iter().cycle().take(count).cloned().collect();
        DecoderConfig { layers, ..self }
    }

    /// The sublayers of all layers, in the order of forward.
    pub fn sublayers(&self) -> impl Iterator<Item = &SublayerSpec> {
        self.layers.iter().flat_map(LayerSpec::sublayers)
    }

    /// [`DecoderConfig::sublayers`], mutably.
    pub fn sublayers_mut(&mut self) -> impl Iterator<Item = &mut SublayerSpec> {
        self.layers.iter_mut().flat_map(|layer| &mut layer.branches).flat_map(|branch| &mut branch.sublayers)
    }

    /// The attention with heads of its own of each layer that has one.
    pub fn heads_mut(&mut self) -> impl Iterator<Item = &mut HeadsSpec> {
        self.sublayers_mut().filter_map(|sublayer| match sublayer {
            SublayerSpec::Heads(heads, _) => Some(heads),
            _ => None,
        })
    }

    /// The experts of each layer that has some.
    pub fn experts_mut(&mut self) -> impl Iterator<Item = &mut ExpertsSpec> {
        self.sublayers_mut().filter_map(|sublayer| match sublayer {
            SublayerSpec::Experts(experts) => Some(experts),
            _ => None,
        })
    }

    /// The attention of the first layer with heads of its own.
    pub fn heads(&self) -> Option<&HeadsSpec> {
        self.layers.iter().find_map(LayerSpec::heads)
    }

    /// The latent attention of the first layer that has it.
    pub fn latent(&self) -> Option<&LatentSpec> {
        self.layers.iter().find_map(LayerSpec::latent)
    }

    /// The MLP of the first layer that has one.
    pub fn mlp(&self) -> Option<&MlpSpec> {
        self.layers.iter().find_map(LayerSpec::mlp)
    }

    /// The experts of the first layer that has some.
    pub fn experts(&self) -> Option<&ExpertsSpec> {
        self.layers.iter().find_map(LayerSpec::experts)
    }

    /// Whether a layer has sublayers that read one operand.
    pub fn shares_operands(&self) -> bool {
        self.layers.iter().any(LayerSpec::shares_operands)
    }

    /// The rotary positions of the model; `None` without.
    pub fn rope(&self) -> Option<&RopeScaling> {
        self.ropes.first()
    }

    /// Problems of these sizes, a sentence each.
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
        // Also rotary positions that no layer has.
        let dim = self.sublayers().map(SublayerSpec::rotary_dim).find(|dim| *dim > 0);
        dim.map_or(Ok(()), |dim| self.ropes.iter().try_for_each(|rope| rope.check(dim)))
    }

    /// These sizes, whose adapters of all linears are none of MLPs and shared experts beside experts: PEFT takes such names for the names of the
    /// experts, and does not load them.
    pub fn with_adapters_beside_experts(mut self) -> DecoderConfig {
        let shared = self.experts().is_some_and(|experts| experts.shared.is_some());
        let has_both = self.experts().is_some() && (shared || self.mlp().is_some());
        let names = self.stream.names;
        let (Some(lora), true) = (&mut self.lora, has_both) else { return self };
        let linears: Vec<String> = names.gate_up.iter().chain([&names.down]).map(|name| name.to_string()).collect();
        let listed = linears.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        if lora.targets == Targets::AllLinear && lora.exceptions.exclude == Targets::NONE {
            lora.exceptions.exclude = Targets::Names(linears);
            self.folder.ignored.push(format!(
                "{listed} have no adapters with \"all-linear\": PEFT does not load them for a model with experts; name them in \
                 `lora.target_modules` to train them all the same"
            ));
        } else if linears.iter().any(|name| lora.has(&format!("{}.0.{}.{name}", names.blocks, names.mlp))) {
            self.folder.ignored.push(format!(
                "adapters of {listed} are not loaded by PEFT for a model with experts; `ottava merge` makes a model of them"
            ));
        }
        self
    }

    /// The longest sequence: `max_position_embeddings`, or more where rotary positions are stretched to a multiple of it.
    pub fn context(&self) -> usize {
        let stretched = self.rope().map_or(0.0, |rope| match &rope.kind {
            RopeKind::Dynamic { factor } => self.max_positions as f64 * factor,
            RopeKind::Yarn(yarn) => yarn.original_max_positions * yarn.factor,
            RopeKind::Default | RopeKind::Linear { .. } | RopeKind::Llama3 { .. } | RopeKind::LongRope(_) => 0.0,
        });
        self.max_positions.max(stretched as usize)
    }

    /// Whether embedding, residual branches, attention scores or logits have factors or soft caps of their own.
    pub fn has_factors(&self) -> bool {
        let factors = [self.embedding.scale, self.stream.residual_scale, self.head.scale];
        let of_scores = self.sublayers().any(|sublayer| sublayer.score_factors() != [None; 2]);
        factors != [1.0; 3] || self.head.cap.is_some() || of_scores
    }
}
