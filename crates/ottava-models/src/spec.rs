//! What a layer computes: a list of residual branches, each of one sublayer or the sum of several.
//!
//! A sublayer has its own settings and no others: there is no window without heads, and no latent attention without rotary positions.

use crate::layers::{BranchNorms, ExpertsSpec, HeadsSpec, LatentSpec, MlpSpec, Names};
use ottava_tensor::ops::RopePairs;

/// The largest size of a tensor.
pub(super) const MAX_SIZE: usize = 1 << 24;

/// A layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    /// In the order of forward.
    pub branches: Vec<BranchSpec>,
}

/// A residual branch: the sum of its sublayers, which read one operand.
#[derive(Clone, Debug, PartialEq)]
pub struct BranchSpec {
    /// Its norms.
    pub norms: BranchNorms,
    /// The sublayers, in the order of forward.
    pub sublayers: Vec<SublayerSpec>,
}

/// A sublayer with its settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SublayerSpec {
    /// Attention whose heads are projected from the residual stream, with or without rotary positions.
    Heads(HeadsSpec, Option<RopeSpec>),
    /// Latent attention, a part of whose heads is rotated.
    Latent(LatentSpec, RopeSpec),
    /// An MLP, with or without a gate.
    Mlp(MlpSpec),
    /// A mixture of experts.
    Experts(ExpertsSpec),
}

/// The rotary positions of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeSpec {
    /// Their number in [`DecoderConfig::ropes`](super::DecoderConfig::ropes).
    pub rope: usize,
    /// The elements of a head that are rotated together.
    pub pairs: RopePairs,
}

impl LayerSpec {
    /// Two branches, one after the other: attention, then an MLP or experts.
    pub fn sequential(names: &Names, [attention, mlp]: [SublayerSpec; 2]) -> LayerSpec {
        let branch = |norms, sublayer| BranchSpec { norms, sublayers: vec![sublayer] };
        LayerSpec { branches: vec![branch(names.attention_norms, attention), branch(names.mlp_norms, mlp)] }
    }

    /// One branch: the sum of attention and an MLP.
    pub fn parallel(names: &Names, sublayers: [SublayerSpec; 2]) -> LayerSpec {
        LayerSpec { branches: vec![BranchSpec { norms: names.attention_norms, sublayers: sublayers.to_vec() }] }
    }

    /// Its sublayers, in the order of forward.
    pub fn sublayers(&self) -> impl Iterator<Item = &SublayerSpec> {
        self.branches.iter().flat_map(|branch| &branch.sublayers)
    }

    /// Whether several sublayers read the operand of a branch.
    pub fn shares_operands(&self) -> bool {
        self.branches.iter().any(|branch| branch.sublayers.len() > 1)
    }

    /// Its attention with heads of its own.
    pub fn heads(&self) -> Option<&HeadsSpec> {
        self.sublayers()
            .find_map(|sublayer| if let SublayerSpec::Heads(heads, _) = sublayer { Some(heads) } else { None })
    }

    /// Its latent attention.
    pub fn latent(&self) -> Option<&LatentSpec> {
        self.sublayers()
            .find_map(|sublayer| if let SublayerSpec::Latent(latent, _) = sublayer { Some(latent) } else { None })
    }

    /// Its MLP.
    pub fn mlp(&self) -> Option<&MlpSpec> {
        self.sublayers().find_map(|sublayer| if let SublayerSpec::Mlp(mlp) = sublayer { Some(mlp) } else { None })
    }

    /// Its experts.
    pub fn experts(&self) -> Option<&ExpertsSpec> {
        self.sublayers()
            .find_map(|sublayer| if let SublayerSpec::Experts(experts) = sublayer { Some(experts) } else { None })
    }

    /// Its rotary positions.
    pub fn rope(&self) -> Option<RopeSpec> {
        self.sublayers().find_map(SublayerSpec::rope)
    }

    /// The sliding window of its attention.
    pub fn window(&self) -> Option<usize> {
        self.heads().and_then(|heads| heads.window)
    }

    /// The problem of the layer, if it has one.
    pub(super) fn check(&self) -> Result<(), String> {
        self.branches.iter().try_for_each(|branch| {
            // Others read the value of the operand, or cast it in another way.
            let shares = |sublayer: &SublayerSpec| matches!(sublayer, SublayerSpec::Heads(..) | SublayerSpec::Mlp(_));
            if branch.sublayers.len() > 1 && !branch.sublayers.iter().all(shares) {
                return Err("latent attention and experts beside another sublayer, which reads the same norm, are not implemented".into());
            }
            branch.sublayers.iter().try_for_each(SublayerSpec::check)
        })
    }
}

impl SublayerSpec {
    /// The name of the sublayer in a block.
    pub fn name(&self, names: &Names) -> &'static str {
        match self {
            SublayerSpec::Heads(..) | SublayerSpec::Latent(..) => names.attention,
            SublayerSpec::Mlp(_) | SublayerSpec::Experts(_) => names.mlp,
        }
    }

    /// Its rotary positions.
    pub fn rope(&self) -> Option<RopeSpec> {
        match self {
            SublayerSpec::Heads(_, rope) => *rope,
            SublayerSpec::Latent(_, rope) => Some(*rope),
            SublayerSpec::Mlp(_) | SublayerSpec::Experts(_) => None,
        }
    }

    /// Its heads of queries, and of keys and values; `None` if it is no attention.
    pub fn head_counts(&self) -> Option<[usize; 2]> {
        match self {
            SublayerSpec::Heads(heads, _) => Some([heads.heads, heads.kv_heads]),
            SublayerSpec::Latent(latent, _) => Some([latent.heads; 2]),
            SublayerSpec::Mlp(_) | SublayerSpec::Experts(_) => None,
        }
    }

    /// Elements of a head to which rotary positions apply; rotary positions may rotate only a part of these elements. 0 without heads.
    pub fn rotary_dim(&self) -> usize {
        match self {
            SublayerSpec::Heads(heads, _) => heads.head_dim,
            SublayerSpec::Latent(latent, _) => latent.sizes.rotated,
            SublayerSpec::Mlp(_) | SublayerSpec::Experts(_) => 0,
        }
    }

    /// The factor of attention scores, and their bound.
    pub fn score_factors(&self) -> [Option<f64>; 2] {
        match self {
            SublayerSpec::Heads(heads, _) => [heads.scale, heads.soft_cap],
            SublayerSpec::Latent(latent, _) => [latent.scale, None],
            SublayerSpec::Mlp(_) | SublayerSpec::Experts(_) => [None; 2],
        }
    }

    fn check(&self) -> Result<(), String> {
        let [scale, cap] = self.score_factors();
        expect_positive(&[("the soft cap of attention scores", cap), ("the factor of attention scores", scale)])?;
        match self {
            SublayerSpec::Heads(heads, _) => check_heads(heads),
            SublayerSpec::Latent(latent, _) => check_latent(latent),
            SublayerSpec::Mlp(mlp) => expect_sizes(&[("intermediate_size", mlp.hidden)]),
            SublayerSpec::Experts(experts) => check_experts(experts),
        }
    }
}

/// Errors unless each size is above 0 and below the largest of a tensor; each has the name of its key.
pub(super) fn expect_sizes(sizes: &[(&str, usize)]) -> Result<(), String> {
    match sizes.iter().find(|(_, size)| *size == 0 || *size > MAX_SIZE) {
        Some((key, size)) => Err(format!("`{key}` is {size}")),
        None => Ok(()),
    }
}

/// Errors unless each factor that is there is a number above 0.
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

fn check_experts(experts: &ExpertsSpec) -> Result<(), String> {
    let shared = experts.shared.map_or(1, |shared| shared.hidden);
    for (what, width) in [("an expert", experts.hidden), ("the shared expert", shared)] {
        if width == 0 || width > MAX_SIZE {
            return Err(format!("the width of {what} is {width}"));
        }
    }
    experts.routing.problem(experts.count).map_or(Ok(()), Err)
}
