//! The actions of a program.

use ottava_parallel::{Message, Part};
use serde::Serialize;
use std::fmt::{self, Display};

/// One action of a program. The stages of a process and the micro-batches count from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "action", rename_all = "snake_case")]
pub enum Action {
    /// Forward of a stage. It reads the token ids of the micro-batch, or the output of the preceding stage.
    Forward {
        /// The stage.
        stage: usize,
        /// The micro-batch.
        micro_batch: usize,
    },
    /// The losses, after forward of the last stage; in training also their gradient, from which backward starts.
    Loss {
        /// The micro-batch.
        micro_batch: usize,
    },
    /// Backward of a stage. It consumes the activations that forward saved, and adds to the gradients of the stage's parameters.
    Backward {
        /// The stage.
        stage: usize,
        /// The micro-batch.
        micro_batch: usize,
        /// The products that it computes.
        part: Part,
        /// Whether it starts to reduce the gradients of each unit over ranks as soon as it has added to them.
        reduces: bool,
    },
    /// Sends the output of a stage to the rank with the next one, or the gradient by its input to the rank with the preceding one.
    Send {
        /// What it sends.
        message: Message,
        /// The stage that has computed it.
        stage: usize,
        /// The micro-batch.
        micro_batch: usize,
    },
    /// Receives what a stage of another rank sends.
    Receive {
        /// What it receives.
        message: Message,
        /// The stage that reads it.
        stage: usize,
        /// The micro-batch.
        micro_batch: usize,
    },
    /// Copies the losses to the results of the step.
    StoreLosses {
        /// The micro-batch.
        micro_batch: usize,
    },
    /// Waits for the reductions that backward has started, and reduces the gradients of norms and biases and the amaxes of casts.
    Reduce,
    /// Adds the gradients of an embedding and of a head that share their weight, which the first and the last stage have.
    SumTied,
    /// The norm of all gradients.
    Norm,
    /// Updates scales, clips the gradients, updates and casts the weights, and drops the gradients.
    Update,
}

impl Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Action::Forward { stage, micro_batch } => write!(f, "forward of stage {stage}, micro-batch {micro_batch}"),
            Action::Loss { micro_batch } => write!(f, "loss of micro-batch {micro_batch}"),
            Action::Backward { stage, micro_batch, part, reduces } => {
                let reduces = if *reduces { ", reducing its gradients over ranks" } else { "" };
                let part = match part {
                    Part::Both => "backward",
                    Part::Dgrad => "dgrad",
                    Part::Wgrad => "wgrad",
                };
                write!(f, "{part} of stage {stage}, micro-batch {micro_batch}{reduces}")
            }
            Action::Send { message, stage, micro_batch } => {
                write!(f, "send the {} of stage {stage}, micro-batch {micro_batch}", message.as_str())
            }
            Action::Receive { message, stage, micro_batch } => {
                write!(f, "receive the {} for stage {stage}, micro-batch {micro_batch}", message.as_str())
            }
            Action::StoreLosses { micro_batch } => write!(f, "store the losses of micro-batch {micro_batch}"),
            Action::Reduce => write!(f, "reduce the remaining gradients and the amaxes of casts over ranks"),
            Action::SumTied => write!(f, "add the gradients of embedding and head, which share their weight"),
            Action::Norm => write!(f, "norm of the gradients"),
            Action::Update => write!(f, "update scales and weights, and cast the weights"),
        }
    }
}
