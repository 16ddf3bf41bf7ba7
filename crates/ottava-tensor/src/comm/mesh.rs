//! The axes of parallel training, and the groups of ranks along them.
//!
//! The tensor axis varies fastest in the numbers of ranks, then context, data and pipeline, as in Megatron-LM by default. So ranks that communicate
//! most are closest. Ranks that differ only in their coordinates of some axes form a group.

use super::fault::list_ranks;
use super::group::Group;
use crate::cuda::Beside;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

mod shards;
#[cfg(test)]
mod tests;

/// The number of groups that [`MeshShape::describe`] lists.
const LISTED: usize = 4;

/// An axis of the mesh, named by what its ranks divide.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Axis {
    /// The rows of a step.
    Data,
    /// The tokens of a row.
    Context,
    /// The matrices of a layer.
    Tensor,
    /// The layers.
    Pipeline,
    /// The experts of a layer. This axis subdivides data x context, so it does not multiply the number of ranks.
    Expert,
}

impl Axis {
    /// All axes.
    pub const ALL: [Axis; 5] = [Axis::Data, Axis::Context, Axis::Tensor, Axis::Pipeline, Axis::Expert];

    /// Returns the name in configuration files.
    pub fn as_str(self) -> &'static str {
        match self {
            Axis::Data => "data",
            Axis::Context => "context",
            Axis::Tensor => "tensor",
            Axis::Pipeline => "pipeline",
            Axis::Expert => "expert",
        }
    }

    fn bit(self) -> u8 {
        1 << self as u8
    }
}

/// The sizes of the axes. The job has data · context · tensor · pipeline ranks.
///
/// As in Megatron-LM, the expert axis subdivides the ranks of data x context, where context varies fastest. `expert` consecutive ranks
/// hold different experts, and `data · context / expert` ranks hold the same experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MeshShape {
    /// The number of ranks that divide the rows of a step.
    pub data: usize,
    /// The number of ranks that divide the tokens of a row.
    pub context: usize,
    /// The number of ranks that divide each matrix.
    pub tensor: usize,
    /// The number of ranks that divide the layers.
    pub pipeline: usize,
    /// The number of ranks that divide the experts.
    pub expert: usize,
}

impl fmt::Display for MeshShape {
    /// Writes the sizes, for example "data 2, context 1, tensor 4, pipeline 1, expert 1".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&Axis::ALL.map(|axis| format!("{} {}", axis.as_str(), self.size(axis))).join(", "))
    }
}

impl MeshShape {
    /// Returns a mesh with only a data axis.
    pub fn of_data(ranks: usize) -> MeshShape {
        MeshShape { data: ranks, context: 1, tensor: 1, pipeline: 1, expert: 1 }
    }

    /// Returns the size of an axis.
    pub fn size(&self, axis: Axis) -> usize {
        match axis {
            Axis::Data => self.data,
            Axis::Context => self.context,
            Axis::Tensor => self.tensor,
            Axis::Pipeline => self.pipeline,
            Axis::Expert => self.expert,
        }
    }

    /// Returns the number of ranks of the job.
    pub fn ranks(&self) -> usize {
        self.data * self.context * self.tensor * self.pipeline
    }

    /// Errors with [`Error::Value`] if the axes do not have `ranks` ranks, or if the size of the expert axis does not divide data x context.
    pub fn check(&self, ranks: usize) -> Result<()> {
        if self.ranks() != ranks {
            return Err(Error::Value(format!("a mesh of {self} has {} ranks, and the job has {ranks}", self.ranks())));
        }
        if self.expert == 0 || !(self.data * self.context).is_multiple_of(self.expert) {
            let divided = self.data * self.context;
            return Err(Error::Value(format!(
                "a mesh of {self}: the expert axis does not divide data x context, {divided}"
            )));
        }
        Ok(())
    }

    /// Returns the coordinate of `rank` on an axis.
    pub fn coordinate(&self, rank: usize, axis: Axis) -> usize {
        let (of_tensor, of_context) = (rank / self.tensor, rank / self.tensor / self.context);
        match axis {
            Axis::Tensor => rank % self.tensor,
            Axis::Context => of_tensor % self.context,
            Axis::Data => of_context % self.data,
            Axis::Pipeline => of_context / self.data,
            Axis::Expert => of_tensor % (self.data * self.context) % self.expert,
        }
    }

    /// Returns the groups of ranks that differ only in their coordinates of `axes`. See [`Mesh::group`].
    pub fn groups(&self, axes: &[Axis]) -> Vec<Vec<usize>> {
        let set = self.set(axes);
        let mut groups: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for rank in 0..self.ranks() {
            groups.entry(self.colour(rank, set)).or_default().push(rank);
        }
        groups.into_values().collect()
    }

    /// Returns the groups of ranks that hold the same experts. Ranks of a group have the same coordinates on the expert, tensor and pipeline
    /// axes.
    pub fn expert_replicas(&self) -> Vec<Vec<usize>> {
        let mut groups: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for rank in 0..self.ranks() {
            groups.entry(self.colour_of_replicas(rank)).or_default().push(rank);
        }
        groups.into_values().collect()
    }

    /// Returns the first four groups along an axis, for example "ranks 0, 1; ranks 2, 3".
    pub fn describe(&self, axis: Axis) -> String {
        let groups = self.groups(&[axis]);
        let mut listed: Vec<_> = groups.iter().take(LISTED).map(|ranks| list_ranks(ranks)).collect();
        if groups.len() > LISTED {
            listed.push(format!("and {} other groups", groups.len() - LISTED));
        }
        listed.join("; ")
    }

    /// Returns the axes among `axes` that have more than one rank, as bits.
    fn set(&self, axes: &[Axis]) -> u8 {
        let has = |axis| axes.contains(&axis);
        let set =
            |axes: &[Axis]| axes.iter().filter(|&&axis| self.size(axis) > 1).fold(0, |set, axis| set | axis.bit());
        match (has(Axis::Expert), has(Axis::Data), has(Axis::Context)) {
            (true, true, true) => set(axes) & !Axis::Expert.bit(),
            (true, true, false) | (true, false, true) => {
                panic!("the expert axis subdivides data x context, and a group has one or both of these instead")
            }
            _ => set(axes),
        }
    }

    /// Returns a number that identifies the group of `rank` in [`MeshShape::expert_replicas`].
    fn colour_of_replicas(&self, rank: usize) -> usize {
        let [pipeline, expert, tensor] =
            [Axis::Pipeline, Axis::Expert, Axis::Tensor].map(|axis| self.coordinate(rank, axis));
        (pipeline * self.expert + expert) * self.tensor + tensor
    }

    /// Returns a number that identifies the group of `rank` along the axes of `set`.
    fn colour(&self, rank: usize, set: u8) -> usize {
        let fixed = |axis: Axis| if set & axis.bit() == 0 { self.coordinate(rank, axis) } else { 0 };
        let rows = match set & Axis::Expert.bit() {
            0 => fixed(Axis::Data) * self.context + fixed(Axis::Context),
            _ => rank / self.tensor % (self.data * self.context) / self.expert,
        };
        (fixed(Axis::Pipeline) * self.data * self.context + rows) * self.tensor + fixed(Axis::Tensor)
    }
}

/// The groups of a rank if not all ranks with the same parameters divide them.
struct ShardGroups {
    /// The ranks that divide parameters outside experts.
    shard: Group,
    /// The ranks that divide the parameters of experts. `None` without an expert axis: then all ranks of `shard` do.
    of_experts: Option<Group>,
    /// The ranks that store the same slices.
    replicas: Group,
}

impl ShardGroups {
    /// Returns all groups.
    fn all(&self) -> impl Iterator<Item = &Group> {
        [&self.shard, &self.replicas].into_iter().chain(&self.of_experts)
    }
}

/// The groups of a rank, by set of axes.
pub struct Mesh {
    shape: MeshShape,
    /// The group of all ranks, and the groups that are split from it.
    groups: Vec<Group>,
    /// The group of each set of axes.
    by_set: BTreeMap<u8, usize>,
    /// The index of the group of [`Mesh::expert_replicas`]. `None` if the group has only this rank.
    expert_replicas: Option<usize>,
    /// The groups of [`Mesh::with_shards`].
    shards: Option<ShardGroups>,
    /// The groups of [`Mesh::layer_group`].
    of_layers: BTreeMap<u8, Group>,
    /// The group for the empty set of axes.
    alone: Group,
}

/// The index of the group of all ranks.
const WORLD: usize = 0;

/// The axes whose ranks exchange activations in layers. Each axis has the axes along which the ranks of its group differ, and the work of compute
/// during the exchange.
const OF_LAYERS: [(Axis, &[Axis], Beside); 3] = [
    (Axis::Tensor, &[Axis::Tensor], Beside::Product),
    (Axis::Context, &[Axis::Context], Beside::Nothing),
    (Axis::Expert, &[Axis::Expert, Axis::Tensor], Beside::Nothing),
];

impl Mesh {
    /// Creates the mesh of `world`, the group of all ranks of a job. All ranks must call it. Splits `world` for each set of axes whose groups
    /// differ from the groups of the other sets. With only data parallelism, no split is needed.
    ///
    /// Errors with [`Error::Value`] if `shape` does not have the ranks of `world`, and like [`Group::split`].
    pub fn new(world: Group, shape: MeshShape) -> Result<Mesh> {
        shape.check(world.size())?;
        let (by_set, of_layers, alone) = (BTreeMap::new(), BTreeMap::new(), Group::solo());
        let mut mesh =
            Mesh { shape, groups: vec![world], by_set, expert_replicas: None, shards: None, of_layers, alone };
        let mut made = vec![vec![(0..shape.ranks()).collect::<Vec<_>>()]];
        for axes in sets() {
            let set = shape.set(&axes);
            if mesh.by_set.contains_key(&set) {
                continue;
            }
            let names = axes.iter().filter(|&&axis| shape.size(axis) > 1).map(|axis| axis.as_str());
            let name = names.collect::<Vec<_>>().join(" x ");
            let group = mesh.split(&mut made, shape.groups(&axes), &name, |rank| shape.colour(rank, set))?;
            mesh.by_set.extend(group.map(|group| (set, group)));
        }
        let colour = |rank| shape.colour_of_replicas(rank);
        mesh.expert_replicas = mesh.split(&mut made, shape.expert_replicas(), "data of experts", colour)?;
        for (axis, axes, beside) in OF_LAYERS.into_iter().filter(|(axis, ..)| shape.size(*axis) > 1) {
            let (name, set) = (format!("layers by {}", axis.as_str()), shape.set(axes));
            let group = mesh.world().split_by(&name, |rank| (shape.colour(rank, set), rank))?;
            mesh.of_layers.insert(axis.bit(), group.beside(beside));
        }
        Ok(mesh)
    }

    /// Returns the index of this rank's group among `groups`, which `colour` identifies: one of the groups `made` so far, or a new group. Returns
    /// `None` for groups of one rank.
    fn split(
        &mut self,
        made: &mut Vec<Vec<Vec<usize>>>,
        groups: Vec<Vec<usize>>,
        name: &str,
        colour: impl Fn(usize) -> usize,
    ) -> Result<Option<usize>> {
        if groups[0].len() == 1 && self.shape.ranks() > 1 {
            return Ok(None);
        }
        if let Some(index) = made.iter().position(|other| *other == groups) {
            return Ok(Some(index));
        }
        let group = self.world().split_by(name, |rank| (colour(rank), rank))?;
        self.groups.push(group);
        made.push(groups);
        Ok(Some(made.len() - 1))
    }

    /// Returns the group of all ranks.
    pub fn world(&self) -> &Group {
        &self.groups[WORLD]
    }

    /// Returns the ranks that differ from this rank only in their coordinates of `axes`, this rank included, in the order of the job. The expert
    /// axis, without data and context, gives the ranks that together hold each expert once.
    ///
    /// Panics for the expert axis together with only one of data and context, because the expert axis subdivides both.
    pub fn group(&self, axes: &[Axis]) -> &Group {
        self.by_set.get(&self.shape.set(axes)).map_or(&self.alone, |&index| &self.groups[index])
    }

    /// Returns the ranks that hold the same experts as this rank, this rank included. Without an expert axis, these are the ranks of data x context.
    pub fn expert_replicas(&self) -> &Group {
        self.expert_replicas.map_or(&self.alone, |index| &self.groups[index])
    }

    /// Returns the group for the activations that layers exchange. For tensor and context, it has the ranks of [`Mesh::group`]. For the
    /// expert axis, it has all ranks that divide experts: the ranks of expert x tensor. On GPUs these groups have separate
    /// communicators, because compute waits for their calls, or runs one product meanwhile.
    pub fn layer_group(&self, axis: Axis) -> &Group {
        let axis = if axis == Axis::Expert && self.shape.expert == 1 { Axis::Tensor } else { axis };
        self.of_layers.get(&axis.bit()).unwrap_or(&self.alone)
    }

    /// Runs [`Group::free_symmetric`] on all groups.
    pub fn free_symmetric(&self) -> Result<()> {
        let of_shards = self.shards.iter().flat_map(ShardGroups::all);
        self.groups.iter().chain(self.of_layers.values()).chain(of_shards).try_for_each(Group::free_symmetric)
    }

    /// Returns the sizes of the axes.
    pub fn shape(&self) -> &MeshShape {
        &self.shape
    }

    /// Returns the size of an axis.
    pub fn size(&self, axis: Axis) -> usize {
        self.shape.size(axis)
    }

    /// Returns the coordinate of this rank on an axis.
    pub fn coordinate(&self, axis: Axis) -> usize {
        self.shape.coordinate(self.world().rank(), axis)
    }
}

/// Returns all different sets of axes that [`Mesh::group`] accepts, smaller sets first.
fn sets() -> Vec<Vec<Axis>> {
    let of = |bits: u8| Axis::ALL.into_iter().filter(|axis| bits & axis.bit() != 0).collect::<Vec<_>>();
    let rows = Axis::Data.bit() | Axis::Context.bit();
    let differ = |bits: &u8| bits & Axis::Expert.bit() == 0 || bits & rows == 0;
    let mut sets: Vec<_> = (0..1 << Axis::ALL.len()).filter(differ).map(of).collect();
    sets.sort_by_key(Vec::len);
    sets
}
