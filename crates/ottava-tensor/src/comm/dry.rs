//! A dry run of one rank of a job, for plans. The other ranks do not exist.

use super::call::{Call, Op};
use super::combine::{Bytes, combine};
use super::endpoint::Endpoint;
use super::group::Group;
use super::hub::Observer;
use super::limits::Limits;
use super::link::{Link, NoReporter, Reporter};
use super::members::Members;
use super::round::Reply;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

/// A job whose other ranks are assumed to send the same data as this rank. Received messages are zeros.
struct Dry {
    rank: usize,
}

impl Link for Dry {
    fn start(&self, group: &Members, _: u64, call: Call, bytes: Vec<u8>) -> Receiver<Reply> {
        let (answer, reply) = channel();
        let own = match call.op {
            Op::Send { .. } => Bytes::from(Vec::new()),
            Op::Receive { .. } => Bytes::from(vec![0; call.buffer_bytes()]),
            _ => {
                let place = group.place(self.rank).expect("a rank calls its own groups");
                combine(&call, &vec![bytes; group.ranks.len()]).swap_remove(place)
            }
        };
        answer.send(Ok(own)).expect("the receiver is held here");
        reply
    }

    fn is_alone(&self) -> bool {
        true
    }

    fn observe(&self, _: Observer) {}

    fn reporter(&self) -> Arc<dyn Reporter> {
        Arc::new(NoReporter)
    }
}

impl Group {
    /// Returns rank `rank` of a group of `size` for a dry run. Tensors are on a device in a dry run, and nothing is sent. [`Group::traffic`] counts
    /// the calls and bytes that a real run would send.
    pub fn dry(rank: usize, size: usize) -> Group {
        let mut endpoint = Endpoint::new(rank, size, Box::new(Dry { rank }), Limits::default());
        endpoint.dry = true;
        Group::world(endpoint)
    }
}
