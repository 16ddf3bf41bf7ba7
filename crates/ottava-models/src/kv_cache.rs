//! The cache of keys and values and of recurrent states, and forward of new tokens with the cache.

use crate::InferenceBatch;
use crate::stage::Stage;
use ottava_common::error::Result;
use ottava_recipe::context::{Context, PagedPass};
use ottava_recipe::layer_ranks::LayerRanks;
use ottava_recipe::mode::Mode;
use ottava_recipe::param::{Description, Resident};
use ottava_recipe::recurrent::{RecurrentStates, SuspendedStates};
use ottava_recipe::scaling::{Casts, Recorder, Scales};
use ottava_tensor::ops::{AttentionSpec, KvBlocks, SuspendedKv};
use ottava_tensor::{DType, Device, Tensor};

/// Attention layers with the same window. A sequence has one block table for all layers of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvGroup {
    /// The maximum number of keys that a token sees, itself included. `None` means all keys.
    pub window: Option<usize>,
    /// The indices of the group's attention layers.
    layers: Vec<usize>,
}

impl KvGroup {
    /// Returns the groups of attention layers with these specs, for sequences up to `max_len` tokens. Layers without a window come first, then layers
    /// with larger windows. A window of `max_len` or more is treated as no window. Layers that read the cache of another of `caches` are in no group.
    pub(super) fn of(specs: &[AttentionSpec], caches: &[usize], max_len: usize) -> Vec<KvGroup> {
        let windows = specs.iter().map(|spec| spec.window.filter(|&window| window < max_len));
        let mut groups: Vec<KvGroup> = Vec::new();
        for (layer, window) in windows.enumerate().filter(|(layer, _)| caches[*layer] == *layer) {
            match groups.iter_mut().find(|group| group.window == window) {
                Some(group) => group.layers.push(layer),
                None => groups.push(KvGroup { window, layers: vec![layer] }),
            }
        }
        groups.sort_by_key(|group| std::cmp::Reverse(group.window.unwrap_or(usize::MAX)));
        groups
    }

    /// Returns the number of bytes of one block of `block_size` tokens, summed over the layers of the group.
    pub(super) fn block_bytes(&self, specs: &[AttentionSpec], block_size: usize, dtype: DType) -> usize {
        self.layers.iter().map(|&layer| KvBlocks::block_bytes(&specs[layer], block_size, dtype)).sum()
    }
}

/// The sizes of a cache.
#[derive(Clone, Copy, Debug)]
pub struct CacheSizes<'a> {
    /// The groups of attention layers, each with its number of blocks.
    pub groups: &'a [(KvGroup, usize)],
    /// The number of tokens of a block.
    pub block_size: usize,
    /// The type of keys and values.
    pub dtype: DType,
    /// The number of sequences that have recurrent states at once.
    pub slots: usize,
    /// The number of saved copies of the recurrent states of a sequence.
    pub saved: usize,
}

/// The keys and values of all attention layers, the states of all recurrent layers, and the statistics that casts of inference write.
pub struct KvCache {
    /// Empty while the cache is suspended.
    layers: Vec<KvBlocks>,
    /// The states of running sequences. Empty while the cache is suspended.
    states: Vec<RecurrentStates>,
    /// The saved states. Empty while the cache is suspended.
    saved: Vec<RecurrentStates>,
    /// Keys and values, the states of running sequences, and the saved states.
    suspended: Option<(SuspendedKv, [Vec<SuspendedStates>; 2])>,
    /// The index of each layer's group.
    groups: Vec<usize>,
    recorder: Recorder,
}

impl KvCache {
    /// Creates an empty cache for a model `of` these layers, which computes in `compute`, with `casts` FP8 casts.
    pub(super) fn new(
        device: &Device,
        of: &Description,
        compute: DType,
        casts: usize,
        sizes: CacheSizes,
    ) -> Result<KvCache> {
        let (CacheSizes { groups, block_size, dtype, slots, saved }, specs) = (sizes, &of.attention);
        let caches = &of.caches;
        let group_of = |layer: usize| groups.iter().position(|(group, _)| group.layers.contains(&layer));
        let numbers: Vec<usize> =
            caches.iter().map(|&layer| group_of(layer).expect("each layer with a cache has a group")).collect();
        // Layers without a cache of their own have no blocks.
        let blocks = |layer: usize| if caches[layer] == layer { groups[numbers[layer]].1 } else { 0 };
        let layers: Vec<_> = specs.iter().enumerate().map(|(layer, spec)| (*spec, blocks(layer))).collect();
        let layers = KvBlocks::of_layers(device, &layers, block_size, dtype)?;
        let states = |slots| -> Result<Vec<_>> {
            let of_layer = |spec| Ok(RecurrentStates::new(device, spec, slots, compute)?);
            of.recurrent.iter().filter(|_| slots > 0).map(of_layer).collect()
        };
        let (states, saved) = (states(slots)?, states(saved)?);
        let recorder = Recorder::new(device, casts)?;
        Ok(KvCache { layers, states, saved, suspended: None, groups: numbers, recorder })
    }

    /// Returns the memory of keys, values and states to the device, until [`KvCache::resume`].
    pub fn suspend(&mut self) -> Result<()> {
        if self.suspended.is_none() {
            let states = [&mut self.states, &mut self.saved];
            let states = states.map(|of| std::mem::take(of).into_iter().map(RecurrentStates::suspend).collect());
            self.suspended = Some((SuspendedKv::new(std::mem::take(&mut self.layers))?, states));
        }
        Ok(())
    }

    /// Takes memory for keys, values and states again, whose content is undefined. Returns whether the memory lies elsewhere than before, so that graphs that were
    /// captured with the cache are no longer valid. Does nothing to a cache that is not suspended.
    ///
    /// Errors if the device has too little memory.
    pub fn resume(&mut self) -> Result<bool> {
        let Some((suspended, states)) = self.suspended.take() else { return Ok(false) };
        let (layers, mut has_moved) = suspended.resume()?;
        self.layers = layers;
        for (to, suspended) in [&mut self.states, &mut self.saved].into_iter().zip(states) {
            for of_layer in suspended {
                let (states, moved) = of_layer.resume()?;
                to.push(states);
                has_moved |= moved;
            }
        }
        Ok(has_moved)
    }

    /// Copies the recurrent states in slot `slot` to the saved states number `to`.
    ///
    /// Errors if one of them does not exist. Panics if the cache has no saved states.
    pub fn save_states(&mut self, slot: usize, to: usize) -> Result<()> {
        assert_eq!(self.states.len(), self.saved.len(), "the cache has saved states");
        for (saved, states) in self.saved.iter_mut().zip(&self.states) {
            saved.copy_from(to, states, slot)?;
        }
        Ok(())
    }

    /// Copies the saved states number `from` to slot `slot`.
    ///
    /// Errors if one of them does not exist. Panics if the cache has no saved states.
    pub fn restore_states(&mut self, from: usize, slot: usize) -> Result<()> {
        assert_eq!(self.states.len(), self.saved.len(), "the cache has saved states");
        for (states, saved) in self.states.iter_mut().zip(&self.saved) {
            states.copy_from(slot, saved, from)?;
        }
        Ok(())
    }

    /// Returns normalised activations `[T, C]` of the new tokens.
    pub(super) fn forward(
        &mut self,
        stage: &Stage,
        scales: &Scales,
        ranks: &dyn LayerRanks,
        batch: &InferenceBatch,
    ) -> Result<Tensor> {
        let KvCache { layers, states, groups, recorder, .. } = self;
        let tensors = batch.tensors()?;
        let (batches, recurrent) = (&tensors.by_group(), tensors.recurrent());
        let mut context = Context {
            paged: Some(PagedPass { layers, groups, batches, states, recurrent, is_whole: batch.is_whole }),
            ..Context::new(Casts { scales, recorder, mode: Mode::INFERENCE }, ranks, &tensors.sequences)
        };
        stage.forward_only(&tensors.ids, &mut context, &mut Resident)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_with_the_same_window_share_a_group() {
        let spec = |window| AttentionSpec { window, ..AttentionSpec::causal(2, 1, 8) };
        let specs = [Some(4), None, Some(4), Some(9), Some(100)].map(spec);
        let groups = KvGroup::of(&specs, &[0, 1, 2, 3, 4], 50);
        let found: Vec<_> = groups.iter().map(|group| (group.window, group.layers.as_slice())).collect();
        assert_eq!(found, [(None, &[1, 4][..]), (Some(9), &[3]), (Some(4), &[0, 2])]);
        let bytes: usize = groups.iter().map(|group| group.block_bytes(&specs, 32, DType::BF16)).sum();
        assert_eq!(bytes, 5 * KvBlocks::block_bytes(&specs[0], 32, DType::BF16));
        assert_eq!(KvGroup::of(&specs[..1], &[0], 4), [KvGroup { window: None, layers: vec![0] }]);
    }
}
