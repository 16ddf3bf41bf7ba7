//! The actions of a program.

use ottava_parallel::{Message, Part};
use serde::Serialize;
use std::fmt::{self, Display};

/// One action of a program. Stages of a process and micro-batches are numbered from 0.
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
    /// Computes the losses after forward of the last stage. In training, also computes their gradient, from which backward starts.
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
        /// The products that backward computes.
        part: Part,
        /// Whether backward starts to reduce the gradients of each unit over ranks as soon as it has added to them.
        reduces: bool,
    },
    /// Sends the output of a stage to the rank with the next stage, or the gradient by its input to the rank with the preceding stage.
    Send {
        /// The message to send.
        message: Message,
        /// The stage that has computed the message.
        stage: usize,
        /// The micro-batch.
        micro_batch: usize,
    },
    /// Receives the message of a stage of another rank.
    Receive {
        /// The message to receive.
        message: Message,
        /// The stage that reads the message.
        stage: usize,
        /// The micro-batch.
        micro_batch: usize,
    },
    /// Copies the losses to the results of the step.
    StoreLosses {
        /// The micro-batch.
        micro_batch: usize,
    },
    /// Waits for the reductions that backward has started. Reduces the gradients of norms and biases, and the amaxes of casts.
    Reduce,
    /// Adds the gradients of the embedding and of the head if they share their weight. The embedding is in the first stage, and the head in the last.
    SumTied,
    /// Computes the norm of all gradients.
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
