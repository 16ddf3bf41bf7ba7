//! The axes of parallel training, and the groups of ranks along them.
//!
//! Ranks are numbered with the tensor axis fastest, then context, data and pipeline, as in Megatron-LM by default: what communicates most is
//! closest. Ranks that differ only in their coordinates of some axes form a group.

use super::group::Group;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// What ranks divide among each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Axis {
    /// Rows of a step.
    Data,
    /// Tokens of a row.
    Context,
    /// Each matrix of a layer.
    Tensor,
    /// Layers.
    Pipeline,
    /// Experts of a layer. Subdivides data x context, so it is no further factor of the number of ranks.
    Expert,
}

impl Axis {
    /// All axes.
    pub const ALL: [Axis; 5] = [Axis::Data, Axis::Context, Axis::Tensor, Axis::Pipeline, Axis::Expert];

    /// Its name, as in the configuration.
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
/// As in Megatron-LM, the expert axis subdivides the ranks of data x context: consecutive ones of them, with context faster than data, hold
/// different experts, and `data · context / expert` ranks hold the same ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MeshShape {
    /// Ranks that share the rows of a step.
    pub data: usize,
    /// Ranks that share the tokens of a row.
    pub context: usize,
    /// Ranks that share each matrix.
    pub tensor: usize,
    /// Ranks that share the layers.
    pub pipeline: usize,
    /// Ranks that share the experts.
    pub expert: usize,
}

impl fmt::Display for MeshShape {
    /// As "data 2, context 1, tensor 4, pipeline 1, expert 1".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&Axis::ALL.map(|axis| format!("{} {}", axis.as_str(), self.size(axis))).join(", "))
    }
}

impl MeshShape {
    /// The data axis alone.
    pub fn of_data(ranks: usize) -> MeshShape {
        MeshShape { data: ranks, context: 1, tensor: 1, pipeline: 1, expert: 1 }
    }

    /// The size of an axis.
    pub fn size(&self, axis: Axis) -> usize {
        match axis {
            Axis::Data => self.data,
            Axis::Context => self.context,
            Axis::Tensor => self.tensor,
            Axis::Pipeline => self.pipeline,
            Axis::Expert => self.expert,
        }
    }

    /// Ranks of the job.
    pub fn ranks(&self) -> usize {
        self.data * self.context * self.tensor * self.pipeline
    }

    /// Errors with [`Error::Value`] when the axes do not have `ranks` ranks, or the expert axis does not divide data x context.
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

    /// Where `rank` lies on an axis.
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

    /// The groups of ranks that differ in their coordinates of `axes` alone. See [`Mesh::group`].
    pub fn groups(&self, axes: &[Axis]) -> Vec<Vec<usize>> {
        let set = self.set(axes);
        let mut groups: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for rank in 0..self.ranks() {
            groups.entry(self.colour(rank, set)).or_default().push(rank);
        }
        groups.into_values().collect()
    }

    /// The axes among `axes` that have more than one rank, as bits.
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

    /// A number that the ranks of a group along the axes of `set` share.
    fn colour(&self, rank: usize, set: u8) -> usize {
        let fixed = |axis: Axis| if set & axis.bit() == 0 { self.coordinate(rank, axis) } else { 0 };
        let rows = match set & Axis::Expert.bit() {
            0 => fixed(Axis::Data) * self.context + fixed(Axis::Context),
            _ => rank / self.tensor % (self.data * self.context) / self.expert,
        };
        (fixed(Axis::Pipeline) * self.data * self.context + rows) * self.tensor + fixed(Axis::Tensor)
    }
}

/// The groups of a rank by set of axes.
pub struct Mesh {
    shape: MeshShape,
    /// The group of all ranks, and those that are split from it.
    groups: Vec<Group>,
    /// The group of each set of axes.
    by_set: BTreeMap<u8, usize>,
    /// The group of no axis.
    alone: Group,
}

/// The number of the group of all ranks.
const WORLD: usize = 0;

impl Mesh {
    /// The mesh of the ranks of `world`, the group of all ranks of a job, which all call it together. Splits `world` for each set of axes with
    /// other ranks than other sets, so not for the data axis alone.
    ///
    /// Errors with [`Error::Value`] when `shape` does not have the ranks of `world`, and as [`Group::split`].
    pub fn new(world: Group, shape: MeshShape) -> Result<Mesh> {
        shape.check(world.size())?;
        let mut mesh = Mesh { shape, groups: vec![world], by_set: BTreeMap::new(), alone: Group::solo() };
        let mut made = vec![vec![(0..shape.ranks()).collect::<Vec<_>>()]];
        for axes in sets() {
            let (set, groups) = (shape.set(&axes), shape.groups(&axes));
            if groups[0].len() == 1 && shape.ranks() > 1 || mesh.by_set.contains_key(&set) {
                continue;
            }
            let same = made.iter().position(|other| *other == groups);
            let index = match same {
                Some(index) => index,
                None => {
                    let names = axes.iter().filter(|&&axis| shape.size(axis) > 1).map(|axis| axis.as_str());
                    let name = names.collect::<Vec<_>>().join(" x ");
                    let group = mesh.world().split_by(&name, |rank| (shape.colour(rank, set), rank))?;
                    mesh.groups.push(group);
                    made.push(groups);
                    made.len() - 1
                }
            };
            mesh.by_set.insert(set, index);
        }
        Ok(mesh)
    }

    /// The group of all ranks.
    pub fn world(&self) -> &Group {
        &self.groups[WORLD]
    }

    /// The group of this rank and those that differ from it in their coordinates of `axes` alone, in the order of the job; of this rank alone
    /// where these axes have one rank. With the expert axis, without data and context, those that share the same experts' replica.
    ///
    /// Panics for the expert axis together with one of data and context, which it subdivides.
    pub fn group(&self, axes: &[Axis]) -> &Group {
        self.by_set.get(&self.shape.set(axes)).map_or(&self.alone, |&index| &self.groups[index])
    }

    /// The sizes of the axes.
    pub fn shape(&self) -> &MeshShape {
        &self.shape
    }

    /// The size of an axis.
    pub fn size(&self, axis: Axis) -> usize {
        self.shape.size(axis)
    }

    /// Where this rank lies on an axis.
    pub fn coordinate(&self, axis: Axis) -> usize {
        self.shape.coordinate(self.world().rank(), axis)
    }
}

/// All sets of axes that [`Mesh::group`] takes and that differ, smaller ones first.
fn sets() -> Vec<Vec<Axis>> {
    let of = |bits: u8| Axis::ALL.into_iter().filter(|axis| bits & axis.bit() != 0).collect::<Vec<_>>();
    let rows = Axis::Data.bit() | Axis::Context.bit();
    let differ = |bits: &u8| bits & Axis::Expert.bit() == 0 || bits & rows == 0;
    let mut sets: Vec<_> = (0..1 << Axis::ALL.len()).filter(differ).map(of).collect();
    sets.sort_by_key(Vec::len);
    sets
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::process::tests::tcp_group;
    use crate::comm::tests::on_ranks;
    use crate::comm::{Reduce, Traffic, threads};
    use crate::device::Device;
    use crate::tensor::Tensor;

    const CUBE: MeshShape = MeshShape { data: 2, context: 1, tensor: 2, pipeline: 2, expert: 1 };

    #[test]
    fn tensor_is_fastest_then_context_data_and_pipeline() {
        let shape = MeshShape { data: 3, context: 2, tensor: 4, pipeline: 2, expert: 6 };
        shape.check(48).unwrap();
        let at = |rank| Axis::ALL.map(|axis| shape.coordinate(rank, axis));
        // Data, context, tensor, pipeline, expert.
        assert_eq!((at(1), at(4), at(8)), ([0, 0, 1, 0, 0], [0, 1, 0, 0, 1], [1, 0, 0, 0, 2]));
        assert_eq!((at(24), at(47)), ([0, 0, 0, 1, 0], [2, 1, 3, 1, 5]));
        assert_eq!(shape.groups(&[Axis::Tensor])[1], [4, 5, 6, 7]);
        assert_eq!(shape.groups(&[Axis::Data])[0], [0, 8, 16]);
        assert_eq!(shape.groups(&[Axis::Pipeline])[5], [5, 29]);
        let shape = MeshShape { expert: 2, ..shape };
        assert_eq!(shape.groups(&[Axis::Expert])[0], [0, 4], "consecutive ranks of data x context");
        assert_eq!(
            shape.groups(&[Axis::Expert, Axis::Data, Axis::Context]),
            shape.groups(&[Axis::Data, Axis::Context])
        );
    }

    #[test]
    fn shapes_that_do_not_fit_are_errors_that_name_both_sides() {
        let error = |shape: MeshShape, ranks| shape.check(ranks).unwrap_err().to_string();
        let message = error(CUBE, 6);
        assert!(message.ends_with("tensor 2, pipeline 2, expert 1 has 8 ranks, and the job has 6"), "{message}");
        let message = error(MeshShape { expert: 4, ..CUBE }, 8);
        assert!(message.ends_with("the expert axis does not divide data x context, 2"), "{message}");
        assert!(MeshShape { expert: 0, ..CUBE }.check(8).is_err());
    }

    #[test]
    fn collectives_of_all_groups_of_a_cube_run_beside_each_other() {
        for group in [threads::group(8), tcp_group(8)] {
            on_ranks(group, |world| {
                let mesh = Mesh::new(world, CUBE).unwrap();
                let rank = mesh.world().rank();
                // All are started before one is waited for, and half of the ranks wait in the other order.
                let mut open: Vec<_> = (sets().into_iter())
                    .map(|axes| {
                        let x = Tensor::from_slice(&Device::Cpu, &[1], &[(1 << rank) as f32]).unwrap();
                        let sum = mesh.group(&axes).all_reduce("ranks", Reduce::Sum, x).unwrap();
                        (axes, sum)
                    })
                    .collect();
                if rank % 2 == 1 {
                    open.reverse();
                }
                for (axes, sum) in open {
                    let groups = CUBE.groups(&axes);
                    let own = groups.iter().find(|group| group.contains(&rank)).unwrap();
                    let expected: f32 = own.iter().map(|&rank| (1 << rank) as f32).sum();
                    assert_eq!(sum.wait().unwrap().to_vec::<f32>().unwrap(), [expected], "{axes:?} of rank {rank}");
                    let members = mesh.group(&axes).ranks();
                    assert!(own.len() == 1 || *members == own[..], "{axes:?}: {members:?}");
                }
                mesh.world().finish().unwrap();
            });
        }
    }

    #[test]
    fn the_data_axis_alone_is_the_group_of_all_ranks() {
        on_ranks(threads::group(3), |world| {
            let mesh = Mesh::new(world, MeshShape::of_data(3)).unwrap();
            assert!(mesh.world().recent().is_empty(), "nothing is split");
            for axes in [&[Axis::Data][..], &[Axis::Data, Axis::Context], &Axis::ALL] {
                assert!(std::ptr::eq(mesh.group(axes), mesh.world()));
            }
            assert_eq!((mesh.group(&[Axis::Tensor]).size(), mesh.group(&[]).size()), (1, 1));
            assert_eq!((mesh.size(Axis::Data), mesh.coordinate(Axis::Data)), (3, mesh.world().rank()));
            mesh.world().finish().unwrap();
        });
        let solo = Mesh::new(Group::solo(), MeshShape::of_data(1)).unwrap();
        assert!(std::ptr::eq(solo.group(&[Axis::Data]), solo.world()));
    }

    #[test]
    fn a_dry_rank_has_the_groups_of_its_place() {
        let shape = MeshShape { data: 4, context: 1, tensor: 2, pipeline: 2, expert: 2 };
        let mesh = Mesh::new(Group::dry(13, 16), shape).unwrap();
        assert_eq!(mesh.group(&[Axis::Data]).ranks(), [9, 11, 13, 15]);
        assert_eq!(mesh.group(&[Axis::Tensor]).ranks(), [12, 13]);
        assert_eq!(mesh.group(&[Axis::Expert]).ranks(), [13, 15]);
        assert_eq!((mesh.group(&[Axis::Data]).rank(), mesh.group(&[Axis::Data]).name()), (2, "data"));
        let x = Tensor::empty(&Device::Cpu.dry(), &[400], crate::dtype::DType::BF16).unwrap();
        let x = mesh.group(&[Axis::Data]).all_gather("x", x).unwrap().wait().unwrap();
        let stages = mesh.group(&[Axis::Pipeline]);
        stages.send("x", 0, &x).unwrap().wait().unwrap();
        let x = stages.receive("x", 0, x).unwrap().wait().unwrap();
        stages.exchange("x", 0, &x, 0, x.empty_like().unwrap()).unwrap().wait().unwrap();
        // Tensors of the host are zeros.
        let zeros = stages.receive("y", 0, Tensor::from_slice(&Device::Cpu, &[1], &[1.0f32]).unwrap()).unwrap();
        assert_eq!(zeros.wait().unwrap().to_vec::<f32>().unwrap(), [0.0]);
        let Traffic { all_gather, send, .. } = mesh.world().traffic();
        assert_eq!((all_gather.bytes, send.bytes, send.calls), (600, 1600, 2));
    }
}
