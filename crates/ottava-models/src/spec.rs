//! The specs of layers: a layer is a list of residual branches, and a branch is one sublayer or the sum of several.
//!
//! A spec cannot hold settings without their owner: a window needs heads, and latent attention needs rotary positions.

use crate::layers::{
    BranchNorms, DeltaNetSpec, ExpertInput, ExpertsSpec, GatedEmbeddingSpec, HeadsSpec, LatentSpec, MambaSpec, MlpSpec,
    Names, XieluSpec,
};
use ottava_tensor::ops::{DeltaSpec, MAX_TAPS, RopePairs, SsdSpec};

/// The maximum size of a tensor's dimension.
pub(super) const MAX_SIZE: usize = 1 << 24;

/// The spec of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    /// The residual branches, in the order of forward.
    pub branches: Vec<BranchSpec>,
    /// Whether all branches read the input of the layer. Otherwise, each branch reads the output of the preceding branch.
    pub parallel: bool,
    /// The name in the block of a number that multiplies the output of the layer. `None` without such a number.
    pub scale: Option<&'static str>,
}

/// The spec of a residual branch: the sum of its sublayers, which read one operand.
#[derive(Clone, Debug, PartialEq)]
pub struct BranchSpec {
    /// The norms before and after the sublayers.
    pub norms: BranchNorms,
    /// The sublayers, in the order of forward.
    pub sublayers: Vec<SublayerSpec>,
    /// The factor of the output of each sublayer. Empty if all factors are 1.
    pub factors: Vec<f32>,
    /// The norms of each sublayer, inside the norms of the branch. Empty if no sublayer has norms of its own.
    pub sublayer_norms: Vec<BranchNorms>,
}

/// A sublayer with its settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SublayerSpec {
    /// Attention whose heads are projected from the residual stream, with or without rotary positions.
    Heads(HeadsSpec, Option<RopeSpec>),
    /// Latent attention. Rotary positions apply to a part of each head.
    Latent(LatentSpec, RopeSpec),
    /// A gated delta net.
    Delta(DeltaNetSpec),
    /// A Mamba-2 layer.
    Mamba(MambaSpec),
    /// An MLP, with or without a gate.
    Mlp(MlpSpec),
    /// An MLP without a gate, with the learned activation xIELU.
    Xielu(XieluSpec),
    /// A mixture of experts.
    Experts(ExpertsSpec),
    /// A gated MLP whose other factor is the per-layer embedding of the block.
    GatedEmbedding(GatedEmbeddingSpec),
}

/// The rotary positions of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeSpec {
    /// The index in [`DecoderConfig::ropes`](super::DecoderConfig::ropes).
    pub rope: usize,
    /// The elements of a head that are rotated as a pair.
    pub pairs: RopePairs,
}

impl BranchSpec {
    /// Returns a branch whose sublayers have factors of 1.
    pub fn new(norms: BranchNorms, sublayers: Vec<SublayerSpec>) -> BranchSpec {
        BranchSpec { norms, sublayers, factors: Vec::new(), sublayer_norms: Vec::new() }
    }
}

impl LayerSpec {
    /// Returns a layer of one branch.
    pub fn single(branch: BranchSpec) -> LayerSpec {
        LayerSpec::of(vec![branch])
    }

    /// Returns a layer of these branches, one after the other.
    pub fn of(branches: Vec<BranchSpec>) -> LayerSpec {
        LayerSpec { branches, parallel: false, scale: None }
    }

    /// Returns a layer of two branches, one after the other: attention, then an MLP or experts.
    pub fn sequential(names: &Names, [attention, mlp]: [SublayerSpec; 2]) -> LayerSpec {
        let branch = |norms, sublayer| BranchSpec::new(norms, vec![sublayer]);
        let branches = vec![branch(names.attention_norms, attention), branch(names.mlp_norms, mlp)];
        LayerSpec::of(branches)
    }

    /// Returns a layer of two branches with a norm each, which both read the input of the layer.
    pub fn parallel_branches(names: &Names, sublayers: [SublayerSpec; 2]) -> LayerSpec {
        LayerSpec { parallel: true, ..LayerSpec::sequential(names, sublayers) }
    }

    /// Returns a layer of one branch: the sum of attention and an MLP.
    pub fn parallel(names: &Names, sublayers: [SublayerSpec; 2]) -> LayerSpec {
        LayerSpec::single(BranchSpec::new(names.attention_norms, sublayers.to_vec()))
    }

    /// Returns the sublayers, in the order of forward.
    pub fn sublayers(&self) -> impl Iterator<Item = &SublayerSpec> {
        self.branches.iter().flat_map(|branch| &branch.sublayers)
    }

    /// Returns the multi-head attention of the layer, if it has one.
    pub fn heads(&self) -> Option<&HeadsSpec> {
        self.sublayers()
            .find_map(|sublayer| if let SublayerSpec::Heads(heads, _) = sublayer { Some(heads) } else { None })
    }

    /// Returns the latent attention of the layer, if it has one.
    pub fn latent(&self) -> Option<&LatentSpec> {
        self.sublayers()
            .find_map(|sublayer| if let SublayerSpec::Latent(latent, _) = sublayer { Some(latent) } else { None })
    }

    /// Returns the gated delta net of the layer, if it has one.
    pub fn delta(&self) -> Option<&DeltaNetSpec> {
        self.sublayers().find_map(|sublayer| if let SublayerSpec::Delta(delta) = sublayer { Some(delta) } else { None })
    }

    /// Returns the Mamba-2 layer of the layer, if it has one.
    pub fn mamba(&self) -> Option<&MambaSpec> {
        self.sublayers().find_map(|sublayer| if let SublayerSpec::Mamba(mamba) = sublayer { Some(mamba) } else { None })
    }

    /// Returns whether the layer keeps a state from token to token.
    pub fn is_recurrent(&self) -> bool {
        self.sublayers().any(|sublayer| matches!(sublayer, SublayerSpec::Delta(_) | SublayerSpec::Mamba(_)))
    }

    /// Returns the MLP of the layer, if it has one.
    pub fn mlp(&self) -> Option<&MlpSpec> {
        self.sublayers().find_map(|sublayer| if let SublayerSpec::Mlp(mlp) = sublayer { Some(mlp) } else { None })
    }

    /// Returns the experts of the layer, if it has experts.
    pub fn experts(&self) -> Option<&ExpertsSpec> {
        self.sublayers()
            .find_map(|sublayer| if let SublayerSpec::Experts(experts) = sublayer { Some(experts) } else { None })
    }

    /// Returns the rotary positions of the layer, if it has them.
    pub fn rope(&self) -> Option<RopeSpec> {
        self.sublayers().find_map(SublayerSpec::rope)
    }

    /// Returns the sliding window of the layer's attention, if it has one.
    pub fn window(&self) -> Option<usize> {
        self.heads().and_then(|heads| heads.window)
    }

    /// Errors with a sentence if the layer cannot be built.
    pub(super) fn check(&self) -> Result<(), String> {
        self.branches.iter().try_for_each(|branch| {
            // Other sublayers read the value of the operand, or cast it in another way, so they cannot share it.
            let shares = |sublayer: &SublayerSpec| {
                matches!(sublayer, SublayerSpec::Heads(..) | SublayerSpec::Mamba(_) | SublayerSpec::Mlp(_))
            };
            let factors = branch.factors.iter().map(|&factor| ("a factor of a sublayer", Some(f64::from(factor))));
            expect_positive(&factors.collect::<Vec<_>>())?;
            let are_apart = !branch.sublayer_norms.is_empty();
            if branch.sublayers.len() > 1 && !are_apart && !branch.sublayers.iter().all(shares) {
                return Err("latent attention, a gated delta net, an MLP with xIELU and experts beside another sublayer, which reads the same norm, are not implemented".into());
            }
            branch.sublayers.iter().try_for_each(SublayerSpec::check)
        })
    }
}

impl SublayerSpec {
    /// Returns the name of the sublayer in a block. It is empty if the tensors of the sublayer are in the block.
    pub fn name(&self, names: &Names) -> &'static str {
        match self {
            SublayerSpec::Heads(..) | SublayerSpec::Latent(..) => names.attention,
            SublayerSpec::Delta(_) | SublayerSpec::Mamba(_) => names.recurrent,
            SublayerSpec::Experts(ExpertsSpec { is_in_block: true, .. }) | SublayerSpec::GatedEmbedding(_) => "",
            SublayerSpec::Mlp(_) | SublayerSpec::Xielu(_) | SublayerSpec::Experts(_) => names.mlp,
        }
    }

    /// Returns the rotary positions of the sublayer, if it has them.
    pub fn rope(&self) -> Option<RopeSpec> {
        match self {
            SublayerSpec::Heads(_, rope) => *rope,
            SublayerSpec::Latent(_, rope) => Some(*rope),
            SublayerSpec::Delta(_)
            | SublayerSpec::Mamba(_)
            | SublayerSpec::Mlp(_)
            | SublayerSpec::Xielu(_)
            | SublayerSpec::Experts(_)
            | SublayerSpec::GatedEmbedding(_) => None,
        }
    }

    /// Returns the numbers of query heads and of key and value heads, or `None` if the sublayer is not attention.
    pub fn head_counts(&self) -> Option<[usize; 2]> {
        match self {
            SublayerSpec::Heads(heads, _) => Some([heads.heads, heads.kv_heads]),
            SublayerSpec::Latent(latent, _) => Some([latent.heads; 2]),
            SublayerSpec::Delta(_)
            | SublayerSpec::Mamba(_)
            | SublayerSpec::Mlp(_)
            | SublayerSpec::Xielu(_)
            | SublayerSpec::Experts(_)
            | SublayerSpec::GatedEmbedding(_) => None,
        }
    }

    /// Returns the number of elements of a head to which rotary positions apply, or 0 without heads. Rotary positions may rotate fewer elements.
    pub fn rotary_dim(&self) -> usize {
        match self {
            SublayerSpec::Heads(heads, _) => heads.head_dim,
            SublayerSpec::Latent(latent, _) => latent.sizes.rotated,
            SublayerSpec::Delta(_)
            | SublayerSpec::Mamba(_)
            | SublayerSpec::Mlp(_)
            | SublayerSpec::Xielu(_)
            | SublayerSpec::Experts(_)
            | SublayerSpec::GatedEmbedding(_) => 0,
        }
    }

    /// Returns the maximum number of tokens for which the sublayer is implemented and the reason, or `None` without a maximum.
    pub(super) fn limit(&self) -> Option<(usize, &'static str)> {
        match self {
            SublayerSpec::Heads(HeadsSpec { chunk, .. }, _) => {
                Some(((*chunk)?, "attention in chunks (`attention_chunk_size`) is implemented for texts of one chunk"))
            }
            SublayerSpec::Latent(LatentSpec { chosen_keys, .. }, _) => {
                let reason = "sparse attention is implemented for texts in which queries see all keys (`index_topk`)";
                Some(((*chosen_keys)?, reason))
            }
            SublayerSpec::Delta(_)
            | SublayerSpec::Mamba(_)
            | SublayerSpec::Mlp(_)
            | SublayerSpec::Xielu(_)
            | SublayerSpec::Experts(_)
            | SublayerSpec::GatedEmbedding(_) => None,
        }
    }

    /// Returns the factor and the soft cap of attention scores.
    pub fn score_factors(&self) -> [Option<f64>; 2] {
        match self {
            SublayerSpec::Heads(heads, _) => [heads.scale, heads.soft_cap],
            SublayerSpec::Latent(latent, _) => [latent.scale, None],
            SublayerSpec::Delta(_)
            | SublayerSpec::Mamba(_)
            | SublayerSpec::Mlp(_)
            | SublayerSpec::Xielu(_)
            | SublayerSpec::Experts(_)
            | SublayerSpec::GatedEmbedding(_) => [None; 2],
        }
    }

    fn check(&self) -> Result<(), String> {
        let [scale, cap] = self.score_factors();
        expect_positive(&[("the soft cap of attention scores", cap), ("the factor of attention scores", scale)])?;
        match self {
            SublayerSpec::Heads(heads, _) => check_heads(heads),
            SublayerSpec::Latent(latent, _) => check_latent(latent),
            SublayerSpec::Delta(delta) => check_delta(delta),
            SublayerSpec::Mamba(mamba) => check_mamba(mamba),
            SublayerSpec::Mlp(mlp) => expect_sizes(&[("intermediate_size", mlp.hidden)]),
            SublayerSpec::Xielu(mlp) => expect_sizes(&[("intermediate_size", mlp.hidden)]),
            SublayerSpec::Experts(experts) => check_experts(experts),
            SublayerSpec::GatedEmbedding(spec) => expect_sizes(&[("hidden_size_per_layer_input", spec.width)]),
        }
    }
}

/// Errors unless each size is above 0 and at most [`MAX_SIZE`]. Each size comes with the name of its key.
pub(super) fn expect_sizes(sizes: &[(&str, usize)]) -> Result<(), String> {
    match sizes.iter().find(|(_, size)| *size == 0 || *size > MAX_SIZE) {
        Some((key, size)) => Err(format!("`{key}` is {size}")),
        None => Ok(()),
    }
}

/// Errors unless each factor that is set is finite and above 0. Each factor comes with its name.
pub(super) fn expect_positive(factors: &[(&str, Option<f64>)]) -> Result<(), String> {
    let wrong = |factor: f64| !(factor.is_finite() && factor > 0.0);
    match factors.iter().find_map(|(what, factor)| Some((what, factor.filter(|factor| wrong(*factor))?))) {
        Some((what, factor)) => Err(format!("{what} is {factor}; it is a number above 0")),
        None => Ok(()),
    }
}

fn check_heads(of: &HeadsSpec) -> Result<(), String> {
    let HeadsSpec { heads, kv_heads, head_dim, .. } = *of;
    expect_sizes(&[("num_attention_heads", heads), ("num_key_value_heads", kv_heads), ("head_dim", head_dim)])?;
    if !heads.is_multiple_of(kv_heads) {
        return Err(format!("`num_attention_heads` {heads} is not a multiple of `num_key_value_heads` {kv_heads}"));
    }
    Ok(())
}

fn check_latent(latent: &LatentSpec) -> Result<(), String> {
    expect_sizes(&[("num_attention_heads", latent.heads)])?;
    let of = latent.sizes;
    let sizes = [of.kv_rank, of.plain, of.rotated, of.value, of.query_rank.unwrap_or(1)];
    match sizes.iter().any(|&size| size == 0 || size > MAX_SIZE) || of.value > of.head_dim() {
        true => Err(format!("the sizes of latent attention are {of:?}; all are above 0, and values fit into keys")),
        false => Ok(()),
    }
}

fn check_delta(delta: &DeltaNetSpec) -> Result<(), String> {
    let DeltaSpec { key_heads, value_heads, key_dim, value_dim } = delta.heads;
    expect_sizes(&[
        ("linear_num_key_heads", key_heads),
        ("linear_num_value_heads", value_heads),
        ("linear_key_head_dim", key_dim),
        ("linear_value_head_dim", value_dim),
        ("linear_conv_kernel_dim", delta.taps),
    ])?;
    if !value_heads.is_multiple_of(key_heads) {
        return Err(format!(
            "`linear_num_value_heads` {value_heads} is not a multiple of `linear_num_key_heads` {key_heads}"
        ));
    }
    check_taps("`linear_conv_kernel_dim`", delta.taps)
}

fn check_taps(what: &str, taps: usize) -> Result<(), String> {
    match taps > MAX_TAPS {
        true => Err(format!("{what} is {taps}; at most {MAX_TAPS} taps are implemented")),
        false => Ok(()),
    }
}

fn check_mamba(mamba: &MambaSpec) -> Result<(), String> {
    let SsdSpec { heads, groups, head_dim, state_dim, dt_limits: [least, most] } = mamba.heads;
    expect_sizes(&[
        ("the number of heads of the state space", heads),
        ("the number of groups of the state space", groups),
        ("the size of a head of the state space", head_dim),
        ("the size of the state space", state_dim),
        ("the number of taps of the convolution", mamba.taps),
        ("the width of the state space", heads.saturating_mul(head_dim)),
        ("the width of the groups of the state space", groups.saturating_mul(state_dim)),
    ])?;
    if !heads.is_multiple_of(groups) {
        return Err(format!("{heads} heads of a state space do not divide into {groups} groups"));
    }
    // A comparison with NaN is false.
    if !(0.0 <= least && least <= most) {
        return Err(format!("the limits of time steps are {least} and {most}; they ascend from 0"));
    }
    let factors = mamba.factors.map(|factor| ("a factor of a state space", Some(f64::from(factor))));
    expect_positive(&factors)?;
    check_taps("the number of taps of the convolution", mamba.taps)
}

fn check_experts(experts: &ExpertsSpec) -> Result<(), String> {
    let latent = if let ExpertInput::Latent(width) = experts.input { width } else { 1 };
    let shared = experts.shared.map_or(1, |shared| shared.hidden);
    for (what, width) in [("an expert", experts.hidden), ("the shared expert", shared), ("the latent", latent)] {
        if width == 0 || width > MAX_SIZE {
            return Err(format!("the width of {what} is {width}"));
        }
    }
    experts.routing.problem(experts.count).map_or(Ok(()), Err)
}
