//! Builds the blocks of a model from the specs of its layers.

use crate::layers::within;
use crate::layers::{
    Attention, Block, BlockScale, Branch, Factor, GatedEmbedding, LatentAttention, MixtureOfExperts, Mlp, Norm,
    NormedSublayer, OperandCast, Positions, ScaledSublayer, Sublayer, XieluMlp,
};
use crate::spec::{BranchSpec, RopeSpec, SublayerSpec};
use crate::{DecoderConfig, RopeTables};
use ottava_common::error::Result;
use ottava_recipe::param::Builder;

/// Builds the block of the layer `index`.
pub(super) fn block(build: &mut Builder, config: &DecoderConfig, index: usize, tables: &RopeTables) -> Result<Block> {
    let stream = &config.stream;
    let name = format!("{}.{index}", stream.names.blocks);
    build.block = Some((index, config.layers.len()));
    let factor = Factor::new(build.device, stream.channels, stream.residual_scale)?;
    let mut of = BlockBuilder { build, config, tables, name: &name };
    let branches = config.layers[index].branches.iter().map(|spec| Ok(of.branch(spec)?.multiplied(factor.clone())));
    let branches = branches.collect::<Result<_>>()?;
    let of_layer = &config.layers[index];
    let scale = of_layer.scale.map(|of| BlockScale::new(build, format!("{name}.{of}"), stream.channels)).transpose()?;
    Ok(Block::new(name, branches, of_layer.parallel).multiplied(scale))
}

/// Builds the branches of a block.
struct BlockBuilder<'a, 'b> {
    build: &'a mut Builder<'b>,
    config: &'a DecoderConfig,
    tables: &'a RopeTables,
    name: &'a str,
}

impl BlockBuilder<'_, '_> {
    fn branch(&mut self, BranchSpec { norms, sublayers, factors, sublayer_norms }: &BranchSpec) -> Result<Branch> {
        let before = self.norm(norms.before)?;
        let mut built: Vec<Box<dyn Sublayer>> = Vec::with_capacity(sublayers.len());
        let first = self.build.description.linears.len();
        for (at, spec) in sublayers.iter().enumerate() {
            let own_norms = sublayer_norms.get(at);
            let shared_input = built.first().filter(|_| own_norms.is_none()).map(|first| first.input());
            let before = own_norms.map(|norms| self.norm(norms.before)).transpose()?.flatten();
            let reader = self.build.description.linears.len();
            let sublayer = self.sublayer(spec, shared_input)?;
            if shared_input.is_some() {
                // The first linear of a sublayer reads the operand.
                let [name, owner] = [reader, first].map(|at| self.build.description.linears[at].0.name.clone());
                self.build.description.shared_inputs.insert(name, owner);
            }
            let sublayer = match own_norms {
                Some(norms) => Box::new(NormedSublayer::new(before, sublayer, self.norm(norms.after)?)),
                None => sublayer,
            };
            let factor = factors.get(at).copied().unwrap_or(1.0);
            let factor = Factor::new(self.build.device, self.config.stream.channels, factor)?;
            built.push(if factor.is_one() { sublayer } else { Box::new(ScaledSublayer::new(sublayer, factor)) });
        }
        Ok(Branch::new(before, built).normalised(self.norm(norms.after)?).normalised_last(self.norm(norms.last)?))
    }

    fn norm(&mut self, name: Option<&str>) -> Result<Option<Norm>> {
        let stream = &self.config.stream;
        let norm = |name| Norm::new(self.build, &format!("{}.{name}", self.name), stream.channels, stream.norm);
        name.map(norm).transpose()
    }

    /// Builds the sublayer of `spec`. `shared_input` is the input cast of a preceding sublayer that reads the same operand.
    fn sublayer(&mut self, spec: &SublayerSpec, shared_input: Option<OperandCast>) -> Result<Box<dyn Sublayer>> {
        let BlockBuilder { build, config, tables, name } = self;
        let stream = &config.stream;
        let name = &within(name, spec.name(stream.names));
        let rotary = |rope: RopeSpec| tables.of(config, rope, spec.rotary_dim());
        Ok(match *spec {
            SublayerSpec::Heads(heads, rope) => {
                let growth = tables.growth(heads.growth, heads.head_dim);
                let positions = Positions { rotary: rope.map(rotary), growth };
                Box::new(Attention::new(build, name, heads, stream, positions, shared_input)?)
            }
            SublayerSpec::Latent(latent, rope) => {
                Box::new(LatentAttention::new(build, name, latent, stream, rotary(rope))?)
            }
            SublayerSpec::Delta(delta) => delta.sublayer(build, name, stream)?,
            SublayerSpec::Mamba(mamba) => mamba.sublayer(build, name, stream, shared_input)?,
            SublayerSpec::Mlp(mlp) => Box::new(Mlp::new(build, name, mlp, stream, shared_input)?),
            SublayerSpec::Xielu(mlp) => Box::new(XieluMlp::new(build, name, mlp, stream)?),
            SublayerSpec::Experts(experts) => Box::new(MixtureOfExperts::new(build, name, experts, stream)?),
            SublayerSpec::GatedEmbedding(spec) => Box::new(GatedEmbedding::new(build, name, spec, stream)?),
        })
    }
}
