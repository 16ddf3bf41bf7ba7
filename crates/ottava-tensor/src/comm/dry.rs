//! One rank of a group whose other ranks do not exist, for plans.

use super::Group;
use super::call::Call;
use super::combine::combine;
use super::hub::{Observer, Reply};
use super::limits::Limits;
use super::link::{Link, NoReporter, Reporter};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

/// All ranks send what this one sends.
struct Dry {
    rank: usize,
    size: usize,
}

impl Link for Dry {
    fn start(&self, _: u64, call: Call, bytes: Vec<u8>) -> Receiver<Reply> {
        let (answer, reply) = channel();
        let mut answers = combine(&call, &vec![bytes; self.size]);
        answer.send(Ok(answers.swap_remove(self.rank))).expect("the receiver is held here");
        reply
    }

    fn observe(&self, _: Observer) {}

    fn reporter(&self) -> Arc<dyn Reporter> {
        Arc::new(NoReporter)
    }
}

impl Group {
    /// Rank `rank` of a group of `size` for a dry run: tensors are those of a device in a dry run, nothing is sent, and
    /// [`Group::traffic`] counts what would be.
    pub fn dry(rank: usize, size: usize) -> Group {
        let mut comm = Group::new(rank, size, Box::new(Dry { rank, size }), Limits::default());
        comm.dry = true;
        comm
    }
}
