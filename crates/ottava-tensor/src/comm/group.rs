//! One rank's membership in a group.

use super::call::{Call, Channel, Op};
use super::combine::unpack;
use super::endpoint::{Endpoint, Stopper};
use super::fault::Fault;
use super::gpu::Gpu;
use super::history::GpuCalls;
use super::members::{Members, encode_place};
use super::pending::Started;
use super::traffic::Traffic;
use crate::device::{Device, MemoryKind};
use crate::error::{Error, RankFault, Result};
use crate::tensor::Tensor;
use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;

#[cfg(test)]
mod tests;

/// The calls of a rank's GPU by channel.
type Calls = Vec<(Channel, GpuCalls)>;

/// One rank's membership in a group.
///
/// A rank may be in several groups of its job, which [`Group::split`] makes. They share connections, deadlines, the counters of
/// [`Group::traffic`] and the first fault, which ends the calls of all of them. Dropping the last one leaves the job, which ends the calls of
/// the other ranks with an error.
///
/// Tensors are on the CPU, or on the GPU of [`Group::with_gpu`]; in a group of one on any device. `name` is the tensor or unit that a
/// call serves, the same on all ranks, for messages. A call starts when it is made and ends in [`Pending::wait`](super::Pending::wait), which
/// returns the tensor that it writes; several may be in progress. Tensors that are written must have no other views.
///
/// Calls error with [`Error::Placement`] for tensors elsewhere and with [`Error::Value`] for types and sizes that do not
/// fit; those are found before anything is sent. They and their `wait` error with [`Error::Ranks`] when the job has failed.
pub struct Group {
    pub(super) endpoint: Arc<Endpoint>,
    pub(super) members: Arc<Members>,
    /// This rank in the group.
    rank: usize,
    /// Calls with GPU tensors, of several ranks.
    pub(super) gpu: Option<Gpu>,
}

impl Group {
    /// The group of all ranks of a job.
    pub(super) fn world(endpoint: Endpoint) -> Group {
        let (rank, members) = (endpoint.rank, Members::world(endpoint.size));
        Group { endpoint: Arc::new(endpoint), members: Arc::new(members), rank, gpu: None }
    }

    /// This rank, from 0 to `size - 1`.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Ranks of the group.
    pub fn size(&self) -> usize {
        self.members.ranks.len()
    }

    /// The name that [`Group::split`] was given, for messages; `world` for the group of all ranks.
    pub fn name(&self) -> &str {
        &self.members.name
    }

    /// The ranks of the group, numbered as in the job, in the order of the group.
    pub fn ranks(&self) -> &[usize] {
        &self.members.ranks
    }

    /// Divides the group: ranks that give the same `colour` form a group, ordered by `key` and then by their rank here. All ranks of this
    /// group call it together; those of one colour give the same `name`. This is `MPI_Comm_split`.
    ///
    /// A group with GPUs makes groups with the same GPUs. The NCCL communicator of each is made in its first call with GPU tensors, which must
    /// not be captured in a graph.
    ///
    /// In a dry run the other ranks are taken to give the same colour and key.
    pub fn split(&self, name: &str, colour: usize, key: usize) -> Result<Group> {
        self.split_by(name, |_| (colour, key))
    }

    /// [`Group::split`] where `place` gives colour and key of each rank of this group.
    pub(super) fn split_by(&self, name: &str, place: impl Fn(usize) -> (usize, usize)) -> Result<Group> {
        let (endpoint, rank) = (&self.endpoint, self.endpoint.rank);
        let members = if endpoint.link.is_alone() {
            let places: Vec<_> = (0..self.size()).map(place).collect();
            let own = self.members.divide(&places).into_iter().find(|ranks| ranks.contains(&rank));
            let ranks = own.expect("each rank has a colour");
            Members { id: endpoint.number_group(), name: name.into(), ranks }
        } else {
            let place = encode_place(place(self.rank));
            let reply = self.start(Call::control(Op::Split, name), place).wait()?;
            let members = Members::decode(name, &reply);
            members.ok_or_else(|| {
                self.desync(format!("split `{name}` gave no group; start all ranks with the same binary"))
            })?
        };
        let rank = members.place(rank);
        let rank = rank.ok_or_else(|| self.desync(format!("split `{name}` gave a group without this rank")))?;
        let gpu = self.gpu.as_ref().filter(|_| members.ranks.len() > 1).map(Gpu::of_split);
        Ok(Group { endpoint: endpoint.clone(), members: Arc::new(members), rank, gpu })
    }

    /// Calls and bytes sent by this rank in all its groups since the start or the last reset.
    pub fn traffic(&self) -> Traffic {
        *self.endpoint.traffic()
    }

    /// Sets the counters of [`Group::traffic`] to zero and returns what they were.
    pub fn reset_traffic(&self) -> Traffic {
        mem::take(&mut *self.endpoint.traffic())
    }

    /// The last 64 calls of this rank in all its groups, oldest first, as "17: all_gather `layers.3` of 512 bfloat16" or "3 of group `tensor`:
    /// barrier `save`".
    pub fn recent(&self) -> Vec<String> {
        self.endpoint.history.recent()
    }

    /// Waits until all ranks have called it.
    pub fn barrier(&self, what: &str) -> Result<()> {
        self.start(Call::control(Op::Barrier, what), Vec::new()).wait().map(drop)
    }

    /// The `bytes` of all ranks, in rank order; for small data of the host, such as decisions. Lengths may differ.
    pub fn agree(&self, what: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let reply = self.start(Call::control(Op::Agree, what), bytes.to_vec()).wait()?;
        let parts = unpack(&reply).filter(|parts| parts.len() == self.size());
        parts
            .ok_or_else(|| self.desync(format!("agree `{what}` gave something else than {} byte strings", self.size())))
    }

    /// Errors on all ranks unless their GPUs have started the same collectives and messages since the last call, in all groups; `what` is the
    /// work that they belong to. To be called on the group of all ranks, before the host waits for that work: NCCL does not compare calls, and
    /// waits for ever where they differ. Without GPUs nothing is compared, since all calls are.
    pub fn compare_gpu_calls(&self, what: &str) -> Result<()> {
        if self.gpu.is_none() { Ok(()) } else { self.compare_calls_so_far(what) }
    }

    pub(super) fn compare_calls_so_far(&self, what: &str) -> Result<()> {
        let mine = serde_json::to_vec(&self.endpoint.history.take_gpu_calls()).expect("calls are plain data");
        let all = self.agree(&format!("collectives of GPUs in {what}"), &mine)?;
        let read = |calls: &Vec<u8>| Some(serde_json::from_slice::<Calls>(calls).ok()?.into_iter().collect());
        let Some(all) = all.iter().map(read).collect::<Option<Vec<BTreeMap<_, _>>>>() else {
            return Err(self.desync(format!("calls of GPUs in {what} are not those of this version")));
        };
        let Some(difference) = difference(&self.members.ranks, &all) else { return Ok(()) };
        let fault = Fault::Desync(format!("in {what}, {difference}"));
        self.endpoint.link.reporter().fail(fault.clone());
        Err(fault.error(what, self.recent()))
    }

    /// Passes requests to stop on to all ranks of the job.
    pub fn stopper(&self) -> Stopper {
        self.endpoint.stopper()
    }

    /// From here on until [`Group::finish`] or until this rank leaves its job, a fault calls `notify` and, if the main thread has not left
    /// two seconds later, ends this process with `exit_code`, its sentence on standard error: the main thread may wait for a GPU for
    /// ever, or compute for long. For ranks that are processes.
    pub fn watch(&self, exit_code: u8, notify: impl Fn() + Send + 'static) -> Result<()> {
        self.endpoint.watch(exit_code, notify)
    }

    /// Waits until all ranks have called it, after their last call in any group: they may leave then in any order. A later fault no longer ends
    /// this process. To be called on the group of all ranks.
    pub fn finish(&self) -> Result<()> {
        self.barrier("the end")?;
        self.endpoint.disarm();
        Ok(())
    }

    /// The call over `buffer`, checked.
    pub(super) fn call(&self, op: Op, name: &str, buffer: &Tensor) -> Result<Call> {
        let call = Call { op, name: name.into(), dtype: Some(buffer.dtype()), elements: buffer.len() };
        self.check_device(&call.title(), buffer)?;
        call.check(&self.members).map_err(Error::Value)?;
        Ok(call)
    }

    /// The rank of the job that is `rank` of this group; an error begins with `what`.
    pub(super) fn rank_of(&self, rank: usize, what: impl Fn() -> String) -> Result<usize> {
        let size = self.size();
        let error = || Error::Value(format!("{} rank {rank}: the group has {size} ranks", what()));
        self.members.ranks.get(rank).copied().ok_or_else(error)
    }

    pub(super) fn start(&self, call: Call, bytes: Vec<u8>) -> Started {
        let Endpoint { link, history, rank, .. } = &*self.endpoint;
        let start = |number| link.start(&self.members, number, call.clone(), bytes);
        let (numbered, reply) = history.record(&self.members, *rank, &call, start);
        self.endpoint.traffic().count(&call, self.size());
        Started { call: numbered, reply, history: history.clone() }
    }

    pub(super) fn check_device(&self, what: &str, tensor: &Tensor) -> Result<()> {
        match tensor.device() {
            Device::Cpu => Ok(()),
            _ if self.size() == 1 || self.endpoint.dry => Ok(()),
            Device::Cuda(gpu) if self.has_gpu(gpu) => match tensor.memory_kind() {
                MemoryKind::Device => Ok(()),
                MemoryKind::Host => {
                    let (expected, got) = ("device memory".into(), "host memory".into());
                    Err(Error::Placement { what: what.into(), expected, got })
                }
            },
            Device::Cuda(_) => tensor.expect_device(what, &Device::Cpu),
            Device::DryCpu(_) => Err(Error::Value(format!("{what}: a dry run has no data to send"))),
        }
    }

    fn desync(&self, message: String) -> Error {
        Error::Ranks { fault: RankFault::Desync, message, recent: self.recent() }
    }
}

/// Whether a tensor is not on the CPU.
pub(super) fn is_elsewhere(tensor: &Tensor) -> bool {
    !matches!(tensor.device(), Device::Cpu)
}

/// The first channel in which the calls of its ranks differ, in words; `all` has the calls of each of `ranks`.
fn difference(ranks: &[usize], all: &[BTreeMap<Channel, GpuCalls>]) -> Option<String> {
    let of_rank: BTreeMap<_, _> = ranks.iter().zip(all).collect();
    all.iter().flatten().find_map(|(channel, calls)| {
        let started = |rank: &usize| {
            let own = of_rank.get(rank)?.get(channel).cloned();
            Some((*rank, own.unwrap_or_else(|| GpuCalls::none(calls))))
        };
        let started: Vec<_> = calls.ranks.iter().filter_map(started).collect();
        let (first, expected) = started.first()?;
        let (other, different) = started.iter().find(|(_, other)| other != expected)?;
        let (different, expected) = (different.describe(), expected.describe());
        Some(format!("rank {other} has started {different} of its GPU, and rank {first} {expected}"))
    })
}
