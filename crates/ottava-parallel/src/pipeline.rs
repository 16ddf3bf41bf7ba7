//! The place of a rank in the pipeline, and its messages to the neighbouring ranks.
//!
//! Each direction between two neighbours has a separate group for activations or gradients, and on GPUs a separate stream. So messages of one
//! direction never wait for messages of another direction. The order of the messages of each direction is tested (`schedule/tests.rs`).

use crate::schedule::Message;
use crate::sent::SentActivations;
use ottava_common::error::Result;
use ottava_tensor::comm::{Axis, Group, Mesh, Pending, Reduce};
use ottava_tensor::{DType, Device, Tensor};

/// A rank's place among the ranks that divide the layers, and the groups of its messages.
pub struct Pipeline {
    rank: usize,
    size: usize,
    /// The channels of activations and of gradients: from the rank that sends to this rank, and from this rank to the rank that reads.
    channels: Vec<[Channel; 2]>,
    /// The group of the first and the last rank.
    ends: Option<Group>,
}

/// The places of this rank's stages in a vector with the values of all stages, in the order of the model.
pub(super) struct StagePlaces {
    /// The start of each stage of this rank.
    pub starts: Vec<usize>,
    /// The number of values of all stages.
    pub total: usize,
}

impl StagePlaces {
    /// Returns the places of rank `rank`. `counts` holds the number of values of each stage, by rank and stage.
    pub(super) fn new(rank: usize, counts: &[Vec<u64>]) -> StagePlaces {
        let (mut starts, mut total) = (Vec::new(), 0);
        for stage in 0..counts[rank].len() {
            for (other, counts) in counts.iter().enumerate() {
                starts.extend((other == rank).then_some(total));
                total += counts[stage] as usize;
            }
        }
        StagePlaces { starts, total }
    }
}

/// A direction of messages between two ranks.
struct Channel {
    group: Group,
    /// The index of the other rank in the group.
    peer: usize,
}

impl Pipeline {
    /// Creates the pipeline of the ranks of `mesh`. All of them call it. This rank trains on `device`.
    pub(super) fn new(mesh: &Mesh, device: &Device) -> Result<Pipeline> {
        let (rank, size) = (mesh.coordinate(Axis::Pipeline), mesh.size(Axis::Pipeline));
        let (mut channels, mut ends) = (Vec::new(), None);
        if size > 1 {
            let all = mesh.group(&[Axis::Pipeline]);
            for message in [Message::Activation, Message::Gradient] {
                let (mut from, mut to) = (None, None);
                for sender in 0..size {
                    let reader = match message {
                        Message::Activation => (sender + 1) % size,
                        Message::Gradient => (sender + size - 1) % size,
                    };
                    let name = format!("pipeline: {} of {sender}", message.as_str());
                    let group = pair(all, &name, [sender, reader])?;
                    let first = 2 * message as usize;
                    let probe = || Tensor::zeros(device, &[1], DType::F32);
                    // On GPUs, the first message of a channel creates a communicator, for which both ranks wait. All ranks reach the
                    // channels in the same order here.
                    if rank == sender {
                        let channel = Channel::new(group.on_channel(first), all, reader);
                        channel.group.send("first", channel.peer, &probe()?)?.wait()?;
                        to = Some(channel);
                    } else if rank == reader {
                        let channel = Channel::new(group.on_channel(first + 1), all, sender);
                        channel.group.receive("first", channel.peer, probe()?)?.wait()?;
                        from = Some(channel);
                    }
                }
                channels.extend(from.zip(to).map(|(from, to)| [from, to]));
            }
            ends =
                Some(pair(all, "pipeline: first and last", [0, size - 1])?).filter(|_| [0, size - 1].contains(&rank));
        }
        Ok(Pipeline { rank, size, channels, ends })
    }

    /// Returns the index of this rank, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns the sum of `gradient` over the first and the last rank. Only these two ranks call it.
    pub fn sum_of_ends(&self, name: &str, gradient: Tensor) -> Result<Tensor> {
        match &self.ends {
            Some(ends) => Ok(ends.all_reduce(name, Reduce::Sum, gradient)?.wait()?),
            None => Ok(gradient),
        }
    }
}

impl Channel {
    fn new(group: Group, all: &Group, peer: usize) -> Channel {
        let peer = all.ranks()[peer];
        let peer = group.ranks().iter().position(|&rank| rank == peer).expect("both ranks are in their group");
        Channel { group, peer }
    }
}

/// Returns the group of two ranks of `all`. Other ranks get another group. All ranks call it.
fn pair(all: &Group, name: &str, ranks: [usize; 2]) -> Result<Group> {
    let colour = if ranks.contains(&all.rank()) { 0 } else { 1 + all.rank() };
    Ok(all.split(name, colour, all.rank())?)
}

/// The messages of a pass through the pipeline.
pub struct Messages<'a> {
    pipeline: &'a Pipeline,
    format: SentActivations,
    /// The last sends of activations and of gradients.
    sent: [Option<Pending>; 2],
}

impl<'a> Messages<'a> {
    /// Creates the messages of a pass, before the first message.
    pub(super) fn new(pipeline: &'a Pipeline, format: SentActivations) -> Messages<'a> {
        Messages { pipeline, format, sent: [None, None] }
    }

    /// Starts to send `tensor` to the rank that reads `message` next. On a GPU, later work waits for the previous send of the same
    /// direction, so at most two sends are in progress.
    pub fn send(&mut self, message: Message, name: &str, tensor: &Tensor) -> Result<()> {
        let [_, Channel { group, peer }] = &self.pipeline.channels[message as usize];
        let pending = group.send(name, *peer, &self.format.encode(name, tensor)?)?;
        if let Some(before) = self.sent[message as usize].replace(pending) {
            before.wait()?;
        }
        Ok(())
    }

    /// Receives `message` into a tensor like `tensor`.
    pub fn receive(&mut self, message: Message, name: &str, tensor: Tensor) -> Result<Tensor> {
        let [Channel { group, peer }, _] = &self.pipeline.channels[message as usize];
        let (shape, elements, dtype) = (tensor.shape().to_vec(), tensor.len(), tensor.dtype());
        let received = group.receive(name, *peer, self.format.place(name, tensor)?)?.wait()?;
        Ok(self.format.decode(received, elements, dtype)?.reshape(&shape)?)
    }
}
