//! Checks that replicas of weights, optimizer states and scales are equal on all ranks.

use crate::optim::{Optimizer, optimizer_tensors};
use crate::{Partition, Ranks, Shared};
use ottava_common::error::{Error, Result};
use ottava_models::Decoder;
use ottava_recipe::scaling::ScalingState;
use ottava_tensor::comm::{Axis, Group};
use ottava_tensor::ops::checksums;

impl Partition {
    /// Errors on all ranks with the name of the first tensor that differs between ranks. It compares the weights, master weights and moments that
    /// each rank stores whole, the slices that several shard groups store, and the amaxes and scales of casts. In ZeRO stage 0, each parameter is
    /// stored whole. In other stages, only norms and biases are. `when` names the step, for example "after step 100".
    pub fn compare_replicas(&self, model: &mut Decoder, optimizer: &mut dyn Optimizer, when: &str) -> Result<()> {
        if self.ranks().sharing(Shared::Elements).size() == 1 {
            return Ok(());
        }
        let (replicas, tensor) = (self.ranks().sharing(Shared::Replicas), self.ranks().group(&[Axis::Tensor]));
        let (of_experts, of_slices) = (self.ranks().replicas_of(true), self.ranks().slice_replicas());
        let (mut slice_names, mut slice_sums) = (Vec::new(), Vec::new());
        let (mut expert_names, mut expert_sums) = (Vec::new(), Vec::new());
        let (mut names, mut sums) = (Vec::new(), Vec::new());
        // Tensors that all ranks of the tensor axis have whole are compared separately.
        let (mut whole_names, mut whole_sums) = (Vec::new(), Vec::new());
        for (param, states) in model.parameters().into_iter().zip(optimizer.states()) {
            if param.is_sliced() && (of_slices.size() == 1 || param.slice().is_empty()) {
                continue;
            }
            let is_sliced = param.is_sliced();
            let (name, is_whole, is_of_experts) =
                (param.identity.name().to_string(), param.identity.is_whole(), param.identity.is_of_experts());
            let weight = param.is_stored().then(|| param.weights.value()).transpose()?;
            let kept = optimizer_tensors(&mut param.weights, states);
            let mut tensors: Vec<_> = kept.iter().map(|kept| (kept.kind, &*kept.tensor)).collect();
            tensors.extend(weight.as_ref().map(|weight| ("weight", weight)));
            // Offloaded tensors are in host memory, and their scales are on the GPU. Both are treated as the same device.
            let all = checksums(&tensors.iter().map(|(_, tensor)| *tensor).collect::<Vec<_>>())?;
            let (own_names, own_sums) = match (is_of_experts, is_whole) {
                _ if is_sliced => (&mut slice_names, &mut slice_sums),
                (true, _) => (&mut expert_names, &mut expert_sums),
                (false, true) => (&mut whole_names, &mut whole_sums),
                (false, false) => (&mut names, &mut sums),
            };
            own_names.extend(tensors.iter().map(|(kind, _)| format!("`{name}` ({kind})")));
            own_sums.extend(all.to_vec::<i64>()?);
        }
        expect_same_sums(of_slices, when, &slice_names, &slice_sums)?;
        expect_same_sums(of_experts, when, &expert_names, &expert_sums)?;
        expect_same_sums(tensor, when, &whole_names, &whole_sums)?;
        names.extend(whole_names);
        sums.extend(whole_sums);
        expect_same_sums(replicas, when, &names, &sums)?;
        self.ranks().compare_scales(model.scaling(), when)
    }
}

impl Ranks {
    /// Errors on all ranks with the name of the first cast whose scale, or whose amax in the last step, differs between ranks with the same part of
    /// the model. A possible cause is that its [`AmaxGroup`](ottava_recipe::scaling::AmaxGroup) lacks ranks that divide its tensor.
    pub(super) fn compare_scales(&self, scaling: &ScalingState, when: &str) -> Result<()> {
        let names: Vec<_> = scaling.names().iter().map(|name| format!("`{name}` (amax and scale)")).collect();
        expect_same_sums(self.sharing(Shared::Replicas), when, &names, &scaling.bits()?)
    }
}

/// Errors on all ranks of the group `replicas` with the first of `names` whose checksum in `sums` differs.
fn expect_same_sums(replicas: &Group, when: &str, names: &[String], sums: &[i64]) -> Result<()> {
    let all = replicas.agree("checksums of replicas", bytemuck::cast_slice(sums))?;
    let differs = |at: usize| {
        let place = at * size_of::<i64>()..(at + 1) * size_of::<i64>();
        all.iter().position(|other| other.get(place.clone()) != all[0].get(place.clone()))
    };
    let Some((name, rank)) = names.iter().enumerate().find_map(|(at, name)| Some((name, differs(at)?))) else {
        return Ok(());
    };
    let message = format!(
        "ranks have diverged: {name} of rank {} differs from that of rank {} {when}; resume from an earlier checkpoint, and check the hardware of both",
        replicas.ranks()[rank],
        replicas.ranks()[0]
    );
    Err(Error::diverged(message))
}
