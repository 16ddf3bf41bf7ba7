//! Ranks that are threads of one process.

use super::call::Call;
use super::endpoint::Endpoint;
use super::fault::{Fault, this_process};
use super::group::Group;
use super::hub::{Hub, Observer};
use super::limits::Limits;
use super::link::{Link, Reporter};
use super::members::Members;
use super::round::{Arrival, Reply};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

/// A rank's access to a hub in its own process.
pub(super) struct Local {
    pub hub: Arc<Hub>,
    pub rank: usize,
}

impl Link for Local {
    fn start(&self, group: &Members, number: u64, call: Call, bytes: Vec<u8>) -> Receiver<Reply> {
        let (answer, reply) = channel();
        // Nobody receives the answer of a dropped `Pending`.
        let sink = Box::new(move |reply| drop(answer.send(reply)));
        self.hub.submit(Arrival { rank: self.rank, call, bytes, sink }, group.id, number);
        reply
    }

    fn observe(&self, observer: Observer) {
        self.hub.observe_any(observer);
    }

    fn reporter(&self) -> Arc<dyn Reporter> {
        self.hub.clone()
    }
}

impl Reporter for Hub {
    fn stop(&self) {
        Hub::stop(self);
    }

    fn fail(&self, fault: Fault) {
        Hub::fail(self, fault);
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.hub.lose(self.rank, None, None);
    }
}

/// Returns the groups of `size` ranks, in rank order. Move each group to a separate thread.
///
/// If a group and its splits are dropped, for example because their thread panics, open and later collectives of the other ranks return an
/// error.
///
/// ```
/// use ottava_tensor::comm::{Reduce, threads};
/// use ottava_tensor::{Device, Tensor};
///
/// let ranks = threads::group(3).into_iter().map(|group| {
///     std::thread::spawn(move || {
///         let x = Tensor::from_slice(&Device::Cpu, &[1], &[group.rank() as f32])?;
///         group.all_reduce("example", Reduce::Sum, x)?.wait()?.to_vec::<f32>()
///     })
/// });
/// for rank in ranks.collect::<Vec<_>>() {
///     assert_eq!(rank.join().unwrap()?, [3.0]);
/// }
/// # Ok::<(), ottava_tensor::Error>(())
/// ```
pub fn group(size: usize) -> Vec<Group> {
    group_within(size, Limits::default())
}

/// Returns [`group`] with these limits. A progress report counts for all ranks, because they are one process.
pub fn group_within(size: usize, limits: Limits) -> Vec<Group> {
    let hub = Arc::new(Hub::new(vec![this_process(); size], size));
    hub.enforce(limits.collective);
    let link = |rank| Box::new(Local { hub: hub.clone(), rank });
    (0..size).map(|rank| Group::world(Endpoint::new(rank, size, link(rank), limits))).collect()
}
