//! The ranks of a run: agreements of all ranks, and the groups over which tensors are reduced.
//!
//! All ranks stop at the same point. `interrupt::request` sets the flag of its process and forwards the request to all ranks (`Stopper`). The ranks
//! then agree on the stop in a collective: after each step, after each round of an evaluation, and at the end of each phase of startup
//! (`Ranks::together`). `Ranks::together` also reports the error of one rank to the other ranks.

use crate::pipeline::{Messages, Pipeline, StagePlaces};
use crate::sent::SentActivations;
use ottava_common::error::{Error, Result};
use ottava_recipe::layer_ranks::ShardPlace;
use ottava_recipe::param::Param;
use ottava_tensor::Device;
use ottava_tensor::comm::{Axis, Group, Mesh, MeshShape, Stopper, Traffic};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::cell::Cell;

/// The axes along which ranks hold different parts of one model.
const PARTS: &[Axis] = &[Axis::Tensor, Axis::Pipeline, Axis::Expert];

/// The data that the ranks of a group share, for [`Ranks::sharing`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shared {
    /// The gradients of a weight outside experts. They are summed over ranks with the same part of the model.
    Gradients,
    /// The elements of a weight. Each rank has all or a part of them. The scale of the weight's moments covers all elements.
    Elements,
    /// The parts of layers outside experts, whole or as slices. [`Ranks::replicas`] returns the ranks of a single parameter.
    Replicas,
    /// The tokens of a step. The ranks read different rows or tokens, and their counts and losses are added.
    Tokens,
    /// All parts of the model, for the norm of all gradients and for the casts of all layers.
    Model,
}

impl Shared {
    fn axes(self) -> &'static [Axis] {
        match self {
            Shared::Gradients | Shared::Replicas | Shared::Tokens => &[Axis::Data, Axis::Context],
            Shared::Elements => &[Axis::Data, Axis::Context, Axis::Tensor],
            Shared::Model => &[Axis::Data, Axis::Context, Axis::Tensor, Axis::Pipeline],
        }
    }
}

/// The ranks of a run. All ranks agree on errors, stops and equal settings. Reductions of a tensor use the group of ranks that
/// [share](Ranks::sharing) the tensor.
pub struct Ranks {
    pipeline: Pipeline,
    mesh: Mesh,
    /// The part of the traffic for which layers wait.
    of_layers: Cell<Traffic>,
    /// The part of the traffic between shard groups.
    of_replicas: Cell<Traffic>,
    sent: SentActivations,
}

impl Ranks {
    /// Computes a value on the first rank of `group`, and returns it on all ranks of the group. It works before the ranks have a mesh.
    ///
    /// Errors on all ranks of the group if the first rank has failed. The other ranks get its message, and with [`Error::Cancelled`] if a signal stopped
    /// the first rank.
    pub fn of_first<T: Serialize + DeserializeOwned>(
        group: &Group,
        what: &str,
        compute: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let mine = (group.rank() == 0).then(compute);
        let sent = mine.as_ref().map(|mine| mine.as_ref().map_err(told));
        let all = group.agree(what, &serde_json::to_vec(&sent).expect("results of ranks are plain data"));
        if let Some(mine) = mine {
            // If the group has also failed, this rank's own error is more informative.
            let mine = mine?;
            return all.map(|_| mine).map_err(Error::from);
        }
        let first: Option<Result<T, (bool, String)>> = serde_json::from_slice(&all?[0]).map_err(|_| different(what))?;
        first.ok_or_else(|| different(what))?.map_err(|error| error_of(group.ranks()[0], error))
    }

    /// Returns the ranks of a single process, which has all rows.
    pub fn solo() -> Ranks {
        Ranks::of(Group::solo(), MeshShape::of_data(1), &Device::Cpu).expect("one rank is a mesh of one rank")
    }

    /// Arranges the ranks of `world`, the group of all ranks, in a mesh of `shape`. This rank trains on `device`. GPUs exchange tensors by NCCL.
    /// Until [`Ranks::finish`] or the drop, the loss of a rank may end the process of another rank that uses a GPU, with exit code
    /// [`Error::RANKS`]; see [`Group::with_gpu`].
    pub fn new(world: Group, shape: MeshShape, device: &Device) -> Result<Ranks> {
        let world = match device {
            Device::Cuda(gpu) => world.with_gpu(gpu, Error::RANKS)?,
            Device::Cpu | Device::DryCpu(_) => world,
        };
        Ranks::of(world, shape, device)
    }

    fn of(world: Group, shape: MeshShape, device: &Device) -> Result<Ranks> {
        let mesh = Mesh::new(world, shape)?;
        Ok(Ranks {
            pipeline: Pipeline::new(&mesh, device)?,
            mesh,
            of_layers: Cell::default(),
            of_replicas: Cell::default(),
            sent: SentActivations::default(),
        })
    }

    /// Sets the format in which ranks send activations.
    pub fn sending(self, sent: SentActivations) -> Ranks {
        Ranks { sent, ..self }
    }

    /// Divides parameters within shard groups of `size` ranks, so that several groups store the same slices (hierarchical ZeRO). 0 means one group of
    /// all ranks of data x context. All ranks must call it with the same `size`.
    ///
    /// Errors like [`Mesh::with_shards`].
    pub fn with_shard_groups(self, size: usize) -> Result<Ranks> {
        match size {
            0 => Ok(self),
            _ => Ok(Ranks { mesh: self.mesh.with_shards(size)?, ..self }),
        }
    }

    /// Returns the messages of a pass through the pipeline, before the first message.
    pub fn messages(&self) -> Messages<'_> {
        Messages::new(&self.pipeline, self.sent)
    }

    /// Returns the format in which ranks send activations.
    pub(super) fn sent(&self) -> SentActivations {
        self.sent
    }

    /// Returns the sizes of the axes.
    pub fn shape(&self) -> &MeshShape {
        self.mesh.shape()
    }

    /// Returns the largest number of ranks over which a gradient of this rank is reduced, including gradients of tensors that tensor-parallel ranks
    /// have whole.
    pub fn reducing(&self) -> usize {
        self.sharing(Shared::Elements).size()
    }

    /// Returns whether each rank has all layers with their whole tensors. With ZeRO, it may hold slices of them.
    pub fn have_whole_model(&self) -> bool {
        self.group(PARTS).size() == 1
    }

    /// Returns the place of this rank on an axis. The axes tensor, context and expert divide the tensors, sequences and experts of layers.
    pub fn place(&self, axis: Axis) -> ShardPlace {
        let group = self.group(&[axis]);
        ShardPlace { rank: group.rank(), ranks: group.size() }
    }

    /// Returns the ranks that hold the same part of `param` as this rank, or slices of this part. They sum its gradients.
    pub fn replicas(&self, param: &Param) -> &Group {
        self.replicas_of(param.identity.is_of_experts())
    }

    /// Returns [`Ranks::replicas`] of the parameters of experts that ranks divide, or of all other parameters.
    pub(super) fn replicas_of(&self, experts: bool) -> &Group {
        if experts { self.mesh.expert_replicas() } else { self.sharing(Shared::Gradients) }
    }

    /// Returns the ranks that divide parameters with ZeRO: of experts that ranks divide, or all other parameters. These are all
    /// [replicas](Ranks::replicas), or a shard group among them.
    pub fn shard_group(&self, of_experts: bool) -> &Group {
        self.mesh.shard_group(of_experts)
    }

    /// Returns the ranks that store the same slices as this rank, one rank of each shard group.
    pub fn slice_replicas(&self) -> &Group {
        self.mesh.slice_replicas()
    }

    /// Returns the place of this rank in the pipeline.
    pub fn pipeline(&self) -> &Pipeline {
        &self.pipeline
    }

    /// Returns the ranks that share `what` with this rank, this rank included.
    pub fn sharing(&self, what: Shared) -> &Group {
        self.mesh.group(what.axes())
    }

    /// Returns the ranks that differ from this rank only in their coordinates of `axes`, this rank included.
    pub(super) fn group(&self, axes: &[Axis]) -> &Group {
        self.mesh.group(axes)
    }

    /// Returns the ranks of one axis, for the activations that layers exchange.
    pub(super) fn layer_group(&self, axis: Axis) -> &Group {
        self.mesh.layer_group(axis)
    }

    /// Returns the entries of `all` that belong to the ranks that share `what` with this rank. `all` has one entry per rank.
    pub fn among<'a, T>(&self, what: Shared, all: &'a [T]) -> impl Iterator<Item = &'a T> {
        self.sharing(what).ranks().iter().map(|&rank| &all[rank])
    }

    /// Returns the entries of `all` that belong to ranks that compute losses. `all` has one entry per rank. These ranks have the last stage of the
    /// model, and divide all tokens among themselves.
    pub fn of_losses<'a, T>(&self, all: &'a [T]) -> impl Iterator<Item = &'a T> {
        let shape = *self.mesh.shape();
        let (tensor, last) = (self.mesh.coordinate(Axis::Tensor), shape.pipeline - 1);
        let has = move |rank: usize| {
            (shape.coordinate(rank, Axis::Tensor), shape.coordinate(rank, Axis::Pipeline)) == (tensor, last)
        };
        all.iter().enumerate().filter(move |(rank, _)| has(*rank)).map(|(_, entry)| entry)
    }

    /// Returns the values `mine` of the ranks of this rank's pipeline, in the order of the ranks.
    pub fn of_stages<T: Serialize + DeserializeOwned>(&self, what: &str, mine: &T) -> Result<Vec<T>> {
        self.given_by(&[Axis::Pipeline], what, mine)
    }

    /// Returns the values `mine` of the ranks that have one whole model together with this rank.
    pub fn of_parts<T: Serialize + DeserializeOwned>(&self, what: &str, mine: &T) -> Result<Vec<T>> {
        self.given_by(PARTS, what, mine)
    }

    fn given_by<T: Serialize + DeserializeOwned>(&self, axes: &[Axis], what: &str, mine: &T) -> Result<Vec<T>> {
        let text = serde_json::to_vec(mine).expect("plain data");
        let all = self.group(axes).agree(what, &text)?;
        all.iter().map(|bytes| serde_json::from_slice(bytes).map_err(|_| different(what))).collect()
    }

    /// Returns the places of values in a vector of all stages. `counts` are the numbers of values of this rank's stages.
    pub(super) fn stage_places(&self, what: &str, counts: &[usize]) -> Result<StagePlaces> {
        let own: Vec<u64> = counts.iter().map(|&count| count as u64).collect();
        Ok(StagePlaces::new(self.pipeline.rank(), &self.of_stages(what, &own)?))
    }

    /// Returns the index of this rank.
    pub fn rank(&self) -> usize {
        self.world().rank()
    }

    /// Frees memory to which ranks have copied, if no tensor uses it any more ([`Group::free_symmetric`]). All ranks call it.
    pub fn free_symmetric(&self) -> Result<()> {
        Ok(self.mesh.free_symmetric()?)
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.world().size()
    }

    /// Returns whether this rank writes the run's files. True only on rank 0.
    pub fn leads(&self) -> bool {
        self.rank() == 0
    }

    /// Returns this rank's coordinate on the data axis, and the size of the axis. Ranks with different coordinates read different rows.
    pub fn rows(&self) -> (usize, usize) {
        (self.mesh.coordinate(Axis::Data), self.mesh.size(Axis::Data))
    }

    fn world(&self) -> &Group {
        self.mesh.world()
    }

    /// Gathers the `numbers` of all ranks, by rank.
    pub fn gather<const N: usize>(&self, what: &str, numbers: [f64; N]) -> Result<Vec<[f64; N]>> {
        let all = self.gather_lists(what, &numbers)?;
        all.into_iter().map(|numbers| numbers.try_into().map_err(|_| different(what))).collect()
    }

    /// Gathers a list of numbers of each rank, by rank.
    pub fn gather_lists(&self, what: &str, numbers: &[f64]) -> Result<Vec<Vec<f64>>> {
        let all = self.world().agree(what, bytemuck::cast_slice(numbers))?;
        let number = |bytes: &[u8]| f64::from_ne_bytes(bytes.try_into().expect("eight bytes"));
        Ok(all.iter().map(|bytes| bytes.chunks_exact(8).map(number).collect()).collect())
    }

    /// Gathers bytes of each rank, by rank.
    pub fn gather_bytes(&self, what: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        Ok(self.world().agree(what, bytes)?.iter().map(|bytes| bytes.to_vec()).collect())
    }

    /// Returns whether `flag` is set on any rank.
    pub fn any(&self, what: &str, flag: bool) -> Result<bool> {
        Ok(self.gather(what, [f64::from(flag)])?.iter().any(|[flag]| *flag != 0.0))
    }

    /// Returns the `text` of rank 0 on all ranks.
    pub fn follow(&self, what: &str, text: &str) -> Result<String> {
        let first = self.world().agree(what, text.as_bytes())?.swap_remove(0);
        String::from_utf8(first).map_err(|_| different(what))
    }

    /// Sends `value` from rank 0 to all other ranks, which [listen](Ranks::listen). Does not wait for these ranks.
    pub fn announce<T: Serialize>(&self, what: &str, value: &T) -> Result<()> {
        Ok(self.world().announce(what, serde_json::to_vec(value).expect("what rank 0 announces is plain data"))?)
    }

    /// Waits without a time limit for the value that rank 0 [announces](Ranks::announce).
    pub fn listen<T: DeserializeOwned>(&self, what: &str) -> Result<T> {
        serde_json::from_slice(&self.world().listen(what, 0)?).map_err(|_| different(what))
    }

    /// Returns the `name` of the first rank that has one, quoted. If there are several ranks, the text also names the rank.
    pub fn first_named(&self, what: &str, name: Option<String>) -> Result<Option<String>> {
        let all = self.world().agree(what, name.unwrap_or_default().as_bytes())?;
        let Some((rank, bytes)) = all.into_iter().enumerate().find(|(_, bytes)| !bytes.is_empty()) else {
            return Ok(None);
        };
        let name = String::from_utf8(bytes).map_err(|_| different(what))?;
        Ok(Some(if self.size() > 1 { format!("`{name}` on rank {rank}") } else { format!("`{name}`") }))
    }

    /// Errors on all ranks if their texts differ. The error contains two of the texts.
    pub fn expect_equal(&self, what: &str, text: &str) -> Result<()> {
        let all = self.world().agree(what, text.as_bytes())?;
        let Some(rank) = all.iter().position(|other| *other != all[0]) else { return Ok(()) };
        let text = |rank: usize| String::from_utf8_lossy(&all[rank]).into_owned();
        let message = format!(
            "{what} differs: {} on rank 0, {} on rank {rank}; start all ranks with the same files and options",
            text(0),
            text(rank)
        );
        Err(Error::diverged(message))
    }

    /// Returns the elementwise sums of `numbers` over the group of `sharing`.
    pub fn sum(&self, sharing: Shared, what: &str, numbers: &[i64]) -> Result<Vec<i64>> {
        let all = self.sharing(sharing).agree(what, bytemuck::cast_slice(numbers))?;
        let mut sums = vec![0; numbers.len()];
        for of_rank in all {
            let numbers = of_rank.chunks_exact(size_of::<i64>());
            if numbers.len() != sums.len() {
                return Err(different(what));
            }
            for (sum, number) in sums.iter_mut().zip(numbers) {
                *sum += i64::from_ne_bytes(number.try_into().expect("eight bytes"));
            }
        }
        Ok(sums)
    }

    /// Errors on all ranks if their GPUs have started different collectives in `what`. Call it before the host waits for its GPU.
    pub fn compare_gpu_calls(&self, what: &str) -> Result<()> {
        Ok(self.world().compare_gpu_calls(what)?)
    }

    /// Returns a handle that forwards stop requests to all ranks.
    pub fn stopper(&self) -> Stopper {
        self.world().stopper()
    }

    /// Waits for all ranks after their last step. Then the ranks may exit in any order.
    pub fn finish(&self) -> Result<()> {
        Ok(self.world().finish()?)
    }

    /// Exchanges the results of all ranks, by rank. If one rank has failed, all ranks error: this rank with its own error, the other ranks with
    /// its message. If a signal stopped one rank, all ranks return [`Error::Cancelled`].
    pub fn all<T: Serialize + DeserializeOwned>(&self, what: &str, mine: Result<T>) -> Result<Vec<T>> {
        let sent = mine.as_ref().map_err(told);
        let text = serde_json::to_vec(&sent).expect("results of ranks are plain data");
        let all = self.world().agree(what, &text);
        // If the group has also failed, this rank's own error is more informative.
        mine?;
        let read = |(rank, bytes): (usize, Vec<u8>)| {
            let sent: Result<T, (bool, String)> = serde_json::from_slice(&bytes).map_err(|_| different(what))?;
            sent.map_err(|error| error_of(rank, error))
        };
        all?.into_iter().enumerate().map(read).collect()
    }

    /// Waits until all ranks have finished `what`, and returns `mine`. Errors like [`Ranks::all`].
    pub fn together<T>(&self, what: &str, mine: Result<T>) -> Result<T> {
        let (mine, sent) = match mine {
            Ok(mine) => (Some(mine), Ok(())),
            Err(error) => (None, Err(error)),
        };
        self.all(what, sent)?;
        Ok(mine.expect("an error of this rank was returned"))
    }

    /// Returns the number of calls of this rank and the bytes that it sent.
    pub fn traffic(&self) -> Traffic {
        self.world().traffic()
    }

    /// Returns the part of [`Ranks::traffic`] for which layers wait: exchanges of activations.
    pub fn traffic_of_layers(&self) -> Traffic {
        self.of_layers.get()
    }

    /// Returns the part of [`Ranks::traffic`] between shard groups: reductions of slices among the ranks that store the same slices.
    pub fn traffic_of_replicas(&self) -> Traffic {
        self.of_replicas.get()
    }

    /// Runs an exchange of activations, and counts its calls.
    pub(super) fn of_layers<T>(&self, exchange: impl FnOnce() -> T) -> T {
        self.counted(&self.of_layers, exchange)
    }

    /// Runs an exchange among ranks that store the same slices, and counts its calls.
    pub(super) fn of_replicas<T>(&self, exchange: impl FnOnce(&Group) -> T) -> T {
        self.counted(&self.of_replicas, || exchange(self.slice_replicas()))
    }

    /// Runs `exchange`, and adds its calls to `counter`.
    fn counted<T>(&self, counter: &Cell<Traffic>, exchange: impl FnOnce() -> T) -> T {
        let before = self.traffic();
        let done = exchange();
        counter.set(counter.get() + (self.traffic() - before));
        done
    }
}

/// What other ranks are told of an error: whether a signal stopped this rank, and the message.
fn told(error: &Error) -> (bool, String) {
    (matches!(error, Error::Cancelled(_)), error.to_string())
}

/// Returns the error that `rank` was [`told`] of.
fn error_of(rank: usize, (stopped, words): (bool, String)) -> Error {
    if stopped { Error::Cancelled(words) } else { Error::Rank { rank, words } }
}

pub(super) fn different(what: &str) -> Error {
    Error::Config(format!("ranks of different builds disagree about {what}; start all with the same binary"))
}
